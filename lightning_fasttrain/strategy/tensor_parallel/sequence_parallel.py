"""Sequence parallelism: between split layers, each rank of a tensor group has its share of the tokens of a block.

The stacks of blocks whose tokens are divided are those of context parallelism too.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import divide_lengths_by_
from lightning_fasttrain.core.modules.select import has_parameters, is_inside
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrappers_on
from lightning_fasttrain.strategy.tensor_parallel.plan import is_attention
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    LocalStyle,
    RowParallel,
    gather_tokens,
    join_tokens,
    scatter_sum,
)


class Option(NamedTuple):
    """The option that divides tokens, as users write it, and how to do without it, for messages."""

    text: str
    way_out: str


def stacks_of(model: nn.Module, blocks: Mapping[str, nn.Module], option: Option) -> list[list[nn.Module]]:
    """Return the blocks of each stack, in the order in which they run.

    Args:
        model: the model that contains them.
        blocks: qualified name → block.
        option: the option that divides tokens.

    Raises:
        ValueError: there are no blocks, or one is skipped at random.
    """
    if "" in blocks or not blocks:
        why = "it has no repeated blocks, at whose borders tokens are divided and gathered"
        raise ValueError(explain(f"{option.text} with {type(model).__name__}", why, option.way_out))
    stacks: dict[str, list[nn.Module]] = {}
    for name, block in blocks.items():
        stacks.setdefault(name.rpartition(".")[0], []).append(block)
        _refuse_skipping(name, block, option)
    return list(stacks.values())


def _refuse_skipping(name: str, block: nn.Module, option: Option) -> None:
    """Refuse a block that is skipped at random: inside of it, ranks draw other random numbers, and would not agree."""
    for wrapper in wrappers_on(block, WrappedForward):
        rates = [value for key, value in vars(wrapper).items() if "drop" in key and isinstance(value, float)]
        if any(rates):
            what = f"{option.text} with '{name}' ({type(block).__name__}), which is skipped at random"
            why = "ranks draw different random numbers for their shares of the tokens"
            raise ValueError(explain(what, why, f"{option.way_out}, or leave StochasticDepth out"))


class HiddenStates:
    """The hidden states of one stack of blocks, from the first block's input to the last one's output.

    Args:
        group: the ranks that share the tokens.
        option: the option that divides tokens.
        averaged: whether gradients of parameters are averaged over the group. Each rank has a part of those in blocks,
            which are summed instead: they are multiplied by the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, option: Option, averaged: bool = False) -> None:
        self.group, self.option = group, option
        self.factor = group.size() if averaged else 1
        self._passed: Tensor | None = None  # the output of the block before, kept so that its memory is not used again

    def divide_(self, stack: list[nn.Module]) -> None:
        """Register the hooks of the blocks."""
        divide_lengths_by_(stack[0], self.group.size())
        for block in stack:
            kind = type(block).__name__  # FSDP2 makes it one of its own
            block.register_forward_pre_hook(self._before(kind, block is stack[0]), with_kwargs=True)
            block.register_forward_hook(self._after(block is stack[-1]))

    def _before(self, kind: str, is_first: bool) -> Any:
        def divide(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replace_hidden(args, kwargs, lambda hidden: self._enter(kind, hidden, is_first))

        return divide

    def _after(self, is_last: bool) -> Any:
        def gather(_: nn.Module, args: object, output: object) -> Any:
            first = output[0] if isinstance(output, tuple | list) else output
            if not is_last:
                self._passed = first.detach()
                return output
            whole = _Join.apply(first, self.group, self.factor)
            if isinstance(output, tuple | list):
                return type(output)((whole, *output[1:]))
            return whole

        return gather

    def _enter(self, kind: str, hidden: Tensor, is_first: bool) -> Tensor:
        passed, self._passed = self._passed, None
        if is_first:
            return self._take_tokens(hidden)
        if torch.compiler.is_compiling():
            return hidden
        # FSDP2 passes a view on.
        if passed is None or (passed.data_ptr(), passed.shape) != (hidden.data_ptr(), hidden.shape):
            what = f"{self.option.text} with the blocks of {kind}"
            why = "a block's input is not the output of the block before it, of which each rank has a share"
            raise ValueError(explain(what, why, self.option.way_out))
        return hidden

    def _take_tokens(self, hidden: Tensor) -> Tensor:
        ranks = self.group.size()
        if hidden.ndim < 2 or hidden.shape[1] % ranks:
            what = f"{self.option.text} with hidden states of shape {tuple(hidden.shape)}"
            why = f"the {ranks} ranks of a group have equal shares of the tokens"
            way_out = (
                f"Pad sequences to a multiple of {ranks}, as by pad_to_multiple_of=. {self.option.way_out} otherwise"
            )
            raise ValueError(explain(what, why, way_out))
        return take_tokens(hidden, self.group, averaged=self.factor > 1)


def replace_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Change the hidden states in the arguments of a block or of attention: the first tensor."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    key = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, key: change(kwargs[key])}


def take_tokens(x: Tensor, group: dist.ProcessGroup, axis: int = 1, averaged: bool = False) -> Tensor:
    """Take this rank's tokens of what all ranks have, before or beside a stack; its gradient is that of all tokens.

    Args:
        x: what all ranks of the group have.
        group: the ranks that share the tokens.
        axis: of the tokens.
        averaged: as for :class:`HiddenStates`, in which gradients are multiplied by the number of ranks.
    """
    return _Take.apply(x, group, group.size() if averaged else 1, axis)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    """Take this rank's tokens; gather the gradients of all."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup, factor: int, axis: int) -> Tensor:
        ctx.group, ctx.factor, ctx.axis = group, factor, axis
        return own_tokens(x, group, axis)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gathered = gather_tokens(grads[0], ctx.group, ctx.axis)
        return gathered if ctx.factor == 1 else gathered / ctx.factor, None, None, None


class _Join(torch.autograd.Function):
    """Gather the tokens of all ranks, each of which has the gradient of all; take that of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None, None]:
        own = own_tokens(grads[0], ctx.group)
        return own if ctx.factor == 1 else own * ctx.factor, None, None


