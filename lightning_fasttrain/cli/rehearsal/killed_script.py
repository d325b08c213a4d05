"""The callback of a script under ``--kill``: kills its process at a given moment, or records its final state."""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from torch.optim import Optimizer

from lightning_fasttrain.cli.rehearsal.rehearse import BATCH, ORDERS, SAVE, UPDATE
from lightning_fasttrain.cli.rehearsal.run_script import end_process
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.proof.rehearsal.run_copy import find_unrehearsable
from lightning_fasttrain.proof.rehearsal.small_run import record_state
from lightning_fasttrain.proof.verification.digest import Digest


@dataclass(frozen=True)
class Orders:
    """Instructions for one run.

    Attributes:
        record: the file, a JSON object a line, to which it reports its progress.
        steps: optimizer steps after which it ends.
        place: where it is killed, one of ``PLACES``; "" for nowhere.
        step: the optimizer step from which on that happens.
        until: the one at whose start it happens anyway, for runs that save seldom.
        delay_s: how long a save runs before.
    """

    record: str
    steps: int
    place: str = ""
    step: int = 0
    until: int = 0
    delay_s: float = 0.0


def make_callbacks() -> list[L.Callback]:
    """Return the callbacks that Lightning adds to each Trainer of such a script; none elsewhere."""
    orders = os.environ.get(ORDERS)
    return [KilledOnTrial(Orders(**json.loads(orders)))] if orders else []


class KilledOnTrial(L.Callback):
    """Follows its orders on rank zero; the processes of other ranks are killed from outside."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        why = find_unrehearsable(trainer)
        if why is not None:
            self._tell(trainer, {"refused": why})
            end_process(1, for_all=trainer.is_global_zero)
        self._tell(trainer, {"from": trainer.global_step})
        if trainer.global_step >= self.orders.steps:
            self._end_well(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._die_at(trainer, BATCH)
        if self.orders.place and trainer.global_step >= self.orders.until:
            self._die(trainer, BATCH)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._die_at(trainer, UPDATE)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Mapping[str, object]
    ) -> None:
        if self.orders.place == SAVE and trainer.global_step >= self.orders.step and trainer.is_global_zero:
            # Lightning calls this hook before it writes the file, so the time runs out while it writes.
            threading.Timer(self.orders.delay_s, self._die, (trainer, SAVE)).start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step >= self.orders.steps and not accumulation_continues(trainer):
            self._end_well(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the end of a fit with fewer steps."""
        self._end_well(trainer, pl_module)

    def _die_at(self, trainer: L.Trainer, place: str) -> None:
        if self.orders.place == place and trainer.global_step >= self.orders.step:
            self._die(trainer, place)

    def _die(self, trainer: L.Trainer, place: str) -> None:
        if trainer.is_global_zero:
            self._tell(trainer, {"killed": place, "step": trainer.global_step})
            # No handler can catch SIGKILL, so nothing is tidied up, as in a real crash.
            os.kill(os.getpid(), signal.SIGKILL)

    def _end_well(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = record_state(trainer, module)
        self._tell(trainer, {"end": {path: fingerprint(value) for path, value in state.items()}})
        # A rank that ended here would leave others waiting in a collective of their records.
        trainer.strategy.barrier()
        end_process(0, for_all=trainer.is_global_zero)

    def _tell(self, trainer: L.Trainer, what: Mapping[str, object]) -> None:
        if trainer.is_global_zero:
            with Path(self.orders.record).open("a") as file:
                file.write(f"{json.dumps(what)}\n")


def fingerprint(value: object) -> str:
    """Return text that distinguishes two values of a record, or digests of tensors, to the last bit.

    Example:
        >>> import torch
        >>> from lightning_fasttrain.proof.verification.digest import take_digest
        >>> one, other = torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])
        >>> fingerprint(1.5), fingerprint(take_digest(one)) == fingerprint(take_digest(other))
        ('1.5', False)
    """
    if not isinstance(value, Digest):
        return repr(value)
    # The checksum alone is the same for other orders of the same values.
    content = value.sums.numpy().tobytes() + value.entries.numpy().tobytes()
    return f"{value.dtype} {value.shape} {value.checksum} {hashlib.sha256(content).hexdigest()}"
