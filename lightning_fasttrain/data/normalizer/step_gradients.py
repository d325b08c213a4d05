"""The gradients of one step, kept apart from earlier ones until they are scaled."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number


class StepGradients:
    """Scales the gradients of one step, but not those that were in ``.grad`` before it.

    Args:
        parameters: the leaf tensors of the step's losses.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.tensor([5.0])
        >>> gradients = StepGradients([weight])
        >>> gradients.set_aside()
        >>> (2 * weight).sum().backward()
        >>> last = gradients.finish((4 * weight).sum(), 0.5)
        >>> last.backward()
        >>> weight.grad
        tensor([8.])
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self.closed = False
        self._had_others = any(parameter.grad is not None for parameter in self.parameters)

    def set_aside(self) -> None:
        """Move existing gradients away, so that those of the step can be scaled alone."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None

    def discard(self, error: Exception) -> None:
        """Restore the gradients from before the step.

        Raises: ValueError: the step has already added to gradients that were there before.
        """
        if self._had_others and not self._earlier:
            what = "micro-batches whose gradients are added to existing ones"
            why = f"this batch is split differently from earlier ones, and the sum holds some of it: {error}"
            raise ValueError(explain(what, why, "Set gradients to None first, or give count= a function")) from error
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, gradient in self._earlier:
            parameter.grad = gradient

    def finish(self, loss: Tensor, factor: Number | None) -> Tensor:
        """Scale the gradients so far, and return the last loss scaled likewise; call it before the last backward."""
        self.close(factor)
        return loss if factor is None else loss * torch.as_tensor(factor, dtype=loss.dtype, device=loss.device)

    def close(self, factor: Number | None) -> None:
        """Scale the step's gradients, and add the earlier ones; once."""
        if self.closed:
            return
        self.closed = True
        if factor is not None:
            scale_(self.parameters, factor)
        for parameter, gradient in self._earlier:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)  # in place, since DDP may hold this tensor
        self._earlier = []


def scale_(parameters: Iterable[Tensor], factor: Number) -> int:
    """Multiply the gradients in place and return their number."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for device in {grad.device for grad in grads}:
        some = [grad for grad in grads if grad.device == device]
        dtype = torch.promote_types(some[0].dtype, torch.float32)
        # By a tensor, so that the host need not wait for counts on the device.
        torch._foreach_mul_(some, torch.as_tensor(factor, dtype=dtype, device=device))
    return len(grads)
