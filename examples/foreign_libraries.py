"""Real models of other projects, as small as they go and with random weights, each in a LightningModule of its own.

Nothing here knows of lightning_fasttrain. A library that is not installed has no rows, see :func:`find_libraries`.
"""

import functools
import importlib
import importlib.metadata
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from foreign_modules import BATCH, BATCHES, HydraModule, generator, image_data, token_data
from torch import nn
from torch.utils.data import Dataset

VOCAB, LENGTH, WIDTH = 23, 6, 32


class Rows(Dataset):
    """Samples that are dicts, as Hugging Face's datasets have them."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class Masked(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


class Pairs(Dataset):
    """Images with a mask each, as named tuples."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Masked(self.images[index], (self.images[index] > 0).long()[0])


def classify(net):
    """Return the module of the Hydra template around a classifier."""
    schedule = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4)
    return HydraModule(net, functools.partial(torch.optim.AdamW, lr=1e-3), schedule)


def timm_model(name, **settings):
    timm = importlib.import_module("timm")
    return classify(timm.create_model(name, num_classes=3, in_chans=1, **settings))


def vision_transformer():
    timm = importlib.import_module("timm")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
    return classify(timm.models.VisionTransformer(**sizes, in_chans=1, num_classes=3, drop_path_rate=0.2))


def resnet():
    models = importlib.import_module("torchvision.models")
    net = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)
    net.conv1 = nn.Conv2d(1, 64, 3, bias=False)
    return classify(net)


class Segmentation(L.LightningModule):
    def __init__(self):
        super().__init__()
        smp = importlib.import_module("segmentation_models_pytorch")
        self.net = smp.Unet("tu-test_resnet", encoder_weights=None, in_channels=1, classes=2)
        self.criterion = smp.losses.DiceLoss("multiclass")

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch.image), batch.mask)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Denoising(L.LightningModule):
    """Predict the noise that a scheduler of diffusers adds, as its training scripts do."""

    def __init__(self, net):
        super().__init__()
        self.net, self.draws = net, True
        self.schedule = importlib.import_module("diffusers").DDPMScheduler(num_train_timesteps=100)

    def predict(self, noisy, steps, batch):
        return self.net(noisy, steps).sample

    def draw(self, images):
        """Return noise, and times from 0 to 1; without ``draws`` they depend on the images alone."""
        if self.draws:
            return torch.randn_like(images), torch.rand(len(images), dtype=images.dtype, device=images.device)
        noise = torch.sin(100 * images)
        return noise, noise.flatten(1).mean(1).abs()

    def training_step(self, batch, batch_idx):
        images = batch["images"]
        noise, times = self.draw(images)
        steps = (100 * times).long()
        return F.mse_loss(self.predict(self.schedule.add_noise(images, noise, steps), steps, batch), noise)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DiT(Denoising):
    def predict(self, noisy, steps, batch):
        return self.net(noisy, timestep=steps, class_labels=batch["labels"]).sample


class Flux(Denoising):
    """Text and image tokens in two streams, then in one; the loss is that of flow matching."""

    def training_step(self, batch, batch_idx):
        images = batch["images"].flatten(2).transpose(1, 2)  # (B, tokens, channels)
        noise, times = self.draw(images)
        mixed = torch.lerp(images, noise, times[:, None, None])
        text = batch["text"].to(images.dtype)
        ids = [torch.zeros(tokens.shape[1], 3) for tokens in (text, images)]
        pooled = {"encoder_hidden_states": text, "pooled_projections": text.mean(1)}
        predicted = self.net(mixed, **pooled, timestep=times, txt_ids=ids[0], img_ids=ids[1]).sample
        return F.mse_loss(predicted.float(), (noise - images).float())


def unet():
    diffusers = importlib.import_module("diffusers")
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    return Denoising(diffusers.UNet2DModel(**sizes, block_out_channels=(8, 16), attention_head_dim=8, **blocks))


