"""DeepSpeed ZeRO strategy for Fabric."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveFloat, check_arguments
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.host.lightning import BackwardSyncControl
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.zero._zero_engine import Engine
from lightning_fasttrain.strategy.zero.zero_checkpoint import folder_to_load, save_whole
from lightning_fasttrain.strategy.zero.zero_host import ZeROHost, fit_buckets, refuse_unfit_optimizer


@check_arguments
class FabricZeROStrategy(ZeROHost, DeepSpeedStrategy):
    """Shard optimizer state, gradients and parameters over processes with DeepSpeed, in a Fabric loop.

    A subclass of Lightning's strategy that runs on CPUs with gloo too. ``fabric.no_backward_sync`` accumulates
    gradients, ``fabric.clip_gradients(max_norm=...)`` clips by the norm over all ranks, and gradients are not clipped
    otherwise. Checkpoints are folders, written under a temporary name, checksummed and renamed. Set up model and
    optimizer together: ``fabric.setup(model, optimizer)``.

    Args:
        stage, memory_gib, headroom, nvme_path, trusted, universal, config: as for
            :class:`~lightning_fasttrain.ZeROStrategy`; ``"auto"`` is resolved in ``fabric.setup``.
        activation_gib: memory of activations in GiB, for ``"auto"``: Fabric does not know the training step, so give
            the prediction of :func:`~lightning_fasttrain.predict_memory`.
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

    def __init__(
        self,
        stage: int | str = "auto",
        *,
        memory_gib: PositiveFloat | None = None,
        headroom: float = 0.1,
        nvme_path: str | None = None,
        activation_gib: NonNegativeFloat = 0.0,
        trusted: bool = False,
        universal: bool = False,
        config: str | Path | dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        super().__init__(
            stage,
            memory_gib=memory_gib,
            headroom=headroom,
            nvme_path=nvme_path,
            trusted=trusted,
            universal=universal,
            config=config,
            **settings,
        )
        self.activation_gib = activation_gib
        self._backward_sync_control = _Windows(self)

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
        if self.question.open:
            self._choose_stage(module, optimizer, {}, int(self.activation_gib * GIB))
        refuse_unfit_optimizer(optimizer, self.stage)
        fit_buckets(self._given_config, module, self.question.settings)
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
        save_whole(self, path, state.get("step"), lambda folder: save(folder, state, storage_options, filter), plain)

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

    def __init__(self, strategy: FabricZeROStrategy) -> None:
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
