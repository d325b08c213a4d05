"""Sharding of a model's blocks, and of the remaining parameters, over a device mesh with ``fully_shard`` (FSDP2)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.messages import explain, list_some, note_once
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.parameters import bytes_of, count_uses, parameters_of
from lightning_fasttrain.core.modules.select import has_parameters, modules_inside
from lightning_fasttrain.finetune.quantized.quantized_layer import in_8_bits, is_quantized, settle_4bit_
from lightning_fasttrain.finetune.quantized.quantized_tensor import keep_quantized_
from lightning_fasttrain.memory.predict_memory import PRECISIONS
from lightning_fasttrain.strategy.tensor_parallel.parallelize import shard_axis

REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OFFLOADS = ("cpu",)
# Optimizers that fail on shards at their first step (tested with torch 2.13), and the reason. By class name, since
# other packages have optimizers of these names, such as transformers' Adafactor, which fail in the same way.
_UNFIT = {
    "Adafactor": "torch cannot square the norms of sharded rows in place",
    "Rprop": "torch cannot assign to selected elements of shards",
    "LBFGS": "torch cannot concatenate shards of unequal size",
}
# Weak references, kept here instead of as attributes of the user's modules.
_not_reducing: WeakSet[nn.Module] = WeakSet()


@check_arguments
def precision_policy(precision: str = "32-true", reduce_dtype: str | None = None) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed-precision policy for a precision of Lightning's.

    ===========  ==================  =================  ====================
    precision    shards, optimizer   gathered as        gradients reduced in
    ===========  ==================  =================  ====================
    32-true      float32             float32            float32
    bf16-mixed   float32 (masters)   bfloat16           float32
    bf16-true    bfloat16            bfloat16           float32
    ===========  ==================  =================  ====================

    Inputs of blocks are not cast: under bf16-mixed, autocast does so, as without sharding. Gathering in bfloat16
    differs from autocast under DDP in one respect: matrix products take the same values, but embeddings are output in
    bfloat16, and so is the sum along the residual connections. ``float32_residual=True`` of :func:`shard_blocks_` and
    of the strategies avoids that.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        reduce_dtype: ``"float32"``, or ``"bfloat16"`` for half the bytes; None is float32.

    Returns:
        The policy.

    Raises:
        ValueError: the precision or dtype is not one of these.

    Example:
        >>> precision_policy("bf16-mixed").param_dtype
        torch.bfloat16
    """
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        why = f"float16 needs loss scaling, whose overflows a rank cannot see in its shards; known are {known}"
        raise ValueError(explain(f"precision={precision!r} with FSDP2", why, "Use precision='bf16-mixed'"))
    reduce = REDUCE_DTYPES[one_of("reduce_dtype", reduce_dtype or "float32", tuple(REDUCE_DTYPES))]
    gathered = torch.bfloat16 if precision == "bf16-mixed" else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce, cast_forward_inputs=False)


