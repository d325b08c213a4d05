"""Custom functions that have a first derivative only say so, where torch would return a wrong second one."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_fasttrain.core.messages import explain


def refuse_second_derivative(function: str, way_out: str) -> None:
    """Refuse to be walked backward with ``create_graph=True``; to be called first in a custom function's backward.

    :func:`torch.autograd.function.once_differentiable` refuses only where the incoming gradient needs one itself, and
    that of a loss is a constant: what depends on the gradients is then a constant, too, without an error.

    Args:
        function: what the user called.
        way_out: what to do instead.

    Raises:
        RuntimeError: a graph of the gradients is wanted.
    """
    # The compiler's own functions refuse second derivatives, and it traces the backward with gradients on.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        why = "its gradients are computed without a graph of their own, so a second derivative would be wrong"
        raise RuntimeError(explain(f"{function} in a backward with create_graph=True", why, way_out))


def refuse_transforms(function: str, way_out: str, *tensors: Tensor | None) -> None:
    """Refuse ``torch.func``'s transforms and forward-mode derivatives, which a custom function has no rules for.

    Args:
        function: what the user called.
        way_out: what to do instead.
        tensors: what it was given; any of them may be a dual number.

    Raises:
        RuntimeError: it runs inside of ``torch.func.grad``, ``vmap`` or their like, or a tensor has a tangent.
    """
    if torch.compiler.is_compiling():
        return
    why = "it has no rule for them, only for backward()"
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(explain(f"{function} under torch.func's transforms", why, way_out))
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None):
        raise RuntimeError(explain(f"{function} of dual numbers, in forward-mode derivatives", why, way_out))
