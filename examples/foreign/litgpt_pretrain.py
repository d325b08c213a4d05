"""Pretraining in the manner of LitGPT: Fabric, gradient accumulation, and a loop of its own."""

import math
import time

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rope(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1, self.norm_2, self.heads = RMSNorm(width), RMSNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc_1, self.fc_2 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.fc_1(h)) * self.fc_2(h))


class GPT(nn.Module):
    def __init__(self, vocab=4096, width=128, layers=3, heads=4, block_size=128):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.h, self.ln_f = nn.ModuleList(Block(width, heads) for _ in range(layers)), RMSNorm(width)
        angles = torch.outer(
            torch.arange(block_size), 10000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        )
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, idx):
        x, T = self.wte(idx), idx.shape[1]
        for block in self.h:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.lm_head(self.ln_f(x))


def get_lr(it, warmup, total, base=4e-4):
    if it < warmup:
        return base * (it + 1) / warmup
    return 0.1 * base + 0.45 * base * (1 + math.cos(math.pi * min(1.0, it / total)))


def fit(fabric, model, optimizer, loader, max_steps=400, accumulate=2):
    step, started, running = 0, time.perf_counter(), 0.0
    for it, batch in enumerate(loader, 1):
        is_accumulating = it % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss / accumulate)
        if is_accumulating:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        running = loss.item()
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, 20, max_steps)
        if step % 50 == 0:
            fabric.print(f"step {step} loss {running:.3f} {time.perf_counter() - started:.1f} s")
        if step >= max_steps:
            return


def main():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(42)
    with fabric.init_module():
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(torch.randint(0, 4096, (8000, 129)), 8, shuffle=True))
    fit(fabric, model, optimizer, loader)


if __name__ == "__main__":
    main()
