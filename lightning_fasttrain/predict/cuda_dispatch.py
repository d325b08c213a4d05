"""Trace a step on the CPU with the choices that torch makes on a GPU."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

GRANULE = 512  # the caching allocator rounds up to multiples of this many bytes
CUBLAS_WORKSPACE = 32 * 2**20  # on Hopper; 8.1 MiB before

_NAMES = (  # noqa: SIM905
    "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div "
    "binary_cross_entropy_with_logits cosine_similarity normalize norm sum prod cumsum pow __pow__ exp log log1p "
    "rsqrt reciprocal softplus"
).split()
# Functions that autocast runs in float32 on CUDA but not on the CPU, wherever torch offers them.
_IN_FLOAT32 = {getattr(place, name) for place in (torch, F, Tensor) for name in _NAMES if hasattr(place, name)}
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AsOnCuda(TorchFunctionMode):
    """CUDA's dropout with a mask of one byte per element, fused attention with dropout, and CUDA's autocast list.

    Source:
        The list is PyTorch's "CUDA Ops that can autocast to float32"; the rest are the CUDA branches of ``dropout``
        and ``scaled_dot_product_attention``. The inside of ``nn.MultiheadAttention`` is not covered.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _fused_dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            # Without dropout: fused CPU kernels do not support it, and on CUDA a seed is kept instead of a mask.
            return _attention(**{**dict(zip(_ATTENTION, args, strict=False)), **kwargs, "dropout_p": 0.0})
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        return func(*args, **kwargs)


def _attention(query: Tensor, **settings: Any) -> Tensor:
    """Use the math kernel for shared keys in float32: only flash attention supports shared keys, and not in float32."""
    in_float32 = query.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    whole = in_float32 and settings.get("enable_gqa", False)
    with sdpa_kernel(SDPBackend.MATH) if whole else nullcontext():
        return F.scaled_dot_product_attention(query, **settings)


def _fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def step_in_lists_(optimizer: Optimizer) -> None:
    """Select the multi-tensor update, CUDA's default, which needs a list of temporaries."""
    for group in optimizer.param_groups:
        # 0 if the optimizer has no such setting; None means that it chooses by the device.
        if group.get("foreach", 0) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True
