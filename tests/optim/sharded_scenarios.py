"""Run by two processes (see test_sharded_optimizers.py): named optimizers under FSDP2 and ZeRO, or their errors."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lightning_fasttrain as ft
from tests.strategy.fsdp2_scenarios import gap
from tests.strategy.zero_scenarios import whole as gathered
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights

RANK = int(os.environ.get("RANK", 0))
RANKS = [lm_batches(3, size=6, seed=3), lm_batches(3, size=4, seed=4)]
FSDP2 = ("lion", "muon", "galore", "adamw8bit")
CLIP = 0.01
ZERO = ("lion", "adamw8bit", "muon")


class Named(ft.FastTrainMixin, TinyLM):
    def __init__(self, name, **more):
        super().__init__()
        own = {"rank": 2} if name == "galore" else {}
        self.optimizer = ft.optim.NamedOptimizer(name, lr=0.01, settings=own, **more)


def reference(name, clip=None):
    """Train one process on the mean of both ranks' losses."""
    module = Named(name)
    optimizer = module.optimizer(module)
    for first, second in zip(*RANKS, strict=True):
        optimizer.zero_grad()
        (module.loss(first) / 2).backward()
        (module.loss(second) / 2).backward()
        if clip is not None:
            ft.optim.clip_adaptively_([p for p in module.parameters() if p is not module.embed.weight], clip)
        optimizer.step()
    return module


def tried(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fit(module, strategy, callbacks=(), **settings):
    trainer(callbacks, devices=2, strategy=strategy, **settings).fit(module, as_loader(RANKS[RANK]))
    return module


def fit_clipped():
    return fit(Named("lion"), ft.FSDP2Strategy(), [ft.optim.AdaptiveClipping(CLIP)])


def main(path):
    found = {"untrained": largest_difference(weights(TinyLM()), weights(reference("lion")))}
    for name in FSDP2:
        found[f"fsdp2 {name}"] = tried(lambda: gap(reference(name), fit(Named(name), ft.FSDP2Strategy())))  # noqa: B023
    found["clipping changes"] = largest_difference(weights(reference("lion")), weights(reference("lion", CLIP)))
    found["fsdp2 clipping"] = tried(lambda: gap(reference("lion", CLIP), fit_clipped()))
    found["fsdp2 offload"] = tried(lambda: fit(Named("adamw", offload="cpu"), ft.FSDP2Strategy()))
    low = {"updates": "kahan"}
    found["fsdp2 updates"] = tried(lambda: fit(Named("adamw", **low), ft.FSDP2Strategy(), precision="bf16-true"))
    for name in ZERO:
        expected = weights(reference(name))
        found[f"zero {name}"] = tried(
            lambda: largest_difference(expected, gathered(fit(Named(name), ft.ZeROStrategy(stage=2))))  # noqa: B023
        )
    found["zero offload"] = tried(lambda: fit(Named("adamw", offload="cpu"), ft.ZeROStrategy(stage=2)))
    if RANK == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    time.sleep(1)  # the other rank may still be waiting; see ddp_scenarios.py
    os._exit(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
