"""Candidates of a plan: techniques that can act on a model, as objects and as code; their predicted memory and time."""

import ast
import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_fasttrain import (
    architecture,
    checkpoint,
    finetune,
    guards,
    loaders,
    loss,
    micro_batching,
    model,
    optim,
    profiling,
)
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.messages import describe_error, explain
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.package import PUBLIC, find_public, public_path
from lightning_fasttrain.memory.fake_step import fake_model
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.model.memory_budget.memory_budget import MemoryBudget
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.step_time.machine import Machine
from lightning_fasttrain.step_time.predict_time import recorder_for, simulate_recorded, uses_tf32
from lightning_fasttrain.step_time.record_step import StepRecorder
from lightning_fasttrain.technique import Exactness, Setting, Technique, check_together
from lightning_fasttrain.technique.declarations import Facts, add_model

SUBPACKAGES = (micro_batching, model, loss, optim, finetune, architecture, loaders, checkpoint, guards, profiling)


def known_techniques() -> Iterator[type[Technique]]:
    """Yield every technique of the package, one subpackage after another, in alphabetical order.

    Example:
        >>> [technique.__name__ for technique in known_techniques()][:2]
        ['MicroBatching', 'PaddingFree']
    """
    for subpackage in SUBPACKAGES:
        found = inspect.getmembers(subpackage, inspect.isclass)
        yield from (thing for _, thing in found if issubclass(thing, Technique))


def class_named(name: str) -> type:
    """Return the public class of a name, from whichever subpackage has it.

    Raises:
        ValueError: no public class has this name.

    Example:
        >>> class_named("EveryBlock").__module__
        'lightning_fasttrain.model.activation_checkpointing'
    """
    if name in PUBLIC:
        found = find_public(name)
    else:
        found = next((getattr(subpackage, name) for subpackage in SUBPACKAGES if hasattr(subpackage, name)), None)
    if not isinstance(found, type):
        raise ValueError(explain(f"{name!r}", "this package has no class of this name", "Check how it is written"))
    return found


def code_of(made: object) -> str:
    """Return the Python that makes a technique or a policy like this one.

    Example:
        >>> code_of(model.ActivationCheckpointing(model.EveryBlock(2)))
        'ft.ActivationCheckpointing(policy=ft.model.EveryBlock(k=2))'
    """
    call = _call_that_makes(made)
    for node in ast.walk(call):
        if isinstance(node, ast.Call):
            node.func = ast.Name(f"ft.{public_path(_class_in(node))}")
    return ast.unparse(call)


def config_of(made: object) -> dict[str, Any]:
    """Return the configuration with which LightningCLI makes one like this.

    Example:
        >>> config_of(micro_batching.MicroBatching(4))
        {'class_path': 'lightning_fasttrain.MicroBatching', 'init_args': {'n': 4}}
    """
    return config_of_call(_call_that_makes(made))


def config_of_call(call: ast.Call) -> dict[str, Any]:
    """Return the configuration with which LightningCLI makes what a call of one of our classes makes.

    Raises:
        ValueError: an argument is neither a literal nor such a call.
    """
    kind = _class_in(call)
    values: dict[str, ast.expr] = dict(zip(inspect.signature(kind).parameters, call.args, strict=False))
    values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        arguments[name] = config_of_call(value) if isinstance(value, ast.Call) else ast.literal_eval(value)
    config: dict[str, Any] = {"class_path": f"lightning_fasttrain.{public_path(kind)}"}
    return {**config, "init_args": arguments} if arguments else config


