"""Records of the watched steps: times by phase, by line and by block, and gradients from one update to the next."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fasttrain.core.device import DeviceTimer
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.doctor.observation.source_lines import Running, Sampled, SourceLine


class BlockTimes:
    """Times the forwards of blocks while ``active``; a model without repeated blocks is divided into its children.

    Attributes:
        active: whether forwards count now.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = False
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._timers: dict[str, DeviceTimer] = defaultdict(partial(DeviceTimer, device))

    def start(self, model: nn.Module) -> None:
        """Add the hooks."""
        for name, block in _parts(model).items():
            self._handles.append(block.register_forward_pre_hook(partial(self._begin, name)))
            self._handles.append(block.register_forward_hook(partial(self._end, name)))

    def stop(self) -> None:
        """Remove the hooks."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read(self, steps: int) -> dict[str, float]:
        """Return milliseconds of a step by block, in the order of their first calls; waits for CUDA."""
        return {name: timer.ms() / max(steps, 1) for name, timer in self._timers.items()}

    def _begin(self, name: str, module: nn.Module, inputs: object) -> None:
        if self.active:
            self._timers[name].start()

    def _end(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        if self.active:
            self._timers[name].stop()

    def __reduce__(self) -> tuple[Any, ...]:  # hooks are copied with a model, and its copy is not watched
        return BlockTimes, (self._device,)


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    try:
        return find_blocks(model)
    except ValueError:
        children = dict(model.named_children())
        return _parts(*children.values()) if len(children) == 1 else children


@dataclass
class UpdateRecord:
    """Facts about one optimizer.

    Attributes:
        optimizer: the optimizer.
        line: line of the user's code at which it stepped first.
        with_gradient: ids of its parameters that ever had a gradient when it stepped.
        updates: number of updates.
        compared: number of updates for which that is known:
        kept_gradients: number of updates whose gradients still contained those of the previous update.
    """

    optimizer: Optimizer
    line: SourceLine | None = None
    with_gradient: set[int] = field(default_factory=set)
    updates: int = 0
    compared: int = 0
    kept_gradients: int = 0
    _was_cleared: bool = True
    _probe: Tensor | None = None

    def before_backward(self) -> None:
        """Note whether the gradients of the previous update are gone."""
        self._was_cleared = self._was_cleared or not _has_values(self._probe)

    def note_gradients(self) -> None:
        """Note which parameters have a gradient: before an update, and after it, since a closure may make them."""
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))

    def after_update(self) -> None:
        """Count the update."""
        self.note_gradients()
        self.updates += 1

    def compare_gradients(self) -> None:
        """Note after an update whether its gradients contained those of the one before."""
        self.compared += 1
        self.kept_gradients += not self._was_cleared
        if not _has_values(self._probe):
            # The smallest one, since all of its gradient is read in each step.
            candidates = [one for one in parameters_of(self.optimizer) if _has_values(one)]
            self._probe = min(candidates, key=lambda one: one.numel(), default=None)
        self._was_cleared = self._probe is None


def _has_values(parameter: Tensor | None) -> bool:
    if parameter is None or parameter.grad is None:
        return False
    # A host sync on CUDA, in the few steps that are watched.
    return bool(parameter.grad.any())


class LineTime(NamedTuple):
    """Milliseconds of a step at a line of the user's code, and the number of samples behind them."""

    line: SourceLine
    ms: float
    samples: int


@dataclass(frozen=True)
class Measured:
    """Times of steps.

    Attributes:
        times: milliseconds of each step by phase, with "other" and "step".
        sampled: what was running in these steps.
    """

    times: Sequence[Mapping[str, float]]
    sampled: Mapping[Running, Sampled]

    @property
    def step_ms(self) -> float:
        """Typical time of a step; 0 if none was measured."""
        return self.typical("step")

    def all_ms(self, phase: str) -> list[float]:
        """Return the time of a phase in each step."""
        return [times[phase] for times in self.times]

    def typical(self, phase: str) -> float:
        """Return the mean time of a phase over all steps but the slowest fifth, so that phases add up to the step.

        Other work of the machine only adds time, in a few steps.
        """
        if not self.times:
            return 0.0
        quickest = sorted(self.times, key=lambda times: times["step"])
        return statistics.fmean(times[phase] for times in quickest[: len(quickest) - len(quickest) // 5])

    def lines(self, concerns: Callable[[Running], bool]) -> list[LineTime]:
        """Return the lines at which something that ``concerns`` accepts was running, the most expensive first."""
        seconds: dict[SourceLine, Sampled] = {}
        for running, sampled in self.sampled.items():
            line = running.call.line
            if line is not None and concerns(running):
                together = seconds.setdefault(line, Sampled())
                together.seconds += sampled.seconds
                together.samples += sampled.samples
        steps = max(len(self.times), 1)
        found = [LineTime(line, 1e3 * one.seconds / steps, one.samples) for line, one in seconds.items()]
        return sorted(found, key=lambda one: -one.ms)

    def line_ms(self, line: SourceLine) -> LineTime:
        """Return the time at one line."""
        found = self.lines(lambda running: running.call.line == line)
        return next(iter(found), LineTime(line, 0.0, 0))
