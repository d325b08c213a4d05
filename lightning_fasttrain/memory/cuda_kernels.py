"""Trace a step on the CPU with the choices that torch makes on a GPU, and the workspace of CUDA kernels."""

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, ops
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_fasttrain.memory.allocation_trace import Workspace
from lightning_fasttrain.memory.fake_operators import AssumedArrays, is_assumed
from lightning_fasttrain.memory.kernel_workspace import softmax_copies

WIDEST_FLASH = 256  # largest width of a head
FLASH_ALIGNMENT = 8  # widths of heads are padded to multiples of this
MASK_ALIGNMENT = 16  # rows of a mask begin at multiples of this many values
FLOAT32 = 4
_HALF = (torch.bfloat16, torch.float16)


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what ``scaled_dot_product_attention`` does, from the operations of CUDA's kernels.

    Flash attention in 16 bits without a mask, else memory-efficient attention, else the products written out.

    Source:
        ``select_sdp_backend`` in ATen's ``sdp_utils.cpp`` and ``attention.cpp``. cuDNN's kernel, which a Hopper card
        prefers, keeps what flash attention keeps.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if _can_use_flash(query, key, attn_mask, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _can_use_efficient(query, key, value, attn_mask):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if dropout_p > 0:
        return _written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
    with sdpa_kernel(SDPBackend.MATH):
        settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **settings)


def _can_use_flash(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if mask is not None or query.ndim != 4 or query.dtype not in _HALF or query.shape[-1] > WIDEST_FLASH:
        return False
    return not is_causal or query.shape[-2] == key.shape[-2]


def _can_use_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if query.ndim != 4 or query.shape[1] != key.shape[1] or query.shape[0] != key.shape[0]:
        return False
    aligned = 8 if query.dtype in _HALF else 4
    # T5's bias, for one, is a permuted embedding.
    adjacent = all(tensor.stride(-1) == 1 for tensor in (query, key, value, mask) if tensor is not None)
    return adjacent and query.shape[-1] % aligned == 0 and value.shape[-1] % aligned == 0


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention by products, with CUDA's dropout: its mask has one byte per score.

    Source:
        ``_scaled_dot_product_attention_math`` in ATen's ``attention.cpp``, which computes in float32 by default.
    """
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    with torch.autocast("cpu", enabled=False):
        scores = (query * root) @ (key.transpose(-2, -1) * root)
        if mask is not None:
            scores = scores.add_(_additive(mask, query.dtype))
        shares = ops.aten._safe_softmax.default(scores, -1)
        return (torch.native_dropout(shares, dropout, True)[0] @ value).to(dtype)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None) -> Tensor:
    width = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(width)
    lacking = -width % FLASH_ALIGNMENT
    if lacking:
        query, key, value = (F.pad(tensor, (0, lacking)) for tensor in (query, key, value))
    attend = ops.aten._scaled_dot_product_flash_attention.default
    attended = attend(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return attended[..., :width] if lacking else attended


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if mask is not None:
        mask = _additive(mask, query.dtype).expand(*query.shape[:3], key.shape[2])
        lacking = -mask.shape[-1] % MASK_ALIGNMENT
        if lacking:
            mask = F.pad(mask, (0, lacking))[..., : mask.shape[-1]]
        elif any(stride % MASK_ALIGNMENT for stride in mask.stride()[:3]):
            mask = mask.contiguous()
    attend = ops.aten._scaled_dot_product_efficient_attention.default
    return attend(query, key, value, mask, keeps, dropout, is_causal, scale=scale)[0]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype)
    return mask


def flash_backward(arguments: Sequence[object], _: object) -> int:
    """Workspace of flash attention's backward: gradients of the queries in float32, and of shared keys for each head.

    Source:
        ``mha_bwd`` in ATen's ``flash_api.cpp``.
    """
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * _round_up(length, 128)
    shared = heads != key.shape[1]
    expanded = 2 * batch * heads * key.shape[2] * width * key.element_size() if shared else 0
    return FLOAT32 * rows * (_round_up(width, 32) + 1) + expanded


def efficient_backward(arguments: Sequence[object], _: object) -> int:
    """Workspace of memory-efficient attention's backward: gradients of the queries, in blocks of float32.

    Source:
        ``_efficient_attention_backward`` in ATen's ``attention_backward.cu`` and the kernels' ``workspace_size``.
    """
    query = arguments[1]
    batch, heads, length, width = query.shape
    block = 64 if width <= 64 else 128
    rows = batch * heads * _round_up(length, block)
    return FLOAT32 * (rows * _round_up(width, block) + batch * heads * length)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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


class AsOnCuda(AssumedArrays):
    """CUDA's dropout with a mask of one byte per element, its attention, and its autocast list, and assumed arrays.

    One mode for both, since each is asked for every function and attribute of a tensor.

    Source:
        The list is that of ``autocast_mode.h``; the rest are the CUDA branches of ``dropout`` and
        ``scaled_dot_product_attention``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Tensors with an answer of their own, such as deferred logits, are asked before.
        for kind in types:
            if _answers_itself(kind):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if _is_plain(func):
            return func(*args, **kwargs)
        if is_assumed(func):
            return super().__torch_function__(func, types, args, kwargs)
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
def _is_plain(func: Any) -> bool:
    """Whether it is the same on CUDA, like the attributes that a step reads all the time."""
    replaced = func in _REPLACED or func in _IN_FLOAT32 | _TO_FLOAT32 or is_assumed(func)
    return not replaced and _find_body(func) is None


@functools.cache
def _answers_itself(kind: type[Tensor]) -> bool:
    return kind.__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)


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