@check_arguments
def shard_blocks_(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
    offload: str | None = None,
    blocks: Blocks | None = None,
    float32_residual: bool = False,
) -> list[str]:
    """Shard ``model`` over ``mesh`` in place: each block gathers its parameters when it runs, the root the rest.

    Call it after all other changes to the model, and before the optimizer is made. Parameters become ``DTensor``,
    sharded along their first dimension; ``state_dict`` keys do not change. Frozen parameters and adapters are sharded
    like the others, and so are 4-bit weights, including those of experts: as bytes, gathered without a cast. Their
    quantization constants (with double quantisation a thirtieth of the weights) are replicated on every rank, like
    buffers. Parameters without a dimension are replicated too, and their gradients averaged. Also replicated are
    parameters that are quantised in another way, and 4-bit weights that would be cast: those stored in a floating-point
    dtype other than the policy's, and on torch 2.11 under bf16-mixed all that are not stored in bfloat16. A block that
    shares a parameter with the rest of the model is left to the root, so that tied weights stay tied. A model without
    repeated blocks is one group. A layer that trains in another dtype than most of the model, such as float64, is a
    group of its own, gathered and reduced in its dtype. Sharding cannot be undone, and a sharded model cannot be
    copied. Sharding a second time does nothing.

    Args:
        model: any module.
        mesh: device mesh of one dimension, or of two (replicate, shard) for hybrid sharding. Parameters that are split
            over a tensor group already, as DTensors on another dimension of the same mesh, are split further.
        policy: mixed-precision policy, as from :func:`precision_policy`; None computes in the parameters' own dtype.
        reshard_after_forward: True frees a block's gathered parameters after its forward and gathers them again in
            backward; False keeps them; a number reshards to that many processes, such as those of one node. The
            root's parameters are always kept.
        offload: ``"cpu"`` keeps shards, their gradients and the optimizer state in host memory.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        float32_residual: gather norms, and the parameters outside of blocks, in their own dtype, whatever the
            policy's; autocast still applies to products inside the blocks. Each norm is then a separate group, which
            stays gathered.

    Returns:
        Names of the blocks that are sharded separately.

    Raises:
        ValueError: ``reshard_after_forward`` does not divide the mesh, a parameter cannot be sharded, or ``blocks``
            matches nothing.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> store = dist.FileStore(str(getfixture("tmp_path") / "store"), 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        >>> shard_blocks_(net, init_device_mesh("cpu", (1,)))
        ['0', '1']
        >>> net(torch.ones(2, 4)).sum().backward()
        >>> type(net[0][0].weight.grad).__name__
        'DTensor'
        >>> dist.destroy_process_group()

    Source:
        ``torch.distributed.fsdp.fully_shard``; Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277.
    """
    if offload is not None:
        one_of("offload", offload, OFFLOADS)
    _check_reshard(reshard_after_forward, mesh)
    if isinstance(model, FSDPModule):
        return []
    _refuse_unshardable(model)
    groups = find_sharding_groups(model, blocks)
    refuse_mixed(model, groups.values())
    policy = policy or MixedPrecisionPolicy(cast_forward_inputs=False)
    whole = unsharded_parameters(model, policy)
    if whole:
        gib = bytes_of(whole) / GIB
        note_once(
            f"FSDP2: {gib:.2f} GiB of quantised weights are replicated on every rank, since they are not in 4 bits or "
            "would be cast; the rest is sharded"
        )
    packed = unwrap_packed_(model, policy)
    for parameter in model.parameters():
        # FSDP2 refuses others, as of convolutions in channels_last; its shards have no such layout.
        if parameter not in whole and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
        "ignored_params": whole | replicate_scalars_(model),
        "shard_placement_fn": lambda parameter: shard_axis(parameter, mesh.size(mesh.ndim - 1)),
    }
    if reshard_after_forward == 1 and not isinstance(reshard_after_forward, bool):
        # Resharded to one process, parameters stay gathered.
        reshard_after_forward = False
    # From the inside out: a module's group has the parameters that no inner group has.
    as_they_are = {**options, "mp_policy": replace(policy, param_dtype=None)}
    policies = shard_other_dtypes_(model, groups.values(), options)
    for block in groups.values():
        if float32_residual:
            shard_norms_(block, as_they_are)
        own = {**options, "mp_policy": policies.get(block, policy)}
        fully_shard(block, reshard_after_forward=reshard_after_forward, **own)
    fully_shard(model, **(as_they_are if float32_residual else options))
    keep_packed_(packed, [*groups.values(), model])
    return list(groups)


def find_sharding_groups(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Module]:
    """Return the blocks that are sharded separately: those that share no parameter with the rest of the model."""
    try:
        found = find_blocks(model, blocks)
    except ValueError:
        if blocks is not None:
            raise
        note_once(f"FSDP2: {type(model).__name__} has no repeated blocks, so all of it is gathered at once")
        return {}
    uses = count_uses(model)
    shared = []
    for name, block in found.items():
        # One of its parameters is used outside of the block too.
        if not count_uses(block).items() <= uses.items():
            shared.append(name)
    if shared:
        note_once(f"FSDP2: {', '.join(shared)} share parameters with other layers and are gathered with the root")
    return {name: block for name, block in found.items() if name not in shared and block is not model}


