"""What ``self.log`` records while a batch is run in parts: the values of the unsplit step, once."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fasttrain._host import logging_as
from lightning_fasttrain._messages import warn
from lightning_fasttrain._metric_state import MetricState, add_to_metric_, read_metric, show_step_value_
from lightning_fasttrain._surgery import patch
from lightning_fasttrain.data.normalizer.micro_batch_weights import MicroBatchWeights, Number, add_counts


class PartLogs:
    """Collects the calls of ``self.log`` over the parts of a batch and passes each name on once.

    Means are weighed as the loss is, sums added, minima and maxima taken. A ``torchmetrics`` object accumulates by
    itself; what it shows for this step is computed over all parts, by letting it collect the batch alone.
    """

    def __init__(self) -> None:
        self.part = 0
        self._sums: set[tuple[int, int]] = set()  # part, and where the values lie that are sums, not means
        # Those that are logged by step, learnt from the first batch; by id, as a Metric's hash follows its state.
        self._metrics: dict[int, Metric] = {}

    def note_sum(self, loss: Tensor) -> None:
        """This part's loss is a sum, and so is what is logged of it."""
        # By address: what is logged of it is detached, which shares its memory.
        self._sums.add((self.part, loss.data_ptr()))

    def _reduction(self, seen: list[tuple[int, Any, dict[str, Any]]], reduce_fx: str | Callable[..., Any]) -> str:
        if all(isinstance(value, Tensor) and (part, value.data_ptr()) in self._sums for part, value, _ in seen):
            return "sum"
        return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")

    @contextmanager
    def of_parts(
        self, pl_module: L.LightningModule, parts: Sequence[Any]
    ) -> Iterator[Callable[[Sequence[int], Sequence[Number]], None]]:
        """Within it, ``pl_module.log`` is collected; what it yields logs the combined values afterwards.

        That takes the parts that gave a loss, and by how much each counts.
        """
        self._sums.clear()  # addresses of the last batch, at which there may be other values by now
        calls: dict[str, list[tuple[int, Any, dict[str, Any]]]] = {}
        several = len(parts) > 1

        def collect(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            # The order of LightningModule.log.
            kwargs = {**dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)), **kwargs}
            if isinstance(value, Tensor):
                value = value.detach()
            calls.setdefault(name, []).append((self.part, value, kwargs))

        # Emptied before the batch, so that what they compute after it is of this batch alone.
        earlier = {key: _set_aside(metric) for key, metric in self._metrics.items() if several}

        def pass_on(held: Sequence[int], counts: Sequence[Number]) -> None:
            count_of = dict(zip(held, counts, strict=True))

            @functools.cache  # most names are logged in every part, and share one division
            def weights_of(logging: tuple[int, ...]) -> MicroBatchWeights:
                logged = [count_of.get(part, 0) for part in logging]
                return MicroBatchWeights(logged, add_counts(logged))

            with logging_as(pl_module, "training_step"):
                for name, seen in calls.items():
                    self._log_one(pl_module, name, seen, weights_of if several else None, earlier)
            for key, state in earlier.items():
                add_to_metric_(self._metrics[key], state)

        restore = patch(pl_module, "log", collect)
        try:
            yield pass_on
        finally:
            restore()

    def _log_one(
        self,
        pl_module: L.LightningModule,
        name: str,
        seen: list[tuple[int, Any, dict[str, Any]]],
        weights_of: Callable[[tuple[int, ...]], MicroBatchWeights] | None,
        earlier: dict[int, MetricState],
    ) -> None:
        """Log what all parts logged under a name; ``weights_of`` is None for a single part, which is passed on."""
        _, value, kwargs = seen[-1]
        if weights_of is None:
            pl_module.log(name, value, **kwargs)
            return
        if isinstance(value, Metric):
            if kwargs.get("on_step") is not False:
                self._show_batch(pl_module, value, earlier.pop(id(value), None))
            pl_module.log(name, value, **kwargs)
            return
        if all(isinstance(k.get("batch_size"), int) for _, _, k in seen):
            kwargs = {**kwargs, "batch_size": sum(k["batch_size"] for _, _, k in seen)}
        how = self._reduction(seen, kwargs.get("reduce_fx", "mean"))
        pl_module.log(name, _combine(seen, weights_of, how), **kwargs)

    def _show_batch(self, pl_module: L.LightningModule, metric: Metric, state: MetricState | None) -> None:
        """Make the metric's step value that of the whole batch."""
        if state is not None:
            value = metric.compute()
            add_to_metric_(metric, state)
            show_step_value_(metric, value)
        elif id(metric) in self._metrics:
            return  # logged under a second name; already done
        elif not _can_merge(pl_module, metric):
            warn(
                f"{type(metric).__name__} logged with on_step: its states cannot be merged, so the step value is that "
                "of the last micro-batch (the epoch value is exact). Log it with on_step=False."
            )
        else:
            if read_metric(metric).updates <= self.part + 1:  # nothing before this batch: the state is the batch's
                show_step_value_(metric, metric.compute())
            self._metrics[id(metric)] = metric


def _can_merge(pl_module: L.LightningModule, metric: Metric) -> bool:
    for collection in pl_module.modules():
        # Metrics of a collection may share their states: emptying one would empty the others.
        if isinstance(collection, MetricCollection) and any(metric is other for other in collection.values()):
            return False
    return not (metric.full_state_update or metric.dist_sync_on_step)


def _set_aside(metric: Metric) -> MetricState:
    state = read_metric(metric)
    metric.reset()
    return state


def _combine(
    seen: list[tuple[int, Any, dict[str, Any]]], weights_of: Callable[[tuple[int, ...]], MicroBatchWeights], how: str
) -> Any:
    values = [value for _, value, _ in seen]
    if how == "sum":
        return sum(values)
    if how in ("min", "max"):
        pick = torch.minimum if how == "min" else torch.maximum
        result = torch.as_tensor(values[0])
        for value in values[1:]:
            result = pick(result, torch.as_tensor(value))
        return result
    weights = weights_of(tuple(part for part, _, _ in seen))
    if all(isinstance(x, int | float) for x in (*values, *weights.counts)):
        total: Any = weights.total
        weighed = sum(value * count for value, count in zip(values, weights.counts, strict=True))
        return weighed / total if total else values[-1]
    return weights.add_up([torch.as_tensor(value) for value in values])
