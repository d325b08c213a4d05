"""Recognition of attention and MLPs in a block by the names, order and widths of its linear layers."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import has_parameters, is_inside
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.tensor_parallel.divisors import heads_of, refuse_indivisible_heads
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    SummedGradients,
    is_linear,
    layers_of,
    widths_of,
)

Layers = dict[str, nn.Module]
_QUERIES = ("q_proj", "query", "q", "to_q", "wq", "q_lin", "query_proj")
_KEYS = ("k_proj", "key", "k", "to_k", "wk", "k_lin", "key_proj")
_VALUES = ("v_proj", "value", "v", "to_v", "wv", "v_lin", "value_proj")
# Fused: all queries, then all keys, then all values; and one head after another.
_FUSED = {"qkv": 3, "qkv_proj": 3, "c_attn": 3, "Wqkv": 3, "to_qkv": 3, "in_proj": 3, "query_key_value": 1}
# Of relative positions, to the same heads.
_POSITIONS = ("pos_key_proj", "pos_query_proj")
_BIASES = ("relative_position_bias", "relative_attention_bias")
_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm")


def plan_block(prefix: str, block: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """Return the styles of one block's attention and MLPs; empty if it has neither.

    Args:
        prefix: name of the block.
        block: the block.
        ranks: number of ranks in a tensor group.

    Raises:
        ValueError: heads cannot be divided, or attention has parameters whose use is unknown.

    Example:
        >>> from lightning_fasttrain.bench.gpt import Block, GPTConfig
        >>> plan = plan_block("blocks.0", Block(GPTConfig(width=8, heads=2)), 2)
        >>> {name: style.known_as for name, style in plan.items()}
        {'blocks.0.attention.qkv': 'colwise', 'blocks.0.attention.out': 'rowwise', 'blocks.0.up': 'colwise', \
'blocks.0.down': 'rowwise'}
    """
    start = f"{prefix}.".removeprefix(".")
    layers = dict(_linear_layers(block))
    plan: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        inner = f"{name}.".removeprefix(".")
        projections = _projections(module)
        if projections:
            plan.update(_plan_attention(inner, module, projections, layers, f"'{start}{name}'", ranks))
    plan.update(_plan_mlps(block, without(layers, plan)))
    order = list(dict(block.named_modules()))
    return {f"{start}{name}": plan[name] for name in sorted(plan, key=order.index)}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module owns projections for queries, keys and values."""
    return bool(_projections(module))


def refuse_biases_of_heads(model: nn.Module) -> None:
    """Refuse a model that adds a bias for each head, made outside of attention, to the scores of a part of the heads.

    Raises:
        ValueError: it has ALiBi, or a table of relative positions; both are recognised by their names.
    """
    what = None
    for name, module in model.named_modules():
        held = {key for key, value in vars(module).items() if isinstance(value, bool | float | int) and value}
        words = (type(module).__name__, *dir(type(module)), *held, *module._buffers)
        if any("alibi" in word.lower() for word in words):
            what = f"ALiBi of '{name}' ({type(module).__name__})"
    for name, _ in model.named_parameters():
        if any(word in name for word in _BIASES):
            what = f"'{name}'"
    if what is not None:
        why = "it is a bias for each head, of which a rank has a part, made outside of attention"
        way_out = "Give tensor_plan= for the MLPs alone, such as {'*.up': 'colwise', '*.down': 'rowwise'}"
        raise ValueError(explain(f"tensor parallelism of attention with {what}", why, way_out))


