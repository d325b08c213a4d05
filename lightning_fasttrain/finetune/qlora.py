"""LoRA on a base in 4 or 8 bits, in one line."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from lightning_fasttrain._surgery import Blocks
from lightning_fasttrain._technique import Surgery
from lightning_fasttrain.finetune.lora import LoRA
from lightning_fasttrain.finetune.quantized_base import QuantizedBase
from lightning_fasttrain.finetune.targets import ALL_LINEAR, Targets


class QLoRA(LoRA):
    """Quantise the model's linear layers, freeze everything, and train thin matrices beside them.

    The same as :class:`~lightning_fasttrain.QuantizedBase` and :class:`~lightning_fasttrain.LoRA` together. A model of
    7 billion parameters, 84 GiB and more with AdamW in float32, then trains in a tenth of that and less. Where
    activations are most of what is left, add :class:`~lightning_fasttrain.ActivationCheckpointing`.

    Args:
        rank: as for :class:`~lightning_fasttrain.LoRA`; so are alpha, targets, variant, dropout, train, name and
            checkpoint. ``variant="pissa"`` needs weights in full precision.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``, as for :class:`~lightning_fasttrain.QuantizedBase`; so are the rest.

    Raises:
        TypeError, ValueError: as those two.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = QLoRA(rank=4).apply(net)
        >>> net[0].base_layer.weight.dtype, net[0].lora_A["default"].weight.dtype, net[1].weight.dtype
        (torch.uint8, torch.float32, torch.float32)

    Source:
        Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
    """

    surgery: ClassVar[Surgery | None] = Surgery.QUANTIZE
    effect: ClassVar[str] = "LoRA on frozen weights in 4 bits"
    in_a_loop: ClassVar[str] = "apply(model, [QLoRA(...)])"

    def __init__(
        self,
        rank: int = 16,
        alpha: float = 32,
        targets: Targets = ALL_LINEAR,
        *,
        kind: str = "nf4",
        double_quant: bool = True,
        compute_dtype: torch.dtype | str = "auto",
        skip: Blocks = (),
        variant: str = "lora",
        dropout: float = 0.0,
        train: Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        super().__init__(
            rank, alpha, targets, variant=variant, dropout=dropout, train=train, name=name, checkpoint=checkpoint
        )
        self.base = QuantizedBase(kind, double_quant=double_quant, compute_dtype=compute_dtype, skip=skip)

    def apply(self, model: nn.Module) -> None:
        self.base.apply(model)
        super().apply(model)
