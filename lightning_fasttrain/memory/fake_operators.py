"""Operators that fake tensors cannot run: those that need values, and lists of sharded tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, ops
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 10_000  # values; a loop that waits for another value would never end


class AssumedNumbers(TorchDispatchMode):
    """Returns an assumed value for every value read from a tensor, where torch would raise an error.

    Enter it inside a fake mode.

    Args:
        truth: the value returned for booleans.
        number: the value returned for integers; for floats it is 1.
        selected: number of elements that a mask selects; None means all.

    Attributes:
        assumed: number of assumed values.
    """

    def __init__(self, truth: bool, number: int = 1, selected: int | None = None) -> None:
        super().__init__()
        self.truth, self.number, self.selected = truth, number, selected
        self.assumed = 0

    def __torch_dispatch__(self, func: object, types: Any, args: object = (), kwargs: object = None) -> Any:
        if is_sharded(types):
            return NotImplemented
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operation's result with assumed values."""
        if func is ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        if func is ops.aten.bincount.default and (least := kwargs.get("minlength", args[2] if args[2:] else 0)):
            return args[0].new_empty(least, dtype=torch.long)  # as in metrics of classes, whose ids are below it
        if func in _INDEXED and any(map(_is_mask, args[1])):
            return self._index(func, args, kwargs)
        if func in _SELECTIONS:
            self.assumed += 1
            return _SELECTIONS[func](self.count, *args, **kwargs)
        reads_value = func is ops.aten._local_scalar_dense.default and self.assumed < MOST
        if reads_value and isinstance(args[0], FakeTensor):
            # Answered here: by the mode, counts of steps of each parameter would take a tenth of a prediction.
            if args[0].constant is not None:
                with no_dispatch():
                    return args[0].constant.item()
        else:
            try:
                return self.run(func, args, kwargs)
            except DataDependentOutputException:
                if not reads_value:
                    raise
        self.assumed += 1
        return self.value(args[0].dtype)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors."""
        return func(*args, **kwargs)

    def value(self, dtype: torch.dtype) -> bool | int | float:
        """Return the value that is assumed for an element of this dtype."""
        if dtype is torch.bool:
            return self.truth
        if dtype.is_floating_point:
            return 1.0
        return self.number

    def count(self, candidates: int) -> int:
        """Return how many of so many elements are selected."""
        if self.selected is None:
            return candidates
        return min(candidates, self.selected)

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Index with masks: an assignment allocates as with any index, a selection has as many rows as are assumed."""
        self.assumed += 1
        if func is not ops.aten.index.Tensor:
            return args[0] if func in _IN_PLACE else torch.empty_like(args[0])
        indices: list[Tensor | None] = []
        for index in args[1]:
            if _is_mask(index):
                rows = self.count(index.numel())
                indices += [index.new_empty(rows, dtype=torch.long) for _ in range(index.ndim)]
            else:
                indices.append(index)
        return func(args[0], indices, **kwargs)


class AssumedArrays(TorchFunctionMode):
    """Assumes values for code that leaves torch, such as a matching in NumPy, and for the lengths of a CTC loss.

    Args:
        numbers: what else is assumed; its count includes these.
    """

    def __init__(self, numbers: AssumedNumbers) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ARRAYS.get(func)
        if answer is None:
            return func(*args, **kwargs)
        self.numbers.assumed += 1
        return answer(self.numbers.value, *args, **kwargs)


def is_assumed(func: object) -> bool:
    """Return whether :class:`AssumedArrays` answers a function."""
    return func in _ARRAYS


def _as_array(value: Callable[[torch.dtype], Any], tensor: Tensor, *_: object, **__: object) -> Any:
    return numpy.full(tuple(tensor.shape), value(tensor.dtype), str(tensor.dtype).removeprefix("torch."))


