"""Trace a step on the CPU with the choices that torch makes on a GPU."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_fasttrain.predict.cuda.cuda_attention import cuda_attention

CUBLAS_WORKSPACE = 32 * 2**20  # on Hopper; 8.1 MiB before

# Functions that autocast runs in float32 on CUDA, by their arguments or by their dtype, wherever torch offers them.
_BY_ARGUMENTS = (  # noqa: SIM905
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm group_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "nll_loss_nd hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa"
).split()
_BY_DTYPE = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split()  # noqa: SIM905
_PLACES: tuple[Any, ...] = (torch, Tensor, torch._C._nn, torch._C._linalg)  # type: ignore[attr-defined]


def _find_functions(names: Sequence[str]) -> set[Any]:
    return {getattr(place, name) for place in _PLACES for name in names if hasattr(place, name)}


_IN_FLOAT32, _TO_FLOAT32 = _find_functions(_BY_ARGUMENTS), _find_functions(_BY_DTYPE)
_COMPOSITES = ("torch.nn.functional", "torch.functional", "torch._tensor")  # modules of functions in Python


class AsOnCuda(TorchFunctionMode):
    """CUDA's dropout with a mask of one byte per element, its attention, and its autocast list.

    Source:
        The list is that of ``autocast_mode.h``; the rest are the CUDA branches of ``dropout`` and
        ``scaled_dot_product_attention``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Tensors with an answer of their own, such as deferred logits, are asked before.
        for kind in types:
            if kind.__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if func in _REPLACED:
            return _REPLACED[func](*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func in _IN_FLOAT32:
                args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
            elif func in _TO_FLOAT32 and _takes_dtype(args, kwargs):
                kwargs = {**kwargs, "dtype": torch.float32}
        body = _find_body(func)
        if body is None:
            return func(*args, **kwargs)
        # What it calls is to be seen, too.
        with self:
            return body(*args, **kwargs)


@functools.cache
def _find_body(func: object) -> Callable[..., Any] | None:
    """Return a function of torch that is written in Python, without its check for modes like this one."""
    if not isinstance(func, types.FunctionType) or func.__module__ not in _COMPOSITES or func.__closure__:
        return None
    unchecked = {name: _answer_no for name in func.__globals__ if name.startswith("has_torch_function")}
    body = types.FunctionType(func.__code__, {**func.__globals__, **unchecked}, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _answer_no(*_: object) -> bool:
    return False


def _drop(input: Tensor, p: float, train: bool) -> Tensor:
    if train and p > 0:
        return torch.native_dropout(input, p, True)[0]
    return input


def _cross_entropy(input: Tensor, target: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Log-softmax in the dtype of the logits, whatever autocast says of it, and the loss of that in float32."""
    whole = torch.is_autocast_enabled("cpu") and input.dtype is torch.bfloat16 and not target.is_floating_point()
    if not whole:
        return _CROSS_ENTROPY(input, target, *args, **kwargs)
    scores = torch.log_softmax(input, min(1, input.ndim - 1), dtype=input.dtype)
    settings = {**dict(zip(_CROSS_ENTROPY_SETTINGS, args, strict=False)), **kwargs}
    settings.pop("label_smoothing", None)
    return torch._C._nn.nll_loss_nd(_in_float32(scores), target, **settings)  # type: ignore[attr-defined]


def _lstm(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM cell by cell, as torch does without cuDNN; what cuDNN keeps is taken for what oneDNN keeps."""
    is_padded = len(args) == 8
    if torch.backends.cudnn.enabled or not is_padded:
        return torch.lstm(input, *args)
    states, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    of_direction = 4 if has_biases else 2
    directions = 1 + int(bidirectional)
    if len(weights) != layers * directions * of_direction:  # with projections
        return torch.lstm(input, *args)
    rows = input.transpose(0, 1) if batch_first else input
    final: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for _ in range(directions):
            number = len(final)
            own = weights[number * of_direction : (number + 1) * of_direction]
            output, last = _run_cells(rows, states[0][number], states[1][number], *own)
            outputs.append(output)
            final.append(last)
        rows = torch.cat(outputs, -1) if bidirectional else outputs[0]
        rows = _drop(rows, dropout, train and layer < layers - 1)
    hidden, cells = map(torch.stack, zip(*final, strict=True))
    return rows.transpose(0, 1) if batch_first else rows, hidden, cells


def _run_cells(
    rows: Tensor,
    hidden: Tensor,
    cell: Tensor,
    for_input: Tensor,
    for_hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run the cells of one layer over its time steps; the order of these does not matter."""
    outputs = []
    for row in rows.unbind(0):
        gates = torch.matmul(row, for_input.t()), torch.matmul(hidden, for_hidden.t())
        rest = map(_in_autocast, (cell, input_bias, hidden_bias))
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell.default(*gates, *rest)
        outputs.append(hidden)
    return torch.stack(outputs), (hidden, cell)


def _in_autocast(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _rms_norm(input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Use the fused kernel, which takes weights in the dtype of the input."""
    if weight is not None and weight.dtype is not input.dtype:
        return torch.rms_norm(input, shape, weight, eps)
    return torch.ops.aten._fused_rms_norm.default(input, list(shape), weight, eps)[0]


_CROSS_ENTROPY = torch._C._nn.cross_entropy_loss  # type: ignore[attr-defined]
_CROSS_ENTROPY_SETTINGS = ("weight", "reduction", "ignore_index", "label_smoothing")
_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.dropout: _drop,
    F.scaled_dot_product_attention: cuda_attention,
    _CROSS_ENTROPY: _cross_entropy,
    torch.lstm: _lstm,
    torch.rms_norm: _rms_norm,
}


def _takes_dtype(args: Any, kwargs: Any) -> bool:
    """Whether the dtype of the result is still to be chosen, for a tensor in 16 bits."""
    given = kwargs.get("dtype") is not None or any(isinstance(argument, torch.dtype) for argument in args)
    return not given and bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.bfloat16


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def step_in_lists_(optimizer: Optimizer) -> None:
    """Select the multi-tensor update, CUDA's default, which needs a list of temporaries."""
    for group in optimizer.param_groups:
        # 0 if the optimizer has no such setting; None means that it chooses by the device.
        if group.get("foreach", 0) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True
