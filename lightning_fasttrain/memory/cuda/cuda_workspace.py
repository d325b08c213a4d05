"""Workspace that CUDA kernels allocate outside of a fake run, where it matters.

Not included is that of cuDNN, which chooses among kernels with and without.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, ops
from torch.backends import cudnn

from lightning_fasttrain.memory.allocation_trace import Workspace
from lightning_fasttrain.memory.cuda.cuda_dispatch import efficient_backward, flash_backward
from lightning_fasttrain.memory.kernel_workspace import softmax_copies

PROCESSORS, THREADS = 132, 2048  # of an H100 or H200: streaming multiprocessors, and resident threads of each
VECTOR = 4  # adjacent columns that a thread sums up
WARP, MOST_THREADS = 32, 512
FEWEST_VALUES, MOST_VALUES = 16, 256  # values that a thread should sum up
FLOAT32 = 4
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
