"""A run that is killed again and again, by SIGKILL, and relaunched from its newest checkpoint (see test_kill.py).

``python -m tests.support.kill_scenarios STRATEGY PROCESSES KILLS FOLDER [SEED]`` writes ``FOLDER/found.json``.
Processes are forked, so that the imports, which take seconds, are done once. No launch knows what the earlier ones did.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import lightning_fasttrain as ft
from lightning_fasttrain.core.files import atomic_write
from lightning_fasttrain.core.files.newest_checkpoint import newest_checkpoint
from lightning_fasttrain.run.checkpoint.atomic_checkpoints import AtomicCheckpoints
from lightning_fasttrain.run.checkpoint.exact_resume import ExactResume

EPOCHS, BATCHES, WINDOW = 3, 7, 2  # an odd number of batches: the last window of an epoch is short
MOMENTS = ("batch", "forward", "backward", "validation", "before a rename", "after a rename", "any time")


WHOLE_GRADIENTS = ("single", "ddp")  # strategies that have gradients and optimizer state whole on each process


def strategy_named(name):
    """What to give the Trainer; a row for each strategy that this is run with."""
    makers = {
        "single": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fasttrain_zero": lambda: ft.ZeROStrategy(stage=2),
        "fasttrain_fsdp2": lambda: ft.FSDP2Strategy(blocks="Linear"),
    }
    return makers[name]()


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
    """Inside windows too, where ModelCheckpoint does not save; but not where a strategy has the gradient in pieces.

    A launch that nobody kills only trains: nothing will be resumed from what it would save.
    """

    def __init__(self, folder, saves, within_windows):
        self.folder, self.saves, self.within_windows = folder, saves, within_windows

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            with open(self.folder / "resumed", "a") as file:
                print(trained(self.folder.parent), trainer.fit_loop.total_batch_idx + 1, file=file)

    def on_train_batch_end(self, trainer, *args):
        batches = trainer.fit_loop.total_batch_idx + 1
        if trainer.is_global_zero:
            (self.folder / "training").write_text(str(batches))
            (self.folder / "training").rename(self.folder / "trained")
        if not self.saves or (not self.within_windows and trainer.fit_loop._should_accumulate()):
            return
        trainer.save_checkpoint(self.folder / f"batch-{batches % 3}.ckpt")


class Killer(L.Callback):
    """Kills its own process, at the ``after``-th time that the moment comes."""

    def __init__(self, moment, after):
        self.moment, self.left = moment, after

    def now(self, moment):
        if moment == self.moment:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer, pl_module):
        replace = os.replace

        def replacing(*args):
            if self.moment == "any time":
                time.sleep(0.01)  # so that it is often during a save
            self.now("before a rename")
            replace(*args)
            self.now("after a rename")

        atomic_write.os.replace = replacing
        pl_module.net[0].register_forward_hook(lambda *args: self.now("forward"))

    def on_train_batch_start(self, *args):
        self.now("batch")

    def on_before_backward(self, *args):
        self.now("backward")

    def on_validation_batch_start(self, trainer, *args):
        if not trainer.sanity_checking:
            self.now("validation")


def train(strategy, processes, folder, exact, killer):
    """One launch of one process."""
    torch.manual_seed(3)  # as a user's script does in every launch; what it draws now is none of the run's
    random.seed(3)
    np.random.seed(3)
    saves = SaveAfterEveryBatch(folder / "saved", killer.moment is not None, strategy in WHOLE_GRADIENTS)
    callbacks = [saves, AtomicCheckpoints()]
    callbacks.append(
        ModelCheckpoint(folder / "saved", monitor="val", save_top_k=2, save_last=True, enable_version_counter=False)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy_named(strategy),
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        val_check_interval=3 if strategy in WHOLE_GRADIENTS else 4,  # within a window, and not
        num_sanity_val_steps=0,
        callbacks=[*callbacks, *([ExactResume()] if exact else []), killer],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(
        module,
        DataLoader(Rows(), batch_size=2, shuffle=True),
        DataLoader(Rows(), batch_size=4),
        ckpt_path=newest_checkpoint(folder / "saved"),
        weights_only=True,
    )
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    end = {key: checkpoint[key] for key in ("lr_schedulers", "loops", "callbacks", "global_step")}
    end["weights"] = {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}
    if strategy in WHOLE_GRADIENTS:
        end["optimizers"] = checkpoint["optimizer_states"]
    if trainer.is_global_zero:
        torch.save(end, folder / "end.pt")
    trainer.strategy.barrier()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def launch(strategy, processes, folder, exact, plan, patience_s=60):
    """Fork the processes, kill one of them by ``plan``, end the others; whether the run came to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    moment, victim, after = plan or (None, None, None)
    started, children, before, seen = time.monotonic(), [], trained(folder), None
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            if processes > 1:
                os.environ |= {
                    "TORCHELASTIC_RUN_ID": "kills",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "GROUP_RANK": "0",
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                }
            code = 1
            try:
                train(strategy, processes, folder, exact, Killer(moment, after if rank == victim else sys.maxsize))
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {error!r}"[:500], file=sys.stderr, flush=True)
                if plan is None:
                    raise
            finally:
                time.sleep(0.2)
                os._exit(code)
        children.append(child)
    ended: dict[int, int] = {}
    while len(ended) < processes:
        assert time.monotonic() - started < patience_s, "the processes of a launch hang"
        if moment == "any time" and seen is None and trained(folder) > before:
            seen = time.monotonic()
        if seen is not None and time.monotonic() - seen > after / 100 and children[victim] not in ended:
            os.kill(children[victim], signal.SIGKILL)
        for child in children:
            if child not in ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended[child] = status
        if any(ended.values()):  # as a launcher does when one of its processes died
            for child in children:
                if child not in ended:
                    os.kill(child, signal.SIGKILL)
                    ended[child] = os.waitpid(child, 0)[1]
        time.sleep(0.01)
    return not any(ended.values())


