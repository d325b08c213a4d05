"""Gradients of a step: added up over micro-batches, set aside, scaled, and summed in float32."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.state.values import widest_float
from lightning_fasttrain.micro_batching.normalizer.step_weights import StepWeights, refuse_mismatch
from lightning_fasttrain.trial.read_normalizers import Number, scalar_on


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
        if factor is None:
            return loss
        return loss * scalar_on(loss.device, factor, loss.dtype)

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
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    for device, some in by_device.items():
        dtype = torch.promote_types(some[0].dtype, torch.float32)
        # By a tensor, so that the host need not wait for counts on the device.
        torch._foreach_mul_(some, scalar_on(device, factor, dtype))
    return sum(map(len, by_device.values()))


def scale_gradients_(
    optimizer: Optimizer, numerator: Number, denominator: Number, strategy: Strategy | None = None
) -> int:
    """Multiply all gradients by ``numerator / denominator`` (0 where the denominator is 0) and return their number.

    A strategy whose gradients are not visible in ``parameter.grad`` provides a ``scale_gradients_`` of its own.
    """
    own = own_scaling(strategy)
    parameters = parameters_of(optimizer)
    if strategy is not None and own is not None:
        own(ratio(numerator, denominator, strategy.root_device, torch.float32))
        return len(parameters)
    device = strategy.root_device if strategy is not None else parameters[0].device
    return scale_(parameters, ratio(numerator, denominator, device, widest_float(device)))


def own_scaling(strategy: Strategy | None) -> Callable[[Tensor], None] | None:
    """Return the method by which a strategy with sharded gradients multiplies those of the coming step, or None."""
    return getattr(strategy, "scale_gradients_", None)


def ratio(numerator: Number, denominator: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    up, down = (scalar_on(device, number, dtype) for number in (numerator, denominator))
    return torch.where(down > 0, up / down, torch.zeros((), dtype=dtype, device=device))


LOW = (torch.bfloat16, torch.float16)


class Float32GradientSums:
    """Keeps ``.grad`` in float32 between :meth:`begin` and :meth:`finish`, which rounds each gradient once.

    A sum in bfloat16 is rounded at every micro-batch: with 64 of them the gradient is about three times as far from the
    float32 gradient as that of the unsplit batch. Here it is as close. Until ``finish``, gradients take 4 bytes per
    parameter element instead of 2; ``finish`` converts them one by one, so that only one is held twice.

    Some parameters are left unchanged: float32 or float64, frozen, sharded (FSDP sums in its ``reduce_dtype``,
    DeepSpeed in its own buffers), those whose ``grad_dtype`` the user has set, or whose gradient a hook consumes as it
    arrives.

    DistributedDataParallel reduces in buckets of the parameters' dtype and raises at a float32 gradient. There, call
    ``finish`` before the last backward of a step, which is the one that synchronizes.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> sums = Float32GradientSums()
        >>> sums.begin([weight])
        >>> for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        ...     (value * weight).sum().backward()
        >>> weight.grad
        tensor([258.])
        >>> sums.finish()
        >>> weight.grad
        tensor([258.], dtype=torch.bfloat16)

    Source:
        This implementation is our own, based on ``Tensor.grad_dtype``. Checked against gradients in float32.
    """

    def __init__(self) -> None:
        self._switched: list[Tensor] = []

    @property
    def is_open(self) -> bool:
        """Whether gradients are currently kept in float32."""
        return bool(self._switched)

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Sum in float32 from now on; existing gradients are the first terms.

        If called again before ``finish``, float32 gradients enter the next sum unrounded.
        """
        switched = set(self._switched)
        for parameter in parameters:
            if parameter not in switched and _can_be_switched(parameter):
                _set_gradient_dtype(parameter, torch.float32)
                switched.add(parameter)
                self._switched.append(parameter)

    def finish(self) -> None:
        """Round each gradient to its parameter's dtype, in which autograd accumulates from now on."""
        while self._switched:
            parameter = self._switched.pop()
            _set_gradient_dtype(parameter, parameter.dtype)

    def __getstate__(self) -> dict[str, Any]:  # a copied parameter has the default grad_dtype
        return {"_switched": []}


