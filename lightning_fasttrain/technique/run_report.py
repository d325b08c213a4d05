"""Says at the start of a fit what acts on it, and at its end how it went."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import Logger
from torch import nn

from lightning_fasttrain.core.messages import format_bytes, number_of, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique.explanation import Explanation, SaysWhatItHolds, explain_run

KEY = "fasttrain/techniques"
_OUTCOMES = 8  # lines at most


class Reporting(SaysWhatItHolds, Protocol):
    """What is asked of a technique here."""

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None: ...

    def outcome(self, model: nn.Module) -> str: ...

    def measurements(self) -> Mapping[str, float]: ...


class RunReport:
    """Speaks in three hooks of a callback, once each; between the first batch and the end nothing of it is called.

    It is quiet where Lightning's model summary is, with ``Trainer(enable_model_summary=False)`` or
    ``Trainer(barebones=True)``, and where the level of the logger ``"lightning_fasttrain"`` is above INFO. The
    hyper-parameter follows ``Trainer(enable_autolog_hparams=...)``.

    Args:
        holder: the callback.
        techniques: all that act.
    """

    def __init__(self, holder: L.Callback, techniques: Sequence[Reporting]) -> None:
        self.holder, self.techniques = holder, techniques
        self._own_start: Callable[..., Any] | None = None
        self._late_hyperparameters = ExitStack()
        self._explanation: Explanation | None = None
        self._idle: list[str] = []
        self._begun = self._timed = (0.0, 0, 0)  # in the first batch, and after it

    def install(self) -> Undo:
        """Take the hooks; returns how to leave them."""
        undo, holder = ExitStack(), self.holder
        self._own_start = None if is_empty_hook(holder, "on_train_batch_start") else holder.on_train_batch_start
        undo.callback(patch(holder, "on_fit_start", _in_turn(holder.on_fit_start, self._log_hyperparameters)))
        # Not on_train_start: the size of a step is told by its first batch.
        undo.callback(patch(holder, "on_train_batch_start", self._tell_start))
        undo.callback(patch(holder, "on_train_end", _in_turn(holder.on_train_end, self._tell_end)))
        return undo.close

    def find_idle(self, module: L.LightningModule) -> Iterator[tuple[str, str, str]]:
        """Called after the first batch: names of the techniques that did nothing in it, with why and what to do."""
        self._timed = _progress(module.trainer)  # from the second batch on: the first one compiles and warms up
        for technique in self.techniques:
            reason = technique.why_idle(module)
            if reason is not None:
                self._idle.append(f"{type(technique).__name__} did nothing: {reason[0]}")
                yield type(technique).__name__, *reason

    def _log_hyperparameters(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Right before Lightning logs the user's: into the same call, as TensorBoard shows the first one alone."""
        if not (trainer.is_global_zero and trainer.enable_autolog_hparams):
            return
        ours = {KEY: ", ".join(map(repr, self.techniques))}
        users = bool(module.hparams_initial or getattr(trainer.datamodule, "hparams_initial", None))
        for logger in trainer.loggers:
            if users:
                self._late_hyperparameters.callback(_log_with(logger, ours))
            else:
                logger.log_hyperparams(ours)

    def _tell_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.holder.on_train_batch_start = self._own_start  # type: ignore[method-assign]  # None is never called
        self._late_hyperparameters.close()
        self._begun = _progress(trainer)
        if trainer.is_global_zero and not _is_quiet(trainer):
            self._explanation = explain_run(trainer, module, self.techniques, batch)
            say("%s", self._explanation)
        if self._own_start is not None:
            self._own_start(trainer, module, batch, batch_idx)

    def _tell_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._explanation is None:
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what is still to be computed takes time too
        figures = self._figures(trainer)
        outcomes = [f"{type(one).__name__}: {text}" for one in self.techniques if (text := one.outcome(module))]
        say("%s", "\n  ".join([", ".join(figures), *self._idle, *outcomes][: _OUTCOMES + 1]))

    def _figures(self, trainer: L.Trainer) -> list[str]:
        assert self._explanation is not None
        measured: dict[str, float] = {}
        for technique in self.techniques:
            measured.update(technique.measurements())
        now = _progress(trainer)
        steps = now[2] - self._begun[2]
        figures = [number_of(steps, "step")]
        step_s = measured.get("step_ms", 0.0) / 1e3
        if step_s:
            figures.append(f"{step_s * 1e3:,.4g} ms each (median)")
        elif steps and now[1] > self._timed[1] > 0:
            batches_a_step = (now[1] - self._begun[1] + 1) / steps  # + 1: Lightning counts a batch before its hook
            step_s = (now[0] - self._timed[0]) / (now[1] - self._timed[1]) * batches_a_step
            figures.append(f"{step_s * 1e3:,.4g} ms each, with what came between them")
        tokens_per_s = measured.get("tokens_per_s", 0.0)
        if tokens_per_s:
            figures.append(f"{tokens_per_s:,.0f} tokens/s on each rank")
        elif step_s and self._explanation.tokens:
            about = self._explanation.tokens_per_step / step_s
            figures.append(f"about {about:,.0f} tokens/s, if all batches are as the first")
        if "mfu" in measured:
            figures.append(f"{measured['mfu']:.0%} of what a matrix product reaches here (MFU)")
        return [*figures, *_peak(trainer.strategy.root_device, measured)]


def _peak(device: torch.device, measured: Mapping[str, float]) -> list[str]:
    if "peak_bytes" in measured:
        return [f"peak {format_bytes(measured['peak_bytes'])}"]
    if device.type == "cuda":
        return [f"peak {format_bytes(torch.cuda.max_memory_allocated(device))} of this process so far"]
    return []


def _is_quiet(trainer: L.Trainer) -> bool:
    return not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)


def _progress(trainer: L.Trainer) -> tuple[float, int, int]:
    """The clock in seconds, and how many batches have begun and steps were made."""
    return perf_counter(), trainer.fit_loop.epoch_loop.batch_progress.total.ready, trainer.global_step


def _in_turn(own: Callable[..., Any], then: Callable[[Any, Any], None]) -> Callable[..., None]:
    def call_both(trainer: L.Trainer, module: L.LightningModule) -> None:
        own(trainer, module)
        then(trainer, module)

    return call_both


def _log_with(logger: Logger, ours: Mapping[str, str]) -> Undo:
    """Have the next hyper-parameters that ``logger`` gets bring ``ours`` along; those that were there already win.

    Returns:
        What logs ``ours`` alone, if none came.
    """
    log = logger.log_hyperparams

    def log_all(params: Any, *args: Any, **kwargs: Any) -> None:
        restore()
        waits.clear()  # so that log_ours has nothing left to log
        theirs = vars(params) if isinstance(params, Namespace) else params
        log({**ours, **theirs}, *args, **kwargs)

    restore, waits = patch(logger, "log_hyperparams", log_all), [log]

    def log_ours() -> None:
        restore()
        for log_alone in waits:
            log_alone(dict(ours))

    return log_ours


def is_empty_hook(callback: L.Callback, hook: str) -> bool:
    """Whether nothing happens in a hook of a callback."""
    return getattr(type(callback), hook) is getattr(L.Callback, hook) and hook not in vars(callback)
