"""A small DCGAN with manual optimization of two networks."""

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_generator(latent=64, width=32):
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 4 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(True),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(True),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def make_discriminator(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(),
    )


class GAN(L.LightningModule):
    def __init__(self, latent_dim=64, lr=2e-4, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = make_generator(latent_dim), make_discriminator()
        self.register_buffer("fixed_z", torch.randn(8, latent_dim, 1, 1))

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(logits, is_real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(len(real), self.hparams.latent_dim, 1, 1, device=self.device)

        self.toggle_optimizer(opt_g)
        fake = self(z)
        g_loss = self.adversarial_loss(self.discriminator(fake), True)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = self.adversarial_loss(self.discriminator(real), True)
        d_loss = (d_loss + self.adversarial_loss(self.discriminator(fake.detach()), False)) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        betas = self.hparams.b1, self.hparams.b2
        return [
            torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas),
            torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas),
        ], []

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.logger.experiment.log_metrics({"spread": float(self(self.fixed_z).std())}, step=self.global_step)


if __name__ == "__main__":
    L.seed_everything(3)
    images = torch.rand(4096, 3, 32, 32) * 2 - 1
    trainer = L.Trainer(accelerator="cpu", max_epochs=5)
    trainer.fit(GAN(), DataLoader(TensorDataset(images), batch_size=64, shuffle=True))
