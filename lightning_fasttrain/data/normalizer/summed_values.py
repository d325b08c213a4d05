"""Ask the autograd graph of a loss which values a reduction sums, and whether they are parameters."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fasttrain.data.normalizer.micro_batch_weights import Number

# Nodes that pass on their only element unchanged. `nan_to_num` and `where` pass on one branch of a finite loss.
PASSED_ON = frozenset(
    """Alias Clone Expand NanToNum Permute ReshapeAlias Squeeze T ToCopy Transpose UnsafeView Unsqueeze View
    Where""".split()  # noqa: SIM905
)
_OF_ONE_PARAMETER = frozenset(
    "Exp Log Log1P Neg Mul Div Add Sub Pow Sigmoid Softplus Select Clamp Reciprocal".split()  # noqa: SIM905
)


_MOST_OF_ONE = 16  # nodes of a learned factor; more are taken for a model


@functools.cache
def name_operation(name: str) -> str:
    """Return the operation in a node's name: "Mul" of "MulBackward1".

    Example:
        >>> name_operation("NllLoss2DBackward0"), name_operation("torch::autograd::AccumulateGrad")
        ('NllLoss2D', 'AccumulateGrad')
    """
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def shape_of(node: object, output: int) -> torch.Size:
    """Return the shape of an output of a node's operation; outputs are the inputs of its backward."""
    metadata = node._input_metadata
    if output >= len(metadata):
        return torch.Size([0])
    return torch.Size(metadata[output].shape)


def walk_graph(node: object) -> Iterator[Any]:
    """Yield the nodes of an autograd graph that lead to ``node``, itself first, each once."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def signed(value: int) -> int:
    """Return a number with its sign restored: autograd stores negative ones modulo 2**64."""
    if value < 2**63:
        return value
    return value - 2**64


_LOOKED_THROUGH = frozenset("Neg Sum View UnsafeView ReshapeAlias ToCopy Unsqueeze Squeeze Expand".split())  # noqa: SIM905


def count_summed(node: object) -> Number | None:
    """Return the number of elements that a sum is over, or the sum of their weights, if its graph shows a mask.

    Args:
        node: the node of the reduction.

    Returns:
        The sum of the mask or weights that multiplied the elements; the number of elements that were selected, or that
        were not filled or ignored; None where the graph shows none of these.

    Example:
        >>> mask = torch.tensor([1.0, 0.0, 1.0])
        >>> count_summed((torch.ones(3, requires_grad=True) * mask).sum().grad_fn)
        tensor(2.)
    """
    for _ in range(8):
        operation = name_operation(node.name())
        if operation in ("Index", "MaskedSelect"):
            return shape_of(node, 0).numel()
        if operation == "Mul":
            mask = node._saved_self if node._saved_other is None else node._saved_other
            if isinstance(mask, Tensor) and mask.numel() > 1 and not mask.requires_grad:
                return mask.sum()
        if operation == "MaskedFill":
            return (~node._saved_mask).sum()
        if operation == "Where":
            return node._saved_condition.sum()
        if operation in ("NllLoss", "NllLoss2D"):
            return (node._saved_target != signed(node._saved_ignore_index)).sum()
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if len(following) != 1 or operation not in _LOOKED_THROUGH | {"Mul", "Mean"}:
            return None
        node = following[0]
    return None


def is_of_one_parameter(node: object) -> bool:
    """Whether a scalar is computed from parameters alone, element by element, independently of the samples."""
    for seen, one in enumerate(walk_graph(node)):
        is_parameter = getattr(one, "variable", None) is not None
        if seen >= _MOST_OF_ONE or not (is_parameter or name_operation(one.name()) in _OF_ONE_PARAMETER | PASSED_ON):
            return False
    return True


# Operations that select entries by indices that come with the samples.
_BY_INDEX = frozenset("Embedding EmbeddingBag Index IndexSelect Gather Take TakeAlongDim MaskedSelect".split())  # noqa: SIM905
_WITH_CONSTANTS = frozenset("Add Sub Rsub Div Pow Clamp".split())  # noqa: SIM905


def is_of_parameters(node: object) -> bool:
    """Whether a term is computed from parameters and constants alone, such as a penalty on weights.

    Args:
        node: the node of the reduction. Anything that may depend on samples counts as a sample.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> penalty, product = (weight - 1).square().sum(), (torch.ones(3, 2) @ weight).sum()
        >>> is_of_parameters(penalty.grad_fn), is_of_parameters(product.grad_fn)
        (True, False)
    """
    for one in walk_graph(node):
        name, leaf = name_operation(one.name()), getattr(one, "variable", None)
        if name in _BY_INDEX or not (leaf is None or isinstance(leaf, Parameter)):
            return False
        # Scalars, constants and the loader's tensors have no graph.
        has_others = any(following is None for following, _ in one.next_functions)
        if has_others and not _is_with_constants(name, one):
            return False
    return True


def _is_with_constants(name: str, node: object) -> bool:
    if name != "Mul":
        return name in _WITH_CONSTANTS
    (first, place), (second, other_place) = node.next_functions
    if first is None:
        constant, held = node._saved_self, shape_of(second, other_place)
    else:
        constant, held = node._saved_other, shape_of(first, place)
    return not isinstance(constant, Tensor) or constant.ndim == 0 or constant.shape == held
