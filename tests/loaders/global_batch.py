"""Run by one, two and four processes (see test_global_batch.py): the same global batches on each number."""

import os
import sys
import time

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

import lightning_fasttrain as ft
from tests.support.nets import TinyLM, concatenate, lm_batches, sgd, trainer, weights

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
PARTS = 8 // WORLD  # per process, of two samples each
SAMPLES = 44  # two global batches of 16 and one of 12


class Scheduled(TinyLM):
    def __init__(self):
        super().__init__(optimizer=sgd)  # sensitive to a wrong scale, unlike AdamW

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows(counted):
    """Return samples with very different numbers of targets; or, without ``counted``, with one per token."""
    whole = concatenate(lm_batches(SAMPLES // 4, size=4))
    if not counted:
        whole["labels"] = whole["input_ids"].roll(1, dims=1)
    return [{name: value[i] for name, value in whole.items()} for i in range(SAMPLES)]


def train(callbacks, batch_size, counted=True):
    strategy = DDPStrategy(process_group_backend="gloo") if WORLD > 1 else "auto"
    t = trainer(callbacks, devices=WORLD, strategy=strategy, max_epochs=2)
    module = Scheduled()
    samples = rows(counted)
    mine = DistributedSampler(samples, WORLD, RANK, shuffle=False)  # in turn, so that steps have the same samples
    t.fit(module, DataLoader(samples, batch_size=batch_size, sampler=mine))
    return weights(module), t.global_step, t.optimizers[0].param_groups[0]["lr"]


def main(path):
    found = {
        "parts": train([ft.MicroBatching(PARTS), ft.TokenWeightedAccumulation(1)], 2 * PARTS),
        "window": train([ft.TokenWeightedAccumulation(PARTS)], 2),
        "equal": train([ft.MicroBatching(PARTS)], 2 * PARTS, counted=False),
        "unweighted": train([ft.MicroBatching(PARTS)], 2 * PARTS),
    }
    if RANK == 0:
        torch.save(found, path)
    if WORLD > 1:
        dist.barrier()
        time.sleep(0.5)  # until the others have received it; see ddp_scenarios.py
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not wait for this one
