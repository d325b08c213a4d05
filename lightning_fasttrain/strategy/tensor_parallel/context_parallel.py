"""Context parallelism: each rank of a group computes the blocks for its share of the tokens of every sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as collectives
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only, tree_map_with_path

from lightning_fasttrain.architecture.auxiliary_loss import ForwardWithLoss, ModuleWithLoss
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.messages import describe_error, explain
from lightning_fasttrain.core.modules.parameters import move_values, trained_parameters
from lightning_fasttrain.core.modules.select import class_if_imported
from lightning_fasttrain.core.modules.wrapped_forward import (
    WrappedForward,
    has_dropout,
    without_dropout,
    wrappers_on,
)
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.finetune.frozen_cache import CachedForward
from lightning_fasttrain.micro_batching.padding.packed_forward import PackedForward
from lightning_fasttrain.model.tiled_mlp import in_place_of_parameters
from lightning_fasttrain.strategy.tensor_parallel.parallelize import SplitRandomness
from lightning_fasttrain.strategy.tensor_parallel.plan import (
    blocks_or_model,
    heads_of,
    is_attention,
    refuse_indivisible_heads,
)
from lightning_fasttrain.strategy.tensor_parallel.sequence_parallel import (
    HiddenStates,
    Option,
    own_tokens,
    replace_hidden,
    stacks_of,
    take_tokens,
)
from lightning_fasttrain.strategy.tensor_parallel.styles import gather_tokens

_INPUTS = ("query", "key", "value")


class ReplacedAttention(TorchFunctionMode):
    """Context in which another function is called in place of ``scaled_dot_product_attention``.

    Args:
        attend: the function, of the same arguments; inside it, the attention of an outer context is called.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self.attend
        return func(*args, **(kwargs or {}))


