"""A multilayer perceptron on a table, whose rows are read and converted one by one in Python."""

import random

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CATEGORIES = {"city": 50, "product": 200, "weekday": 7}
NUMBERS = [f"feature_{i}" for i in range(24)]


def make_rows(count, seed=0):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        row = {name: str(draw.randrange(size)) for name, size in CATEGORIES.items()}
        row.update({name: f"{draw.gauss(0, 1):.4f}" for name in NUMBERS})
        row["target"] = f"{draw.gauss(0, 1):.4f}"
        rows.append(row)
    return rows


class TableDataset(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        codes = torch.tensor([int(row[name]) for name in CATEGORIES])
        values = torch.tensor([float(row[name]) for name in NUMBERS])
        return codes, values, torch.tensor(float(row["target"]))


class TabularMLP(L.LightningModule):
    def __init__(self, embed=16, widths=(256, 128), dropout=0.1, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embeddings = nn.ModuleList(nn.Embedding(size, embed) for size in CATEGORIES.values())
        layers, before = (
            [nn.BatchNorm1d(len(NUMBERS) + embed * len(CATEGORIES))],
            len(NUMBERS) + embed * len(CATEGORIES),
        )
        for width in widths:
            layers += [nn.Linear(before, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Dropout(dropout)]
            before = width
        self.mlp = nn.Sequential(*layers, nn.Linear(before, 1))

    def forward(self, codes, values):
        embedded = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*embedded, values], 1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        codes, values, target = batch
        loss = nn.functional.mse_loss(self(codes, values), target)
        self.log("train_rmse", loss.sqrt())
        return loss

    def validation_step(self, batch, batch_idx):
        codes, values, target = batch
        self.log("val_rmse", nn.functional.mse_loss(self(codes, values), target).sqrt(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_rmse"}}


if __name__ == "__main__":
    L.seed_everything(9)
    train = DataLoader(TableDataset(make_rows(20_000)), batch_size=512, shuffle=True)
    val = DataLoader(TableDataset(make_rows(2_000, seed=1)), batch_size=512)
    stop = L.pytorch.callbacks.EarlyStopping("val_rmse", patience=3)
    L.Trainer(max_epochs=20, accelerator="cpu", callbacks=[stop]).fit(TabularMLP(), train, val)
