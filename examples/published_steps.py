"""Decoders whose step times were published, recorded without memory: the models of MPT, Llama 2 and Llama 3.

Used by ``fit_machines.py``.
"""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fasttrain as ft
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.step_time.record_step import RecordedStep, StepRecorder

Row = Mapping[str, str]
REDUCED_IN_BF16 = "bf16 parameters in compute and reduction"


def read_rows(path: str | Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class LowPrecisionNorm(nn.LayerNorm):
    """A LayerNorm that computes in bfloat16, as MPT's does under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.bfloat16(), self.normalized_shape, self.weight.bfloat16(), None, self.eps)


class MPTBlock(nn.Module):
    """Attention and an MLP of four times the width, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = LowPrecisionNorm(width, bias=False), LowPrecisionNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    """A decoder with learned positions, and a head that is tied to its embedding."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int = 50368) -> None:
        super().__init__()
        heads = 12 if width == 768 else width // 128
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([MPTBlock(width, heads) for _ in range(layers)])
        self.norm = LowPrecisionNorm(width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_of_ids(net: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next ids; ids [B, T]."""
    logits = net(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def record_row(row: Row) -> RecordedStep:
    """Return the recorded step of a row of ``mpt.csv``."""
    layers, width, length = int(row["layers"]), int(row["width"]), int(row["length"])
    strategy = ft.FSDP2Strategy(
        reshard_after_forward=row["strategy"] == "fsdp",
        reduce_once=False,
        reduce_dtype="bfloat16" if row["precision"] == REDUCED_IN_BF16 else "float32",
    )
    techniques = [ft.ActivationCheckpointing()] if row["recompute"] else []
    return record(
        lambda: MPT(layers, width, length),
        torch.zeros(int(row["micro_batch"]), length, dtype=torch.long),
        strategy,
        techniques,
        int(row["gpus"]),
        int(row["accumulate"]),
    )


def record(
    build: Callable[[], nn.Module],
    ids: Tensor,
    strategy: object,
    techniques: list[ft.Technique],
    devices: int,
    accumulate: int,
    fuses: bool = False,
) -> RecordedStep:
    """Return the recorded step of a decoder in bf16-mixed with AdamW."""
    recorder = StepRecorder(fuses)
    settings = {"loss": loss_of_ids, "optimizer": torch.optim.AdamW, "techniques": techniques}
    predict_strategies(
        build,
        ids,
        [strategy],
        precision="bf16-mixed",
        world=devices,
        accumulate=accumulate,
        recorder=recorder,
        **settings,
    )
    return recorder.steps[-1]
