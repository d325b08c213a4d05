"""What kernels on the CPU allocate for themselves, where a fake run does not look; large enough to matter only."""

from typing import Any

from torch import Tensor, ops

from lightning_fasttrain.plan.allocation_trace import Workspace

# From measuring single operations, of oneDNN's float32 and bfloat16 kernels: convolutions work on copies in their own
# layout. Matrix products in bfloat16 copy transposed operands too, a few per cent of a step, which is left out.


def _convolution(arguments: Any, output: Tensor) -> int:
    return max(arguments[0].nbytes, output.nbytes)


def _convolution_backward(arguments: Any, _: Any) -> int:
    gradient, inputs, needs_input_gradient = arguments[0], arguments[1], arguments[-1][0]
    return inputs.nbytes + max(gradient.nbytes, inputs.nbytes if needs_input_gradient else 0)


def _batch_norm_backward(arguments: Any, _: Any) -> int:
    return arguments[1].nbytes


CPU_WORKSPACE: dict[Any, Workspace] = {
    ops.aten.convolution.default: _convolution,
    ops.aten.convolution_backward.default: _convolution_backward,
    ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
