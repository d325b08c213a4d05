"""Parallel styles of layers in a tensor group that computes with plain tensors: column- and row-parallel layers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.heads import SplitHead
from lightning_fasttrain.core.modules.select import CONV1D, has_parameters, is_a
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.strategy.tensor_parallel.layouts import REPLICATED, SUMMED, Layout, shard_of, split_intervals

_LINEAR = ("torch.nn.Linear", CONV1D)
Layouts = dict[tuple[nn.Module, str], Layout]
Communication = Callable[[Tensor, dist.ProcessGroup], Tensor]
ROWS = Layout(Shard(0))


# Why not torch's ColwiseParallel and RowwiseParallel, which a user's plan may still name? They take an nn.Linear or an
# nn.Embedding: not GPT-2's Conv1D, not three projections fused in one matrix, not the two matrices of an adapter. And
# they compute with DTensors, whose dispatch takes several times as long on the host as these hooks. As in transformers'
# own styles, a parameter is stored as a DTensor and computed with as a plain tensor. Everything else is torch's:
# parallelize_module(), placements and collectives.
class LocalStyle(ParallelStyle):
    """Base of styles whose layers take and return plain tensors."""

    known_as: ClassVar[str]

    @abstractmethod
    def layouts(self, module: nn.Module) -> Layouts:
        """Return the layout of each parameter in ``module``."""

    def communicate(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Register the hooks by which the layer communicates."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for (owner, name), layout in self.layouts(module).items():
            parameter = owner._parameters[name]
            assert parameter is not None
            owner._parameters[name] = layout.distribute(parameter, device_mesh)
        self.communicate(module, device_mesh.get_group())
        return module


class ColumnParallel(LocalStyle):
    """Each rank computes its share of a linear layer's outputs, from the same inputs.

    Args:
        parts: the number of equal parts in the outputs, of each of which a rank computes its share: 3 for a fused
            projection whose outputs are all queries, then all keys, then all values.

    Source:
        Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
    """

    known_as = "colwise"

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts
        self.enter: Communication | None = copy_to_group  # None where the inputs are gathered before

    def layouts(self, module: nn.Module) -> Layouts:
        base, down, up = layers_of(module)
        rows = Layout(shard_of(0, self.parts))
        # Few values: each rank has all of them, and computes with its rows.
        bias = Layout(Replicate(), summed=True, parts=self.parts)
        found: Layouts = {(base, "weight"): Layout(shard_of(output_axis(base), self.parts))}
        for layer in down:
            for name, _ in layer.named_parameters():
                found[layer, name] = SUMMED
        for layer in up:
            found[layer, "weight"] = rows
        for layer in (base, *up):
            if layer._parameters.get("bias") is not None:
                found[layer, "bias"] = bias
        return found

    def communicate(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        base: Any = module._modules.get("base_layer") or module
        if is_a(base, CONV1D):
            base.nf //= group.size()  # by which it shapes its outputs
        enter = self.enter
        if enter is not None:
            module.register_forward_pre_hook(lambda _, args: (copy_once(args[0], group, enter), *args[1:]))


class RowParallel(LocalStyle):
    """Each rank multiplies its share of a linear layer's inputs; the products are summed over the group.

    Source:
        Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
    """

    known_as = "rowwise"

    def __init__(self) -> None:
        super().__init__()
        self.leave: Communication = sum_over

    def layouts(self, module: nn.Module) -> Layouts:
        base, down, up = layers_of(module)
        found: Layouts = {}
        for layer in (base, *down):
            found[layer, "weight"] = Layout(shard_of(1 - output_axis(layer)))
        for layer in up:
            found[layer, "weight"] = SUMMED
        for layer in (base, *up):
            if layer._parameters.get("bias") is not None:
                found[layer, "bias"] = Layout(Replicate(), summed=True, first_only=True)
        return found

    def communicate(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        def add(_: nn.Module, args: object, output: Tensor) -> Tensor:
            return self.leave(output, group)

        module.register_forward_hook(add)


class SummedGradients(LocalStyle):
    """Each rank has all of the layer, and applies it to its own share of the heads, as a norm of queries does."""

    known_as = "summed_gradients"

    def layouts(self, module: nn.Module) -> Layouts:
        found: Layouts = {}
        for owner in module.modules():
            for name, _ in owner.named_parameters(recurse=False):
                found[owner, name] = SUMMED
        return found


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, GPT-2's ``Conv1D``, or one of both with LoRA adapters."""
    return is_a(module._modules.get("base_layer") or module, *_LINEAR)


def output_axis(layer: nn.Module) -> int:
    """Return the axis of a linear layer's weight along which its outputs are."""
    return 1 if is_a(layer, CONV1D) else 0


