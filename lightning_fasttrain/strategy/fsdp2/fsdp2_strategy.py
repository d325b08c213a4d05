"""Strategies for the Trainer and for Fabric that shard parameters, gradients and optimizer state with FSDP2."""

import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.checkpoint.atomic_checkpoints import probe_folders, refuse_unreadable_settings
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import (
    BackwardSyncControl,
    Stateful,
    accumulation_continues,
    move_optimizers,
    note_device,
)
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.select import has_parameters
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import share_buffers_
from lightning_fasttrain.strategy.fsdp2.shard_blocks import (
    check_sharded,
    is_reducing,
    refuse_unfit_optimizer,
    reshard_,
)
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state
from lightning_fasttrain.strategy.fsdp2.sharding import STEPS, FSDP2Host, scale_gradients_
from lightning_fasttrain.technique import Conflict
from lightning_fasttrain.technique.declarations import refuse_conflicts

_PATIENCE_S = 60.0  # to wait for a checkpoint in flight when a run fails
# Lightning's own callbacks that cannot be used here; techniques declare their conflicts themselves.
_COPIES = "it averages a copy of the whole model, and a sharded one cannot be copied"
_CONFLICTS = [
    Conflict(WeightAveraging, _COPIES, "Use optim.WeightEMA(), which averages shards"),
    Conflict(StochasticWeightAveraging, _COPIES, "Average the checkpoints afterwards, with full_state_dict(folder)"),
]