PROCESSORS, THREADS = 132, 2048  # of an H100 or H200: streaming multiprocessors, and resident threads of each
VECTOR = 4  # adjacent columns that a thread sums up
WARP, MOST_THREADS = 32, 512
FEWEST_VALUES, MOST_VALUES = 16, 256  # values that a thread should sum up
UNSORTED = 3072  # indices that are not sorted


def _sum(arguments: Sequence[Any], _: object) -> int:
    """Workspace of a sum over all rows, such as a bias's gradient: partial sums of blocks that share a column.

    Source:
        ``setReduceConfig`` and ``ReduceConfig::global_memory_size`` in ATen's ``Reduce.cuh``.
    """
    table, axes = arguments[0], arguments[1]
    rows = _rows(table, axes)
    columns = table.numel() // max(rows, 1)
    if columns < VECTOR or rows < 2:
        return 0
    width, height = _block(columns // VECTOR, rows)
    values = -(-rows // height)
    grid = -(-columns // (VECTOR * width))
    wanted = PROCESSORS * (THREADS // (width * height))
    if rows < min(height * FEWEST_VALUES, MOST_VALUES) or values < MOST_VALUES or grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    return FLOAT32 * columns * blocks * width * VECTOR if blocks > 1 else 0


def _rows(table: Tensor, axes: Sequence[int] | None) -> int:
    """Return the number of values summed up in each column; 0 if the columns are not adjacent in memory."""
    if not table.ndim:
        return 0
    # No axes means all of them; negative ones count from the end.
    summed = {axis % table.ndim for axis in axes or range(table.ndim)}
    if table.ndim - 1 in summed or table.stride(-1) != 1:
        return 0
    return math.prod(table.shape[axis] for axis in summed)


def _block(columns: int, rows: int) -> tuple[int, int]:
    """Return width and height of a thread block."""
    most = MOST_THREADS // VECTOR
    wide, high = (min(1 << (n.bit_length() - 1), most) for n in (columns, rows))
    height = min(high, most // min(wide, WARP))
    return min(wide, most // height), height


def _softmax_backward(arguments: Sequence[object], result: object) -> int:
    return arguments[0].nbytes + softmax_copies(arguments, result)


def _embedding_backward(arguments: Sequence[Any], _: object) -> int:
    """Workspace of an embedding's backward, which sorts many indices: partial sums of rows, and indices.

    Source:
        ``embedding_dense_backward_cuda`` and ``EmbeddingBackwardKernel.cu`` in ATen.
    """
    gradient, indices, _, padding_index = arguments[:4]
    if indices.numel() <= UNSORTED and padding_index < 0:
        return 0
    return FLOAT32 * gradient.numel() + 6 * indices.nbytes


def _convolution(arguments: Sequence[Any], output: Tensor) -> int:
    """Workspace of torch's own convolution: the columns of one image, and the parts of a grouped one.

    Source:
        ``ConvolutionMM2d.cu`` and ``Convolution.cpp`` in ATen.
    """
    inputs, weight, transposed, groups = arguments[0], arguments[1], arguments[6], arguments[8]
    if cudnn.enabled:
        return 0
    columns = _column_bytes(inputs if transposed else output, weight, inputs, groups)
    if _is_grouped(inputs, groups):
        # The groups' outputs exist beside what they are joined to.
        return max(output.nbytes, inputs.nbytes // groups + columns)
    return _copy_bytes(inputs) + columns


def _convolution_backward(arguments: Sequence[Any], _: object) -> int:
    gradient, inputs, weight, transposed, groups = *arguments[:3], arguments[7], arguments[9]
    if cudnn.enabled:
        return 0
    columns = _column_bytes(inputs if transposed else gradient, weight, inputs, groups)
    together = inputs.nbytes if _is_grouped(inputs, groups) else _copy_bytes(inputs) + _copy_bytes(gradient)
    return together + columns


def _is_grouped(inputs: Tensor, groups: int) -> bool:
    """Whether groups of channels run one after the other; single channels have a kernel of their own."""
    return 1 < groups < inputs.shape[1]


def _copy_bytes(inputs: Tensor) -> int:
    return 0 if inputs.is_contiguous() else inputs.nbytes


def _column_bytes(small: Tensor, weight: Tensor, inputs: Tensor, groups: int) -> int:
    """Return the bytes of the columns of one image, of the values under the kernel at each place of ``small``."""
    is_depthwise = groups == inputs.shape[1] > 1
    is_product = math.prod(weight.shape[2:]) == 1 and small.shape[2:] == inputs.shape[2:]
    if is_depthwise or is_product:
        return 0
    return weight[0].numel() * math.prod(small.shape[2:]) * inputs.element_size()


CUDA_WORKSPACE: dict[Any, Workspace] = {
    ops.aten.sum.dim_IntList: _sum,
    ops.aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    ops.aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    ops.aten.convolution.default: _convolution,
    ops.aten.convolution_backward.default: _convolution_backward,
    ops.aten.embedding_dense_backward.default: _embedding_backward,
    ops.aten._softmax_backward_data.default: _softmax_backward,
    ops.aten._log_softmax_backward_data.default: softmax_copies,
}
