"""A character-level GPT in the manner of nanoGPT, as a LightningModule."""

import argparse
import math
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class GPTConfig:
    block_size: int = 128
    vocab_size: int = 2048
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.1
    bias: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LitNanoGPT(L.LightningModule):
    def __init__(self, config, lr=6e-4, warmup=20):
        super().__init__()
        self.save_hyperparameters()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/lr", self.lr_schedulers().get_last_lr()[0])
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)), prog_bar=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches

        def get_lr(step):
            if step < self.hparams.warmup:
                return (step + 1) / self.hparams.warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / total)))

        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr), "interval": "step"}]


class Characters(Dataset):
    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return len(self.tokens) - self.block_size - 1

    def __getitem__(self, i):
        chunk = self.tokens[i : i + self.block_size + 1]
        return chunk[:-1], chunk[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_iters", type=int, default=2000)
    args = parser.parse_args()
    L.seed_everything(1337)
    config = GPTConfig()
    data = torch.randint(0, config.vocab_size, (40_000,))
    train = DataLoader(Characters(data[:36_000], config.block_size), args.batch_size, shuffle=True)
    val = DataLoader(Characters(data[36_000:], config.block_size), args.batch_size)
    trainer = L.Trainer(
        max_steps=args.max_iters, gradient_clip_val=1.0, accelerator="cpu", limit_val_batches=20, val_check_interval=500
    )
    trainer.fit(LitNanoGPT(config), train, val)
