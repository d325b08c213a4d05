"""A run that is told to go saves one checkpoint at the next step boundary, on all ranks alike, and exits with 143."""

import os
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.host.lightning import (
    cluster_environment,
    keep_sigterm_from_ranks,
    signal_connector,
    step_goes_on,
)
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.run.guards.preemption_flag import PreemptionFlag, a_code, check_signals, name_of
from lightning_fasttrain.technique import Technique


class Preemption(Technique):
    """Save one checkpoint and exit when the scheduler says so, whichever rank it tells; see :class:`PreemptionFlag`.

    Acts between batches, when everything that belongs to a step is done: the optimizer's update, the other
    callbacks, validation and, after the last batch of an epoch, the end of the epoch. Never inside an accumulation
    window; under manual optimisation, after batches in which an optimizer stepped. A validation in progress is
    finished first, so let the scheduler warn early enough. Before the first step nothing is saved, as nothing is
    new. While it is attached Lightning's own way with SIGTERM is off: no collective in a signal handler, and no
    question to the device at each batch.

    Works with one process, Lightning's launcher (tell the main process, a child, or all), torchrun (which passes
    SIGTERM on and kills after ``--shutdown-timeout``, 30 s, and itself exits with 1) and SLURM, where the requeue
    signal stays Lightning's. With ``ddp_spawn`` and ``ddp_fork`` tell the workers: the main process does not train.
    A run that hangs answers to no signal; that is for :class:`~lightning_fasttrain.run.HangWatch`.

    Args:
        folder: where ``preempted-step=N.ckpt`` goes; by default where the run's ModelCheckpoint writes, or else the
            Trainer's ``default_root_dir``.
        signals: what counts as being told to go.
        exit_code: what all ranks exit with, by ``SystemExit``.
        every: optimizer steps between two questions to the other ranks; one question costs some 70 µs.

    Raises:
        TypeError, ValueError: an argument is unfit; in ``fit``: a signal that SLURM's requeueing uses.

    Example:
        >>> preemption = Preemption(signals=(signal.SIGTERM, signal.SIGUSR2))

    Source:
        See :class:`PreemptionFlag`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "SIGTERM on any rank: all save one checkpoint at the same step and exit with 143"
    when: ClassVar[str] = "a cluster says so before it ends a run; not where SLURM requeues by the same signal"
    in_a_loop: ClassVar[str] = "run.PreemptionFlag().should_stop() at each step boundary"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        signals: Iterable[int] = (signal.SIGTERM,),
        exit_code: int = 143,
        every: int = 1,
    ) -> None:
        self.folder = folder
        self.signals = check_signals(signals)
        self.exit_code = a_code(exit_code)
        self.every = positive_int("every", every)
        self._flag: PreemptionFlag | None = None
        self._going = False
        self._steps = 0

    def request(self) -> None:
        """Tell this rank to go, as a signal would; for programs that hear of it in another way."""
        if self._flag is not None:
            self._flag.request()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_requeue_signal(trainer, self.signals)
        self._going = False
        # A new one for each run: its group belongs to the ranks of now.
        self._flag = flag = PreemptionFlag(self.signals, self.every, self.exit_code)
        connector, fit_loop = signal_connector(trainer), trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        lightnings, after_batch, after_epoch = (
            connector.register_signal_handlers,
            epoch_loop.on_advance_end,
            fit_loop.on_advance_end,
        )
        self._steps = trainer.global_step

        # Lightning registers its handlers when all is set up, after this, and would replace those of the flag.
        def register_signal_handlers() -> None:
            lightnings()
            flag.__enter__()

        def on_batch_over(data_fetcher: Any) -> None:
            after_batch(data_fetcher)
            if self._at_boundary(trainer, pl_module):
                self._going = flag.should_stop()
                # After the last batch the epoch is ended first, so that the checkpoint is one between epochs.
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
        # On the way out further signals are heard and ignored, until Lightning puts its originals back.
        if not (failed and self._going):
            flag.__exit__(Exception if failed else None)

    def _at_boundary(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether the batch that is over was the last one of an optimizer step."""
        # Searches for a learning rate or a batch size run this loop too, without callbacks.
        if step_goes_on(trainer) or self not in trainer.callbacks:
            return False
        before, self._steps = self._steps, trainer.global_step
        # Under manual optimisation Lightning does not know when a step ends; the count of steps does.
        return pl_module.automatic_optimization or before != self._steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last before the first step. What came until now is acted on here."""
        assert self._flag is not None
        self._going = self._flag.should_stop_now()
        if self._going:
            say("Preemption: told to go before the first step. Nothing new to save; exit code %d", self.exit_code)
            raise SystemExit(self.exit_code)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: for what came too late for the last step boundary."""
        assert self._flag is not None
        self._going = self._flag.should_stop_now()
        if self._going:
            self._save_and_exit(trainer)

    def _save_and_exit(self, trainer: L.Trainer) -> None:
        path = os.path.join(self._folder_of(trainer), f"preempted-step={trainer.global_step}.ckpt")
        if "://" not in path and trainer.is_global_zero:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(path)
        getattr(trainer.strategy, "wait", lambda: None)()  # one that writes in the background
        say("Preemption: told to go. Saved %s after step %d; exit code %d", path, trainer.global_step, self.exit_code)
        raise SystemExit(self.exit_code)

    def _folder_of(self, trainer: L.Trainer) -> str:
        writer = trainer.checkpoint_callback
        theirs = getattr(writer, "dirpath", None) or trainer.default_root_dir
        # Rank zero's: a default folder may be named after the time.
        return str(trainer.strategy.broadcast(os.fspath(self.folder or theirs)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_flag": None}  # handlers and process groups cannot be copied


def _refuse_requeue_signal(trainer: L.Trainer, signals: tuple[int, ...]) -> None:
    environment = cluster_environment(trainer)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        requeue = environment.requeue_signal or signal.SIGUSR1
        if requeue in signals:
            why = f"Lightning saves and requeues the job when it gets {name_of(requeue)}"
            way_out = "Leave this signal out, or use SLURMEnvironment(auto_requeue=False)"
            raise ValueError(explain(f"Preemption(signals={signals}) under SLURM", why, way_out))
