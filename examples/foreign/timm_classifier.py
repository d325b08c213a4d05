"""An image classifier in the manner of timm: MixUp, label smoothing, a cosine schedule with warm-up, and EMA."""

import copy
import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class BasicBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.short = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet(widths=(32, 64, 128), classes=10):
    layers, before = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()], widths[0]
    for number, width in enumerate(widths):
        layers += [BasicBlock(before, width, 1 if number == 0 else 2)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Mixup:
    def __init__(self, alpha=0.2, classes=10, smoothing=0.1):
        self.alpha, self.classes, self.smoothing = alpha, classes, smoothing

    def __call__(self, x, target):
        lam = torch.distributions.Beta(self.alpha, self.alpha).sample().item()
        off = self.smoothing / self.classes
        soft = F.one_hot(target, self.classes).float() * (1 - self.smoothing) + off
        return lam * x + (1 - lam) * x.flip(0), lam * soft + (1 - lam) * soft.flip(0)


class ModelEma(L.Callback):
    def __init__(self, decay=0.999):
        self.decay, self.ema = decay, None

    def on_fit_start(self, trainer, pl_module):
        self.ema = copy.deepcopy(pl_module.net).eval()

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for ema, live in zip(self.ema.state_dict().values(), pl_module.net.state_dict().values(), strict=True):
            if ema.dtype.is_floating_point:
                ema.lerp_(live, 1 - self.decay)


class Classifier(L.LightningModule):
    def __init__(self, lr=0.1, warmup_epochs=1):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.mixup = resnet(), Mixup()

    def training_step(self, batch, batch_idx):
        x, target = self.mixup(*batch)
        loss = torch.sum(-target * F.log_softmax(self.net(x), dim=-1), dim=-1).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, target = batch
        self.log("top1", (self.net(x).argmax(1) == target).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
        epochs, warmup = self.trainer.max_epochs, self.hparams.warmup_epochs

        def scale(epoch):
            if epoch < warmup:
                return (epoch + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * epoch / epochs))

        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, scale)]


class Pictures(Dataset):
    def __init__(self, count):
        self.pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (count,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.pixels[i].float().div(255).sub(0.5).div(0.25)
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), self.labels[i]


if __name__ == "__main__":
    L.seed_everything(42)
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(monitor="top1", mode="max", save_top_k=1)
    trainer = L.Trainer(max_epochs=30, accelerator="cpu", callbacks=[ModelEma(), checkpoint], log_every_n_steps=10)
    trainer.fit(
        Classifier(), DataLoader(Pictures(4096), 64, shuffle=True, drop_last=True), DataLoader(Pictures(512), 128)
    )
