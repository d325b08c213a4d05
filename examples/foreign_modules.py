"""Modules and data as other projects write them; nothing here knows of lightning_fasttrain."""

import functools

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
import transformers
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

VOCAB, WIDTH, LENGTH, BATCH, BATCHES = 23, 16, 6, 4, 6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, heads=2):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH),
            CausalSelfAttention(),
            nn.LayerNorm(WIDTH),
            MLP(),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's layout: a ModuleDict, a tied head, and the loss inside of the model."""

    def __init__(self):
        super().__init__()
        layers = {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        layers |= {"h": nn.ModuleList(Block() for _ in range(2)), "ln_f": nn.LayerNorm(WIDTH)}
        self.transformer = nn.ModuleDict(layers)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class NanoGPT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, batch_idx):
        _, loss = self.model(*batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(*batch)[1])

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def chunked_cross_entropy(logits, targets, chunk_size=8, ignore_index=-100):
    """As in LitGPT."""
    logits, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    pairs = zip(logits.split(chunk_size), targets.split(chunk_size), strict=True)
    losses = [F.cross_entropy(chunk, target, ignore_index=ignore_index, reduction="none") for chunk, target in pairs]
    counted = (targets != ignore_index).sum()
    return torch.cat(losses).sum() / counted.maximum(torch.ones_like(counted))


class LitGPT(L.LightningModule):
    """LitGPT's layout: the loss is outside of the model, in chunks, and the learning rate changes by step."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        blocks = nn.ModuleList(Block() for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "h": blocks, "ln_f": RMSNorm()})

    def forward(self, idx):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))

    def training_step(self, batch):
        loss = chunked_cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", chunked_cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class XTransformers(LitGPT):
    """The layout of x-transformers: a list of lists of norms, a layer and its residual."""

    def __init__(self):
        L.LightningModule.__init__(self)
        self.token_emb, self.to_logits = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList()
        for layer in (CausalSelfAttention(), MLP(), CausalSelfAttention(), MLP()):
            norms = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False), None, None])
            self.layers.append(nn.ModuleList([norms, layer, nn.Identity()]))

    def forward(self, idx):
        x = self.token_emb(idx)
        for norms, layer, residual in self.layers:
            x = layer(norms[0](x)) + residual(x)
        return self.to_logits(x)

    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]).transpose(1, 2), batch[1])

    def validation_step(self, batch):
        self.log("val_loss", F.cross_entropy(self(batch[0]).transpose(1, 2), batch[1]))


class HydraModule(L.LightningModule):
    """As in the Hydra template: a network and partial functions from a configuration, and torchmetrics."""

    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.train_loss, self.val_loss = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.val_acc_best = torchmetrics.MaxMetric()

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        logits = self.net(batch[0])
        return self.criterion(logits, batch[1]), logits.argmax(dim=1), batch[1]

    def training_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predicted, y)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predicted, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, y)
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        scheduler = {
            "scheduler": self.hparams.scheduler(optimizer=optimizer),
            "monitor": "val_loss",
            "interval": "epoch",
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def hydra(*layers):
    return HydraModule(
        nn.Sequential(*layers),
        functools.partial(torch.optim.Adam, lr=1e-3),
        functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=10),
    )


class BasicBlock(nn.Module):
    """As in torchvision's ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class ViT(nn.Module):
    """As in timm: a class token, learned positions, and blocks in an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Diffusion(L.LightningModule):
    """A U-Net with lists of down and up blocks, trained on noise that the step draws."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 4)
        self.enter, self.leave = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.down_blocks, self.up_blocks = (nn.ModuleList(BasicBlock() for _ in range(2)) for _ in range(2))

    def forward(self, x, t):
        x, skips = self.enter(x) + self.time(t)[:, :, None, None], []
        for block in self.down_blocks:
            x = block(x)
            skips.append(x)
        for block in self.up_blocks:
            x = block(x + skips.pop())
        return self.leave(x)

    def training_step(self, batch, batch_idx):
        noise, t = torch.randn_like(batch[0]), torch.randint(10, (len(batch[0]),))
        return F.mse_loss(self(batch[0] + noise * (t / 10)[:, None, None, None], t), noise)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class HuggingFace(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[1]).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def gpt2():
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return HuggingFace(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes)))


def bert():
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return HuggingFace(
        transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=VOCAB, **sizes, num_labels=3))
    )


class GAN(L.LightningModule):
    """As in Lightning's tutorial: manual optimization with two optimizers that are toggled."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.draws = False, True
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch):
        images = batch[0].flatten(1)
        z = torch.randn(len(images), 3).type_as(images) if self.draws else images[:, :3]
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            made = self.discriminator(self.generator(z) if number == 0 else self.generator(z).detach())
            loss = F.softplus(-made).mean()
            if number == 1:
                loss = (F.softplus(made).mean() + F.softplus(-self.discriminator(images)).mean()) / 2
            self.log(f"loss_{number}", loss, prog_bar=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.discriminator)], []


class Demo(LightningTransformer):
    """Lightning's own, without its download."""

    def prepare_data(self):
        pass


class SeveralLoaders(NanoGPT):
    """A training step on a dict of batches, from a CombinedLoader."""

    def training_step(self, batch, batch_idx):
        return sum(self.model(*part)[1] for part in batch.values())


def token_data(count=BATCH * BATCHES):
    ids = torch.randint(VOCAB, (count, LENGTH + 1), generator=generator())
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def image_data(count=BATCH * BATCHES, size=8):
    return TensorDataset(torch.randn(count, 1, size, size, generator=generator()), torch.arange(count) % 3)


def class_data(count=BATCH * BATCHES):
    return TensorDataset(token_data(count).tensors[0], torch.arange(count) % 3)


class Stream(IterableDataset):
    """An iterable dataset, with a length or without."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class SizedStream(Stream):
    def __len__(self):
        return len(self.data)


def loader(data, **settings):
    return DataLoader(data, batch_size=BATCH, **settings)


def shuffled(data):
    return loader(data, shuffle=True, generator=generator(5))


MLP_LAYERS = lambda: [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]  # noqa: E731
# A module, and the data that its steps take; where a library is installed, ``foreign_libraries`` has its real one.
MODULES = {
    "nanoGPT": (NanoGPT, token_data),
    "LitGPT's GPT": (LitGPT, token_data),
    "x-transformers' Decoder": (XTransformers, token_data),
    "Hydra template": (lambda: hydra(*MLP_LAYERS()), image_data),
    "torchvision's ResNet": (
        lambda: hydra(
            nn.Conv2d(1, 4, 3), BasicBlock(), BasicBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        ),
        image_data,
    ),
    "timm's ViT": (lambda: hydra(ViT()), image_data),
    "diffusers' UNet2DModel": (Diffusion, image_data),
    "GPT-2 of transformers": (gpt2, token_data),
    "BERT of transformers": (bert, class_data),
    "GAN": (GAN, image_data),
    "BoringModel": (BoringModel, None),
    "ManualOptimBoringModel": (ManualOptimBoringModel, None),
    "LightningTransformer": (lambda: Demo(VOCAB), token_data),
}
