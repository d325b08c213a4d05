"""Operators that would be cheaper otherwise: float64, channels-first convolutions, float32 products, unfused logits."""

from collections import defaultdict
from collections.abc import Iterator

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


def find_operators(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield what trials of single operators showed to be faster, and logits that need not be in memory."""
    yield from _find_float64(watch)
    yield from _find_trial(
        watch,
        "channels_last",
        "convolutions run channels-first; channels-last was timed on their inputs",
        "model.to(memory_format=torch.channels_last), and the same for the images",
        "to rounding",
    )
    yield from _find_trial(
        watch,
        "bf16",
        "products run in float32; bfloat16 was timed on their inputs",
        'Trainer(precision="bf16-mixed"), or torch.autocast(device, torch.bfloat16) around the forward',
        "changes the training: products are rounded to bfloat16",
    )
    yield from _find_logits(watch)


def _find_trial(watch: Watch, cure: str, what: str, advice: str, exactness: str) -> Iterator[Finding]:
    trials = [trial for trial in watch.trials.trials.values() if trial.cure == cure]
    gain = _sum_gains(trials)
    # A part may be faster and the rest slower.
    if gain.low > 0 and not watch.trials.left_out[cure]:
        count = sum(trial.count for trial in trials)
        slowest = max(trials, key=lambda trial: trial.count * trial.base_ms)
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
        classes = int(event.detail.rpartition(" ")[2]) if event.kind == "log_softmax" else 0
        if classes < _LEAST_CLASSES or event.nbytes < _LEAST_LOGITS:
            continue
        # Logits, their logarithms of probabilities, and the gradient of the logits.
        nbytes = 3.0 * event.nbytes
        what = f"Logits of {event.detail} are in memory three times: {format_bytes(nbytes)} at the end of the forward"
        cure = 'Add ft.FusedLossHead("<name of the head>"), or call ft.linear_cross_entropy(hidden, weight, labels)'
        cost = Cost(nbytes, nbytes, nbytes, "bytes")
        yield Finding("logits", what, cure, "to rounding", event.call.line, cost)


def _first_look(watch: Watch) -> list[Event]:
    for look in watch.looks.values():
        return look.events
    return []