def _linear_layers(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers; one with adapters counts as one layer."""
    inside: tuple[str, ...] = ()
    for name, module in block.named_modules():
        if is_linear(module) and not name.startswith(inside or ("\0",)):
            inside = (*inside, f"{name}.")
            yield name, module


def _projections(module: nn.Module) -> dict[str, int]:
    """Return the projections that a module owns as an attention, with their number of fused parts; else nothing."""
    own = {name: child for name, child in module.named_children() if is_linear(child)}
    for name, parts in _FUSED.items():
        if name in own:
            inputs, outputs = _widths(own[name])
            # Grouped queries are wider than keys.
            return {name: parts} if outputs == 3 * inputs else {}
    found = {}
    for names in (_QUERIES, _KEYS, _VALUES):
        name = next(filter(own.__contains__, names), None)
        if name is None:
            return {}
        found[name] = 1
    return found


def _plan_attention(
    inner: str, module: nn.Module, projections: dict[str, int], layers: Layers, what: str, ranks: int
) -> dict[str, ParallelStyle]:
    heads = heads_of(module) or heads_of(getattr(module, "config", None))
    if not heads:
        why = "its number of heads is unknown: it has no attribute such as num_heads"
        raise ValueError(explain(f"tensor parallelism of attention {what}", why, "Give tensor_plan="))
    refuse_indivisible_heads(what, heads, ranks)
    order = list(layers)
    names = [f"{inner}{name}" for name in projections]
    inputs, outputs = _widths(layers[names[0]])
    width = inputs
    if len(names) == 3:
        width = outputs
    positions = [f"{inner}{name}" for name in _POSITIONS if f"{inner}{name}" in layers]
    after = order[max(map(order.index, (*names, *positions))) + 1 :]
    fitting = [name for name in after if _widths(layers[name])[0] == width]
    if not fitting:
        why = f"no layer of {width} inputs comes after its projections"
        raise ValueError(explain(f"the output projection of attention {what} is unknown", why, "Give tensor_plan="))
    plan: dict[str, ParallelStyle] = {}
    for name, parts in zip(names, projections.values(), strict=True):
        plan[name] = ColumnParallel(parts)
    for name in positions:
        plan[name] = ColumnParallel()
    plan[fitting[0]] = RowParallel()
    plan.update(_plan_norms(inner, module, layers, width // next(iter(heads.values())), what))
    return plan


def _plan_norms(inner: str, module: nn.Module, layers: Layers, head_dim: int, what: str) -> dict[str, ParallelStyle]:
    """Return the styles of norms per head; refuse other parameters, which may belong to single heads."""
    plan: dict[str, ParallelStyle] = {}
    for name, owner in module.named_modules():
        path, shapes = f"{inner}{name}", {tuple(p.shape) for p in owner.parameters(recurse=False)}
        if not shapes or _is_inside(path, layers):
            continue
        if name in _NORMS and shapes == {(head_dim,)}:
            plan[path] = SummedGradients()
        else:
            why = f"'{name}' ({type(owner).__name__}) has parameters that may belong to single heads"
            raise ValueError(explain(f"tensor parallelism of attention {what}", why, "Give tensor_plan="))
    return plan


def _plan_mlps(block: nn.Module, layers: Layers) -> dict[str, ParallelStyle]:
    """Return the styles of successive layers of widths D → F (one or several) and F → D, with F above D."""
    plan: dict[str, ParallelStyle] = {}
    ups: list[str] = []
    for name, module in block.named_modules():
        if name not in layers:
            # A norm of hidden units needs all of them.
            if not _is_inside(name, layers) and has_parameters(module, recurse=False):
                ups = []
            continue
        inputs, outputs = _widths(module)
        before = _widths(layers[ups[-1]]) if ups else (inputs, outputs)
        if ups and (outputs, inputs) == before:
            for up in ups:
                plan[up] = ColumnParallel()
            plan[name] = RowParallel()
            ups = []
        elif outputs > inputs:
            ups = [*ups, name] if (inputs, outputs) == before else [name]
        else:
            ups = []
    return plan


def _widths(layer: nn.Module) -> tuple[int, int]:
    base, _, _ = layers_of(layer)
    return widths_of(base)


def _is_inside(name: str, layers: Layers) -> bool:
    return name in layers or is_inside(name, layers)
