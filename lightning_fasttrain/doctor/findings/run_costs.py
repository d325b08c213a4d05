"""Costs around the steps: logging, metrics, callbacks, checkpoints and validations, by their measured share."""

from collections.abc import Iterator

from lightning_fasttrain.core.messages import format_ms, number_of
from lightning_fasttrain.doctor.finding import Finding, cost_of_calls, cost_of_samples
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import find_hook, find_keyword, find_only_call
from lightning_fasttrain.doctor.observation.watch import Watch

_METRICS = ("torchmetrics", "sklearn", "evaluate", "scipy")
# Of these one run within the few watched steps is one too many, if it takes a large share of their time.
_LEAST_SHARE = 0.05
# Action → the cure, the argument that sets how often it is done, and whose argument it is.
_RARE = {
    "checkpoint": (
        "ModelCheckpoint(every_n_train_steps=1000), or a longer train_time_interval",
        "every_n_train_steps",
        "ModelCheckpoint",
    ),
    "validation": (
        "Trainer(val_check_interval=1.0), once per epoch; or fewer batches with limit_val_batches",
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
    seconds = watch.actions.get("garbage collection")
    cost = cost_of_calls(seconds or [], watch.counted)
    if seconds and cost.value >= _LEAST_SHARE * measured.step_ms:
        times, each = number_of(len(seconds), "full garbage collection"), format_ms(1e3 * sum(seconds) / len(seconds))
        what = f"{times} of Python in {watch.counted} steps, of {each} ms each"
        line = find_only_call("collect", of="gc")
        cure = "guards.GarbageCollection(); in a loop, guards.freeze_survivors() before it"
        if line is not None:
            cure = "Remove it, or do it once an epoch: what nothing refers to is freed without it"
        yield Finding("garbage_collection", what, cure, _EXACT, line, cost)


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
