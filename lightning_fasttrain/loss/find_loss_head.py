"""Find the linear layer that makes the logits of a loss, by the loss's autograd graph."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain._messages import explain, list_some

_PRODUCTS = ("Addmm", "Mm", "Linear", "Bmm", "Baddbmm", "Convolution", "Embedding", "MkldnnRnnLayer")
_OPAQUE = ("Compiled", "CheckpointFunction")  # one node stands for many operations


def find_loss_head(model: nn.Module, loss: Tensor) -> str:
    """Return the qualified name of the linear layer whose output goes into the loss's log-softmax.

    The graph is followed from the loss to its ``log_softmax``, which ``cross_entropy`` calls, and from there to the
    next matrix product. Views, slices, scaling, soft-capping, a bias and the casts of autocast may lie between. A head
    that is tied to an embedding is found under its own name. A head in a compiled region or under reentrant
    checkpointing has no node of its own and cannot be found; nor can a head with a sharded weight.

    Args:
        model: any module; it made ``loss`` with gradients on.
        loss: a tensor with a graph, before its ``backward``.

    Returns:
        The name, as ``FusedLossHead(head=...)`` takes it.

    Raises:
        ValueError: there is no such layer, or there are several; the message lists them, or the widest ones.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> find_loss_head(net, nn.functional.cross_entropy(net(torch.ones(2, 4)), torch.tensor([0, 2])))
        '2'

    Source:
        Ours, on the nodes of PyTorch's autograd. Checked against models whose head is known.
    """
    heads, why = _find_heads(model, loss)
    if len(heads) == 1:
        return heads[0]
    what = f"The loss of {type(model).__name__}"
    if heads:
        raise ValueError(explain(what, f"it has {len(heads)} heads: {_quote(heads)}", "Name one of them in head="))
    way_out = f"Name the head in head=; the widest linear layers are {_quote(widest_layers(model))}"
    raise ValueError(explain(what, why, way_out))


def widest_layers(model: nn.Module, most: int = 4) -> list[str]:
    """Names of the linear layers with the most outputs, the widest first."""
    widths = {name: layer.out_features for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return sorted(widths, key=lambda name: -widths[name])[:most]


def _quote(names: list[str]) -> str:
    return list_some([repr(name) for name in names], most=8) or "none"


def _find_heads(model: nn.Module, loss: Tensor) -> tuple[list[str], str]:
    """Names of the heads, in the model's order; and what is the matter if there are none."""
    if loss.grad_fn is None:
        return [], "it has no autograd graph"
    reached = list(_walk([loss.grad_fn]))
    softmaxes = [node for node in reached if _kind(node) == "LogSoftmax"]
    before = list(_walk(softmaxes))
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    products = [node for node in before if _kind(node) in _PRODUCTS]
    found = {name for product in products for name, layer in linear.items() if _multiplies(product, layer.weight)}
    if any(_kind(node).startswith(_OPAQUE) for node in [*reached, *before]):
        why = "a compiled or checkpointed part hides its graph"
    else:
        why = "no linear layer of the model made its logits" if softmaxes else "it has no log_softmax"
    return [name for name in linear if name in found], why


def _walk(start: Iterable[Any]) -> Iterator[Any]:
    """The nodes that lie before the next matrix products, and these products."""
    waiting, seen = list(start), set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if _kind(node) not in _PRODUCTS and not _kind(node).startswith(_OPAQUE):
            waiting += _inputs(node)


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def _kind(node: Any) -> str:
    return node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _multiplies(product: Any, weight: Tensor) -> bool:
    """Whether a matrix product has ``weight`` as a factor."""
    if any(_is_made_of(factor, weight) for factor in _inputs(product)):
        return True
    # A frozen weight has no node. It is saved, transposed, for the gradient of the hidden states.
    saved: Any = getattr(product, "_saved_mat2", None)
    return saved is not None and saved.data_ptr() == weight.data_ptr() and saved.numel() == weight.numel()


def _is_made_of(node: Any, weight: Tensor) -> bool:
    """Whether ``node`` is the weight, or its transpose, view or cast."""
    while _kind(node) in ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "ToCopy", "Alias"):
        inputs = _inputs(node)
        if not inputs:
            return False
        node = inputs[0]
    return getattr(node, "variable", None) is weight