@contextmanager
def sum_gradients_in_float32(parameters: Iterable[Tensor], keep: bool = False) -> Iterator[Float32GradientSums]:
    """Within the context, sum the gradients of bfloat16 and float16 parameters in float32.

    Args:
        parameters: parameters whose gradients are summed.
        keep: leave float32 gradients after the context if it ended without an error, for an optimizer that accepts
            them; call ``finish`` on the returned object after the optimizer's step.

    Returns:
        The :class:`Float32GradientSums`, whose ``finish`` is called earlier under DistributedDataParallel.

    Example:
        >>> layer = torch.nn.Linear(4, 1, dtype=torch.bfloat16)
        >>> with sum_gradients_in_float32(layer.parameters()):
        ...     for _ in range(8):
        ...         layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        ...     layer.weight.grad.dtype
        torch.float32
        >>> layer.weight.grad.dtype
        torch.bfloat16

    Source:
        See :class:`Float32GradientSums`.
    """
    sums = Float32GradientSums()
    sums.begin(parameters)
    try:
        yield sums
    except BaseException:
        sums.finish()
        raise
    if not keep:
        sums.finish()


def takes_float32_gradients(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` supports float32 gradients of its low-precision parameters.

    An optimizer declares it by a class attribute ``float32_gradients_for``, the dtypes of such parameters. Those of
    torch do not: Adam, AdamW and all fused ones raise, and the others round state or update to the parameter's dtype.
    """
    dtypes = {parameter.dtype for parameter in parameters_of(optimizer)}
    return not dtypes.intersection(LOW).difference(getattr(type(optimizer), "float32_gradients_for", ()))


def _can_be_switched(parameter: Tensor) -> bool:
    if parameter.dtype not in LOW or not parameter.requires_grad or parameter.grad_dtype is not parameter.dtype:
        return False
    # A wrapper subclass is from FSDP2 or quantization; the attributes are from DeepSpeed and FSDP.
    marks = ("ds_id", "_is_flat_param", "_fsdp_flattened")
    if is_traceable_wrapper_subclass(parameter) or any(hasattr(parameter, mark) for mark in marks):
        return False
    return not getattr(parameter, "_post_accumulate_grad_hooks", None)


def _set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None  # grad_dtype cannot be set while a gradient of another dtype exists
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def add_gradients(
    parts: Sequence[object],
    weights: StepWeights,
    run: Callable[[Any, int], Tensor | None],
    backward: Callable[[Tensor], object],
    *,
    gradients: StepGradients | None,
    sums: Float32GradientSums,
    no_sync: Callable[[], AbstractContextManager[object]],
    is_shared: bool,
    replay: Callable[[Any, int], bool] | None = None,
) -> None:
    """Run forward and backward of each micro-batch, so that their gradients add up to that of the unsplit step.

    Args:
        parts: the micro-batches.
        weights: their weights.
        run: maps a micro-batch and its index to its loss; None where the step returned none.
        backward: adds the gradient of a weighted loss.
        gradients: scales the gradients once the total of the weights is known; None where it is known beforehand, or
            the gradients are scaled later.
        sums: the sums in float32, which end before a backward that other ranks take part in.
        no_sync: a context in which ranks do not wait for one another, entered for all micro-batches but the last.
        is_shared: whether the last backward averages gradients over ranks.
        replay: adds the gradient of a micro-batch from a recorded graph; False where it has to run.

    Raises:
        OtherSplitError: the losses are not split as the weights say.
        CannotSplitError: nor can the step run again.
    """
    if gradients is not None:
        gradients.set_aside()
    replay = replay or (lambda part, i: False)
    mismatch: AsyncReading | None = None
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if replay(part, i):
            continue
        with nullcontext() if last else no_sync():
            loss = run(part, i)
            if loss is None:
                continue
            loss = weights.scale_loss(loss, i)
            if not last:
                backward(loss)
            else:
                if gradients is not None:
                    loss = gradients.finish(loss, weights.settle())
                mismatch = weights.find_mismatch()
                if is_shared:
                    sums.finish()  # DDP's buckets have the parameters' dtype
                backward(loss)
        del loss  # free the graph before the next micro-batch runs
    mismatch = mismatch or weights.find_mismatch()  # the last micro-batch may have been replayed
    # Read while the device is busy with the backward.
    if mismatch is not None and mismatch.wait():
        refuse_mismatch(is_shared=is_shared)
    if gradients is not None and not gradients.closed:  # the last micro-batch's step returned None
        gradients.close(weights.settle() if weights.held else None)
