"""Numbers of ranks that divide the heads and the hidden units of a model."""

import math
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    layers_of,
    widths_of,
)

# Attributes that hold a number of heads, in configurations and in attention modules.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


def heads_of(owner: object) -> dict[str, int]:
    """Return the numbers of heads that a configuration or an attention module states, by attribute.

    Example:
        >>> from types import SimpleNamespace
        >>> heads_of(SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=64))
        {'num_attention_heads': 8, 'num_key_value_heads': 2}
    """
    found = {}
    for names in (HEADS, KEY_VALUE_HEADS):
        stated = [name for name in names if type(getattr(owner, name, None)) is int]
        if stated:
            found[stated[0]] = getattr(owner, stated[0])
    return found


def common_divisors(numbers: Iterable[int]) -> list[int]:
    """Return the numbers that divide all of ``numbers``.

    Example:
        >>> common_divisors([12, 8])
        [1, 2, 4]
    """
    common = math.gcd(*numbers)
    return [n for n in range(1, common + 1) if common % n == 0]


def refuse_indivisible_heads(what: str, heads: Mapping[str, int], ranks: int) -> None:
    """Refuse a number of ranks that does not divide all numbers of heads; name the divisors.

    Raises:
        ValueError: it does not.
    """
    if any(count % ranks for count in heads.values()):
        stated = " and ".join(f"{name}={count}" for name, count in heads.items())
        way_out = f"Use one of tensor_parallel={common_divisors(heads.values())}"
        raise ValueError(explain(f"tensor_parallel={ranks} with {what}", f"it does not divide {stated}", way_out))


def refuse_indivisible(model: nn.Module, plan: Mapping[str, ParallelStyle], ranks: int) -> None:
    """Refuse a plan whose layers have widths that cannot be divided; name the divisors.

    Raises:
        ValueError: a width cannot be divided by ``ranks``.
    """
    for name, style in plan.items():
        if not isinstance(style, ColumnParallel | RowParallel):
            continue
        base, _, _ = layers_of(model.get_submodule(name))
        inputs, outputs = widths_of(base)
        parts, width = 1, inputs
        if isinstance(style, ColumnParallel):
            parts, width = style.parts, outputs
        if width % parts or (width // parts) % ranks:
            what = f"tensor_parallel={ranks} with '{name}'"
            why = f"it does not divide {parts} x {width // parts} features"
            way_out = f"Use one of tensor_parallel={common_divisors([width // parts])}, or leave it out of tensor_plan"
            raise ValueError(explain(what, why, way_out))
