"""Collect what a training loop does: times of phases and lines, operators, updates and modules."""

import gc
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch.padding_share import PaddingShare
from lightning_fasttrain.core.checks.annotations import Bounds
from lightning_fasttrain.core.distributed import from_all_ranks, is_sharded
from lightning_fasttrain.core.messages import describe_error
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import is_compiled
from lightning_fasttrain.doctor.observation.operator_costs import OperatorCosts
from lightning_fasttrain.doctor.observation.operator_trials import OperatorTrials
from lightning_fasttrain.doctor.observation.operator_watch import (
    ModuleWatch,
    OperatorWatch,
    find_trained_models,
    list_compilations,
)
from lightning_fasttrain.doctor.observation.source_lines import LineSampler, LineTracer, SourceLine
from lightning_fasttrain.doctor.observation.step_records import BlockTimes, Measured, UpdateRecord
from lightning_fasttrain.profiling.memory_record import MemoryRecord
from lightning_fasttrain.profiling.memory_timeline import MemoryRecording
from lightning_fasttrain.profiling.step_meter import PHASES, StepTimer
from lightning_fasttrain.step_time.record_step import RecordedStep

LOOP_PHASES = (*PHASES[:-1], "callbacks", PHASES[-1])
StepCount = Annotated[int, Bounds(6)]
MANY_STEPS = "Use steps=6 or more: three are looked at in detail, and the others are timed"
# The step in which the lines that load its batch are traced.
_TRACED = 2
# Of the time of all watched steps.
_SHARE_OF_TRIALS = 0.12


@dataclass
class LoaderFacts:
    """Settings of the loader that the training batches come from."""

    workers: int = 0
    pins_memory: bool = False
    persistent: bool = False
    dataset: str = ""


@dataclass
class SchedulerCall:
    """Calls of a scheduler's ``step``: how often, and whether the first came before the optimizer's."""

    scheduler: Any
    line: SourceLine | None
    calls: int = 0
    came_first: bool = False


@dataclass
class PageFaults:
    """Memory that the steps took from the system, page by page.

    Attributes:
        counts: pages in each step.
        system_ms: milliseconds that the system worked in each step, of all threads together.
    """

    counts: list[int] = field(default_factory=list)
    system_ms: list[float] = field(default_factory=list)
    _before: tuple[int, float] | None = None

    def begin_step(self) -> None:
        """Note what there was before; nothing where the system does not say."""
        self._before = _read_page_faults()

    def end_step(self) -> None:
        """Add the step, if it was begun."""
        before, self._before = self._before, None
        if before is not None:
            count, seconds = _read_page_faults() or before
            self.counts.append(count - before[0])
            self.system_ms.append(1e3 * (seconds - before[1]))


def _read_page_faults() -> tuple[int, float] | None:
    """Return the page faults of this process, and the seconds that the system has worked for it; None if unknown."""
    if sys.platform != "linux":
        return None
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_stime


@dataclass
class HostFacts:
    """Facts that a Trainer knows about its run; empty in a loop.

    Attributes:
        max_epochs: 0 if there is no limit.
        updates: number of optimizer steps of the run.
        optimizers: all of them, also those that did not step yet.
        schedulers: each with the interval at which the Trainer steps it, "step" or "epoch".
        hooks: Lightning's names of the callbacks' hooks in a step → the class of the callback, and the hook.
        savers: those of these names that belong to callbacks which write checkpoints.
        every: settings that say how often something is done, by the name of the Trainer's argument.
        searches_unused: whether DDP searches for unused parameters.
    """

    max_epochs: int = 0
    updates: float = math.inf
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[tuple[Any, str]] = field(default_factory=list)
    hooks: dict[str, tuple[str, str]] = field(default_factory=dict)
    savers: set[str] = field(default_factory=set)
    every: dict[str, int] = field(default_factory=dict)
    searches_unused: bool = False


