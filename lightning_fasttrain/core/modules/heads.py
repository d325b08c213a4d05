"""The layers of a model that make its predictions, also where their vocabulary is split over a group of ranks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.select import (
    Sharing,
    base_of,
    is_inside,
    is_linear,
    is_part_of,
    layers_of,
    list_names_above,
    modules_of,
)
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, output_embeddings_of


@dataclass(frozen=True)
class VocabularyShard:
    """The classes of a head whose logits one rank computes.

    Args:
        group: the ranks that share the head.
        start: the first class of this rank.
        end: the class after its last one.
        largest: the largest number of classes on a rank.
        classes: the number of all classes, V.
    """

    group: dist.ProcessGroup
    start: int
    end: int
    largest: int
    classes: int

    @classmethod
    def of(cls, weight: DTensor) -> "VocabularyShard":
        """Return this rank's classes of a weight (V, D) that is split by rows over a mesh of one dimension."""
        mesh, classes = weight.device_mesh, weight.shape[0]
        largest = -(-classes // mesh.size())  # as torch chunks
        start = min(mesh.get_local_rank() * largest, classes)
        return cls(mesh.get_group(), start, min(start + largest, classes), largest, classes)

    def take(self, values: Tensor) -> Tensor:
        """Return this rank's share of values per class, (V, ...)."""
        return values[self.start : self.end]

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are among this rank's classes, and their places; 0 for the others."""
        mine = (targets >= self.start) & (targets < self.end)
        return mine, torch.where(mine, targets - self.start, 0)

    def logsumexp(self, mine: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials of all classes, from that of this rank's."""
        largest = self._reduce(mine, "max")
        return largest + self._reduce((mine - largest).exp(), "sum").log()

    def sum(self, *mine: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of tensors of one shape over the group, in one reduction."""
        return self._reduce(torch.stack(mine), "sum").unbind()

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(values.contiguous(), how, self.group))


def is_split_by_rows(weight: object) -> TypeGuard[DTensor]:
    """Return whether a weight is a DTensor whose rows are split over a mesh of one dimension."""
    return isinstance(weight, DTensor) and weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0)


def on_all_ranks(values: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks of a mesh have as a DTensor, whose gradient is summed over them."""
    if isinstance(values, DTensor):
        return values
    return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


def share_of_gradient(values: DTensor) -> Tensor:
    """Return the plain values of a replicated tensor; each rank will have a part of its gradient."""
    return values.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SplitHead(WrappedForward):
    """Computes the logits of all classes where the rows of a linear layer are split over a group of ranks.

    Its weight and bias are DTensors. Each rank computes the logits of its own classes, and they are gathered. A loss
    that uses the split weight itself, as :func:`~lightning_fasttrain.linear_cross_entropy`, gathers none.
    """

    module: nn.Linear

    def __call__(self, input: Tensor, *args: object) -> Tensor:
        weight: Any = self.module.weight
        logits: Any = F.linear(on_all_ranks(input, weight.device_mesh), weight, self.module.bias)
        return logits.redistribute(placements=[Replicate()]).to_local()


@check_arguments
def find_heads(model: nn.Module) -> list[str]:
    """Names of the layers that turn features into predictions, which "all-linear" and quantisation leave out.

    These are what Hugging Face's models return from ``get_output_embeddings()``; linear layers that share their weight
    with an embedding; outside of the model's repeated blocks, those with one output for each row of its largest
    embedding, wherever they are listed; and those that come after the last block. In a model without such blocks it is
    the last linear layer, unless that is the only one.

    Example:
        >>> find_heads(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        ['2']
    """
    layers = layers_of(model)
    linear = [name for name, layer in layers.items() if is_linear(layer)]
    places = dict(zip(layers, range(len(layers)), strict=True))
    blocks = _blocks_of(model)
    outside = _outside(linear, blocks)
    # 0 without blocks: all layers come after it then, and the line below leaves the last one.
    last = max(map(places.__getitem__, set(layers).difference(_outside(layers, blocks))), default=0)
    after = [name for name in linear if places[name] > last]
    # So many layers that come after the blocks are no head but another half of the model, whose last layer is one.
    if 4 * len(after) > len(linear):
        after = after[-1:]
    heads = {
        *_find_told(model, linear, layers),
        *_tied_names(model, linear),
        *_of_vocabulary(model, outside, layers),
        *after,
    }
    # The only layer that could be adapted or quantised is not left out: nothing would be done.
    if len(linear) == 1 and not blocks:
        return []
    return sorted(heads, key=places.__getitem__)


def outside_blocks(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Keep the names outside of the model's repeated blocks; all of them where it has no blocks of layers."""
    return _outside(names, _blocks_of(model))


def _outside(names: Iterable[str], blocks: Collection[str]) -> list[str]:
    return [name for name in names if not is_inside(name, blocks)]


def heads_beside(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Names of the heads that are neither one of ``blocks`` nor in one."""
    return [head for head in _outside(find_heads(model), blocks) if head not in blocks]


def warn_of_blocks_beyond(model: nn.Module, blocks: Collection[str], named: Collection[str], what: str) -> None:
    """Say so where blocks of another kind come after the last of ``blocks``, and would count as head."""
    place_of = {name: place for place, name in enumerate(dict(model.named_modules()))}
    last = max((place_of[name] for name in blocks if name in place_of), default=0)
    taken = {*blocks, *named}
    beyond: list[str] = []
    for name in _blocks_of(model):
        holds_taken = any(is_inside(one, [name]) for one in blocks)
        if place_of[name] > last and not (is_part_of(name, taken) or holds_taken):
            beyond.append(name)
    if beyond:
        why = f"{list_some(beyond)} come after the blocks that are named, and would count as head"
        warn(explain(what, why, "Name these blocks too, or leave blocks= out"))


def _blocks_of(model: nn.Module) -> list[str]:
    try:
        blocks = find_blocks(model)
    except ValueError:
        return []
    return [name for name, block in blocks.items() if not is_linear(block)]


def _find_told(model: nn.Module, linear: list[str], layers: dict[str, nn.Module]) -> list[str]:
    named = list(map(base_of, output_embeddings_of(model)))
    return [name for name in linear if layers[name] in named]


def _tied_names(model: nn.Module, linear: list[str]) -> list[str]:
    owners: set[str] = set()
    for key in Sharing(model).outside(list(modules_of(model, nn.Embedding))):
        owners.update(list_names_above(key))
    return [name for name in linear if name in owners]


def _of_vocabulary(model: nn.Module, outside: list[str], layers: dict[str, nn.Module]) -> list[str]:
    vocabulary = max(modules_of(model, nn.Embedding), key=lambda table: table.num_embeddings, default=None)
    if vocabulary is None or vocabulary.num_embeddings <= vocabulary.embedding_dim:  # a table of positions, say
        return []
    return [name for name in outside if getattr(layers[name], "out_features", 0) == vocabulary.num_embeddings]
