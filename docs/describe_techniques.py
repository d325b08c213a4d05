"""Write the cards of all techniques, and the page ``docs/techniques.md``, from the code of the techniques.

    python docs/describe_techniques.py

A card has what a class states about itself, the sources that its docstring names, and what ladders measured of it.
"""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from lightning_fasttrain.bench.ladder.results import TIME_WORTH, Climbed
from lightning_fasttrain.cli.technique_cards import FILE, TechniqueCard, read_cards
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.planner.candidates import config_of_call, known_techniques, public_path
from lightning_fasttrain.strategy import FSDP2Strategy
from lightning_fasttrain.technique import Exactness, Technique

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "lightning_fasttrain" / "cli" / FILE
PAGE = ROOT / "docs" / "techniques.md"
# Machine → its ladder; the first one is in the tables.
LADDERS = {"2 CPU cores": "ladder_cpu.json", "H200": "ladder_h200.json"}

_PAGE = """\
<!-- Generated: python docs/describe_techniques.py -->

# Techniques

The table lists every technique of the package; below it, a card for each gives details. In the code examples `ft` is
`lightning_fasttrain` and `L` is `lightning`. `fasttrain techniques NAME` prints one card, and finds techniques by words
such as `out of memory`; with `--here` it states whether one has any effect on this machine.
[Exactness](exactness.md) defines the three classes.
"""
_MEASURED = """\
The last columns are from runs of `fasttrain ladder`, which [Results](results.md) describes: time and peak memory as
factors of the rung below. Times marked ≈ are within the variation of the same program there.
"""


def describe(technique: type[Technique]) -> TechniqueCard:
    """Return the card of a technique.

    Example:
        >>> from lightning_fasttrain.profiling import StepMeter
        >>> describe(StepMeter).made
        'ft.StepMeter(warmup=10)'
    """
    made, config = _written_out(technique)
    summary = " ".join((inspect.getdoc(technique) or "").partition("\n\n")[0].split())
    return TechniqueCard(
        name=technique.__name__,
        path=public_path(technique),
        subpackage=technique.__module__.split(".")[1],
        summary=as_markdown(summary),
        effect=technique.effect,
        when=technique.when,
        exactness=technique.exactness.value.replace("_", " "),
        promise=_promise(technique),
        arguments=_arguments(technique),
        made=made,
        config=config,
        loop=technique.in_a_loop,
        excluded=[list(conflict) for conflict in conflicts_of(technique)],
        measured=_measured(technique.__name__),
        source=source_of(technique),
    )


def _arguments(technique: type[Technique]) -> str:
    """Return the arguments of its constructor with their defaults, without annotations."""
    parameters = list(inspect.signature(technique.__init__).parameters.values())[1:]
    plain = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])
    return str(plain)[1:-1]


def _measured(name: str) -> dict[str, dict[str, list[str]]]:
    """Return what the ladders measured: machine → variant → time and peak memory."""
    found = {machine: read_measurements(ROOT / "examples" / "results" / file) for machine, file in LADDERS.items()}
    return {machine: effects[name] for machine, effects in found.items() if name in effects}


def source_of(technique: type[Technique]) -> str:
    """Return the paper or reference implementation that a docstring names; references to other docstrings are followed.

    Example:
        >>> from lightning_fasttrain.finetune import QLoRA
        >>> source_of(QLoRA)
        'Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.'
    """
    source, described = _written_source(technique), technique
    while (reference := re.match(r"See :\w+:`~?([\w.]+)`\. ?", source)) is not None:
        module, _, name = reference[1].rpartition(".")
        described = getattr(importlib.import_module(module or described.__module__), name)
        source = f"{_written_source(described)} {source[reference.end() :]}".strip()
    return source


def _written_source(described: object) -> str:
    _, _, source = (inspect.getdoc(described) or "").partition("\nSource:\n")
    return " ".join(source.partition("\n\n")[0].split())


def conflicts_of(technique: type[Technique]) -> Iterator[tuple[str, str, str]]:
    """Yield the techniques it cannot be combined with, declared by either of the two: name, reason, alternative.

    Example:
        >>> from lightning_fasttrain.micro_batching import MicroBatching
        >>> "OptimizerInBackward" in [other for other, _, _ in conflicts_of(MicroBatching)]
        True
    """
    others = [other for other in known_techniques() if other is not technique]
    for conflict in technique.conflicts():
        if isinstance(conflict.other, type):
            yield conflict.other.__name__, conflict.why, conflict.way_out
        else:
            for other in [*others, FSDP2Strategy]:  # which says what it does as techniques do
                if conflict.may_name(other):
                    yield other.__name__, conflict.why, conflict.way_out
    for other in others:
        for conflict in other.conflicts():
            if conflict.may_name(technique) and not conflict.may_name(other):
                yield other.__name__, conflict.why, conflict.way_out


def _example(technique: type[Technique]) -> ast.Call:
    """Return the call in its docstring that makes one."""
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(technique) or ""):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == technique.__name__:
                return ast.Call(ast.Name(technique.__name__), node.args, node.keywords)
    raise LookupError(f"the docstring of {technique.__name__} makes none")


