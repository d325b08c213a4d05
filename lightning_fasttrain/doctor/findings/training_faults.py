"""Faults of the training itself: parameters without gradient or optimizer, gradients that are never zeroed."""

from collections.abc import Iterator

from lightning_fasttrain.core.messages import list_some, number_of
from lightning_fasttrain.doctor.finding import Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import SourceLine, find_attribute
from lightning_fasttrain.doctor.observation.watch import Watch

# Fewer updates say too little about what every update does.
_LEAST_UPDATES = 4


def find_training_faults(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield parameters that do not train, and updates that add the gradients of earlier ones."""
    records = list(watch.updates.values())
    updates = max((record.updates for record in records), default=0)
    if updates < _LEAST_UPDATES:
        return
    held = watch.held_parameters()
    idle = watch.unused_parameters()
    outside = [name for name, one in watch.named_parameters() if id(one) not in held and one.grad is not None]
    if idle and any(record.with_gradient for record in records):
        yield _without_gradient(idle, updates)
    if outside:
        yield _outside_the_optimizer(outside)
    for record in records:
        if record.kept_gradients >= max(2, record.compared - 1):
            what = f"Each update of {type(record.optimizer).__name__} adds the gradients of all earlier ones"
            cure = "Call optimizer.zero_grad() before each backward"
            yield Finding("zero_grad_missing", what, cure, "changes the training to the intended one", record.line)


def _without_gradient(names: list[str], updates: int) -> Finding:
    what = (
        f"{number_of(len(names), 'parameter')} had no gradient in {updates} updates, so training does not change "
        f"{'it' if len(names) == 1 else 'them'}: {list_some(names)}"
    )
    cure = "Use the layer in the forward, or remove it, or freeze it with requires_grad_(False)"
    return Finding("no_gradient", what, cure, "exact if it is removed or frozen", _made_at(names[0]))


def _outside_the_optimizer(names: list[str]) -> Finding:
    what = f"{number_of(len(names), 'parameter')} with gradients, but in no optimizer: {list_some(names)}"
    cure = "Pass all parameters to the optimizer: model.parameters(); or freeze these with requires_grad_(False)"
    return Finding("not_in_optimizer", what, cure, "changes the training to the intended one", _made_at(names[0]))


def _made_at(name: str) -> SourceLine | None:
    """Return the line that sets the attribute a parameter belongs to: of "head.weight" that of ``self.head``."""
    for attribute in reversed(name.split(".")):
        line = find_attribute(attribute)
        if line is not None:
            return line
    return None
