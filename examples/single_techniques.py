"""Techniques that change one thing each, beside the plain step: time and peak memory of a training step.

    python examples/single_techniques.py [--cases mlp,probing,latents,conv,attention] [--turns 9] [--out RESULTS.json]

`mlp`: blocks of attention and SwiGLU, plain, recomputed, in tiles, and both. `probing` and `latents`: a head on a
frozen ConvNet, and a denoiser on the latents of a frozen encoder, without and with kept outputs. `conv`: a ConvNet,
channels-first and channels-last. `attention`: what AttentionBackend measures and chooses at several lengths, as the
time of all attention calls of a step. The other kinds of a case have the same weights and batches and take turns in one
process; a ratio is that of the times of a turn, with its interval of 95%. On a CPU times are CPU time on one thread,
since other programs may run; on a GPU they are those of its clock. Memory is what a step adds to weights, gradients and
batch.
"""

import argparse
import dataclasses
import datetime
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import device_clock, hardware, versions
from lightning_fasttrain.planner.timing import compare_times

MIB = 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SwiGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(*size) for size in [(width, 3 * width)] * 2 + [(3 * width, width)])

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.mlp = Attention(width), SwiGLU(width)

    def forward(self, x):
        return self.mlp(self.attention(x))


def conv(channels, outputs, stride=1):
    return nn.Sequential(nn.Conv2d(channels, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.SiLU())


def conv_net(width):
    return nn.Sequential(conv(3, width, 2), conv(width, 2 * width, 2), conv(2 * width, 2 * width))


class OnBackbone(nn.Module):
    """A module that trains on the outputs of a frozen backbone."""

    def __init__(self, head, width):
        super().__init__()
        self.backbone, self.head = conv_net(width).requires_grad_(False), head

    def forward(self, x):
        return self.head(self.backbone(x))


def cases(scale):
    """Name → (makes the model, makes the input, kind → its techniques); the first kind is the plain one."""
    width, tokens, images, size = 64 * scale, 2048 * scale, 4 * scale, 16 * scale
    tiled, recomputed = lambda: ft.model.TiledMLP(), lambda: ft.ActivationCheckpointing()
    probe = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    kept = {"plain": lambda: [], "kept": lambda: [ft.finetune.FrozenCache("backbone")]}
    return {
        "mlp": (
            lambda: nn.Sequential(*[Block(width) for _ in range(4)]),
            lambda: torch.randn(tokens // 1024, 1024, width),
            {
                "plain": lambda: [],
                "recomputed": lambda: [recomputed()],
                "tiled": lambda: [tiled()],
                "recomputed and tiled": lambda: [recomputed(), tiled()],
            },
        ),
        "probing": (lambda: OnBackbone(probe, 32), lambda: torch.randn(images, 3, size, size), kept),
        "latents": (lambda: OnBackbone(conv(64, 64), 32), lambda: torch.randn(images, 3, size, size), kept),
        "conv": (
            lambda: conv_net(32),
            lambda: torch.randn(images, 3, size, size),
            {"plain": lambda: [], "channels last": lambda: [ft.model.ChannelsLast()]},
        ),
    }


class Side:
    """One kind of a case."""

    def __init__(self, make, batch, techniques):
        torch.manual_seed(0)
        self.net, self.batch, self.times_ms = make().to(DEVICE), batch, []
        self.techniques = techniques
        self.undo = ft.apply(self.net, techniques)
        for _ in range(2):  # what is examined or kept in the first step
            self.loss = self.step()

    def step(self):
        self.net.zero_grad()
        loss = self.net(self.batch).square().mean()
        loss.backward()
        return loss.item()

    def measure_memory(self):
        with ft.profiling.PeakMemory(DEVICE, self.net, self.batch) as peak:
            self.step()
        return peak.added_bytes / MIB

    def measure_time(self):
        clock = (lambda: device_clock(DEVICE)) if DEVICE.type == "cuda" else time.process_time
        began = clock()
        self.step()
        self.times_ms.append(1e3 * (clock() - began))


def compare(name, make, make_batch, kinds, turns):
    torch.manual_seed(1)
    batch = make_batch().to(DEVICE)
    sides = {kind: Side(make, batch, techniques()) for kind, techniques in kinds.items()}
    memory = {kind: side.measure_memory() for kind, side in sides.items()}
    for _ in range(turns):
        for side in sides.values():
            side.measure_time()
    rows = []
    for kind, side in sides.items():
        ratio = compare_times(sides["plain"].times_ms, side.times_ms)
        row = {"case": name, "kind": kind, "step_ms": statistics.median(side.times_ms), "added_mib": memory[kind]}
        row |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "loss": side.loss}
        outcomes = [technique.outcome(side.net) for technique in side.techniques]
        row["outcome"] = "; ".join(filter(None, outcomes))
        rows.append(row)
        times = f"{row['step_ms']:8.1f} ms, ×{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        print(f"{name:17} {kind:21} {times}  {row['added_mib']:7.1f} MiB  {row['outcome']}", flush=True)
        side.undo.close()
    return rows


def choose_attention(scale):
    """The choice of the back end for sequences of several lengths, as many tokens in each batch."""
    width, tokens, rows = 64 * scale, 512 * scale, []
    for length in (16, 128, tokens):
        net, chosen = nn.Sequential(*[Attention(width) for _ in range(4)]).to(DEVICE), ft.model.AttentionBackend()
        x = torch.randn(tokens // length, length, width, device=DEVICE)
        with ft.apply(net, [chosen]):
            for _ in range(2):
                net(x).sum().backward()
        choice = chosen.choice
        rows.append({"case": "attention", "kind": f"{length} tokens", **dataclasses.asdict(choice)})
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in choice.step_ms.items())
        print(f"{'attention':17} {f'{length} tokens':21} {choice.order[0]} is chosen: {times}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="mlp,probing,latents,conv,attention")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--scale", type=int, default=4, help="of widths, lengths and images; 1 is a test")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name, (make, make_batch, kinds) in cases(options.scale).items():
        if name in options.cases.split(","):
            rows += compare(name, make, make_batch, kinds, options.turns)
    if "attention" in options.cases.split(","):
        rows += choose_attention(options.scale)
    if options.out is not None:
        report = {
            "hardware": hardware(),
            "versions": versions(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
