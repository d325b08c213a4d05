"""A project in the manner of the Lightning-Hydra template, in one file: everything is instantiated from a config."""

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size, widths, output_size):
        super().__init__()
        layers = []
        for before, after in zip([input_size, *widths[:-1]], widths, strict=True):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(widths[-1], output_size))

    def forward(self, x):
        return self.model(x.flatten(1))


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 128, num_workers: int = 0, pin_memory: bool = False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = None

    def setup(self, stage=None):
        if self.data_train is None:
            images, labels = torch.randn(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
            self.data_train, self.data_val = random_split(TensorDataset(images, labels), [5000, 1000])

    def _loader(self, data, shuffle):
        return DataLoader(
            data, self.hparams.batch_size, num_workers=self.hparams.num_workers, shuffle=shuffle, drop_last=shuffle
        )

    def train_dataloader(self):
        return self._loader(self.data_train, True)

    def val_dataloader(self):
        return self._loader(self.data_val, False)


class DigitsLitModule(L.LightningModule):
    def __init__(self, net, optimizer, scheduler=None, compile: bool = False):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(num_classes=10)
        self.val_acc, self.val_acc_best = MulticlassAccuracy(num_classes=10), MaxMetric()
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


CONFIG = {
    "seed": 7,
    "data": {"_target_": "__main__.DigitsDataModule", "batch_size": 256},
    "model": {
        "_target_": "__main__.DigitsLitModule",
        "net": {
            "_target_": "__main__.SimpleDenseNet",
            "input_size": 784,
            "widths": [1024, 1024, 512],
            "output_size": 10,
        },
        "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.001},
        "scheduler": {
            "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau",
            "_partial_": True,
            "factor": 0.1,
            "patience": 10,
        },
    },
    "callbacks": {
        "model_checkpoint": {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": "val/acc"},
        "early_stopping": {
            "_target_": "lightning.pytorch.callbacks.EarlyStopping",
            "monitor": "val/acc",
            "mode": "max",
        },
    },
    "logger": {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "logs"}},
    "trainer": {"_target_": "lightning.Trainer", "accelerator": "cpu", "max_epochs": 10, "deterministic": False},
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
}
ConfigStore.instance().store(name="train", node=OmegaConf.create(CONFIG))


@hydra.main(version_base="1.3", config_path=None, config_name="train")
def main(cfg: DictConfig):
    L.seed_everything(cfg.seed, workers=True)
    datamodule = instantiate(cfg.data)
    model = instantiate(cfg.model)
    callbacks = [instantiate(one) for one in cfg.callbacks.values()]
    loggers = [instantiate(one) for one in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    trainer.fit(model=model, datamodule=datamodule)
    return trainer.callback_metrics.get("val/acc_best")


if __name__ == "__main__":
    main()
