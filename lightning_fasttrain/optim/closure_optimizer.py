"""Base class of optimizers that update after their closure, with all gradients."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer


class ClosureOptimizer(Optimizer):
    """Runs a closure with gradients on, as torch's optimizers do, and then :meth:`update_parameters` without them.

    Attributes:
        copied: names of attributes that copies keep; torch's copy only groups and state.
    """

    copied: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.copied}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_parameters()
        return loss

    def update_parameters(self) -> None:
        """Update the parameters that have a gradient."""
        raise NotImplementedError
