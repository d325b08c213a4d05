"""Read the normalizers of a loss, the divisors of its sums over samples, from its autograd graph."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import ReportTable

Number = Tensor | float
Kind = Literal["mean", "sum", "quotient", "parameter", "nonlinear", "opaque"]

_MOST_TERMS = 64  # bounds graphs that use one scalar many times
_REDUCED = ("none", "mean", "sum")  # indexed by torch's value of the `reduction=` argument
# Functions of DeepSpeed and DDP around each output of a module, which only signal that its backward begins.
_AROUND_OUTPUTS = frozenset({"PreBackwardFunctionForModule", "_DDPSink"})
_BY_REDUCTION = frozenset(
    "NllLoss NllLoss2D MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Slot:
    """A factor or divisor of a term.

    Attributes:
        value: a 0-dimensional tensor on its device, or a Python number.
        divides: whether the term is divided by it.
    """

    value: Number
    divides: bool


@dataclass(frozen=True)
class Term:
    """One of the sums that a loss consists of.

    Attributes:
        kind: ``"mean"`` and ``"sum"`` are reductions over elements; ``"quotient"`` is a sum divided by a
            number; ``"parameter"`` is a parameter of one element; ``"nonlinear"`` and ``"opaque"`` cannot be split.
        slots: the factors and divisors on the path from the loss to the reduction.
        node: the node of the reduction in the autograd graph.
    """

    kind: Kind
    slots: tuple[Slot, ...]
    node: Any

    @property
    def coefficient(self) -> Number:
        """The product of the term's factors."""
        return _product(self.slots, of_divisors=False)

    @property
    def normalizer(self) -> Number:
        """The product of the term's divisors; 1 for a sum."""
        return _product(self.slots, of_divisors=True)

    @property
    def trains_nothing(self) -> bool:
        """Whether one of its factors is zero, or it is a leaf that the step made, as far as the host knows."""
        leaf = getattr(self.node, "variable", None)
        factors = [slot.value for slot in self.slots if not slot.divides]
        is_zero = any(isinstance(factor, float | int) and factor == 0 for factor in factors)
        return is_zero or (leaf is not None and not isinstance(leaf, Parameter))

    @property
    def name(self) -> str:
        """The reduction's operation, as named by autograd."""
        return name_operation(self.node.name())


@dataclass(frozen=True)
class Normalizers:
    """The terms of a loss; printed, a table.

    Attributes:
        terms: terms in the order of the graph.
        structure: equal for two losses that were computed by the same operations on scalars.
    """

    terms: tuple[Term, ...]
    structure: tuple[str, ...] = field(repr=False)

    @property
    def counts_nothing(self) -> bool:
        """Whether the graph shows no term with a gradient, as in ``0 * logits.sum()`` for a batch without targets."""
        return all(term.trains_nothing for term in self.terms)

    def __str__(self) -> str:
        table = ReportTable("", dict.fromkeys(("term", "coefficient", "normalizer", "reduction"), "name"))
        for term in self.terms:
            table.add(term.kind, _show(term.coefficient), _show(term.normalizer), term.name)
        return str(table)


@check_arguments
def read_normalizers(loss: Tensor) -> Normalizers:
    """Return the terms of a scalar loss, each with the divisor of its sum over samples.

    The graph is walked from ``loss.grad_fn`` through all nodes whose output is a scalar: sums and differences of
    scalars, their products and quotients, ``stack(...).mean()``. It ends at the reductions: ``mean``, ``sum``,
    ``cross_entropy`` (whose number of targets, or sum of class weights, autograd keeps on the loss's device) and the
    losses with a ``reduction=`` argument. Nothing is computed, and the device is not synchronized.

    One loss alone does not show whether a divisor is a constant factor or counts samples. ``MicroBatching`` decides
    this by comparing a few samples with their micro-batches: a normalizer adds up, a factor stays the same.

    Args:
        loss: a tensor with one element, before its ``backward`` has freed the graph.

    Returns:
        The terms; printed, a table. A loss without a graph has none.

    Example:
        >>> import torch
        >>> scores = torch.zeros(4, 3, requires_grad=True)
        >>> loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2, -100, 1])) + scores.square().sum() / 4
        >>> mean, penalty = read_normalizers(loss).terms
        >>> mean.kind, mean.normalizer, penalty.kind, penalty.normalizer
        ('mean', tensor(3.), 'quotient', 4)

    Source:
        The nodes' attributes are those of torch's ``derivatives.yaml``; checked with torch 2.11 to 2.13.
    """
    walk = _Walk()
    if loss.grad_fn is not None:
        walk.visit(loss.grad_fn, loss.output_nr, ())
    return Normalizers(tuple(walk.terms), tuple(walk.structure))


