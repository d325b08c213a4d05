"""Show what each technique states about itself, in a table and on cards, without importing it.

``technique_cards.json`` has the cards, written from the classes by ``describe_techniques``; so no card waits for torch.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from lightning_fasttrain.core.messages import ReportTable, output_width, wrap

FILE = "technique_cards.json"
_CODE = ("Trainer", "mixin", "loop", "YAML")  # lines of a card that are not to be broken

_PAGE = """\
<!-- Generated: fasttrain techniques --markdown --ladder examples/results/ladder_cpu.json > docs/techniques.md -->

# Techniques

The table lists every technique of the package; below it, a card for each gives details. In the code examples `ft` is
`lightning_fasttrain` and `L` is `lightning`. `fasttrain techniques NAME` prints one card; with `--here` it states
whether the technique has any effect on this machine. [Exactness](exactness.md) defines the three classes.
"""
_MEASURED = """\
The column "measured" is from a run of `fasttrain ladder`, which [Results](results.md) describes: time and peak memory
as factors of the rung below. Times marked ≈ are within the variation of the same program there, {noise:.0%}.
"""
_FACTORS = (
    "Time and peak memory: as factors of the ladder's rung below. Times marked ≈ are within the variation of the same "
    "program there, {noise:.0%}."
)


@dataclass(frozen=True)
class TechniqueCard:
    """Statements of a technique about itself.

    Attributes:
        name: of the class.
        path: under which users find it, below ``lightning_fasttrain``.
        subpackage: it is in.
        summary: first paragraph of its docstring, as Markdown.
        effect: what is done.
        when: when it pays.
        exactness: class of exactness.
        promise: class of exactness with its bound.
        made: Python that makes one.
        config: YAML for LightningCLI that makes one; None if YAML cannot represent it.
        loop: use in a Fabric or bare loop.
        excluded: techniques that it cannot be combined with: name, reason and alternative of each.
        source: paper or reference implementation.
    """

    name: str
    path: str
    subpackage: str
    summary: str
    effect: str
    when: str
    exactness: str
    promise: str
    made: str
    config: str | None
    loop: str
    excluded: list[list[str]]
    source: str


@dataclass(frozen=True)
class Measurements:
    """Effects of single techniques, measured by a ladder.

    Attributes:
        factors: technique → time and peak memory, as factors of the rung below.
        noise: variation of the time of one program there, relative.
    """

    factors: Mapping[str, str]
    noise: float


def read_cards() -> list[TechniqueCard]:
    """Return the cards of all techniques, one subpackage after another.

    Example:
        >>> [card.name for card in read_cards()][:2]
        ['MicroBatching', 'PaddingFree']
    """
    written = resources.files("lightning_fasttrain.cli").joinpath(FILE).read_text()
    return [TechniqueCard(**fields) for fields in json.loads(written)]


def as_text(card: TechniqueCard, measured: Measurements | None = None, idle: str | None = None) -> str:
    """Return a card for a terminal.

    Args:
        card: of a technique.
        measured: by a ladder.
        idle: why there is nothing to do on this machine.

    Example:
        >>> offload = next(card for card in read_cards() if card.name == "ActivationOffload")
        >>> print(as_text(offload).partition("source")[0])
        ActivationOffload: saved activations are kept in host memory, or on disk
        <BLANKLINE>
        when       activations of long sequences do not fit, and recomputing them would cost more than moving them; not
                   on a CPU
        exactness  exact
        not with   CompileBlocks: CUDA graphs keep saved tensors in their own memory, so moving them would free
                   nothing. Use CompileBlocks(mode='max-autotune-no-cudagraphs').
        Trainer    L.Trainer(callbacks=[ft.ActivationOffload(min_mib=4)])
        mixin      class Net(ft.FastTrainMixin, L.LightningModule): techniques = [ft.ActivationOffload(min_mib=4)]
        loop       with model.offload_activations(model): ...
        YAML       trainer: {callbacks: [{class_path: lightning_fasttrain.ActivationOffload, init_args: {min_mib: 4}}]}
        <BLANKLINE>
    """
    factors = measured.factors.get(card.name) if measured is not None else None
    lines = [("when", card.when), ("exactness", card.exactness)]
    if idle is not None:
        lines.append(("not here", idle))
    if factors is not None:
        lines.append(("measured", f"{factors}: time, peak memory"))
    for other, why, way_out in card.excluded:
        lines.append(("not with", f"{other}: {why}. {way_out}."))
    lines += [
        ("Trainer", f"L.Trainer(callbacks=[{card.made}])"),
        ("mixin", f"class Net(ft.FastTrainMixin, L.LightningModule): techniques = [{card.made}]"),
        ("loop", card.loop),
    ]
    if card.config is not None:
        # So wide that yaml never breaks the line, which is to be pasted as it is.
        trainer = yaml.safe_load(card.config)["trainer"]
        flow = yaml.safe_dump(trainer, default_flow_style=True, sort_keys=False, width=1000)
        lines.append(("YAML", f"trainer: {flow.strip()}"))
    lines.append(("source", card.source))
    width = output_width()
    shown = [*wrap(f"{card.name}: {card.effect}", width), ""]
    for head, text in lines:
        line = f"{head:<11}{text}"
        shown += [line] if head in _CODE else wrap(line, width, hanging=" " * 11)
    return "\n".join(shown)


def as_table(cards: Sequence[TechniqueCard], measured: Measurements | None = None) -> ReportTable:
    """Return the techniques as a table for a terminal, with measured time and memory where there are some."""
    numbers = {} if measured is None else {"time": "name", "memory": "name"}
    columns = {"technique": "name", **numbers, "exactness": "name", "what it does": "prose"}
    notes = ["`fasttrain techniques NAME` prints all about one of them."]
    if measured is None:
        notes.append("With --ladder FILE, of `fasttrain ladder`, there are columns of measured time and memory.")
    else:
        notes.append(_FACTORS.format(noise=measured.noise))
    table = ReportTable(f"{len(cards)} techniques", columns, notes)
    for card in cards:
        factors = []
        if measured is not None:
            rungs = [rung.rsplit(", ", 1) for rung in measured.factors.get(card.name, ", ").split("; ")]
            factors = list(map("\n".join, zip(*rungs, strict=True)))
        table.add(card.path, *factors, card.exactness, card.effect)
    return table


def markdown_table(cards: Sequence[TechniqueCard], measured: Measurements | None = None) -> str:
    """Return the techniques as a Markdown table, without a trailing newline."""
    head = ["technique", "what it does", "exactness", "in a Fabric or bare loop"]
    if measured is not None:
        head.append("measured: time, peak memory")
    lines = [head, ["---"] * len(head)]
    for card in cards:
        line = [f"`{card.path}`", card.effect, card.exactness, _as_code(card.loop)]
        if measured is not None:
            line.append(measured.factors.get(card.name, ""))
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_card(card: TechniqueCard, measured: Measurements | None = None) -> str:
    """Return a card as a section of a Markdown page.

    Example:
        >>> meter = next(card for card in read_cards() if card.name == "StepMeter")
        >>> print(markdown_card(meter).partition("**Source:**")[0])
        ### StepMeter
        <BLANKLINE>
        Measures the time of each phase of a training step; see `StepTimer`.
        <BLANKLINE>
        **Effect:** ms per step by phase, samples/s, tokens/s.
        <BLANKLINE>
        **When it pays:** you want to know where the time goes.
        <BLANKLINE>
        **Exactness:** exact, bitwise.
        <BLANKLINE>
        ```python
        trainer = L.Trainer(callbacks=[ft.StepMeter(warmup=10)])
        <BLANKLINE>
        class Net(ft.FastTrainMixin, L.LightningModule):
            techniques = [ft.StepMeter(warmup=10)]
        ```
        <BLANKLINE>
        In a Fabric or bare loop: `profiling.StepTimer(device)`
        <BLANKLINE>
        ```yaml
        trainer:
          callbacks:
          - class_path: lightning_fasttrain.StepMeter
            init_args:
              warmup: 10
        ```
        <BLANKLINE>
        **Cannot be combined with:** nothing.
        <BLANKLINE>
        <BLANKLINE>
    """
    paragraphs = [
        f"### {card.path}",
        card.summary,
        f"**Effect:** {card.effect}.",
        f"**When it pays:** {card.when}.",
        f"**Exactness:** {card.promise}.",
        "```python\n"
        f"trainer = L.Trainer(callbacks=[{card.made}])\n\n"
        f"class Net(ft.FastTrainMixin, L.LightningModule):\n    techniques = [{card.made}]\n```",
        f"In a Fabric or bare loop: {_as_code(card.loop)}",
    ]
    if card.config is not None:
        paragraphs.append(f"```yaml\n{card.config}```")
    if card.excluded:
        excluded = [f"- `{other}`: {why}. {way_out}." for other, why, way_out in card.excluded]
        paragraphs += ["**Cannot be combined with:**", "\n".join(excluded)]
    else:
        paragraphs.append("**Cannot be combined with:** nothing.")
    if measured is not None:
        factors = measured.factors.get(card.name, "the ladder does not measure it")
        paragraphs.append(f"**Measured (time, peak memory):** {factors}.")
    paragraphs.append(f"**Source:** {as_markdown(card.source)}")
    return "\n\n".join(paragraphs)


def markdown_page(cards: Sequence[TechniqueCard], measured: Measurements | None = None) -> str:
    """Return the table of techniques followed by one card for each, as a Markdown page with a trailing newline."""
    # The anchor is the one that both GitHub and MkDocs derive from a card's heading.
    table = re.sub(
        r"^\| `([\w.]+)`",
        lambda name: f"| [`{name[1]}`](#{name[1].replace('.', '').lower()})",
        markdown_table(cards, measured),
        flags=re.MULTILINE,
    )
    page = [_PAGE]
    if measured is not None:
        page.append(_MEASURED.format(noise=measured.noise))
    page.append(f"<!-- techniques -->\n{table}\n<!-- /techniques -->\n")
    for subpackage, members in itertools.groupby(cards, lambda card: card.subpackage):
        page.append(f"## Techniques in `{subpackage}`\n")
        page += [f"{markdown_card(card, measured)}\n" for card in members]
    return "\n".join(page)


def as_markdown(text: str) -> str:
    """Convert the reStructuredText roles and literals of a docstring to Markdown.

    Example:
        >>> as_markdown("see :func:`~lightning_fasttrain.micro_batching.split_batch` and ``n``")
        'see `split_batch` and `n`'
    """
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def _as_code(text: str) -> str:
    return text if text.startswith("nothing") else f"`{text}`"
