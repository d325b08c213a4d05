"""Parallel styles that split a vocabulary over a tensor group: of a head, and of the embedding that is tied to it."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.heads import SplitHead
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrappers_on
from lightning_fasttrain.loss.fused_loss_head import FusedHead
from lightning_fasttrain.strategy.tensor_parallel.layouts import REPLICATED, Layout, split_intervals
from lightning_fasttrain.strategy.tensor_parallel.styles import Layouts, LocalStyle, sum_over

_ROWS = Layout(Shard(0))


class VocabularyHead(ParallelStyle):
    """Each rank has its share of the rows of a head.

    The fused loss of :class:`~lightning_fasttrain.FusedLossHead` uses them as they are; elsewhere, the logits of all
    ranks are gathered.
    """

    known_as: ClassVar[str] = "vocabulary"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        weight: Any = module.weight
        module.weight = _ROWS.distribute(weight, device_mesh)
        if module.bias is not None:
            module.bias = REPLICATED.distribute(module.bias, device_mesh)
        SplitHead(module).install_below()
        return module


class VocabularyEmbedding(LocalStyle):
    """Each rank has its share of the rows of an embedding, and looks up its own token ids; the outputs are summed."""

    known_as = "vocabulary"

    def layouts(self, module: nn.Module) -> Layouts:
        return {(module, "weight"): _ROWS}

    def communicate(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        assert isinstance(module, nn.Embedding)
        SplitEmbedding(module, group).install()


class SplitEmbedding(WrappedForward):
    """Looks up the token ids of one rank's rows, and sums the outputs of all ranks.

    Args:
        module: the embedding, whose weight has this rank's rows during a forward.
        group: the ranks that share it.
    """

    def __init__(self, module: nn.Embedding, group: dist.ProcessGroup) -> None:
        super().__init__(module)
        ((self.start, self.end),) = split_intervals(module.weight.shape, Shard(0), group.rank(), group.size())[0]
        self.group, self.classes = group, module.num_embeddings
        if module.padding_idx is not None:
            padding = module.padding_idx - self.start
            module.padding_idx = padding if 0 <= padding < self.end - self.start else None

    def __call__(self, input: Tensor) -> Any:
        ids = input
        mine = (ids >= self.start) & (ids < self.end)
        # What is no token id stays out of range.
        of_others = torch.where((ids >= 0) & (ids < self.classes), 0, ids)
        found = self.inner(torch.where(mine, ids - self.start, of_others))
        return sum_over(found.masked_fill(~mine.unsqueeze(-1), 0.0), self.group)


def vocabulary_style(name: str, layer: nn.Module) -> ParallelStyle:
    """Return the style by which a layer's vocabulary is split.

    Raises:
        ValueError: it is neither a linear layer nor an embedding that gives the same from a part of its rows.
    """
    if type(layer) is nn.Linear:
        return VocabularyHead()
    if _can_look_up(layer):
        return VocabularyEmbedding()
    why = "expected a torch.nn.Linear, or an embedding without max_norm, sparse and scale_grad_by_freq"
    raise ValueError(
        explain(f"tensor_plan has 'vocabulary' for '{name}' ({type(layer).__name__})", why, "Leave it out")
    )


def split_vocabulary_of(model: nn.Module, heads: Iterable[nn.Module], ranks: int) -> dict[str, ParallelStyle]:
    """Return the styles by which the vocabularies of ``heads`` are split, with the embeddings that are tied to them.

    A head whose weight is used by anything else stays replicated, which is reported.

    Args:
        model: the model that contains them, before it is sharded.
        heads: linear layers.
        ranks: number of ranks in a tensor group.
    """
    chosen = set(heads)
    plan: dict[str, ParallelStyle] = {}
    weights: dict[Any, None] = {head.weight: None for head in heads}
    for weight in weights:
        sharing = {name: module for name, module in model.named_modules() if _owns(module, weight)}
        others = [name for name, module in sharing.items() if module not in chosen and not _can_look_up(module)]
        if others or not _has_rows_for_all(weight, ranks):
            why = f"'{others[0]}' uses its weight too" if others else f"its {len(weight)} classes are too few"
            note_once(f"tensor parallelism: the head is replicated, since {why}")
            continue
        for name, module in sharing.items():
            plan[name] = VocabularyHead() if module in chosen else VocabularyEmbedding()
    return plan


def _has_rows_for_all(weight: Tensor, ranks: int) -> bool:
    return -(-len(weight) // ranks) * (ranks - 1) < len(weight)


def _owns(module: nn.Module, weight: object) -> bool:
    return any(parameter is weight for parameter in module._parameters.values())


def _can_look_up(module: nn.Module) -> bool:
    """Return whether an embedding gives the same outputs and gradients from a part of its rows."""
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def fused_heads(model: nn.Module) -> list[nn.Module]:
    """Return the heads that :class:`~lightning_fasttrain.FusedLossHead` knows, and whose loss takes a split weight."""
    found = []
    for module in model.modules():
        for head in wrappers_on(module, FusedHead):
            if head.search is None and head.options["backend"] in ("auto", "chunked"):
                found.append(module)
    return found