class _Walk:
    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.structure: list[str] = []

    def visit(self, node: object, output: int, slots: tuple[Slot, ...]) -> None:
        """Add the terms below ``node``, whose output is a scalar."""
        if len(self.terms) >= _MOST_TERMS:
            return self._end("opaque", slots, node)
        name = name_operation(node.name())
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        if name in PASSED_ON and inputs and all(shape_of(*edge).numel() == 1 for edge in inputs):
            for following, place in inputs:
                self.visit(following, place, slots)
        elif name in _AROUND_OUTPUTS:
            following, place = node.next_functions[output]
            self.visit(following, place, slots)
        elif name in ("Add", "Sub", "Rsub", "Neg"):
            self._visit_sum(name, node, slots)
        elif name in ("Mul", "Div"):
            self._visit_scaled(name, node, slots)
        elif name in ("Sum", "Mean"):
            self._visit_reduction(name, node, slots)
        else:
            self._end_at(name, node, output, slots)
        return None

    def _visit_sum(self, name: str, node: object, slots: tuple[Slot, ...]) -> None:
        self.structure.append(name)
        signs = {"Sub": (1.0, -1.0), "Rsub": (-1.0, 1.0), "Neg": (-1.0,)}.get(name, (1.0, 1.0))
        scaled = {"Add": 1, "Sub": 1, "Rsub": 0}.get(name)  # the operand that `alpha` multiplies
        for place, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            factor = signs[place]
            if place == scaled:
                factor *= float(getattr(node, "_saved_alpha", 1))
            self.visit(following, output, slots if factor == 1 else (*slots, Slot(factor, divides=False)))

    def _visit_scaled(self, name: str, node: object, slots: tuple[Slot, ...]) -> None:
        """Visit a scalar that is multiplied or divided by a constant, or by a learned factor."""
        edges = (*node.next_functions, (None, 0))[:2]  # a division by a Python number has only one edge
        held = [place for place, (following, _) in enumerate(edges) if following is not None]
        is_learned = len(held) == 2
        if is_learned:
            # A learned factor, such as exp(-s) in front of a task's loss, is the same for all micro-batches.
            held = [place for place in held if not is_of_one_parameter(edges[place][0])]
        if not held:
            return self._end("parameter", slots, node)
        if len(held) != 1 or (name == "Div" and held == [1]):
            return self._end("nonlinear", slots, node)
        factor = node._saved_self if held == [1] else node._saved_other
        self.structure += [name, "learned"] if is_learned else [name]
        following, output = edges[held[0]]
        return self.visit(following, output, (*slots, Slot(_as_scalar(_without_graph(factor)), name == "Div")))

    def _visit_reduction(self, name: str, node: object, slots: tuple[Slot, ...]) -> None:
        following, output = node.next_functions[0]
        if name == "Mean":
            slots = (*slots, Slot(_number_of_means(node), divides=True))
        if _is_scalar(following, output):
            self.structure.append(name)
            self.visit(following, output, slots)
        elif name_operation(following.name()) in ("Stack", "Cat") and _joins_scalars(following):
            self.structure.append(f"{name} of {len(following.next_functions)}")
            for one, place in following.next_functions:
                if one is not None:
                    self._visit_joined(name, one, place, slots)
        else:
            self._end("mean" if name == "Mean" else "sum", slots, node)

    def _visit_joined(self, name: str, node: object, output: int, slots: tuple[Slot, ...]) -> None:
        """Visit a scalar that is averaged or summed with others; one that is no reduction is itself such a term."""
        before = len(self.terms)
        self.visit(node, output, slots)
        for place in range(before, len(self.terms)):
            if self.terms[place].kind == "nonlinear":
                kind: Kind = "mean" if name == "Mean" else "sum"
                if kind == "sum" and any(slot.divides for slot in slots):
                    kind = "quotient"
                self.terms[place] = Term(kind, slots, node)

    def _end_at(self, name: str, node: object, output: int, slots: tuple[Slot, ...]) -> None:
        """End at a reduction of another kind, or at an operation that cannot be split."""
        if name in _BY_REDUCTION and _REDUCED[node._saved_reduction] == "mean":
            divisor = node._saved_total_weight if name.startswith("Nll") else node._saved_self.numel()
            return self._end("mean", (*slots, Slot(divisor, divides=True)), node)
        if name in _BY_REDUCTION:
            return self._end("sum", slots, node)
        if name in ("Dot", "Vdot", "Mv", "Bmm", "Mm"):  # sums of products, as a weighted sum is often written
            return self._end("sum", slots, node)
        published = getattr(node, "normalizer", None)
        if published is not None:
            kind, value = published
            if kind == "mean":
                slots = (*slots, Slot(value, divides=True))
            return self._end(kind, slots, node)
        if is_of_one_parameter(node):
            return self._end("parameter", slots, node)
        is_known = type(node).__module__ == "torch.autograd" or not hasattr(node, "saved_tensors")
        return self._end("nonlinear" if is_known and "Compiled" not in name else "opaque", slots, node)

    def _end(self, kind: Kind, slots: tuple[Slot, ...], node: object) -> None:
        if kind == "sum" and any(slot.divides for slot in slots):
            kind = "quotient"
        self.structure.append(f"{kind} {name_operation(node.name())}")
        self.terms.append(Term(kind, slots, node))


