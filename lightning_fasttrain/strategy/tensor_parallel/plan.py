"""Plans for tensor parallelism: which layers of a model are split over the ranks of a tensor group, and how."""

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, list_some, note_once
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.select import has_parameters, is_inside
from lightning_fasttrain.core.modules.wrapped_forward import wrappers_on
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.loss.fused_loss_head import FusedHead
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    LocalStyle,
    RowParallel,
    SummedGradients,
    VocabularyEmbedding,
    VocabularyHead,
    can_look_up,
    is_linear,
    layers_of,
    vocabulary_style,
    widths_of,
)

TensorPlan = Mapping[str, str | ParallelStyle]
Plan = dict[str, ParallelStyle]
# What users write, and Hugging Face's configurations. A layer whose outputs would be gathered is replicated instead.
_STYLES: dict[str, LocalStyle | None] = {
    "colwise": ColumnParallel(),
    "rowwise": RowParallel(),
    "packed_colwise": ColumnParallel(parts=2),
    "fused_qkv": ColumnParallel(parts=3),
    "replicated_with_grad_allreduce": SummedGradients(),
    "colwise_gather_output": None,
    "colwise_rep": None,
    "rowwise_split_input": None,
    "replicated": None,
    "vocabulary": None,  # depends on the layer
}


@check_arguments
def plan_tensor_parallel(model: nn.Module, tensor_parallel: PositiveInt, plan: TensorPlan | None = None) -> Plan:
    """Return a plan that splits attention by heads and MLPs by hidden units over ``tensor_parallel`` ranks.

    The plan comes from the first of these that applies:

    1. ``plan``, if given.
    2. ``base_model_tp_plan`` in the configuration of a Hugging Face model.
    3. A rule for the blocks that :func:`~lightning_fasttrain.model.find_blocks` finds. Projections are recognised by
       their names: of queries, keys and values (``q_proj``, ``query``, …), or fused (``qkv``, ``c_attn``, …), and the
       next layer of fitting width is the output projection. Two or three successive layers of widths D → F → D are an
       MLP. The operations between them must act on each head and each hidden unit by itself, and attention must take
       its number of heads from the projections, as in ``q.view(B, T, -1, head_dim)``, or from an attribute such as
       ``num_heads``, which becomes the number of heads per rank. Biases of positions for each head, as ALiBi's, are
       refused.

    A head that :class:`~lightning_fasttrain.FusedLossHead` fuses, and that is named, splits its vocabulary, and so
    does an embedding that is tied to it: the loss is then computed without gathering logits. Layers without an entry
    are replicated in the tensor group, such as norms, other embeddings and heads.

    Args:
        model: any module, before it is sharded; it is not changed.
        tensor_parallel: number of ranks in a tensor group.
        plan: module name or pattern, in which ``*`` stands for any characters → a style: ``"colwise"``, ``"rowwise"``,
            ``"packed_colwise"`` for two fused layers, ``"fused_qkv"`` for three, ``"replicated_with_grad_allreduce"``
            for a norm of queries or keys, ``"vocabulary"`` for a head and for an embedding, ``"replicated"``, or a
            ``ParallelStyle`` of ``torch.distributed.tensor.parallel``.

    Returns:
        Module name → style, in the order of the model.

    Raises:
        ValueError: nothing can be split, a pattern matches nothing, a style is unknown, or heads or hidden units
            cannot be divided; the message names the numbers of ranks that divide them.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
        >>> plan = plan_tensor_parallel(nn.Sequential(layer, nn.Linear(8, 4)), 2, {"0.linear1": "colwise",
        ...                                                                        "0.linear2": "rowwise"})
        >>> {name: type(style).__name__ for name, style in plan.items()}
        {'0.linear1': 'ColumnParallel', '0.linear2': 'RowParallel'}

    Source:
        Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3; ``base_model_tp_plan`` of
        Hugging Face's transformers.
    """
    if plan is not None:
        chosen = _from_patterns(model, plan, "tensor_plan")
        _refuse_biases(model, chosen)
        refuse_indivisible(model, chosen, tensor_parallel)
        _refuse_partial_outputs(model, chosen)
        return chosen
    found: Plan = {}
    bases = _with_own_plan(model)
    for prefix, base in bases.items():
        found.update(_from_configuration(prefix, base, tensor_parallel))
    for name, block in blocks_or_model(model).items():
        if "" not in bases and not is_inside(name, bases):
            found.update(plan_block(name, block, tensor_parallel))
    if not found:
        what = f"tensor_parallel={tensor_parallel} finds nothing to split in {type(model).__name__}"
        why = "no attention or MLP is recognised by its layers, and no base_model_tp_plan splits any"
        raise ValueError(explain(what, why, "Give tensor_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"))
    _refuse_biases(model, found)
    refuse_indivisible(model, found, tensor_parallel)
    found.update(split_vocabulary_of(model, fused_heads(model), tensor_parallel))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda entry: order[entry[0]]))


def _refuse_biases(model: nn.Module, plan: Plan) -> None:
    attentions = [name for name, module in model.named_modules() if is_attention(module)]
    if any(name.startswith(f"{attention}.") for name in plan for attention in attentions):
        refuse_biases_of_heads(model)


