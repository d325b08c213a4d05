"""Plans for tensor parallelism: which layers of a model are split over the ranks of a tensor group, and how."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.select import is_inside
from lightning_fasttrain.strategy.tensor_parallel.attention_and_mlp import (
    is_attention,
    plan_block,
    refuse_biases_of_heads,
)
from lightning_fasttrain.strategy.tensor_parallel.divisors import (
    heads_of,
    refuse_indivisible,
    refuse_indivisible_heads,
)
from lightning_fasttrain.strategy.tensor_parallel.styles import ColumnParallel, LocalStyle, RowParallel, SummedGradients
from lightning_fasttrain.strategy.tensor_parallel.vocabulary import (
    VocabularyHead,
    fused_heads,
    split_vocabulary_of,
    vocabulary_style,
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
    refuse_indivisible_heads(type(base).__name__, heads_of(base.config), tensor_parallel)
    return {f"{start}{name}": style for name, style in _from_patterns(base, own, source).items()}