def own_tokens(x: Tensor, group: dist.ProcessGroup, axis: int = 1) -> Tensor:
    """Return this rank's share of the tokens along ``axis``."""
    return x.chunk(group.size(), dim=axis)[group.rank()].contiguous()


Plan = dict[str, ParallelStyle]
_OPTION = Option("sequence_parallel=True", "Use sequence_parallel=False")
_WAY_OUT = _OPTION.way_out
# Parts of modules' names by which attention to another sequence is recognised.
_OTHER_SEQUENCE = ("cross", "encoder_attn", "EncDecAttention")


def plan_on_shares(model: nn.Module, blocks: Mapping[str, nn.Module], plan: Plan) -> Plan:
    """Return a plan whose layers communicate as they must where each rank has its share of the tokens of blocks.

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
    stacks_of(model, blocks, _OPTION)
    for name, block in blocks.items():
        _refuse_mixing(name, block, plan)
    attentions = find_attentions(blocks)
    inside = tuple(f"{name}." for name in blocks)
    chosen: Plan = {}
    for name, style in plan.items():
        chosen[name] = style = copy.copy(style)
        if not name.startswith(inside):
            continue
        if isinstance(style, ColumnParallel):
            # Attention, which reads the number of tokens from its inputs, gathers them before its layers.
            style.enter = None if is_inside(name, attentions) else join_tokens
        elif isinstance(style, RowParallel):
            style.leave = scatter_sum
    return chosen


def divide_tokens_(model: nn.Module, blocks: Mapping[str, nn.Module], group: dist.ProcessGroup) -> None:
    """Register the hooks at the borders of the stacks, and before attention; call it before layers are split."""

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_hidden(args, kwargs, lambda hidden: join_tokens(hidden, group))

    for attention in find_attentions(blocks).values():
        attention.register_forward_pre_hook(gather, with_kwargs=True)
    for stack in stacks_of(model, blocks, _OPTION):
        HiddenStates(group, _OPTION).divide_(stack)


def find_attentions(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the attention modules of blocks, by qualified name; they are recognised before they are split."""
    found: dict[str, nn.Module] = {}
    for prefix, block in blocks.items():
        for name, module in block.named_modules(prefix=prefix):
            if is_attention(module):
                found[name] = module
    return found


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
