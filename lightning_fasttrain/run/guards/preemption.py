"""Save one checkpoint at the next step boundary when preempted, on all ranks, and exit with 143."""

import os
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fasttrain.core.checks import PositiveInt
from lightning_fasttrain.core.files.safe_load import is_remote
from lightning_fasttrain.core.host.lightning import (
    DataFetcher,
    accumulation_continues,
    cluster_environment,
    keep_sigterm_from_ranks,
    signal_connector,
)
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.run.checkpoint.checkpoint_disk_space import checkpoint_bytes, why_unfit
from lightning_fasttrain.run.guards.preemption_flag import ExitCode, PreemptionFlag, check_signals, name_of
from lightning_fasttrain.technique import Technique


class Preemption(Technique):
    """Save one checkpoint and exit when the scheduler signals any rank; see :class:`PreemptionFlag`.

    Acts between batches, when a step is complete: the optimizer's update, the other callbacks, validation and, after
    the last batch of an epoch, the end of the epoch. Never inside an accumulation window; under manual optimization,
    after batches in which an optimizer stepped. A running validation is finished first, so the scheduler's notice must
    be long enough. Before the first step there is nothing new to save. While attached, Lightning's own SIGTERM
    handling is off: no collective in a signal handler, and no device synchronization at each batch.

    Works with one process, Lightning's launcher (signal the main process, a child, or all), torchrun (which forwards
    SIGTERM, kills after ``--shutdown-timeout``, 30 s, and itself exits with 1) and SLURM, where the requeue signal
    stays Lightning's. With ``ddp_spawn`` and ``ddp_fork`` signal the workers: the main process does not train. A run
    that hangs does not react to signals; use :class:`~lightning_fasttrain.run.HangWatch` for it.

    Args:
        folder: where ``preempted-step=N.ckpt`` is written; by default the folder of the run's ModelCheckpoint, or else
            the Trainer's ``default_root_dir``.
        signals: signals that request preemption.
        exit_code: exit code of all ranks, by ``SystemExit``.
        every: optimizer steps between two exchanges with the other ranks; one exchange costs about 70 µs.

    Raises:
        TypeError, ValueError: an argument is invalid; in ``fit``: a signal that SLURM's requeueing uses.
        OSError: in ``fit``, before the first step: ``folder`` is not writable or too full.

    Example:
        >>> preemption = Preemption(signals=(signal.SIGTERM, signal.SIGUSR2))

    Source:
        See :class:`PreemptionFlag`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "after SIGTERM on any rank, all save one checkpoint at the same step and exit with 143"
    when: ClassVar[str] = "a cluster sends a signal before it ends a run; not where SLURM requeues by the same signal"
    in_a_loop: ClassVar[str] = "run.PreemptionFlag().should_stop() at each step boundary"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        signals: Iterable[int] = (int(signal.SIGTERM),),
        exit_code: ExitCode = 143,
        every: PositiveInt = 1,
    ) -> None:
        self.folder = folder
        self.signals = check_signals(signals)
        self.exit_code = exit_code
        self.every = every
        self._flag: PreemptionFlag | None = None
        self._going = False
        self._steps = 0

    def request(self) -> None:
        """Request preemption on this rank, as if the signal had arrived; for programs that learn of it otherwise."""
        if self._flag is not None:
            self._flag.request()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_requeue_signal(trainer, self.signals)
        self._going = False
        # A new one for each run, since its process group belongs to the current ranks.
        self._flag = flag = PreemptionFlag(self.signals, self.every, self.exit_code)
        connector, fit_loop = signal_connector(trainer), trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        lightnings, after_batch, after_epoch = (
            connector.register_signal_handlers,
            epoch_loop.on_advance_end,
            fit_loop.on_advance_end,
        )
        self._steps = trainer.global_step

        # Lightning registers its handlers after this, at the end of its setup, and would replace those of the flag.
        def register_signal_handlers() -> None:
            lightnings()
            flag.__enter__()

        def on_batch_over(data_fetcher: DataFetcher) -> None:
            after_batch(data_fetcher)
            if self._at_boundary(trainer, pl_module):
                self._going = flag.should_stop()
                # After the last batch the epoch is ended first, so that the checkpoint lies between epochs.
                if self._going and not epoch_loop.done:
                    self._save_and_exit(trainer)

        def on_epoch_over() -> None:
            after_epoch()
            if self._going:
                self._save_and_exit(trainer)

        # Undone in reverse order: the patches first, the flag's handlers last.
        undo = ExitStack()
        undo.callback(self._leave, trainer)
        undo.callback(patch(connector, "register_signal_handlers", register_signal_handlers))
        undo.callback(patch(epoch_loop, "on_advance_end", on_batch_over))
        undo.callback(patch(fit_loop, "on_advance_end", on_epoch_over))
        if signal.SIGTERM in self.signals:
            undo.callback(keep_sigterm_from_ranks(trainer))
        return undo.close

    def _leave(self, trainer: L.Trainer) -> None:
        flag, self._flag = self._flag, None
        assert flag is not None
        failed = trainer.state.status == TrainerStatus.INTERRUPTED
        # During the exit further signals are handled and ignored, until Lightning restores its original handlers.
        if not (failed and self._going):
            flag.__exit__(Exception if failed else None)

    def _at_boundary(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether the finished batch was the last one of an optimizer step."""
        # Searches for a learning rate or a batch size also run this loop, without callbacks.
        if accumulation_continues(trainer) or self not in trainer.callbacks:
            return False
        before, self._steps = self._steps, trainer.global_step
        # Under manual optimization Lightning does not know when a step ends, but its step counter does.
        return pl_module.automatic_optimization or before != self._steps

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the optimizers exist, so a checkpoint's size is known, and nothing is trained yet."""
        folder, reason = self._folder_of(trainer), None
        if trainer.is_global_zero and not is_remote(folder):
            nbytes = checkpoint_bytes(trainer, trainer.optimizers)
            reason = why_unfit(Path(folder), nbytes, "use Preemption(folder=...)", copies=1)
        reason = trainer.strategy.broadcast(reason)
        if reason is not None:
            raise OSError(reason)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last before the first step. Handles requests that arrived until now."""
        assert self._flag is not None
        self._going = self._flag.should_stop_now()
        if self._going:
            say("Preemption: requested before the first step. Nothing new to save; exit code %d", self.exit_code)
            raise SystemExit(self.exit_code)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: handle a request that came too late for the last step boundary."""
        assert self._flag is not None
        self._going = self._flag.should_stop_now()
        if self._going:
            self._save_and_exit(trainer)

    def _save_and_exit(self, trainer: L.Trainer) -> None:
        path = os.path.join(self._folder_of(trainer), f"preempted-step={trainer.global_step}.ckpt")
        if not is_remote(path) and trainer.is_global_zero:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(path)
        # A strategy may still be writing in the background.
        getattr(trainer.strategy, "wait", lambda: None)()
        say("Preemption: requested. Saved %s after step %d; exit code %d", path, trainer.global_step, self.exit_code)
        raise SystemExit(self.exit_code)

    def _folder_of(self, trainer: L.Trainer) -> str:
        writer = trainer.checkpoint_callback
        theirs = getattr(writer, "dirpath", None) or trainer.default_root_dir
        # Rank 0's folder: a default folder may be named after the time.
        return str(trainer.strategy.broadcast(os.fspath(self.folder or theirs)))

    def __getstate__(self) -> dict[str, Any]:
        # Signal handlers and process groups cannot be copied.
        return {**super().__getstate__(), "_flag": None}


def _refuse_requeue_signal(trainer: L.Trainer, signals: tuple[int, ...]) -> None:
    environment = cluster_environment(trainer)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        requeue = environment.requeue_signal or signal.SIGUSR1
        if requeue in signals:
            why = f"Lightning saves and requeues the job when it receives {name_of(requeue)}"
            way_out = "Remove this signal, or use SLURMEnvironment(auto_requeue=False)"
            raise ValueError(explain(f"Preemption(signals={signals}) under SLURM", why, way_out))
