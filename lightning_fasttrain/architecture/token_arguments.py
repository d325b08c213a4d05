"""Take the chosen tokens of a block's arguments: hidden states, masks, positions."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import class_if_imported

_OTHER_SEQUENCE = re.compile("encoder|memory|cross|context")  # in names of arguments that are of another sequence


def gather_tokens(tensor: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Return the entries of ``tensor`` (B or 1, ...) at ``index`` (B, k) along an axis.

    Example:
        >>> import torch
        >>> gather_tokens(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 2], [1, 2]]))
        tensor([[5, 7],
                [6, 7]])
    """
    batch, count = index.shape
    shape = [batch] + [1] * (tensor.ndim - 1)
    shape[axis] = count
    wanted = [batch, *tensor.shape[1:]]
    expanded = tensor.expand(wanted)
    wanted[axis] = count
    return expanded.gather(axis, index.view(shape).expand(wanted))


def take_tokens(
    module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], index: Tensor, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block for the tokens at ``index`` (B, k) of a sequence of ``length`` tokens.

    Tensors have the batch, or 1, as their first axis. Of those with 4 axes, such as masks (B, H, T, T), and of boolean
    ones each axis of ``length`` is a token axis; of others the first one is. Arguments whose names say that they belong
    to another sequence, such as "encoder_hidden_states", are passed on as they are.

    Raises:
        ValueError: an argument has tokens, but no batch axis, so each sample cannot have its own; a key-value cache.
    """
    names = dict(enumerate(list(inspect.signature(type(module).forward).parameters)[1:]))
    taken = []
    for place, value in enumerate(args):
        taken.append(_take(names.get(place, f"argument {place}"), value, index, length))
    return tuple(taken), {name: _take(name, value, index, length) for name, value in kwargs.items()}


def _take(name: str, value: object, index: Tensor, length: int) -> Any:
    if _OTHER_SEQUENCE.search(name):
        return value
    is_block_mask = isinstance(value, class_if_imported("torch.nn.attention.flex_attention", "BlockMask"))
    if hasattr(value, "get_seq_length") or is_block_mask:
        why = f"a {type(value).__name__} holds all tokens, of which a routed block gets a part"
        raise ValueError(explain(f"MixtureOfDepths with {name}", why, "Call the model without it: use_cache=False"))
    return tree_map(lambda leaf: _take_from(name, leaf, index, length), value)


def _take_from(name: str, leaf: object, index: Tensor, length: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    batch = index.shape[0]
    if leaf.shape[0] not in (1, batch):
        if length not in leaf.shape:
            return leaf
        what = f"MixtureOfDepths: {name} of shape {tuple(leaf.shape)}"
        why = "it has no batch axis, while each sample chooses its own tokens"
        raise ValueError(explain(what, why, "Give it a first axis of size 1"))
    axes = [axis for axis in range(1, leaf.ndim) if leaf.shape[axis] == length]
    if leaf.ndim == 4:
        axes = [axis for axis in axes if axis > 1] or axes
    elif leaf.is_floating_point():
        axes = axes[:1]
    for axis in axes:
        leaf = gather_tokens(leaf, index, axis)
    return leaf
