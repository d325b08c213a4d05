"""Parallel styles of layers in a tensor group that computes with plain tensors: column- and row-parallel layers."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import CONV1D, has_parameters, is_a
from lightning_fasttrain.strategy.tensor_parallel.layouts import SUMMED, Layout, shard_of

_LINEAR = ("torch.nn.Linear", CONV1D)
Layouts = dict[tuple[nn.Module, str], Layout]


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
        self.enter: Any = _Copy  # None where the inputs are gathered before

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
        def copy(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_copy_once(args[0], group, self.enter), *args[1:])

        base: Any = module._modules.get("base_layer") or module
        if is_a(base, CONV1D):
            base.nf //= group.size()  # by which it shapes its outputs
        if self.enter is not None:
            module.register_forward_pre_hook(copy)


class RowParallel(LocalStyle):
    """Each rank multiplies its share of a linear layer's inputs; the products are summed over the group.

    Source:
        Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
    """

    known_as = "rowwise"

    def __init__(self) -> None:
        super().__init__()
        self.leave: Any = _Sum

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
        def add(_: nn.Module, args: object, output: Tensor) -> Any:
            return self.leave.apply(output, group)

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


# Inputs of column-parallel layers → their copies, for layers that share an input, as queries, keys and values do: its
# gradient is then summed over the group once. Both are weak, since a copy is a view of its input.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _copy_once(x: Tensor, group: dist.ProcessGroup, enter: object) -> Any:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return enter.apply(x, group)
    known = _copies.get(x)
    copied = known() if known is not None else None
    if copied is None:
        copied = enter.apply(x, group)
        _copies[x] = TensorWeakRef(copied)
    return copied


class _Copy(torch.autograd.Function):
    """Pass the inputs of a column-parallel layer on; sum their gradients over the group."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum the outputs of a row-parallel layer over the group; pass their gradients on."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """Gather the tokens of all ranks, (B, T / ranks, D) → (B, T, D); sum their gradients, and take this rank's."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_and_scatter(grads[0], ctx.group), None


class ScatterSum(torch.autograd.Function):
    """Sum the outputs of a row-parallel layer, and take this rank's tokens; gather their gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_and_scatter(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grads[0], ctx.group), None


def gather_tokens(x: Tensor, group: dist.ProcessGroup, axis: int = 1) -> Tensor:
    """Return the tokens of all ranks of a group, (B, T / ranks, D) → (B, T, D), or along another axis."""
    return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), axis, group))


def _sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), "sum", 1, group))


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Return the sum of a tensor over a group, to each of whose ranks the gradient of the sum is passed on."""
    return _Sum.apply(x, group)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))
