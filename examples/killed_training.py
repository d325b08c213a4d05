"""A small training with all guards on, the faults that break it, and the comparison of how two runs of it end.

``kill_campaign.py`` runs it.
"""

import os
import random
import resource
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import lightning_fasttrain as ft
from lightning_fasttrain.core import atomic_write

EPOCHS, BATCHES, WINDOW = 3, 7, 2  # an odd number of batches: the last window of an epoch is short
INSIDE = ("batch", "forward", "backward", "validation")
# Kind of fault: the moments at which it may happen.
KINDS = {
    "SIGKILL": (*INSIDE, "before a rename", "after a rename", "any time"),
    "SIGTERM": INSIDE,
    "full disk": ("batch", "backward"),
    "NaN batch": ("batch",),
    "slow rank": INSIDE,
    "hung rank": INSIDE,
}
REPLICATED = ("single", "ddp")  # strategies whose gradients and optimizer states are whole on each process
# Strategy: its processes, and what to give the Trainer.
STRATEGIES = {
    "single": (1, lambda: "auto"),
    "ddp": (2, lambda: DDPStrategy(process_group_backend="gloo")),
    "fsdp2": (2, lambda: ft.FSDP2Strategy(blocks="Linear")),
    "zero2": (2, lambda: ft.ZeROStrategy(stage=2)),
    "zero3": (2, lambda: ft.ZeROStrategy(stage=3)),
}


class Fault(NamedTuple):
    """A fault of one rank, when its moment comes for the time after ``after`` others."""

    kind: str
    moment: str
    rank: int
    after: int


class Rows(Dataset):
    def __len__(self):
        return BATCHES * 2 * int(os.environ.get("WORLD_SIZE", 1))

    def __getitem__(self, i):  # augmented with the generators of three libraries
        return torch.tensor([float(i), random.random(), np.random.rand(), float(torch.rand(()))])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).sub(random.random()).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("over all processes", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).pow(2).mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class SaveAfterEveryBatch(L.Callback):
    """Inside windows too, where ModelCheckpoint does not save; but not where a strategy has the gradient in shards.

    A launch without faults only trains: nothing will be resumed from what it would save.
    """

    def __init__(self, folder, saves, within_windows):
        self.folder, self.saves, self.within_windows = folder, saves, within_windows

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            with open(self.folder / "resumed", "a") as file:
                print(trained(self.folder), trainer.fit_loop.total_batch_idx + 1, file=file)

    def on_train_batch_end(self, trainer, *args):
        batches = trainer.fit_loop.total_batch_idx + 1
        if trainer.is_global_zero:
            (self.folder / "training").write_text(str(batches))
            (self.folder / "training").rename(self.folder / "trained")
        if not self.saves or (not self.within_windows and trainer.fit_loop._should_accumulate()):
            return
        trainer.save_checkpoint(self.folder / "saved" / f"batch-{batches % 3}.ckpt")


class Saboteur(L.Callback):
    """Brings the faults of a launch about, on the rank of each."""

    def __init__(self, folder, faults, rank):
        self.folder = folder
        self.left = {fault: fault.after for fault in faults if fault.rank == rank}

    def now(self, moment, batch=None):
        for fault in [fault for fault in self.left if fault.moment == moment]:
            self.left[fault] -= 1
            if self.left[fault] < 0:
                del self.left[fault]
                self.bring_about(fault, batch)

    def bring_about(self, fault, batch):
        if fault.kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "full disk":
            fill_disk(self.folder)
        elif fault.kind == "NaN batch":
            batch.fill_(float("nan"))
        else:
            time.sleep(0.7 if fault.kind == "slow rank" else 600)

    def on_fit_start(self, trainer, pl_module):
        replace = os.replace

        def replacing(*args):
            self.now("before a rename")
            replace(*args)
            self.now("after a rename")

        atomic_write.os.replace = replacing
        pl_module.net[0].register_forward_hook(lambda *args: self.now("forward"))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now("batch", batch)

    def on_before_backward(self, *args):
        self.now("backward")

    def on_validation_batch_start(self, trainer, *args):
        if not trainer.sanity_checking:
            self.now("validation")


