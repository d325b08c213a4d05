"""Findings about operators and memory: slow, superfluous or growing."""

import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fasttrain.core.messages import format_bytes, number_of
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.doctor.diagnosis import Cost, Finding, cost_of_calls, cost_of_samples
from lightning_fasttrain.doctor.observation.operator_trials import Trial
from lightning_fasttrain.doctor.observation.operator_watch import Event, list_compilations
from lightning_fasttrain.doctor.observation.source_lines import SourceLine, find_growth, is_user_file, user_files
from lightning_fasttrain.doctor.observation.step_records import Measured
from lightning_fasttrain.doctor.observation.watch import Watch

# Logits below this size are not worth a change of the model.
_LEAST_LOGITS = 32 * 2**20
_LEAST_CLASSES = 4096


class _Cure(NamedTuple):
    """Report on a change that was faster: what was seen, what to write, and how exact that is."""

    what: str
    advice: str
    exactness: str


_CURES = {
    "channels_last": _Cure(
        "convolutions run channels-first; channels-last was timed on their inputs",
        "ft.model.ChannelsLast(), or model.to(memory_format=torch.channels_last) and the same for the images",
        "to rounding",
    ),
    "cudnn_benchmark": _Cure(
        "convolutions run without a search for the fastest kernel; it was made for their inputs",
        "ft.model.CudnnBenchmark(), or Trainer(benchmark=True), where shapes do not change",
        "to rounding",
    ),
    "bf16": _Cure(
        "products run in float32; bfloat16 was timed on their inputs",
        'Trainer(precision="bf16-mixed"), or torch.autocast(device, torch.bfloat16) around the forward',
        "changes the training: products are rounded to bfloat16",
    ),
    "tf32": _Cure(
        "products run in float32 without TF32, which was timed on their inputs",
        'torch.set_float32_matmul_precision("high"), or ft.model.MatmulPrecision()',
        "changes the training: factors are rounded to 10 bits",
    ),
    "padded_sizes": _Cure(
        "products have sizes that are no multiples of 8; multiples of 64 were timed",
        "Round the vocabulary, or the width, up to a multiple of 64; ids that no text contains do no harm",
        "changes the model: it has more parameters",
    ),
}


