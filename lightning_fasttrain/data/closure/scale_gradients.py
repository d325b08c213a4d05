"""Multiply the gradients of an optimizer step, wherever the strategy stores them."""

from collections.abc import Callable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.step_gradients import scale_


def scale_gradients_(
    optimizer: Optimizer, numerator: Number, denominator: Number, strategy: Strategy | None = None
) -> int:
    """Multiply all gradients by ``numerator / denominator`` (0 where the denominator is 0) and return their number.

    A strategy whose gradients are not visible in ``parameter.grad`` provides a ``scale_gradients_`` of its own.
    """
    own = own_scaling(strategy)
    parameters = list_parameters(optimizer)
    if strategy is not None and own is not None:
        own(ratio(numerator, denominator, strategy.root_device, torch.float32))
        return len(parameters)
    device = strategy.root_device if strategy is not None else parameters[0].device
    return scale_(parameters, ratio(numerator, denominator, device, torch.float64))


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_scaling(strategy: Strategy | None) -> Callable[[Tensor], None] | None:
    """Return the method by which a strategy with sharded gradients multiplies those of the coming step, or None."""
    return getattr(strategy, "scale_gradients_", None)


def ratio(numerator: Number, denominator: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    up, down = _as_tensor(numerator, device, dtype), _as_tensor(denominator, device, dtype)
    return torch.where(down > 0, up / down, torch.zeros((), dtype=dtype, device=device))


def _as_tensor(number: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)
