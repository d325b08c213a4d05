"""Describe the techniques from their code, in a table and on cards: effect, exactness, and use."""

import ast
import doctest
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from lightning_fasttrain.bench.ladder.results import Climbed
from lightning_fasttrain.bench.ladder.verdict import TIME_WORTH
from lightning_fasttrain.planner.catalogue import config_of_call, known_techniques, public_path
from lightning_fasttrain.technique import Exactness, Technique
from lightning_fasttrain.technique.facts import Facts


def markdown_table(ladder: Climbed | None = None) -> str:
    """Return the techniques as a Markdown table.

    Args:
        ladder: adds what its rungs measured, against the rung below.

    Returns:
        The table, without a trailing newline.
    """
    measured = _measured_factors(ladder)
    head = ["technique", "what it does", "exactness", "in a Fabric or bare loop"]
    rows = []
    for technique in known_techniques():
        exactness = technique.exactness.value.replace("_", " ")
        rows.append([f"`{public_path(technique)}`", technique.effect, exactness, _as_code(technique.in_a_loop)])
    if measured:
        head.append("measured: time, peak memory")
        for row, technique in zip(rows, known_techniques(), strict=True):
            row.append(measured.get(technique.__name__, ""))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def card(technique: type[Technique], ladder: Climbed | None = None, facts: Facts | None = None) -> str:
    """Return everything that a technique states about itself, for a terminal.

    Args:
        technique: a class.
        ladder: as for :func:`markdown_table`.
        facts: of the machine: it says if there is nothing to do on it.

    Example:
        >>> from lightning_fasttrain.model import ActivationOffload
        >>> print(card(ActivationOffload).partition("source")[0])
        ActivationOffload: saved activations are kept in host memory, or on disk
        <BLANKLINE>
        when       activations of long sequences do not fit, and recomputing them would cost more than moving them; not
                   on a CPU
        exactness  exact
        not with   CompileBlocks: CUDA graphs keep saved tensors in their own memory, so moving them would free
                   nothing. Use CompileBlocks(mode='max-autotune-no-cudagraphs').
        Trainer    L.Trainer(callbacks=[ft.ActivationOffload(min_mib=4)])
        mixin      class Net(ft.FastTrainMixin, L.LightningModule): techniques = [ft.ActivationOffload(min_mib=4)]
        loop       with offload_activations(model): ...
        YAML       trainer: {callbacks: [{class_path: lightning_fasttrain.ActivationOffload, init_args: {min_mib: 4}}]}
        <BLANKLINE>
    """
    made, in_yaml = _written_out(technique)
    measured = _measured_factors(ladder).get(technique.__name__)
    lines = [("when", technique.when), ("exactness", technique.exactness.value.replace("_", " "))]
    idle = technique.why_not(facts) if facts is not None else None
    lines += [("not here", idle)] if idle is not None else []
    lines += [("measured", f"{measured}: time, peak memory")] if measured else []
    lines += [("not with", f"{other}: {why}. {way_out}.") for other, why, way_out in conflicts_of(technique)]
    lines += [
        ("Trainer", f"L.Trainer(callbacks=[{made}])"),
        ("mixin", f"class Net(ft.FastTrainMixin, L.LightningModule): techniques = [{made}]"),
        ("loop", technique.in_a_loop),
    ]
    if in_yaml is not None:
        # So wide that yaml never breaks the line, which is to be pasted as it is.
        flow = yaml.safe_dump(in_yaml["trainer"], default_flow_style=True, sort_keys=False, width=1000)
        lines.append(("YAML", f"trainer: {flow.strip()}"))
    lines.append(("source", source_of(technique)))
    code = ("Trainer", "mixin", "loop", "YAML")  # not to be broken
    shown = [f"{technique.__name__}: {technique.effect}", ""]
    for head, text in lines:
        # 11 columns for the head and 109 for the text make 120.
        folded = text if head in code else textwrap.fill(text, 109, subsequent_indent=" " * 11)
        shown.append(f"{head:<11}{folded}")
    return "\n".join(shown)


def markdown_card(technique: type[Technique], ladder: Climbed | None = None) -> str:
    """Return everything that a technique states about itself, as a section of a Markdown page.

    Args:
        technique: a technique's class.
        ladder: as for :func:`markdown_table`.

    Example:
        >>> from lightning_fasttrain.run import StepMeter
        >>> print(markdown_card(StepMeter).partition("**Source:**")[0])
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
        In a Fabric or bare loop: `run.StepTimer(device)`
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
    made, in_yaml = _written_out(technique)
    summary = " ".join((inspect.getdoc(technique) or "").partition("\n\n")[0].split())
    measured = _measured_factors(ladder).get(technique.__name__)
    excluded = [f"- `{other}`: {why}. {way_out}." for other, why, way_out in conflicts_of(technique)]
    paragraphs = [
        f"### {public_path(technique)}",
        _as_markdown(summary),
        f"**Effect:** {technique.effect}.",
        f"**When it pays:** {technique.when}.",
        f"**Exactness:** {_exactness_in_words(technique)}.",
        "```python\n"
        f"trainer = L.Trainer(callbacks=[{made}])\n\n"
        f"class Net(ft.FastTrainMixin, L.LightningModule):\n    techniques = [{made}]\n```",
        f"In a Fabric or bare loop: {_as_code(technique.in_a_loop)}",
    ]
    if in_yaml is not None:
        paragraphs.append(f"```yaml\n{yaml.safe_dump(in_yaml, sort_keys=False, width=1000)}```")
    paragraphs.append("**Cannot be combined with:**" + ("" if excluded else " nothing."))
    paragraphs += ["\n".join(excluded)] if excluded else []
    if ladder is not None:
        paragraphs.append(f"**Measured (time, peak memory):** {measured or 'the ladder does not measure it'}.")
    paragraphs.append(f"**Source:** {_as_markdown(source_of(technique))}")
    return "\n\n".join(paragraphs)


_PAGE = """\
<!-- Generated: fasttrain techniques --markdown --ladder examples/results/ladder_cpu.json > docs/techniques.md -->

