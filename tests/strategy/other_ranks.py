"""Run by one, two and three processes at once (see test_other_ranks.py): each resumes the checkpoints of all."""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.support.nets import ShallowLM, concatenate, lm_batches, sgd, trainer

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
SAMPLES, GLOBAL, SAVED_AT = 25, 12, 4  # steps of 12, 12 and 1 sample; the checkpoint is inside the second epoch
MOST = {1: 12, 2: 2, 3: 3}  # samples of a forward: windows of 1, 3 and 2 batches


def saved_by(kind, world):
    """The numbers of ranks whose checkpoints are resumed by ``world`` ranks."""
    if kind == "zero":
        return [world % 3 + 1]
    return [other for other in MOST if kind == "ddp" or other != world]


class Scheduled(ShallowLM):
    def __init__(self, kind):
        if kind in ("zero", "adam"):  # DeepSpeed's universal format supports the state of Adam only
            super().__init__()
        else:
            super().__init__(optimizer=sgd, lr=0.5)  # sensitive to a wrong scale, unlike AdamW
        self.logged = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("samples", float(len(batch["index"])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.logged.append(float(self.trainer.callback_metrics.get("samples", -1)))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seen(Callback):
    """The samples of each epoch that count, on this rank."""

    def __init__(self):
        self.samples = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        loader: Any = trainer.train_dataloader
        if loader.has_samples(batch_idx):
            self.samples += [(trainer.current_epoch, int(index)) for index in batch["index"]]


def rows():
    whole = concatenate(lm_batches(7, size=4))
    return [{"index": i, **{name: value[i] for name, value in whole.items()}} for i in range(SAMPLES)]


def strategy_of(kind):
    if kind == "zero":
        return ft.ZeROStrategy(2, universal=True, process_group_backend="gloo")
    if kind == "fsdp2":
        return FSDP2Strategy(process_group_backend="gloo")
    return "auto" if WORLD == 1 else DDPStrategy(process_group_backend="gloo")


def run(kind, folder, ckpt=None):
    torch.manual_seed(20 + RANK)
    seen, module = Seen(), Scheduled(kind)
    saving = [] if ckpt else [ModelCheckpoint(folder, f"{kind}-{WORLD}", every_n_train_steps=SAVED_AT, save_top_k=-1)]
    techniques = [ft.loaders.GlobalBatch(GLOBAL), ft.ExactResume()]
    t = trainer(
        [*saving, *techniques, seen],
        devices=WORLD,
        strategy=strategy_of(kind),
        max_epochs=2,
        enable_checkpointing=not ckpt,
    )
    t.fit(module, DataLoader(rows(), batch_size=MOST[WORLD], shuffle=True), ckpt_path=ckpt)
    state = {}
    for name, value in module.state_dict().items():
        state[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    samples: list = [None] * WORLD
    if WORLD > 1:
        dist.all_gather_object(samples, seen.samples)
    else:
        samples = [seen.samples]
    lr = t.optimizers[0].param_groups[0]["lr"]
    return {
        "weights": state,
        "samples": sorted(itertools.chain.from_iterable(samples)),
        "steps": t.global_step,
        "lr": lr,
        "logged": module.logged,
    }


def when_written(path, timeout_s=100):
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)
    return path


def main(folder, kinds):
    folder = Path(folder)
    found = {}
    if WORLD == 1:
        found["adam"] = run("adam", folder / "saved")
    for kind in kinds:
        found[kind] = run(kind, folder / "saved")
        (folder / f"{kind}-{WORLD}-{RANK}.written").touch()
    for kind in kinds:
        for other in saved_by(kind, WORLD):
            for rank in range(other):
                when_written(folder / f"{kind}-{other}-{rank}.written")
            found[f"{kind} from {other}"] = run(kind, folder / "saved", folder / "saved" / f"{kind}-{other}.ckpt")
    if RANK == 0:
        torch.save(found, folder / f"{WORLD}.pt")
    if WORLD > 1:
        dist.barrier()
        time.sleep(0.5)  # until the others have received it; see ddp_scenarios.py
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not wait for this one
