"""Host syncs by line: values that are read, masks, printing; and tensors that are built or copied in the step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_fasttrain.core.messages import number_of
from lightning_fasttrain.doctor.finding import Cost, Finding, cost_of_calls, cost_of_samples
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.operator_watch import Event
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
from lightning_fasttrain.doctor.observation.watch import Watch

# Operators that these phases run are not the user's to change.
_NOT_THE_STEP = ("data_wait", "backward", "optimizer", "pause")
_READ = "Keep it a tensor: add up `.detach()` and read the sum every N steps"
_MASK = "Keep the shape: torch.where(mask, x, 0), or multiply by the mask and divide by its sum"
_SYNC_CURES = {
    "reads a value of a tensor": _READ,
    "counts the elements that are not zero": _MASK,
    "selects by a mask, whose size is unknown before": _MASK,
    "indexes with a boolean mask": _MASK,
}
_TENSORS_ON_A_GPU = "To print a tensor on a GPU waits until the device has finished its queued work"
_ON_A_GPU = "On a GPU each of these waits until the device has finished its queued work"


def find_host_syncs(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield the lines that read values of tensors, select by masks, print, or build tensors on the way."""
    for (line, kind, detail), events in _by_line(watch).items():
        if _is_print(line) and kind == "sync":
            continue
        per_step = len(events) / len(watch.looks)
        cost = _cost(line, events, watch, measured)
        if kind == "sync":
            what = f"{number_of(round(per_step), 'host sync')} per step: `{line.text}` {detail}"
            yield Finding("host_sync", what, _SYNC_CURES[detail], "exact", line, cost, (_ON_A_GPU,))
        elif kind == "list":
            what = f"`{line.text}` builds {detail} from Python numbers in the step"
            cure = "Build it once, before the loop or in __init__ (register_buffer), on the model's device"
            yield Finding("tensor_from_list", what, cure, "exact", line, cost)
        elif kind == "copy":
            what = f"`{line.text}` copies a tensor {detail} in each step"
            cure = "Make it on the device: device=x.device; or move batches in the loader with pin_memory=True"
            yield Finding("device_copy", what, cure, "exact", line, cost)
    yield from _find_printing(measured)


def _by_line(watch: Watch) -> dict[tuple[SourceLine, str, str], list[Event]]:
    """Group the events of the user's step by line, kind and detail."""
    found: dict[tuple[SourceLine, str, str], list[Event]] = defaultdict(list)
    for look in watch.looks.values():
        for event in look.events:
            line = event.call.line
            if line is not None and event.phase not in _NOT_THE_STEP and event.call.package != "lightning":
                found[line, event.kind, event.detail].append(event)
    return found


def _cost(line: SourceLine, events: Iterable[Event], watch: Watch, measured: Measured) -> Cost:
    """Return the time of the operators; on CUDA that of the line, which waits there only if nothing slows the host."""
    if watch.device.type == "cuda":
        timed = measured.line_ms(line)
        return cost_of_samples(timed.ms, timed.samples)
    return cost_of_calls([event.seconds for event in events], len(watch.looks))


def _find_printing(measured: Measured) -> Iterator[Finding]:
    for timed in measured.lines(lambda running: running.phase not in _NOT_THE_STEP):
        if _is_print(timed.line):
            cure = "Print every N steps, and values that were collected without reading them"
            what = f"`{timed.line.text}` prints within the steps"
            cost = cost_of_samples(timed.ms, timed.samples)
            yield Finding("printing", what, cure, "exact", timed.line, cost, (_TENSORS_ON_A_GPU,))


def _is_print(line: SourceLine) -> bool:
    return line.text.startswith(("print(", "logging.", "logger.info("))
