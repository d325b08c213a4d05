"""Run attention on fake CPU tensors by the kernel that torch chooses on CUDA, with what that kernel keeps."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, ops
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def _round_up(number: int, granule: int) -> int:
    return -(-number // granule) * granule
