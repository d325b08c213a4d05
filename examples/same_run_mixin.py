"""The same training with the mixin: a diff with another same_run_*.py file shows what this host changes.

python examples/same_run_mixin.py
"""

import lightning as L
import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text


class Net(ft.FastTrainMixin, L.LightningModule):
    techniques = (
        ft.ActivationCheckpointing(),
        ft.DevicePrefetch(),
        ft.MicroBatching(4),
        ft.EagerGradientRelease(),
    )

    def __init__(self):
        super().__init__()
        self.model = GPT(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
loader = batches(tokens, context=128, batch=16, steps=10)
model = Net()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(model, loader)

loss = trainer.callback_metrics["loss"]
print(f"loss {loss.item():.5f}, weights {sum(p.double().abs().sum() for p in model.parameters()).item():.4f}")
