"""Count the floating-point operations of code that runs on tensors without memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import ops
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_fasttrain.memory.allocation_trace import run_cached
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
        result = run_cached(func, args, kwargs)
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
    return 2 * out_val.numel() * first.shape[-1]


# Operators for which torch has no formula.
_FORMULAS: dict[Any, Callable[..., int]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    ops.aten._int_mm: lambda first, second, *_, **__: 2 * math.prod(first.shape) * second.shape[1],
    ops.aten._grouped_mm: _grouped,
}
