"""Two processes on one machine with DDP: an MLP-Mixer on small images."""

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Mixer(L.LightningModule):
    def __init__(self, width=128, depth=4, patch=4, size=32, classes=10):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*[MixerBlock((size // patch) ** 2, width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)
        self.accuracy = MulticlassAccuracy(classes)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("loss", loss, sync_dist=True)
        self.log("acc", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        # Scaled by the number of processes, as the batch is.
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4 * self.trainer.world_size)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}
        ]


def main():
    L.seed_everything(11, workers=True)
    data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=10, enable_checkpointing=False)
    trainer.fit(Mixer(), DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