def _refuse_partial_outputs(model: nn.Module, plan: Plan) -> None:
    """Refuse column-parallel layers that no row-parallel layer follows, as a head: a loss would take a part for all."""
    columns: list[str] = []
    for name, _ in model.named_modules():
        if isinstance(plan.get(name), ColumnParallel):
            columns.append(name)
        elif isinstance(plan.get(name), RowParallel | RowwiseParallel):
            columns = []
    if columns:
        why = "no 'rowwise' layer comes after it, so that each rank would continue with a part of its outputs"
        way_out = (
            "Leave it out of tensor_plan: a replicated head works with every loss, and FusedLossHead() saves logits"
        )
        raise ValueError(explain(f"tensor_plan has 'colwise' for '{columns[0]}'", why, way_out))


def blocks_or_model(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model, or the model itself."""
    try:
        return find_blocks(model)
    except ValueError:
        return {"": model}


def _from_patterns(model: nn.Module, plan: TensorPlan, source: str) -> Plan:
    names = list(dict(model.named_modules()))
    found: Plan = {}
    for pattern, style in plan.items():
        matches = fnmatch.filter(names, pattern)
        if not matches:
            why = f"the model has {list_some(names[1:], 6)}"
            raise ValueError(explain(f"{source} has '{pattern}', which matches no module", why, "Correct the name"))
        if isinstance(style, str) and style not in _STYLES:
            why = f"known are {', '.join(_STYLES)}"
            way_out = "Give one of these, or 'replicated' to leave the layer unsplit, in tensor_plan"
            raise ValueError(explain(f"{source} has the style '{style}' for '{pattern}'", why, way_out))
        for name in matches:
            chosen = _STYLES[style] if isinstance(style, str) else style
            if style == VocabularyHead.known_as:
                chosen = vocabulary_style(name, model.get_submodule(name))
            if chosen is not None:
                found[name] = chosen
    return found


def _with_own_plan(model: nn.Module) -> dict[str, Any]:
    """Return the base models of Hugging Face models whose configuration has a plan."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_base = getattr(module, "base_model", None) is module
        if is_base and getattr(getattr(module, "config", None), "base_model_tp_plan", None):
            found[name] = module
    return found


def _from_configuration(prefix: str, base: Any, tensor_parallel: int) -> Plan:
    start = f"{prefix}.".removeprefix(".")
    source = f"base_model_tp_plan of {type(base.config).__name__}"
    # An optional layer may be missing in this model.
    present = list(dict(base.named_modules()))
    own = {
        pattern: style for pattern, style in base.config.base_model_tp_plan.items() if fnmatch.filter(present, pattern)
    }
    refuse_indivisible_heads("tensor_parallel", tensor_parallel, type(base).__name__, heads_of(base.config))
    return {f"{start}{name}": style for name, style in _from_patterns(base, own, source).items()}


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
    refuse_indivisible_heads("tensor_parallel", ranks, what, heads)
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


def refuse_indivisible_heads(option: str, ranks: int, what: str, heads: Mapping[str, int]) -> None:
    """Refuse a number of ranks, as given by ``option``, that does not divide all numbers of heads; name the divisors.

    Raises:
        ValueError: it does not.
    """
    if any(count % ranks for count in heads.values()):
        stated = " and ".join(f"{name}={count}" for name, count in heads.items())
        way_out = f"Use one of {option}={common_divisors(heads.values())}"
        raise ValueError(explain(f"{option}={ranks} with {what}", f"it does not divide {stated}", way_out))


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


def split_vocabulary_of(model: nn.Module, heads: Iterable[nn.Module], ranks: int) -> dict[str, ParallelStyle]:
    """Return the styles by which the vocabularies of ``heads`` are split, with the embeddings that are tied to them.

    A head whose weight is used by anything else stays replicated, which is reported.

    Args:
        model: the model that contains them, before it is sharded.
        heads: linear layers.
        ranks: number of ranks in a tensor group.
    """
    chosen = set(heads)
    plan: dict[str, ParallelStyle] = {}
    weights: dict[Any, None] = {head.weight: None for head in heads}
    for weight in weights:
        sharing = {name: module for name, module in model.named_modules() if _owns(module, weight)}
        others = [name for name, module in sharing.items() if module not in chosen and not can_look_up(module)]
        if others or not _has_rows_for_all(weight, ranks):
            why = f"'{others[0]}' uses its weight too" if others else f"its {len(weight)} classes are too few"
            note_once(f"tensor parallelism: the head is replicated, since {why}")
            continue
        for name, module in sharing.items():
            plan[name] = VocabularyHead() if module in chosen else VocabularyEmbedding()
    return plan


def _has_rows_for_all(weight: Tensor, ranks: int) -> bool:
    return -(-len(weight) // ranks) * (ranks - 1) < len(weight)


def _owns(module: nn.Module, weight: object) -> bool:
    return any(parameter is weight for parameter in module._parameters.values())


def fused_heads(model: nn.Module) -> list[nn.Module]:
    """Return the heads that :class:`~lightning_fasttrain.FusedLossHead` knows, and whose loss takes a split weight."""
    found = []
    for module in model.modules():
        for head in wrappers_on(module, FusedHead):
            if head.search is None and head.options["backend"] in ("auto", "chunked"):
                found.append(module)
    return found
