"""Record the time of steps, peak memory and every loss of one rung, without waiting for the device inside a turn."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fasttrain.core.machine import Neighbours
from lightning_fasttrain.proof.verification.short_run import PeakObserver

MIB = 2**20
# Wall clock, and the clock that programs are compared by, in seconds; on a GPU both are the same event.
_Stamp = tuple[Any, Any]


class Recorder(PeakObserver):
    """Watches a training loop that calls :meth:`begin` before each step and :meth:`end` after it.

    As a callback it does so itself. List it last, so that the work of every other callback is inside.

    Steps come in three phases: warm-up; memory, as watching every allocation takes time; and timed, from the end of a
    step to the end of the next, so that the loader's and the loop's own time count. With ``ask``, the run pauses
    before each turn of timed steps until it gets word to continue or to stop.

    Two clocks are read. Programs are compared by :meth:`turn`: the processor time of this process, which other
    processes change less than the wall clock, or the events of a GPU. :meth:`result` has the time by the wall clock.

    Args:
        device: where the steps run.
        warmup: steps before the clock counts.
        timed: steps on the clock; with ``ask``, those of one turn.
        memory: steps whose peak memory is taken; at least one.
        tell: called after each step with its number, its phase and perhaps its loss.
        tell_loss: fetch and report the loss of every step, as a naive loop does; the host then waits for the device.
        turns: the most turns that there can be.

    Attributes:
        steps: number of steps of the run; with ``ask``, the most.
        ask: waits, and returns whether there is another turn; None: there are all of them.

    Example:
        >>> recorder = Recorder(torch.device("cpu"), warmup=1, timed=2, tell=print)
        >>> recorder.phase(0), recorder.phase(1), recorder.phase(3), recorder.steps
        ('warm-up', 'memory', 'timed', 4)
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        timed: int,
        memory: int = 1,
        tell: Callable[[dict[str, Any]], None] | None = None,
        tell_loss: bool = False,
        turns: int = 1,
    ) -> None:
        self.device = device
        self.warmup = warmup
        self.memory = memory
        # Memory that a paused run has freed is taken from the driver again in the first step of a turn.
        self.untimed = int(turns > 1 and device.type == "cuda")
        self.timed = timed
        self.steps = warmup + memory + turns * (timed + self.untimed)
        self.tell = tell
        self.tell_loss = tell_loss
        self.ask: Callable[[], bool] | None = None
        self.losses: list[Tensor] = []
        self._turns: list[list[_Stamp]] = []
        self._neighbours, self._cores = Neighbours(), None

    def phase(self, step: int) -> str:
        if step < self.warmup:
            return "warm-up"
        return "memory" if step < self.warmup + self.memory else "timed"

    def begin(self, step: int, *held: object) -> None:
        """Record the beginning of a step; ``held`` is in memory already: module, optimizer, batch."""
        if self.phase(step) == "memory":
            self.begin_measuring(self.device, *held)

    def end(self, step: int, loss: Tensor) -> bool:
        """Record the end of a step, after its optimizer step; return whether another step follows."""
        self.end_measuring()
        # Kept as a tensor: to read its value the host would wait for the device.
        self.losses.append(loss.detach())
        message: dict[str, Any] = {"step": step + 1, "phase": self.phase(step)}
        if self.tell_loss:
            message["loss"] = loss.item()
        if self.tell is not None:
            self.tell(message)
        done = step + 1 - self.warmup - self.memory  # steps of the turns so far
        if done > 0:
            self._turns[-1].append(self._stamp())
        if done < 0 or done % (self.untimed + self.timed):
            return True
        if step + 1 == self.steps or (self.ask is not None and not self._pause()):
            return False
        self._neighbours = Neighbours()
        self._turns.append([self._stamp()])
        return True

    def _pause(self) -> bool:
        """Wait for the next turn, meanwhile leaving a GPU's free memory to other processes."""
        assert self.ask is not None
        # A full collection takes as long as several short steps, and would fall into a turn by chance.
        gc.collect()
        gc.freeze()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self._cores = self._neighbours.cores()
        return self.ask()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: right before the step."""
        self.begin(batch_idx, pl_module, *trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped and the loss of the step is known."""
        # Lightning makes a dict of whatever training_step returns.
        if not self.end(batch_idx, outputs["loss"]):
            trainer.should_stop = True

    def turn(self) -> dict[str, float | None]:
        """Return the time of a step in the last turn: by the clock that programs are compared by, and by the wall.

        Also the number of cores that other processes kept busy meanwhile. Empty before the first turn.
        """
        if not self._turns:
            return {}
        first, last = self._turns[-1][self.untimed], self._turns[-1][-1]
        return {
            "ms": self._ms(first[1], last[1]) / self.timed,
            "wall_ms": self._ms(first[0], last[0]) / self.timed,
            "cores": self._cores,
        }

    def result(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the measurements as plain JSON, after waiting for the device. Times are by the wall clock."""
        times_ms = []
        for turn in self._turns:
            stamps = turn[self.untimed :]
            times_ms += [self._ms(before[0], after[0]) for before, after in itertools.pairwise(stamps)]
        step_ms = statistics.median(times_ms or [math.nan])
        losses = list(map(float, self.losses))
        return {
            "step_ms": step_ms,
            "step_ms_all": times_ms,
            "tokens_per_s": tokens_per_step / step_ms * 1000,
            "peak_mib": self.peak_bytes / MIB,
            "loss": losses[-1],
            "losses": losses,
        }

    def _stamp(self) -> _Stamp:
        if self.device.type != "cuda":
            return time.perf_counter(), time.process_time()
        # An event lets the device take the time, so the host does not wait.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, event

    def _ms(self, before: Any, after: Any) -> float:
        if self.device.type != "cuda":
            return (after - before) * 1000
        after.synchronize()
        return before.elapsed_time(after)