def _written_out(technique: type[Technique]) -> tuple[str, str | None]:
    """Return the docstring's example as Python and as YAML for LightningCLI; None if YAML cannot represent it."""
    example, path = _example(technique), public_path(technique)
    made = f"ft.{path.removesuffix(technique.__name__)}{ast.unparse(example)}"
    try:
        config = {"trainer": {"callbacks": [config_of_call(example)]}}
    except ValueError:
        return made, None
    return made, yaml.safe_dump(config, sort_keys=False, width=1000)


def _promise(technique: type[Technique]) -> str:
    """Return the class of exactness with its bound.

    Example:
        >>> from lightning_fasttrain.model import ActivationCheckpointing
        >>> _promise(ActivationCheckpointing)
        'exact'
    """
    word = technique.exactness.value.replace("_", " ")
    if technique.exactness is Exactness.TOLERANCE:
        return f"{word}: loss and gradients of a float32 step differ by at most {technique.bound:g}, relative"
    return f"{word}, bitwise" if technique.bitwise else word


@functools.cache
def read_measurements(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return what a ladder measured of each technique that a rung changed alone: technique → variant → factors.

    The factors are of time and peak memory, relative to the rung below; ≈ marks times within the ladder's variation. A
    variant is the rung's name, or empty if the technique has a single one.
    """
    ladder = Climbed.read(path)
    found: dict[str, dict[str, list[str]]] = {}
    noise = max(TIME_WORTH, ladder.noise["time"] or 0.0)
    below = ladder.rungs[0]
    for rung in ladder.rungs[1:]:
        before = below.state["callbacks"]
        new = [name for name, arguments in rung.state["callbacks"].items() if before.get(name) != arguments]
        if rung.error is None and len(new) == 1:
            time, memory = rung.step_ms / below.step_ms, rung.peak_mib / below.peak_mib
            factors = [f"{'≈' if abs(time - 1) <= noise else '×'}{time:.2f}", f"×{memory:.2f}"]
            found.setdefault(new[0], {})[rung.name] = factors
        below = rung if rung.carried else below
    for name, rungs in found.items():
        if len(rungs) == 1:
            found[name] = {"": next(iter(rungs.values()))}
    return found


def markdown_table(cards: Sequence[TechniqueCard]) -> str:
    """Return the techniques as a Markdown table, without a trailing newline."""
    head = ["technique", "what it does", "exactness", "in a Fabric or bare loop", *map(_heading, LADDERS)]
    lines = [head, ["---"] * len(head)]
    for card in cards:
        measured = [_list_factors(card, machine) for machine in LADDERS]
        lines.append([f"`{card.path}`", card.effect, card.exactness, _as_code(card.loop), *measured])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_card(card: TechniqueCard) -> str:
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
    for machine in card.measured:
        paragraphs.append(f"**Measured (time, peak memory, {machine}):** {_list_factors(card, machine)}.")
    paragraphs.append(f"**Source:** {as_markdown(card.source)}")
    return "\n\n".join(paragraphs)


def markdown_page(cards: Sequence[TechniqueCard]) -> str:
    """Return the table of techniques followed by one card for each, as a Markdown page with a trailing newline."""
    # The anchor is the one that both GitHub and MkDocs derive from a card's heading.
    table = re.sub(
        r"^\| `([\w.]+)`",
        lambda name: f"| [`{name[1]}`](#{name[1].replace('.', '').lower()})",
        markdown_table(cards),
        flags=re.MULTILINE,
    )
    page = [_PAGE, _MEASURED]
    page.append(f"<!-- techniques -->\n{table}\n<!-- /techniques -->\n")
    for subpackage, members in itertools.groupby(cards, lambda card: card.subpackage):
        page.append(f"## Techniques in `{subpackage}`\n")
        page += [f"{markdown_card(card)}\n" for card in members]
    return "\n".join(page)


def _heading(machine: str) -> str:
    return f"time, peak memory: {machine}"


def _list_factors(card: TechniqueCard, machine: str) -> str:
    variants = card.measured.get(machine, {})
    return "; ".join(" ".join([*filter(None, [name]), ", ".join(factors)]) for name, factors in variants.items())


def as_markdown(text: str) -> str:
    """Convert the reStructuredText roles and literals of a docstring to Markdown.

    Example:
        >>> as_markdown("see :func:`~lightning_fasttrain.micro_batching.split_batch` and ``n``")
        'see `split_batch` and `n`'
    """
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def _as_code(text: str) -> str:
    return text if text.startswith("nothing") else f"`{text}`"


def write_all() -> None:
    """Write the cards and the page."""
    cards = [asdict(describe(technique)) for technique in known_techniques()]
    write_atomic(CARDS, (json.dumps(cards, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(PAGE, markdown_page(read_cards()).rstrip("\n") + "\n")


if __name__ == "__main__":
    write_all()