class Watch:
    """Watches ``warmup`` and then ``steps`` optimizer steps; nothing of the run is changed.

    Args:
        device: device of the model.
        steps: number of steps to watch; in two of them each operator is looked at, and in one
            each line that loads a batch; these are not timed.
        warmup: number of steps before.
        records_memory: whether each allocation of one more step is recorded, which is not timed either.
        only_times: whether nothing but the times of phases is watched, as on the other ranks.

    Attributes:
        own_ms: for each rank, milliseconds of each step before the ranks wait for one another.
    """

    def __init__(
        self,
        device: torch.device,
        steps: int,
        warmup: int,
        records_memory: bool = False,
        only_times: bool = False,
    ) -> None:
        self.steps, self.warmup, self.device = steps, warmup, device
        self.timer = StepTimer(device, warmup, LOOP_PHASES)
        self.sampler = LineSampler(lambda: self.timer.current)
        self.tracer = LineTracer()
        self.trials = OperatorTrials()
        self.looks: dict[int, OperatorWatch] = {}
        self.modules = ModuleWatch()
        self.blocks = BlockTimes(device)
        self.compilations: list[Any] = []
        self.memory: MemoryRecord | None = None
        self.updates: dict[int, UpdateRecord] = {}
        self.schedulers: dict[int, SchedulerCall] = {}
        self.actions: dict[str, list[float]] = {}
        self.loader = LoaderFacts()
        self.padding = PaddingShare()
        self.faults = PageFaults()
        self.host = HostFacts()
        self.done = 0
        self.models: list[nn.Module] = []
        self._look: OperatorWatch | None = None
        self._collecting_since = 0.0
        self.own_ms: list[dict[int, float]] = []
        self._records_memory, self._only_times = records_memory, only_times
        self._recording: MemoryRecording | None = None
        self._recorded: set[int] = set()

    @property
    def has_ended(self) -> bool:
        """Whether all steps were watched."""
        return self.done >= self.warmup + self.steps

    @property
    def is_warm(self) -> bool:
        """Whether the current step is counted."""
        return self.warmup <= self.done < self.warmup + self.steps

    def begin_step(self) -> None:
        """Begin a step: its lines are sampled, or its operators are looked at, or neither during warm-up."""
        if self._only_times:
            return
        number = self.done - self.warmup
        looks = number in (1, self.steps // 2)
        self.tracer.active = number == _TRACED
        if number > self.steps // 2 and self._records_memory and self.memory is None:
            self._record_memory(number)
        is_timed = self.is_warm and not looks and number != _TRACED and self._recording is None
        self.sampler.active = self.blocks.active = is_timed
        if is_timed and self.device.type == "cpu":
            self.faults.begin_step()
        if not looks or any(map(is_compiled, self.models)):
            return
        trial = _try_nothing
        if number == 1:
            # Once, since each trial runs an operator several times.
            self.trials.budget_s = _SHARE_OF_TRIALS * self.steps * self.timer.step_times()[0]["step"] / 1e3
            trial = self.trials
        self._look = self.looks[number] = OperatorWatch(lambda: self.timer.current, trial, OperatorCosts(self.device))
        self.modules.start(self.models)
        self._look.__enter__()

    def end_step(self) -> None:
        """End a step. At the end of the warm-up the models of a loop are found."""
        self.faults.end_step()
        self._end_recording()
        self.leave_look()
        self.modules.stop()
        self.done += 1
        self.sampler.active = self.blocks.active = False
        if self.done == self.warmup:
            self._end_warmup()

    def _end_warmup(self) -> None:
        if self._only_times:
            return
        if not self.models:
            for record in self.updates.values():
                self.models += find_trained_models(parameters_of(record.optimizer))
            self.host.searches_unused = any(getattr(one, "find_unused_parameters", False) for one in self.models)
        self.compilations = list_compilations()
        gc.callbacks.append(self._note_collection)
        # Hooks would be traced, and make the compiler start again.
        if len(self.models) == 1 and not is_compiled(self.models[0]):
            self.blocks.start(self.models[0])

    def _record_memory(self, number: int) -> None:
        optimizers = [record.optimizer for record in self.updates.values()]
        model = self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)
        try:
            self._recording = MemoryRecording(model, optimizers).__enter__()
        except (ValueError, RuntimeError):
            # The model is on another device, or the user profiles the run.
            self._records_memory = False
        else:
            self._recorded.add(number)

    def _end_recording(self) -> None:
        if self._recording is not None:
            recording, self._recording = self._recording, None
            with self.timer.phase("pause"), suppress(Exception):  # the training continues without it
                recording.__exit__(None, None, None)
            self.memory = recording.record
            self._records_memory = False

    def measure(self) -> Measured:
        """Return the times of the steps by phase and by line, without the steps that were looked at."""
        return Measured(list(self._times().values()), self.sampler.found)

    def _times(self) -> dict[int, dict[str, float]]:
        times = dict(enumerate(self.timer.step_times()[: self.steps]))
        for number in (_TRACED, *self.looks, *self._recorded):
            times.pop(number, None)
        return times

    def operator_ms(self) -> dict[str, float]:
        """Return the milliseconds of forward and backward by kind of operator, if possible without trials."""
        for look in reversed(self.looks.values()):
            if look.costs is not None and (found := look.costs.read()):
                return found
        return {}

    def read_kernels(self) -> RecordedStep:
        """Return the kernels of the step that was looked at last.

        Raises:
            ValueError: they are not known, or not those of this rank alone.
        """
        looks = list(self.looks.values())
        if not looks:
            raise ValueError("its operators were not looked at")
        if any(map(is_sharded, self.models)):
            raise ValueError("its parameters are sharded, and operators have the shapes of all ranks together")
        if looks[-1].failure is not None:
            raise ValueError(f"an operator cannot be described: {describe_error(looks[-1].failure)}")
        return looks[-1].kernels

    def compare_ranks(self) -> None:
        """Exchange the times of all ranks; each rank must call it."""
        phases = ["data_wait", "transfer"]
        # In the forward of sharded parameters the ranks wait for one another.
        if not any(map(is_sharded, self.models)):
            phases.append("forward")
        own = {}
        for number, times in self._times().items():
            own[number] = sum(times[phase] for phase in phases)
        self.own_ms = from_all_ranks([own])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters that require gradients."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield name, parameter

    def held_parameters(self) -> set[int]:
        """Return the ids of all parameters in an optimizer."""
        held = set[int]()
        for optimizer in (*self.host.optimizers, *(record.optimizer for record in self.updates.values())):
            held.update(map(id, parameters_of(optimizer)))
        return held

    def unused_parameters(self) -> list[str]:
        """Return the names of parameters in an optimizer that had no gradient in any update."""
        used: set[int] = set().union(*(record.with_gradient for record in self.updates.values()))
        held = self.held_parameters()
        return [name for name, one in self.named_parameters() if id(one) in held and id(one) not in used]

    def before_backward(self) -> None:
        """Note the gradients that exist when a backward begins."""
        # In a step whose operators are looked at, those of this comparison would be seen too.
        if self._look is None:
            for record in self.updates.values():
                record.before_backward()

    def before_update(self, optimizer: Optimizer, line: SourceLine | None) -> None:
        """Note an optimizer and its gradients before it steps at a line of the user's code."""
        self.updates.setdefault(id(optimizer), UpdateRecord(optimizer, line)).note_gradients()

    def after_update(self, optimizer: Optimizer) -> None:
        """Count an update."""
        record = self.updates[id(optimizer)]
        record.after_update()
        if self._look is None:
            record.compare_gradients()

    def note_scheduler(self, scheduler: object, line: SourceLine | None) -> None:
        """Count a call of a scheduler's ``step``."""
        found = self.schedulers.get(id(scheduler))
        if found is None:
            # The scheduler sets this attribute, for a warning of its own.
            has_stepped = getattr(scheduler.optimizer, "_opt_called", False)
            found = SchedulerCall(scheduler, line, came_first=not has_stepped)
            self.schedulers[id(scheduler)] = found
        found.calls += 1

    def note_action(self, name: str, seconds: float) -> None:
        """Add the time of an action, such as writing a checkpoint, if the current step counts."""
        if self.is_warm:
            self.actions.setdefault(name, []).append(seconds)

    def _note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Add the time of a full garbage collection, which goes through all objects."""
        if info["generation"] != 2:
            return
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self.note_action("garbage collection", time.perf_counter() - self._collecting_since)

    @property
    def counted(self) -> int:
        """Number of steps after the warm-up, at least 1."""
        return max(self.done - self.warmup, 1)

    def close(self) -> None:
        """Stop watching, whatever was seen so far."""
        self.leave_look()
        with suppress(ValueError):  # the warm-up has not ended
            gc.callbacks.remove(self._note_collection)
        if not self._only_times:
            self.sampler.stop()
        self.modules.close()
        self.blocks.stop()

    def leave_look(self) -> None:
        """Stop looking at operators, and recording memory, if that is done."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        if self._look is not None:
            self._look.__exit__(None, None, None)
            self._look = None


def _try_nothing(func: object, args: object, kwargs: object) -> None:
    """Stand in for trials in a step without any."""
