"""Findings about what a run does besides its steps: waiting for data, logging, saving, and waiting for other ranks."""

import mmap
import statistics
from collections.abc import Iterator

import torch

from lightning_fasttrain.core.device import usable_cores
from lightning_fasttrain.core.messages import format_bytes, format_ms, list_some, number_of
from lightning_fasttrain.doctor.diagnosis import Cost, Finding, cost_of_calls, cost_of_phase, cost_of_samples
from lightning_fasttrain.doctor.observation.source_lines import (
    Running,
    SourceLine,
    find_hook,
    find_keyword,
    find_only_call,
)
from lightning_fasttrain.doctor.observation.step_records import LineTime, Measured
from lightning_fasttrain.doctor.observation.watch import Watch

# Fetching a batch always takes some time, so a smaller share is not a fault.
_LEAST_SHARE = 0.05
# A line is named if it takes this share of the wait.
_OF_THE_WAIT = 0.3


def find_data_waits(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield the expensive lines of loading, and the rest of the wait with its settings."""
    wait_ms = measured.typical("data_wait")
    if wait_ms < _LEAST_SHARE * measured.step_ms:
        return
    lines = _traced_lines(watch, wait_ms) or measured.lines(_is_loading)
    slow = [line for line in lines if line.ms >= _OF_THE_WAIT * wait_ms]
    for line in slow:
        yield _slow_line(line, watch)
    if not slow:
        yield _wait(watch, measured, lines)


def _traced_lines(watch: Watch, wait_ms: float) -> list[LineTime]:
    """Return the lines that were traced, with their shares of the wait; none if other processes load."""
    total_s = watch.tracer.total_s
    traced = [LineTime(line, wait_ms * one.seconds / total_s, one.samples) for line, one in watch.tracer.found.items()]
    return sorted(traced, key=lambda one: -one.ms)


def _is_loading(running: Running) -> bool:
    # The line of a loop that requests a batch is not one of the dataset.
    return running.phase == "data_wait" and running.call.function not in ("fit", "__next__", "__iter__", "__call__")


def _slow_line(line: LineTime, watch: Watch) -> Finding:
    text = line.line.text
    cost = cost_of_samples(line.ms, line.samples)
    what = f"`{text}` in {line.line.function} keeps the step waiting for data"
    if "torch.tensor(" in text or "Tensor(" in text:
        cure = "Use torch.as_tensor(array), or torch.from_numpy, on an array that was converted once, not on a list"
        return Finding("slow_conversion", what, cure, "exact", line.line, cost)
    kind = "slow_collate" if "collate" in line.line.function else "slow_item"
    cure = f"Do it once beforehand, or in other processes: {_settings(watch)}"
    return Finding(kind, what, cure, "exact", line.line, cost)


def _wait(watch: Watch, measured: Measured, lines: list[LineTime]) -> Finding:
    cost = cost_of_phase(measured.all_ms("step"), measured.all_ms("data_wait"))
    facts = watch.loader
    what = f"Each step waits for its batch (num_workers={facts.workers}, {facts.dataset or 'no DataLoader'})"
    details = tuple(f"{one.line}: {format_ms(one.ms)} ms/step, `{one.line.text}`" for one in lines[:3])
    exactness = "exact; random transforms draw other numbers in workers"
    return Finding("data_wait", what, f"Set {_settings(watch)}", exactness, _loader_line(measured), cost, details)


def _settings(watch: Watch) -> str:
    facts = watch.loader
    pin = ", pin_memory=True" if watch.device.type == "cuda" and not facts.pins_memory else ""
    if facts.workers == 0:
        return f"DataLoader(num_workers={usable_cores()}, persistent_workers=True{pin})"
    persistent = "" if facts.persistent else ", persistent_workers=True"
    return f"DataLoader(num_workers={2 * facts.workers}{persistent}{pin})"


def _loader_line(measured: Measured) -> SourceLine | None:
    """Return the line that makes the loader, or the one that requests batches if there are several loaders."""
    made = find_only_call("DataLoader")
    waiting = measured.lines(lambda running: running.phase == "data_wait")
    if made is not None or not waiting:
        return made
    return waiting[0].line


_LEAST_PADDING = 0.1
_CUTS = "ft.MicroBatching(8), or ft.PaddingFree() with a model that has it, if verify shows that padding has no effect"


def find_padding(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield the share of the tokens that is padding, whether or not a technique can take it away."""
    padding = watch.padding
    if padding.share < _LEAST_PADDING:
        return
    computing_ms = measured.typical("forward") + measured.typical("backward")
    ms = padding.share * computing_ms
    count = number_of(padding.batches, "batch", "batches")
    what = f"{padding.share:.0%} of the tokens of {count} are padding ({padding.source})"
    cure, details = _CUTS, ()
    if "on the left" in padding.source:
        details = ("A model that counts positions from the first column needs this padding, so it cannot be cut off",)
        cure = (
            f'Pad on the right: tokenizer.padding_side = "right", or pass position_ids made from the mask; then {_CUTS}'
        )
    # Padding in attention costs more than its share, and in what is done once for each batch less.
    cost = Cost(ms, 0.5 * ms, min(1.5 * ms, computing_ms))
    yield Finding("padding", what, cure, "exact if verify says so", _loader_line(measured), cost, details)


_LEAST_RETURNED, _LEAST_SYSTEM = 2**24, 0.05  # bytes, and the system's share of a step
_KEEPS_MEMORY = (
    "Set MALLOC_TRIM_THRESHOLD_=4000000000 and MALLOC_MMAP_THRESHOLD_=33554432 in the environment, and malloc keeps it"
)
_METRICS = ("torchmetrics", "sklearn", "evaluate", "scipy")
# Of these one run within the few watched steps is one too many, if it takes a large share of their time.
# Action → the cure, the argument that sets how often it is done, and whose argument it is.
_RARE = {
    "checkpoint": (
        "ModelCheckpoint(every_n_train_steps=1000), or a longer train_time_interval",
        "every_n_train_steps",
        "ModelCheckpoint",
    ),
    "validation": (
        "Fewer batches: limit_val_batches; or seldom: val_check_interval=1.0 and check_val_every_n_epoch=5",
        "val_check_interval",
        "Trainer",
    ),
}
_EXACT = "exact: the training itself does not change"


def find_run_costs(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield what takes time in or between the steps beside the training itself."""
    yield from _find_metrics(measured)
    yield from _find_logging(watch)
    yield from _find_callbacks(watch)
    yield from _find_collections(watch, measured)
    yield from _find_returned_memory(watch, measured)
    yield from _find_rare(watch, measured)


def _find_metrics(measured: Measured) -> Iterator[Finding]:
    for timed in measured.lines(lambda running: running.call.package in _METRICS):
        what = f"`{timed.line.text}` computes a metric in each step"
        cure = "Compute it every N steps or in validation: if batch_idx % 50 == 0; the training needs the loss alone"
        cost = cost_of_samples(timed.ms, timed.samples)
        yield Finding("metric_in_step", what, cure, _EXACT, timed.line, cost)


def _find_logging(watch: Watch) -> Iterator[Finding]:
    seconds, every = watch.actions.get("logging"), watch.host.every.get("log_every_n_steps", 0)
    if seconds and 0 < every < 10:
        cost = cost_of_calls(seconds, watch.counted)
        line = find_keyword("log_every_n_steps") or find_only_call("Trainer")
        what = f"The logger writes every {number_of(every, 'step')}"
        yield Finding("logging_each_step", what, "Trainer(log_every_n_steps=50)", _EXACT, line, cost)


def _find_callbacks(watch: Watch) -> Iterator[Finding]:
    for name, (kind, hook) in watch.host.hooks.items():
        seconds = watch.actions.get(name)
        if seconds and name not in watch.host.savers:
            cost = cost_of_calls(seconds, watch.counted)
            what = f"The callback {kind} takes time in {hook} of each step"
            yield Finding("slow_callback", what, "Do it every N steps only", _EXACT, find_hook(kind, hook), cost)


def _find_collections(watch: Watch, measured: Measured) -> Iterator[Finding]:
    seconds = watch.actions.get("garbage collection", [])
    cost = cost_of_calls(seconds, watch.counted)
    if not seconds or cost.value < _LEAST_SHARE * measured.step_ms:
        return
    line = find_only_call("collect", of="gc")
    if line is None and len(seconds) == 1:  # due to what was imported and compiled; the next may be far away
        return
    times, each = number_of(len(seconds), "full garbage collection"), format_ms(1e3 * sum(seconds) / len(seconds))
    what = f"{times} of Python in {watch.counted} steps, of {each} ms each"
    cure = "guards.GarbageCollection(); in a loop, guards.freeze_survivors() before it"
    if line is not None:
        cure = "Remove it, or do it once an epoch: what nothing refers to is freed without it"
    yield Finding("garbage_collection", what, cure, _EXACT, line, cost)


def _find_returned_memory(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield memory that the C library gives back to the system after each step, and takes again in the next."""
    if not watch.faults.counts:
        return
    # Systems that count their own time in ticks of some ms tell it of many steps together only.
    pages, ms = statistics.median(watch.faults.counts), statistics.fmean(watch.faults.system_ms)
    nbytes = pages * mmap.PAGESIZE
    if nbytes < _LEAST_RETURNED or ms < _LEAST_SYSTEM * measured.step_ms:
        return
    # Threads take pages at the same time, and what a step waits for them may be hidden behind other waits for memory.
    usual = ms / max(torch.get_num_threads(), 1)
    what = f"Page faults: malloc returns {format_bytes(nbytes)} after each step, and the next one allocates it again"
    details = ("Files that are mapped into memory cause page faults too, which the cure does not change",)
    yield Finding("returned_memory", what, _KEEPS_MEMORY, _EXACT, None, Cost(usual, 0.0, ms), details)


def _find_rare(watch: Watch, measured: Measured) -> Iterator[Finding]:
    for name, (cure, keyword, owner) in _RARE.items():
        seconds = watch.actions.get(name, [])
        cost = cost_of_calls(_all_seconds(watch, name), watch.counted)
        if cost.value >= _LEAST_SHARE * measured.step_ms:
            what = f"{number_of(len(seconds), name)} in {watch.counted} steps"
            line = find_keyword(keyword) or find_only_call(owner)
            yield Finding(f"frequent_{name}", what, cure, _EXACT, line, cost)


def _all_seconds(watch: Watch, name: str) -> list[float]:
    """Return the times of an action; of checkpoints with what else their callbacks do, such as removing old ones."""
    if name != "checkpoint" or not watch.actions.get(name):
        return watch.actions.get(name, [])
    found: list[float] = []
    for hook in watch.host.savers:
        found += watch.actions.get(hook, [])
    return found


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
