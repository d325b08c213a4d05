"""State that Lightning and torchmetrics leave out of checkpoints: metrics amid an epoch, stops, reloads and saves."""

import os
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

from lightning_fasttrain.core.host.lightning import last_save, set_last_save
from lightning_fasttrain.core.state.restore import MetricState, add_to_metric_, read_metric, write_metric_
from lightning_fasttrain.run.checkpoint.loop_progress import SavePoint

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
