"""Losses of models whose backbone takes or returns more than a tensor, or contains BatchNorm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.micro_batching.loss_models import (
    CLASSES,
    DIM,
    LENGTH,
    POINT,
    VOCAB,
    LossCase,
    Training,
    classes,
    normal,
    prefixes,
    task,
    token_ids,
    two_layers,
)
from tests.micro_batching.losses_of_batches import info_nce


class Texts(nn.Module):
    """A Transformer with a padding mask as a keyword; averages over tokens other than padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=~mask)
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Recurrent(nn.Module):
    """Returns outputs and last states; torch's own states (layers, B, D) have the samples in the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(POINT, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        outputs, (states, _) = self.lstm(x)
        return {"outputs": outputs, "last": (states[-1], outputs.shape[1])}


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Recurrent()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.backbone(x)
        return self.head(out["last"][0] + out["outputs"].mean(1))


class FrozenBatchNorm(nn.BatchNorm1d):
    """Always in evaluation mode."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.running_mean = torch.randn(width)
        self.eval()

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Normed(nn.Module):
    """BatchNorm in the backbone, or in the head, which sees the whole batch."""

    def __init__(self, norm: type[nn.BatchNorm1d] = nn.BatchNorm1d, in_backbone: bool = False) -> None:
        super().__init__()
        self.backbone = two_layers()
        self.head = nn.Sequential(nn.Linear(DIM, CLASSES))
        if in_backbone:
            self.backbone.insert(2, norm(DIM))
        else:
            self.head.insert(0, norm(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def normed(loss: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> Callable[[int], Training]:
    return task(lambda: Normed(**settings), lambda net, b: loss(net(b["x"]), b["y"]), x=normal(POINT), y=classes())


LOSSES_OF_BACKBONES = [
    # Backbones that take and return more than a tensor.
    LossCase(
        "Transformer with a padding mask",
        task(
            Texts,
            lambda net, b: info_nce(net(b["ids"], mask=b["mask"]), net(b["ids"].flip(1), mask=b["mask"].flip(1))),
            ids=token_ids,
            mask=prefixes(LENGTH),
        ),
    ),
    LossCase("LSTM", task(Clips, lambda net, b: net(b["x"]).square().mean(1).logsumexp(0), x=normal(4, POINT))),
    LossCase("BatchNorm in the head, mean", normed(F.cross_entropy)),
    LossCase("BatchNorm frozen in the backbone", normed(F.cross_entropy, norm=FrozenBatchNorm, in_backbone=True)),
    LossCase("BatchNorm in the backbone, mean", normed(F.cross_entropy, in_backbone=True), refused="BatchNorm"),
    LossCase(
        "BatchNorm in the backbone, RMSE",
        normed(lambda z, y: F.mse_loss(z[:, 0], y.to(z)).sqrt(), in_backbone=True),
        refused="BatchNorm",
    ),
]
