"""The table of techniques, and a card for each, from the code: what it does, when, how exact it is, how to use it."""

import ast
import doctest
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from lightning_fasttrain.bench.ladder.results import Climbed
from lightning_fasttrain.bench.ladder.verdict import TIME_WORTH
from lightning_fasttrain.planner.catalogue import known_techniques, public_path
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.facts import Facts


def markdown_table(ladder: Climbed | None = None) -> str:
    """The techniques as a Markdown table.

    Args:
        ladder: adds what its rungs measured, against the rung below.

    Returns:
        The table, without a trailing newline.
    """
    measured = _measured_factors(ladder) if ladder is not None else {}
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
    """All that a technique says about itself, for a terminal.

    Args:
        technique: a class.
        ladder: as for :func:`markdown_table`.
        facts: of the machine: it says if there is nothing to do on it.

    Example:
        >>> from lightning_fasttrain.model import ActivationOffload
        >>> print(card(ActivationOffload))
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
    """
    name = technique.__name__
    example = _example(technique)
    path = public_path(technique)
    made = f"ft.{path.removesuffix(name)}{ast.unparse(example)}"
    measured = _measured_factors(ladder).get(name) if ladder is not None else None
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
    settings = _settings(technique, example)
    if settings is not None:
        spec = {"class_path": f"lightning_fasttrain.{path}", **({"init_args": settings} if settings else {})}
        # So wide that yaml never breaks the line, which is to be pasted as it is.
        in_yaml = yaml.safe_dump({"callbacks": [spec]}, default_flow_style=True, sort_keys=False, width=1000)
        lines.append(("YAML", f"trainer: {in_yaml.strip()}"))
    code = ("Trainer", "mixin", "loop", "YAML")  # not to be broken
    shown = [f"{name}: {technique.effect}", ""]
    for head, text in lines:
        # 11 columns for the head and 109 for the text make 120.
        folded = text if head in code else textwrap.fill(text, 109, subsequent_indent=" " * 11)
        shown.append(f"{head:<11}{folded}")
    return "\n".join(shown)


def conflicts_of(technique: type[Technique]) -> Iterator[tuple[str, str, str]]:
    """What it cannot be used beside, by its own word or the other's: name, why, way out.

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
    """How its docstring makes one."""
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(technique) or ""):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == technique.__name__:
                return ast.Call(ast.Name(technique.__name__), node.args, node.keywords)
    raise LookupError(f"the docstring of {technique.__name__} makes none")


def _settings(technique: type[Technique], example: ast.Call) -> dict[str, Any] | None:
    """The arguments of the example by name; None where one of them is an object."""
    names = list(inspect.signature(technique).parameters)
    given = dict(zip(names, example.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in example.keywords if keyword.arg is not None}
    try:
        return {name: ast.literal_eval(value) for name, value in given.items()}
    except ValueError:
        return None


def _as_code(text: str) -> str:
    return text if text.startswith("nothing") else f"`{text}`"


def _measured_factors(ladder: Climbed) -> dict[str, str]:
    """For each technique that a rung added or changed alone: its time and memory as factors of the state below it."""
    found: dict[str, dict[str, str]] = {}
    noise = max(TIME_WORTH, ladder.noise["time"] or 0.0)
    below = ladder.rungs[0]
    for rung in ladder.rungs[1:]:
        before = below.state["callbacks"]
        new = [name for name, arguments in rung.state["callbacks"].items() if before.get(name) != arguments]
        if rung.error is None and len(new) == 1:
            time, memory = rung.step_ms / below.step_ms, rung.peak_mib / below.peak_mib
            factors = f"{'≈' if abs(time - 1) <= noise else '×'}{time:.2f}, ×{memory:.2f}"
            found.setdefault(new[0], {})[rung.name] = factors
        below = rung if rung.carried else below
    return {name: _of_rungs(rungs) for name, rungs in found.items()}


def _of_rungs(factors: dict[str, str]) -> str:
    if len(factors) == 1:
        return next(iter(factors.values()))
    return "; ".join(f"{rung} {found}" for rung, found in factors.items())
