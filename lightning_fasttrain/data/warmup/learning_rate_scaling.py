"""Learning rates that follow the batch size: scaled during each update, and restored after it."""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_fasttrain.core.modules.wrapped_forward import Undo

RULES: dict[str, Callable[[float], float]] = {"linear": lambda share: share, "sqrt": math.sqrt}


def scale_rates_(optimizer: Optimizer, factor: Callable[[], float]) -> Undo:
    """Multiply the learning rates of all groups by ``factor()`` in each update of ``optimizer``.

    Outside of updates the groups have the learning rates of their schedule, so this composes with any schedule.

    Args:
        optimizer: any optimizer.
        factor: called before each update.

    Returns:
        A function that undoes it.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> undo = scale_rates_(optimizer, lambda: 0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (-0.25, 1.0)

    Source:
        Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear, for SGD); Malladi et al. 2022,
        https://arxiv.org/abs/2205.10287 (square root, for Adam).
    """
    scaled: list[tuple[dict[str, Any], Any, Any]] = []  # group, its learning rate, the scaled one

    def scale(optimizer: Optimizer, *_: Any) -> None:
        restore()  # after an update whose closure raised
        by = factor()
        for group in optimizer.param_groups:
            own, group["lr"] = group["lr"], group["lr"] * by
            scaled.append((group, own, group["lr"]))

    def restore(*_: Any) -> None:
        for group, own, used in scaled:
            if group["lr"] is used:  # otherwise a schedule has already set the next one
                group["lr"] = own
        scaled.clear()

    hooks = [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]

    def undo() -> None:
        restore()
        for hook in hooks:
            hook.remove()

    return undo