def fill_disk(folder):
    """Leave room for half of the largest file of a checkpoint."""
    sizes = [path.stat().st_size for path in (folder / "saved").rglob("*") if path.is_file()]
    room = max(sizes, default=4096) // 2
    if not os.path.ismount(folder / "saved"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return
    with suppress(OSError), open(folder / "saved" / "filler", "wb", buffering=0) as file:
        while os.statvfs(folder).f_bavail and free_bytes(folder / "saved") > room:
            file.write(bytes(4096))


def free_bytes(folder):
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def guards(faults, exact, background):
    hangs = any(fault.kind == "hung rank" for fault in faults)
    watch = ft.guards.HangWatch(*((4.0, 15.0) if hangs else (120.0, 120.0)))
    found = [ft.AtomicCheckpoints(background=background), ft.Preemption(), watch, ft.loaders.SampleGuard()]
    found += [ft.FiniteGuard(stop_after=1), ft.guards.SpikeGuard()]
    return found + ([ft.ExactResume()] if exact else [])


def train(name, folder, faults, exact, background, rank):
    """One launch of one process."""
    torch.manual_seed(3)  # as a user's script does in every launch; what it draws now is none of the run's
    random.seed(3)
    np.random.seed(3)
    processes, strategy = STRATEGIES[name]
    callbacks = guards(faults, exact, background and name in REPLICATED)
    callbacks.append(SaveAfterEveryBatch(folder, bool(faults), name in REPLICATED))
    callbacks.append(
        ModelCheckpoint(folder / "saved", monitor="val", save_top_k=2, save_last=True, enable_version_counter=False)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        val_check_interval=3 if name in REPLICATED else 4,  # within a window, and not
        num_sanity_val_steps=0,
        callbacks=[*callbacks, Saboteur(folder, faults, rank)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    data, validation = DataLoader(Rows(), batch_size=2, shuffle=True), DataLoader(Rows(), batch_size=4)
    newest = ft.newest_checkpoint(folder / "saved")
    trainer.fit(module, data, validation, ckpt_path=newest, weights_only=True)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    end = {key: checkpoint[key] for key in ("lr_schedulers", "loops", "callbacks", "global_step")}
    end["weights"] = {key: part_here(parameter) for key, parameter in module.named_parameters()}
    optimizer = trainer.optimizers[0]
    states = getattr(optimizer, "optimizer", optimizer).state.values()  # of the optimizer that DeepSpeed wraps
    end["optimizer"] = [{key: part_here(value) for key, value in state.items()} for state in states]
    torch.save(end, folder / f"end-{rank}.pt")
    trainer.strategy.barrier()


def part_here(value):
    """The shard of this process, of what a strategy shards."""
    if hasattr(value, "ds_tensor"):  # of ZeRO 3, which pads the last shards
        shard, place = value.ds_tensor, int(os.environ["RANK"])
        value = shard[: max(0, value.ds_numel - place * shard.numel())]
    elif isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def trained(folder):
    """Batches that rank zero has trained, as it tells before it saves."""
    path = folder / "trained"
    return int(path.read_text()) if path.exists() else 0


def differences(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{path}: {set(a) ^ set(b)}"] if set(a) != set(b) else []
        return missing + [d for key in set(a) & set(b) for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        pairs = enumerate(zip(a, b, strict=False))
        return [path] * (len(a) != len(b)) + [d for i, (x, y) in pairs for d in differences(x, y, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [f"{path}: {a} != {b}"]
    equal = type(a) is type(b) and a == b
    return [] if equal else [f"{path}: {a} != {b}"]


def without(value, folder):
    """The same without the folder's name, which callbacks keep with the paths of their files."""
    if isinstance(value, dict):
        return {without(key, folder): without(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without(item, folder) for item in value]
    return value.replace(folder, "") if isinstance(value, str) else value
