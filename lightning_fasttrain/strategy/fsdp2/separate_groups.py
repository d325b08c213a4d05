"""Modules that FSDP2 gathers separately from their block: norms in float32, and parameters of another dtype."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import count_uses
from lightning_fasttrain.core.modules.select import has_parameters, modules_inside


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
            is_meant = partial(_trains_in, dtype, left)
            _shard_each_(part, is_meant, {**options, "mp_policy": own})
    return of_blocks


def _trains_in(dtype: torch.dtype, left: set[nn.Module], module: nn.Module) -> bool:
    return module not in left and _dtypes(module.parameters()) == {dtype}


def _shard_each_(part: nn.Module, is_meant: Callable[[nn.Module], bool], options: dict[str, Any]) -> None:
    """Shard modules of a part of the model separately, and gather them when it starts: fused layers use them directly.

    They are never resharded between forward and backward.
    """
    chosen: list[FSDPModule] = []
    # From the inside out: a module's group has the parameters that no inner group has.
    for module in reversed(list(part.modules())):
        has_own = has_parameters(module, recurse=False)
        # One inside of another is sharded already.
        sharded = any(isinstance(inner, FSDPModule) for inner in module.modules())
        if has_own and not sharded and module is not part and is_meant(module):
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
