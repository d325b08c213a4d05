"""The techniques that can act on a model, their combinations, and the memory that each is predicted to take."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import lightning as L
from torch import nn

from lightning_fasttrain import micro_batching, model
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.memory import predict_memory
from lightning_fasttrain.memory.fake_step import fake_model
from lightning_fasttrain.model.memory_budget.memory_budget import MemoryBudget
from lightning_fasttrain.planner.catalogue import code_of, config_of, known_techniques
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.technique import Exactness, Setting, Technique, check_together
from lightning_fasttrain.technique.declarations import Facts, add_model


@dataclass(frozen=True)
class Switch:
    """Meaning of one word of a :class:`Choice`.

    Attributes:
        technique: class of the technique.
        setting: its arguments and its assumed cost.
    """

    technique: type[Technique]
    setting: Setting

    def make(self) -> Technique:
        """Return a new technique."""
        # Arguments are copied, since a policy may keep what it has measured on a model.
        return self.technique(**copy.deepcopy(dict(self.setting.arguments)))


@dataclass(frozen=True)
class Budget:
    """A value of the axis ``recompute``: just as much as keeps a step within a limit.

    Attributes:
        gib: the limit.
    """

    gib: float

    @classmethod
    def within(cls, gib: float) -> "Budget":
        """Return a budget with few digits, which is never above ``gib``.

        Example:
            >>> print(Budget.within(0.12345678))
            to 0.123456 GiB
        """
        return cls(math.floor(gib * 1e6) / 1e6)

    def __str__(self) -> str:
        return f"to {self.gib} GiB"


@dataclass(frozen=True)
class Choice:
    """A word for each axis, "" for the plain step, beside the number of micro-batches and the precision.

    Attributes:
        parts: number of micro-batches of each batch.
        precision: precision of the Trainer.
    """

    parts: int = 1
    precision: str = "32-true"
    adapter: str = ""
    head: str = ""
    recompute: str | Budget = ""
    compile: str = ""
    offload: str = ""
    gradients: str = ""
    loader: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Choice":
        """Return the choice whose fields were written as JSON."""
        recompute = values["recompute"]
        if not isinstance(recompute, str):
            recompute = Budget(**recompute)
        return cls(**{**values, "recompute": recompute})

    @property
    def has_budget(self) -> bool:
        """Whether blocks are recomputed within a budget, which measures the first steps."""
        return isinstance(self.recompute, Budget)

    @property
    def words(self) -> list[tuple[str, str | Budget]]:
        """(axis, word) of everything that differs from the plain step, precision included."""
        found = self._switched()
        if self.precision != "32-true":
            found.append(("precision", self.precision))
        return found

    def _switched(self) -> list[tuple[str, str | Budget]]:
        return [(axis, getattr(self, axis)) for axis in SWITCHES if getattr(self, axis)]

    def techniques(self) -> list[Technique]:
        """Return new techniques, micro-batching first."""
        made = [switch_of(*switched).make() for switched in self._switched()]
        if self.parts > 1:
            made.insert(0, micro_batching.MicroBatching(self.parts))
        return made

    def code(self) -> list[str]:
        """Return the Python code that makes each of :meth:`techniques`."""
        return list(map(code_of, self.techniques()))

    def configs(self) -> list[Mapping[str, Any]]:
        """Return the LightningCLI configuration of each of :meth:`techniques`."""
        return list(map(config_of, self.techniques()))

    def __str__(self) -> str:
        said = [self.precision]
        if self.parts > 1:
            said.append(f"{self.parts} parts")
        return ", ".join([*said, *(f"{axis} {word}" for axis, word in self._switched())])


def _find_switches() -> dict[str, dict[str, Switch]]:
    """Collect axis → word → its meaning, as declared by the techniques. The word "" is the plain step."""
    # Without parts and precision, which come first in Choice and are no switches.
    found: dict[str, dict[str, Switch]] = {one.name: {} for one in fields(Choice)[2:]}
    for technique in known_techniques():
        # An inherited setting would give its word to the subclass.
        for setting in vars(technique).get("worth_trying", ()):
            found[setting.axis][setting.word] = Switch(technique, setting)
    return found


SWITCHES = _find_switches()


def switch_of(axis: str, word: str | Budget) -> Switch:
    """Return the meaning of a word of an axis."""
    if isinstance(word, str):
        return SWITCHES[axis][word]
    setting = Setting(axis, str(word), {"policy": MemoryBudget(budget_gib=word.gib)})
    return Switch(model.ActivationCheckpointing, setting)


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


class PredictedMemory:
    """Predicts peak memory in bytes.

    From two micro-batches on, a step's peak is a constant plus a multiple of the size of one, as two predictions show.

    Args:
        module: the model.
        batch: one batch.
        device: type of the device whose memory is predicted.
        parts: the possible numbers of micro-batches.
        budget_bytes: the limit of choices with a :class:`~lightning_fasttrain.planner.candidates.Budget`.
    """

    def __init__(
        self, module: L.LightningModule, batch: object, device: str, parts: list[int], budget_bytes: float = 0.0
    ) -> None:
        self.budget_bytes = budget_bytes
        self.module, self.batch, self.device = module, batch, device
        # From two parts on: in one part a step has another order, and its peak is not on the line.
        self.ends = [parts[1], parts[-1]] if len(parts) > 1 else []
        self.known: dict[Choice, float] = {}

    def predict(self, choice: Choice, *, exactly: bool = False) -> float:
        """Return the peak memory in bytes. Compiled blocks count as eager ones, which take more.

        Args:
            choice: the techniques and the precision.
            exactly: whether it is predicted by itself rather than interpolated.

        Raises:
            ValueError, TypeError: it cannot be predicted.
        """
        if choice.has_budget:
            low = self.predict(replace(choice, recompute="all"), exactly=exactly)
            return self._within_budget(low, self.predict(replace(choice, recompute=""), exactly=exactly))
        key = replace(choice, compile="")
        is_between = self._is_between(key)
        if key not in self.known or (exactly and is_between):
            guesses = is_between and not exactly
            self.known[key] = self._interpolate(key) if guesses else float(self._predict(key))
        return self.known[key]

    def _within_budget(self, low: float, high: float) -> float:
        """Return the peak with as many stored blocks as the budget allows, if all blocks are equal."""
        blocks = len(find_blocks(self.module))
        kept = math.floor(blocks * (self.budget_bytes - low) / max(high - low, 1.0))
        return low + (high - low) * min(max(kept, 0), blocks) / blocks

    def least_recomputed(self, choice: Choice) -> float:
        """Return the peak memory with nothing recomputed."""
        return self.predict(replace(choice, recompute=""))

    def most_recomputed(self, choice: Choice) -> float:
        """Return the peak memory with every block recomputed."""
        return self.predict(replace(choice, recompute="all"))

    def _is_between(self, choice: Choice) -> bool:
        return bool(self.ends) and self.ends[0] < choice.parts < self.ends[1]

    def _interpolate(self, choice: Choice) -> float:
        few, many = (self.predict(replace(choice, parts=parts)) for parts in self.ends)
        first, last, here = 1 / self.ends[0], 1 / self.ends[1], 1 / choice.parts  # peak = a + b / parts
        return many + (few - many) * (here - last) / (first - last)

    def _predict(self, choice: Choice) -> int:
        with quietly():
            report = predict_memory(
                self.module,
                self.batch,
                techniques=choice.techniques(),
                precision=choice.precision,
                device=self.device,
            )
        return report.peak_bytes
