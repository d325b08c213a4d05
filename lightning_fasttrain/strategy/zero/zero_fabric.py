"""DeepSpeed ZeRO strategy for Fabric."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.host.lightning import BackwardSyncControl
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.strategy.rank_health import RollCall, own_group
from lightning_fasttrain.strategy.zero import _zero_engine as engines
from lightning_fasttrain.strategy.zero._zero_engine import Engine
from lightning_fasttrain.strategy.zero.stage_agreement import StageQuestion, choose_together, without_defaults
from lightning_fasttrain.strategy.zero.zero_checkpoint import folder_to_load, save_whole, warn_inside_window


class FabricZeROStrategy(DeepSpeedStrategy):
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
        memory_gib: float | None = None,
        headroom: float = 0.1,
        nvme_path: str | None = None,
        activation_gib: float = 0.0,
        trusted: bool = False,
        universal: bool = False,
        config: str | Path | dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        engines.import_deepspeed()
        settings = without_defaults(settings)
        self.question = StageQuestion(stage, memory_gib, headroom, nvme_path, config, settings)
        if activation_gib < 0:
            raise ValueError(explain(f"{activation_gib=}", "it cannot be negative", "Give at least 0, in GiB"))
        self.activation_gib, self.trusted, self.universal = activation_gib, trusted, universal
        super().__init__(**self.question.arguments(), config=config, **settings)
        engines.finish_config(self._given_config)
        self._backward_sync_control = _Windows(self)
        self.engine: Engine | None = None
        self.roll_call = RollCall(None)
        self.inside_window = False
        self._leave: Undo = lambda: None

    @property
    def _given_config(self) -> dict[str, Any]:
        assert isinstance(self.config, dict)
        return self.config

    @property
    def stage(self) -> int:
        """The stage in use: 0 to 3."""
        return int(self._given_config.get("zero_optimization", {}).get("stage", 0))

    def _configure_launcher(self) -> None:
        engines.refuse_half_on_cpu(str(self.precision.precision), self.root_device.type)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the process group; on a CPU as on a GPU."""
        self._leave = engines.enter(self.root_device.type)
        if self.root_device.type == "cuda":
            super().setup_environment()
        else:
            self._setup_on_cpu()
        self.roll_call = RollCall(own_group(self._timeout))

    def _setup_on_cpu(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        # The steps of Lightning's own setup, which refuses a CPU.
        reset_seed()
        self._set_world_ranks()
        with engines.without_needless_ops(self.root_device.type):
            self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    def teardown(self) -> None:
        """Clean up after the run."""
        super().teardown()
        self._leave()

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Choose the stage under ``"auto"``, and create the engine.

        Raises:
            ValueError: no stage fits, there are several optimizers, or the optimizer cannot be sharded.
            RuntimeError: another rank is gone, or did not arrive here within ``timeout=``.
        """
        with self.roll_call.all_or_none("fabric.setup"):
            optimizer = engines.pick_only_optimizer(optimizers)
        if self.question.open:
            self._given_config["zero_optimization"] = choose_together(
                self.question,
                module,
                optimizer,
                device=self.root_device,
                local_ranks=len(self.parallel_devices or ()) or 1,
                precision=str(self.precision.precision),
                activation_bytes=int(self.activation_gib * GIB),
            )
        engines.refuse_unfit_optimizer(optimizer, self.stage)
        engines.fit_buckets(self._given_config, module, self.question.settings)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def _initialize_engine(self, model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> Any:
        index = self.root_device.index  # a CPU has no index, but DeepSpeed requires one
        rank = self.local_rank if index is None else index
        self.engine = Engine(self._given_config, model, optimizer, scheduler, rank)
        return self.engine.deepspeed, self.engine.optimizer, self.engine.scheduler

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run one optimizer step of the engine."""
        output = super().optimizer_step(optimizer, **kwargs)
        if self.engine is not None:
            self.engine.end_step()
        self.inside_window = False
        return output

    def scale_gradients_(self, factor: Tensor | float) -> None:
        """Multiply the gradients of the coming optimizer step, before their norm is taken and clipped."""
        assert self.engine is not None
        self.engine.scale_gradients_(factor)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the coming step's gradient by its norm over all ranks, and return the norm."""
        if norm_type != 2.0:
            why = "DeepSpeed computes the 2-norm over ranks only"
            raise ValueError(explain(f"{norm_type=} under ZeRO", why, "Use norm_type=2.0"))
        assert self.engine is not None
        return engines.clip_to(self.engine, float(max_norm), error_if_nonfinite)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
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
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint folder atomically, with checksums.

        Raises:
            OSError: a rank could not write; an older folder of this name is not changed.
            RuntimeError: a rank is gone, or did not answer within ``timeout=``.
        """
        warn_inside_window(self.inside_window)
        save = super().save_checkpoint
        if self.engine is None:
            save(path, state, storage_options, filter)  # reports what is missing
            return
        step = state.get("step")
        # Models and optimizers are saved by DeepSpeed.
        plain = {key: value for key, value in state.items() if not hasattr(value, "state_dict")}
        save_whole(self, path, self.engine, self.stage, step, lambda f: save(f, state, storage_options, filter), plain)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
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
        with folder_to_load(
            self,
            path,
            self.engine,
            stage=self.stage,
            trusted=self.trusted,
            universal=self.universal,
            optimizer_too=optimizer_too,
        ) as folder:
            return super().load_checkpoint(folder, state, strict, weights_only)


class _Windows(BackwardSyncControl):
    """Implementation of ``fabric.no_backward_sync``, in which backward passes accumulate."""

    def __init__(self, strategy: FabricZeROStrategy) -> None:
        self.strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        if not enabled or self.strategy.engine is None:
            return nullcontext()
        self.strategy.inside_window = True
        return self.strategy.engine.inside_window()
