"""Muon's work divided over two or four processes (see test_divided_muon.py)."""

import copy
import os
from contextlib import contextmanager
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.optim.named.muon import NewtonSchulz
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy
from lightning_fasttrain.strategy.tensor_parallel.layouts import take_shard
from tests.support.nets import as_loader, largest_difference, trainer, weights

WORLD = int(os.environ.get("WORLD_SIZE", 1))
STEPS, MATRICES = 4, 6
# The same on all ranks, so that the mean of their gradients is bitwise the gradient of one process.
BATCHES = [torch.randn(6, 7, generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


class Odd(L.LightningModule):
    """Blocks with matrices of 5 x 7 and 7 x 5, whose rows divide over no number of ranks."""

    def __init__(self, named=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3)])
        self.named = named

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return self.named(self)


def train_alone():
    """Train in one process with torch's own optimizers."""
    net = Odd()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    biases = [p for p in net.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, **SETTINGS, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(biases, lr=SETTINGS["lr"], weight_decay=0.0)
    for batch in BATCHES:
        net.zero_grad()
        net(batch).backward()
        muon.step()
        adamw.step()
    return weights(net), [muon.state[matrix]["momentum_buffer"] for matrix in matrices]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def counted():
    """Count collectives, and matrices that this rank orthogonalizes."""
    counts = {"matrices": 0, "batches": 0, "all_to_all_single": 0, "all_gather": 0}
    orthogonalize = NewtonSchulz.__call__

    def call(self, matrices):
        counts["matrices"] += len(matrices)
        counts["batches"] += 1
        return orthogonalize(self, matrices)

    def collective(name, original):
        def run(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        return run

    with mock.patch.object(NewtonSchulz, "__call__", call):
        originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")}
        for name, original in originals.items():
            setattr(dist, name, collective(name, original))
        yield counts
        for name, original in originals.items():
            setattr(dist, name, original)


def train(fabric, model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(model(batch))
        optimizer.step()


def set_up(fabric, **settings):
    net = Odd()
    model = fabric.setup_module(net)
    return net, model, fabric.setup_optimizers(ft.build_optimizer(net, "muon", **SETTINGS, **settings))


def fabric_with(**options):
    fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=FabricFSDP2Strategy(**options))
    fabric.launch()
    return fabric


def divided_over_shards(found, folder):
    expected, momentum = train_alone()
    for name, options in (("shards", {}), ("replicas", {"replicas": 2})):
        fabric = fabric_with(**options)
        net, model, optimizer = set_up(fabric)
        with counted() as counts:
            train(fabric, model, optimizer, BATCHES)
        state = [optimizer.state[p]["momentum_buffer"] for p in net.parameters() if p.ndim == 2]
        found[f"muon {name}"] = {
            "weights": largest_difference(expected, {k: whole(v) for k, v in net.state_dict().items()}),
            "momentum": max((whole(a) - b).abs().max().item() for a, b in zip(state, momentum, strict=True)),
            "held": sum(part.to_local().numel() for part in state),
            **counts,
        }
    resumed_on_other_shards(found, folder, expected)
    one_matrix_alone(found)


def resumed_on_other_shards(found, folder, expected):
    fabric = fabric_with()
    _, model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, BATCHES[:2])
    fabric.save(folder / "muon", {"model": model, "optimizer": optimizer})
    fabric = fabric_with(replicas=2)
    net, model, optimizer = set_up(fabric)
    fabric.load(folder / "muon", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, BATCHES[2:])
    found["muon resumed"] = largest_difference(expected, {k: whole(v) for k, v in net.state_dict().items()})


def one_matrix_alone(found):
    """Leave all ranks but one without a matrix."""
    alone = Odd()
    optimizer = ft.build_optimizer(alone, "muon", blocks="blocks.1", **SETTINGS)
    optimizer.param_groups[0]["params"] = [alone.blocks[1][0].weight]
    for batch in BATCHES:
        optimizer.zero_grad()
        alone(batch).backward()
        optimizer.step()
    fabric = fabric_with()
    net, model, optimizer = set_up(fabric, blocks="blocks.1")
    optimizer.optimizer.param_groups[0]["params"] = [net.blocks[1][0].weight]
    with counted() as counts:
        train(fabric, model, optimizer, BATCHES)
    gap = largest_difference(weights(alone), {k: whole(v) for k, v in net.state_dict().items()})
    found["muon one"] = {"weights": gap, **counts}


def divided_under_ddp(found, folder):
    expected, _ = train_alone()
    module = Odd(ft.optim.NamedOptimizer("muon", **SETTINGS))
    t = trainer(devices=WORLD, strategy=DDPStrategy(process_group_backend="gloo"))
    with counted() as counts:
        t.fit(module, as_loader(BATCHES))
    found["muon ddp"] = {"weights": largest_difference(expected, weights(module)), **counts}


def divided_in_a_tensor_group(found):
    """Give all ranks the gradients of one process, so that updates alone can differ."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        alone = GPT(GPTConfig(vocabulary=32, context=8, layers=2, heads=4, width=16))
    net = copy.deepcopy(alone)
    names = [name for name, parameter in alone.blocks.named_parameters(prefix="blocks") if parameter.ndim == 2]
    muon = torch.optim.Muon([alone.get_parameter(n) for n in names], **SETTINGS, adjust_lr_fn="match_rms_adamw")
    fabric = fabric_with(tensor_parallel=2)
    fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(ft.build_optimizer(net, "muon", **SETTINGS))
    drawn = torch.Generator().manual_seed(7)
    steps = [{n: torch.randn(p.shape, generator=drawn) for n, p in alone.named_parameters()} for _ in range(STEPS)]
    for gradients in steps:
        for name in names:
            alone.get_parameter(name).grad = gradients[name]
        muon.step()
    with counted() as counts:
        for gradients in steps:
            for name, parameter in net.named_parameters():
                parameter.grad = take_shard(gradients[name], parameter)
            optimizer.step()
    gaps = {name: (whole(net.get_parameter(name)) - alone.get_parameter(name)).abs().max().item() for name in names}
    fused = {name: gap for name, gap in gaps.items() if "qkv" in name}
    found["muon fused"] = max(fused.values())
    found["muon split"] = max(gap for name, gap in gaps.items() if name not in fused)
    found["muon counts"] = counts
    found["muon matrices"] = len(names)


SCENARIOS = (divided_over_shards, divided_under_ddp)
