"""The door to what Lightning keeps to itself, so that upgrading Lightning means reading one file.

Resuming has its own: positions in loops in ``checkpoint/resume_state.py``, logged metrics in
``checkpoint/resume_state.py``. What subclasses of its strategies override is in ``strategy/``, and what
is read of torchmetrics in ``core/state/restore.py``. All private names are listed in ``tests/test_host.py``, which
fails when Lightning lacks one, or when another file uses one.
"""

import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.fabric import wrappers
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy, XLAStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.callback_connector import _validate_callbacks_list
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torchmetrics import Metric

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import trained_parameters
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, patched

DataFetcher = _DataFetcher
FabricModule, FabricOptimizer = _FabricModule, _FabricOptimizer
BackwardSyncControl, Stateful = _BackwardSyncControl, _Stateful
move_optimizers, note_device = _optimizers_to_device, _update_properties
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def in_fabric_backward() -> AbstractContextManager[None]:
    """Return a context in which a backward may go through outputs of Fabric's modules, as in ``fabric.backward``.

    In mixed precision, and under strategies with a backward of their own, they refuse any other.
    """
    return patched(wrappers, "_in_fabric_backward", True)


def plain_optimizer(optimizer: object) -> Optimizer:
    """Return torch's optimizer inside of Lightning's or Fabric's wrapper, if it is in one.

    Raises:
        TypeError: not an optimizer.
    """
    if isinstance(optimizer, FabricOptimizer | LightningOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        why = "expected a torch.optim.Optimizer"
        raise TypeError(explain(f"optimizer={type(optimizer).__name__}", why, "Pass the optimizer itself"))
    return optimizer


# State of a run


def accumulation_continues(trainer: L.Trainer) -> bool:
    """Whether the gradients of this batch are summed with those of the next."""
    return trainer.fit_loop._should_accumulate()


def is_last_batch_taken(trainer: L.Trainer) -> bool:
    """Whether the training loaders have no more batches for this epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def refuse_static_graph(trainer: L.Trainer, technique: str) -> None:
    """Refuse DDP with ``static_graph=True`` beside a technique that runs several backwards for a step.

    Raises:
        ValueError: names the technique and the reason.
    """
    replica = trainer.strategy.model
    if isinstance(replica, DistributedDataParallel) and replica.static_graph:
        why = "DDP's first step then synchronizes in each backward, but only the last one of a step should"
        raise ValueError(explain(f"{technique} with static_graph=True", why, "Leave static_graph out"))


def refuse_float16_on_cpu(trainer: L.Trainer) -> None:
    """Refuse float16 weights on a CPU; ``"16-mixed"`` is replaced by bfloat16 there, as Lightning reports itself.

    Raises:
        ValueError: the precision is ``"16-true"``.
    """
    if str(trainer.precision) == "16-true" and trainer.strategy.root_device.type == "cpu":
        why = "gradients below 6e-8 become zero without a loss scale, and a CPU computes float16 slowly"
        raise ValueError(explain("precision='16-true' on a CPU", why, "Use precision='bf16-true'"))


def refuse_second_stateful(callback: L.Callback) -> None:
    """Refuse a second callback of a class when a Trainer asks both for their ``state_key``, before it calls any hook.

    Lightning refuses two with a state, and does not say what to do.

    Raises:
        ValueError: another callback of the Trainer has the same class.
    """
    frame = sys._getframe(2)  # the function that asks for the key
    if frame.f_code is not _validate_callbacks_list.__code__:
        return
    same = [other for other in frame.f_locals["callbacks"] if type(other) is type(callback)]
    if len(same) > 1:
        what = f"{type(callback).__name__} is listed twice"
        raise ValueError(explain(what, "both would act on the same thing", "Remove one of them"))


def asked_checkpoint(trainer: L.Trainer) -> Any:
    """Return the ``ckpt_path`` that the running ``trainer.fit`` was called with; None if it is unknown.

    Lightning does not keep the argument: it is replaced by a path, or by None if there is no checkpoint of that name.
    """
    frame = sys._getframe()
    while frame is not None:
        # By name, since other packages wrap the method.
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is trainer and "ckpt_path" in frame.f_locals:
            return frame.f_locals["ckpt_path"]
        frame = frame.f_back
    return None


def is_time_to_log(trainer: L.Trainer) -> bool:
    """Whether ``log_every_n_steps`` says so for this step."""
    return trainer._logger_connector.should_update_logs


def log_to_all(trainer: L.Trainer, metrics: dict[str, float]) -> None:
    """Log values at the number of the step that Lightning gives to loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def trainer_of(module: nn.Module) -> L.Trainer | None:
    """The Trainer that a module is attached to."""
    return module._trainer if isinstance(module, L.LightningModule) else None


@contextmanager
def without_trainer(module: L.LightningModule) -> Iterator[None]:
    """A module without the Trainer that it is attached to, which a copy would copy too."""
    with patched(module, "_trainer", None):
        yield


def training_loader(trainer: L.Trainer) -> Any:
    """Return the user's training data, made if it has to be; None if there is none."""
    source = trainer.fit_loop._data_source
    return source.dataloader() if source.is_defined() else None


def validation_loaders(trainer: L.Trainer) -> list[Any]:
    """Return the validation loaders within ``fit``, once they are made."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else combined.flattened


def training_loaders(trainer: L.Trainer) -> CombinedLoader | None:
    """Return the training loaders of this run, as techniques have wrapped them; None before they are made."""
    return trainer.fit_loop._combined_loader


def when_loaders_are_made(trainer: L.Trainer, act: Callable[[], bool]) -> None:
    """Call ``act`` as soon as Lightning has made the training loaders; if it is not done, again when it asks for them.

    It asks for them before each epoch.
    """
    setup_data = trainer.fit_loop.setup_data

    def setup_then_act() -> None:
        setup_data()
        if act():
            restore()

    restore = patch(trainer.fit_loop, "setup_data", setup_then_act)


def see_training_batches(trainer: L.Trainer, see: Callable[[Any], None]) -> None:
    """Call ``see`` with each batch of this run, before it is trained on."""
    on_start = trainer.strategy.on_train_batch_start

    def on_train_batch_start(batch: object, batch_idx: int) -> None:
        see(batch)
        on_start(batch, batch_idx)

    restore = patch(trainer.strategy, "on_train_batch_start", on_train_batch_start)

    def end(teardown: Callable[[], None]) -> None:
        restore()
        teardown()

    surround_teardown(trainer, end)


def cluster_environment(trainer: L.Trainer) -> ClusterEnvironment:
    """Who started the processes."""
    return trainer._accelerator_connector.cluster_environment


def configured_optimizers(module: L.LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers and schedulers of ``configure_optimizers``, in whichever form it returns them."""
    configured: Any = module.configure_optimizers()
    optimizers, [*schedulers], _ = _configure_optimizers(configured)
    for place, one in enumerate(schedulers):
        schedulers[place] = one["scheduler"] if isinstance(one, dict) else one
    return optimizers, schedulers


# The step


def decide_when_accumulation_continues(trainer: L.Trainer, decide: Callable[[], bool]) -> Undo:
    """Have ``decide`` answer :func:`accumulation_continues`, for Lightning too."""
    return patch(trainer.fit_loop.epoch_loop, "_should_accumulate", decide)


def replace_closures(trainer: L.Trainer, make: Callable[..., Closure]) -> Undo:
    """Have ``make(kwargs, optimizer, batch_idx)`` make the closure of each batch."""
    return patch(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", make)


def replaced_closures(trainer: L.Trainer) -> Callable[..., Closure] | None:
    """Return the argument of :func:`replace_closures`; None if Lightning makes its own closures."""
    return vars(trainer.fit_loop.epoch_loop.automatic_optimization).get("_make_closure")


def plain_closure(trainer: L.Trainer, kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Closure:
    """The closure that Lightning itself makes."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    # The method of the class, since a replacement may stand on the object.
    return type(loop)._make_closure(loop, kwargs, optimizer, batch_idx)


def zero_grad_of_batch(trainer: L.Trainer, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
    """Return the function that zeroes gradients in a batch's closure; None where they are summed with earlier ones."""
    return trainer.fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn(batch_idx, optimizer)


def call_module(trainer: L.Trainer, hook: str, *arguments: object) -> Any:
    """Call a hook of the module as Lightning does."""
    return call._call_lightning_module_hook(trainer, hook, *arguments)


def call_strategy(trainer: L.Trainer, hook: str, *arguments: object) -> Any:
    """Call a method of the strategy as Lightning does: profiled, and with ``self.log`` knowing where it is."""
    return call._call_strategy_hook(trainer, hook, *arguments)


class BackwardHooks:
    """Has the backwards of several micro-batches call the user's hooks as often as that of the unsplit batch does.

    Hooks of callbacks of this package watch each micro-batch, and are left alone.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Call ``on_before_backward`` at the first backward within only, and ``on_after_backward`` at none."""
        with ExitStack() as undo:
            for target in self._list_targets():
                if callable(target.on_before_backward):
                    undo.callback(patch(target, "on_before_backward", _call_once(target.on_before_backward)))
                undo.callback(patch(target, "on_after_backward", _call_nothing))
            yield
        self._is_held = True

    def call_after(self) -> None:
        """Call ``on_after_backward``, now that gradients are those of the batch."""
        if self._is_held:
            call._call_callback_hooks(self._trainer, "on_after_backward")
            call._call_lightning_module_hook(self._trainer, "on_after_backward")

    def _list_targets(self) -> list[Any]:
        targets: list[Any] = []
        for target, base in ((self._trainer.lightning_module, L.LightningModule), *_with_base(self._trainer)):
            names = ("on_before_backward", "on_after_backward")
            is_overridden = any(getattr(type(target), name) is not getattr(base, name) for name in names)
            if is_overridden or any(name in vars(target) for name in names):
                targets.append(target)
        return targets


def _with_base(trainer: L.Trainer) -> list[tuple[L.Callback, type]]:
    own = __name__.partition(".")[0]
    callbacks = [callback for callback in trainer.callbacks if type(callback).__module__.partition(".")[0] != own]
    return [(callback, L.Callback) for callback in callbacks]


def _call_once(hook: Callable[..., object]) -> Callable[..., object]:
    waiting = [hook]

    def call_first(*args: object) -> object:
        return waiting.pop()(*args) if waiting else None

    return call_first


def _call_nothing(*_: object) -> None:
    return None


@contextmanager
def logging_as(module: L.LightningModule, hook: str) -> Iterator[None]:
    """``self.log`` as if it was called in ``hook``."""
    # `log` looks up by this name whether it may be called, and its defaults of on_step and on_epoch.
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


# The run


def surround_teardown(trainer: L.Trainer, run: Callable[[Callable[[], None]], None]) -> None:
    """Have ``run(teardown)`` end the current run."""
    own = trainer._teardown

    def teardown() -> None:
        restore()
        run(own)

    restore = patch(trainer, "_teardown", teardown)


def started_processes(strategy: Strategy) -> Sequence[subprocess.Popen[bytes]] | None:
    """The other ranks of this machine, if Lightning itself starts them: on rank zero, which does so; elsewhere none.

    Under torchrun and SLURM they are siblings: None.
    """
    launcher: Any = strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return None
    return launcher.procs if isinstance(launcher.cluster_environment, LightningEnvironment) else None


def child_watchers() -> Iterator[tuple[threading.Thread, list[subprocess.Popen[bytes]]]]:
    """Lightning's threads that watch the other ranks, and end this process if one fails; and whom each watches."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            yield thread, list(thread._child_processes)


def signal_connector(trainer: L.Trainer) -> Any:
    """Return Lightning's connector of signal handlers."""
    return trainer._signal_connector


def keep_sigterm_from_ranks(trainer: L.Trainer) -> Undo:
    """Switch off Lightning's exchange about SIGTERM among ranks after each batch, for a run."""
    return patch(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def saves_every(writer: ModelCheckpoint) -> tuple[int, timedelta | None]:
    """Steps, 0 for none, and time after which it saves within an epoch."""
    return writer._every_n_train_steps, writer._train_time_interval


def last_save(writer: ModelCheckpoint) -> tuple[int, str]:
    """The step of its last save, and the file."""
    return writer._last_global_step_saved, writer._last_checkpoint_saved


def set_last_save(writer: ModelCheckpoint, step: int, file: str) -> None:
    writer._last_global_step_saved, writer._last_checkpoint_saved = step, file


def replicates(strategy: Strategy) -> bool:
    """Whether every process has the whole model, as on one device and under DDP."""
    # Both of those left out are subclasses of DDPStrategy.
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    return whole and not isinstance(strategy, DeepSpeedStrategy | XLAStrategy)


def has_buckets_beside_gradients(strategy: DDPStrategy) -> bool:
    """Whether DDP holds a second copy of the gradients, in its buckets."""
    return not strategy._ddp_kwargs.get("gradient_as_bucket_view", False)


def ddp_bucket(strategy: DDPStrategy) -> int:
    """Return the bytes of gradients that DDP reduces at once."""
    return int((strategy._ddp_kwargs.get("bucket_cap_mb") or 25) * 2**20)


def wrap_again(strategy: DDPStrategy) -> None:
    """DDP averages the gradients of the parameters that train when it is made, and waits for all of them."""
    strategy.model = strategy.lightning_module
    # The processes agree already; to send the first one's buffers round would change those that are each one's own.
    with patched(strategy, "_ddp_kwargs", {"init_sync": False, **strategy._ddp_kwargs}):
        strategy.configure_ddp()
    strategy._pl_static_graph_delay_done = False  # as for any new wrapper


def ddp_again(strategy: DDPStrategy, environment: ClusterEnvironment) -> DDPStrategy:
    """DDP as it was set, for another Trainer in the processes that ``environment`` describes."""
    backend = strategy.process_group_backend
    return DDPStrategy(cluster_environment=environment, process_group_backend=backend, **strategy._ddp_kwargs)


# Fabric


def without_fabric(loader: object) -> Any:
    """The loader that Fabric has wrapped; any other as it is."""
    return loader._dataloader if isinstance(loader, _FabricDataLoader) else loader


def passes_of(loader: object) -> int:
    """Return how often Fabric's loader was iterated over, its epoch for samplers; 0 for any other loader."""
    return loader._num_iter_calls if isinstance(loader, _FabricDataLoader) else 0


def set_passes_of(loader: object, passes: int) -> None:
    if isinstance(loader, _FabricDataLoader):
        loader._num_iter_calls = passes


def after_configure_model(pl_module: L.LightningModule, undo: ExitStack, then: Callable[[], object]) -> None:
    """Run ``then`` once, right after ``pl_module.configure_model``: the last moment before restore and optimizers.

    Lightning asks whether the hook is overridden by comparing code objects, so a plain function is needed here.
    """
    original = pl_module.configure_model

    def configure_model() -> None:
        restore()
        original()
        then()

    restore = patch(pl_module, "configure_model", configure_model)
    undo.callback(restore)


def list_callbacks(configure_callbacks: Callable[[], Any]) -> list[L.Callback]:
    """Return the callbacks that a module's ``configure_callbacks`` gives; Lightning takes a single one too."""
    brought = configure_callbacks() or []
    return [brought] if isinstance(brought, L.Callback) else list(brought)


def has_same_gradients(module: nn.Module) -> bool:
    """Return whether a Trainer runs ``module`` under DDP on several ranks, and averages gradients in each step.

    Example:
        >>> has_same_gradients(nn.Linear(2, 2))
        False
    """
    trainer = trainer_of(module)
    if trainer is None or trainer.world_size == 1 or not replicates(trainer.strategy):
        return False
    # Local SGD averages weights now and then, and gradients never.
    return isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._model_averaging_period is None


_BATCHES = 1000  # of an epoch, whose loader is not known


@contextmanager
def attached_trainer(module: nn.Module) -> Iterator[L.Trainer | None]:
    """Attach a Trainer at the first step of its first epoch, on the CPU and with a logger that does nothing.

    It has counts, an epoch of 1,000 batches, a strategy, and an optimizer, in whose place :func:`give_optimizers` sets
    others. What the module logs is ignored. A module that has a Trainer keeps it, and one that is no LightningModule
    gets none.

    Example:
        >>> module = L.LightningModule()
        >>> with attached_trainer(module):
        ...     module.trainer.global_step, module.trainer.estimated_stepping_batches, module.trainer.training
        (0, 1000, True)
    """
    if not isinstance(module, L.LightningModule) or module._trainer is not None:
        yield None
        return
    trainer = _make_trainer()
    trainer.strategy.connect(module)
    if parameters := trained_parameters(module):
        trainer.strategy.optimizers = [SGD(parameters)]
    with ExitStack() as undo:
        undo.enter_context(patched(module, "_trainer", trainer))
        undo.enter_context(patched(module, "log", _ignore))
        for metric in module.modules():
            if isinstance(metric, Metric) and hasattr(metric, "validate_args"):
                undo.enter_context(patched(metric, "validate_args", False))  # which would read values
        yield trainer


def give_optimizers(trainer: L.Trainer, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Have a Trainer made by :func:`attached_trainer` hold the optimizers and schedules of its module."""
    trainer.strategy.optimizers = list(optimizers)
    configs = [LRSchedulerConfig(scheduler, interval="step") for scheduler in schedulers]
    trainer.strategy.lr_scheduler_configs = configs


def _ignore(*args: object, **kwargs: object) -> None:
    pass


def _make_trainer() -> L.Trainer:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = L.Trainer(
                strategy=SingleDeviceStrategy("cpu"),
                plugins=[LightningEnvironment()],  # others, such as SLURM's, check the number of processes
                max_epochs=1,
                logger=DummyLogger(),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    finally:
        logger.setLevel(level)
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    trainer.fit_loop._combined_loader = CombinedLoader(range(_BATCHES))
    trainer.fit_loop.max_batches = _BATCHES
    return trainer
