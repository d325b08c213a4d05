"""Report the techniques of a run at its start, their outcome at its end, and techniques without effect."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary

from lightning_fasttrain.core.batch.padding_share import BATCHES
from lightning_fasttrain.core.messages import align, explain, format_bytes, number_of, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique.explanation import Explanation, Reporting, explain_run, padding_of

KEY = "fasttrain/techniques"
_ROWS = 11  # of the report at the end, below its title


class RunSummary:
    """Reports on a run from the hooks of one of its callbacks.

    The summary comes with the first batch, whose size it states; warnings after the first batch that had a loss; the
    outcome at the end. In between, no hook of it is left. It is silent where Lightning's model summary is, with
    ``Trainer(enable_model_summary=False)`` or ``Trainer(barebones=True)``, and where the level of the logger
    ``"lightning_fasttrain"`` is above INFO. The hyperparameter follows ``Trainer(enable_autolog_hparams=...)``.

    Args:
        holder: the callback.
        techniques: all that act.
        divides: whether Lightning divides the losses of an accumulation window.
    """

    def __init__(self, holder: L.Callback, techniques: Sequence[Reporting], divides: bool) -> None:
        self.holder, self.techniques = holder, techniques
        self._own_start: Callable[..., Any] | None = None
        self._own_end: Callable[..., Any] | None = None
        self._awaits_loss, self._awaits_missing_loss = True, divides
        self._explanation: Explanation | None = None
        self._padding = padding_of(techniques)
        self._idle: list[tuple[str, str]] = []
        self._begun = self._timed = (0.0, 0, 0)  # in the first batch, and after it

    def install(self) -> Undo:
        """Patch the hooks, and return a function that restores them."""
        undo, holder = ExitStack(), self.holder
        self._own_start = None if is_empty_hook(holder, "on_train_batch_start") else holder.on_train_batch_start
        self._own_end = None if is_empty_hook(holder, "on_train_batch_end") else holder.on_train_batch_end
        # Not on_train_start: the size of a step is that of its first batch.
        undo.callback(patch(holder, "on_train_batch_start", self._report_start))
        undo.callback(patch(holder, "on_train_batch_end", self._check_batch))
        undo.callback(patch(holder, "on_train_end", _in_turn(holder.on_train_end, self._report_end)))
        return undo.close

    def _report_start(self, trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int) -> None:
        self.holder.on_train_batch_start = self._own_start  # type: ignore[method-assign]  # None is never called
        self._begun = _progress(trainer)
        if trainer.is_global_zero and trainer.enable_autolog_hparams:
            # After Lightning's call with the user's own, since TensorBoard shows only the first call.
            for logger in trainer.loggers:
                logger.log_hyperparams({KEY: ", ".join(map(repr, self.techniques))})
        if trainer.is_global_zero and not _is_quiet(trainer):
            self._explanation = explain_run(trainer, module, self.techniques, batch)
            say("%s", self._explanation)
            if self._padding is not None:
                return self._count_padding(trainer, module, batch, batch_idx)
        if self._own_start is not None:
            self._own_start(trainer, module, batch, batch_idx)

    def _count_padding(self, trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int) -> None:
        """Count the padding of the first few batches, and then suggest cutting it off where there is much."""
        assert self._padding is not None
        self.holder.on_train_batch_start = self._count_padding
        self._padding.add(batch)
        if self._padding.batches == BATCHES:
            self.holder.on_train_batch_start = self._own_start  # type: ignore[method-assign]  # None is never called
            if text := str(self._padding):
                say("%s", text)
        if self._own_start is not None:
            self._own_start(trainer, module, batch, batch_idx)

    def _check_batch(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._own_end is not None:
            self._own_end(trainer, module, outputs, batch, batch_idx)
        # With manual optimization a step may return nothing and train all the same.
        if self._awaits_loss and (outputs or not module.automatic_optimization):
            self._awaits_loss = False
            self._warn_of_idle(module)
        if self._awaits_missing_loss and not outputs:
            self._awaits_missing_loss = False
            _warn_of_missing_loss(batch_idx, trainer.accumulate_grad_batches)
        if not self._awaits_loss and not self._awaits_missing_loss:
            self.holder.on_train_batch_end = self._own_end  # type: ignore[method-assign]  # None is never called

    def _warn_of_idle(self, module: L.LightningModule) -> None:
        """Warn of techniques that did nothing in the first batch."""
        # Time counts from the second batch on, since the first one compiles and warms up.
        self._timed = _progress(module.trainer)
        for technique in self.techniques:
            reason = technique.why_idle(module)
            if reason is not None:
                name, (why, way_out) = type(technique).__name__, reason
                self._idle.append((name, f"did nothing: {why}"))
                warn(explain(f"{name} did nothing in the first batch", why, way_out))

    def _report_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._explanation is None:
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            # Work that is still queued takes time, too.
            torch.cuda.synchronize(device)
        outcomes = [(type(one).__name__, text) for one in self.techniques if (text := one.outcome(module))]
        steps = number_of(trainer.global_step - self._begun[2], "step")
        rows = [*self._figures(trainer), *self._idle, *outcomes]
        say("%s", align(steps, rows[:_ROWS]))

    def _figures(self, trainer: L.Trainer) -> Iterator[tuple[str, str]]:
        assert self._explanation is not None
        measured: dict[str, float] = {}
        for technique in self.techniques:
            measured.update(technique.measurements())
        now = _progress(trainer)
        steps = now[2] - self._begun[2]
        step_s = measured.get("step_ms", 0.0) / 1e3
        if step_s:
            yield "Time", f"{step_s * 1e3:,.4g} ms/step (median)"
        elif steps and now[1] > self._timed[1] > 0:
            # Lightning counts a batch before its hook, hence + 1.
            batches_a_step = (now[1] - self._begun[1] + 1) / steps
            step_s = (now[0] - self._timed[0]) / (now[1] - self._timed[1]) * batches_a_step
            yield "Time", f"{step_s * 1e3:,.4g} ms/step, including data loading and callbacks"
        tokens_per_s = measured.get("tokens_per_s", 0.0)
        if tokens_per_s:
            yield "Throughput", f"{tokens_per_s:,.0f} tokens/s on each rank"
        elif step_s and self._explanation.tokens:
            about = self._explanation.tokens_per_step / step_s
            yield "Throughput", f"about {about:,.0f} tokens/s, assuming batches like the first"
        if "mfu" in measured:
            yield "MFU", f"{measured['mfu']:.0%} of what a matrix product reaches on this device"
        yield from _peak(trainer.strategy.root_device, measured)


def _warn_of_missing_loss(batch_idx: int, factor: int) -> None:
    what = f"training_step returned None for batch {batch_idx}, with accumulate_grad_batches={factor}"
    why = f"Lightning still divides by {factor}, so the gradient of this step is too small"
    warn(explain(what, why, f"Use TokenWeightedAccumulation({factor}) instead of accumulate_grad_batches"))


def _peak(device: torch.device, measured: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if "peak_bytes" in measured:
        yield "Peak memory", format_bytes(measured["peak_bytes"])
    elif device.type == "cuda":
        yield "Peak memory", f"{format_bytes(torch.cuda.max_memory_allocated(device))} in this process so far"


def _is_quiet(trainer: L.Trainer) -> bool:
    return not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)


def _progress(trainer: L.Trainer) -> tuple[float, int, int]:
    """Return the clock in seconds, the number of batches that have begun, and the number of optimizer steps."""
    return perf_counter(), trainer.fit_loop.epoch_loop.batch_progress.total.ready, trainer.global_step


def _in_turn(own: Callable[..., object], then: Callable[[Any, Any], None]) -> Callable[..., None]:
    def call_both(trainer: L.Trainer, module: L.LightningModule) -> None:
        own(trainer, module)
        then(trainer, module)

    return call_both


def is_empty_hook(callback: L.Callback, hook: str) -> bool:
    """Whether a callback does nothing in a hook."""
    return getattr(type(callback), hook) is getattr(L.Callback, hook) and hook not in vars(callback)


_HOOKS_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def leave_out_empty_hooks(callback: L.Callback, undo: ExitStack) -> None:
    """Hide the hooks of a step that do nothing: Lightning calls each, which costs more than most of them do."""
    for hook in _HOOKS_OF_A_STEP:
        if is_empty_hook(callback, hook):
            undo.callback(patch(callback, hook, None))
