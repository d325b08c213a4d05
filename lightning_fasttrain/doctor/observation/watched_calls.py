"""Watch the calls of a training loop: torch's functions, optimizers, loaders, and hooks of the Trainer."""

import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_fasttrain.core.batch.padding_share import BATCHES
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor.observation.source_lines import find_call
from lightning_fasttrain.doctor.observation.watch import HostFacts, LoaderFacts, Watch
from lightning_fasttrain.profiling.step_meter import PhaseAction, StepProfiler, TimedPhase


class TorchPatches:
    """Reports to a watch what every training loop does through torch, until :meth:`close`.

    Args:
        watch: what is reported to.
        is_training: whether a batch that is requested now belongs to training.
    """

    def __init__(self, watch: Watch, is_training: Callable[[], bool]) -> None:
        self.watch, self.is_training = watch, is_training
        self._thread = threading.get_ident()
        self._updating: list[TimedPhase] = []
        self._undo = ExitStack()

    def install(self) -> None:
        """Start reporting."""
        undo = self._undo
        undo.callback(patch(_BaseDataLoaderIter, "__next__", self._request(_BaseDataLoaderIter.__next__)))
        undo.callback(patch(DataLoader, "__iter__", self._iterate(DataLoader.__iter__)))
        undo.callback(patch(torch.autograd, "backward", self._go_backward(torch.autograd.backward)))
        for kind in _kinds_of_schedulers():
            undo.callback(patch(kind, "step", self._schedule(vars(kind)["step"])))
        undo.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def close(self) -> None:
        """Restore everything."""
        self._undo.close()

    def on_request(self) -> None:
        """Called before a batch is requested."""

    def on_arrival(self) -> None:
        """Called when a batch has arrived."""

    def on_update(self) -> None:
        """Called after an update."""

    def _concerns(self) -> bool:
        return threading.get_ident() == self._thread and self.is_training()

    def _request(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(loader: object) -> Any:
            if not self._concerns():
                return original(loader)
            self.on_request()
            with self.watch.timer.phase("data_wait"), self.watch.tracer:
                batch = self._next(original, loader)
            _note_loader(self.watch.loader, loader)
            if self.watch.done < self.watch.warmup and self.watch.padding.batches < BATCHES:
                self.watch.padding.add(batch)
            self.on_arrival()
            return batch

        return request

    def _next(self, original: Callable[..., object], loader: object) -> Any:
        try:
            return original(loader)
        except StopIteration:
            # What follows an epoch, such as validation, is not a part of the step.
            self.watch.leave_look()
            raise

    def _iterate(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(loader: object) -> Any:
            if self._concerns():
                self.watch.loader.persistent = bool(loader.persistent_workers)
            return original(loader)

        return iterate

    def _go_backward(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: object, **kwargs: object) -> Any:
            if not self._concerns():
                return original(*args, **kwargs)
            self.watch.before_backward()
            with self.watch.timer.phase("backward"):
                return original(*args, **kwargs)

        return backward

    def _schedule(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: object, *args: object, **kwargs: object) -> Any:
            caller = sys._getframe(1)
            # A scheduler steps once when it is made.
            if caller.f_code.co_name != "_initial_step":
                self.watch.note_scheduler(scheduler, find_call(caller).line)
            return original(scheduler, *args, **kwargs)

        return step

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._concerns():
            return
        self.watch.before_update(optimizer, find_call(sys._getframe(1)).line)
        phase = self.watch.timer.phase("optimizer")
        phase.__enter__()
        self._updating.append(phase)

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._updating:
            return
        self._updating.pop().__exit__()
        self.watch.after_update(optimizer)
        self.on_update()


class LoopPatches(TorchPatches):
    """Also divides a loop into steps: from one batch to the next that is requested after an update.

    Where no ``DataLoader`` is used, a step lasts from one update of the first optimizer to its next.
    """

    def __init__(self, watch: Watch, when_done: Callable[[], None]) -> None:
        super().__init__(watch, torch.is_grad_enabled)
        self._when_done = when_done
        self._forward: TimedPhase | None = None
        self._has_loader = self._has_stepped = False

    def install(self) -> None:
        super().install()
        self._begin_forward()
        self.watch.begin_step()

    def close(self) -> None:
        self._end_forward()
        super().close()

    def on_request(self) -> None:
        self._end_forward()
        self._has_loader = True
        if self._has_stepped:
            self._end_step()

    def on_arrival(self) -> None:
        self._begin_forward()

    def on_update(self) -> None:
        self._end_forward()
        self._has_stepped = True
        if not self._has_loader and len(self.watch.updates) == 1:
            self._end_step()
            self._begin_forward()

    def _end_step(self) -> None:
        self._has_stepped = False
        if self.watch.has_ended:
            return
        self.watch.end_step()
        self.watch.timer.end_step()
        if self.watch.has_ended:
            self._when_done()
        else:
            self.watch.begin_step()

    def _begin_forward(self) -> None:
        if self._forward is None:
            self._forward = self.watch.timer.phase("forward")
            self._forward.__enter__()

    def _end_forward(self) -> None:
        # An update within a closure ends while phases around it are open.
        if self._forward is not None and self.watch.timer.current == "forward":
            self._forward.__exit__()
            self._forward = None


def _note_loader(facts: LoaderFacts, loader: object) -> None:
    facts.workers, facts.pins_memory = loader._num_workers, loader._pin_memory
    facts.dataset = type(loader._dataset).__name__


def _kinds_of_schedulers() -> Iterable[type]:
    """Yield the classes that define ``step``; those of composite schedulers call the ``step`` of their parts."""
    for kind in (LRScheduler, ReduceLROnPlateau):
        if "step" in vars(kind):
            yield kind


_HOOKS_OF_A_STEP = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step")


class TrainerPatches:
    """Reports to a watch what a Trainer does, until :meth:`close`.

    Args:
        trainer: the Trainer.
        watch: what is reported to.
        watcher: the callback for which it is done, whose own time is not reported.
    """

    def __init__(self, trainer: L.Trainer, watch: Watch, watcher: L.Callback) -> None:
        self.trainer, self.watch, self.watcher = trainer, watch, watcher
        self._undo = ExitStack()
        self._profiler: WatchingProfiler | None = None

    def install(self) -> None:
        """Start reporting."""
        trainer, watch = self.trainer, self.watch
        _note_host(watch.host, trainer, self.watcher)
        self._profiler = profiler = WatchingProfiler(trainer, watch)
        self._undo.callback(patch(trainer, "profiler", profiler))
        for logger in trainer.loggers:
            self._undo.callback(patch(logger, "log_metrics", self._timed(logger.log_metrics, "logging")))
        patches = TorchPatches(watch, lambda: profiler.in_loop)
        self._undo.callback(patches.close)
        patches.install()

    def close(self) -> None:
        """Restore everything."""
        self._undo.close()

    def pause(self) -> None:
        """Time nothing until the next training batch is requested."""
        if self._profiler is not None:
            self._profiler.leave_loop()

    def _timed(self, log_metrics: Any, name: str) -> Any:
        def log_and_time(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            try:
                return log_metrics(*args, **kwargs)
            finally:
                self.watch.note_action(name, perf_counter() - began)

        return log_and_time


def _note_host(facts: HostFacts, trainer: L.Trainer, watcher: L.Callback) -> None:
    facts.max_epochs = max(trainer.max_epochs or 0, 0)
    facts.updates = trainer.estimated_stepping_batches
    facts.optimizers = list(trainer.optimizers)
    for config in trainer.lr_scheduler_configs:
        facts.schedulers.append((config.scheduler, str(config.interval)))
    for callback in trainer.callbacks:
        for hook in _HOOKS_OF_A_STEP:
            is_overridden = getattr(type(callback), hook) is not getattr(L.Callback, hook)
            if is_overridden and callback is not watcher:
                name = f"[Callback]{callback.state_key}.{hook}"
                facts.hooks[name] = (type(callback).__name__, hook)
                if isinstance(callback, Checkpoint):
                    facts.savers.add(name)
    facts.searches_unused = bool(getattr(trainer.strategy.model, "find_unused_parameters", False))
    facts.every = {"log_every_n_steps": int(trainer.log_every_n_steps)}


class WatchingProfiler(StepProfiler):
    """Forwards everything to the user's profiler, and reports phases, steps and the time of each hook to a watch."""

    def __init__(self, trainer: L.Trainer, watch: Watch) -> None:
        super().__init__(trainer, watch.timer)
        self.watch = watch
        # The fast path of the base class times no hooks.
        vars(self).pop("profile", None)
        self._callbacks = PhaseAction(self, "callbacks")

    def enter_loop(self) -> None:
        is_new = not self.in_loop or self.stepped
        super().enter_loop()
        if is_new and not self.watch.has_ended:
            self.watch.begin_step()

    def _end_step(self) -> None:
        super()._end_step()
        if not self.watch.has_ended:
            self.watch.end_step()

    @contextmanager
    def profile(self, action_name: str) -> Generator[str]:
        began = perf_counter()
        with self.inner.profile(action_name), self._phase_of(action_name):
            yield action_name
        name = {"save_checkpoint": "checkpoint"}.get(action_name, action_name)
        if name == "checkpoint" or name in self.watch.host.hooks:
            self.watch.note_action(name, perf_counter() - began)

    def _phase_of(self, action_name: str) -> Any:
        if action_name in self.actions:
            return self.actions[action_name]
        is_hook = action_name.startswith("[Callback]") or ".on_" in action_name
        return self._callbacks if is_hook and self.in_loop else nullcontext()
