"""Five small models of the usual kinds, with batches for them, to hold predictions against measurements."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fasttrain.bench.gpt import Specimen
from lightning_fasttrain.bench.gpt import reference_gpt as gpt
from lightning_fasttrain.core.checks import require


class Supervised(L.LightningModule):
    """Trains any module: ``loss_of(net, batch)`` is its mean loss."""

    def __init__(self, net: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], lr: float = 1e-3) -> None:
        super().__init__()
        self.net = net
        self.loss_of = loss_of
        self.lr = lr

    def loss(self, batch: Any) -> Tensor:
        """Mean loss of ``batch``."""
        return self.loss_of(self.net, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def llama(layers: int = 4, width: int = 128, batch: int = 8, length: int = 256, vocabulary: int = 4096) -> Specimen:
    """A Llama of Hugging Face: RMSNorm, rotary positions, grouped keys and values, gated MLP, large vocabulary."""

    def module() -> L.LightningModule:
        hf: Any = require("transformers", extra="finetune")
        config = hf.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=length,
        )
        return Supervised(hf.LlamaForCausalLM(config).train(), _own_loss)

    def data() -> dict[str, Tensor]:
        tokens = _tokens(vocabulary, (batch, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Specimen(module, data)


def encoder(layers: int = 6, width: int = 192, batch: int = 16, length: int = 128) -> Specimen:
    """A BERT of Hugging Face in the shape of MiniLM, as a classifier: padding mask, dropout, a tiny head."""

    def module() -> L.LightningModule:
        hf: Any = require("transformers", extra="finetune")
        config = hf.BertConfig(
            vocab_size=8192,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=max(width // 32, 1),
            max_position_embeddings=length,
        )
        return Supervised(hf.BertForSequenceClassification(config).train(), _own_loss)

    def data() -> dict[str, Tensor]:
        kept = torch.randint(length // 2, length + 1, (batch, 1))
        mask = (torch.arange(length) < kept).long()
        return {"input_ids": _tokens(8192, (batch, length)), "attention_mask": mask, "labels": _tokens(2, (batch,))}

    return Specimen(module, data)


def resnet(layers: int = 3, width: int = 32, batch: int = 16, pixels: int = 64) -> Specimen:
    """A ResNet in three stages of ``layers`` blocks: convolutions, BatchNorm, activations that shrink with depth."""
    images = (batch, 3, pixels, pixels)
    return Specimen(
        lambda: Supervised(ResNet(layers, width), _classify), lambda: (torch.randn(images), _tokens(10, (batch,)))
    )


def uneven(layers: int = 8, width: int = 128, batch: int = 16, length: int = 128) -> Specimen:
    """Residual MLP blocks of one class whose hidden layers are 1, 10, 3 and 6 times the width, in turn."""

    def module() -> L.LightningModule:
        blocks = [MLPBlock(width, width * (1, 10, 3, 6)[i % 4]) for i in range(layers)]
        return Supervised(nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256)), _classify)

    return Specimen(module, lambda: (_tokens(256, (batch, length)), _tokens(256, (batch, length))))


ZOO: dict[str, Callable[..., Specimen]] = {
    "gpt": gpt,
    "llama": llama,
    "encoder": encoder,
    "resnet": resnet,
    "uneven": uneven,
}


class MLPBlock(nn.Module):
    """x + down(gelu(up(norm(x)))). [..., width] → [..., width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions with BatchNorm around a shortcut. [B, C, H, W] → [B, C', H/stride, W/stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [B, 3, H, W] → 10 class scores [B, 10]; each of three stages doubles the channels."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, channels = [], width
        for stage in range(3):
            for i in range(layers):
                outputs = width * 2**stage
                blocks.append(ResidualBlock(channels, outputs, stride=2 if stage and i == 0 else 1))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean(dim=(2, 3)))


def _tokens(vocabulary: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(vocabulary, shape)


def _own_loss(net: nn.Module, batch: Any) -> Tensor:
    return net(**batch).loss


def _classify(net: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
