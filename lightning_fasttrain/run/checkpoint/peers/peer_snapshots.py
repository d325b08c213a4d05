"""Take snapshots of a Trainer's run in the memory of peers, and resume from them after a rank was lost."""

import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from lightning_fasttrain.core.checks import PositiveInt
from lightning_fasttrain.core.distributed import from_rank_zero
from lightning_fasttrain.core.files.atomic_write import refuse_unwritable
from lightning_fasttrain.core.host.checkpoint_content import Found, checkpoint_content, resume_from_content
from lightning_fasttrain.core.host.lightning import DataFetcher, accumulation_continues, replicates
from lightning_fasttrain.core.messages import say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.by_parameter import find_by_parameter, replace_at
from lightning_fasttrain.core.state.select_entries import only, without
from lightning_fasttrain.run.checkpoint.peers.peer_memory import PeerMemory
from lightning_fasttrain.technique import Conflict, Technique

_TENSORS = ["state_dict", "optimizer_states"]


class PeerSnapshots(Technique):
    """Snapshots of the run in memory every few steps: of each rank on its host, and a copy on another rank's host.

    When a rank is lost, and torchrun restarts all workers, ``fit`` resumes from the newest complete snapshot, whatever
    its ``ckpt_path``; if there is none, from ``ckpt_path``. So a lost rank costs the steps since the last snapshot. A
    snapshot has all that a checkpoint has, so that with :class:`~lightning_fasttrain.ExactResume` the run continues
    bit for bit. Save checkpoints too, less often: snapshots need the same number of ranks, and are lost with a rank and
    its peer together. See :class:`~lightning_fasttrain.run.PeerMemory`.

    Acts after a batch, or an epoch, is complete, including validation: the first moment at which nothing of it is left
    to do. For DDP, ``FSDP2Strategy`` and a single device. Snapshots are removed at the end of ``fit``. One that cannot
    be written, as into a full memory, is a warning, and the one before it stays.

    Args:
        folder: folder in this host's memory, for this run alone: ``f"/dev/shm/{os.environ['TORCHELASTIC_RUN_ID']}"``.
        every_n_steps: number of optimizer steps from one snapshot to the next.
        distance, timeout: as for :class:`~lightning_fasttrain.run.PeerMemory`.

    Raises:
        ValueError: in ``fit``, the strategy is DeepSpeed's or Lightning's FSDP; or a rank would keep its own copy.
        OSError: in ``fit``, before the first step: no file can be created in ``folder``.

    Example:
        >>> snapshots = PeerSnapshots("/dev/shm/run-7", every_n_steps=20)

    Source:
        See :class:`~lightning_fasttrain.run.PeerMemory`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a lost rank costs the steps since the last snapshot, kept in its peer's memory"
    when: ClassVar[str] = "ranks are lost more often than checkpoints are affordable; not on a changing number of ranks"
    in_a_loop: ClassVar[str] = "run.PeerMemory(folder), with load(state) before the loop and save(step, state) in it"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_n_steps: PositiveInt = 10,
        *,
        distance: PositiveInt | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.folder, self.every_n_steps = Path(folder), every_n_steps
        self.distance, self.timeout = distance, timeout
        self._peers: PeerMemory | None = None
        self._last = 0  # step of the last snapshot

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "its shards are in buffers of the strategy, which a snapshot would have to take apart"
        way_out = "Use FSDP2Strategy or DDP, or save checkpoints more often"
        return Conflict(DeepSpeedStrategy, why, way_out), Conflict(FSDPStrategy, why, way_out)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        refuse_unwritable(self.folder, f"PeerSnapshots({os.fspath(self.folder)!r})")
        # A new one for each run, since its process group belongs to the current ranks.
        self._peers = PeerMemory(self.folder, distance=self.distance, timeout=self.timeout)
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        after_batch, after_epoch = epoch_loop.on_advance_end, fit_loop.on_advance_end

        def on_batch_over(data_fetcher: DataFetcher) -> None:
            after_batch(data_fetcher)
            # After the last batch the epoch is ended first.
            if not epoch_loop.done:
                self._save_if_due(trainer)

        def on_epoch_over() -> None:
            after_epoch()
            self._save_if_due(trainer)

        undo = ExitStack()
        undo.callback(patch(epoch_loop, "on_advance_end", on_batch_over))
        undo.callback(patch(fit_loop, "on_advance_end", on_epoch_over))
        undo.callback(resume_from_content(trainer, lambda: self._load(trainer)))
        return undo.close

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the step is known, also that of a resumed run."""
        self._last = trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: all of the run's checkpoints are saved."""
        assert self._peers is not None
        trainer.strategy.barrier()
        self._peers.clear()

    def _save_if_due(self, trainer: L.Trainer) -> None:
        step, due = trainer.global_step, trainer.global_step - self._last >= self.every_n_steps
        # Searches for a learning rate or a batch size also run these loops, without callbacks.
        if due and not accumulation_continues(trainer) and self in trainer.callbacks:
            assert self._peers is not None
            self._last = step
            content = checkpoint_content(trainer)
            try:
                self._peers.save(step, _state(trainer, content))
            except OSError as error:  # a run continues without its snapshots
                warn(str(error))

    def _load(self, trainer: L.Trainer) -> Found | None:
        """Return the newest snapshot; the states of a sharded model and its optimizers are loaded already."""
        assert self._peers is not None
        state = _state(trainer, {})
        step = self._peers.load(state)
        if step is None:
            return None
        say("PeerSnapshots: fit resumes after step %d, from a snapshot in memory", step)
        return self._peers.folder / f"step-{step}", _with_values_of_rank_zero(state["rest"].content)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_peers": None}  # process groups cannot be copied


class _Rest:
    """A checkpoint's content besides the states of a sharded model and its optimizers."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.content = content


def _state(trainer: L.Trainer, content: dict[str, Any]) -> dict[str, Any]:
    """Return the state for :class:`PeerMemory`; a sharded model and its optimizers are saved as they are in memory."""
    if replicates(trainer.strategy):
        return {"rest": _Rest(content)}
    optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(trainer.strategy.optimizers)}
    return {"model": trainer.strategy.model, **optimizers, "rest": _Rest(without(content, _TENSORS))}


def _with_values_of_rank_zero(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content with all but tensors of this rank from rank zero, as in a file.

    Callbacks gather what they save of all ranks on rank zero.
    """
    averages, shared = find_by_parameter(content), without(content, _TENSORS)
    for keys, _ in averages:
        shared = replace_at(shared, keys, {})
    shared = from_rank_zero(lambda: shared)
    for keys, values in averages:
        shared = replace_at(shared, keys, values)
    return {**shared, **only(content, _TENSORS)}
