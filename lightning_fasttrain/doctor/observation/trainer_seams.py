"""Watch the steps of a Trainer, through its profiler, which Lightning calls around each phase and hook."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor.observation.torch_seams import TorchSeams
from lightning_fasttrain.doctor.observation.watch import HostFacts, Watch
from lightning_fasttrain.profiling.step_meter import PhaseAction, StepProfiler

_HOOKS_OF_A_STEP = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step")


class TrainerSeams:
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
        seams = TorchSeams(watch, lambda: profiler.in_loop)
        self._undo.callback(seams.close)
        seams.install()

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
