"""What kernels allocate where a fake run does not look, as far as it matters.

From measuring single operations of oneDNN, in float32 and bfloat16. Convolutions work on copies in a layout of their
own, with the channels in blocks of 16; of images with the channels last, only the weights are copied. Left out are
1 × 1 convolutions of few images on one thread, which need no copies, and the transposed operands of bfloat16 matrix
products, a few per cent of a step.
"""

import math
import sys
from typing import Any

from torch import Tensor, bfloat16, channels_last, ops

from lightning_fasttrain.plan.allocation_trace import Kept, Workspace

BLOCK = 16


def _blocked(image: Tensor) -> int:
    """Bytes of a copy of ``image`` [N, C, ...] in oneDNN's layout."""
    channels = image.shape[1]
    return image.nbytes * -(-channels // BLOCK) * BLOCK // channels


def _has_channels_last(image: Tensor) -> bool:
    return image.ndim == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=channels_last)


def _convolution(arguments: Any, output: Tensor) -> int:
    inputs, weight, transposed = arguments[0], arguments[1], arguments[6]
    if _has_channels_last(inputs):
        return 2 * weight.nbytes
    inside = _blocked(output)
    if transposed:
        return 2 * inside
    return max(inside, (_blocked(inputs) if inputs.shape[1] >= BLOCK else 0) + inside - output.nbytes)


def _convolution_backward(arguments: Any, _: Any) -> int:
    gradient, inputs, weight, stride, (for_inputs, *_rest) = *arguments[:3], arguments[4], arguments[-1]
    if _has_channels_last(inputs):
        # A kernel with one channel to itself, if it is no 3 × 3 one, is summed up in a block of 16 × 16 channels.
        alone = weight.shape[1] == 1 and max(weight.shape[2:]) > 3
        return (1 + BLOCK * BLOCK if alone else 3) * weight.nbytes
    both = _blocked(gradient) + (_blocked(inputs) if inputs.shape[1] >= BLOCK else 0)
    return max(both, 2 * inputs.nbytes) if for_inputs and max(stride) > 1 else both


def _batch_norm_backward(arguments: Any, _: Any) -> int:
    return arguments[1].nbytes


def _lstm(arguments: Any, result: Any) -> int:
    gates = 0 if result[0].dtype is bfloat16 else 4 * result[0].nbytes
    return gates + arguments[1].nbytes + arguments[2].nbytes


def _lstm_backward(arguments: Any, _: Any) -> int:
    return 5 * arguments[7].nbytes + 2 * (arguments[1].nbytes + arguments[2].nbytes)


def _kept_by_lstm(arguments: Any, result: Any) -> tuple[Tensor, int]:
    """Gates and states of all times wait for the backward in a tensor that has no size in a fake run."""
    inputs, outputs, kept = arguments[0], result[0], result[3]
    numbers = 9.6 * outputs.numel() + 6 * max(inputs.numel(), outputs.numel())
    return kept, int(numbers * (2.84 if outputs.dtype is bfloat16 else 4))


CPU_WORKSPACE: dict[Any, Workspace] = {
    ops.aten.convolution.default: _convolution,
    ops.aten.convolution_backward.default: _convolution_backward,
    ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    ops.aten.mkldnn_rnn_layer.default: _lstm,
    ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}


def quantized_workspace() -> dict[Any, Workspace]:
    """A product with weights in 4 bits makes a whole weight of them, and whole constants of its blocks."""
    if sys.modules.get("bitsandbytes") is None:
        return {}

    def dequantized(arguments: Any, _: Any) -> int:
        inputs, (rows, columns), block = arguments[0], arguments[2], arguments[4]
        return inputs.element_size() * rows * columns + 4 * math.ceil(rows * columns / block)

    return {ops.bitsandbytes.gemm_4bit.default: dequantized}


KEPT: dict[Any, Kept] = {ops.aten.mkldnn_rnn_layer.default: _kept_by_lstm}
