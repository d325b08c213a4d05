"""List the possible choices for a model on a machine, and the reasons against other techniques."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
from torch import nn

from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.planner.candidates.configuration import SWITCHES, Budget, Choice, Switch
from lightning_fasttrain.predict.fake_model import fake_model
from lightning_fasttrain.technique import Exactness, Technique, check_together
from lightning_fasttrain.technique.declarations import Facts, add_model

_ORDER = list(Exactness)


@dataclass
class Axes:
    """The possible choices, axis by axis.

    Attributes:
        parts: numbers of micro-batches, 1 first.
        words: axis → its words, that of the plain step first.
        left_out: name of what is left out → the reason.
    """

    parts: list[int]
    words: dict[str, list[str | Budget]]
    left_out: dict[str, str] = field(default_factory=dict)
    _known_pairs: dict[Any, bool] = field(default_factory=dict, repr=False)

    @property
    def precision(self) -> str:
        """The precision of the plain step."""
        return str(self.words["precision"][0])

    def choices(self) -> Iterator[Choice]:
        """Yield every combination of techniques that can be used together."""
        names = [*self.words, "parts"]
        plain = vars(Choice())
        for values in itertools.product(*self.words.values(), self.parts):
            words = dict(zip(names, values, strict=True))
            switched = [(axis, word) for axis, word in words.items() if word != plain[axis]]
            if all(map(self._go_together, itertools.combinations(switched, 2))):
                yield replace(Choice(), **words)

    def _go_together(self, pair: tuple[tuple[str, object], tuple[str, object]]) -> bool:
        """Whether two techniques can be used together, which is asked for thousands of choices."""
        if pair not in self._known_pairs:
            self._known_pairs[pair] = True
            try:
                check_together(replace(Choice(), **dict(pair)).techniques())
            except ValueError:
                self._known_pairs[pair] = False
        return self._known_pairs[pair]

    def drop(self, axis: str, why: str) -> None:
        """Keep only the plain step's word of an axis."""
        self.left_out[axis] = why
        if axis == "parts":
            self.parts = [1]
        else:
            self.words[axis] = [""]


def find_axes(
    module: L.LightningModule,
    batch: object,
    facts: Facts,
    keep: Exactness,
    precision: str | None,
    fast_bf16: bool,
    limit_gib: float | None = None,
) -> Axes:
    """Find the techniques that may be chosen for ``module``.

    Args:
        module: the model; techniques are tried on a copy without memory.
        batch: one batch.
        facts: facts about the machine and the Trainer.
        keep: the least exact class of techniques that is allowed.
        precision: the precision to keep; None if it may be chosen.
        fast_bf16: whether the device multiplies bfloat16 fast.
        limit_gib: memory limit of budgets, which recompute single blocks; None if there are none.
    """
    facts = add_model(facts, module)
    parts, reason = _find_parts(module, batch, keep)
    axes = Axes(parts, {})
    if reason:
        axes.left_out["parts"] = reason
    for axis, words in SWITCHES.items():
        axes.words[axis] = [""]
        for word, switch in words.items():
            why = _why_left_out(module, switch, facts, keep)
            if why is None:
                axes.words[axis].append(word)
            else:
                axes.left_out[f"{axis} {word}"] = why
    if limit_gib is not None and "all" in axes.words["recompute"]:
        # The leanest word must stay the last one.
        axes.words["recompute"].insert(-1, Budget.within(limit_gib))
    axes.words["precision"] = [precision or "32-true"]
    if precision is None:
        _add_precision(axes, keep, fast_bf16)
    return axes


def _why_left_out(module: L.LightningModule, switch: Switch, facts: Facts, keep: Exactness) -> str | None:
    """Return why a technique may not be chosen; None if it may."""
    if switch.setting.device not in ("", facts.device):
        return f"it differs from another setting on {switch.setting.device} alone"
    try:
        technique = switch.make()
    except ModuleNotFoundError as error:  # an extra, without which a plan can be made too
        return str(error).rstrip(".")
    if _ORDER.index(technique.exactness) > _ORDER.index(keep):
        return f"its exactness is {technique.exactness.value!r}, and keep={keep.value!r}"
    why = type(technique).why_not(facts)
    if why is None and technique.surgery is not None:
        why = _why_not_on(module, technique)
    return why


def _add_precision(axes: Axes, keep: Exactness, fast_bf16: bool) -> None:
    if keep is Exactness.EXACT:
        axes.left_out["bf16-mixed"] = "it rounds, and keep='exact'"
    elif not fast_bf16:
        axes.left_out["bf16-mixed"] = "this device does not multiply bfloat16 faster"
    else:
        axes.words["precision"].append("bf16-mixed")


def _find_parts(module: nn.Module, batch: object, keep: Exactness) -> tuple[list[int], str]:
    """Return the powers of two up to one sample per micro-batch; or 1 alone, and why."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and keep is not Exactness.CHANGES_TRAINING:
        return [1], "BatchNorm takes its statistics over a part, which would be another training"
    try:
        size = batch_size(batch)
    except ValueError as error:
        return [1], str(error)
    return [2**power for power in range(size.bit_length()) if 2**power <= size], ""


def _why_not_on(module: L.LightningModule, technique: Technique) -> str | None:
    """Apply a technique to a copy without memory; return the error, or None."""
    try:
        with fake_model(module, [technique]):
            return None
    except (ValueError, TypeError, ModuleNotFoundError, RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
