"""Two ranks of which the second is slow in each step, and a search for unused parameters: what the doctor says."""

import json
import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from lightning_fasttrain.profiling import step_meter
from tests.support.clock import Clock


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        step_meter.perf_counter.passes(10 + 30 * self.global_rank)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(out):
    step_meter.perf_counter = Clock()
    doctor = ft.Doctor(steps=8, warmup=1, show=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
        max_epochs=1,
        callbacks=[doctor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=2))
    if trainer.is_global_zero:
        with open(out, "w") as file:
            json.dump(doctor.diagnosis.as_dict(), file)
    else:
        assert doctor.diagnosis is None


if __name__ == "__main__":
    main(sys.argv[1])