def _ctc_loss(
    _: object,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return a CTC loss [B] or [] whose targets are all as long as the mean. [T, B, C] log-probabilities."""
    batch = log_probs.shape[1] if log_probs.ndim == 3 else 1
    longest = targets.shape[1] if targets.ndim == 2 else math.ceil(targets.numel() / batch)
    losses = _CTCLoss.apply(log_probs, longest)
    if reduction in ("mean", 1):
        return losses.mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses


# Function → (assumed value of a dtype, arguments) → result
_ARRAYS: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _as_array,
    Tensor.__array__: _as_array,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}


class _CTCLoss(torch.autograd.Function):
    """Keeps the forward variables [B, T, 2·S + 1] of targets of length S, and needs as much for the backward ones."""

    @staticmethod
    def forward(context: object, log_probs: Tensor, longest: int) -> Tensor:
        steps, batch = log_probs.shape[0], log_probs.shape[1]
        alpha = log_probs.new_empty(batch, steps, 2 * longest + 1)
        context.save_for_backward(log_probs, alpha)
        return log_probs.new_empty(batch)

    @staticmethod
    def backward(context: object, *_: Tensor) -> tuple[Tensor, None]:
        log_probs, alpha = context.saved_tensors
        gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
        torch.empty_like(alpha)
        return gradient, None


def is_sharded(types: Sequence[type]) -> bool:
    """Return whether an operation has a sharded tensor among its arguments."""
    return any(issubclass(kind, DTensor) for kind in types)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _select(count: Callable[[int], int], source: Tensor, mask: Tensor) -> Tensor:
    return source.new_empty(count(torch.broadcast_shapes(source.shape, mask.shape).numel()))


def _find(count: Callable[[int], int], source: Tensor) -> Tensor:
    return source.new_empty((count(source.numel()), source.ndim), dtype=torch.long)


def _find_unique(
    count: Callable[[int], int], source: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor, Tensor]:
    found = count(source.numel())
    inverse, counts = source.new_empty(source.shape, dtype=torch.long), source.new_empty(found, dtype=torch.long)
    return source.new_empty(found), inverse, counts


def _repeat(count: Callable[[int], int], repeats: Tensor, output_size: int | None = None) -> Tensor:
    if output_size is None:
        output_size = repeats.numel()
    return repeats.new_empty(output_size)


_INDEXED = {
    ops.aten.index.Tensor,
    ops.aten.index_put.default,
    ops.aten.index_put_.default,
    ops.aten._index_put_impl_.default,
}
_IN_PLACE = {ops.aten.index_put_.default, ops.aten._index_put_impl_.default}
# Operation → (number of elements that are selected of so many, arguments) → result
_SELECTIONS: dict[Any, Callable[..., Any]] = {
    ops.aten.masked_select.default: _select,
    ops.aten.nonzero.default: _find,
    ops.aten._unique2.default: _find_unique,
    ops.aten.unique_consecutive.default: _find_unique,
    ops.aten.repeat_interleave.Tensor: _repeat,
}


def _grouped_product(first: Tensor, second: Tensor, ends: Tensor | None = None, *_: object, **settings: Any) -> Tensor:
    """Multiply groups of rows, as for mixtures of experts. Fake tensors support it only in bfloat16."""
    ends = settings.get("offs", ends)
    groups: tuple[int, ...] = ()
    if first.ndim == second.ndim and ends is not None:
        groups = (len(ends),) if first.ndim == 2 else (len(first),)
    rows, columns = first.shape[-2], second.shape[-1]
    return first.new_empty((*groups, rows, columns))


_REDUCES = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def run_on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
    """Run an elementwise list operator on the shards that this rank holds; other operators return NotImplemented.

    :class:`DTensor` does the same, but first propagates the sharding of each tensor past all others, which for the
    hundreds of parameters of an optimizer takes more time than the rest of a prediction.

    Args:
        func: the operator.
        args, kwargs: its arguments, with sharded tensors among them.
        run: the ``__torch_dispatch__`` of a mode, for tensors that are not sharded.
    """
    if not _is_elementwise(func):
        return NotImplemented
    lists = [value for value in (*args, *kwargs.values()) if _holds_tensors(value)]
    if not lists or not all(map(_share_sharding, *lists)):
        return NotImplemented
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if any(isinstance(value, DTensor) or value.ndim for value in others):
        return NotImplemented
    local_kwargs = {name: _take_shards(value) for name, value in kwargs.items()}
    result = run(func, (), tuple(map(_take_shards, args)), local_kwargs)
    if not isinstance(result, list | tuple):
        return result
    wrapped: list[Any] = []
    for tensor, like in zip(result, lists[0], strict=True):
        wrapped.append(DTensor(tensor, like._spec, requires_grad=False))  # type: ignore[call-arg]
    return wrapped


def _is_elementwise(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.startswith("_foreach_") and name.rstrip("_") not in _REDUCES


def _holds_tensors(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _share_sharding(*tensors: Tensor) -> bool:
    """Whether tensors at one place of the lists are sharded in the same way, so that their shards correspond."""
    first = tensors[0]
    if not isinstance(first, DTensor) or any(placement.is_partial() for placement in first.placements):
        return False
    return all(isinstance(other, DTensor) and other._spec == first._spec for other in tensors[1:])


def _take_shards(value: Any) -> Any:
    if not _holds_tensors(value):
        return value
    return [tensor._local_tensor for tensor in value]
