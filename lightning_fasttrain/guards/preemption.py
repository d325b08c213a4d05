"""Save one checkpoint at the next step boundary when preempted, on all ranks, and exit with 143."""

import atexit
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fasttrain.checkpoint.atomic_checkpoints import checkpoint_bytes, why_unfit
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.checks.annotations import Bounds
from lightning_fasttrain.core.distributed import ControlGroup, rank_count
from lightning_fasttrain.core.host.lightning import (
    DataFetcher,
    accumulation_continues,
    child_watchers,
    cluster_environment,
    keep_sigterm_from_ranks,
    signal_connector,
)
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.safe_load import is_remote
from lightning_fasttrain.technique import Technique

ExitCode = Annotated[int, Bounds(0, 255)]


@check_arguments
class PreemptionFlag:
    """Whether any rank was preempted, the same on all ranks; for Fabric and bare loops, as a context manager.

    The signal handler only sets an attribute, so signals may arrive at any moment and repeatedly. With several ranks,
    each boundary starts an asynchronous all-reduce of the attribute over its own gloo group, on the CPU, and reads the
    result of the previous one, which has long finished: nothing waits for the device, and all ranks get the same answer
    at the same step, one boundary after the signal.

    If Lightning or Fabric started the other ranks, its observer, which kills the main process when a child exits with
    a nonzero code, accepts ``exit_code`` as intended, and the main process ends after its children.

    The flag replaces existing handlers and restores them afterwards. Python lets only the main thread set handlers: in
    another thread the flag warns, and signals that the main thread receives must be passed on with ``request``.

    Args:
        signals: signals that request preemption.
        every: boundaries between two exchanges with the other ranks; the answer is at most twice as many late.
        exit_code: the exit code of the ranks.

    Raises:
        TypeError, ValueError: no signals, a signal that cannot be caught, ``every`` is not an integer of at least 1, or
            ``exit_code`` is not a valid exit code.

    Example:
        >>> import signal
        >>> with PreemptionFlag() as flag:
        ...     for step in range(100):
        ...         if step == 3:  # say, a scheduler
        ...             signal.raise_signal(signal.SIGTERM)
        ...         if flag.should_stop():
        ...             break  # save here, and then: raise SystemExit(flag.exit_code)
        >>> step
        3

    Source:
        Ours. Lightning 2.6 broadcasts in the handler, which blocks when a rank other than 0 gets the signal (issue
        20806), and broadcasts from rank 0 and waits for the device at each batch (issue 21487).
    """

    def __init__(
        self, signals: Iterable[int] = (int(signal.SIGTERM),), every: PositiveInt = 1, exit_code: ExitCode = 143
    ) -> None:
        self.signals = check_signals(signals)
        self.every = every
        self.exit_code = exit_code
        # An attribute, not an Event, since a handler must not acquire a lock.
        self.raised = False
        self._previous: dict[int, Any] = {}
        self._boundaries = 0
        self._ranks: ControlGroup | None = None

    def request(self) -> None:
        """Request preemption on this rank, as if the signal had arrived."""
        self.raised = True

    def should_stop(self) -> bool:
        """Whether all ranks stop here. Call it on every rank at each step boundary, until the answer is True."""
        if self._ranks is None and rank_count() == 1:
            return self.raised
        self._boundaries += 1
        if self._boundaries % self.every:
            return False
        if self._answer():
            return True
        self._ask()
        return False

    def should_stop_now(self) -> bool:
        """Answer without the delay of one boundary: for the start and end of the loop, where waiting is cheap."""
        if self._ranks is None and rank_count() == 1:
            return self.raised
        earlier = self._answer()
        self._ask()
        return self._answer() or earlier

    def _ask(self) -> None:
        # A collective: all ranks reach it at the same boundary, as they all count the same boundaries.
        self._ranks = self._ranks or ControlGroup.apart(_timeout_of_the_ranks())
        self._ranks.vote(self.raised)

    def _answer(self) -> bool:
        # The vote was started one boundary ago, so it is done, unless a rank is late.
        found = self._ranks is not None and any(self._ranks.read_vote())
        if found:
            _let_children_exit(self.exit_code)
        return found

    def __enter__(self) -> "PreemptionFlag":
        if threading.current_thread() is not threading.main_thread():
            why = "Python lets only the main thread handle signals"
            way_out = "Handle them there and call the flag's request(), or train in the main thread"
            warn(explain(f"{', '.join(map(name_of, self.signals))} cannot be handled in this thread", why, way_out))
            return self
        self._process = os.getpid()
        for number in self.signals:
            before = signal.signal(number, self._handle)
            # If it is entered twice, the first handler is the user's.
            self._previous.setdefault(number, before)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.raised = True
        else:  # a process forked from this one by the user's code is not a rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, before in self._previous.items():
            # Otherwise another handler has been installed since.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._previous = {}
        # After an error the other ranks may be gone, so nothing is sent to them.
        if kind is None and self._ranks is not None and dist.is_initialized():
            self._answer()
            self._ranks.close()
        self._ranks = None


def check_signals(signals: Iterable[int]) -> tuple[int, ...]:
    numbers = tuple(signals)
    if not numbers:
        raise ValueError(explain("signals=()", "no signal could request preemption", "Use signals=(signal.SIGTERM,)"))
    for number in numbers:
        if number not in signal.valid_signals() or name_of(number) in ("SIGKILL", "SIGSTOP"):
            why = f"{number!r} is not a signal that can be caught"
            raise ValueError(explain(f"signals={numbers}", why, "Use signal.SIGTERM"))
    return numbers


def name_of(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}  # real-time signals have no name
    return names.get(number, f"signal {number}")


def _timeout_of_the_ranks() -> timedelta | None:
    """Return the timeout that the user gave the run's own process group."""
    group: Any = dist.group.WORLD
    with suppress(AttributeError, RuntimeError):  # not all backends have one
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def _let_children_exit(exit_code: int, patience_s: float = 60.0) -> None:
    watcher: Any
    for watcher, children in child_watchers():
        # It ends the main process when a child exits with a nonzero code.
        watcher._run = _unless_meant(watcher._run, children, exit_code)
        atexit.register(_wait_for, children, patience_s)


def _unless_meant(
    original: Callable[[], bool], children: list[subprocess.Popen[bytes]], exit_code: int
) -> Callable[[], bool]:

    def run() -> bool:
        codes = [child.poll() for child in children]
        if all(code in (None, 0, exit_code) for code in codes):
            # True ends the observer, when all children have exited.
            return None not in codes
        return original()

    return run


def _wait_for(children: list[subprocess.Popen], patience_s: float) -> None:
    for child in children:
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()


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
    that hangs does not react to signals; use :class:`~lightning_fasttrain.guards.HangWatch` for it.

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
    ways_out: ClassVar[Mapping[str, str]] = {
        "signals": "Use numbers, as signals=[signal.SIGUSR1]; the default is signals=(15,), SIGTERM"
    }
    in_a_loop: ClassVar[str] = "guards.PreemptionFlag().should_stop() at each step boundary"
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
