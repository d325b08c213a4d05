"""A transformer that forecasts several time series at once."""

import math
from argparse import ArgumentParser

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, history, horizon):
        self.series, self.history, self.horizon = series, history, horizon

    def __len__(self):
        return len(self.series) - self.history - self.horizon

    def __getitem__(self, i):
        middle = i + self.history
        return self.series[i:middle], self.series[middle : middle + self.horizon]


class PositionalEncoding(nn.Module):
    def __init__(self, width, longest=512):
        super().__init__()
        angles = torch.arange(longest)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Forecaster(L.LightningModule):
    def __init__(self, channels=8, history=192, horizon=24, width=96, layers=3, max_lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.project, self.position = nn.Linear(channels, width), PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, channels * horizon)

    def forward(self, x):
        # Each window is brought to mean zero and one unit of spread.
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        hidden = self.encoder(self.position(self.project((x - mean) / std)))
        forecast = self.head(hidden[:, -1]).unflatten(1, (self.hparams.horizon, self.hparams.channels))
        return forecast * std + mean

    def training_step(self, batch, batch_idx):
        history, future = batch
        loss = nn.functional.huber_loss(self(history), future)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        history, future = batch
        self.log("val_mae", (self(history) - future).abs().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.RAdam(self.parameters(), lr=self.hparams.max_lr / 25)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.max_lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    L.seed_everything(2024)
    t = torch.arange(6000)[:, None] / 24
    series = torch.sin(2 * math.pi * t * torch.linspace(0.5, 2, 8)) + 0.1 * torch.randn(6000, 8)
    train = DataLoader(Windows(series[:5000], 192, 24), args.batch_size, shuffle=True)
    val = DataLoader(Windows(series[5000:], 192, 24), args.batch_size)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        gradient_clip_val=0.5,
        callbacks=[L.pytorch.callbacks.EarlyStopping("val_mae"), L.pytorch.callbacks.LearningRateMonitor()],
    )
    trainer.fit(Forecaster(), train, val)


if __name__ == "__main__":
    main()
