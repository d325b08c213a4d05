"""Run by two processes under torchrun (see test_gradual_unfreezing.py): each run writes its results."""

import inspect
import json
import os
import sys
import time
import weakref

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_fasttrain as ft
from lightning_fasttrain.finetune.selection.gradual_unfreezing import GradualUnfreezing
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, sgd, trainer, weights

RANKS = lm_batches(2, size=6, seed=3), lm_batches(2, size=4, seed=4)
GROUPS = [["head"], ["blocks.2"], ["blocks.1"]]
EPOCHS = 3
# Its name before torch 2.13.
NEW, OLD = "forward_sync_buffers", "broadcast_buffers"
WITHOUT_SYNC = NEW if NEW in inspect.signature(DistributedDataParallel.__init__).parameters else OLD


class Untied(TinyLM):
    """A model with an untied head, and a buffer that differs between ranks once training has started."""

    def build(self):
        super().build()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        self.register_buffer("own", torch.zeros(1))

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 0:
            self.own += float(os.environ["RANK"])


class Watch(L.Callback):
    def __init__(self):
        self.trains, self.wrappers = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        if not any(wrapper() is trainer.strategy.model for wrapper in self.wrappers):
            self.wrappers.append(weakref.ref(trainer.strategy.model))

    def on_train_epoch_end(self, trainer, pl_module):
        self.trains.append(sum(parameter.requires_grad for parameter in pl_module.parameters()))

    def on_train_end(self, trainer, pl_module):
        self.alive = sum(wrapper() is not None for wrapper in self.wrappers)


def run(callbacks, rank, **ddp):
    watch, net = Watch(), Untied(optimizer=sgd)
    strategy = DDPStrategy(process_group_backend="gloo", **ddp)
    t = trainer([*callbacks, watch], devices=2, strategy=strategy, max_epochs=EPOCHS)
    t.fit(net, as_loader(RANKS[rank]))
    return net, watch


def by_hand():
    """One process: a step on the mean of both ranks' losses moves the groups that are unfrozen in this epoch."""
    net = Untied(optimizer=sgd)
    for epoch in range(EPOCHS):
        unfrozen = tuple(group for (group,) in GROUPS[: epoch + 1])
        for batches in zip(*RANKS, strict=True):
            net.zero_grad()
            torch.stack([net.loss(batch) for batch in batches]).mean().backward()
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    if name.startswith(unfrozen):
                        parameter -= 0.01 * parameter.grad
    return net


def parameters_of(net):
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def between_ranks(net):
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    first = flat.clone()
    dist.broadcast(first, src=0)
    gap = (flat - first).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def main(path):
    rank, found, expected = int(os.environ["RANK"]), {}, parameters_of(by_hand())
    runs = {
        "epoch": ([GradualUnfreezing(groups=GROUPS)], {}),
        "steps": ([GradualUnfreezing(2, groups=GROUPS)], {WITHOUT_SYNC: False}),
        "views": ([GradualUnfreezing(groups=GROUPS)], {"gradient_as_bucket_view": True}),
        "unused": ([GradualUnfreezing(groups=GROUPS)], {"find_unused_parameters": True}),
        "static": ([GradualUnfreezing(groups=GROUPS)], {"static_graph": True}),
        "micro": ([ft.MicroBatching(2), GradualUnfreezing(2, groups=GROUPS), ft.ActivationCheckpointing()], {}),
    }
    for name, (callbacks, ddp) in runs.items():
        net, watch = run(callbacks, rank, **ddp)
        found[name] = {
            "difference": largest_difference(expected, parameters_of(net)),
            "between ranks": between_ranks(net),
            "trains": watch.trains,
            "wrappers": len(watch.wrappers),
            "alive": watch.alive,
            "own buffer": weights(net)["own"].item(),
        }
    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(gathered, file)
    # Without destructors: DDP's may wait for a gloo thread that waits for the interpreter lock (see ddp_scenarios.py).
    time.sleep(1)  # the other rank may still be reading the gathered tensors
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
