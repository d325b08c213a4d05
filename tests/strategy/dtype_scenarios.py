"""Models that train in float32 and float64 under FSDP2, on two processes (see test_dtypes_in_shards.py)."""

import os

import lightning as L
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.strategy.muon_scenarios import whole
from tests.support.nets import as_loader, trainer

RANK = int(os.environ.get("RANK", 0))
RANKS = [
    [torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(3)] for rank in (0, 1)
]


class Precise(nn.Module):
    """A layer in float64, between layers in float32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7).double()

    def forward(self, x):
        return self.layer(x.double()).to(x.dtype)


class Mixed(L.LightningModule):
    """Blocks with a layer in float64, and a head in float64."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            blocks = [nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 7), Precise()) for _ in range(2)]
            self.blocks = nn.ModuleList(blocks)
            self.head = nn.Linear(7, 3).double()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x.double()) * self.scale).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trained_alone(clip):
    net = Mixed()
    optimizer = net.configure_optimizers()
    for first, second in zip(*RANKS, strict=True):
        optimizer.zero_grad()
        ((net.training_step(first, 0) + net.training_step(second, 0)) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net.state_dict()


def fit(path=None, **settings):
    module = Mixed()
    t = trainer(devices=2, strategy=FSDP2Strategy(), gradient_clip_val=0.1, **settings)
    t.fit(module, as_loader(RANKS[RANK]), ckpt_path=path)
    return module, t


def dtypes_in_shards(found, folder):
    expected = trained_alone(clip=0.1)
    module, t = fit()
    state = module.state_dict()
    gaps = {name: (whole(value) - expected[name]).abs().max().item() for name, value in state.items()}
    found["mixed float32"] = max(gap for name, gap in gaps.items() if state[name].dtype == torch.float32)
    found["mixed float64"] = max(gap for name, gap in gaps.items() if state[name].dtype == torch.float64)
    found["mixed dtypes kept"] = [state[name].dtype == value.dtype for name, value in expected.items()]
    found["mixed sharded"] = sorted({name for name, value in state.items() if not isinstance(value, DTensor)})
    t.save_checkpoint(folder / "mixed")
    again, _ = fit(folder / "mixed")
    found["mixed resumed"] = max((whole(v) - whole(state[k])).abs().max().item() for k, v in again.state_dict().items())


class Normed(L.LightningModule):
    """An embedding and norms, whose outputs autocast leaves in float32."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embed = nn.Embedding(7, 8)
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
            self.norm, self.seen = nn.LayerNorm(8), []

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        self.seen.append(str(x.dtype))
        for block in self.blocks:
            x = x + block(x)
        self.seen.append(str(x.dtype))
        return F.mse_loss(self.norm(x), torch.ones_like(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def residual_in_float32(found, folder):
    """Both ranks have the same batches, so that one process is the same run."""
    batches = [torch.arange(6).view(2, 3), torch.arange(1, 7).view(2, 3)]
    alone = Normed()
    trainer(precision="bf16-mixed").fit(alone, as_loader(batches))
    for name, strategy in (("float32", FSDP2Strategy(float32_residual=True)), ("bfloat16", FSDP2Strategy())):
        module = Normed()
        trainer(precision="bf16-mixed", devices=2, strategy=strategy).fit(module, as_loader(batches))
        gap = max((whole(v) - alone.state_dict()[k]).abs().max().item() for k, v in module.state_dict().items())
        found[f"residual {name}"] = [gap, module.seen[:2]]
    found["residual moved"] = (alone.embed.weight - Normed().embed.weight).abs().max().item()


SCENARIOS = (dtypes_in_shards, residual_in_float32)
