"""Describe each technique from its code: its card, the sources that it names, and what ladders measured of it.

Run as a program, it writes ``technique_cards.json``:

    python -m lightning_fasttrain.cli.describe_techniques
"""

import ast
import doctest
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import yaml

from lightning_fasttrain.bench.ladder.results import TIME_WORTH, Climbed
from lightning_fasttrain.cli.technique_cards import FILE, Measurements, TechniqueCard, as_markdown
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.planner.candidates import config_of_call, known_techniques, public_path
from lightning_fasttrain.strategy import FSDP2Strategy
from lightning_fasttrain.technique import Exactness, Technique


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
        made=made,
        config=config,
        loop=technique.in_a_loop,
        excluded=[list(conflict) for conflict in conflicts_of(technique)],
        source=source_of(technique),
    )


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


def read_measurements(path: Path | str) -> Measurements:
    """Return what the ladder of a file measured of each technique that a rung changed alone.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read, or is not what ``fasttrain ladder`` writes.
    """
    ladder = Climbed.read(path)
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
    said: dict[str, str] = {}
    for name, rungs in found.items():
        # A single rung needs no name, as it is the technique's own.
        said[name] = "; ".join(rungs.values() if len(rungs) == 1 else map(" ".join, rungs.items()))
    return Measurements(said, noise)


def write_cards(path: Path) -> None:
    """Write the cards of all techniques."""
    cards = [asdict(describe(technique)) for technique in known_techniques()]
    write_atomic(path, (json.dumps(cards, indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    write_cards(Path(__file__).with_name(FILE))
