"""Run by two processes under torchrun (see test_micro_batch_forward.py): a trunk in micro-batches under DDP and FSDP2."""

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from tests.data.test_micro_batch_forward import Matching, pairs
from tests.nets import as_loader, largest_difference, trainer, weights

STEPS = 3
RANKS = [  # other numbers of samples on each rank
    [{name: x.float() for name, x in pairs(size, seed=10 * rank + i).items()} for i, size in enumerate(sizes)]
    for rank, sizes in enumerate([(8, 7, 5), (6, 7, 4)])
]


def reference():
    """One process that sees the batches of both ranks: the mean of their gradients, as DDP takes it."""
    net = Matching()
    optimizer = net.configure_optimizers()
    net.log = lambda *given: None
    for batches in zip(*RANKS, strict=True):
        optimizer.zero_grad()
        for i, batch in enumerate(batches):
            (net.training_step(batch, i) / len(batches)).backward()
        optimizer.step()
    return weights(net)


def train(strategy, callbacks, **settings):
    """The weights after three steps, gathered; and how often gradients were reduced under DDP."""
    gc.freeze()
    torch.manual_seed(21)
    net = Matching(**settings)
    t = trainer(callbacks, devices=2, strategy=strategy)
    t.fit(net, as_loader(RANKS[int(os.environ["RANK"])]))
    assert t.global_step == STEPS
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in net.state_dict().items()
    }


def agree(gathered):
    """Largest difference of these weights between the ranks."""
    flat = torch.cat([value.double().flatten() for value in gathered.values()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    return (flat - other).abs().max().item()


def strategies():
    yield "ddp", lambda: DDPStrategy(process_group_backend="gloo")
    yield "fsdp2", lambda: ft.FSDP2Strategy(process_group_backend="gloo")


def main(path):
    found = {}
    expected = reference()
    for name, make in strategies():
        choices = {
            "plain": [],
            "through": [ft.MicroBatching(3, through="encoder")],
            "blocks": [ft.MicroBatching(3, through="encoder.blocks.*")],
            "checkpointed": [ft.ActivationCheckpointing(), ft.MicroBatching(3, through="encoder")],
        }
        if name == "ddp":
            choices["found"] = [ft.MicroBatching(3)]
            choices["auto"] = [ft.MicroBatching("auto", through="encoder")]
        for choice, callbacks in choices.items():
            gathered = train(make(), callbacks)
            found[f"{name} {choice}"] = largest_difference(expected, gathered), agree(gathered)
    everything = [None, None]
    dist.all_gather_object(everything, found)
    if int(os.environ["RANK"]) == 0:
        with open(path, "w") as file:
            json.dump(everything, file)
    # Leave without destructors, as in ddp_scenarios.py.
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
