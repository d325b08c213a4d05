"""Log the values of ``self.log`` once per batch, combined over its micro-batches."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fasttrain.core.host.lightning import logging_as
from lightning_fasttrain.core.messages import note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.metrics import MetricState, add_to_metric_, read_metric, show_step_value_
from lightning_fasttrain.data.normalizer.count_targets import CountRule
from lightning_fasttrain.data.normalizer.log_rules import LOSS, OWN, SAMPLES, SUM, LogRules
from lightning_fasttrain.data.normalizer.micro_batch_weights import MicroBatchWeights, Number, add_counts
from lightning_fasttrain.data.normalizer.split_rule import LogRule
from lightning_fasttrain.data.normalizer.trial.runs import own_divisor
from lightning_fasttrain.data.split_batch import batch_size

_ROUNDING = 1e-4
# The arguments of LightningModule.log after the value.
_BY_POSITION = tuple(inspect.signature(L.LightningModule.log).parameters)[3:]


class PartLogs:
    """Collects the calls of ``self.log`` over the micro-batches of a batch and passes each name on once.

    A value with a graph is weighted by its own divisor; others by the rule that was found to give the value of the
    unsplit step; sums are added, minima and maxima reduced. A ``torchmetrics`` object accumulates by itself; its value
    for this step is computed over all micro-batches, by letting it accumulate the batch alone.
    """

    def __init__(self) -> None:
        self.part = 0
        self._sums: set[tuple[int, int]] = set()  # micro-batch and address of values that are sums, not means
        # Metrics logged per step, learned from the first batch; keyed by id, as a Metric's hash depends on its state.
        self._metrics: dict[int, Metric] = {}

    def note_sum(self, loss: Tensor) -> None:
        """Note that this micro-batch's loss is a sum, and so are values logged from it."""
        # By address: logged values are detached, which shares memory.
        self._sums.add((self.part, loss.data_ptr()))

    def _reduction(self, seen: list["LogCall"], reduce_fx: str | Callable[..., Any]) -> str:
        if all(isinstance(call.value, Tensor) and (call.part, call.value.data_ptr()) in self._sums for call in seen):
            return "sum"
        return _name_reduction(reduce_fx)

    @contextmanager
    def of_parts(
        self, pl_module: L.LightningModule, parts: Sequence[Any], rules: LogRules
    ) -> Iterator["CollectedLogs"]:
        """Collect the calls of ``pl_module.log`` in the context; the yielded object logs the combined values."""
        self._sums.clear()  # addresses from the last batch, which may have been reused
        calls: dict[str, list[LogCall]] = {}
        several = len(parts) > 1

        def collect(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            # The argument order of LightningModule.log.
            kwargs = {**dict(zip(_BY_POSITION, args, strict=False)), **kwargs}
            own: Number | None = None
            if isinstance(value, Tensor):
                own = own_divisor(value) if several and _may_be_own(rules, name) else None
                value = value.detach()
            calls.setdefault(name, []).append(LogCall(self.part, value, kwargs, own))

        # Reset before the batch, so that their values afterwards are of this batch alone.
        earlier = {key: _set_aside(metric) for key, metric in self._metrics.items() if several}

        def pass_on(weighting: LogWeights) -> None:
            with logging_as(pl_module, "training_step"):
                for name, seen in calls.items():
                    self._log_one(pl_module, name, seen, weighting if several else None, earlier)
            for key, state in earlier.items():
                add_to_metric_(self._metrics[key], state)

        restore = patch(pl_module, "log", collect)
        try:
            yield CollectedLogs(calls, pass_on)
        finally:
            restore()

    def _log_one(
        self,
        pl_module: L.LightningModule,
        name: str,
        seen: list["LogCall"],
        weighting: "LogWeights | None",
        earlier: dict[int, MetricState],
    ) -> None:
        """Log the combined value of a name; ``weighting`` is None for a single micro-batch, whose call is passed on."""
        value, kwargs = seen[-1].value, seen[-1].kwargs
        if weighting is None:
            pl_module.log(name, value, **kwargs)
            return
        if isinstance(value, Metric):
            if kwargs.get("on_step") is not False:
                self._show_batch(pl_module, value, earlier.pop(id(value), None))
            pl_module.log(name, value, **kwargs)
            return
        how = self._reduction(seen, kwargs.get("reduce_fx", "mean"))
        value = _combine(name, seen, weighting, how)
        if all(isinstance(call.kwargs.get("batch_size"), int) for call in seen):
            kwargs = {**kwargs, "batch_size": sum(call.kwargs["batch_size"] for call in seen)}
        pl_module.log(name, value, **kwargs)

    def _show_batch(self, pl_module: L.LightningModule, metric: Metric, state: MetricState | None) -> None:
        """Make the metric's step value that of the whole batch."""
        if state is not None:
            value = metric.compute()
            add_to_metric_(metric, state)
            show_step_value_(metric, value)
        elif id(metric) in self._metrics:
            return  # logged under a second name, so it is already done
        elif not _can_merge(pl_module, metric):
            warn(
                f"{type(metric).__name__} logged with on_step: its states cannot be merged, so the step value is that "
                "of the last micro-batch (the epoch value is exact). Log it with on_step=False."
            )
        else:
            if read_metric(metric).updates <= self.part + 1:  # no earlier batch: the state is that of this batch
                show_step_value_(metric, metric.compute())
            self._metrics[id(metric)] = metric


def _can_merge(pl_module: L.LightningModule, metric: Metric) -> bool:
    for collection in pl_module.modules():
        # Metrics of a collection may share their states: resetting one would reset the others.
        if isinstance(collection, MetricCollection) and any(metric is other for other in collection.values()):
            return False
    return not (metric.full_state_update or metric.dist_sync_on_step)


def _set_aside(metric: Metric) -> MetricState:
    state = read_metric(metric)
    metric.reset()
    return state


def _may_be_own(rules: LogRules, name: str) -> bool:
    found = rules.get(name)
    return not found or found[0] == OWN


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log`` in one micro-batch; ``own`` is the divisor that the value's graph shows."""

    part: int
    value: Any
    kwargs: dict[str, Any]
    own: Number | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether the value can be read without waiting for a device."""
        return not isinstance(self.value, Tensor) or self.value.device.type == "cpu"


@dataclass(frozen=True)
class CollectedLogs:
    """The values that the micro-batches of a batch logged.

    Attributes:
        calls: maps each name to its calls, one per micro-batch.
        pass_on: logs each name once, with the given weights.
    """

    calls: dict[str, list[LogCall]]
    pass_on: Callable[["LogWeights"], None]


class LogWeights:
    """The weights of the values that the micro-batches of a batch logged.

    Args:
        parts: the micro-batches.
        loss_counts: maps each micro-batch that gave a loss to the normalizer of its loss.
        rules: the rule found for each name.
    """

    def __init__(self, parts: Sequence[Any], loss_counts: Mapping[int, Number], rules: LogRules) -> None:
        self.parts, self.loss_counts, self.rules = parts, loss_counts, rules
        self._shared: dict[Any, MicroBatchWeights] = {}  # most names are logged in every micro-batch and share these

    def rule_of(self, name: str, seen: Sequence[LogCall]) -> LogRule | None:
        """Return the rule found for a name; where none was found, the likeliest one."""
        has_size = _has_size(seen)
        found = self.rules.get(name, ())
        if len(found) == 1 or (found and not has_size):
            return found[0]
        if found:
            return None
        if name in self.rules:
            note_once(
                f"self.log('{name}') in micro-batches: no weights give the value of the unsplit batch, so "
                "the logged value is approximate. Log a mean over samples, or a Metric object."
            )
        elif all(call.own is not None for call in seen):
            return OWN
        elif not has_size:
            note_once(
                f"self.log('{name}') in micro-batches: it was not logged in the first batch and has no graph, so it is "
                "weighted like the loss. Give batch_size=, or log a Metric object."
            )
        return None if has_size else LOSS

    def of(self, name: str, seen: Sequence[LogCall]) -> MicroBatchWeights | None:
        """Return the weights of these calls; None where the values are added."""
        rule = self.rule_of(name, seen)
        if rule == SUM:
            return None
        if rule == OWN and all(call.own is not None for call in seen):
            return _as_weights([call.own for call in seen])
        if rule is None:
            return _as_weights([call.kwargs["batch_size"] for call in seen])
        logging = tuple(call.part for call in seen)
        if (rule, logging) not in self._shared:
            self._shared[rule, logging] = _as_weights([self._count(rule, part) for part in logging])
        return self._shared[rule, logging]

    def combine(self, name: str, seen: list[LogCall]) -> Any:
        """Return the value that the unsplit step would have logged under a name."""
        is_sum = self.rules.get(name, ())[:1] == (SUM,)
        # A constant keeps its type. Values on a device are not synchronized.
        if not is_sum and all(call.is_on_host and call.value == seen[0].value for call in seen):
            return seen[-1].value
        return _combine(name, seen, self, "mean")

    def rules_differ(self, name: str, seen: Sequence[LogCall]) -> bool | Tensor:
        """Whether the rules that matched so far give different values now; on the values' device."""
        rules = self.rules.get(name, ())
        averages = _name_reduction(seen[-1].kwargs.get("reduce_fx", "mean")) not in ("min", "max", "sum")
        if len(rules) < 2 or _has_size(seen) or not averages:
            return False
        likely, *others = [self._value_by(rule, seen) for rule in rules]
        # A micro-batch without targets logs NaN, which some rules leave out and others do not.
        same = [torch.isclose(other, likely, _ROUNDING, 0.0, equal_nan=True) for other in others]
        differ = ~torch.stack(same).all()
        is_on_host = all(call.is_on_host for call in seen)
        return bool(differ) if is_on_host else differ

    def _value_by(self, rule: LogRule, seen: Sequence[LogCall]) -> Tensor:
        values = [torch.as_tensor(call.value).float() for call in seen]
        if rule == SUM:
            return torch.stack(values).sum()
        return _as_weights([self._count(rule, call.part) for call in seen]).add_up(values)

    def _count(self, rule: LogRule, part: int) -> Number:
        if isinstance(rule, CountRule):
            return rule(self.parts[part])
        return batch_size(self.parts[part]) if rule == SAMPLES else self.loss_counts.get(part, 0)


def _as_weights(counts: Sequence[Any]) -> MicroBatchWeights:
    return MicroBatchWeights(counts, add_counts(counts))


def _name_reduction(reduce_fx: str | Callable[..., Any]) -> str:
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")


def _has_size(seen: Sequence[LogCall]) -> bool:
    return all(isinstance(call.kwargs.get("batch_size"), int) for call in seen)


def _combine(name: str, seen: list[LogCall], weighting: LogWeights, how: str) -> Any:
    values = [call.value for call in seen]
    if how in ("min", "max"):
        pick = torch.minimum if how == "min" else torch.maximum
        result = torch.as_tensor(values[0])
        for value in values[1:]:
            result = pick(result, torch.as_tensor(value))
        return result
    weights = None if how == "sum" else weighting.of(name, seen)
    if weights is None:
        return sum(values)
    if all(isinstance(x, int | float) for x in (*values, *weights.counts)):
        total: Any = weights.total
        weighted = sum(value * count for value, count in zip(values, weights.counts, strict=True))
        return weighted / total if total else values[-1]
    return weights.add_up([torch.as_tensor(value) for value in values])