def trained(folder):
    """Batches that rank zero has trained, as it tells before it saves."""
    path = folder / "saved" / "trained"
    return int(path.read_text()) if path.exists() else 0


def resumptions(folder):
    """Of each launch but the first: batches that had been trained before, and those that its checkpoint knew of."""
    lines = (folder / "saved" / "resumed").read_text().splitlines()
    return [[int(number) for number in line.split()] for line in lines[1:]]


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


def run_with_kills(strategy, processes, folder, kills, exact, seed):
    """The end of the run, when it was killed, and where it went on."""
    (folder / "saved").mkdir(parents=True)
    draw, moments, killed = random.Random(seed), [], 0
    while killed < kills:
        moment = MOMENTS[killed % len(MOMENTS)]
        after = draw.randrange(8) if moment == "any time" else draw.randrange(4)
        plan = (moment, draw.randrange(processes), after)
        if "rename" in moment:
            plan = (moment, 0, plan[2])  # rank zero writes the file
        if launch(strategy, processes, folder, exact, plan):
            break  # it got through before the moment came
        killed += 1
        moments.append(moment)
    assert launch(strategy, processes, folder, exact, None) or (folder / "end.pt").exists()
    return torch.load(folder / "end.pt", weights_only=True), {"moments": moments, "resumed": resumptions(folder)}


def without(value, folder):
    """The same without the folder's name, which callbacks keep with the paths of their files."""
    if isinstance(value, dict):
        return {without(key, folder): without(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without(item, folder) for item in value]
    return value.replace(folder, "") if isinstance(value, str) else value


def main(strategy, processes, kills, folder, seed="5"):
    folder, processes, kills = Path(folder), int(processes), int(kills)
    torch.set_num_threads(1)
    ends, found = {}, {}
    for name, count, exact in (("whole", 0, True), ("killed", kills, True), ("without", 1, False)):
        end, history = run_with_kills(strategy, processes, folder / name, count, exact, int(seed))
        ends[name] = without(end, str(folder / name))
        found[name] = history
    found["saved every"] = 1 if strategy in WHOLE_GRADIENTS else WINDOW
    found["killed differs in"] = differences(ends["whole"], ends["killed"])[:9]
    found["without differs in"] = differences(ends["whole"]["weights"], ends["without"]["weights"])[:9]
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
