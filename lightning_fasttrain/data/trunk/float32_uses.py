"""Sum the gradients of a 16-bit parameter over the micro-batches of one backward in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LOW = (torch.bfloat16, torch.float16)


class Float32Uses:
    """Gives each micro-batch of a forward its own use of a module's 16-bit parameters.

    Autograd adds the gradients of several uses of a parameter in the parameter's own dtype, and rounds each time. Here
    the uses add theirs to a separate float32 sum, which replaces them right before accumulation, so that DDP and hooks
    see one gradient, rounded once. Sharded parameters are left unchanged.

    Args:
        module: the module whose parameters are used several times.
    """

    def __init__(self, module: nn.Module) -> None:
        self._sums: dict[str, _Sum] = {}
        for name, parameter in module.named_parameters():
            plain = parameter.dtype in _LOW and not is_traceable_wrapper_subclass(parameter)
            if plain and parameter.requires_grad and not hasattr(parameter, "ds_id"):
                self._sums[name] = _Sum(parameter)

    def __bool__(self) -> bool:
        return bool(self._sums)

    def run(self, module: nn.Module, function: Callable[[], object], uses: dict[str, Tensor]) -> Any:
        """Call a function of the module with these tensors in place of its parameters."""
        return torch.func.functional_call(
            _Calls(module, function), {f"module.{name}": use for name, use in uses.items()}
        )

    def use(self) -> dict[str, Tensor]:
        """Return the parameters for one more micro-batch, by name."""
        return {name: _Use.apply(sum_.parameter, sum_) for name, sum_ in self._sums.items()}  # pyright: ignore[reportReturnType]


class _Sum:
    """The gradient of one parameter so far."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.total: Tensor | None = None
        self._handle: Any = None
        self._backward = -1

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient; return what autograd accumulates: zeros for the first use, so that hooks are called."""
        if self.total is not None and self._backward == _current_backward():
            self.total.add_(gradient)
            return None
        self.total, self._backward = gradient.float(), _current_backward()
        if self._handle is None:
            self._handle = self.parameter.register_hook(self._finish)
        return gradient.new_zeros(()).expand_as(gradient)

    def _finish(self, gradient: Tensor) -> Tensor:
        self._handle.remove()
        total, self.total, self._handle = self.total, None, None
        if total is None or self._backward != _current_backward():
            return gradient  # left behind by an earlier backward that failed
        return total.add_(gradient).to(gradient.dtype)


def _current_backward() -> int:
    return torch._C._current_graph_task_id()


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, parameter: Tensor, sum_: _Sum) -> Tensor:
        ctx.sum_ = sum_
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.sum_.add(gradient), None


class _Calls(nn.Module):
    """Calls a function as a module, so that other parameters can be passed."""

    def __init__(self, module: nn.Module, function: Callable[[], object]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> Any:
        return self.function()