def widths_of(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs of a linear layer."""
    shape = layer.weight.shape
    return shape[1 - output_axis(layer)], shape[output_axis(layer)]


def layers_of(module: nn.Module) -> tuple[Any, list[nn.Module], list[nn.Module]]:
    """Return a linear layer, and the two matrices of each of its LoRA adapters.

    Raises:
        ValueError: the layer is not linear, or its adapters cannot be split.
    """
    base: Any = module._modules.get("base_layer", module)
    if not is_a(base, *_LINEAR):
        why = "column and row parallelism split the matrix of a torch.nn.Linear"
        way_out = "Leave it out of tensor_plan, and it is replicated"
        raise ValueError(explain(f"a {type(module).__name__} in a tensor-parallel plan", why, way_out))
    others = []
    for name, child in module._modules.items():
        held = child is not base and child is not None and has_parameters(child)
        if held and name not in ("lora_A", "lora_B"):
            others.append(name)
    if others or type(base.weight) is not nn.Parameter or not base.weight.is_floating_point():
        kind = f"an adapter with {', '.join(others)}" if others else f"a weight of {type(base.weight).__name__}"
        why = "it needs the complete matrix, of which a rank of a tensor group has a part"
        way_out = "Use LoRA() on an unquantised base, or tensor_parallel=1"
        raise ValueError(explain(f"tensor parallelism with {kind}", why, way_out))
    if module is base:
        return base, [], []
    return base, _adapters_in(module, "lora_A"), _adapters_in(module, "lora_B")


def _adapters_in(layer: nn.Module, name: str) -> list[nn.Module]:
    held_by = layer._modules.get(name)
    if held_by is None:
        return []
    return list(held_by.children())


class VocabularyHead(ParallelStyle):
    """Each rank has its share of the rows of a head.

    The fused loss of :class:`~lightning_fasttrain.FusedLossHead` uses them as they are; elsewhere, the logits of all
    ranks are gathered.
    """

    known_as: ClassVar[str] = "vocabulary"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        weight: Any = module.weight
        module.weight = ROWS.distribute(weight, device_mesh)
        if module.bias is not None:
            module.bias = REPLICATED.distribute(module.bias, device_mesh)
        SplitHead(module).install_below()
        return module


# Why not torch's RowwiseParallel? It takes every id outside of its rows for one of another rank, so that an id outside
# of the vocabulary gives zeros instead of an error.
class VocabularyEmbedding(LocalStyle):
    """Each rank has its share of the rows of an embedding, and looks up its own token ids; the outputs are summed."""

    known_as = "vocabulary"

    def layouts(self, module: nn.Module) -> Layouts:
        return {(module, "weight"): ROWS}

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
        # An id outside of the vocabulary stays so, for the lookup to refuse it.
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
    if can_look_up(layer):
        return VocabularyEmbedding()
    why = "expected a torch.nn.Linear, or an embedding without max_norm, sparse and scale_grad_by_freq"
    raise ValueError(
        explain(f"tensor_plan has 'vocabulary' for '{name}' ({type(layer).__name__})", why, "Leave it out")
    )


def can_look_up(module: nn.Module) -> bool:
    """Return whether an embedding gives the same outputs and gradients from a part of its rows."""
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


# Inputs of column-parallel layers → their copies, for layers that share an input, as queries, keys and values do: its
# gradient is then summed over the group once. Both are weak, since a copy is a view of its input.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def copy_once(x: Tensor, group: dist.ProcessGroup, enter: Communication) -> Any:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return enter(x, group)
    known = _copies.get(x)
    copied = known() if known is not None else None
    if copied is None:
        copied = enter(x, group)
        _copies[x] = TensorWeakRef(copied)
    return copied


# torch has autograd for gathering and for scattering sums, but not for these two, which are each other's backward.
class _Copy(torch.autograd.Function):
    """Pass the inputs of a column-parallel layer to it; sum their gradients over the group."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum the outputs of a row-parallel layer over the group; each rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Return a tensor that all ranks of a group have, whose gradient is summed over the group."""
    return _Copy.apply(x, group)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Return the sum of a tensor over a group, to each of whose ranks the gradient of the sum is passed."""
    return _Sum.apply(x, group)


def join_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks, (B, T / ranks, D) → (B, T, D); sum their gradients, and take this rank's."""
    return collectives.all_gather_tensor_autograd(x.contiguous(), 1, group)


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the outputs of a row-parallel layer, and take this rank's tokens; gather their gradients."""
    return collectives.wait_tensor(collectives.reduce_scatter_tensor_autograd(x.contiguous(), "sum", 1, group))


def gather_tokens(x: Tensor, group: dist.ProcessGroup, axis: int = 1) -> Tensor:
    """Return the tokens of all ranks of a group, (B, T / ranks, D) → (B, T, D), without a gradient."""
    return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), axis, group))
