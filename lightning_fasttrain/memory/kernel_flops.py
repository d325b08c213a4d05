"""Count the floating-point operations of code that runs on tensors without memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import ops
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_fasttrain.core.modules.fake_mode import run_cached
from lightning_fasttrain.memory.fake_operators import AssumedNumbers


class FlopCounter(AssumedNumbers):
    """Counts matrix products, convolutions and attention inside of a ``with`` block.

    Attributes:
        total: FLOPs so far, two of each multiply-add.
    """

    def __init__(self) -> None:
        super().__init__(truth=False)
        self.total = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result, _ = run_cached(func, args, kwargs)
        self.total += flops_of(func, args, kwargs, result) or 0
        return result


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int | None:
    """Return the FLOPs of an operator that has returned ``result``; None for one that multiplies no matrices.

    Source:
        The formulas of torch's ``FlopCounterMode``, and some that it lacks.
    """
    packet = func.overloadpacket
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def _cpu_attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _cpu_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _grouped(first: Any, second: Any, *_: object, out_val: Any, **__: object) -> int:
    """Return those of groups of rows; where a product sums over rows, each group sums its own."""
    groups = out_val.shape[0] if first.ndim == second.ndim == 2 else 1
    return 2 * out_val.numel() * first.shape[-1] // groups


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *settings: Any, out_val: object, **_: object) -> int:
    """Return for each gradient those of the output; torch's formula forgets the groups in that of the weight."""
    _, _, _, _, is_transposed, _, _, wanted = settings
    moved = inputs if is_transposed else gradient
    return 2 * moved.numel() * math.prod(weight.shape[1:]) * sum(wanted[:2])


def _recurrent(inputs: Any, weights: Sequence[Any]) -> int:
    """Return those of each matrix with each row of the inputs, [length, batch, width]."""
    matrices = sum(weight.numel() for weight in weights if weight.ndim == 2)
    return 2 * math.prod(inputs.shape[:-1]) * matrices


# Operators for which torch has no formula, or a wrong one.
_FORMULAS: dict[Any, Callable[..., int]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    ops.aten._int_mm: lambda first, second, *_, **__: 2 * math.prod(first.shape) * second.shape[1],
    ops.aten._grouped_mm: _grouped,
    ops.aten.convolution_backward: _convolution_backward,
    ops.aten.mkldnn_rnn_layer: lambda inputs, *weights, **_: _recurrent(inputs, weights[:2]),
    ops.aten.mkldnn_rnn_layer_backward: lambda inputs, *weights, **_: 2 * _recurrent(inputs, weights[:2]),
    ops.aten._cudnn_rnn: lambda inputs, weights, *_, **__: _recurrent(inputs, weights),
    ops.aten._cudnn_rnn_backward: lambda inputs, weights, *_, **__: 2 * _recurrent(inputs, weights),
}
