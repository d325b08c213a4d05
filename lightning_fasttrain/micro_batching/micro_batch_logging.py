"""Log the values of ``self.log`` once per batch, combined over its micro-batches."""

import functools
import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fasttrain.core.host.lightning import logging_as
from lightning_fasttrain.core.messages import note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.state.metric_state import (
    MetricState,
    add_to_metric_,
    read_metric,
    show_step_value_,
    write_metric_,
)
from lightning_fasttrain.micro_batching.normalizer.count_targets import CountRule
from lightning_fasttrain.micro_batching.normalizer.split_rule import LOSS, OWN, SUM, LogRule, LogRules
from lightning_fasttrain.micro_batching.normalizer.step_weights import MicroBatchWeights, StepWeights, add_counts
from lightning_fasttrain.micro_batching.padding.trim_search import Parts
from lightning_fasttrain.trial.read_normalizers import Number
from lightning_fasttrain.trial.runs import own_divisor

_GIVEN = "given"  # the weights are the batch_size= of each call
_ROUNDING = 1e-4
_EXTREMES = {"min": torch.minimum, "max": torch.maximum}
# The arguments of LightningModule.log after the value.
_BY_POSITION = tuple(inspect.signature(L.LightningModule.log).parameters)[3:]


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


class BatchLogs:
    """Collects the values that the micro-batches of a batch log and return, and logs each name once.

    A value with a graph is weighted by its own divisor; others by the rule that was found to give the value of the
    unsplit step; sums are added, minima and maxima reduced. A ``torchmetrics`` object accumulates by itself; its value
    for this step is computed over all micro-batches, by letting it accumulate the batch alone.

    Args:
        pl_module: the module that logs.
        parts: the micro-batches.
        rules: the rules found for each name.
        metrics: metrics that were logged per step in earlier batches, to which those of this batch are added; keyed by
            id, as a Metric's hash depends on its state.

    Attributes:
        part: the micro-batch that runs.
        loss_counts: maps each micro-batch that gave a loss to the normalizer of its loss; known once all have run.
        logged: maps each name to its calls, one per micro-batch.
        returned: the same for what the step returns beside the loss.
    """

    def __init__(
        self, pl_module: L.LightningModule, parts: Sequence[object], rules: LogRules, metrics: dict[int, Metric]
    ) -> None:
        self.module, self.parts, self.rules = pl_module, parts, rules
        self.part = 0
        self.loss_counts: dict[int, Number] = {}
        self.logged: dict[str, list[LogCall]] = {}
        self.returned: dict[str, list[LogCall]] = {}
        self._sums: set[tuple[int, int]] = set()  # micro-batch and address of values that are sums, not means
        self._shared: dict[Any, MicroBatchWeights] = {}  # most names are logged in every micro-batch and share these
        self._metrics = metrics
        self._earlier: dict[int, MetricState] = {}
        if len(parts) > 1:
            # Reset before the batch, so that their values afterwards are of this batch alone.
            for key, metric in metrics.items():
                self._earlier[key] = read_metric(metric)
                metric.reset()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the calls of the module's ``log`` in the context; if it fails, metrics are as before the batch."""
        try:
            with patched(self.module, "log", self._collect):
                yield
        except BaseException:  # the batch runs again, or is skipped
            for key, state in self._earlier.items():
                write_metric_(self._metrics[key], state)
            raise

    def _collect(self, name: str, value: object, *args: object, **kwargs: object) -> None:
        given = {**dict(zip(_BY_POSITION, args, strict=False)), **kwargs}
        self.logged.setdefault(name, []).append(self._note(name, value, given))

    def _note(self, name: str, value: object, kwargs: dict[str, Any]) -> LogCall:
        if not isinstance(value, Tensor):
            return LogCall(self.part, value, kwargs)
        # Reading a graph takes time, so it is done only where the divisor is used.
        rules = self.rules.get(name)
        if len(self.parts) > 1 and (not rules or rules[0] == OWN):
            return LogCall(self.part, value.detach(), kwargs, own_divisor(value))
        return LogCall(self.part, value.detach(), kwargs)

    def note_output(self, output: object) -> None:
        """Note the scalars that a micro-batch returned beside the loss."""
        if isinstance(output, dict):
            for key, value in output.items():
                if key != "loss" and _is_number(value):
                    name = f"return {key}"
                    self.returned.setdefault(name, []).append(self._note(name, value, {}))

    def take(self, part: int) -> list[tuple[bool, str, LogCall]]:
        """Remove the calls of a micro-batch, and return them by name, with whether they are of what it returned."""
        taken: list[tuple[bool, str, LogCall]] = []
        for is_returned, place in ((False, self.logged), (True, self.returned)):
            for name, calls in list(place.items()):
                taken += [(is_returned, name, call) for call in calls if call.part == part]
                place[name] = [call for call in calls if call.part != part]
                if not place[name]:
                    del place[name]
        return taken

    def give(self, taken: Sequence[tuple[bool, str, LogCall]], part: int) -> None:
        """Add such calls to those of a micro-batch, with the values that their tensors have now."""
        for is_returned, name, call in taken:
            value, own = apply_to_collection((call.value, call.own), Tensor, torch.clone)
            place = self.returned if is_returned else self.logged
            place.setdefault(name, []).append(LogCall(part, value, call.kwargs, own))

    def note_sum(self, loss: Tensor) -> None:
        """Note that this micro-batch's loss is a sum, and so are values logged from it."""
        # By address: logged values are detached, which shares memory.
        self._sums.add((self.part, loss.data_ptr()))

    def pass_on(self) -> None:
        """Log the combined value of each name."""
        with logging_as(self.module, "training_step"):
            for name, seen in self.logged.items():
                self._log_one(name, seen)
        for key, state in self._earlier.items():
            add_to_metric_(self._metrics[key], state)

    def _log_one(self, name: str, seen: list[LogCall]) -> None:
        value, kwargs = seen[-1].value, seen[-1].kwargs
        if len(self.parts) > 1 and isinstance(value, Metric):
            if kwargs.get("on_step") is not False:
                self._show_batch(value)
        elif len(self.parts) > 1:
            value = self._reduce(name, seen, "sum" if self._are_sums(seen) else _name_reduction(seen))
            if _has_size(seen):
                kwargs = {**kwargs, "batch_size": sum(_sizes_of(seen))}
        self.module.log(name, value, **kwargs)

    def _are_sums(self, seen: list[LogCall]) -> bool:
        return all(isinstance(call.value, Tensor) and (call.part, call.value.data_ptr()) in self._sums for call in seen)

    def _show_batch(self, metric: Metric) -> None:
        """Make the metric's step value that of the whole batch."""
        state = self._earlier.pop(id(metric), None)
        if state is not None:
            value = metric.compute()
            add_to_metric_(metric, state)
            show_step_value_(metric, value)
        elif id(metric) in self._metrics:
            return  # logged under a second name, so it is already done
        elif not _can_merge(self.module, metric):
            warn(
                f"{type(metric).__name__} logged with on_step: its states cannot be merged, so the step value is that "
                "of the last micro-batch (the epoch value is exact). Log it with on_step=False."
            )
        else:
            if read_metric(metric).updates <= self.part + 1:  # no earlier batch: the state is that of this batch
                show_step_value_(metric, metric.compute())
            self._metrics[id(metric)] = metric

    def combine(self, name: str, seen: list[LogCall]) -> Any:
        """Return the value that the unsplit step would have logged under a name."""
        is_sum = SUM in self.rules.get(name, ())[:1]
        # A constant keeps its type. Values on a device are not synchronized.
        if len(seen) == 1 or (not is_sum and all(call.is_on_host and call.value == seen[0].value for call in seen)):
            return seen[-1].value
        return self._reduce(name, seen, "mean")

    def _reduce(self, name: str, seen: list[LogCall], how: str) -> Any:
        """Return the minimum, maximum, sum or weighted mean of the values."""
        values = [call.value for call in seen]
        if how in _EXTREMES:
            return functools.reduce(_EXTREMES[how], map(torch.as_tensor, values))
        weights = None if how == "sum" else self._weights_by(self._rule_of(name, seen), seen)
        if weights is None:
            return sum(values)
        if all(isinstance(x, int | float) for x in (*values, *weights.counts)):
            total: Any = weights.total
            weighted = sum(map(operator.mul, values, weights.counts))
            return weighted / total if total else values[-1]
        return weights.add_up(list(map(torch.as_tensor, values)))

    def _rule_of(self, name: str, seen: Sequence[LogCall]) -> LogRule:
        """Return the rule found for a name; where the samples did not show one, the likeliest."""
        found = list(self.rules.get(name, ()))
        has_size = _has_size(seen)
        if found:
            # The user's own weights decide between rules that the samples could not tell apart.
            return _GIVEN if has_size and len(found) > 1 else found[0]
        if name in self.rules:
            note_once(
                f"self.log('{name}') in micro-batches: no weights give the value of the unsplit batch, so "
                "the logged value is approximate. Log a mean over samples, or a Metric object."
            )
        elif all(map(_shows_divisor, seen)):
            return OWN
        elif not has_size:
            note_once(
                f"self.log('{name}') in micro-batches: it was not logged in the first batch and has no graph, so it is "
                "weighted like the loss. Give batch_size=, or log a Metric object."
            )
        return _GIVEN if has_size else LOSS

    def _weights_by(self, rule: LogRule, seen: Sequence[LogCall]) -> MicroBatchWeights | None:
        """Return the weights of these calls by a rule; None where the values are added."""
        if rule == SUM:
            return None
        if rule == _GIVEN:
            return _as_weights(_sizes_of(seen))
        if rule == OWN and all(map(_shows_divisor, seen)):
            return _as_weights([call.own for call in seen])
        # A name need not be logged in every micro-batch.
        logging = tuple(call.part for call in seen)
        if (rule, logging) not in self._shared:
            self._shared[rule, logging] = _as_weights([self._count(rule, part) for part in logging])
        return self._shared[rule, logging]

    def _count(self, rule: LogRule, part: int) -> Number:
        return rule(self.parts[part]) if isinstance(rule, CountRule) else self.loss_counts.get(part, 0)

    def compare_rules(self, name: str) -> Tensor | None:
        """Return whether the rules that matched so far give different values now, on the values' device.

        None where at most one rule matched, or no rule is used.
        """
        rules, seen = self.rules.get(name, ()), self.seen[name]
        if len(rules) < 2 or _has_size(seen) or _name_reduction(seen) in ("min", "max", "sum"):
            return None
        values = [torch.as_tensor(call.value).float() for call in seen]
        results: list[Tensor] = []
        for rule in rules:
            weights = self._weights_by(rule, seen)
            results.append(torch.stack(values).sum() if weights is None else weights.add_up(values))
        # A micro-batch without targets logs NaN, which some rules leave out and others do not.
        same = [torch.isclose(other, results[0], _ROUNDING, 0.0, equal_nan=True) for other in results[1:]]
        return ~torch.stack(same).all()

    @property
    def seen(self) -> dict[str, list[LogCall]]:
        """The calls of each name, and the scalars that the step returned."""
        return {**self.logged, **self.returned}


