"""Schedulers that are stepped before the optimizer, or once per step where they count epochs, or the reverse."""

from collections.abc import Iterator

from lightning_fasttrain.doctor.finding import Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import find_only_call
from lightning_fasttrain.doctor.observation.watch import HostFacts, Watch

_INTENDED = "changes the training to the intended one"
# Arguments that say after how many steps of the scheduler it ends or repeats.
_LENGTHS = ("total_steps", "T_max", "T_0", "step_size")


def find_scheduler_faults(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield schedulers that are stepped at the wrong place."""
    for called in watch.schedulers.values():
        name = type(called.scheduler).__name__
        if called.came_first and called.line is not None:
            what = f"{name} was stepped before its optimizer: the first learning rate is skipped"
            yield Finding(
                "scheduler_first", what, "Call scheduler.step() after optimizer.step()", _INTENDED, called.line
            )
    for scheduler, interval in watch.host.schedulers:
        problem = _wrong_unit(scheduler, interval, watch.host)
        if problem is not None:
            what, cure = problem
            line = find_only_call(type(scheduler).__name__)
            yield Finding("scheduler_unit", what, cure, _INTENDED, line)
    if not watch.host.schedulers:
        yield from _find_cycles_in_a_loop(watch)


def _wrong_unit(scheduler: object, interval: str, host: HostFacts) -> tuple[str, str] | None:
    """Return what is wrong with the interval of a Trainer's scheduler, and the cure; None if nothing is."""
    length, name = _length_of(scheduler), type(scheduler).__name__
    if length is None or not 0 < host.max_epochs < host.updates:
        return None
    if interval == "epoch" and length > host.max_epochs and length >= host.updates / 2:
        what = f"{name} plans {length:,} steps, but is stepped once per epoch: {host.max_epochs} times in this run"
        return what, 'Return {"scheduler": scheduler, "interval": "step"} from configure_optimizers'
    if interval == "step" and length <= host.max_epochs:
        what = f"{name} plans {length:,} steps, but is stepped {host.updates:,.0f} times in this run, once per batch"
        return what, f'Use "interval": "epoch", or a length in steps: {host.updates:,.0f}'
    return None


def _find_cycles_in_a_loop(watch: Watch) -> Iterator[Finding]:
    """Yield schedulers of a loop that ended or repeated within the few steps that were watched."""
    for called in watch.schedulers.values():
        length, line = _length_of(called.scheduler), called.line
        if length is None or line is None or called.calls <= length:
            continue
        what = f"{type(called.scheduler).__name__} plans {length:,} steps, and was stepped {called.calls} times already"
        cure = "Call scheduler.step() once per epoch, after the loop over batches; or give it a length in steps"
        yield Finding("scheduler_unit", what, cure, _INTENDED, line)


def _length_of(scheduler: object) -> int | None:
    for name in _LENGTHS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
