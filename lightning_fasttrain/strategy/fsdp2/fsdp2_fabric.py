"""Fabric strategy that shards parameters, gradients and optimizer state over all processes with FSDP2."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import BackwardSyncControl, Stateful
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import share_buffers_
from lightning_fasttrain.strategy.fsdp2.shard_blocks import (
    check_sharded,
    is_reducing,
    refuse_unfit_optimizer,
    without_gradient_reduction,
)
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state
from lightning_fasttrain.strategy.fsdp2.sharding import STEPS, FSDP2Host, Sharding
from lightning_fasttrain.strategy.tensor_parallel.plan import TensorPlan


@check_arguments
class FabricFSDP2Strategy(FSDP2Host, ModelParallelStrategy):
    """Shard the model, its gradients and its optimizer over all processes; the Fabric loop needs no changes.

    ``fabric.setup(model, optimizer)`` works with an optimizer made before the model is set up: it is given the
    sharded parameters in place of the original ones. ``fabric.no_backward_sync(model, enabled=...)`` sums gradients
    without reducing them, and enables reduction again at its end. Register methods other than ``forward`` that use
    parameters with ``torch.distributed.fsdp.register_fsdp_forward_method(model, "loss")``.

    Args:
        reshard_after_forward, offload, replicas, blocks, reduce_dtype, float32_residual, tensor_parallel, tensor_plan,
            sequence_parallel, context_parallel, async_checkpoints, process_group_backend, timeout: as for
            :class:`~lightning_fasttrain.FSDP2Strategy`.
        broadcast_buffers: broadcast rank zero's buffers before each training forward whose gradients are reduced.

    Raises:
        ValueError: as for :class:`~lightning_fasttrain.FSDP2Strategy`; also if the optimizer holds parameters that
            are not in the model, or has taken steps.

    Example:
        >>> fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(replicas=1))

    Source:
        See :class:`~lightning_fasttrain.FSDP2Strategy`.
    """

    def __init__(
        self,
        reshard_after_forward: bool | int = True,
        *,
        offload: str | None = None,
        replicas: int = 1,
        blocks: Blocks | None = None,
        reduce_dtype: str | None = None,
        float32_residual: bool = False,
        tensor_parallel: int = 1,
        tensor_plan: TensorPlan | None = None,
        sequence_parallel: bool = False,
        context_parallel: int = 1,
        broadcast_buffers: bool = True,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        # Lightning requires a function that shards; sharding is done in setup_module.
        super().__init__(lambda module, mesh: module, process_group_backend=process_group_backend, timeout=timeout)
        options = (reshard_after_forward, offload, replicas, blocks, reduce_dtype, float32_residual)
        sharding = Sharding(*options, tensor_parallel, tensor_plan, sequence_parallel, context_parallel)
        self._set_options(sharding, broadcast_buffers, async_checkpoints)
        self._backward_sync_control = _SyncControl()
        # Weak references to old parameters, so that unsharded weights do not stay in memory beside the shards.
        self._moved: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = []
        self._modules: list[weakref.ref[nn.Module]] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        before = dict(module.named_parameters(remove_duplicate=False))
        precision = self.precision.precision
        self.sharded_blocks = self.sharding.shard_(module, self.device_mesh, precision, self.root_device)
        after = dict(module.named_parameters(remove_duplicate=False))
        # Drop pairs whose old parameter has been freed: no optimizer can hold it.
        self._moved = [pair for pair in self._moved if pair[0]() is not None]
        self._moved += [(weakref.ref(old), after[name]) for name, old in before.items() if after[name] is not old]
        self._modules.append(weakref.ref(module))
        # A step uses parameters outside of forward too.
        if isinstance(module, L.LightningModule):
            for name in STEPS:
                register_fsdp_forward_method(module, name)
        check_sharded(module)
        self._agree_on_batch()
        if self.broadcast_buffers:
            module.register_forward_pre_hook(_share_buffers)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: LRScheduler | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        module = self.setup_module(module)
        return module, list(map(self.setup_optimizer, optimizers)), scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replace an optimizer's parameters by the sharded ones."""
        refuse_unfit_optimizer(optimizer)
        now = {id(old()): new for old, new in self._moved}
        if any(id(p) in now and p in optimizer.state for p in parameters_of(optimizer)):
            what = f"{type(optimizer).__name__} has taken steps before the model was sharded"
            why = "its state belongs to unsharded parameters"
            raise ValueError(explain(what, why, "Set up the model before the first step"))
        for group in optimizer.param_groups:
            group["params"] = [now.get(id(p), p) for p in group["params"]]
        live: set[nn.Parameter] = set()
        for reference in self._modules:
            module = reference()
            if module is not None:
                live.update(module.parameters())
        foreign = len(set(parameters_of(optimizer)) - live)
        if foreign:
            what = f"{type(optimizer).__name__} holds {foreign} parameters that are in no model that was set up"
            way_out = "Call fabric.setup_module(model) first, or fabric.setup(model, optimizer)"
            raise ValueError(explain(what, "they would never be updated", way_out))
        return optimizer

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, object],
        storage_options: object = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None or filter is not None:
            why = "a sharded checkpoint is a folder with the complete state"
            raise TypeError(explain("storage_options and filter", why, "Leave them out"))
        key, model = _model_in(state)
        optimizers, rest = {}, {}
        for k, v in without(state, [key]).items():
            if isinstance(v, Optimizer):
                optimizers[k] = named_state(model, v)
            elif isinstance(v, Stateful):
                rest[k] = v.state_dict()
            else:
                rest[k] = v
        self._save(path, model, model.state_dict(), optimizers, rest)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        state = {"model": state} if isinstance(state, nn.Module) else state or {}
        key, model = _model_in(state)
        optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        # A run that loads only weights does not resume, so no older checkpoint may replace a corrupt one.
        rest = self._load(path, model, optimizers, substitute=bool(optimizers), strict=strict)
        asked = [k for k in state if k != key and k not in optimizers]
        missing = [k for k in asked if k not in rest]
        if strict and missing:
            why = "it was saved without these entries"
            raise KeyError(explain(f"{path} has no {missing}", why, "Leave them out, or use strict=False"))
        for k in asked:
            if k in rest:
                value = rest.pop(k)
                if isinstance(state[k], Stateful):
                    state[k].load_state_dict(value)
                else:
                    state[k] = value
        return rest


def _share_buffers(module: nn.Module, _: object) -> None:
    if module.training and torch.is_grad_enabled() and is_reducing(module):
        share_buffers_(module)


class _SyncControl(BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return without_gradient_reduction(module) if enabled else nullcontext()


def _model_in(state: Mapping[str, object]) -> tuple[str, nn.Module]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    if len(models) != 1:
        why = "a sharded checkpoint holds one model, with its optimizers"
        way_out = "Give {'model': model, 'optimizer': optimizer, ...}, and save several models separately"
        raise ValueError(explain(f"a state with {len(models)} models", why, way_out))
    return next(iter(models.items()))
