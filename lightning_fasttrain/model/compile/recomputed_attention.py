"""Attention without dropout is recomputed in compiled code without saving and restoring a random state."""

import functools
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_KINDS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

_LIBRARY = torch.library.Library("lightning_fasttrain", "FRAGMENT")
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class RecomputeWithoutRandomState(CustomGraphPass):
    """A pass over the joint graph of forward and backward: attention that draws nothing is not marked as random.

    PyTorch marks attention as random whatever its dropout is. A random operation that is recomputed in the backward
    runs inside a Python function that saves the generator's state, or restores it, which took a quarter of the host's
    time of a step of a small GPT. Each one without dropout is replaced by an operation of the same schema that calls
    it and is not marked.
    """

    def __init__(self) -> None:
        self.unmarked = _define_unmarked()  # code that is loaded from the compiler's cache calls them without this pass

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.meta.get("recompute") in _RECOMPUTED and node.target in self.unmarked and draws_nothing(node):
                node.target = self.unmarked[node.target]

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def draws_nothing(node: fx.Node) -> bool:
    """Whether the node, a kind of attention, has a dropout of exactly zero."""
    operation: Any = node.target
    arguments = operation._schema.arguments
    at = next(i for i, argument in enumerate(arguments) if argument.name == "dropout_p")
    dropout: Any = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", arguments[at].default_value)
    return dropout == 0.0


@functools.cache
def _define_unmarked() -> dict[Any, torch._ops.OpOverload]:
    """Return each kind of attention → an operation of the same schema that calls it, once defined for the process."""
    found = {}
    for kind in _KINDS:
        marked = getattr(torch.ops.aten, kind).default
        name = kind.lstrip("_")
        _LIBRARY.define(str(marked._schema).replace(f"aten::{kind}", name, 1), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, marked, "CompositeExplicitAutograd")  # also called with fake tensors, for shapes
        found[marked] = getattr(torch.ops.lightning_fasttrain, name).default
    return found
