"""DeepSpeed ZeRO strategies for the Trainer and for Fabric, with automatic choice of the stage."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.callbacks import BackboneFinetuning, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.checkpoint.atomic_checkpoints import probe_folders, refuse_unreadable_settings
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import BackwardSyncControl
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.values import only
from lightning_fasttrain.strategy.zero.zero_checkpoint import folder_to_load, save_atomically
from lightning_fasttrain.strategy.zero.zero_engine import Engine
from lightning_fasttrain.strategy.zero.zero_host import ZeROHost, step_to_predict
from lightning_fasttrain.technique import Conflict, Surgery, Technique, check_together
from lightning_fasttrain.technique.declarations import refuse_conflicts
from lightning_fasttrain.technique.technique import techniques_of

# Lightning's own callbacks that cannot be used under ZeRO; techniques declare their conflicts themselves.
CONFLICTS_OF_ZERO = (
    Conflict(
        BackboneFinetuning,
        "parameters that are unfrozen later are not in DeepSpeed's partitions, so they would never be updated",
        "Use DDP, or choose the trained parameters before the run",
    ),
    Conflict(
        WeightAveraging,
        "it reads whole parameters, and each rank holds a shard of them",
        "Use stage=2 or less, or FSDP2Strategy with optim.WeightEMA()",
        lambda zero, _: zero.zero_stage_3,
    ),
)


@check_arguments
class ZeROStrategy(ZeROHost, DeepSpeedStrategy):
    """Shard optimizer state, gradients and parameters over processes with DeepSpeed, as far as needed to fit.

    A subclass of Lightning's strategy that runs on CPUs with gloo too. Accumulation is Lightning's own, so that
    losses are divided once, steps are counted once and the last window of an epoch is stepped; hooks of the optimizer
    run once per step; evaluation does not change the hooks of the model. Checkpoints are folders, written under a
    temporary name, checksummed and renamed; :func:`~lightning_fasttrain.strategy.consolidate` converts one to a file
    of plain weights. A model stays sharded after ``fit`` at stage 3. Under ``"bf16-mixed"`` DeepSpeed casts the
    weights to bfloat16, norms included, and keeps float32 copies for the optimizer, so losses round more than under
    DDP's autocast.

    Args:
        stage: 0 (like DDP), 1 (optimizer state is sharded), 2 (gradients too), 3 (parameters too), ``"2+offload"`` or
            ``"3+offload"`` (shards are kept in host memory), ``"3+nvme"`` (or on a disk). ``"auto"`` is the first in
            this order that fits the free memory of the smallest rank, with the optimizer of
            ``configure_optimizers``; the table is printed. A model built in ``configure_model`` is sharded while it
            is built under a given stage 3; under ``"auto"`` it is first built unsharded in host memory.
        memory_gib: memory that a rank may use, for ``"auto"``, instead of its free memory.
        headroom: fraction of the memory that ``"auto"`` leaves free.
        nvme_path: folder for ``"3+nvme"``; without it ``"auto"`` leaves that stage out.
        activation_gib: memory of activations in GiB, for ``"auto"`` where no step can be predicted: in Fabric, and
            where a batch cannot be read. :func:`~lightning_fasttrain.predict_memory` predicts it.
        trusted: whether to load checkpoints that hold pickled objects of unknown classes, which can run any code.
        universal: whether to load checkpoints that were saved by another number of processes, through DeepSpeed's
            universal format.
        config: a DeepSpeed config, dict or path, instead of all of the above.
        settings: further arguments of Lightning's ``DeepSpeedStrategy``.

    Raises:
        ModuleNotFoundError: deepspeed is not installed.
        ValueError: the stage is unknown, settings contradict it, or the precision is float16 on a CPU; in ``fit``,
            nothing fits, an optimizer or a technique does not support sharding, or DeepSpeed does not support the
            clipping.

    Example:
        >>> strategy = ZeROStrategy(stage=2)
        >>> strategy.config["zero_optimization"]["stage"]
        2

    Source:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        https://arxiv.org/abs/1910.02054, in DeepSpeed, through Lightning's ``DeepSpeedStrategy``.
    """

    _made: Any = None  # optimizers and schedules, made before the stage is chosen
    _set_world_ranks = DeepSpeedStrategy.set_world_ranks

    @property
    def _precision_name(self) -> str:
        return str(self.precision_plugin.precision)

    def teardown(self) -> None:
        """Clean up after the run; checkpoints can still be saved."""
        super().teardown()
        self._made = None
        if self.engine is not None:
            self.engine.end_training()

    # Engine.

    def setup(self, trainer: L.Trainer) -> None:
        """Choose the stage under ``"auto"``, and create the engine, after ``configure_model`` and surgery."""
        assert self.lightning_module is not None
        # Release the engine of an earlier fit: its hooks would run in addition to those of the new engine.
        if self.engine is not None:
            self.engine.release()
            self.engine = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._check(trainer, self.lightning_module)
        super().setup(trainer)

    def _check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if is_overridden("configure_gradient_clipping", module, L.LightningModule):
            why = "gradients are sharded over all ranks, so your code would clip nothing"
            way_out = "Use Trainer(gradient_clip_val=...), which clips by the norm over all ranks"
            raise ValueError(explain("configure_gradient_clipping under ZeRO", why, way_out))
        if not module.automatic_optimization:
            warn(
                "automatic_optimization=False under ZeRO: each backward counts as the last before a step, and earlier "
                "gradients are lost. Run the others inside `with optimizer.toggle_model(sync_grad=False):`."
            )
        optimizer = None
        # With one in the config, DeepSpeed makes the optimizer.
        if "optimizer" not in self._given_config:
            self._made = super()._init_optimizers()
            optimizer = self._made[0]
        self._settle_stage(module, optimizer, lambda: step_to_predict(trainer, self.options.activation_gib))
        # Checked once more, since "auto" has chosen a stage only now.
        check_together(techniques_of(trainer), self)
        refuse_conflicts(self, CONFLICTS_OF_ZERO, trainer.callbacks)
        # Probed now, before DeepSpeed shards the optimizer.
        probe_folders(trainer, [] if optimizer is None else [optimizer])
        refuse_unreadable_settings(trainer)

    def _init_optimizers(self) -> Any:
        made, self._made = self._made, None
        if made is not None:
            return made
        return super()._init_optimizers()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None = None
    ) -> Any:
        engine = self._make_engine(self._given_config, model, optimizer, lr_scheduler)
        return engine.deepspeed, engine.optimizer

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        config = only(self._given_config, ["fp16", "bf16"])
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed requires it
        if self.zero_stage_3:
            config |= only(self._given_config, ["zero_allow_untested_optimizer", "zero_optimization"])
        self.model = self._make_engine(config, model).deepspeed

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context for ``configure_model``: layers are sharded when they are created, unless techniques change them."""
        adding = self._technique_that_adds() if self.zero_stage_3 else None
        if adding is None:
            with super().model_sharded_context():
                yield
            return
        note_once(
            f"ZeROStrategy: {type(adding).__name__} needs whole layers, so the model is built in host memory "
            "and sharded afterwards"
        )
        self._init_config_if_needed()
        yield

    def _technique_that_adds(self) -> Technique | None:
        assert self.lightning_module is not None
        callbacks: list[Any] = self.lightning_module.trainer.callbacks
        for callback in callbacks:
            if isinstance(callback, Technique) and callback.surgery in (Surgery.QUANTIZE, Surgery.ADAPT):
                return callback
        return None

    # Accumulation: Lightning's loop decides on windows and steps.

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Always False: Lightning's loop accumulates, and steps the last window of an epoch too."""
        return False

    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert self.lightning_module is not None
        config, trainer = self._given_config, self.lightning_module.trainer
        if config.get("gradient_accumulation_steps", 1) != 1:
            what = f"gradient_accumulation_steps={config['gradient_accumulation_steps']} in the DeepSpeed config"
            why = "the Trainer accumulates, so it would be done twice"
            raise ValueError(explain(what, why, "Use Trainer(accumulate_grad_batches=...)"))
        config["gradient_accumulation_steps"] = 1
        # DeepSpeed uses it for its own log lines only.
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        if trainer.gradient_clip_val is not None:
            config["gradient_clipping"] = trainer.gradient_clip_val

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint folder atomically, with checksums.

        Raises:
            OSError: a rank could not write; an older folder of this name is not changed.
            RuntimeError: a rank is gone, or did not answer within ``timeout=``.
        """
        if storage_options is not None:
            why = "DeepSpeed writes its files itself, to a local path"
            raise TypeError(explain("storage_options=", why, "Leave it out"))
        assert self.engine is not None
        save, step = super().save_checkpoint, checkpoint.get("global_step")
        with ExitStack() as undo:
            # True if only a part of the model is saved, such as its trained weights.
            part = undo.enter_context(self.engine.save_only(set(checkpoint["state_dict"])))
            undo.callback(patch(self, "exclude_frozen_parameters", part or self.exclude_frozen_parameters))
            save_atomically(self, filepath, step, lambda path: save(checkpoint, path), checkpoint)

    def names_to_load(self, checkpoint: Mapping[str, object], saved: set[str], strict: bool) -> set[str]:
        """Return the keys that a checkpoint should contain; see :meth:`FSDP2Strategy.names_to_load`."""
        assert self.lightning_module is not None
        return set(self.lightning_module.state_dict())

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint folder; if it is corrupt, in ``fit`` an older one of the same run.

        Raises:
            CorruptCheckpoint: there is no intact checkpoint.
            ValueError: it was saved by another number of processes, or holds objects of unknown classes.
        """
        if self.load_full_weights and self.zero_stage_3:
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        assert self.engine is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        folder = folder_to_load(self, checkpoint_path, optimizer_too=fitting)
        with folder as path, self.engine.load_only(self.names_to_load):
            return super().load_checkpoint(path, weights_only)


