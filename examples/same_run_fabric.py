"""The same training in Fabric: a diff with another same_run_*.py file shows what this host changes.

python examples/same_run_fabric.py
"""

import lightning as L
import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text

fabric = L.Fabric(accelerator="cpu", devices=1)
fabric.launch()
torch.manual_seed(0)
tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
loader = batches(tokens, context=128, batch=16, steps=10)
model = GPT(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))


def step(batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


ft.apply(model, [ft.ActivationCheckpointing()])
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(loader, move_to_device=False)
for batch in ft.loaders.prefetch_to_device(loader, fabric.device):
    loss = ft.accumulate_gradients(
        step, batch, n=4, backward=fabric.backward, no_sync=lambda: fabric.no_backward_sync(model)
    )
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    ft.optim.release_gradients_(model.parameters())

print(f"loss {loss.item():.5f}, weights {sum(p.double().abs().sum() for p in model.parameters()).item():.4f}")
