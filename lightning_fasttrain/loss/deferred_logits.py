"""Logits that are not computed: hidden states that record the operations applied to the logits."""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fasttrain.core.messages import explain


class DeferredLogits:
    r"""Stands for the logits :math:`z = f · \mathrm{head}(h) + b`, or :math:`z = c \tanh(f · \mathrm{head}(h) + b)`.

    They have the shape, dtype and device of the logits, but no values. They support what models do between head and
    loss: casts, reshapes, slices and splits that keep the classes last and complete, a permutation that puts the
    classes second (einops' too), factors, one value added to each class, soft-capping, and finally ``log_softmax``.
    Their ``cross_entropy``, or after ``log_softmax`` their ``nll_loss``, is the result of ``loss_of``. Operations that
    need the values are refused. They are not a ``Tensor``, so that the hooks of strategies, which cast, detach or
    gather the tensors of an output, skip them.

    Args:
        hidden: h, (..., D).
        classes: V; the shape is (..., V).
        dtype: the dtype of the head's output.
        loss_of: called with ``hidden`` (N, D), ``targets`` (N), f·c or f, c, and keywords of ``cross_entropy``; with
            ``bias``, c·b or b (V,), and ``class_weights`` (V,), if there are any.
        factor: f.
        cap: c; None for no tanh.
        bias: b (V,); None for no bias.
        normalised: whether ``log_softmax`` was called, which changes no loss.
        classes_second: whether the shape is (B, V, ...), as ``cross_entropy`` wants it, instead of (B, ..., V).

    Raises:
        RuntimeError, AttributeError: an operation needs the values.

    Example:
        >>> def loss_of(hidden, targets, factor, cap, **how):
        ...     return hidden.sum()
        >>> logits = DeferredLogits(torch.ones(2, 3, 4), 9, torch.float32, loss_of)
        >>> logits[:, :-1].reshape(-1, 9).float()
        DeferredLogits(shape=(4, 9))
        >>> F.cross_entropy(logits.flatten(0, 1), torch.zeros(6, dtype=torch.long))
        tensor(24.)

    Source:
        This class is our own, based on PyTorch's ``__torch_function__``. Checked against the same operations on real
        logits.
    """

    def __init__(
        self,
        hidden: Tensor,
        classes: int,
        dtype: torch.dtype,
        loss_of: Callable[..., Tensor],
        factor: float = 1.0,
        cap: float | None = None,
        bias: Tensor | None = None,
        normalised: bool = False,
        classes_second: bool = False,
    ) -> None:
        self.hidden, self.classes, self.dtype, self.loss_of = hidden, classes, dtype, loss_of
        self.factor, self.cap, self.bias, self.normalised = factor, cap, bias, normalised
        self.classes_second, self.ndim, self.device = classes_second, hidden.ndim, hidden.device
        self._class_axis = 1 if classes_second else hidden.ndim - 1
        shape = list(hidden.shape[:-1])
        shape.insert(self._class_axis, classes)
        self.shape = torch.Size(shape)
        if "einops" in sys.modules:
            _register_with_einops()

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)})"

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def _copy_with(self, **changes: object) -> "DeferredLogits":
        same = {"hidden": self.hidden, "classes": self.classes, "dtype": self.dtype, "loss_of": self.loss_of}
        done = {"factor": self.factor, "cap": self.cap, "bias": self.bias, "normalised": self.normalised}
        return DeferredLogits(**{**same, **done, "classes_second": self.classes_second, **changes})

    def scales(self) -> tuple[float, Tensor | None]:
        """Return f·c and c·b, or f and b without a cap."""
        if self.cap is None:
            return self.factor, self.bias
        return self.factor * self.cap, scale_bias(self.bias, self.cap)

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        old = size_average is not None or reduce is not None
        if old or target.is_floating_point():
            raise _refusal("cross_entropy with probabilities for targets or with old options")
        # With more than two axes, cross_entropy treats the second one as the classes.
        if self.ndim > 2 and not self.classes_second:
            raise _refusal(f"cross_entropy over the second dimension of {tuple(self.shape)}")
        factor, bias = self.scales()
        if math.isclose(factor, 1.0):  # soft-capping divides and multiplies by the same value
            factor = 1.0
        given = {"bias": bias, "class_weights": weight}
        more = {name: tensor for name, tensor in given.items() if tensor is not None}
        return self.loss_of(
            self.hidden,
            target,
            factor,
            self.cap,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            **more,
        )

    def nll_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.normalised:
            raise _refusal("nll_loss")
        return self.cross_entropy(*args, **kwargs)

    def contiguous(self) -> "DeferredLogits":
        return self

    def float(self) -> "DeferredLogits":
        return self._copy_with(dtype=torch.float32)

    def to(self, *args: object, **kwargs: object) -> "DeferredLogits":
        for asked in (*args, *kwargs.values()):
            # Compared by type, since "cuda" is not equal to "cuda:0".
            if isinstance(asked, str | torch.device) and torch.device(asked).type != self.device.type:
                raise _refusal(f".to({str(asked)!r})")
        dtypes = [asked for asked in (*args, *kwargs.values()) if isinstance(asked, torch.dtype)]
        return self._copy_with(dtype=dtypes[0]) if dtypes else self

    def view(self, *shape: object) -> "DeferredLogits":
        return self._reshape_rows("view", *shape)

    def reshape(self, *shape: object) -> "DeferredLogits":
        return self._reshape_rows("reshape", *shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "DeferredLogits":
        return self._reshape_rows("flatten", start_dim, end_dim)

    def _reshape_rows(self, name: str, *args: object) -> "DeferredLogits":
        # Applies torch's own rules for -1, tuples and ranges of axes, on a tensor without memory.
        shape = getattr(torch.empty(self.shape, device="meta"), name)(*args).shape
        if shape == self.shape:
            return self
        # Rows are preserved if their length is.
        if self.classes_second or shape[-1] != self.classes:
            raise _refusal(f".{name}{args}")
        return self._copy_with(hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def permute(self, *dims: Any) -> "DeferredLogits":
        """Return the logits with permuted axes; the classes must end up last or second."""
        # Applies torch's own rules for negative axes and tuples, on a tensor whose axes differ in length.
        lengths = torch.empty(tuple(range(self.ndim)), device="meta").permute(*dims).shape
        # The classes are last in `hidden`, so the axes between move down by one.
        rows = [axis - (axis > self._class_axis) for axis in lengths if axis != self._class_axis]
        place = lengths.index(self._class_axis)
        if place not in (1, self.ndim - 1):
            raise _refusal(f".permute{dims}")
        hidden = self.hidden.permute(*rows, self.ndim - 1)
        return self._copy_with(hidden=hidden, classes_second=place != self.ndim - 1)

    def transpose(self, dim0: int, dim1: int) -> "DeferredLogits":
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return self.permute(axes)

    def movedim(self, source: int, destination: int) -> "DeferredLogits":
        axes = list(range(self.ndim))
        axes.insert(destination % self.ndim, axes.pop(source))
        return self.permute(axes)

    @property
    def mT(self) -> "DeferredLogits":
        return self.transpose(-2, -1)

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple["DeferredLogits", ...]:
        if self.classes_second or dim in (-1, self.ndim - 1):
            raise _refusal(f".split(dim={dim})")
        return tuple(self._copy_with(hidden=rows) for rows in self.hidden.split(split_size, dim))

    def __getitem__(self, index: Any) -> "DeferredLogits":
        """Index rows by a mask, indices or slices that do not reach the classes."""
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(index, Tensor):
            leaves_classes = index.ndim < self.ndim > 1
        elif all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
            named = [part for part in parts if part is not Ellipsis]
            # The last index applies to the classes if all axes are named, or if `...` stands for those between.
            reaches = len(named) == self.ndim or (Ellipsis in parts and parts[-1] is not Ellipsis)
            leaves_classes = not reaches or named[-1] == slice(None)
        else:
            leaves_classes = False
        if not leaves_classes or self.classes_second:
            raise _refusal("an index into the classes")
        return self._copy_with(hidden=self.hidden[index])

    def __setitem__(self, index: object, value: object) -> None:
        raise _refusal("assignment to an index")

    def __mul__(self, factor: object) -> "DeferredLogits":
        if not isinstance(factor, int | float) or self.normalised:
            raise _refusal(f"* {type(factor).__name__}")
        # The cap is applied outside of the tanh, so f and b inside it stay.
        if self.cap is not None:
            return self._copy_with(cap=self.cap * factor)
        return self._copy_with(factor=self.factor * factor, bias=scale_bias(self.bias, factor))

    __rmul__ = mul = __mul__

    def __add__(self, bias: object) -> "DeferredLogits":
        one_a_class = isinstance(bias, Tensor) and bias.ndim <= self.ndim and bias.shape[-1:] == (self.classes,)
        one_a_class = one_a_class and bias.numel() == self.classes and not self.classes_second
        if not one_a_class or self.cap is not None or self.normalised:
            raise _refusal(f"add of {type(bias).__name__}")
        bias = bias.reshape(-1)
        dtype = torch.promote_types(self.dtype, bias.dtype)
        return self._copy_with(bias=add_bias(self.bias, bias), dtype=dtype)

    __radd__ = add = __add__

    def __truediv__(self, by: object) -> "DeferredLogits":
        if not isinstance(by, int | float):
            raise _refusal(f"/ {type(by).__name__}")
        return self * (1 / by)

    div = __truediv__

    def tanh(self) -> "DeferredLogits":
        if self.cap is not None or self.normalised:
            raise _refusal("tanh of the tanh")
        return self._copy_with(cap=1.0)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None, **_: object) -> "DeferredLogits":
        # `_` is the stack level that F.log_softmax passes for its warnings.
        if dim not in (self._class_axis, self._class_axis - self.ndim):
            raise _refusal(f"log_softmax over dimension {dim}")
        return self._copy_with(normalised=True, dtype=dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this on every argument that has this method, Tensor or not.
        first = next(iter(args), None)
        # A bias may stand on either side.
        if function in (torch.add, Tensor.add, Tensor.__radd__) and len(args) == 2 and not kwargs:
            return first + args[1] if isinstance(first, DeferredLogits) else args[1] + first
        if function not in _METHODS or not isinstance(first, DeferredLogits):
            raise _refusal(function.__name__)
        return getattr(first, function.__name__)(*args[1:], **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        # Not a RuntimeError, so that hasattr() and similar checks work.
        raise AttributeError(str(_refusal(f".{name}")))


def scale_bias(bias: Tensor | None, factor: float) -> Tensor | None:
    return None if bias is None else bias * factor


def add_bias(bias: Tensor | None, added: Tensor) -> Tensor:
    return added if bias is None else bias + added


# Functions of torch that call the method of their name.
_METHODS = {
    *(F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, torch.tanh),
    *(torch.reshape, torch.flatten, torch.permute, torch.transpose, torch.movedim, torch.split),
}


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{what} of deferred logits",
            "FusedLossHead does not compute their values, only their plain cross_entropy",
            "Call the model under torch.no_grad() to get its logits, as validation does, or leave FusedLossHead out",
        )
    )


@functools.cache
def _register_with_einops() -> None:
    """Register deferred logits with einops, which finds subclasses of its ``AbstractBackend``.

    Without it a step whose loss calls einops would fail after a first step that ran, as in test_find_loss_head.
    """
    try:
        from einops._backends import AbstractBackend
    except ImportError:
        return

    class DeferredLogitsBackend(AbstractBackend):
        # einops uses this backend as soon as this module is imported.
        framework_name = __name__

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, DeferredLogits)

        def transpose(self, x: DeferredLogits, axes: object) -> DeferredLogits:
            return x.permute(axes)

    _einops_backends.append(DeferredLogitsBackend)


_einops_backends: list[type] = []  # einops finds the class by a weak reference