def _is_scalar(node: object, output: int) -> bool:
    """Whether this is a scalar for any number of samples: not the vector (B,) of a batch of one sample."""
    shape = shape_of(node, output)
    if len(shape) == 0 or shape.numel() != 1:
        return len(shape) == 0
    only_moved = name_operation(node.name()) in PASSED_ON
    return only_moved and _joins_scalars(node)


def _joins_scalars(node: object) -> bool:
    return all(following is None or _is_scalar(following, output) for following, output in node.next_functions)


def _number_of_means(node: object) -> int:
    if not hasattr(node, "_saved_dim"):
        return int(node._saved_self_sym_numel)
    sizes = node._saved_self_sym_sizes
    return math.prod(sizes[signed(dim)] for dim in node._saved_dim or range(len(sizes)))


def _without_graph(value: object) -> Any:
    # Only for tensors with a graph: even detach() is an operation, which a user's dispatch mode would see.
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach()
    return value


def _as_scalar(value: Any) -> Number:
    """Return the value as a Python number, unless that would wait for a device.

    Autograd stores a Python number beside a tensor as a separate tensor, which a user's dispatch mode cannot handle.
    """
    if type(value) is Tensor and value.device.type == "cpu":
        with _disable_current_modes():
            return value.item()
    if isinstance(value, Tensor) and value.ndim > 0:
        return value.reshape(())
    return value


def scalar_on(device: torch.device, number: Number, dtype: torch.dtype) -> Tensor:
    """Return a number as a 0-dimensional tensor on a device, without waiting for it.

    ``torch.tensor(number, device=device)`` copies from the host, and waits.

    Example:
        >>> scalar_on(torch.device("cpu"), 3, torch.float32)
        tensor(3.)
    """
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def multiply(product: Number, value: Number) -> Number:
    """Return the product; no operation on a device where ``product`` is the 1 that a product begins with."""
    if isinstance(product, int) and product == 1:
        return value
    return product * value


def _product(slots: Sequence[Slot], *, of_divisors: bool) -> Number:
    product: Number = 1
    for slot in slots:
        if slot.divides == of_divisors:
            product = multiply(product, slot.value)
    return product


def _show(value: Number) -> str:
    return f"{float(value):.6g}"


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


def _is_for_each(factor: Tensor, node: object) -> bool:
    """Whether a factor has a value for each element of a node's output, which may be a single one."""
    return factor.numel() > 1 or (factor.ndim > 0 and shape_of(node, 0).numel() == 1)


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
            # One number for several elements is a factor.
            if isinstance(mask, Tensor) and _is_for_each(mask, node) and not mask.requires_grad:
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
