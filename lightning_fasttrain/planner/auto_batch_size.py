"""Find the largest micro-batch that fits before the first step, at the same global batch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.device import GIB, free_bytes, is_out_of_memory
from lightning_fasttrain.core.distributed import largest_over_ranks
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.messages import explain, first_line, format_bytes, number_of, say
from lightning_fasttrain.core.peak_memory import refuse_uncounted
from lightning_fasttrain.loaders import BatchSizeWarmup, SequenceLengthWarmup
from lightning_fasttrain.micro_batching import MicroBatching, TokenWeightedAccumulation
from lightning_fasttrain.planner.auto import AddsTechniques, Auto
from lightning_fasttrain.profiling.memory_meter import MemoryMeter
from lightning_fasttrain.proof.rehearsal.context import fill_up, find_window, read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsing, is_rehearsing
from lightning_fasttrain.proof.rehearsal.run_copy import (
    RunCopy,
    copy_run,
    devices_again,
    find_unrehearsable,
    leaving_no_trace,
)
from lightning_fasttrain.proof.verification.short_run import EnoughError, PeakObserver
from lightning_fasttrain.technique.technique import needs_an_object

_ROOM = 0.95  # of the memory of a GPU: fragmentation and libraries are not predicted


@dataclass(frozen=True)
class Tried:
    """Result of the steps of a trial.

    Attributes:
        parts: number of micro-batches of the last batch: more than requested if any rank ran out of memory.
        peak_bytes: peak memory of the last step on this rank.
    """

    parts: int
    peak_bytes: int


@dataclass(frozen=True)
class PartTrial:
    """Predicts and tries steps of a run.

    Attributes:
        trainer: the Trainer of the run.
        run: a copy of the run.
        batch: the batch of each step.
        most: number of samples in the largest batch of any rank.
        steps: number of optimizer steps of a trial, at least 2.
        window: number of batches per optimizer step.
        predicted: number of micro-batches → predicted bytes.
    """

    trainer: L.Trainer
    run: RunCopy
    batch: Any
    most: int
    steps: int
    window: int
    predicted: dict[int, int] = field(default_factory=dict)

    def predict(self, parts: int) -> float:
        """Return the bytes that a device should have for a step of this rank.

        Raises:
            Exception: it cannot be predicted; also on errors of the module, which may take another path without values.
        """
        peak = self.run.predict_peak(self.trainer, self.batch, MicroBatching(parts))
        self.predicted[parts] = peak
        return peak / (_ROOM if self.trainer.strategy.root_device.type == "cuda" else 1.0)

    def take_steps(self, parts: int) -> Tried:
        """Run some optimizer steps of a copy, with each batch in ``parts`` micro-batches.

        A rank that runs out of memory notifies the others, and all continue with more micro-batches, so that none
        waits, as in :class:`~lightning_fasttrain.MicroBatching`. The last step is measured, which has all state that
        is kept between steps.

        Raises:
            torch.OutOfMemoryError: single samples do not fit; or, on several ranks, memory ran out outside of forward
                and backward, where the other ranks cannot follow.
        """
        adaptive, watch = MicroBatching("auto"), _Watch(self.steps, self.window)
        adaptive.n = parts
        # One batch more than is run, so that none of the steps ends an epoch.
        batches = fill_up([self.batch], self.steps * self.window + 1)
        copies = replace(self.run, callbacks=[*_at_full_size(self.run), adaptive])
        try:
            copies.fit(batches, [], watch, devices_again(self.trainer))
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.trainer.world_size > 1 or parts == self.most:
                raise
            # Memory ran out where MicroBatching cannot retry, for example in the optimizer's step.
            return Tried(parts + 1, 0)
        return Tried(min(watch.parts, self.most), watch.peak_bytes)


def _at_full_size(run: RunCopy) -> list[L.Callback]:
    """Return the callbacks as they act at the end of all warm-ups, when a step takes most memory."""
    grown: list[L.Callback] = []
    for callback in run.callbacks:
        if isinstance(callback, BatchSizeWarmup):
            grown.append(TokenWeightedAccumulation(callback.growth.full, count=callback.count, check=callback.check))
        elif not isinstance(callback, MicroBatching | SequenceLengthWarmup):
            grown.append(callback)
    return grown


class _Watch(PeakObserver, Checkpoint):
    """Measures the last of some steps, and then ends the run; a ``Checkpoint``, which Lightning calls last."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps, self.window = steps, window
        self.parts = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        # On the CPU the meter is torch's profiler, of which a process can run one at a time.
        if batch_idx == (self.steps - 1) * self.window and not torch.autograd._profiler_enabled():
            self.begin_measuring(pl_module.device, pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if accumulation_continues(trainer) or batch_idx + 1 < self.steps * self.window:
            return
        self.end_measuring()
        self.parts = next(callback.n for callback in trainer.callbacks if isinstance(callback, MicroBatching))
        raise EnoughError


def possible_parts(size: int) -> list[int]:
    """Return the numbers of micro-batches that give distinct micro-batch sizes.

    Example:
        >>> possible_parts(6)
        [1, 2, 3, 6]
    """
    return sorted({-(-size // part) for part in range(1, size + 1)})


def predict_parts(peak_of: Callable[[int], float], limit_bytes: float, parts: list[int]) -> int:
    """Return the fewest micro-batches whose predicted peak is within a limit; the most, if none is.

    Args:
        peak_of: number of micro-batches → bytes, which decrease from two on. It is called a few times only.
        limit_bytes: limit of the peak.
        parts: possible numbers of micro-batches, increasing.

    Example:
        >>> predict_parts(lambda n: 100 + 60 / n, limit_bytes=112, parts=[1, 2, 3, 6, 12])
        6
    """
    # Asked by itself, since an unsplit batch is not on the decreasing curve.
    if peak_of(parts[0]) <= limit_bytes:
        return parts[0]
    first, last = 1, len(parts) - 1
    while first < last:
        middle = (first + last) // 2
        if peak_of(parts[middle]) <= limit_bytes:
            last = middle
        else:
            first = middle + 1
    return parts[last]


class _Found:
    """Result of the search, shared by all copies of the callback, one of which searches."""

    def __init__(self) -> None:
        self.parts: int | None = None
        self.predicted_bytes: int | None = None
        self.measured_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Found":
        return self


@check_arguments
class AutoBatchSize(AddsTechniques):
    """Run each batch in as few micro-batches as fit into memory, so that the global batch does not change.

    Before the first step the memory of a step is predicted for several numbers of micro-batches, with all techniques.
    The fewest that fit are tried: some steps of a copy of the run, with copies of its callbacks, its precision,
    accumulation and clipping, on all its ranks; if they run out of memory, or take more than the limit, more
    micro-batches are tried. Then the run begins without a trace of this: weights, optimizer, random states and the
    position in the loader are unchanged, and nothing was logged. The micro-batches run as in
    :class:`~lightning_fasttrain.MicroBatching`, which is added to the Trainer.

    The batch is the largest in a sample of the loader's, with sequences and windows at the end of their warm-up.
    Under DDP the ranks use the number of the one with the least free memory. A resumed run continues with it.

    Acts in ``on_train_start``, when loaders and optimizers exist, and makes its copies in ``setup``: list it before
    techniques.

    Args:
        memory_gib: limit for a step's peak on each device in GiB; ``"fit"``: its free memory.
        steps: number of tried steps, at least 2, since the first creates the optimizer's state.
        seconds: time limit for reading batches to find the largest.
        cuda_graph: True replays the micro-batches of the run as CUDA graphs, as in
            :class:`~lightning_fasttrain.MicroBatching`; the tried steps, and batches that fit whole, run without.

    Attributes:
        parts: number of micro-batches of a batch; None before it is known.
        predicted_bytes: predicted peak of a step on this rank; None if it could not be predicted.
        measured_bytes: peak of the last tried step on this rank.

    Raises:
        TypeError, ValueError: the limit is not positive, or fewer than 2 steps; in ``fit``: it is listed after a
            technique or beside MicroBatching or Auto, the strategy allows no copy of the run, or single samples take
            more than the limit; with ``cuda_graph=True`` what MicroBatching refuses.
        torch.OutOfMemoryError: in ``fit``: single samples do not fit on some rank; the message says what else helps.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> auto = AutoBatchSize()
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", max_steps=1, callbacks=[auto], logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> auto.parts
        1

    Source:
        Ours. Lightning's ``BatchSizeFinder`` changes the loader's batch, without the other callbacks and on one
        process only.
    """

    def __init__(
        self,
        memory_gib: PositiveFloat | Literal["fit"] = "fit",
        steps: PositiveInt = 3,
        seconds: PositiveFloat = 5.0,
        cuda_graph: bool | None = None,
    ) -> None:
        if steps < 2:
            raise ValueError(explain("steps=1", "the first makes the optimizer's state", "Use steps=2 or more"))
        self.memory_gib, self.steps, self.seconds, self.cuda_graph = memory_gib, steps, seconds, bool(cuda_graph)
        self._found = _Found()
        self._run: RunCopy | None = None

    @property
    def parts(self) -> int | None:
        return self._found.parts

    @property
    def predicted_bytes(self) -> int | None:
        return self._found.predicted_bytes

    @property
    def measured_bytes(self) -> int:
        return self._found.measured_bytes

    @needs_an_object
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: Lightning's earliest. Callbacks that are added here are set up with the others."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse_uncounted(type(self).__name__, trainer.strategy.root_device)
        was_copied = is_rehearsing() and any(isinstance(callback, MicroBatching) for callback in trainer.callbacks)
        if not was_copied:
            self._refuse_others(trainer)
            # Techniques are set up only here; the number of micro-batches comes later.
            self._add(trainer, [MicroBatching(1, cuda_graph=self.cuda_graph)])
        if not is_rehearsing():
            self._found.parts = None
        # Copied before any technique acts, so that the copies get their techniques as the run does.
        self._run = copy_run(trainer, pl_module, (AutoBatchSize, MicroBatching, MemoryMeter))

    def _refuse_others(self, trainer: L.Trainer) -> None:
        name, unrehearsable = type(self).__name__, find_unrehearsable(trainer)
        for callback in trainer.callbacks:
            if isinstance(callback, MicroBatching | Auto):
                why = "both choose the number of parts"
                raise ValueError(explain(f"{name} with {callback}", why, "Remove one of them"))
        self._refuse_earlier(trainer, "parts come")
        if unrehearsable is not None:
            way_out = "Give a number, such as MicroBatching(8); predict_memory(strategy=...) says which fits"
            raise ValueError(explain(name, unrehearsable, way_out))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last before the first batch, when a checkpoint has been read."""
        run, self._run = self._run, None
        if run is not None and self._found.parts is None:
            with Rehearsing(), leaving_no_trace(trainer, pl_module):
                self._search(trainer, run)
        for callback in trainer.callbacks:
            if isinstance(callback, MicroBatching):
                callback.n = self._found.parts or 1
                # Called again, since it refuses what several micro-batches cannot be used with.
                callback.on_fit_start(trainer, pl_module)

    def _remove_added(self, trainer: L.Trainer) -> None:
        super()._remove_added(trainer)
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self._found.parts}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        self._found.parts = state_dict["parts"]

    def _search(self, trainer: L.Trainer, run: RunCopy) -> None:
        window = find_window(trainer, run)
        sample, _ = read_batches(trainer, window, self.seconds)
        batch = sample.first[0] if sample.largest is None else sample.largest
        # All ranks must go through the same numbers of micro-batches.
        most = int(largest_over_ranks([batch_size(batch)])[0])
        trial = PartTrial(trainer, run, batch, most, self.steps, window)
        limit, possible = self._limit(trainer), possible_parts(most)
        parts = int(largest_over_ranks([_predict(trial, limit, possible)])[0])
        while True:
            tried = trial.take_steps(parts)
            peak = int(largest_over_ranks([tried.peak_bytes])[0])
            if tried.parts == parts and (self.memory_gib == "fit" or peak <= limit):
                break
            say("AutoBatchSize: batches in %s do not fit", number_of(parts, "part"))
            failed = parts
            while 2 * failed < tried.parts:  # these were tried on the way
                failed *= 2
            left = [more for more in possible if more > failed]
            if not left:
                why = f"one sample at a time takes {peak / GIB:.4g} GiB, {(peak - limit) / GIB:.2g} too much"
                way_out = "Give more memory, or ActivationCheckpointing and other techniques beside"
                raise ValueError(explain(f"memory_gib={self.memory_gib}", why, way_out))
            parts = left[0]
        found = self._found
        found.parts, found.measured_bytes, found.predicted_bytes = parts, tried.peak_bytes, trial.predicted.get(parts)
        in_parts = f"{number_of(parts, 'part')} of {number_of(-(-batch_size(batch) // parts), 'sample')}"
        took = f"{format_bytes(tried.peak_bytes)} of {format_bytes(limit)}"
        say("AutoBatchSize: batches run in %s; a step took %s", in_parts, took)

    def _limit(self, trainer: L.Trainer) -> float:
        """Return the bytes available for a step on the rank with the least free memory."""
        if not isinstance(self.memory_gib, str):
            return self.memory_gib * GIB
        free = free_bytes(trainer.strategy.root_device)
        return -largest_over_ranks([-math.inf if free is None else -free])[0]


def _predict(trial: PartTrial, limit: float, possible: list[int]) -> int:
    """Return the fewest micro-batches that should fit this rank; the fewest of all if it cannot be predicted."""
    try:
        return predict_parts(trial.predict, limit, possible)
    except Exception as error:
        say("AutoBatchSize: parts are only tried, since a step cannot be predicted: %s", first_line(error))
        return possible[0]