def _can_merge(pl_module: L.LightningModule, metric: Metric) -> bool:
    for collection in pl_module.modules():
        # Metrics of a collection may share their states: resetting one would reset the others.
        if isinstance(collection, MetricCollection) and any(metric is other for other in collection.values()):
            return False
    return not (metric.full_state_update or metric.dist_sync_on_step)


def _as_weights(counts: Sequence[Any]) -> MicroBatchWeights:
    return MicroBatchWeights(counts, add_counts(counts))


def _name_reduction(seen: Sequence[LogCall]) -> str:
    reduce_fx = seen[-1].kwargs.get("reduce_fx", "mean")
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")


def _shows_divisor(call: LogCall) -> bool:
    return call.own is not None


def _sizes_of(seen: Sequence[LogCall]) -> list[Any]:
    return [call.kwargs.get("batch_size") for call in seen]


def _has_size(seen: Sequence[LogCall]) -> bool:
    return all(isinstance(size, int) for size in _sizes_of(seen))


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def pick_groups(cut: Parts, seen: Sequence[LogCall]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of groups of rows from the micro-batches that logged the largest and the smallest value.

    Together they are no larger than a micro-batch of several rows. Rows and the same rows again have twice the sum and
    the same mean; the others tell apart what a mean is over.
    """
    # A micro-batch without targets logs NaN, which is taken as the smallest value.
    values = torch.tensor([float(call.value) for call in seen]).abs().nan_to_num(-1.0)
    largest, smallest = (cut.rows_of(seen[int(place)].part) for place in (values.argmax(), values.argmin()))
    half = max(1, len(largest) // 2)
    first, second = largest[:half], largest[half:] or largest
    yield first, first
    yield second, second
    yield first, second
    yield second, smallest[:half]
    yield first, smallest[half:] or smallest


def combine_outputs(outputs: list[Any], cut: Parts, weights: StepWeights, logs: BatchLogs) -> Any:
    """Return the unsplit step's output: the loss, tensors joined along their first axis, other values as if logged."""
    if not outputs:
        return None
    loss = weights.loss()
    if not isinstance(outputs[0], dict):
        return loss
    combined: dict[str, Any] = {}
    for key, first in outputs[0].items():
        if key == "loss":
            continue
        values = list(map(operator.itemgetter(key), outputs))
        if isinstance(first, Tensor) and first.ndim > 0:
            combined[key] = cut.join(values, weights.held)
        elif f"return {key}" in logs.returned:
            combined[key] = logs.combine(f"return {key}", logs.returned[f"return {key}"])
        else:
            combined[key] = values[-1]
    return {**combined, "loss": loss}