def _call_that_makes(made: object) -> ast.Call:
    # Techniques keep their arguments in words alone: a reference to a teacher, say, would be copied with them.
    call = ast.parse(repr(made), mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def _class_in(call: ast.Call) -> type:
    return class_named(ast.unparse(call.func).split(".")[-1])


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
    layout: str = ""
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
            said.append(f"{self.parts} micro-batches")
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
    mixed: str | None,
    limit_gib: float | None = None,
) -> Axes:
    """Find the techniques that may be chosen for ``module``.

    Args:
        module: the model; techniques are tried on a copy without memory.
        batch: one batch.
        facts: facts about the machine and the Trainer.
        keep: the least exact class of techniques that is allowed.
        precision: the precision to keep; None if it may be chosen.
        mixed: the mixed precision in which the device multiplies faster; None if there is none.
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
        _add_precision(axes, keep, mixed)
    return axes


def _why_left_out(module: L.LightningModule, switch: Switch, facts: Facts, keep: Exactness) -> str | None:
    """Return why a technique may not be chosen; None if it may."""
    if switch.setting.device not in ("", facts.device):
        return f"it differs from another setting on {switch.setting.device} alone"
    exactness = switch.technique.exactness
    if _ORDER.index(exactness) > _ORDER.index(keep):  # before it is made, which may import packages that print
        return f"its exactness is {exactness.value!r}, and keep={keep.value!r}"
    try:
        technique = switch.make()
    except ModuleNotFoundError as error:  # an extra, without which a plan can be made too
        return str(error).rstrip(".")
    why = type(technique).why_not(facts)
    if why is None and technique.surgery is not None:
        why = _why_not_on(module, technique)
    return why


def _add_precision(axes: Axes, keep: Exactness, mixed: str | None) -> None:
    if mixed is None:
        axes.left_out["bf16-mixed"] = "this device does not multiply bfloat16 faster"
    elif keep is Exactness.EXACT:
        axes.left_out[mixed] = "it rounds, and keep='exact'"
    else:
        axes.words["precision"].append(mixed)


def _find_parts(module: nn.Module, batch: object, keep: Exactness) -> tuple[list[int], str]:
    """Return the powers of two up to one sample per micro-batch; or 1 alone, and why."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and keep is not Exactness.CHANGES_TRAINING:
        return [1], "BatchNorm takes its statistics over a part, which would be another training"
    if isinstance(module, L.LightningModule) and not module.automatic_optimization:
        return [1], "with manual optimization training_step calls accumulate_gradients itself"
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