@check_arguments
class FSDP2Strategy(FSDP2Host, ModelParallelStrategy):
    """Shard the model, its gradients and its optimizer over all processes; the LightningModule needs no changes.

    Sharding happens in ``Strategy.setup``: after ``configure_model`` and all techniques of the suite, before
    ``configure_optimizers``. Each block that :func:`~lightning_fasttrain.model.find_blocks` finds is gathered as one
    group, and the rest of the model as another; each rank starts with the weights of rank zero, and every ``*_step``
    runs with the root's parameters gathered. Under accumulation, gradients are reduced once per step. Precision: see
    :func:`~lightning_fasttrain.strategy.precision_policy`. The strategy runs on the CPU with gloo too. The model stays
    sharded after ``fit``; :func:`~lightning_fasttrain.strategy.full_state_dict` reads its checkpoints.

    Checkpoints are folders, written under a temporary name, checksummed and renamed; they load on any number of
    processes. In ``fit``, a corrupt checkpoint is replaced by an older one of the same run. Checkpoint files of one
    device or DDP load too.

    With ``tensor_parallel``, neighbouring ranks form a tensor group, which computes one batch together. Its ranks must
    get the same batches: the Trainer's own sampler sees to it, your own takes ``distributed_sampler_kwargs`` of the
    strategy, and the first batch of each epoch is compared. They share their random state, so that dropout is the same
    on all of them, but differs inside split layers, except in compiled blocks. Norms, embeddings and the head
    are replicated in the group, so that every loss has all logits. With ``FusedLossHead`` and its head named (Hugging
    Face's models name theirs), the vocabulary is split too, and logits are never gathered.

    With ``context_parallel``, neighbouring ranks form a context group, which computes one batch together too, for long
    sequences: blocks compute on a share of the tokens, and ``scaled_dot_product_attention`` exchanges heads for tokens.
    Parameters are sharded over all ranks. Embeddings, the head and the loss see all tokens on every rank, so that any
    loss is exact, and ``FusedLossHead`` keeps its memory small. Each block is compared with the undivided one at its
    first forward. Blocks that mix tokens in other ways are refused, and hooks inside blocks see shares.

    Args:
        reshard_after_forward: as for :func:`~lightning_fasttrain.strategy.shard_blocks_`.
        offload: ``"cpu"`` keeps shards, gradients and optimizer state in host memory.
        replicas: number of model replicas for hybrid sharding, each sharded over its share of the processes; with the
            number of nodes, parameters are gathered within a node.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        reduce_dtype: dtype in which gradients are reduced: ``"float32"`` (default) or ``"bfloat16"``.
        float32_residual: under bf16-mixed, gather norms and the parameters outside of blocks, such as embeddings, in
            float32, as under DDP; see :func:`~lightning_fasttrain.strategy.shard_blocks_`.
        tensor_parallel: number of ranks in a tensor group, which compute one batch together: each has its share of the
            attention heads and hidden units, and memory for as many. Data ranks are the world divided by it.
        tensor_plan: module name → style, as for :func:`~lightning_fasttrain.strategy.plan_tensor_parallel`, which
            otherwise makes the plan.
        sequence_parallel: divide the tokens of blocks over a tensor group wherever layers are not split, which saves
            the memory of norms, dropout and residual sums; sequence lengths must be divisible by ``tensor_parallel``.
        context_parallel: number of ranks in a context group, which share the tokens of each sequence; it divides the
            number of attention heads and sequence lengths. Data ranks are the world divided by it.
        broadcast_buffers: broadcast rank zero's buffers, such as BatchNorm's running statistics, before each batch
            and before validation, as DDP does. Checkpoints contain rank zero's buffers in any case.
        reduce_once: under accumulation, sum unsharded gradients and reduce them once; False reduces in each
            micro-batch and keeps sharded gradients only: less memory, more communication.
        async_checkpoints: write checkpoints while training continues, one at a time.
        process_group_backend, timeout: as for Lightning's strategies.

    Raises:
        ValueError: ``replicas`` times ``tensor_parallel`` does not divide the number of processes, the precision is
            float16, ``MicroBatching("auto")`` is used, or a callback copies the model; in a tensor or context group
            also: heads or widths cannot be divided, the base of a tensor group is quantised, blocks mix tokens, or
            batches differ.

    Example:
        >>> trainer = L.Trainer(accelerator="cpu", strategy=FSDP2Strategy(reshard_after_forward=False), logger=False,
        ...                     enable_checkpointing=False, enable_progress_bar=False)
        >>> FSDP2Strategy(tensor_parallel=2).sharding.shape(8)  # data ranks, ranks of a tensor group
        (4, 2)

    Source:
        ``torch.distributed.fsdp.fully_shard``, on Lightning's ``ModelParallelStrategy``; tensor parallelism as in
        Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, and context parallelism as in Jacobs et
        al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509.
    """

    def setup(self, trainer: L.Trainer) -> None:
        assert self.model is not None
        assert self.accelerator is not None
        assert self.lightning_module is not None
        refuse_conflicts(self, _CONFLICTS, trainer.callbacks)
        # Not before adapters are in place: PEFT takes a module with a mesh for a Hugging Face model.
        self.lightning_module._device_mesh = self.device_mesh
        self.accelerator.setup(trainer)
        self.model = model = self.precision_plugin.convert_module(self.model)
        forget_unfinished_(model)
        precision = self.precision_plugin.precision
        self.sharded_blocks = self.sharding.shard_(model, self.device_mesh, precision, self.root_device)
        self._rest_to_device(model)
        # Remove the wrappers that an earlier run has put around the steps.
        self._steps.close()
        for name in STEPS:
            if is_overridden(name, self.lightning_module):
                self._run_gathered(model, name)
        if self.sharding.splits_logits:
            self._steps.enter_context(loss_parallel())
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Under offload the optimizer state stays with the shards, in host memory.
        if fitting and self.sharding.offload is None:
            move_optimizers(self.optimizers, self.root_device)
        check_sharded(model, self.optimizers)
        if fitting:
            probe_folders(trainer, self.optimizers)
            refuse_unreadable_settings(trainer)

    def _rest_to_device(self, model: nn.Module) -> None:
        """Move what sharding has not moved, such as metrics, to the device; shards in host memory stay there."""
        if self.sharding.offload is None:
            model.to(self.root_device)
            return
        for module in model.modules():
            if not has_parameters(module):
                module.to(self.root_device)
        note_device(model, device=self.root_device)

    def _run_gathered(self, model: nn.Module, name: str) -> None:
        """Gather the root's parameters in a step, which uses them outside of ``forward``, such as in a fused loss."""
        previous = vars(model).get(name)
        register_fsdp_forward_method(model, name)
        gathered: Any = vars(model)[name]
        # Lightning looks for a function one layer deep.
        gathered.__func__.__wrapped__ = inspect.unwrap(gathered)

        def restore() -> None:
            # A technique may have removed the wrapped method.
            if vars(model).get(name) is not gathered:
                return
            if previous is None:
                delattr(model, name)
            else:
                setattr(model, name, previous)

        self._steps.callback(restore)

    def on_train_start(self) -> None:
        """Check the sharded model once more after all callbacks' hooks."""
        assert self.model is not None
        # A callback may have swapped a layer, or made the optimizer again.
        check_sharded(self.model, self.optimizers)
        self._agree_on_batch()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Broadcast rank zero's buffers before any forward of the batch; compare the first batch in a tensor group."""
        self._share_buffers()
        if batch_idx == 0:
            self._agree_on_batch(batch)

    def on_validation_start(self) -> None:
        """Broadcast rank zero's buffers before the first batch."""
        self._share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def _share_buffers(self) -> None:
        if self.broadcast_buffers:
            assert self.model is not None
            share_buffers_(self.model)

    def on_validation_end(self) -> None:
        """Reshard the root, which a forward without backward leaves gathered."""
        assert self.model is not None
        reshard_(self.model)

    on_test_end = on_predict_end = on_validation_end

    @contextmanager
    def block_backward_sync(self) -> Generator:
        assert self.model is not None
        with self.without_reduction(self.model):
            yield

    def scale_gradients_(self, factor: Tensor) -> None:
        """Multiply the sharded gradients of the coming step by ``factor``, for token-weighted windows."""
        scale_gradients_(itertools.chain.from_iterable(map(parameters_of, self.optimizers)), factor)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return named_state(self.model, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        if storage_options is not None:
            why = f"{type(self).__name__} writes folders by itself"
            raise TypeError(explain("storage_options", why, "Leave it out"))
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.training and accumulation_continues(trainer):
            warn(
                "this checkpoint is saved inside an accumulation window and lacks its gradient: when resumed, the "
                "earlier batches of the window do not count. Save after optimizer steps, or at the end of an epoch."
            )
        optimizers = {f"optimizer_{i}": s for i, s in enumerate(checkpoint.pop("optimizer_states", []))}
        assert self.model is not None
        self._save(filepath, self.model, checkpoint.pop("state_dict"), optimizers, checkpoint)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove an older checkpoint, only after the newer one is complete."""
        if self._background is not None:
            # A lambda has no first argument for a bare super().
            self._background.do_afterwards(lambda: super(FSDP2Strategy, self).remove_checkpoint(filepath))
        else:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        assert self.model is not None
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        return self._load(
            checkpoint_path,
            self.model,
            optimizers,
            substitute=self.lightning_module.trainer.state.fn == TrainerFn.FITTING,
            strict=self.lightning_module.strict_loading,
            names=self.names_to_load,
        )

    def names_to_load(self, checkpoint: Mapping[str, object], saved: set[str], strict: bool) -> set[str]:
        """Return the keys of the model's ``state_dict`` that a checkpoint should contain; a technique may save fewer.

        Args:
            checkpoint: its content without the states of model and optimizers.
            saved: the keys that it contains.
            strict: whether they must match the model's.
        """
        assert self.model is not None
        return set(self.model.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has loaded the state already."""

    def on_exception(self, exception: BaseException) -> None:
        if self._background is not None:
            self._background.give_up(_PATIENCE_S)

    def teardown(self) -> None:
        self._steps.close()
        try:
            self.wait()
        finally:
            super().teardown()


def forget_unfinished_(model: nn.Module) -> None:
    """Discard the gradients of a window that an error has interrupted, which ``zero_grad`` does not reach."""
    # FSDPModule has this method, but not in every supported torch.
    reset: Any = getattr(model, "reset_iter_state", None)
    if reset is not None:
        # Torch raises it if the model was sharded but never run.
        with suppress(AttributeError):
            reset()


class _FabricBase(FabricModelParallelStrategy):
    """Lightning's strategy without the function that it asks for: ``setup_module`` shards."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(lambda module, mesh: module, **settings)
        self._backward_sync_control = _SyncControl(self)
        # Weak references to old parameters, so that unsharded weights do not stay in memory beside the shards.
        self._moved: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = []
        self._modules: list[weakref.ref[nn.Module]] = []


@check_arguments
class FabricFSDP2Strategy(FSDP2Host, _FabricBase):
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
        reduce_once: within ``no_backward_sync``, sum unsharded gradients; False reduces in each micro-batch there too.

    Raises:
        ValueError: as for :class:`~lightning_fasttrain.FSDP2Strategy`; also if the optimizer holds parameters that
            are not in the model, or has taken steps.

    Example:
        >>> fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(replicas=1))

    Source:
        See :class:`~lightning_fasttrain.FSDP2Strategy`.
    """

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
    """Implementation of ``fabric.no_backward_sync``, in which gradients are summed without reducing them."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return self.strategy.without_reduction(module) if enabled else nullcontext()


def _model_in(state: Mapping[str, object]) -> tuple[str, nn.Module]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    if len(models) != 1:
        why = "a sharded checkpoint holds one model, with its optimizers"
        way_out = "Give {'model': model, 'optimizer': optimizer, ...}, and save several models separately"
        raise ValueError(explain(f"a state with {len(models)} models", why, way_out))
    return next(iter(models.items()))
