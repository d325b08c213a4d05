"""Operators that would be cheaper otherwise: in another type, layout, size or setting, or in a fused kernel."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from lightning_fasttrain.core.messages import format_bytes, number_of
from lightning_fasttrain.doctor.finding import Cost, Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.operator_trials import Trial
from lightning_fasttrain.doctor.observation.operator_watch import Event
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
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
    low = high = 0.0
    for trial in trials:
        low += trial.count * (trial.base_ms - max(trial.changed_ms))
        high += trial.count * (trial.base_ms - min(trial.changed_ms))
    return Cost((low + high) / 2, low, high, is_gain=True)


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
