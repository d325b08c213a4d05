"""Decoders whose step times were published, recorded without memory: the models of MPT, Llama 2 and Llama 3.

Used by ``fit_machines.py``.
"""

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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


class LlamaBlock(nn.Module):
    """Attention with shared keys and rotary positions, and a gated MLP, as in Llama; torchtitan's layout."""

    def __init__(self, width: int, heads: int, kv_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, head = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, x.shape[-1] // self.heads)) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of features by their positions in float32, as complex numbers; x [B, T, H, D], turns [T, D / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).to(x.dtype)


class Llama(nn.Module):
    """A Llama; with ``saves_products``, blocks are recomputed but for attention and every second product."""

    def __init__(self, row: Row, saves_products: bool) -> None:
        super().__init__()
        width, heads = int(row["width"]), int(row["heads"])
        shape = (width, heads, int(row["kv_heads"]), int(row["mlp_width"]))
        self.saves_products = saves_products
        self.tokens = nn.Embedding(int(row["vocabulary"]), width)
        self.blocks = nn.ModuleList([LlamaBlock(*shape) for _ in range(int(row["layers"]))])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, int(row["vocabulary"]), bias=False)
        self.register_buffer("turns", torch.zeros(int(row["length"]), width // heads // 2, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        # In torchtitan FSDP2 alone decides the dtype.
        with torch.autocast("cpu", enabled=False):
            x = self.tokens(ids)
            for block in self.blocks:
                if self.saves_products:
                    context = functools.partial(create_selective_checkpoint_contexts, every_second_product())
                    x = checkpoint(block, x, self.turns, use_reentrant=False, context_fn=context)
                else:
                    x = block(x, self.turns)
            return self.head(self.norm(x)).float()


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """Return torchtitan's rule of selective recomputation: attention and every second product are saved."""
    counts = {True: 0, False: 0}

    def decide(context: SelectiveCheckpointContext, op: object, *_: object, **__: object) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        attends = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def record_llama(row: Row) -> RecordedStep:
    """Return the recorded step of a row of ``other.csv``; "some blocks" is taken for every second."""
    words = row["layout"].split()
    devices = int(row["gpus"])
    replicas = devices // int(words[1]) if words[0] == "hsdp" else 1
    dtype = "bfloat16" if row["precision"] == "bf16" else "float32"
    every = {"blocks": 1, "every second block": 2, "some blocks": 2}.get(row["recompute"])
    techniques = [] if every is None else [ft.ActivationCheckpointing(policy=ft.model.EveryBlock(k=every))]
    return record(
        lambda: Llama(row, row["recompute"] == "every second product"),
        torch.zeros(int(row["micro_batch"]), int(row["length"]), dtype=torch.long),
        ft.FSDP2Strategy(replicas=replicas, reduce_dtype=dtype),
        techniques,
        devices,
        int(row["accumulate"]),
        fuses=row["compiled"] == "yes",
    )
