"""Findings about training itself: optimizers, schedulers, and steps that do not train what they seem to."""

import copy
import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.device import free_bytes, time_ms
from lightning_fasttrain.core.messages import list_some, number_of
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.doctor.diagnosis import Finding, cost_of_ratio
from lightning_fasttrain.doctor.observation.operator_watch import ModuleCall, is_batch_norm, is_dropout
from lightning_fasttrain.doctor.observation.source_lines import (
    SourceLine,
    find_attribute,
    find_only_call,
    has_method_call,
)
from lightning_fasttrain.doctor.observation.step_records import Measured, UpdateRecord
from lightning_fasttrain.doctor.observation.watch import HostFacts, Watch
from lightning_fasttrain.planner.timing import compare_times

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


_TURNS, _LEAST_TURNS, _WARMUP = 15, 3, 2
# The turns of a large model are fewer.
_BUDGET_MS = 2000.0
# Two copies of parameters, gradients and two moments, and a margin.
_COPIES = 10
_LEAST_SHARE = 0.01


def find_slow_optimizers(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield optimizers whose fused variant was faster on copies of the parameters and the state."""
    optimizer_ms = measured.typical("optimizer")
    if optimizer_ms < _LEAST_SHARE * measured.step_ms:
        return
    for record in watch.updates.values():
        if _could_be_fused(record):
            yield from _try_fused(record, optimizer_ms)


def _could_be_fused(record: UpdateRecord) -> bool:
    optimizer = record.optimizer
    known = (
        type(optimizer).__module__.startswith("torch.optim")
        and "fused" in inspect.signature(type(optimizer)).parameters
    )
    if not known or optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"):
        return False
    parameters = parameters_of(optimizer)
    plain = all(type(one) in (nn.Parameter, torch.Tensor) and one.is_floating_point() for one in parameters)
    free = free_bytes(parameters[0].device)
    return plain and free is not None and _COPIES * sum(one.nbytes for one in parameters) < free


def _try_fused(record: UpdateRecord, optimizer_ms: float) -> Iterator[Finding]:
    optimizer, name = record.optimizer, type(record.optimizer).__name__
    device = parameters_of(optimizer)[0].device
    plain, fused = _copy(optimizer, record), _copy(optimizer, record, foreach=None, fused=True)
    base_ms, fused_ms = [], []
    turns = min(_TURNS, max(_LEAST_TURNS, int(_BUDGET_MS / (2 * optimizer_ms))))
    for turn in range(turns + _WARMUP):
        times = _time_step(plain, device), _time_step(fused, device)
        if turn >= _WARMUP:
            base_ms.append(times[0])
            fused_ms.append(times[1])
    ratio = compare_times(base_ms, fused_ms)
    if ratio.high >= 1:
        return
    # In the run itself the optimizer may be quicker than its copy, whose memory is new.
    base = min(statistics.median(base_ms), optimizer_ms)
    gain = cost_of_ratio(base, ratio, is_gain=True)
    count = len(record.with_gradient)
    what = f"{name} updates {count:,} parameters one after the other; the fused one was timed on copies"
    line = find_only_call(name) or record.line
    yield Finding("unfused_optimizer", what, f"{name}(..., fused=True)", "to rounding", line, gain)


def _copy(optimizer: Optimizer, record: UpdateRecord, **changes: bool | None) -> Optimizer:
    """Return a copy of an optimizer, with copies of its parameters and its state, and gradients of zeros."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        parameters = []
        for parameter in group["params"]:
            made = parameter.detach().clone().requires_grad_()
            if id(parameter) in record.with_gradient:
                made.grad = torch.zeros_like(made)
            parameters.append(made)
        groups.append({**settings, **changes, "params": parameters})
    made_optimizer = type(optimizer)(groups, **_lr_of(optimizer))
    numbered = enumerate(parameters_of(optimizer))
    state = {number: copy.deepcopy(optimizer.state[one]) for number, one in numbered if one in optimizer.state}
    # Loading moves counts of steps to the device, where a fused optimizer has them.
    made_optimizer.load_state_dict({"state": state, "param_groups": made_optimizer.state_dict()["param_groups"]})
    return made_optimizer


def _lr_of(optimizer: Optimizer) -> dict[str, Any]:
    return {"lr": optimizer.defaults["lr"]}


def _time_step(optimizer: Optimizer, device: torch.device) -> float:
    # The methods of the class: hooks of the user's own optimizer are not those of a copy.
    return time_ms(device, lambda: type(optimizer).step(optimizer))


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
