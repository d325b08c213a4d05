"""Workspace that CPU kernels allocate outside of a fake run, where it matters.

Derived from measurements of single oneDNN operations with AVX-512 and AVX2, in float32 and bfloat16. Convolutions
work on copies in oneDNN's own layout, with channels in blocks of 16, or of 8 with AVX2; of channels-last images only
the weights are copied. With AVX2 alone torch's own bfloat16 kernel runs, which transposes the images instead. With AMX,
bfloat16 channels-last images have a separate kernel for the gradient of the weights.
Not included are 1 × 1 convolutions of few images on one thread, which need no copies, and the transposed operands of
bfloat16 matrix products, a few per cent of a step.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, bfloat16, channels_last, cpu, get_num_threads, ops

from lightning_fasttrain.memory.allocation_trace import Kept, Workspace

# What oneDNN goes by: unlike PyTorch's own kernels, it does not read ATEN_CPU_CAPABILITY.
_AVX2 = cpu._is_avx2_supported() and not cpu._is_avx512_supported()
_AMX = cpu._is_amx_tile_supported()
# For kernels wider than the second, as for patches, the float32 gradient is a matrix product with each image's columns.
BLOCK, _WIDEST = (8, 13) if _AVX2 else (16, 14)
_TILES = 20_000  # bytes of registers that AMX keeps for each thread


def _blocked_bytes(image: Tensor) -> int:
    """Return the bytes of a copy of ``image`` [N, C, ...] in oneDNN's layout."""
    return image.nbytes * _in_blocks(image.shape[1]) // image.shape[1]


def _blocked_input_bytes(inputs: Tensor) -> int:
    """Return the bytes of a convolution's copy of its inputs; with less than a block of channels it makes none."""
    if inputs.shape[1] < BLOCK:
        return 0
    return _blocked_bytes(inputs)


def _has_channels_last(image: Tensor) -> bool:
    return image.ndim == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=channels_last)


def _convolution(arguments: Sequence[Any], output: Tensor) -> int:
    inputs, weight, transposed = arguments[0], arguments[1], arguments[6]
    if _has_channels_last(inputs):
        return 2 * weight.nbytes
    inside = _blocked_bytes(output)
    if transposed:
        return 2 * inside
    return max(inside, weight.nbytes, _blocked_input_bytes(inputs) + inside - output.nbytes)


def _convolution_backward(arguments: Sequence[Any], _: object) -> int:
    gradient, inputs, weight, stride, (for_inputs, *_rest) = *arguments[:3], arguments[4], arguments[-1]
    groups = arguments[9]
    if _has_channels_last(inputs):
        if _AMX and weight.dtype is bfloat16 and weight.shape[1] > 1:
            return _backward_in_tiles(inputs, gradient, weight, groups)
        return 3 * weight.nbytes if groups == 1 else _grouped_backward(inputs, gradient, weight, groups)
    if max(weight.shape[2:]) > _WIDEST and weight.dtype is not bfloat16:
        columns = weight[0].nbytes * math.prod(gradient.shape[2:])
        return get_num_threads() * (4 * weight.nbytes + columns)
    both = _blocked_bytes(gradient) + _blocked_input_bytes(inputs)
    return max(both, 2 * inputs.nbytes) if for_inputs and max(stride) > 1 else both


def _grouped_backward(inputs: Tensor, gradient: Tensor, weight: Tensor, groups: int) -> int:
    """Workspace of a grouped backward: groups are padded to blocks of channels; bfloat16 is summed in float32 too."""
    if _AVX2 and weight.dtype is bfloat16:
        return inputs.nbytes + weight.nbytes
    height, width = weight.shape[2:]
    if weight.shape[:2] == (groups, 1) and height == width == 3:  # has a separate kernel
        if min(inputs.shape[2:]) >= 3:
            return 3 * weight.nbytes
        if _AVX2:
            return 4 * inputs.nbytes + weight.nbytes
    inside, outside = _in_blocks(weight.shape[1]), _in_blocks(weight.shape[0] // groups)
    padded = groups * inside * outside * height * width
    if weight.dtype is not bfloat16:
        return weight.nbytes + padded * weight.element_size()
    images = groups * (inside * math.prod(inputs.shape[2:]) + outside * math.prod(gradient.shape[2:]))
    return weight.nbytes + padded * (2 + 4) + 2 * images  # one transposed image of each


def _backward_in_tiles(inputs: Tensor, gradient: Tensor, weight: Tensor, groups: int) -> int:
    """Workspace with AMX: float32 sums and a bfloat16 copy of padded channel blocks, and one image with padded rows."""
    height, width = weight.shape[2:]
    inside, outside = _in_blocks(weight.shape[1]), _in_blocks(weight.shape[0] // groups)
    sums = inside * outside * height * width * (8 if inside == BLOCK else 6)
    columns = gradient.shape[3] + width - 1
    images = inside * inputs.shape[2] * inputs.shape[3] + outside * gradient.shape[2] * (-(-columns // 32) * 32)
    return groups * (sums + 2 * images) + get_num_threads() * _TILES


def _in_blocks(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def softmax_copies(arguments: Sequence[object], _: object) -> int:
    """Return the bytes of contiguous copies that the backward of (log-)softmax makes, on every device."""
    return sum(tensor.nbytes for tensor in arguments[:2] if not tensor.is_contiguous())


def _batch_norm_backward(arguments: Sequence[object], _: object) -> int:
    return arguments[1].nbytes


def _lstm(arguments: Sequence[object], result: Sequence[Tensor]) -> int:
    gates = 0 if result[0].dtype is bfloat16 else 4 * result[0].nbytes
    return gates + arguments[1].nbytes + arguments[2].nbytes


def _lstm_backward(arguments: Sequence[object], _: object) -> int:
    return 5 * arguments[7].nbytes + 2 * (arguments[1].nbytes + arguments[2].nbytes)


def _kept_by_lstm(arguments: Sequence[object], result: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return LSTM's gates and states of all time steps, kept in a tensor that has no size in a fake run."""
    inputs, outputs, kept = arguments[0], result[0], result[3]
    numbers = 9.6 * outputs.numel() + 6 * max(inputs.numel(), outputs.numel())
    return kept, int(numbers * (2.84 if outputs.dtype is bfloat16 else 4))


CPU_WORKSPACE: dict[Any, Workspace] = {
    ops.aten.convolution.default: _convolution,
    ops.aten.convolution_backward.default: _convolution_backward,
    ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    ops.aten._softmax_backward_data.default: softmax_copies,
    ops.aten._log_softmax_backward_data.default: softmax_copies,
    ops.aten.mkldnn_rnn_layer.default: _lstm,
    ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}


def quantized_workspace() -> dict[Any, Workspace]:
    """Return workspaces of products with 4-bit weights: the dequantized weight and the constants of its blocks."""
    if sys.modules.get("bitsandbytes") is None:
        return {}

    def count_dequantized(arguments: Sequence[Any], _: object) -> int:
        inputs, (rows, columns), block = arguments[0], arguments[2], arguments[4]
        return inputs.element_size() * rows * columns + 4 * math.ceil(rows * columns / block)

    return {ops.bitsandbytes.gemm_4bit.default: count_dequantized}


KEPT: dict[Any, Kept] = {ops.aten.mkldnn_rnn_layer.default: _kept_by_lstm}