def attend_to_all_tokens(
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend to the tokens of all ranks of a group, from inputs with all heads and this rank's tokens.

    Ranks exchange them, so that each has all tokens and its share of the heads, attends with any kernel and mask, and
    exchange the outputs back.
    """
    ranks = group.size()
    _refuse_shapes(query, key, attn_mask, ranks)
    if key.shape[1] % ranks:
        # Each of them serves several queries' heads, and is copied for each.
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
        attn_mask = attn_mask.chunk(ranks, 1)[group.rank()]
    query, key, value = (_to_heads(x, group) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    return _to_tokens(mixed, group)


def attend_and_record(seen: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Attend, and add the queries, keys and values, each (B, H, T, d), to a list."""
    given = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
    seen += [given[name] for name in _INPUTS]
    return F.scaled_dot_product_attention(*args, **kwargs)


def _refuse_shapes(query: Tensor, key: Tensor, mask: Tensor | None, ranks: int) -> None:
    option = f"context_parallel={ranks}"
    if query.ndim != 4 or query.shape[2] != key.shape[2]:
        what = f"{option} with queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}"
        why = "expected (B, H, T, d) for the same tokens, as in self-attention"
        raise ValueError(explain(what, why, "Use context_parallel=1"))
    refuse_indivisible_heads("context_parallel", ranks, "scaled_dot_product_attention", {"heads": query.shape[1]})
    tokens = query.shape[2] * ranks
    if mask is not None and (mask.shape[-1] not in (1, tokens) or mask.shape[-2:-1] not in ((1,), (tokens,))):
        what = f"{option} with an attention mask of shape {tuple(mask.shape)}"
        why = f"it is not that of all {tokens} tokens: a block that makes its own mask sees a share of them"
        raise ValueError(explain(what, why, "Make the mask outside of blocks, or use context_parallel=1"))


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's tokens for its heads of all tokens: (B, H, T / n, d) → (B, H / n, T, d)."""
    received = _exchange(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's heads of all tokens for all heads of its tokens: (B, H / n, T, d) → (B, H, T / n, d)."""
    received = _exchange(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group)
    return received.movedim(0, 1).flatten(1, 2)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part number i of a tensor (n, ...) to rank i; return those of all ranks. Gradients are sent back."""
    sent = collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)
    return collectives.wait_tensor(sent)


_WAY_OUT = "Use context_parallel=1"
# Layers that mix neighbouring tokens, or normalize over tokens: a share of them gives other values.
_MIXING = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.MultiheadAttention,
)
# What techniques have put on blocks and is for complete sequences, which no comparison of the block itself shows.
_COMPLETE = {
    ForwardWithLoss: "it routes the tokens of complete sequences, and has a loss over them",
    ModuleWithLoss: "it has a loss over the tokens of complete sequences",
    PackedForward: "it removes the padding of complete sequences",
    CachedForward: "it caches the outputs for complete sequences",
}


# Why not torch.distributed.tensor.experimental.context_parallel? Its ring attention takes no attention mask, and it
# divides the user's batch, so that every loss would have to be written for a share of the tokens.
def divide_context_(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Have the blocks of a model compute on this rank's share of the tokens, in place; attention sees all of them.

    The first block of a stack takes its rank's tokens, the last one gathers the hidden states of all ranks, so that
    embeddings, the head and the loss are those of one process. In between, ``scaled_dot_product_attention`` exchanges
    heads for tokens. Arguments of blocks with a value per token, such as rotary tables, are divided too; masks are not.
    At its first forward, each block is compared with the undivided one on the first sample.

    Args:
        model: the model, which has the same inputs on all ranks of the group, and whose gradients are averaged over
            them.
        group: neighbouring ranks.

    Raises:
        ValueError: the model has no blocks, or they have layers that mix tokens other than by
            ``scaled_dot_product_attention``. Others are refused at the first forward.

    Returns:
        Names of the blocks.

    Source:
        Jacobs et al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509. Ours gathers after the last block,
        so that losses need not be divided.
    """
    option = Option(f"context_parallel={group.size()}", _WAY_OUT)
    blocks = blocks_or_model(model)
    stacks = stacks_of(model, blocks, option)
    for name, block in blocks.items():
        _refuse_mixing(name, block, group.size())
    _refuse_router_losses(model, option)
    for stack in stacks:
        HiddenStates(group, option, averaged=True).divide_(stack)
    for name, block in blocks.items():
        divided = DividedBlock(block, name, group)
        divided.install_below()
        block.register_forward_pre_hook(divided.compare_once, with_kwargs=True)
    if has_dropout(model):
        SplitRandomness(group.rank()).inside_(list(blocks.values()))
    return list(blocks)


def _refuse_mixing(prefix: str, block: nn.Module, ranks: int) -> None:
    for name, module in block.named_modules(prefix=prefix):
        what = f"context_parallel={ranks} with '{name}' ({type(module).__name__})"
        if isinstance(module, _MIXING):
            why = "it may mix the tokens of a sequence, of which each rank has a share"
            raise ValueError(explain(what, why, _WAY_OUT))
        for holder in (module, *wrappers_on(module, WrappedForward)):
            for kind, why in _COMPLETE.items():
                if isinstance(holder, kind):
                    found = f"context_parallel={ranks} with {type(holder).__name__} on '{name}'"
                    raise ValueError(explain(found, why, "Leave that technique out, or use context_parallel=1"))
        # Of the queries: heads of keys and values are copied where there are fewer.
        of_queries = dict(list(heads_of(module).items())[:1])
        refuse_indivisible_heads("context_parallel", ranks, f"'{name}' ({type(module).__name__})", of_queries)


def _refuse_router_losses(model: nn.Module, option: Option) -> None:
    for module in model.modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            why = "its loss has a term over the routing of all tokens, of which each rank sees a share"
            what = f"{option.text} with output_router_logits=True"
            raise ValueError(explain(what, why, f"Set it to False. {_WAY_OUT} otherwise"))


class DividedBlock(WrappedForward):
    """Computes a block for this rank's tokens.

    Args:
        block: the block, whose hidden states are those of this rank, and whose other arguments those of all tokens.
        name: its qualified name, for messages.
        group: the ranks that share the tokens.
    """

    def __init__(self, block: nn.Module, name: str, group: dist.ProcessGroup) -> None:
        super().__init__(block)
        self.name, self.group = name, group
        self._kind = type(block).__name__  # FSDP2 makes it one of its own
        self.attention = ReplacedAttention(partial(attend_to_all_tokens, group))
        self._compared = False
        self._axes: dict[object, int | None] = {}  # place of an argument → its axis of tokens

    def __call__(self, *args: object, **kwargs: object) -> Any:
        args, kwargs = self._divide(args, kwargs)
        with self.attention:
            return self.inner(*args, **kwargs)

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take this rank's tokens of the arguments besides the hidden states; leave out a cache for generation."""
        hidden = hidden_of(args, kwargs)
        share = hidden.shape[1]
        if share == 1:
            what = f"context_parallel={self.group.size()} with sequences of {self.group.size()} tokens"
            why = "attention may take a single token on a rank for a step of generation, and not mask others"
            raise ValueError(explain(what, why, "Pad sequences, as by pad_to_multiple_of="))

        def divide(place: Any, value: object) -> object:
            if not isinstance(value, Tensor) or value is hidden:
                return value
            axis = self._axis_of(place, value, share * self.group.size())
            if axis is None:
                return value
            if value.requires_grad:  # such as the encoder's output in a decoder
                return take_tokens(value, self.group, axis, averaged=True)
            return value.narrow(axis, self.group.rank() * share, share)

        return tree_map_with_path(divide, without_cache((args, kwargs)))

    def _axis_of(self, place: Any, value: Tensor, tokens: int) -> int | None:
        """Return the axis of tokens of an argument, also where it has as many features as tokens, as a mask has."""
        axis = axis_of_tokens(value, tokens)
        if axis is None and value.is_floating_point() and value.ndim <= 3 and value.shape[-2:] == (tokens, tokens):
            is_table = len(place) > 2  # in a tuple of rotary tables
            return self._axes.get(place, value.ndim - 2 if is_table else None)
        self._axes[place] = axis
        return axis

    @torch.no_grad()
    def compare_once(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the block with the undivided one on the first sample of its first input; a collective.

        Raises:
            ValueError: on all ranks, they differ.
        """
        hidden = hidden_of(args, kwargs)
        if self._compared or torch.compiler.is_compiling() or isinstance(hidden, FakeTensor):
            return
        self._compared = True
        rows = hidden.shape[0]

        def take_first(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == rows:
                return value[:1]
            return value

        args, kwargs = tree_map(take_first, without_cache((args, kwargs)))
        undo = without_dropout(block)
        try:
            with keep_random_state():
                difference = self._difference(args, kwargs)
        finally:
            undo()
        rounding = 1e-3
        if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype.itemsize < 4:
            rounding = 2e-2
        if difference > rounding:
            why = f"its values for a share of the tokens differ by {difference:.1g} of their size from those for all"
            self._refuse(why)

    def _difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the largest relative difference of a token's queries, keys, values and hidden states."""
        # A mixing of tokens that is initialized to zero, as by a gate, shows with other values.
        moved = move_values(trained_parameters(self.module))
        undivided: list[Tensor] = []
        divided: list[Tensor] = []
        with ReplacedAttention(partial(attend_and_record, undivided)), in_place_of_parameters(self.module, moved):
            whole_args, whole_kwargs = replace_hidden(args, kwargs, lambda hidden: gather_tokens(hidden, self.group))
            expected = self.inner(*whole_args, **whole_kwargs)
        args, kwargs = self._divide(args, kwargs)
        try:
            # Recorded before they are exchanged.
            attention = ReplacedAttention(partial(attend_and_record, divided))
            with self.attention, attention, in_place_of_parameters(self.module, moved):
                found = self.inner(*args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._refuse(f"it fails on a share of the tokens: {describe_error(error)}", error)
        if not divided and any(map(is_attention, self.module.modules())):
            self._refuse("its attention does not call torch.nn.functional.scaled_dot_product_attention")
        # Of an output with more than hidden states, they come first.
        expected, found = _first(expected), _first(found)
        largest = torch.zeros((), device=found.device)
        pairs = [(found, own_tokens(expected, self.group))]
        for mine, whole in zip(divided, undivided, strict=True):
            pairs.append((mine, own_tokens(whole, self.group, 2)))
        for mine, whole in pairs:
            if mine.shape != whole.shape:
                self._refuse("it attends to another sequence, which has as many tokens as a rank's share")
            sizes = whole.float().norm(dim=-1)
            # A token of zeros, such as padding, has no size of its own.
            relative = (mine.float() - whole.float()).norm(dim=-1) / (sizes + sizes.mean())
            largest = torch.maximum(largest, relative.nan_to_num(0.0).max())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.item()

    def _refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        what = f"context_parallel={self.group.size()} with '{self.name}' ({self._kind})"
        way_out = (
            "Have attention call scaled_dot_product_attention, such as by attn_implementation='sdpa', and give blocks "
            "the positions or rotary tables of their tokens. Use context_parallel=1 otherwise"
        )
        raise ValueError(explain(what, why, way_out)) from cause


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block: the first tensor."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def without_cache(arguments: Any) -> Any:
    """Replace caches for generation, which would keep keys and values of a share of the tokens, by None."""
    kinds = class_if_imported("transformers.cache_utils", "Cache")
    if not kinds:
        return arguments
    # As a whole, also where transformers has registered how torch takes a cache apart.
    return tree_map_only(kinds, lambda _: None, arguments, is_leaf=lambda value: isinstance(value, kinds))


def axis_of_tokens(value: Tensor, tokens: int) -> int | None:
    """Return the axis along which an argument of a block has a value per token; None for others, such as masks.

    Example:
        >>> axis_of_tokens(torch.zeros(2, 8, 4), tokens=8), axis_of_tokens(torch.zeros(2, 1, 8, 8), tokens=8)
        (1, None)
    """
    is_mask = value.dtype == torch.bool or value.ndim > 3 or value.shape[-2:] == (tokens, tokens)
    if is_mask or tokens not in value.shape:
        return None
    if value.ndim > 1 and value.shape[1] == tokens:
        return 1
    return value.shape.index(tokens)
