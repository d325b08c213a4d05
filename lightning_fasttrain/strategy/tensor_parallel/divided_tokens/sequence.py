"""Sequence parallelism: between split layers, each rank of a tensor group has its share of the tokens of a block."""

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import has_parameters, is_inside
from lightning_fasttrain.strategy.tensor_parallel.attention_and_mlp import is_attention
from lightning_fasttrain.strategy.tensor_parallel.divided_tokens.hidden_states import (
    HiddenStates,
    Option,
    replace_hidden,
    stacks_of,
)
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    Gather,
    LocalStyle,
    RowParallel,
    ScatterSum,
)

Plan = dict[str, ParallelStyle]
_OPTION = Option("sequence_parallel=True", "Use sequence_parallel=False")
_WAY_OUT = _OPTION.way_out
# Parts of modules' names by which attention to another sequence is recognised.
_OTHER_SEQUENCE = ("cross", "encoder_attn", "EncDecAttention")


class SequenceParallel:
    """The stacks of blocks that compute norms, dropout and residual sums on a share of the tokens.

    The first block of a stack takes its rank's tokens, and the last one gathers those of all ranks. In between,
    attention and the column-parallel layers of MLPs gather them, and row-parallel layers sum and scatter, so that as
    much is communicated as without it.

    Args:
        model: the model, before it is split.
        blocks: qualified name → block, in the order in which they run.
        plan: module name → style.

    Raises:
        ValueError: a block has a layer that may need all tokens, or that splits in torch's own way.

    Source:
        Korthikanti et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198, section 4.2.2.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], plan: Plan) -> None:
        self.stacks = stacks_of(model, blocks, _OPTION)
        self.blocks = list(blocks.values())
        for name, block in blocks.items():
            _refuse_mixing(name, block, plan)
        self.attentions: dict[str, nn.Module] = {}
        for prefix, block in blocks.items():
            for name, module in block.named_modules(prefix=prefix):
                if is_attention(module):
                    self.attentions[name] = module
        self._inside = tuple(f"{name}." for name in blocks)
        self.plan = {name: self._on_shares(name, style) for name, style in plan.items()}

    def _on_shares(self, name: str, style: ParallelStyle) -> ParallelStyle:
        """Return the style of a layer, with the communication that it needs where ranks have shares of the tokens."""
        style = copy.copy(style)
        if not name.startswith(self._inside):
            return style
        if isinstance(style, ColumnParallel):
            style.enter = Gather
            # Attention, which reads the number of tokens from its inputs, gathers them before.
            if is_inside(name, self.attentions):
                style.enter = None
        elif isinstance(style, RowParallel):
            style.leave = ScatterSum
        return style

    def divide_(self, group: dist.ProcessGroup) -> None:
        """Register the hooks at the borders of the stacks, and before attention."""

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replace_hidden(args, kwargs, lambda hidden: Gather.apply(hidden, group))

        for attention in self.attentions.values():
            attention.register_forward_pre_hook(gather, with_kwargs=True)
        for stack in self.stacks:
            HiddenStates(group, _OPTION).divide_(stack)


def _refuse_mixing(prefix: str, block: nn.Module, plan: Plan) -> None:
    """Refuse a block with a layer that is neither split nor a norm, since it may need the tokens of other ranks."""
    for name, style in plan.items():
        if name.startswith(f"{prefix}.") and not isinstance(style, LocalStyle):
            what = f"sequence_parallel=True with the style {type(style).__name__} of '{name}'"
            why = "torch's own styles divide sequences in their own way"
            raise ValueError(explain(what, why, "Give 'colwise' and 'rowwise' in tensor_plan"))
    for name, module in block.named_modules(prefix=prefix):
        what = f"sequence_parallel=True with '{name}' ({type(module).__name__})"
        if module is block and is_attention(block):
            raise ValueError(explain(what, "attention is not a module of its own, which would gather tokens", _WAY_OUT))
        if getattr(module, "relative_attention", False):
            raise ValueError(explain(what, "attention reads embeddings of positions besides its tokens", _WAY_OUT))
        if any(word in name.rpartition(".")[2] for word in _OTHER_SEQUENCE):
            raise ValueError(explain(what, "it attends to another sequence, of which ranks have all tokens", _WAY_OUT))
        inside = name in plan or is_inside(name, plan)
        if not inside and not _is_norm(module) and has_parameters(module, recurse=False):
            why = "it is neither split nor a norm over features, and may need the tokens of other ranks"
            raise ValueError(explain(what, why, _WAY_OUT))


def _is_norm(module: nn.Module) -> bool:
    """Return whether a layer normalizes or scales each token by itself."""
    over_tokens = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
    named = any(word in type(module).__name__.lower() for word in ("norm", "layerscale"))
    return named and not isinstance(module, over_tokens) and all(p.ndim == 1 for p in module.parameters())
