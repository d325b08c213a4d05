"""Faults of the training itself: parameters without gradient or optimizer, gradients that are never zeroed."""

from collections.abc import Iterator

from torch import nn

from lightning_fasttrain.core.messages import list_some, number_of
from lightning_fasttrain.doctor.finding import Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.module_watch import ModuleCall, is_batch_norm, is_dropout
from lightning_fasttrain.doctor.observation.source_lines import (
    SourceLine,
    find_attribute,
    find_only_call,
    has_method_call,
)
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


_TINY = 4
_INTENDED = "changes the training to the intended one"


def find_module_modes(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield what is in the wrong mode, and batch norms that see few samples."""
    names = _name_modules(watch)
    calls = [call for call in watch.modules.called.values() if id(call.module) in names]
    asleep = [call for call in calls if _is_asleep(call, names)]
    if asleep:
        listed = list_some([names[id(call.module)][0] for call in asleep])
        what = f"{number_of(len(asleep), 'module')} ran in eval mode while training: {listed}"
        cure = "Call model.train() before training, and after validation, unless this is intended"
        yield Finding("left_in_eval", what, cure, _INTENDED, _set_to_eval() or asleep[0].line)
    for line, kind in watch.modules.active_dropout.items():
        what = f"{kind} was active in a forward without gradients: `{line.text}`"
        cure = "Call model.eval() before validation, unless this is intended"
        yield Finding("dropout_in_validation", what, cure, _INTENDED, line)
    tiny = [call for call in calls if is_batch_norm(call.module) and call.was_training and 0 < call.samples <= _TINY]
    if tiny:
        samples = max(call.samples for call in tiny)
        what = f"{number_of(len(tiny), 'batch norm')} normalizes over {number_of(samples, 'sample')} only"
        cure = "Use larger micro-batches, or GroupNorm, or SyncBatchNorm over several devices"
        yield Finding("tiny_batch_norm", what, cure, "changes the training: its statistics", tiny[0].line)


def _set_to_eval() -> SourceLine | None:
    """Return the line that sets a model to eval mode; None if a later call of ``train`` may have undone it."""
    if has_method_call("train"):
        return None
    return find_only_call("eval") or find_only_call("from_pretrained")


def _name_modules(watch: Watch) -> dict[int, tuple[str, nn.Module]]:
    """Return the name of each module, and the module that contains it."""
    named: dict[int, tuple[str, nn.Module]] = {}
    for model in watch.models:
        for name, module in model.named_modules():
            named[id(module)] = (name or type(module).__name__, model.get_submodule(name.rpartition(".")[0]))
    return named


def _is_asleep(call: ModuleCall, names: dict[int, tuple[str, nn.Module]]) -> bool:
    """Whether a module whose mode matters ran in eval mode beside parameters that train."""
    if call.was_training:
        return False
    if is_batch_norm(call.module):
        return _trains(call.module)
    if not is_dropout(call.module) or not getattr(call.module, "p", 0.0):
        return False
    _, parent = names[id(call.module)]
    return _trains(parent)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