class _FabricBase(FabricDeepSpeedStrategy):
    """Lightning's strategy, with an accumulation that DeepSpeed knows of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._backward_sync_control = _Windows(self)


@check_arguments
class FabricZeROStrategy(ZeROHost, _FabricBase):
    """Shard optimizer state, gradients and parameters over processes with DeepSpeed, in a Fabric loop.

    A subclass of Lightning's strategy that runs on CPUs with gloo too. ``fabric.no_backward_sync`` accumulates
    gradients, ``fabric.clip_gradients(max_norm=...)`` clips by the norm over all ranks, and gradients are not clipped
    otherwise. Checkpoints are folders, written under a temporary name, checksummed and renamed. Set up model and
    optimizer together: ``fabric.setup(model, optimizer)``.

    Args:
        stage, memory_gib, headroom, nvme_path, activation_gib, trusted, universal, config: as for
            :class:`~lightning_fasttrain.ZeROStrategy`; ``"auto"`` is resolved in ``fabric.setup``, with
            ``activation_gib``, since Fabric does not know the training step.
        settings: further arguments of Fabric's ``DeepSpeedStrategy``.

    Raises:
        ModuleNotFoundError: deepspeed is not installed.
        ValueError: as for :class:`~lightning_fasttrain.ZeROStrategy`.

    Example:
        >>> strategy = FabricZeROStrategy(stage=1)
        >>> strategy.config["gradient_clipping"]
        0.0

    Source:
        See :class:`~lightning_fasttrain.ZeROStrategy`.
    """

    @property
    def _precision_name(self) -> str:
        return str(self.precision.precision)

    def setup_environment(self) -> None:
        """Join the process group; on a CPU as on a GPU."""
        super().setup_environment()
        # On a CPU Lightning's own setup, which formats the config, is left out.
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Choose the stage under ``"auto"``, and create the engine.

        Raises:
            ValueError: no stage fits, there are several optimizers, or the optimizer cannot be sharded.
        """
        optimizer = pick_only_optimizer(optimizers)
        self._settle_stage(module, optimizer, dict)  # Fabric does not know the step
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def _initialize_engine(
        self, model: nn.Module, optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None
    ) -> Any:
        engine = self._make_engine(self._given_config, model, optimizer, scheduler)
        return engine.deepspeed, engine.optimizer, engine.scheduler

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the coming step's gradient by its norm over all ranks, and return the norm."""
        if norm_type != 2.0:
            why = "DeepSpeed computes the 2-norm over ranks only"
            raise ValueError(explain(f"{norm_type=} under ZeRO", why, "Use norm_type=2.0"))
        assert self.engine is not None
        return clip_to(self.engine, float(max_norm), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Refuse clipping by value, which ZeRO does not support.

        Raises:
            ValueError: always.
        """
        why = "gradients are sharded over all ranks, in DeepSpeed's memory"
        way_out = "Clip by the norm: fabric.clip_gradients(model, optimizer, max_norm=...)"
        raise ValueError(explain(f"fabric.clip_gradients(clip_val={clip_val}) under ZeRO", why, way_out))

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: object = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint folder atomically, with checksums.

        Raises:
            OSError: a rank could not write; an older folder of this name is not changed.
            RuntimeError: a rank is gone, or did not answer within ``timeout=``.
        """
        save = super().save_checkpoint
        if self.engine is None:
            save(path, state, storage_options, filter)  # reports what is missing
            return
        # Models and optimizers are saved by DeepSpeed.
        plain = {key: value for key, value in state.items() if not hasattr(value, "state_dict")}
        save_atomically(
            self, path, state.get("step"), lambda folder: save(folder, state, storage_options, filter), plain
        )

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> Any:
        """Load a checkpoint folder; if it is corrupt and optimizer state is loaded, an older one of the same run.

        Raises:
            CorruptCheckpoint: there is no intact checkpoint.
            ValueError: it was saved by another number of processes, or holds objects of unknown classes.
        """
        # A plain file with full weights, which Lightning reads itself.
        weights_alone = self.load_full_weights and self.zero_stage_3
        if not isinstance(state, dict) or not state or weights_alone or self.engine is None:
            return super().load_checkpoint(path, state, strict, weights_only)
        optimizer_too = any(part is self.engine.optimizer for part in state.values())
        with folder_to_load(self, path, optimizer_too=optimizer_too) as folder:
            return super().load_checkpoint(folder, state, strict, weights_only)


class _Windows(BackwardSyncControl):
    """Implementation of ``fabric.no_backward_sync``, in which backward passes accumulate."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return self.strategy.block_backward_sync() if enabled else nullcontext()


def clip_to(engine: Engine, max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """Clip the coming step's gradient to a norm of at most ``max_norm``, and return the norm before clipping.

    Raises:
        RuntimeError: the norm is not finite.
    """
    norm = engine.gradient_norm()
    # DeepSpeed returns -1 for a norm that is not finite.
    norm = torch.where(norm < 0, torch.inf, norm)
    if error_if_nonfinite and not float(norm) < float("inf"):
        way_out = "Lower the learning rate, or pass error_if_nonfinite=False"
        raise RuntimeError(explain("the norm of the gradients is not finite", "it cannot be clipped", way_out))
    # The 1e-6 is that of torch's clipping.
    engine.scale_gradients_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def pick_only_optimizer(optimizers: list[Optimizer]) -> Optimizer:
    """Return the only optimizer of a list.

    Raises:
        ValueError: there are several optimizers, or none.
    """
    if len(optimizers) != 1:
        why = "DeepSpeed shards the state of exactly one optimizer"
        way_out = "Use one optimizer with several parameter groups"
        raise ValueError(explain(f"{len(optimizers)} optimizers under ZeRO", why, way_out))
    return optimizers[0]
