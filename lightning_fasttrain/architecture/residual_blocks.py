"""Read the parts of residual blocks: their MLPs, their hidden states, and how they add to them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.recomputation import RecomputedForward, nodes_between
from lightning_fasttrain.core.modules.select import CONV1D, as_list, find_skipped, is_a, is_linear
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, replaced_forward

ATTENTION = re.compile("attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Mlp:
    """The linear layers of an MLP.

    Args:
        first: names of the layers that read the hidden states: one, or a gate and another one.
        last: name of the layer that returns to the width of the hidden states.
        width: features of the hidden states.
    """

    first: tuple[str, ...]
    last: str
    width: int


def sizes_of(layer: object) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer, or of GPT-2's transposed one.

    Example:
        >>> sizes_of(nn.Linear(4, 16))
        (4, 16)
    """
    if is_a(layer, CONV1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features


def find_mlps(block: nn.Module) -> list[Mlp]:
    """Return the MLPs of a block, in its order of layers; layers of attention are not looked at.

    Example:
        >>> block = nn.TransformerEncoderLayer(4, 2, dim_feedforward=16)
        >>> find_mlps(block)
        [Mlp(first=('linear1',), last='linear2', width=4)]
    """
    found: list[Mlp] = []
    waiting: dict[str, tuple[int, int]] = {}  # layers that widen, since the last MLP
    for name, layer in block.named_modules():
        if not name or ATTENTION.search(name) or not is_linear(layer):
            continue
        inputs, outputs = sizes_of(layer)
        first = tuple(one for one, sizes in waiting.items() if sizes == (outputs, inputs))
        if inputs > outputs and len(first) in (1, 2):
            found.append(Mlp(first, name, outputs))
            waiting.clear()
        elif outputs > inputs:
            waiting[name] = (inputs, outputs)
    return found


def choose_blocks(model: nn.Module, blocks: Blocks | None, skip: Blocks = ()) -> dict[str, nn.Module]:
    """Find the blocks of ``model`` and leave out those that ``skip`` matches.

    Raises:
        ValueError: there are no blocks; ``skip`` matches nothing, or all of them.
    """
    found = find_blocks(model, blocks)
    if not as_list(skip):
        return found
    skipped = find_skipped(model, skip)
    chosen = {name: block for name, block in found.items() if name not in skipped}
    if not chosen:
        why = f"it matches all {len(found)} blocks"
        raise ValueError(explain(f"skip={skip!r}", why, "Name fewer of them"))
    return chosen


# Nodes of the autograd graph whose output has the gradient of their first input, up to its shape.
_SUMS = ("AddBackward0", "SubBackward0", "AddcmulBackward0")
_COPIES = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0")


@dataclass(frozen=True)
class ResidualForm:
    """The way in which a block combines its input x and its update f(x).

    Args:
        rectified: whether the output is relu(x + f(x)), with x ≥ 0, as in a ResNet; otherwise it is x + f(x).
        empty: the tuple or list that the block returns, with None for each entry; None if it returns a tensor.
        unused: names of the parameters that train, and from which the output is not computed.
    """

    rectified: bool = False
    empty: Any = None
    unused: frozenset[str] = frozenset()

    def skip(self, x: Tensor) -> Any:
        """Return what the block would return if it had no update; further outputs are None."""
        if self.empty is None:
            return x
        return replace_output(self.empty, x)

    def combine(self, x: Tensor, output: Tensor, factor: Tensor | float) -> Tensor:
        """Return the output that the block would have if its update were multiplied by ``factor``.

        Where relu has cut the sum off, x + f(x) ≤ 0, so x + factor · f(x) is below zero too, for each factor of at
        least 1, and for a factor of 0 the output is x.
        """
        mixed = x + factor * (output - x)
        if self.rectified:
            return F.relu(mixed)
        return mixed


def find_hidden(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[int | str, Tensor]:
    """Return where the hidden states are among the arguments of a block, and the hidden states.

    Raises:
        TypeError: no argument is a tensor of floats.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor) and value.is_floating_point():
            return place, value
    raise TypeError("none of the block's arguments is a tensor of floats")


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with other hidden states."""
    if isinstance(place, str):
        return args, {**kwargs, place: hidden}
    return (*args[:place], hidden, *args[place + 1 :]), kwargs


def first_output(output: object) -> Tensor:
    """Return the hidden states in the output of a block: a tensor, or the first entry of a tuple or list.

    Raises:
        TypeError: it is neither.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(f"it returns a {type(output).__name__}, not a tensor or a tuple that begins with one")
    return first


def replace_output(output: object, hidden: Tensor) -> Any:
    """Return the output of a block with other hidden states."""
    if isinstance(output, Tensor):
        return hidden
    assert isinstance(output, tuple | list)
    return _with_entries(output, [hidden, *output[1:]])


def _with_entries(output: Any, entries: list[Any]) -> Any:
    if hasattr(output, "_fields"):  # a namedtuple takes its entries one by one
        return type(output)(*entries)
    return type(output)(entries)


def find_residual_form(
    module: nn.Module, name: str, technique: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ResidualForm:
    """Run a block once, without a trace, and read from the graph of its output how it uses its input.

    The class's own forward runs, also where the block is compiled or recomputed.

    Args:
        module: the block.
        name: its qualified name, for the message.
        technique: name of the technique that needs a residual block, for the message.
        args, kwargs: what it is called with.

    Raises:
        ValueError: it is not a residual block; the message says why.
    """
    try:
        return _try(module, args, kwargs)
    except (TypeError, _NotResidual) as error:
        way_out = "Leave it out with skip=, or name the residual blocks with blocks="
        what = f"{technique}: block '{name}' ({type(module).__name__}) is not residual"
        raise ValueError(explain(what, str(error), way_out)) from None


class _NotResidual(Exception):
    pass


def _try(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResidualForm:
    place, x = find_hidden(args, kwargs)
    # Hooks of its own, so that a recomputation around the block does not count what the trial saves. There is no
    # backward, so nothing is saved; a saved output would hold the graph that holds it.
    saves_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    with RecomputedForward(module).leaving_no_trace(), torch.enable_grad(), saves_nothing:
        leaf = x.detach().clone().requires_grad_()
        probe = leaf.clone()  # a leaf must not be written to
        args, kwargs = replace_hidden(args, kwargs, place, probe)
        named = dict(zip(kwargs, map(_uncached, kwargs.values()), strict=True))
        returned = _plain_forward(module)(*map(_uncached, args), **named)
        output = first_output(returned)
    if output.shape != x.shape:
        raise _NotResidual(f"its output has shape {tuple(output.shape)} for an input of shape {tuple(x.shape)}")
    node, rectified = output.grad_fn, False
    if node is not None and node.name().startswith("ReluBackward"):
        node, rectified = node.next_functions[0][0], True
    if probe._version:
        raise _NotResidual("it writes into its input in place")
    if not _adds(node, leaf):
        raise _NotResidual("its output is not a sum of its input and what it computes from it")
    if rectified and bool((probe < 0).any()):
        raise _NotResidual("it applies relu to the sum, and its input has negative values")
    reached = {id(getattr(node, "variable", None)) for node in nodes_between(returned, ())}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    unused = frozenset(name for name, parameter in trained if id(parameter) not in reached)
    return ResidualForm(rectified, _emptied(returned), unused)


def _emptied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return None
    return _with_entries(output, [None] * len(output))


def _plain_forward(module: nn.Module) -> Any:
    """Return the forward under all wrappers."""
    holder = replaced_forward(module)
    while isinstance(holder, WrappedForward) and holder.previous is not None:
        holder = holder.previous
    return holder.inner if isinstance(holder, WrappedForward) else module.forward


def _uncached(argument: object) -> Any:
    """Leave out a key-value cache, which the trial would fill."""
    if hasattr(argument, "get_seq_length"):
        return None
    return argument


def _adds(node: object, leaf: Tensor) -> bool:
    """Whether a node of the graph is a sum with ``leaf``, or a copy of it, as one of its terms."""
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if node is None:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        kind = node.name()
        following = [function for function, _ in node.next_functions]
        if kind == "AddBackward0" and node._saved_alpha == 1:
            ahead += following
        elif kind in _SUMS or kind in _COPIES:
            ahead += following[:1]
    return False
