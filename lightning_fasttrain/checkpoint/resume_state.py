"""State of a checkpoint that a run resumes from, restored at two moments: loaders are made, and training continues.

Lightning saves its counters as they are, in the middle of an iteration, and on resuming skips the rest of that
iteration: pending validation, plateau schedules, the end of an epoch; with ``max_steps`` it ends an epoch twice. Here
the position of the checkpoint in Lightning's loops is found, and the rest of the iteration is run.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from torch import Tensor
from torchmetrics import Metric

from lightning_fasttrain.checkpoint.loader_state.attributes import watch_attributes
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader, is_stateful
from lightning_fasttrain.checkpoint.run_fingerprint import (
    describe_loader,
    keeps_global_batch,
    list_disagreements,
)
from lightning_fasttrain.core.distributed import unpack
from lightning_fasttrain.core.host.lightning import (
    DataFetcher,
    is_last_batch_taken,
    last_save,
    set_last_save,
    validation_loaders,
)
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.metric_state import MetricState, add_to_metric_, read_metric, write_metric_
from lightning_fasttrain.core.state.rng import random_state, seeded, set_random_state


class SavePoint(StrEnum):
    """The part of a training iteration that was finished when the checkpoint was saved."""

    BATCH = "batch"  # the batch is trained; what follows a batch, such as validation, is not done
    VALIDATION = "validation"  # the batch is trained and validation is done
    ITERATION = "iteration"  # everything that follows a batch is done, and the next batch has not begun
    EPOCH = "epoch"  # an epoch is done, and the next has not begun
    WITHIN = "within"  # inside a batch, as after an exception: the batch is started again


def find_save_point(trainer: L.Trainer) -> SavePoint:
    """Return the current position of ``trainer`` in its iteration."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    validation = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    # Lightning counts `processed` before the hooks at the end of an epoch, in which checkpoints are saved, run.
    if epochs.started == epochs.processed:
        return SavePoint.EPOCH
    if trainer.validating:
        done = validation.is_last_batch and validation.current.ready == validation.current.completed
        if done:
            return SavePoint.VALIDATION
        return SavePoint.BATCH
    # `completed` is counted after on_train_batch_end, in which checkpoints are saved.
    if batches.ready == batches.processed == batches.completed + 1:
        return SavePoint.BATCH
    if batches.ready == batches.processed == batches.completed:
        return SavePoint.ITERATION
    return SavePoint.WITHIN


