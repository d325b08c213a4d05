"""Run by two processes (see test_micro_batch_forward.py): a backbone in micro-batches under DDP and FSDP2."""

import gc
import json
import os
import sys
import time
from contextlib import nullcontext

import deepspeed
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lightning_fasttrain as ft
from tests.micro_batching.test_micro_batch_forward import RUNS, Encoder, Matching, Starved, pairs
from tests.support.nets import as_loader, largest_difference, trainer, weights

STEPS = 3
STRATEGIES = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp2": lambda: ft.FSDP2Strategy(process_group_backend="gloo"),
    "zero3": lambda: ft.ZeROStrategy(stage=3),
}
RANK = int(os.environ.get("RANK", 0))
RANKS = [  # different numbers of samples per rank
    [{name: x.float() for name, x in pairs(size, seed=10 * rank + i).items()} for i, size in enumerate(sizes)]
    for rank, sizes in enumerate([(8, 7, 5), (6, 7, 4)])
]


class Weighted(Matching):
    """Classes of unequal weight, whose sum no rule counts beforehand; the loss itself can be split."""

    def training_step(self, batch, batch_idx):
        scores, labels = self.head(self.encoder(batch["a"])), batch["b"].mean((1, 2)).gt(0).long()
        return nn.functional.cross_entropy(scores, labels, weight=torch.linspace(0.1, 2, scores.shape[1]))


def reference(kind=Matching):
    """Train in one process on the batches of both ranks, with the mean of their gradients, as in DDP."""
    net = kind()
    optimizer = net.configure_optimizers()
    net.log = lambda *given: None
    for batches in zip(*RANKS, strict=True):
        optimizer.zero_grad()
        for i, batch in enumerate(batches):
            (net.training_step(batch, i) / len(batches)).backward()
        optimizer.step()
    return weights(net)


def train(strategy, callbacks, kind=Matching):
    """Return the gathered weights after three steps."""
    gc.freeze()
    torch.manual_seed(21)
    net = kind()
    t = trainer(callbacks, devices=2, strategy=strategy)
    t.fit(net, as_loader(RANKS[RANK]))
    assert t.global_step == STEPS
    with gathered(net):
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in net.state_dict().items()
        }


def gathered(net):
    """Enter a context in which the parameters that ZeRO shards are gathered."""
    sharded = [p for p in net.parameters() if hasattr(p, "ds_id")]
    return deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext()


class Mixed(Encoder):
    """Samples depend on one another weakly."""

    def forward(self, x, mask=None):
        y = super().forward(x, mask)
        return y - 0.01 * y.mean(0)


class Mixing(Matching):
    def __init__(self):
        super().__init__()
        self.encoder.__class__ = Mixed


def agree(gathered):
    """Return the largest difference of these weights between the ranks."""
    flat = torch.cat([value.double().flatten() for value in gathered.values()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    return (flat - other).abs().max().item()


def two_means(net, batch):
    """Adds two means over the same entries in the first batch, but not in the next one on the second rank."""
    errors = (net(batch["x"]) - batch["y"]).square().mean(-1)
    return (errors * batch["one"]).sum() / batch["one"].sum() + (errors * batch["two"]).sum() / batch["two"].sum()


def masked_batches(rank):
    g = torch.Generator().manual_seed(rank)
    for i in range(STEPS):
        one, two = torch.arange(12) % 2, torch.arange(12) % 2
        if rank == 1 and i > 0:
            two = 1 - (torch.arange(12) == 2).long()
        x, y = torch.randn(12, 4, generator=g), torch.randn(12, 4, generator=g)
        yield {"x": x, "y": y, "one": one.float(), "two": two.float()}


def mlp():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def train_loop(net, add_gradients, *ranks):
    """Return the weights after three steps of a loop without a Trainer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batches in zip(*map(masked_batches, ranks), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            add_gradients(batch)
        optimizer.step()
    return weights(net)


def difference_of_loops():
    """Compare two processes, of which one changes its split alone, with one process."""
    whole = mlp()
    expected = train_loop(whole, lambda batch: (two_means(whole, batch) / 2).backward(), 0, 1)
    replica = DistributedDataParallel(mlp())
    step = lambda batch: two_means(replica, batch)  # noqa: E731
    seen = train_loop(
        replica.module, lambda batch: ft.accumulate_gradients(step, batch, 3, no_sync=replica.no_sync), RANK
    )
    return largest_difference(expected, seen)


def main(path):
    expected, weighted, found = reference(), reference(Weighted), {}

    def note(name, gathered, expected=expected):
        found[name] = largest_difference(expected, gathered), agree(gathered)

    techniques = {
        "plain": lambda: [],
        "through": lambda: [ft.MicroBatching(3, through="encoder")],
        "blocks": lambda: [ft.MicroBatching(3, through="encoder.blocks.*")],
        "checkpointed": lambda: [ft.ActivationCheckpointing(), ft.MicroBatching(3, through="encoder")],
        "found": lambda: [ft.MicroBatching(3)],
    }
    for name, make in STRATEGIES.items():
        for run in RUNS[name]:
            if run == "weighted":
                note(f"{name} {run}", train(make(), [ft.MicroBatching(3)], kind=Weighted), weighted)
            else:
                note(f"{name} {run}", train(make(), techniques[run]()))
    auto = ft.MicroBatching("auto", through="encoder")
    note("ddp starved", train(STRATEGIES["ddp"](), [auto], kind=(Matching, Starved)[RANK]))
    found["starved n"] = auto.n
    try:
        train(STRATEGIES["fsdp2"](), [ft.MicroBatching(3, through=Mixed)], kind=Mixing)
    except ValueError as error:
        found["mixed"] = str(error)
    found["loop"] = difference_of_loops()
    everything = [None, None]
    dist.all_gather_object(everything, found)
    if RANK == 0:
        with open(path, "w") as file:
            json.dump(everything, file)
    # Leave without destructors, as in ddp_scenarios.py.
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
