"""Optimizers that update one parameter after another, where one fused kernel does the same; tried on copies."""

import copy
import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.device import device_clock, free_bytes
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.doctor.finding import Finding, cost_of_ratio
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import find_only_call
from lightning_fasttrain.doctor.observation.update_record import UpdateRecord
from lightning_fasttrain.doctor.observation.watch import Watch
from lightning_fasttrain.planner.timing import compare_times

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
    copies: dict[int, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        parameters = []
        for parameter in group["params"]:
            made = copies[id(parameter)] = parameter.detach().clone().requires_grad_()
            if id(parameter) in record.with_gradient:
                made.grad = torch.zeros_like(made)
            parameters.append(made)
        groups.append({**settings, **changes, "params": parameters})
    made_optimizer = type(optimizer)(groups, **_lr_of(optimizer))
    for parameter in parameters_of(optimizer):
        if parameter in optimizer.state:
            made_optimizer.state[copies[id(parameter)]] = copy.deepcopy(optimizer.state[parameter])
    return made_optimizer


def _lr_of(optimizer: Optimizer) -> dict[str, Any]:
    return {"lr": optimizer.defaults["lr"]}


def _time_step(optimizer: Optimizer, device: torch.device) -> float:
    began = device_clock(device)
    # The methods of the class: hooks of the user's own optimizer are not those of a copy.
    type(optimizer).step(optimizer)
    return 1e3 * (device_clock(device) - began)