def list_left_out(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return a warning if the run stopped within an epoch, whose other batches it will never train on."""
    loops = checkpoint["loops"]["fit_loop"]
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    ended = epochs["started"] == epochs["processed"] > 0
    is_done = 0 <= trainer.max_steps <= checkpoint["global_step"]
    if not ended or batches["is_last_batch"] or is_done:
        return []
    trained = batches["current"]["processed"]
    what = f"the checkpoint was saved after training had stopped after {trained} batches of an epoch"
    why = "Lightning ends an epoch where it stops, so this run begins the next one and leaves out the other batches"
    return [explain(what, why, "Resume from a checkpoint that was saved during training, every_n_train_steps")]


def complete_batch_(checkpoint: dict[str, Any]) -> None:
    """Count the batch after which a checkpoint was taken as completed.

    Otherwise Lightning repeats it or, at the end of an epoch, skips the rest of the epoch's work."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


def resume_after_batch(trainer: L.Trainer, point: SavePoint, restore: Callable[[], None]) -> Undo:
    """Make the first iteration of the resumed epoch the rest of the one in which the checkpoint was taken.

    ``restore`` is called first in that iteration, after everything that Lightning does before it.
    """
    loop = trainer.fit_loop.epoch_loop
    # Otherwise the loop considers validation, and itself, done.
    loop.val_loop._has_run = False
    advance = loop.advance

    def rest_of_an_iteration(data_fetcher: DataFetcher) -> None:
        # From here on Lightning's own advance is called, whatever happens below.
        undo()
        _no_restart(trainer)
        if point is not SavePoint.WITHIN:
            # As after a batch; otherwise logged values are reset.
            trainer._logger_connector._first_loop_iter = True
        restore()
        if point is SavePoint.ITERATION and loop._is_training_done:
            raise StopIteration  # which ends the epoch
        if point in (SavePoint.ITERATION, SavePoint.WITHIN):
            advance(data_fetcher)  # nothing is left of the saved iteration
        else:
            loop._skip_next_val = point is SavePoint.VALIDATION

    undo = patch(loop, "advance", rest_of_an_iteration)
    return undo


def resume_after_epoch(trainer: L.Trainer) -> None:
    """Begin the next epoch as any other; call it before ``trainer.fit_loop`` begins that epoch."""
    fit_loop = trainer.fit_loop
    _no_restart(trainer)
    # Otherwise Lightning treats the new epoch as a resumed one: without on_train_epoch_start, and without a new pass
    # over the loaders.
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
    progress = fit_loop.epoch_progress
    # The values that Lightning leaves once the hooks at the end of an epoch are done.
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.completed = counts.processed


def end_epoch_of_plateau_schedules(trainer: L.Trainer) -> None:
    """Step the plateau schedules: the only change to training that follows the hooks at the end of an epoch."""
    fit_loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    if is_last_batch_taken(trainer):
        now = epochs.completed
        # This is `trainer.current_epoch`, which the schedules count by.
        epochs.completed = epochs.processed - 1
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed = now


def _no_restart(trainer: L.Trainer) -> None:
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._restarting = False


def step_takes_batches(trainer: L.Trainer) -> bool:
    """Whether ``training_step`` receives the iterator and takes as many batches as it likes."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def count_as_ended(trainer: L.Trainer, ended: Sequence[bool]) -> None:
    """Mark which of several loaders have ended once; Lightning cycles them until all have."""
    cycle = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    if isinstance(cycle, _MaxSizeCycle):
        cycle._consumed = [before or now for before, now in zip(cycle._consumed, ended, strict=True)]


class ResumeState:
    """State that a checkpoint holds for this process.

    Args:
        saved: what :class:`~lightning_fasttrain.checkpoint.ExactResume` wrote.
        loops: Lightning's state of the fit loop.
        trainer: the resuming one.
        strict: whether other settings are an error.

    Attributes:
        point: the part of an iteration that was finished.
        settings: those of the saved run.
        mine: state of this process; None if the checkpoint has another number of processes, whose positions and random
            states do not fit. With a technique that keeps the global batch, positions do, and the rest is divided.
        positioned: whether the training loaders have their positions.
        is_divided: whether the checkpoint has another number of processes.
        unlogged: sums behind ``self.log`` that wait for this run to log the same values.
    """

    def __init__(self, saved: dict[str, Any], loops: dict[str, Any], trainer: L.Trainer, strict: bool) -> None:
        self.saved, self.strict = saved, strict
        self.point, self.settings = SavePoint(saved["point"]), saved["settings"]
        self.mine: dict[str, Any] | None = None
        self.is_divided = len(saved["ranks"]) != trainer.world_size
        self.unlogged: list[dict[str, Any]] = []
        self._others: list[dict[str, Any]] = []  # of ranks that this run does not have
        if not self.is_divided:
            self.mine = unpack(saved["ranks"][trainer.global_rank])
        elif keeps_global_batch(trainer):
            self.mine, self._others = divide_states(saved["ranks"], trainer.global_rank, trainer.world_size)
        epochs = loops["epoch_progress"]["current"]
        # Until `completed` is counted, Lightning has not stepped the plateau schedules of the epoch.
        self._plateaus_are_due = self.point is SavePoint.EPOCH and epochs["completed"] < epochs["processed"]
        self._batches = loops["epoch_loop.batch_progress"]["current"]["processed"]
        self.positioned = False
        self._between_passes: list[tuple[ResumableLoader, dict[str, Any]]] = []
        self._said: set[str] = set()

    def check(self, now: dict[str, Any], then: dict[str, Any] | None = None) -> None:
        """Refuse other settings than the saved ones, or warn of each once if not ``strict``."""
        for message in list_disagreements(self.settings if then is None else then, now):
            if message in self._said:
                continue
            self._said.add(message)
            if self.strict:
                raise ValueError(message)
            warn(message)

    def check_loader(self, loader: object, i: int) -> None:
        """Refuse another training loader than the one that was saved at this place."""
        saved = self.settings["loaders"]
        self.check(describe_loader(loader), next(iter(saved[i:]), None) or {})

    def set_position(self, held: ResumableLoader | None, i: int) -> None:
        """First moment: a training loader is made, and resumes at its position."""
        if held is None or self.mine is None:
            return
        state = next(iter(self.mine["loaders"][i:]), None)
        if not state:
            return
        _load(held, state)
        if state["start"] is None:
            self._between_passes.append((held, state))
        else:
            held.count_from(self._batches)

    def _restore_metrics(self, trainer: L.Trainer, module: L.LightningModule, mine: dict[str, Any]) -> None:
        logged = [state["logged"] for state in (mine, *self._others)]
        if self.is_divided and not is_last_batch_taken(trainer):
            # self.log refuses a value that was restored with another sync, which depends on the number of ranks; so
            # these sums are added to those of the next batch.
            self.unlogged, mine = logged, {**mine, "logged": {}}
        restore_metrics(trainer, module, mine)
        for other in self._others:
            add_metrics(module, other)
            add_logged(trainer, other["logged"])

    def restore(self, trainer: L.Trainer, module: L.LightningModule) -> list[dict[str, Any]]:
        """Second moment: training continues right after this, with the saved random states.

        Returns:
            The states of validation loaders that are not made yet.
        """
        restore_forgotten(trainer, self.saved["forgotten"])
        mine = self.mine
        if mine is None:
            return []
        parameters = dict(module.named_parameters())
        if "gradients" in self.saved:
            for name, grad in self.saved["gradients"][trainer.global_rank].items():
                parameters[name].grad = grad.to(parameters[name])
        self._restore_metrics(trainer, module, mine)
        if self._plateaus_are_due:
            end_epoch_of_plateau_schedules(trainer)
        for held, state in self._between_passes:
            _load(held, state)  # again: Lightning may have prefetched a batch
        loaders = validation_loaders(trainer)
        for loader, state in zip(loaders, mine["validation"], strict=False):
            watch_attributes(loader).restore(state, strict=False)
        # Last, since everything above may draw random numbers.
        set_random_state(mine["random"])
        if loaders:
            return []
        return list(mine["validation"])


class _HeldLoader(ResumableLoader):
    """A loader whose position is saved by the callback, for every process, instead of by Lightning for rank 0."""

    _begins_late = True

    # Lightning regards a loader with a state_dict as resumable, and does not warn.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        assert not state


# The method of the base class, since a held loader returns an empty state to Lightning.
_load = ResumableLoader.load_state_dict


def keeps_its_state(loader: object) -> bool:
    """Whether Lightning saves and restores this loader; the condition is Lightning's own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def hold_loader(loader: Iterable[object], seed_samples: bool, on_change: str) -> ResumableLoader | None:
    """Wrap a training loader so that its position is known; return None if it is not ours to save."""
    if keeps_its_state(loader) and not is_stateful(loader):
        return None
    if isinstance(loader, Iterator):
        what = f"ExactResume with a {type(loader).__name__} as a training loader"
        why = "an iterator cannot be read again from its beginning, so its position is not saved"
        warn(explain(what, why, "Use a DataLoader, or an object whose __iter__ starts over"))
        return None
    return _HeldLoader(loader, seed_samples, on_change)


_NOTHING = {"max": -math.inf, "min": math.inf}  # by Lightning's reduce_fx; otherwise 0


def divide_states(saved: Sequence[Tensor], rank: int, world_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state of a rank, and those of further saved ranks whose metrics it continues.

    With fewer ranks than before, rank r continues the metrics of the saved ranks r, r + world_size, and so on, so that
    sums over all ranks stay the same, and the random state of the first of them. An additional rank begins with empty
    metrics and a random state of its own.

    Args:
        saved: the states of all ranks of the saved run, as ``pack`` returned them.
        rank: this rank, of ``world_size``.
    """
    mine = unpack(saved[rank % len(saved)])
    for entry in mine["logged"].values():
        # A single process does not save whether its values are to be reduced over ranks.
        entry["sync"][0] = world_size > 1 and (entry["sync"][0] or len(saved) == 1)
    if rank < len(saved):
        return mine, list(map(unpack, saved[rank + world_size :: world_size]))
    logged = {key: {**entry, "sums": _empty(entry)} for key, entry in mine["logged"].items()}
    with seeded(f"{mine['random']['torch'].sum()} {rank}"):
        random = {**random_state(), "cuda": mine["random"]["cuda"]}
    return {**mine, "random": random, "logged": logged, "metrics": {}}, []


def _empty(entry: dict[str, Any]) -> dict[str, Tensor]:
    nothing = _NOTHING.get(entry["meta"]["reduce_fx"], 0)
    return {name: torch.full_like(value, nothing) for name, value in entry["sums"].items()}


# Lightning's metadata that a checkpoint can hold. Reductions and syncs are functions, saved as names and flags.
_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size")


def read_metrics(trainer: L.Trainer, module: L.LightningModule, point: SavePoint) -> dict[str, Any]:
    """Return this process's sums behind ``self.log``, states of the metrics in ``module``, and callback values."""
    training, validation = trainer.fit_loop.epoch_loop._results, trainer.fit_loop.epoch_loop.val_loop._results
    # The saving hook runs before Lightning resets these, so their sums must not be restored.
    resets = {SavePoint.EPOCH: training, SavePoint.VALIDATION: validation}.get(point, {})
    about_to_be_reset = {id(result.value) for result in resets.values() if not result.is_tensor}
    metrics = {}
    for name, metric in _metrics_of(module).items():
        if id(metric) not in about_to_be_reset:
            states, updates = read_metric(metric)
            metrics[name] = {"states": _copy_value(states), "updates": updates}
    return {
        "callback_metrics": _copy_value(dict(trainer.callback_metrics)),
        "logged": {} if point is SavePoint.EPOCH else _logged_values(training),
        "metrics": metrics,
    }


def _metrics_of(module: L.LightningModule) -> dict[str, Metric]:
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _logged_values(results: Mapping[str, _ResultMetric]) -> dict[str, Any]:
    logged = {}
    for key, result in results.items():
        meta = result.meta
        # A result that was reset starts with its next value. A process group cannot be saved.
        if result.has_reset or meta.sync.group is not None:
            continue
        kept = {name: getattr(meta, name) for name in _META}
        sums = {name: _copy_value(torch.as_tensor(vars(result)[name])) for name in _SUMS if _has_sum(result, name)}
        logged[key] = {
            "meta": {**kept, "reduce_fx": meta.reduce_fx.__name__},
            "sync": [meta.sync.should, meta.sync.rank_zero_only],
            "sums": sums,
        }
    return logged


def _has_sum(result: _ResultMetric, name: str) -> bool:
    return result.is_tensor and (name == "value" or result.meta.is_mean_reduction)


def restore_metrics(trainer: L.Trainer, module: L.LightningModule, state: dict[str, Any]) -> None:
    """Restore the state that :func:`read_metrics` returned."""
    device = trainer.strategy.root_device
    trainer._logger_connector._callback_metrics.update(_copy_value(state["callback_metrics"], device))
    metrics = _metrics_of(module)
    for name in metrics.keys() & state["metrics"].keys():
        metric, saved = metrics[name], state["metrics"][name]
        write_metric_(metric, MetricState(_copy_value(saved["states"], metric.device), saved["updates"]))
    for key, saved in state["logged"].items():
        meta = _Metadata(**saved["meta"])
        if not saved["sums"] and meta.metric_attribute not in metrics:
            continue
        should, rank_zero_only = saved["sync"]
        # As in LightningModule.log: the strategy reduces.
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        result = _ResultMetric(meta, is_tensor=bool(saved["sums"]))
        for name, value in _copy_value(saved["sums"], device).items():
            setattr(result, name, value)
        if not saved["sums"]:
            result.value = metrics[str(meta.metric_attribute)]
        # A metric that was never updated warns when it is computed.
        result._update_count = 1
        trainer.fit_loop.epoch_loop._results[key] = result


def add_metrics(module: L.LightningModule, state: dict[str, Any]) -> None:
    """Add the metrics of another rank of the saved run to those that were restored here."""
    metrics = _metrics_of(module)
    for name in metrics.keys() & state["metrics"].keys():
        metric, saved = metrics[name], state["metrics"][name]
        add_to_metric_(metric, MetricState(_copy_value(saved["states"], metric.device), saved["updates"]))


def add_logged(trainer: L.Trainer, logged: dict[str, Any]) -> dict[str, Any]:
    """Add sums behind ``self.log`` to those that this run has by now; return those that it has not logged yet."""
    results = trainer.fit_loop.epoch_loop._results
    waiting: dict[str, Any] = {}
    for key, saved in logged.items():
        if key not in results:
            waiting[key] = saved
            continue
        add = {"max": torch.maximum, "min": torch.minimum}.get(saved["meta"]["reduce_fx"], torch.add)
        for name, value in _copy_value(saved["sums"], trainer.strategy.root_device).items():
            setattr(results[key], name, add(getattr(results[key], name), value))
    return waiting


def _copy_value(value: object, device: torch.device | str = "cpu") -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device).clone()
    if isinstance(value, dict):
        return {key: _copy_value(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_value(item, device) for item in value]
    return value


def read_forgotten(trainer: L.Trainer) -> dict[str, Any]:
    """Return this state as plain values; it is the same on all processes."""
    saves = {}
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            # The score is copied to the CPU: the resumed run may not have the saving rank's device.
            saves[callback.state_key] = [*last_save(callback), _copy_value(callback.current_score)]
    reloaded = [getattr(*loop) for loop in _reloading_loops(trainer)]
    return {"should_stop": trainer.should_stop, "reloaded": reloaded, "saves": saves}


def restore_forgotten(trainer: L.Trainer, state: dict[str, Any]) -> None:
    """Restore the state that :func:`read_forgotten` returned."""
    # A stop may have been requested since.
    trainer.should_stop = trainer.should_stop or state["should_stop"]
    for loop, epoch in zip(_reloading_loops(trainer), state["reloaded"], strict=True):
        setattr(*loop, epoch)
    path = os.path.abspath(str(trainer.ckpt_path))
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in state["saves"]:
            step, last, callback.current_score = state["saves"][callback.state_key]
            # `last_model_path` and the like are set before the file is written, the two below after it.
            made = {callback.last_model_path, callback.best_model_path, *callback.best_k_models} - {""}
            # The file was saved during this very save, which succeeded.
            if path in map(os.path.abspath, made):
                step, last = trainer.global_step, path
            set_last_save(callback, step, last)


def _reloading_loops(trainer: L.Trainer) -> list[tuple[object, str]]:
    """With ``reload_dataloaders_every_n_epochs``: the loops and attributes that hold the epoch of the last reload."""
    fit_loop = trainer.fit_loop
    return [(fit_loop, "_last_train_dl_reload_epoch"), (fit_loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch")]