def dit():
    diffusers = importlib.import_module("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "patch_size": 2, "sample_size": 8}
    return DiT(diffusers.DiTTransformer2DModel(**sizes, in_channels=1, out_channels=1, num_embeds_ada_norm=100))


def flux():
    diffusers = importlib.import_module("diffusers")
    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
    dims = {"joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
    return Flux(diffusers.FluxTransformer2DModel(**sizes, **dims, num_attention_heads=2))


def noisy_data():
    images = torch.randn(BATCH * BATCHES, 1, 8, 8, generator=generator())
    return Rows(images=images, labels=torch.arange(len(images)) % 3)


def flux_data():
    images = torch.randn(BATCH * BATCHES, 4, 4, 4, generator=generator())
    return Rows(images=images, text=torch.randn(len(images), 5, WIDTH, generator=generator(1)))


class Contrastive(L.LightningModule):
    """Two towers and a loss that compares each image with each text of the batch."""

    def __init__(self):
        super().__init__()
        open_clip = importlib.import_module("open_clip")
        vision = {"layers": 2, "width": WIDTH, "head_width": 16, "image_size": 16, "patch_size": 8}
        text = {"layers": 2, "width": WIDTH, "heads": 2, "context_length": LENGTH, "vocab_size": VOCAB}
        self.net, self.criterion = open_clip.CLIP(16, vision, text), open_clip.ClipLoss()

    def training_step(self, batch, batch_idx):
        return self.criterion(*self.net(batch["image"], batch["text"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def captioned_images():
    images = torch.randn(BATCH * BATCHES, 3, 16, 16, generator=generator())
    return Rows(image=images, text=token_data().tensors[0])


class LanguageModel(L.LightningModule):
    """A model whose loss is inside of it, trained on a batch that is a tensor of token ids."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = self.net(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def decoder(**settings):
    x_transformers = importlib.import_module("x_transformers")
    layers = x_transformers.Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=16, **settings)
    net = x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH + 1, attn_layers=layers)
    return LanguageModel(x_transformers.AutoregressiveWrapper(net))


class TokenRows(Dataset):
    """Token ids alone."""

    def __init__(self):
        ids, targets = token_data().tensors
        self.ids = torch.cat([ids, targets[:, -1:]], dim=1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


class LitLLM(L.LightningModule):
    """As in LitGPT's documentation for its use with Lightning's Trainer."""

    def __init__(self, package="litgpt.model", **settings):
        super().__init__()
        litgpt = importlib.import_module(package)
        self.criterion = importlib.import_module("litgpt.utils").chunked_cross_entropy
        sizes = {"block_size": LENGTH, "vocab_size": VOCAB, "padded_vocab_size": VOCAB, "n_layer": 2, "n_head": 4}
        names = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 48}
        form = {"n_query_groups": 2, "rotary_percentage": 1.0, "bias": False, "parallel_residual": False}
        self.model = litgpt.GPT(litgpt.Config(n_embd=WIDTH, **sizes, **names, **form, **settings))
        if settings:
            litgpt.mark_only_lora_as_trainable(self.model)

    def training_step(self, batch):
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def instantiated():
    """A network, an optimizer and a schedule that Hydra instantiates from a configuration."""
    layers = [{"_target_": "torch.nn.Flatten"}]
    for inputs, outputs in ((64, WIDTH), (WIDTH, WIDTH), (WIDTH, 3)):
        layers += [{"_target_": "torch.nn.Linear", "in_features": inputs, "out_features": outputs}]
        layers += [{"_target_": "torch.nn.ReLU"}]
    partial = {"_partial_": True}
    config = {
        "_target_": "foreign_modules.HydraModule",
        "net": {"_target_": "torch.nn.Sequential", "_args_": layers[:-1]},
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-3, **partial},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "factor": 0.1, **partial},
    }
    omegaconf = importlib.import_module("omegaconf")
    return importlib.import_module("hydra.utils").instantiate(omegaconf.OmegaConf.create(config))


LORA = {"lora_r": 2, "lora_alpha": 4, "lora_query": True, "lora_value": True, "lora_mlp": True}
images_of = lambda size: functools.partial(image_data, size=size)  # noqa: E731
masked_images = lambda: Pairs(torch.randn(BATCH * BATCHES, 1, 32, 32, generator=generator()))  # noqa: E731
# Package → its modules, each with the data that its steps take.
LIBRARIES = {
    "timm": {
        "timm's ViT": (vision_transformer, images_of(16)),
        "timm's ConvNeXt": (lambda: timm_model("test_convnext", drop_path_rate=0.2), images_of(32)),
        "timm's EfficientNet": (lambda: timm_model("test_efficientnet", drop_path_rate=0.2), images_of(32)),
    },
    "torchvision": {"torchvision's ResNet": (resnet, images_of(16))},
    "segmentation-models-pytorch": {"segmentation_models_pytorch's Unet": (Segmentation, masked_images)},
    "diffusers": {
        "diffusers' UNet2DModel": (unet, noisy_data),
        "diffusers' DiT": (dit, noisy_data),
        "diffusers' Flux": (flux, flux_data),
    },
    "open_clip_torch": {"open_clip's CLIP": (Contrastive, captioned_images)},
    "x-transformers": {
        "x-transformers' Decoder": (decoder, TokenRows),
        "x-transformers' Decoder with rotary positions and SwiGLU": (
            lambda: decoder(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, ff_no_bias=True),
            TokenRows,
        ),
    },
    "litgpt": {
        "LitGPT's GPT": (LitLLM, token_data),
        "LitGPT's GPT with its own LoRA": (lambda: LitLLM("litgpt.lora", **LORA), token_data),
    },
    "hydra-core": {"Hydra's instantiate": (instantiated, image_data)},
}


def find_libraries():
    """Return the versions of the installed libraries, and the names of the others."""
    versions, missing = {}, []
    for package in LIBRARIES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return versions, missing
