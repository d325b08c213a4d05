"""Collect what a training loop does: times of phases and lines, operators, updates and modules."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks.annotations import Bounds
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.doctor.observation.line_sampler import LineSampler
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.module_watch import ModuleWatch, find_trained_models, is_compiled
from lightning_fasttrain.doctor.observation.operator_trials import OperatorTrials
from lightning_fasttrain.doctor.observation.operator_watch import OperatorWatch
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
from lightning_fasttrain.doctor.observation.update_record import UpdateRecord
from lightning_fasttrain.run.profiling.step_timer import PHASES, StepTimer

LOOP_PHASES = (*PHASES[:-1], "callbacks", PHASES[-1])
StepCount = Annotated[int, Bounds(6)]
MANY_STEPS = "Use steps=6 or more: two are looked at in detail, and the others are timed"
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
    """

    max_epochs: int = 0
    updates: float = math.inf
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[tuple[Any, str]] = field(default_factory=list)
    hooks: dict[str, tuple[str, str]] = field(default_factory=dict)
    savers: set[str] = field(default_factory=set)
    every: dict[str, int] = field(default_factory=dict)


class Watch:
    """Watches ``warmup`` and then ``steps`` optimizer steps; nothing of the run is changed.

    Args:
        device: device of the model.
        steps: number of steps to watch; in two of them each operator is looked at, which are not timed.
        warmup: number of steps before.
    """

    def __init__(self, device: torch.device, steps: int, warmup: int) -> None:
        self.steps, self.warmup, self.device = steps, warmup, device
        self.timer = StepTimer(device, warmup, LOOP_PHASES)
        self.sampler = LineSampler(lambda: self.timer.current)
        self.trials = OperatorTrials()
        self.looks: dict[int, OperatorWatch] = {}
        self.modules = ModuleWatch()
        self.updates: dict[int, UpdateRecord] = {}
        self.schedulers: dict[int, SchedulerCall] = {}
        self.actions: dict[str, list[float]] = {}
        self.loader = LoaderFacts()
        self.host = HostFacts()
        self.done = 0
        self.models: list[nn.Module] = []
        self._look: OperatorWatch | None = None

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
        number = self.done - self.warmup
        looks = number in (1, self.steps // 2)
        self.sampler.active = self.is_warm and not looks
        if not looks or any(map(is_compiled, self.models)):
            return
        trial = _try_nothing
        if number == 1:
            # Once, since each trial runs an operator several times.
            self.trials.budget_s = _SHARE_OF_TRIALS * self.steps * self.timer.step_times()[0]["step"] / 1e3
            trial = self.trials
        self._look = self.looks[number] = OperatorWatch(lambda: self.timer.current, trial)
        self.modules.start(self.models)
        self._look.__enter__()

    def end_step(self) -> None:
        """End a step. At the end of the warm-up the models of a loop are found."""
        self.leave_look()
        self.modules.stop()
        self.done += 1
        self.sampler.active = False
        if self.done == self.warmup and not self.models:
            for record in self.updates.values():
                self.models += find_trained_models(parameters_of(record.optimizer))

    def measure(self) -> Measured:
        """Return the times of the steps by phase and by line, without the steps that were looked at."""
        times = self.timer.step_times()[: self.steps]
        return Measured([step for number, step in enumerate(times) if number not in self.looks], self.sampler.found)

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

    def note_scheduler(self, scheduler: Any, line: SourceLine | None) -> None:
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

    @property
    def counted(self) -> int:
        """Number of steps after the warm-up, at least 1."""
        return max(self.done - self.warmup, 1)

    def close(self) -> None:
        """Stop watching, whatever was seen so far."""
        self.leave_look()
        self.sampler.stop()
        self.modules.close()

    def leave_look(self) -> None:
        """Stop looking at operators, if they are looked at."""
        if self._look is not None:
            self._look.__exit__(None, None, None)
            self._look = None


def _try_nothing(func: Any, args: Any, kwargs: Any) -> None:
    """Stand in for trials in a step without any."""
