"""Training scripts without faults, in which the doctor must find nothing."""

GPT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))

class GPT(L.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("places", torch.arange(64), persistent=False)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.head(self.norm(self.blocks(self.embed(tokens) + self.place(self.places))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = L.Trainer(accelerator="cpu", max_steps=200, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(GPT(), DataLoader(TensorDataset(torch.randint(256, (1600, 64))), batch_size=8, shuffle=True))
"""

VIT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class ViT(L.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.place = nn.Parameter(torch.zeros(1, 17, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.blocks(x)[:, 0])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1600, 3, 32, 32), torch.randint(10, (1600,)))
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(ViT(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=16))
"""

LSTM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(256, 16)
        self.lstm = nn.LSTM(64, 256, batch_first=True)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])

def train(net, loader):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    running = torch.zeros(())
    for step, (tokens, tags) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tags.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % 100 == 99:
            print(running.item() / 100)
            running.zero_()

if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(500, (1600, 32)), torch.randint(16, (1600, 32)))
    train(Tagger(), DataLoader(data, batch_size=16, shuffle=True))
"""

GAN = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        first, second = self.optimizers()
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        fake = self.generator(torch.randn(len(real), 64, device=self.device))
        loss_of = nn.functional.binary_cross_entropy_with_logits
        judged = loss_of(self.discriminator(real), ones) + loss_of(self.discriminator(fake.detach()), zeros)
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        fooled = loss_of(self.discriminator(fake), ones)
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()

    def configure_optimizers(self):
        settings = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True}
        return [torch.optim.Adam(self.generator.parameters(), **settings),
                torch.optim.Adam(self.discriminator.parameters(), **settings)]

if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(GAN(), DataLoader(TensorDataset(torch.rand(6400, 784)), batch_size=64, shuffle=True))
"""

FABRIC = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, 2048), nn.ReLU(),
                        nn.Linear(2048, 10))
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True))
    data = TensorDataset(torch.randn(3200, 256), torch.randint(10, (3200,)))
    train, valid = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, 32))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for _ in range(2):
        net.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        schedule.step()
        net.eval()
        with torch.no_grad():
            for x, y in valid:
                net(x)

if __name__ == "__main__":
    main()
"""

HUGGING_FACE = """
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

def main():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=512, num_labels=4)
    model = BertForSequenceClassification(config)
    model.train()
    ids, labels = torch.randint(1000, (800, 48)), torch.randint(4, (800,))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
            for row, label in zip(ids, labels)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    for batch in DataLoader(rows, batch_size=16, shuffle=True):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""

CLEAN = {"GPT": GPT, "ViT": VIT, "LSTM": LSTM, "GAN": GAN, "Fabric": FABRIC, "Hugging Face": HUGGING_FACE}
