"""Several ranks: one that the others wait for, and DDP's search for unused parameters."""

import statistics
from collections.abc import Iterator

from lightning_fasttrain.core.messages import format_ms, list_some
from lightning_fasttrain.doctor.finding import Cost, Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import find_keyword
from lightning_fasttrain.doctor.observation.watch import Watch


def find_rank_faults(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield a rank that takes longer than the others before they meet, and a search that finds nothing."""
    yield from _find_slow_rank(watch)
    if watch.host.searches_unused and not watch.unused_parameters():
        what = "DDP searches for unused parameters in each step, and there are none"
        cure = "Leave find_unused_parameters=True out: DDPStrategy()"
        line = find_keyword("find_unused_parameters")
        yield Finding("unused_search", what, cure, "exact", line, Cost.unmeasured())


def _find_slow_rank(watch: Watch) -> Iterator[Finding]:
    if len(watch.own_ms) < 2:
        return
    # The first rank has steps that are not timed.
    steps = sorted(set.intersection(*map(set, watch.own_ms)))
    if len(steps) < 2:
        return
    times = [list(map(rank.__getitem__, steps)) for rank in watch.own_ms]
    means = list(map(statistics.fmean, times))
    slowest = means.index(max(means))
    extra = []
    for step in zip(*times, strict=True):
        others = (sum(step) - step[slowest]) / (len(step) - 1)
        extra.append(step[slowest] - others)
    mean, half = statistics.fmean(extra), 1.96 * statistics.stdev(extra) / len(extra) ** 0.5
    if mean - half <= 0:
        return
    listed = list_some([f"rank {number}: {format_ms(ms)} ms" for number, ms in enumerate(means)])
    what = f"The other ranks wait for rank {slowest} in each step"
    details = (f"Data, transfer and forward take {listed}",)
    cure = "Give ranks equal work (samples of similar length, the same augmentations), or look at its machine"
    yield Finding("uneven_ranks", what, cure, "exact", None, Cost(mean, mean - half, mean + half), details)