def _check_reshard(reshard: bool | int, mesh: DeviceMesh) -> None:
    if not isinstance(reshard, bool | int):
        raise TypeError(explain(f"reshard_after_forward={reshard!r}", "expected a bool or an int", "Use True"))
    size = mesh.size(mesh.ndim - 1)
    if not isinstance(reshard, bool) and (reshard < 1 or size % reshard):
        why = "parameters are resharded into equal shards, so it must divide the number of shards"
        way_out = "Use True, or the number of devices of a node"
        raise ValueError(explain(f"reshard_after_forward={reshard} over {size} shards", why, way_out))


def _refuse_unshardable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        why, way_out = None, "Freeze it, and build quantised models on every rank"
        if not is_opaque(parameter):
            continue
        if parameter.is_meta:
            why = "it is quantised and on the meta device, where it has no values"
        elif parameter.requires_grad:
            why = f"it is {parameter.dtype} and trains, but only floating-point parameters are sharded"
        if why is not None:
            raise ValueError(explain(f"parameter '{name}' of shape {tuple(parameter.shape)}", why, way_out))


@check_arguments
def check_sharded(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> None:
    """Refuse a model with trained parameters that are not sharded, or an optimizer that would train nothing.

    Args:
        model: the model, sharded by :func:`shard_blocks_`.
        optimizers: one optimizer, or several.

    Raises:
        ValueError: parameters train without being sharded, as in a layer that was replaced afterwards; or an
            optimizer holds parameters from before sharding, or cannot step on shards. Names them.

    Example:
        >>> check_sharded(nn.Linear(2, 2).requires_grad_(False))
        >>> check_sharded(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: 'weight', 'bias' of Linear train without being sharded: each rank would train a copy of its own...
    """
    # Gathered parameters are plain tensors, and would pass for unsharded ones.
    reshard_(model)
    named = dict(model.named_parameters())
    whole = []
    for name, parameter in named.items():
        if parameter.requires_grad and not isinstance(parameter, DTensor) and not is_replicated(parameter):
            whole.append(repr(name))
    if whole:
        why = "each rank would train a copy of its own, since nothing reduces their gradients"
        way_out = "Change layers before sharding: in configure_model, or with the suite's techniques"
        what = f"{list_some(whole, 4)} of {type(model).__name__} train without being sharded"
        raise ValueError(explain(what, why, way_out))
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        refuse_unfit_optimizer(optimizer)
        held = parameters_of(optimizer)
        stale = len(set(held).difference(named.values()))
        if stale:
            what = f"{type(optimizer).__name__} holds {stale} of {len(held)} parameters that the model no longer has"
            why = "sharding has replaced them, so the weights would never be updated"
            raise ValueError(explain(what, why, "Make the optimizer after the model is sharded"))


def refuse_unfit_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step on shards."""
    why = "its kernels do not support shards" if has_own_kernels(optimizer) else None
    for base in type(optimizer).__mro__:
        why = _UNFIT.get(base.__name__, why)
    if why is not None:
        way_out = "Use AdamW, SGD or another elementwise optimizer of torch.optim: their state is sharded too"
        raise ValueError(explain(f"{type(optimizer).__name__} with sharded parameters", why, way_out))


def has_own_kernels(optimizer: Optimizer) -> bool:
    """Return whether bitsandbytes or DeepSpeed steps, whose kernels do not support DTensor, FSDP2's parameters."""
    return any(base.__module__.partition(".")[0] in ("bitsandbytes", "deepspeed") for base in type(optimizer).__mro__)


def reshard_(model: nn.Module) -> None:
    """Reshard the parameters that a forward without backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_reducing(model: nn.Module) -> bool:
    """Return whether a backward currently reduces gradients."""
    return model not in _not_reducing


@contextmanager
def without_gradient_reduction(model: nn.Module) -> Iterator[None]:
    """Sum unsharded gradients on each rank in this context; a backward outside of it reduces the sum.

    This needs one reduction per step instead of one per micro-batch, and memory for unsharded gradients meanwhile.
    """
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule) and m not in _not_reducing]
    # `sharded` is empty within another such context, so that the inner one does and undoes nothing.
    _not_reducing.update(sharded)
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        _not_reducing.difference_update(sharded)
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)


_replicated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def replicate_scalars_(model: nn.Module, device: torch.device | None = None) -> set[nn.Parameter]:
    """Average the gradients of all parameters without a dimension over the ranks, in each backward.

    FSDP2 cannot shard them. They stay plain parameters, whose hooks average what has been summed so far: the average of
    earlier micro-batches is identical on all ranks, so that averaging it again does not change it.

    Args:
        model: the model; calling it a second time does nothing.
        device: the device to move them to; by default they are not moved.

    Returns:
        These parameters, for ``fully_shard`` to ignore.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> net.scale = nn.Parameter(torch.tensor(1.0))
        >>> len(replicate_scalars_(net))
        1
    """
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0 and parameter.is_floating_point()}
    for parameter in scalars:
        if device is not None and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
        if parameter.requires_grad and not is_replicated(parameter):
            _replicated[parameter] = True
            parameter.register_post_accumulate_grad_hook(_average_)
    return scalars


def is_replicated(parameter: Tensor) -> bool:
    """Return whether the gradient of a parameter is averaged by :func:`replicate_scalars_`."""
    return parameter in _replicated


@torch.no_grad()
def _average_(parameter: Tensor) -> None:
    # Not ReduceOp.AVG, which gloo lacks. Ranks of a tensor group have the same gradient.
    if rank_count() > 1 and parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank_count())


def shard_norms_(block: nn.Module, options: dict[str, Any]) -> None:
    """Shard each norm of a block separately.

    A norm is a layer whose parameters have one dimension: it works by element, which autocast leaves in float32.
    """
    _shard_each_(block, lambda norm: all(p.ndim == 1 for p in norm.parameters()), options)


def shard_other_dtypes_(
    model: nn.Module, blocks: Iterable[nn.Module], options: dict[str, Any]
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Shard modules separately whose trained parameters are not of the dtype in which most of the model trains.

    They are gathered in their own dtype, and their gradients are reduced in it, or in the policy's if that is wider.

    Args:
        model: the model, unsharded, and accepted by :func:`refuse_mixed`.
        blocks: the modules that will be sharded separately.
        options: arguments of ``fully_shard``.

    Returns:
        The policies of blocks that train in such a dtype as a whole, and are not sharded yet.
    """
    policy: MixedPrecisionPolicy = options["mp_policy"]
    of_blocks: dict[nn.Module, MixedPrecisionPolicy] = {}
    for dtype in _dtypes(model.parameters()) - {_usual_dtype(model)}:
        reduced = torch.promote_types(dtype, policy.reduce_dtype or dtype)
        own = replace(policy, param_dtype=None, reduce_dtype=reduced)
        entirely = {block for block in blocks if _dtypes(block.parameters()) == {dtype}}
        of_blocks.update(dict.fromkeys(entirely, own))
        left = modules_inside(entirely)
        # Those inside of blocks first, which are gathered when the block starts.
        for part in (*blocks, model):
            is_wanted = partial(_trains_in, dtype, left)
            _shard_each_(part, is_wanted, {**options, "mp_policy": own})
    return of_blocks


def _trains_in(dtype: torch.dtype, left: set[nn.Module], module: nn.Module) -> bool:
    return module not in left and _dtypes(module.parameters()) == {dtype}


def _shard_each_(part: nn.Module, is_wanted: Callable[[nn.Module], bool], options: dict[str, Any]) -> None:
    """Shard modules of a part of the model separately, and gather them when it starts: fused layers use them directly.

    They are never resharded between forward and backward.
    """
    chosen: list[FSDPModule] = []
    # From the inside out: a module's group has the parameters that no inner group has.
    for module in reversed(list(part.modules())):
        has_own = has_parameters(module, recurse=False)
        # One inside of another is sharded already.
        sharded = any(isinstance(inner, FSDPModule) for inner in module.modules())
        if has_own and not sharded and module is not part and is_wanted(module):
            chosen.append(fully_shard(module, reshard_after_forward=False, **options))

    def gather(*_: object) -> None:
        for module in chosen:
            module.unshard()

    if chosen:
        part.register_forward_pre_hook(gather)


def refuse_mixed(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Refuse parameters that cannot be reduced in their dtype, since no module holds them apart from others.

    Raises:
        ValueError: a module, a block or the model itself holds trained parameters of several dtypes, or modules share
            one that is not of the usual dtype. Names the parameter.
    """
    usual, groups = _usual_dtype(model), [model, *blocks]
    uses = count_uses(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _dtypes([parameter]) - {usual}:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        why = None
        mixed = len(_dtypes(module.parameters())) > 1
        if module in groups and mixed:
            why = f"it belongs directly to a group that trains in {usual}"
        elif mixed:
            why = "its module holds parameters of other dtypes too"
        elif uses[parameter] > 1:
            why = f"several modules share it, in a model that trains in {usual}"
        if why is not None:
            why = f"{why}; gradients of a group are reduced together, in one dtype"
            way_out = "Put it in a module of its own, or train in one dtype: model.to(torch.float32)"
            raise ValueError(explain(f"'{name}' trains in {parameter.dtype}", why, way_out))


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of most trained elements; None if none train."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 0:
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=None)


def _dtypes(parameters: Iterable[nn.Parameter]) -> set[torch.dtype]:
    """Return the dtypes of those that train and are sharded: frozen ones have no gradient to reduce."""
    return {parameter.dtype for parameter in parameters if parameter.requires_grad and parameter.ndim > 0}


def is_opaque(parameter: Tensor) -> bool:
    """Return whether a parameter must not be cast: it is not floating-point, or is frozen and of its own class."""
    if isinstance(parameter, DTensor):
        return not parameter.is_floating_point()
    own_class = type(parameter) is not nn.Parameter and not parameter.requires_grad
    return own_class or not parameter.is_floating_point()


def find_packed(model: nn.Module, policy: MixedPrecisionPolicy) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each 4-bit weight that can be sharded to the layers that use it."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not is_quantized(layer) or in_8_bits(layer) or _would_be_cast(weight, policy):
            continue
        found.setdefault(weight, []).append(layer)
    return found


def _would_be_cast(weight: Tensor, policy: MixedPrecisionPolicy) -> bool:
    """Return whether FSDP2 would cast the packed bytes of a weight as if they were values.

    It casts weights that are stored in a floating-point dtype, and torch 2.11 casts all. A weight that is stored in
    the policy's own dtype is never cast; ``quant_storage`` of bitsandbytes sets the storage dtype for that purpose.
    """
    if policy.param_dtype in (None, weight.dtype):
        return False
    return weight.is_floating_point() or TorchVersion(torch.__version__) < "2.12"


def unsharded_parameters(model: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Return the quantised parameters that stay unsharded on every rank: all except shardable 4-bit weights."""
    packed = find_packed(model, policy)
    return {parameter for parameter in model.parameters() if is_opaque(parameter) and parameter not in packed}


def unwrap_packed_(model: nn.Module, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Convert 4-bit weights to plain parameters, which ``fully_shard`` can shard; call it before.

    Returns:
        The layers of these weights, for :func:`keep_packed_`, which is to be called after sharding.
    """
    unwrapped = []
    for weight, layers in find_packed(model, policy).items():
        plain = nn.Parameter(weight.detach().as_subclass(Tensor), requires_grad=False)
        for layer in layers:
            keep_quantized_(layer)
            layer._parameters["weight"] = plain
            unwrapped.append(layer)
    return unwrapped


def keep_packed_(layers: list[nn.Module], groups: Iterable[nn.Module]) -> None:
    """Attach the quantization constants to sharded weights when they are saved, loaded and used.

    FSDP2 replaces parameters by its own. A gathered parameter is converted to bitsandbytes' class before its group's
    forward, outside of compiled code, and again by the layer itself where blocks are recomputed. A shard needs its
    constants for the keys of ``state_dict`` only.

    Args:
        layers: the result of :func:`unwrap_packed_`.
        groups: the modules that were sharded separately, the root last.
    """
    for layer in layers:
        settle_4bit_(layer)
        # ``model.to`` drops attributes of the parameter.
        layer.register_state_dict_pre_hook(settle_4bit_)
    # From the inside out, the root last: a layer belongs to the first group that contains it.
    left = dict.fromkeys(layers)
    for group in groups:
        own = [module for module in group.modules() if module in left]
        for layer in own:
            del left[layer]
        if own:
            group.register_forward_pre_hook(_settle(own))


def _settle(layers: list[nn.Module]) -> Callable[..., None]:
    def settle(*_: object) -> None:
        for layer in layers:
            settle_4bit_(layer)

    return settle