class Predictions:
    """Predicts the peak memory of choices in bytes and, of a known machine, the time of their steps.

    From two micro-batches on, a step's peak is a constant plus a multiple of the size of one, as two predictions show.

    Args:
        module: the model.
        batch: one batch.
        device: type of the device whose memory is predicted.
        parts: the possible numbers of micro-batches.
        budget_bytes: the limit of choices with a :class:`~lightning_fasttrain.planner.candidates.Budget`.
        measure: returns the measured peak of a choice, for models whose plain step cannot be predicted.
        machine: whose times are predicted; None: none are.

    Attributes:
        why_measured: why the plain step cannot be predicted; "" if it can.
    """

    def __init__(
        self,
        module: L.LightningModule,
        batch: object,
        device: str,
        parts: list[int],
        budget_bytes: float = 0.0,
        measure: Callable[[Choice], float] | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.budget_bytes, self.measure, self.why_measured = budget_bytes, measure, ""
        self.module, self.batch, self.device, self.machine = module, batch, device, machine
        # From two parts on: in one part a step has another order, and its peak is not on the line.
        self.ends = [parts[1], parts[-1]] if len(parts) > 1 else []
        self.known: dict[Choice, float] = {}
        self.failed: dict[Choice, str] = {}  # choices whose step fails, and why
        self.times_ms: dict[Choice, float | None] = {}

    def predict(self, choice: Choice, *, exactly: bool = False) -> float:
        """Return the peak memory in bytes; infinity for techniques with which the step fails.

        Compiled blocks count as eager ones, which take more.

        Args:
            choice: the techniques and the precision.
            exactly: whether it is predicted by itself rather than interpolated.

        Raises:
            ValueError, TypeError: the step without techniques cannot be predicted.
        """
        if choice.has_budget:
            low = self.predict(replace(choice, recompute="all"), exactly=exactly)
            return self._within_budget(low, self.predict(replace(choice, recompute=""), exactly=exactly))
        key = replace(choice, compile="")
        is_between = self._is_between(key)
        if key not in self.known or (exactly and is_between):
            guesses = is_between and not exactly
            self.known[key] = self._interpolate(key) if guesses else self._predict(key, exactly)
        return self.known[key]

    def predict_ms(self, choice: Choice) -> float | None:
        """Return the time of a step in ms, from the trace of its memory; None where it cannot be predicted.

        Compiled blocks count as eager ones here too, since a trace of their graphs takes ten times as long.
        """
        if self.machine is None or self.why_measured or choice.has_budget:
            return None
        key = replace(choice, compile="")
        if key not in self.times_ms:
            self.predict(key, exactly=True)
        return self.times_ms.get(key)

    def why_failed(self, choice: Choice) -> str:
        """Return why the step fails with a choice; "" if it does not."""
        return self.failed.get(replace(choice, compile=""), "")

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
        if math.inf in (few, many):
            return math.inf
        first, last, here = 1 / self.ends[0], 1 / self.ends[1], 1 / choice.parts  # peak = a + b / parts
        return many + (few - many) * (here - last) / (first - last)

    def _predict(self, choice: Choice, exactly: bool) -> float:
        if self.why_measured:
            return self._measure(choice, exactly)
        techniques = choice.techniques()
        recorder = None if self.machine is None else recorder_for(techniques)
        self.times_ms[choice] = None
        step = {"techniques": techniques, "precision": choice.precision, "device": self.device, "recorder": recorder}
        try:
            with quietly():
                (report,) = predict_strategies(self.module, self.batch, [None], **step)
        except Exception as error:
            if techniques:
                self.failed[choice] = describe_error(error)
                return math.inf
            if self.measure is None:
                raise
            self.why_measured = describe_error(error).rstrip(".")
            return self._measure(choice, exactly)
        if recorder is not None:
            self.times_ms[choice] = self._simulate_ms(recorder, techniques)
        return float(report.peak_bytes)

    def _simulate_ms(self, recorder: StepRecorder, techniques: Sequence[Technique]) -> float | None:
        assert self.machine is not None
        if any(isinstance(technique, model.ActivationOffload) for technique in techniques):
            return None
        try:
            (longest, _), *_ = simulate_recorded(recorder, self.machine, uses_tf32(techniques))
        except ValueError:  # no peak of a dtype is known
            return None
        return longest.seconds * 1e3

    def _measure(self, choice: Choice, exactly: bool) -> float:
        """Measure the peak; of several techniques at once it is at first assumed that each takes its own share."""
        assert self.measure is not None
        plain = Choice(precision=choice.precision)
        single = [replace(plain, **{axis: word}) for axis, word in choice.words if axis != "precision"]
        if choice.parts > 1:
            single.append(replace(plain, parts=choice.parts))
        if len(single) > 1 and not exactly:
            least = self.predict(plain)
            return least * math.prod(self.predict(one) / least for one in single)
        try:
            return self.measure(choice)
        except torch.OutOfMemoryError:
            return math.inf
        except Exception as error:
            if not single:
                raise
            self.failed[choice] = describe_error(error)
            return math.inf


def strategy_code(name: str) -> tuple[str, Any]:
    """Return the Python code and the LightningCLI configuration of a strategy that ``choose_strategy`` names.

    Example:
        >>> strategy_code("fsdp2+offload")[0]
        "ft.FSDP2Strategy(offload='cpu')"
    """
    kind, _, stage = name.partition("-")
    if kind == "ddp":
        return "'ddp'", "ddp"
    if kind == "zero":
        config = {"class_path": "lightning_fasttrain.ZeROStrategy", "init_args": {"stage": stage}}
        return f"ft.ZeROStrategy(stage={stage!r})", config
    config = {"class_path": "lightning_fasttrain.FSDP2Strategy"}
    if not kind.endswith("offload"):
        return "ft.FSDP2Strategy()", config
    return "ft.FSDP2Strategy(offload='cpu')", {**config, "init_args": {"offload": "cpu"}}
