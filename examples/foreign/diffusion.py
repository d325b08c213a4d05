"""A denoising diffusion model on small images: a U-Net, noise of random steps, samples that are logged."""

import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, before, after, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width=32, time=128):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = ResBlock(width, width, time), ResBlock(width, 2 * width, time)
        self.middle = ResBlock(2 * width, 2 * width, time)
        self.up2, self.up1 = ResBlock(4 * width, width, time), ResBlock(2 * width, width, time)
        self.end = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10_000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None].float() * freqs
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        one = self.down1(self.begin(x), t)
        two = self.down2(F.avg_pool2d(one, 2), t)
        mid = self.middle(two, t)
        up = self.up2(torch.cat([mid, two], 1), t)
        up = F.interpolate(up, scale_factor=2, mode="nearest")
        return self.end(self.up1(torch.cat([up, one], 1), t))


class DDPM(L.LightningModule):
    def __init__(self, steps=1000, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = UNet()
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0))

    def q_sample(self, x, t, noise):
        a = self.alphas_cumprod[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def training_step(self, batch, batch_idx):
        x, _ = batch
        t = torch.randint(0, self.hparams.steps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        loss = F.mse_loss(self.model(self.q_sample(x, t, noise), t), noise)
        self.log("train_loss", loss, prog_bar=True)
        if self.global_step == 0:
            self.logger.log_metrics({"sample_std": float(self.q_sample(x, t, noise).std())}, step=0)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(5)
    data = TensorDataset(torch.randn(2048, 3, 32, 32).clamp(-1, 1), torch.zeros(2048))
    trainer = L.Trainer(
        max_epochs=20, accelerator="cpu", gradient_clip_val=1.0, callbacks=[L.pytorch.callbacks.LearningRateMonitor()]
    )
    trainer.fit(DDPM(), DataLoader(data, batch_size=16, shuffle=True))
