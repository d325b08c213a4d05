"""Waiting for data: how long, at which line of the dataset or collation, and with which settings of the loader."""

from collections.abc import Iterator

from lightning_fasttrain.core.machine import usable_cores
from lightning_fasttrain.core.messages import format_ms
from lightning_fasttrain.doctor.finding import Finding, cost_of_phase, cost_of_samples
from lightning_fasttrain.doctor.observation.line_times import Running
from lightning_fasttrain.doctor.observation.measured import LineTime, Measured
from lightning_fasttrain.doctor.observation.source_lines import SourceLine, find_only_call
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