# Techniques

The table lists every technique of the package; below it, a card for each gives details. In the code examples `ft` is
`lightning_fasttrain` and `L` is `lightning`. `fasttrain techniques NAME` prints one card, and says whether the
technique has any effect on this machine. [Exactness](exactness.md) defines the three classes.
"""
_MEASURED = """\
The column "measured" is from a run of `fasttrain ladder`, which [Results](results.md) describes: time and peak memory
as factors of the rung below. Times marked ≈ are within the variation of the same program there, {noise:.0%}.
"""


def markdown_page(ladder: Climbed | None = None) -> str:
    """Return the table of techniques followed by one card for each, as a Markdown page.

    Args:
        ladder: as for :func:`markdown_table`.

    Returns:
        The page, with a trailing newline.
    """
    # The anchor is the one that both GitHub and MkDocs derive from a card's heading.
    table = re.sub(
        r"^\| `([\w.]+)`",
        lambda name: f"| [`{name[1]}`](#{name[1].replace('.', '').lower()})",
        markdown_table(ladder),
        flags=re.MULTILINE,
    )
    page = [_PAGE]
    if ladder is not None:
        page.append(_MEASURED.format(noise=_time_noise(ladder)))
    page.append(f"<!-- techniques -->\n{table}\n<!-- /techniques -->\n")
    for subpackage, members in itertools.groupby(
        known_techniques(), lambda technique: technique.__module__.split(".")[1]
    ):
        page.append(f"## Techniques in `{subpackage}`\n")
        page += [f"{markdown_card(technique, ladder)}\n" for technique in members]
    return "\n".join(page)


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
        >>> from lightning_fasttrain.data import MicroBatching
        >>> [other for other, _, _ in conflicts_of(MicroBatching)]
        ['CompileBlocks', 'OptimizerInBackward']
    """
    others = [other for other in known_techniques() if other is not technique]
    for conflict in technique.conflicts():
        if isinstance(conflict.other, type):
            yield conflict.other.__name__, conflict.why, conflict.way_out
        else:
            yield from (
                (other.__name__, conflict.why, conflict.way_out) for other in others if conflict.may_name(other)
            )
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


def _written_out(technique: type[Technique]) -> tuple[str, dict[str, Any] | None]:
    """Return the docstring's example as Python and for LightningCLI; None if YAML cannot represent it."""
    example, path = _example(technique), public_path(technique)
    made = f"ft.{path.removesuffix(technique.__name__)}{ast.unparse(example)}"
    try:
        return made, {"trainer": {"callbacks": [config_of_call(example)]}}
    except ValueError:
        return made, None


def _exactness_in_words(technique: type[Technique]) -> str:
    """Return the class of exactness with its bound.

    Example:
        >>> from lightning_fasttrain.model import ActivationCheckpointing
        >>> _exactness_in_words(ActivationCheckpointing)
        'exact'
    """
    word = technique.exactness.value.replace("_", " ")
    if technique.exactness is Exactness.TOLERANCE:
        return f"{word}: loss and gradients of a float32 step differ by at most {technique.bound:g}, relative"
    return f"{word}, bitwise" if technique.bitwise else word


def _as_markdown(text: str) -> str:
    """Convert the reStructuredText roles and literals of a docstring to Markdown.

    Example:
        >>> _as_markdown("see :func:`~lightning_fasttrain.data.split_batch` and ``n``")
        'see `split_batch` and `n`'
    """
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`", r"`\1`", text).replace("``", "`")


def _as_code(text: str) -> str:
    return text if text.startswith("nothing") else f"`{text}`"


def _time_noise(ladder: Climbed) -> float:
    return max(TIME_WORTH, ladder.noise["time"] or 0.0)


def _measured_factors(ladder: Climbed | None) -> dict[str, str]:
    """Return technique → time and memory of the rung that changed it alone, as factors of the state below."""
    if ladder is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    noise = _time_noise(ladder)
    below = ladder.rungs[0]
    for rung in ladder.rungs[1:]:
        before = below.state["callbacks"]
        new = [name for name, arguments in rung.state["callbacks"].items() if before.get(name) != arguments]
        if rung.error is None and len(new) == 1:
            time, memory = rung.step_ms / below.step_ms, rung.peak_mib / below.peak_mib
            factors = f"{'≈' if abs(time - 1) <= noise else '×'}{time:.2f}, ×{memory:.2f}"
            found.setdefault(new[0], {})[rung.name] = factors
        below = rung if rung.carried else below
    said: dict[str, str] = {}
    for name, rungs in found.items():
        # A single rung needs no name, as it is the technique's own.
        said[name] = "; ".join(rungs.values() if len(rungs) == 1 else map(" ".join, rungs.items()))
    return said
