"""Application of a tensor-parallel plan to a model, before its parameters are sharded over the data ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import modules_inside
from lightning_fasttrain.core.modules.wrapped_forward import has_dropout
from lightning_fasttrain.strategy.tensor_parallel.layouts import REPLICATED, SUMMED, Layout
from lightning_fasttrain.strategy.tensor_parallel.plan import (
    HEADS,
    KEY_VALUE_HEADS,
    blocks_or_model,
    common_divisors,
    is_attention,
)
from lightning_fasttrain.strategy.tensor_parallel.sequence_parallel import divide_tokens_, plan_on_shares
from lightning_fasttrain.strategy.tensor_parallel.styles import (
    ColumnParallel,
    Layouts,
    LocalStyle,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
)

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]
# Widths of all heads together, in attention modules.
_WIDTHS = ("all_head_size", "inner_dim", "attn_dim", "split_size")


def parallelize_(
    model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], sequence_parallel: bool = False
) -> Layouts:
    """Split the layers of ``plan`` over the ranks of a tensor group in place; replicate all other parameters.

    Every parameter becomes a DTensor on ``mesh``, so that norms and optimizers see one kind. ``state_dict`` keys and
    global shapes do not change. There is no communication: each rank takes its part of its own values.

    Args:
        model: the model, with the same values on all ranks of the group, or on the meta device.
        mesh: device mesh of one dimension, the tensor group.
        plan: module name → style, as from :func:`plan_tensor_parallel`.
        sequence_parallel: whether each rank has its share of the tokens of blocks outside of the split layers.

    Raises:
        ValueError: a layer of the plan shares parameters with others, or a block may need all tokens.

    Returns:
        (module, name of its parameter) → layout, for :func:`compute_locally_`. Layers of torch's own styles, and heads
        whose vocabulary is split, compute with DTensors, and are left out.
    """
    layouts: Layouts = {}
    on_shares: dict[str, nn.Module] = {}
    if sequence_parallel:
        on_shares = blocks_or_model(model)
        plan = plan_on_shares(model, on_shares, plan)
    places = _places(model)
    planned = list(map(model.get_submodule, plan))
    kinds = (VocabularyHead, VocabularyEmbedding)
    of_vocabulary = [model.get_submodule(name) for name, style in plan.items() if isinstance(style, kinds)]
    for name, layer in zip(plan, planned, strict=True):
        _refuse_tied(name, layer, places, of_vocabulary if layer in of_vocabulary else [layer])
    if sequence_parallel:
        divide_tokens_(model, on_shares, mesh.get_group())
    _compute_on_a_part_(model, planned, mesh.size())
    for layer, style in zip(planned, plan.values(), strict=True):
        if isinstance(style, LocalStyle):
            layouts.update(style.layouts(layer))
        parallelize_module(layer, mesh, style)
    blocks = list(on_shares.values())
    if has_dropout(model):
        _drop_differently_(planned, plan, blocks, mesh)
    layouts.update(_replicate_others_(places, mesh, blocks))
    return layouts


def _replicate_others_(places: Places, mesh: DeviceMesh, on_shares: list[nn.Module]) -> Layouts:
    """Replicate the parameters that no layer of the plan has split; those that are tied stay tied.

    Args:
        places: parameter → the modules that have it, with its names.
        mesh: the tensor group.
        on_shares: modules that compute on a share of the tokens, so that the gradients of ranks are parts.
    """
    inside = modules_inside(on_shares)
    layouts: Layouts = {}
    for original, owners in places.items():
        if original.ndim == 0:
            continue
        present = [owner._parameters[key] for owner, key in owners]
        split = [parameter for parameter in present if isinstance(parameter, DTensor)]
        tied: Any = split[0] if split else REPLICATED.distribute(original, mesh)
        for owner, key in owners:
            owner._parameters[key] = tied
            if not split:
                layouts[owner, key] = SUMMED if owner in inside else REPLICATED
    return layouts


def _drop_differently_(
    planned: list[nn.Module], plan: dict[str, ParallelStyle], on_shares: list[nn.Module], mesh: DeviceMesh
) -> None:
    """Have dropout on the shares of single ranks draw other masks on each rank."""
    randomness = SplitRandomness(mesh.get_local_rank())
    if on_shares:
        randomness.inside_(on_shares)
        return
    of_kind: dict[type, list[nn.Module]] = {ColumnParallel: [], RowParallel: []}
    for layer, style in zip(planned, plan.values(), strict=True):
        if type(style) in of_kind:
            of_kind[type(style)].append(layer)
    randomness.between_(of_kind[ColumnParallel], of_kind[RowParallel])


def _compute_on_a_part_(model: nn.Module, planned: list[nn.Module], ranks: int) -> None:
    """Tell modules around the layers of a plan about it: attention its number of heads, and torch's encoders."""
    for module in model.modules():
        if is_attention(module) and not modules_inside([module]).isdisjoint(planned):
            divide_heads_(module, ranks)
        # Their fused path would use a part of the weights as if it were all.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _places(model: nn.Module) -> Places:
    places: Places = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, key))
    return places


def _refuse_tied(name: str, layer: nn.Module, places: Places, split: list[nn.Module]) -> None:
    """Refuse a layer that shares a parameter with another one than those that split it in the same way."""
    inside = modules_inside(split)
    for parameter in layer.parameters():
        if any(owner not in inside for owner, _ in places[parameter]):
            why = "it shares a parameter with another layer, which needs the complete one"
            raise ValueError(explain(f"tensor parallelism of '{name}'", why, "Leave it out of tensor_plan"))