def find_operators(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield what trials of single operators showed to be faster, and results that need not be in memory."""
    yield from _find_float64(watch)
    for cure in _CURES:
        yield from _find_trial(watch, cure)
    yield from _find_logits(watch)
    yield from _find_attention(watch)


def _find_trial(watch: Watch, cure: str) -> Iterator[Finding]:
    trials = [trial for trial in watch.trials.trials.values() if trial.cure == cure]
    gain = _sum_gains(trials)
    # A part may be faster and the rest slower.
    if gain.low > 0 and not watch.trials.left_out[cure]:
        count = sum(trial.count for trial in trials)
        slowest = max(trials, key=lambda trial: trial.count * trial.base_ms)
        what, advice, exactness = _CURES[cure]
        yield Finding(cure, f"{count} {what}", advice, exactness, slowest.call.line, gain)


def _sum_gains(trials: list[Trial]) -> Cost:
    """Return the gain in a step if each operator took as long as it did with changed arguments."""
    if not trials:
        return Cost(0.0, 0.0, 0.0, is_gain=True)
    # Over the operators of a turn what other work of the machine adds evens out.
    turns = zip(*(_gains_of(trial) for trial in trials), strict=True)
    low, high = sorted(map(sum, turns))
    return Cost((low + high) / 2, low, high, is_gain=True)


def _gains_of(trial: Trial) -> list[float]:
    return [trial.count * (trial.base_ms - ms) for ms in trial.changed_ms]


def _find_float64(watch: Watch) -> Iterator[Finding]:
    events: dict[SourceLine, list[Event]] = defaultdict(list)
    first: SourceLine | None = None
    for look in watch.looks.values():
        for event in look.events:
            if event.kind == "float64" and event.call.line is not None and event.phase != "data_wait":
                first = first or event.call.line
                events[event.call.line].append(event)
    if first is None:
        return
    count = sum(map(len, events.values())) // len(watch.looks)
    gain = _sum_gains([trial for trial in watch.trials.trials.values() if trial.cure == "float32"])
    began = f"{number_of(count, 'operator')} per step in float64, first at `{first.text}`"
    what = f"{began}; float32 was timed on their inputs"
    cure = "Convert where it begins: dtype=torch.float32, array.astype(np.float32), or .float()"
    yield Finding("float64", what, cure, "changes the training: 24 bits instead of 53", first, gain)


def _find_logits(watch: Watch) -> Iterator[Finding]:
    for event in _first_look(watch):
        if event.kind != "log_softmax" or event.nbytes < _LEAST_LOGITS:
            continue
        classes = int(event.detail.rpartition(" ")[2])
        if classes < _LEAST_CLASSES:
            continue
        # Logits, their logarithms of probabilities, and the gradient of the logits.
        nbytes = 3.0 * event.nbytes
        what = f"Logits of {event.detail} are in memory three times: {format_bytes(nbytes)} at the end of the forward"
        cure = 'Add ft.FusedLossHead("<name of the head>"), or call ft.linear_cross_entropy(hidden, weight, labels)'
        cost = Cost(nbytes, nbytes, nbytes, "bytes")
        yield Finding("logits", what, cure, "to rounding", event.call.line, cost)


def _find_attention(watch: Watch) -> Iterator[Finding]:
    """Yield the lines whose attention has its probabilities in memory, which the fused kernels do not need."""
    events: dict[SourceLine, list[Event]] = defaultdict(list)
    for event in _first_look(watch):
        if event.kind == "attention" and event.call.line is not None:
            events[event.call.line].append(event)
    for line, found in events.items():
        nbytes = float(sum(event.nbytes for event in found))
        if nbytes < _LEAST_LOGITS:
            continue
        seen = f"{number_of(len(found), 'attention')} with probabilities of {found[0].detail}"
        what = f"{seen} did not run in a fused kernel: {format_bytes(nbytes)} at the end of the forward"
        details = (
            "The fused kernels refuse dropout on a CPU, masks with a gradient, and returned attention weights",
            "nn.MultiheadAttention takes need_weights=False, Hugging Face attn_implementation='sdpa'",
        )
        cure = "Call torch.nn.functional.scaled_dot_product_attention"
        yield Finding("attention", what, cure, "to rounding", line, Cost(nbytes, nbytes, nbytes, "bytes"), details)


def _first_look(watch: Watch) -> list[Event]:
    for look in watch.looks.values():
        return look.events
    return []


# What follows a graph break is a function of its own, which the compiler names after the line of the break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_(\d+)")


def find_compiler_work(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield lines at which the compiler breaks its graph, and functions that it compiled again while watched."""
    yield from _find_graph_breaks()
    yield from _find_recompilations(watch)


def _find_graph_breaks() -> Iterator[Finding]:
    breaks: dict[SourceLine, str] = {}
    reason, files = "", user_files()
    for compilation in list_compilations():
        resumed = _RESUMED.fullmatch(compilation.co_name or "")
        if resumed is not None and compilation.co_filename in files:
            line = SourceLine(str(compilation.co_filename), int(resumed[2]), resumed[1])
            breaks.setdefault(line, reason)
        # Compiling restarts at a break, and ends there; the next entry is what follows it.
        reason = next(iter(sorted(compilation.restart_reasons or ())), "")
    for line, why in breaks.items():
        what = f"`{line.text}` divides the compiled graph in two"
        cure = "Move it out of what is compiled, or behind `if not torch.compiler.is_compiling():`"
        yield Finding("graph_break", what, cure, "exact", line, Cost.unmeasured(), _explain(why))


def _explain(reason: str) -> tuple[str, ...]:
    """Return torch's explanation of a graph break, or the first line of its reason."""
    lines = [line.strip().rstrip(".") for line in reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return tuple([*explained, *lines][:1])


def _find_recompilations(watch: Watch) -> Iterator[Finding]:
    seconds: dict[SourceLine, list[float]] = defaultdict(list)
    reasons: dict[SourceLine, str] = {}
    known = set(map(id, watch.compilations))
    for compilation in list_compilations():
        if id(compilation) in known or not compilation.recompile_reason:
            continue
        line = SourceLine(str(compilation.co_filename), compilation.co_firstlineno or 0, compilation.co_name or "")
        seconds[line].append(compilation.entire_frame_compile_time_s or 0.0)
        reasons[line] = compilation.recompile_reason
    for line, spent in seconds.items():
        ms = 1e3 * sum(spent) / watch.counted
        what = f"`{line.function}` was compiled again {number_of(len(spent), 'time')} while watched"
        cure = "Pad to a few sizes, or mark the size that changes: torch._dynamo.mark_dynamic(x, 0)"
        details = (f"The last reason: {reasons[line]}",)
        shown = line if line.file in user_files() else None
        yield Finding("recompilation", what, cure, "exact", shown, Cost(ms, ms, ms), details)


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


# A tensor may be kept until the next step; what is older than this and was made in both looks is kept forever.
_STEPS_LATER = 2
_LEAST_BYTES = 64 * 2**10


def find_growing_memory(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield the lines whose tensors of two different steps are still alive when the watch ends."""
    now = watch.done - watch.warmup
    looks = [look.find_alive() for number, look in watch.looks.items() if now - number > _STEPS_LATER]
    if len(looks) < 2:
        return
    lasting = set(looks[0]).intersection(*looks[1:])
    with_graph = [line for line in lasting if _has_graph(looks[-1][line])]
    for line in sorted(with_graph) or sorted(lasting):
        kept = looks[-1][line]
        nbytes = bytes_of(kept)
        # A list of detached losses grows by a few bytes, which is no fault.
        if not with_graph and nbytes < _LEAST_BYTES:
            continue
        yield _describe(line, kept, nbytes, with_graph=bool(with_graph))


def _has_graph(tensors: list[Tensor]) -> bool:
    return any(tensor.grad_fn is not None for tensor in tensors)


def _describe(line: SourceLine, kept: list[Tensor], nbytes: int, *, with_graph: bool) -> Finding:
    keeper = _find_keeper(kept[0]) or line
    made = "" if keeper == line else f" made at {line}"
    tensors = f"{number_of(len(kept), 'tensor')}{made}"
    what = f"`{keeper.text}` keeps {tensors} in each step, {format_bytes(nbytes)}, which is never freed"
    cure = "Free them after their last use, or keep fewer"
    if with_graph:
        nodes = max(map(_count_nodes, kept))
        what = f"{what}; {number_of(nodes, 'node')} of the autograd graph stay with it"
        cure = "Keep loss.detach(), or loss.item() once every N steps: the graph is freed"
    cost = Cost(float(nbytes), float(nbytes), float(nbytes), "bytes")
    return Finding("growing_memory", what, cure, "exact", keeper, cost)


def _find_keeper(tensor: Tensor) -> SourceLine | None:
    """Return the line that puts tensors into the container which holds this one."""
    for container in gc.get_referrers(tensor):
        if isinstance(container, list | dict | set | tuple):
            for name, file in _names_of(container):
                line = find_growth(name, file)
                if line is not None:
                    return line
    return None


def _names_of(container: object) -> Iterator[tuple[str, str]]:
    """Yield the names under which the user's code knows a container, with the files that use them."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            for held in (frame.f_locals, frame.f_globals):
                yield from _names_in(held, container, file)
        frame = frame.f_back
    for holder in gc.get_referrers(container):
        file = _file_of_object(holder)
        if file is not None:
            yield from _names_in(vars(holder), container, file)
        elif isinstance(holder, dict):
            yield from _names_in_an_object(holder, container)


def _names_in_an_object(attributes: dict[Any, Any], container: object) -> Iterator[tuple[str, str]]:
    for owner in gc.get_referrers(attributes):
        file = _file_of_object(owner)
        if file is not None and vars(owner) is attributes:
            yield from _names_in(attributes, container, file)


def _names_in(namespace: Mapping[Any, Any], container: object, file: str) -> Iterator[tuple[str, str]]:
    for name, value in list(namespace.items()):
        if value is container:
            yield name, file


def _file_of_object(thing: object) -> str | None:
    """Return the file of an object's class, if the user wrote it."""
    if not hasattr(thing, "__dict__") or isinstance(thing, type):
        return None
    file = getattr(sys.modules.get(type(thing).__module__), "__file__", None)
    if file and is_user_file(file):
        return file
    return None


def _count_nodes(tensor: Tensor) -> int:
    """Return the number of nodes of the graph that a tensor keeps."""
    seen, queue = set[Any](), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return len(seen)
