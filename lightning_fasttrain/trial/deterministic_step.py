"""Run a step as a pure function of its batch: no dropout, the same random values per row, one precision.

Two runs of a step on the same samples, unsplit and in micro-batches, are comparable only if nothing but the split
differs.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_fasttrain.core.state.rng import torch_generators

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
}
_RECURRENT = {torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu}  # type: ignore[attr-defined]
_DRAWS = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.bernoulli,
    torch.normal,
}
_DRAWS_IN_PLACE = {Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_}
_LOWER = (torch.float32, torch.bfloat16, torch.float16)
# Functions that concern this very tensor rather than its values.
_AS_THEY_ARE = frozenset(
    """__get__ __set__ grad backward requires_grad_ register_hook retain_grad double float half bfloat16 to type
    is_floating_point size dim numel data_ptr""".split()  # noqa: SIM905
)
_MHA_DROPOUT = list(inspect.signature(F.multi_head_attention_forward).parameters).index("dropout_p")


@dataclass(frozen=True)
class TrimmedRows:
    """Samples whose padding is cut off.

    Attributes:
        start, stop: the first of them, and the one after the last, among the samples of a trial.
        spans: of each axis that is cut, its length, the first entry that is kept, and the one after the last.
    """

    start: int
    stop: int
    spans: tuple[tuple[int, int, int], ...]

    def cut(self, drawn: Tensor, shape: Sequence[int]) -> Tensor:
        """Cut random values of padded samples to a shape, where they have it after the cut."""
        for size, start, stop in self.spans:
            for axis in range(1, min(drawn.ndim, len(shape))):
                if drawn.shape[axis] == size and shape[axis] == stop - start:
                    drawn = drawn.narrow(axis, start, stop - start)
        return drawn


Rows = slice | TrimmedRows


class DeterministicStep(TorchFunctionMode):
    """Runs a step without randomness and without operations that mix samples.

    Dropout does nothing, BatchNorm uses no batch statistics (it is detected elsewhere), and a random draw in a
    micro-batch is the rows that the unsplit draw had for these samples, without the values for their padding if that is
    cut off: as for dropout, a run draws other values than the unsplit step, of the same distribution.

    Args:
        precision: ``"float32"`` switches autocast off around every operation, so that rounding does not hide a
            difference; ``"float64"`` also computes every operation in float64; ``"as it is"`` changes nothing.
    """

    def __init__(self, precision: str = "float32") -> None:
        super().__init__()
        self.precision = precision
        self.autocast = False  # whether the step itself switches autocast on
        self.statistics = False  # whether BatchNorm would use batch statistics
        self.rounds = False  # whether anything is computed below float32
        self.in_float32 = False  # whether anything is, as the loss of a model in float64 may be
        self.redrawn = False  # random draws in a recomputed forward, which cannot be assigned to rows
        self._draws: list[Tensor] = []
        # Random state before a draw → what was given; a recomputed forward begins at the state of the first one.
        self._given: dict[tuple[Any, ...], Tensor] = {}
        self._drawn = 0
        self._rows: Rows | None = None
        self._size = 1

    def begin(self, rows: Rows | None, size: int) -> None:
        """Start a run on all ``size`` samples (None), or on these rows of them."""
        self._rows, self._size, self._drawn = rows, size, 0
        self._given.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Half of the calls read an attribute, which computes nothing.
        if getattr(func, "__name__", "") == "__get__":
            return func(*args)
        device = autocast_device()
        if device is None:
            return self._call(func, args, kwargs)
        self.autocast = True  # by the step itself; off here, but not inside autograd functions
        if self.precision == "as it is":
            return self._call(func, args, kwargs)
        with torch.autocast(device, enabled=False):
            return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RECURRENT:
            args = _without_floats(args)
        if func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(4, args, kwargs)  # built-in, so it has no signature
        if func is F.multi_head_attention_forward:
            args, kwargs = _without_dropout(_MHA_DROPOUT, args, kwargs)
        if func is F.batch_norm:
            return self._normalize(args, kwargs)
        if func in _DRAWS or func in _DRAWS_IN_PLACE:
            return self._draw(func, args, kwargs)
        if self.precision == "float64":
            args, kwargs = _in_float64(func, args, kwargs)
        result = func(*args, **kwargs)
        dtype = result.dtype if isinstance(result, Tensor) else None
        self.rounds |= dtype in (torch.bfloat16, torch.float16)
        self.in_float32 |= dtype is torch.float32
        return result

    def _normalize(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Run ``batch_norm`` as in evaluation; with batch statistics, use a mean of 0 and a variance of 1."""
        given = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        if not given.get("training", False):
            return F.batch_norm(*args, **kwargs)
        self.statistics = True
        x: Tensor = given["input"]
        zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
        return F.batch_norm(x, zeros, ones, given.get("weight"), given.get("bias"), training=False)

    def _draw(self, func: Callable[..., Tensor], args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
        state = _read_generators()
        drawn = func(*args, **kwargs)
        place = (*state, drawn.shape, kwargs.get("generator"))
        if torch._C._current_graph_task_id() != -1:  # in the backward, so this is a recomputed forward
            if place in self._given:
                return drawn.copy_(self._given[place])
            self.redrawn = True
            return drawn
        if self._rows is None:
            self._draws.append(drawn.detach().clone())
        else:
            drawn = self._give_rows(drawn)
        self._given[place] = drawn.detach().clone()
        return drawn

    def _give_rows(self, drawn: Tensor) -> Tensor:
        """Replace a draw by the rows of the unsplit one; in place, since a draw may fill a tensor of the step."""
        assert self._rows is not None
        if self._drawn >= len(self._draws):
            return drawn
        whole = self._draws[self._drawn]
        self._drawn += 1
        rows = whole if whole.shape == drawn.shape else _rows_of(whole, self._rows, self._size)
        if isinstance(self._rows, TrimmedRows):
            rows = self._rows.cut(rows, drawn.shape)
        if rows.shape == drawn.shape:
            drawn.copy_(rows)
        return drawn


def _read_generators() -> tuple[bytes, ...]:
    return tuple(state.numpy().tobytes() for state in torch_generators())


def _in_float64(
    func: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with floating-point tensors in float64, except those changed in place or queried."""
    name = getattr(func, "__name__", "")
    if name in _AS_THEY_ARE:
        return args, kwargs
    in_place = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    kept = args[:1] if in_place else ()
    cast = tree_map_only(Tensor, _to_float64, tuple(args[len(kept) :]))
    named = {key: value for key, value in kwargs.items() if key not in ("inputs", "out")}
    return (*kept, *cast), {**kwargs, **tree_map_only(Tensor, _to_float64, named)}


def _to_float64(tensor: Tensor) -> Tensor:
    if tensor.dtype in _LOWER:
        return tensor.double()
    return tensor


def autocast_device() -> str | None:
    """Return the device type for which autocast is on."""
    if torch.is_autocast_enabled("cuda"):  # not a loop: asked in each operation
        return "cuda"
    if torch.is_autocast_enabled("cpu"):
        return "cpu"
    return None


def _without_floats(args: Sequence[object]) -> list[Any]:
    """Return a recurrent layer's arguments with dropout 0; it is the only float among them."""
    changed = list(args)
    for place, value in enumerate(args):
        if type(value) is float:
            changed[place] = 0.0
    return changed


def _without_dropout(place: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with ``dropout_p`` 0; ``place`` is its position if it is not passed by name."""
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _rows_of(whole: Tensor, rows: Rows, size: int) -> Tensor:
    """Return the rows of these samples, where each sample has several (a flattened batch of sequences)."""
    if whole.ndim == 0 or len(whole) < size:
        return whole
    each = len(whole) // size
    return whole[rows.start * each : rows.stop * each]


def list_batch_statistics(module: nn.Module) -> Iterator[str]:
    """Yield the names of layers whose outputs for a sample depend on the rest of the batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            yield name
