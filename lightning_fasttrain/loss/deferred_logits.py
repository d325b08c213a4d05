"""Logits that are computed only where their values are needed: hidden states that record operations on them."""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.messages import explain, note_once

_NO_VALUES = "FusedLossHead does not compute their values, only their cross_entropy"


class NeedsValuesError(RuntimeError, AttributeError):
    """An operation needs the values of logits that cannot be computed.

    It is an AttributeError as well, so that ``hasattr`` and similar checks work.
    """

    def __init__(self, use: str, why: str = _NO_VALUES) -> None:
        way_out = (
            "Call the model under torch.no_grad() to get its logits, as validation does, or leave FusedLossHead out"
        )
        super().__init__(explain(f"{use} of deferred logits", why, way_out))
        self.use = use


def _recorded(method: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Return a method that records an operation, and applies it to the values where that is impossible."""
    name = name or method.__name__

    @functools.wraps(method)
    def record(self: "DeferredLogits", *args: Any, **kwargs: Any) -> Any:
        use = f".{name}"
        if not self.are_plain():
            try:
                return method(self, *args, **kwargs)
            except NeedsValuesError as error:
                use = error.use
            except TypeError as error:
                # An argument that this method does not have; that of Tensor may.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
        return self._use_values(name, use, *args, **kwargs)

    return record


def _in_place(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the in-place form ``name`` of an operation: it changes the record if nothing else has the logits."""

    @functools.wraps(method)
    def change(self: "DeferredLogits", *args: Any, **kwargs: Any) -> Any:
        if self._parent is None and self._values is None and not self._has_views:
            try:
                changed = method(self, *args, **kwargs)
            except (NeedsValuesError, TypeError):
                changed = self
            if changed is not self and changed.dtype == self.dtype:
                vars(self).update(vars(changed))
                return self
        return self._use_values(name, f".{name}", *args, **kwargs)

    return change


def _on_values(name: str) -> Callable[..., Any]:
    def use(self: "DeferredLogits", *args: Any) -> Any:
        return self._use_values(name, name, *args)

    return use


class DeferredLogits:
    r"""Stands for the logits :math:`z = f · \mathrm{head}(h) + b`, or :math:`z = c \tanh(f · \mathrm{head}(h) + b)`.

    They have the shape, dtype and device of the logits, and record what models do between head and loss: casts,
    reshapes, slices and splits that keep the classes last and complete, a permutation that puts the classes second
    (einops' too), factors, one value added to each class, soft-capping, and finally ``log_softmax``. Their
    ``cross_entropy``, or after ``log_softmax`` their ``nll_loss``, is the result of ``loss_of``.

    All other operations of Python, torch and NumPy on a ``Tensor`` compute the values, once, and use them; this is
    noted, since they take the memory that the loss saves. The loss remains that of ``loss_of``, unless the values were
    written to or have hooks: then it is computed from them. As with tensors, views share their values.

    They are not a ``Tensor``, so that the hooks of strategies, which cast, detach or gather the tensors of an output,
    skip them.

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
        values_of: called with ``hidden`` (..., D), returns head(h) (..., V); None if the values cannot be computed.
        adds_to_loss: whether ``loss_of`` adds something, so that the loss cannot be computed from the values.

    Raises:
        NeedsValuesError: an operation needs the values and there is no ``values_of``, or it is in a custom
            ``torch.autograd.Function``, which computes the gradients of tensors only.

    Example:
        >>> def loss_of(hidden, targets, factor, cap, **how):
        ...     return hidden.sum()
        >>> head = torch.nn.Linear(4, 9)
        >>> logits = DeferredLogits(torch.ones(2, 3, 4), 9, torch.float32, loss_of, values_of=head)
        >>> logits[:, :-1].reshape(-1, 9).float()
        DeferredLogits(shape=(4, 9))
        >>> F.cross_entropy(logits.flatten(0, 1), torch.zeros(6, dtype=torch.long))
        tensor(24.)
        >>> logits.argmax(-1).shape
        torch.Size([2, 3])

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
        values_of: Callable[[Tensor], Tensor] | None = None,
        adds_to_loss: bool = False,
    ) -> None:
        self.hidden, self.classes, self.dtype, self.loss_of = hidden, classes, dtype, loss_of
        self.factor, self.cap, self.bias, self.normalised = factor, cap, bias, normalised
        self.classes_second, self.ndim, self.device = classes_second, hidden.ndim, hidden.device
        self.values_of, self.adds_to_loss = values_of, adds_to_loss
        self._values: Tensor | None = None
        self._version = 0  # of the values as they were computed
        self._parent: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None  # and how these are a view of it
        self._has_views = self._has_hooks = False
        self._class_axis = 1 if classes_second else hidden.ndim - 1
        shape = list(hidden.shape[:-1])
        shape.insert(self._class_axis, classes)
        self.shape = torch.Size(shape)
        if "einops" in sys.modules:
            _register_with_einops()

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def _copy_with(self, **changes: object) -> "DeferredLogits":
        same = {"hidden": self.hidden, "classes": self.classes, "dtype": self.dtype, "loss_of": self.loss_of}
        done = {"factor": self.factor, "cap": self.cap, "bias": self.bias, "normalised": self.normalised}
        kept = {"classes_second": self.classes_second, "values_of": self.values_of, "adds_to_loss": self.adds_to_loss}
        return DeferredLogits(**{**same, **done, **kept, **changes})

    def _view(self, view: Callable[[Tensor], Tensor], **changes: object) -> "DeferredLogits":
        """Return logits whose values are a view of the values of these."""
        made = self._copy_with(**changes)
        made._parent, self._has_views = (self, view), True
        return made

    def _owner(self) -> "DeferredLogits":
        return self if self._parent is None else self._parent[0]._owner()

    def are_plain(self) -> bool:
        """Whether the values count from now on: they were written to, or have a hook for all of their gradient."""
        owner = self._owner()
        return owner._values is not None and (owner._has_hooks or owner._values._version != owner._version)

    def compute(self, use: str = "compute()") -> Tensor:
        """Return the values, which are computed once.

        Args:
            use: what needs them, for messages.
        """
        if not torch.is_grad_enabled() and _is_in_custom_function():
            raise NeedsValuesError(use, "a torch.autograd.Function has no gradient by arguments that are no tensors")
        if self._values is None:
            if self._owner().values_of is None:
                raise NeedsValuesError(use)
            # The next operation on them may need the gradient.
            with torch.inference_mode(False), torch.enable_grad():
                self._values = self._compute(use)
            self._version = self._values._version
        return self._values

    def _compute(self, use: str) -> Tensor:
        if self._parent is not None:
            parent, view = self._parent
            return view(parent.compute(use))
        assert self.values_of is not None
        note_once(f"FusedLossHead: {use} needs the values of the logits, which take the memory that its loss saves")
        values = self.values_of(self.hidden).to(self.dtype)
        if self.factor != 1:
            values = values * self.factor
        if self.bias is not None:
            values = values + self.bias
        if self.cap is not None:
            values = torch.tanh(values) * self.cap
        if self.normalised:
            values = torch.log_softmax(values, dim=-1)
        return values.movedim(-1, self._class_axis)

    def _use_values(self, name: str, use: str, *args: Any, **kwargs: Any) -> Any:
        """Apply an operation to the values."""
        if self.adds_to_loss and (name in _LOSSES or self.are_plain()):
            raise NeedsValuesError(use, "z_loss= is added to the loss of logits that are not written to alone")
        values = self.compute(use)
        args, kwargs = _with_values((args, kwargs), use)
        if name in _LOSSES:
            return _LOSSES[name](values, *args, **kwargs)
        return getattr(values, name)(*args, **kwargs)

    def scales(self) -> tuple[float, Tensor | None]:
        """Return f·c and c·b, or f and b without a cap."""
        if self.cap is None:
            return self.factor, self.bias
        return self.factor * self.cap, scale_bias(self.bias, self.cap)

    @_recorded
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
            raise NeedsValuesError("cross_entropy with probabilities for targets or with old options")
        # With more than two axes, cross_entropy treats the second one as the classes.
        if self.ndim > 2 and not self.classes_second:
            raise NeedsValuesError(f"cross_entropy over the second dimension of {tuple(self.shape)}")
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

    @_recorded
    def nll_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.normalised:
            raise NeedsValuesError("nll_loss")
        return self.cross_entropy(*args, **kwargs)

    @_recorded
    def contiguous(self) -> "DeferredLogits":
        return self._view(Tensor.contiguous)

    @_recorded
    def clone(self) -> "DeferredLogits":
        return self._copy_with()

    def float(self) -> "DeferredLogits":
        return self.to(torch.float32)

    @_recorded
    def to(self, *args: object, **kwargs: object) -> "DeferredLogits":
        for asked in (*args, *kwargs.values()):
            # Compared by type, since "cuda" is not equal to "cuda:0".
            if isinstance(asked, str | torch.device) and torch.device(asked).type != self.device.type:
                raise NeedsValuesError(f".to({str(asked)!r})")
        dtypes = {asked for asked in (*args, *kwargs.values()) if isinstance(asked, torch.dtype)} - {self.dtype}
        return self._copy_with(dtype=dtypes.pop()) if dtypes else self

    @_recorded
    def view(self, *shape: object) -> "DeferredLogits":
        return self._reshape_rows("view", *shape)

    @_recorded
    def reshape(self, *shape: object) -> "DeferredLogits":
        return self._reshape_rows("reshape", *shape)

    @_recorded
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "DeferredLogits":
        return self._reshape_rows("flatten", start_dim, end_dim)

    def _reshape_rows(self, name: str, *args: object) -> "DeferredLogits":
        # Applies torch's own rules for -1, tuples and ranges of axes, on a tensor without memory.
        shape = getattr(torch.empty(self.shape, device="meta"), name)(*args).shape
        if shape == self.shape:
            return self
        # Rows are preserved if their length is.
        if self.classes_second or shape[-1] != self.classes:
            raise NeedsValuesError(f".{name}{args}")
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return self._view(lambda values: getattr(values, name)(*args), hidden=hidden)

    @_recorded
    def permute(self, *dims: Any) -> "DeferredLogits":
        """Return the logits with permuted axes; the classes must end up last or second."""
        # Applies torch's own rules for negative axes and tuples, on a tensor whose axes differ in length.
        lengths = torch.empty(tuple(range(self.ndim)), device="meta").permute(*dims).shape
        # The classes are last in `hidden`, so the axes between move down by one.
        rows = [axis - (axis > self._class_axis) for axis in lengths if axis != self._class_axis]
        place = lengths.index(self._class_axis)
        if place not in (1, self.ndim - 1):
            raise NeedsValuesError(f".permute{dims}")
        hidden = self.hidden.permute(*rows, self.ndim - 1)
        second = place != self.ndim - 1
        return self._view(lambda values: values.permute(*dims), hidden=hidden, classes_second=second)

    @_recorded
    def transpose(self, dim0: int, dim1: int) -> "DeferredLogits":
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return self.permute(axes)

    @_recorded
    def movedim(self, source: int, destination: int) -> "DeferredLogits":
        axes = list(range(self.ndim))
        axes.insert(destination % self.ndim, axes.pop(source))
        return self.permute(axes)

    @property
    def mT(self) -> "DeferredLogits":
        return self.transpose(-2, -1)

    @_recorded
    def split(self, split_size: int | list[int], dim: int = 0) -> tuple["DeferredLogits", ...]:
        return self._divide("split", split_size, dim)

    @_recorded
    def chunk(self, chunks: int, dim: int = 0) -> tuple["DeferredLogits", ...]:
        return self._divide("chunk", chunks, dim)

    def _divide(self, name: str, size: object, dim: int) -> tuple["DeferredLogits", ...]:
        if self.classes_second or dim in (-1, self.ndim - 1):
            raise NeedsValuesError(f".{name}(dim={dim})")

        def take(place: int, values: Tensor) -> Tensor:
            return getattr(values, name)(size, dim)[place]

        parts = enumerate(getattr(self.hidden, name)(size, dim))
        return tuple(self._view(functools.partial(take, place), hidden=rows) for place, rows in parts)

    @_recorded
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
            raise NeedsValuesError("an index into the classes")
        if isinstance(index, Tensor):
            return self._copy_with(hidden=self.hidden[index])
        return self._view(lambda values: values[index], hidden=self.hidden[index])

    def __setitem__(self, index: object, value: object) -> None:
        self._use_values("__setitem__", "assignment to an index", index, value)

    @_recorded
    def mul(self, other: object) -> "DeferredLogits":
        if not isinstance(other, int | float) or self.normalised:
            raise NeedsValuesError(f"* {type(other).__name__}")
        # The cap is applied outside of the tanh, so f and b inside it stay.
        if self.cap is not None:
            return self._copy_with(cap=self.cap * other)
        return self._copy_with(factor=self.factor * other, bias=scale_bias(self.bias, other))

    @_recorded
    def add(self, other: object) -> "DeferredLogits":
        one_a_class = isinstance(other, Tensor) and other.ndim <= self.ndim and other.shape[-1:] == (self.classes,)
        one_a_class = one_a_class and other.numel() == self.classes and not self.classes_second
        if not one_a_class or self.cap is not None or self.normalised:
            raise NeedsValuesError(f"add of {type(other).__name__}")
        bias = other.reshape(-1)
        dtype = torch.promote_types(self.dtype, bias.dtype)
        return self._copy_with(bias=add_bias(self.bias, bias), dtype=dtype)

    @_recorded
    def div(self, other: object) -> "DeferredLogits":
        if not isinstance(other, int | float) or other == 0 or self.normalised:
            raise NeedsValuesError(f"/ {type(other).__name__}")
        return self.mul(1 / other)

    @_recorded
    def tanh(self) -> "DeferredLogits":
        if self.cap is not None or self.normalised:
            raise NeedsValuesError("tanh of the tanh")
        return self._copy_with(cap=1.0)

    @_recorded
    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> "DeferredLogits":
        if dim not in (self._class_axis, self._class_axis - self.ndim):
            raise NeedsValuesError(f"log_softmax over dimension {dim}")
        return self._copy_with(normalised=True, dtype=dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this on every argument that has this method, Tensor or not.
        kwargs = dict(kwargs or {})
        kwargs.pop("_stacklevel", None)  # that F.log_softmax passes for its warnings
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        first, name = next(iter(args), None), function.__name__
        # A bias may stand on either side.
        if function in (torch.add, Tensor.add, Tensor.__radd__) and len(args) == 2 and not kwargs:
            return first.add(args[1]) if isinstance(first, DeferredLogits) else args[1].add(first)
        if isinstance(first, DeferredLogits):
            if function in _METHODS:
                return getattr(first, name)(*args[1:], **kwargs)
            if name in _LIKE:
                return function(first._stand_in(), *args[1:], **kwargs)
        return function(*_with_values(args, name), **_with_values(kwargs, name))

    def _stand_in(self) -> Tensor:
        """Return a tensor of this shape, dtype and device that takes no memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _FACTS:
            return getattr(self._stand_in(), name)
        if self.values_of is None:
            raise NeedsValuesError(f".{name}")
        self._owner()._has_hooks |= name in _HOOKS
        if callable(getattr(Tensor, name)):
            return functools.partial(self._use_values, name, f".{name}")
        return getattr(self.compute(f".{name}"), name)


# The other names of operations that are recorded, and their in-place forms.
for _name in ("mul", "add", "div", "tanh"):
    _method = getattr(DeferredLogits, _name).__wrapped__
    _operator = _name.replace("div", "truediv")
    setattr(DeferredLogits, f"__{_operator}__", _recorded(_method, f"__{_operator}__"))
    for _form in (f"{_name}_", f"__i{_operator}__"):
        setattr(DeferredLogits, _form, _in_place(_method, _form))
    if _name in ("mul", "add"):
        setattr(DeferredLogits, f"__r{_name}__", _recorded(_method, f"__r{_name}__"))
# Python finds operators on the class, not by __getattr__.
_BINARY = ("sub", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "contains")
_UNARY = ("neg", "pos", "abs", "invert", "bool", "float", "int", "index", "complex", "array", "reversed", "dlpack")
for _name in (*_UNARY, *_COMPARISONS, *(f"{_side}{_name}" for _name in _BINARY for _side in ("", "r", "i"))):
    if f"__{_name}__" not in vars(DeferredLogits) and hasattr(Tensor, f"__{_name}__"):
        setattr(DeferredLogits, f"__{_name}__", _on_values(f"__{_name}__"))


def _with_values(tree: Any, use: str) -> Any:
    """Return a tree with the values of the deferred logits in it."""
    return tree_map(lambda one: one.compute(use) if isinstance(one, DeferredLogits) else one, tree)


def _is_in_custom_function() -> bool:
    """Whether the caller is in the forward of a ``torch.autograd.Function``."""
    # By the frames of forwards, since `apply` has none of its own from torch 2.15 on.
    forwards = {getattr(kind.forward, "__code__", None) for kind in _subclasses(torch.autograd.Function)}
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _subclasses(kind: type) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def scale_bias(bias: Tensor | None, factor: float) -> Tensor | None:
    return None if bias is None else bias * factor


def add_bias(bias: Tensor | None, added: Tensor) -> Tensor:
    return added if bias is None else bias + added


_LOSSES = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}
# Functions of torch that call the method of their name.
_METHODS = {
    *(*_LOSSES.values(), F.log_softmax, torch.log_softmax, torch.tanh, torch.mul, torch.div, torch.clone),
    *(torch.reshape, torch.flatten, torch.permute, torch.transpose, torch.movedim, torch.split, torch.chunk),
}
# Functions and attributes that need no values.
_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "is_floating_point", "numel"}
_FACTS = {
    *("numel", "nelement", "is_floating_point", "is_complex", "element_size", "itemsize", "nbytes", "get_device"),
    *("layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_meta"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}
# After these, all of the gradient must pass through the values.
_HOOKS = {"register_hook", "retain_grad", "grad_fn", "data"}


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
