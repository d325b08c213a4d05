"""The same training in plain PyTorch: a diff with another same_run_*.py file shows what that host changes.

python examples/same_run_plain.py
"""

import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text

torch.manual_seed(0)
tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
loader = batches(tokens, context=128, batch=16, steps=10)
model = GPT(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))


def step(batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


ft.apply(model, [ft.ActivationCheckpointing()])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in ft.loaders.prefetch_to_device(loader, "cpu"):
    loss = ft.accumulate_gradients(step, batch, n=4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ft.optim.release_gradients_(model.parameters())

print(f"loss {loss.item():.5f}, weights {sum(p.double().abs().sum() for p in model.parameters()).item():.4f}")