def divide_heads_(attention: object, ranks: int) -> None:
    """Set the numbers of heads that an attention module states to those of one rank."""
    for name in (*HEADS, *KEY_VALUE_HEADS, *_WIDTHS):
        count = vars(attention).get(name)
        if type(count) is int and count % ranks == 0:
            setattr(attention, name, count // ranks)


def shard_axis(parameter: nn.Parameter, data_ranks: int) -> Shard | None:
    """Return the axis along which FSDP2 shards a parameter: another one than the tensor group; None for the first.

    Raises:
        ValueError: that axis cannot be divided by the number of data ranks.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim < 2:
        return None
    splits_rows = getattr(parameter.placements[0], "dim", None) == 0
    if splits_rows and parameter.shape[1] % data_ranks:
        what = (
            f"a weight of shape {tuple(parameter.shape)} that a tensor group splits by rows, over {data_ranks} shards"
        )
        why = "each shard has an equal part of its columns"
        way_out = f"Use a number of data ranks among {common_divisors([parameter.shape[1]])}, such as by replicas="
        raise ValueError(explain(what, why, way_out))
    return Shard(1) if splits_rows else None


def compute_locally_(model: nn.Module, layouts: Layouts, mesh: DeviceMesh) -> None:
    """Have the layers of a sharded model compute with plain tensors, which FSDP2 sets whenever it gathers.

    Args:
        model: the model, parallelized and then sharded by ``fully_shard``.
        layouts: the result of :func:`parallelize_`.
        mesh: the tensor group.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        setters = [replace_gathered_(parameter, layouts, mesh) for parameter in _sharded_parameters(module)]
        # After FSDP2's own hook. Autograd runs what was created last first, and FSDP2 reduces the gradients of the
        # group in a node that its hook creates: they must have arrived by then.
        module.register_forward_pre_hook(_call_each(setters))


def _call_each(functions: list[Callable[[], None]]) -> Callable[..., None]:
    def call(*_: object) -> None:
        for function in functions:
            function()

    return call


def _sharded_parameters(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def replace_gathered_(parameter: Any, layouts: Layouts, mesh: DeviceMesh) -> Callable[[], None]:
    """Replace a parameter of FSDP2's by the plain tensor that this rank computes with, while it is gathered.

    Where it is tied to a layer that computes with DTensors, as a head is, that one keeps the DTensor.

    Returns:
        A function that replaces it now. FSDP2 calls it too when it gathers, since blocks are recomputed after FSDP2 has
        gathered them for the backward.
    """
    info = parameter._module_info
    owners, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
    places: dict[Layout, list[tuple[nn.Module, str]]] = {}
    for place in zip(owners, names, strict=True):
        if place in layouts:
            places.setdefault(layouts[place], []).append(place)
    set_on_modules = parameter._setattr_on_modules

    def set_local() -> None:
        for layout, held_at in places.items():
            local: Any = layout.local(parameter._unsharded_param, mesh)
            for owner, name in held_at:
                owner._parameters[name] = local  # not an nn.Parameter, so that its gradient reaches FSDP2's

    def set_value(value: Tensor) -> None:
        set_on_modules(value)
        if value is getattr(parameter, "_unsharded_param", None):
            set_local()

    parameter._setattr_on_modules = set_value
    return set_local


# Why not torch's own tracker (torch.distributed.tensor.random)? It acts on operations on DTensors of a GPU, and split
# layers compute with plain tensors, on a CPU too.
class SplitRandomness:
    """Switches the random generator between the state that a group shares and one of this rank.

    Activations that all ranks have must be dropped by the same mask, and those of single ranks by different ones. The
    state of a rank is seeded by a number that the shared one draws, so that a forward that is recomputed from the
    same shared state has the same masks, and that the shared state is all that a checkpoint must contain.

    Args:
        rank: in the tensor group.

    Source:
        The two streams of Megatron-LM's ``CudaRNGStatesTracker``; here the second is derived from the first.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._shared: tuple[torch.Generator, Tensor, int] | None = None

    def enter(self, device: torch.device) -> None:
        """Draw from this rank's own state from now on; compiled code draws from the shared one."""
        if torch.compiler.is_compiling():
            return
        self.leave()
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        generator = _generator_of(device)
        self._shared = generator, generator.get_state(), seed
        generator.manual_seed(seed)

    def leave(self) -> None:
        """Draw from the shared state again."""
        if torch.compiler.is_compiling() or self._shared is None:
            return
        generator, state, seed = self._shared
        self._shared = None
        # An error, or a recomputation that ends early, may have left the rank's state by itself.
        if generator.initial_seed() == seed:
            generator.set_state(state)

    def between_(self, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        """Draw from this rank's state between column- and row-parallel layers, and from the shared one inside them."""
        for layer in (*columns, *rows):
            layer.register_forward_pre_hook(lambda *_: self.leave())
        for layer in columns:
            layer.register_forward_hook(lambda layer, _, output: self._enter_if_training(layer, output))

    def inside_(self, blocks: list[nn.Module]) -> None:
        """Draw from this rank's state inside blocks."""

        def enter(block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            self._enter_if_training(block, *args, *kwargs.values())

        for block in blocks:
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(lambda *_: self.leave())

    def _enter_if_training(self, module: nn.Module, *values: object) -> None:
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        if module.training and device is not None:
            self.enter(device)


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
