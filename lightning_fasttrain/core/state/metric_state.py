"""Read, write and add the states of metrics."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torchmetrics import Metric


class MetricState(NamedTuple):
    """Name → value, and the number of updates that they are of."""

    values: Mapping[str, Tensor | list[Tensor]]
    updates: int


def read_metric(metric: Metric) -> MetricState:
    """Copies of its states."""
    return MetricState(metric._copy_state_dict(), metric._update_count)


def write_metric_(metric: Metric, state: MetricState) -> None:
    """Give it these states, which it keeps."""
    for name, value in state.values.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = state.updates, None


def add_to_metric_(metric: Metric, earlier: MetricState) -> None:
    """Have it be of the updates ``earlier`` too.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update([1.0, 2.0])
        >>> earlier = read_metric(metric)
        >>> metric.reset()
        >>> metric.update(6.0)
        >>> add_to_metric_(metric, earlier)
        >>> metric.compute()
        tensor(3.)
    """
    here = metric._update_count
    if not here:
        write_metric_(metric, earlier)
    elif earlier.updates:
        # torchmetrics takes what is here for one update, so in a mean of updates the earlier ones are counted in those.
        metric._update_count = 1 + earlier.updates / here  # type: ignore[assignment]
        metric._reduce_states(dict(earlier.values))
        metric._update_count = here + earlier.updates
    metric._computed = None


def show_step_value_(metric: Metric, value: object) -> None:
    """Have Lightning log ``value`` for the step; for the epoch it computes."""
    metric._forward_cache, metric._computed = value, None
