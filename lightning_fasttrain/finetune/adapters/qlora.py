"""QLoRA: LoRA on a base model in 4 or 8 bits."""

import copy
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import Blocks, as_list
from lightning_fasttrain.finetune.adapters.lora import LoRA
from lightning_fasttrain.finetune.quantized.quantized_base import ALL_OR_SKIP, NONE_LEFT, QuantizedBase
from lightning_fasttrain.finetune.selection.targets import ALL_LINEAR, Targets, find_layers
from lightning_fasttrain.technique import Capability, Conflict, Setting, Surgery
from lightning_fasttrain.technique.declarations import PredictedStep


class QLoRA(LoRA):
    """Quantise the model's linear layers, freeze everything, and train low-rank matrices beside them.

    Equivalent to :class:`~lightning_fasttrain.QuantizedBase` and :class:`~lightning_fasttrain.LoRA` together, bit for
    bit; fully trained modules are not quantised. The weights, gradients and AdamW states of 8 billion parameters take
    120 GiB in float32, without activations; QLoRA reduces them to 5 GiB. Activations then dominate the memory: add
    :class:`~lightning_fasttrain.ActivationCheckpointing`, and for language models
    :class:`~lightning_fasttrain.FusedLossHead`.

    Args:
        rank: as for :class:`~lightning_fasttrain.LoRA`; so are alpha, targets, variant, dropout, train, name and
            checkpoint. ``variant="pissa"`` is refused, since it needs weights in full precision.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``, as for :class:`~lightning_fasttrain.QuantizedBase`; so are the
            remaining arguments.

    Raises:
        TypeError, ValueError: see :class:`~lightning_fasttrain.QuantizedBase` and :class:`~lightning_fasttrain.LoRA`.

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
    when: ClassVar[str] = "you fine-tune, and even the frozen weights do not fit in 16 bits; slower than LoRA"
    in_a_loop: ClassVar[str] = "apply(model, [QLoRA(...)])"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("adapter", "qlora", {"rank": 16}, cost=0.9),)

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        way_out = "Use QLoRA alone, or QuantizedBase and the adapter of your choice"
        return (
            Conflict(QuantizedBase, "QLoRA is QuantizedBase and LoRA already", way_out),
            Conflict(Capability.REPLACES_PRODUCTS, NONE_LEFT, ALL_OR_SKIP, lambda qlora, _: not qlora.base.skip),
            *super().conflicts(),
        )

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
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        if variant == "pissa":
            why = "this initialization decomposes each weight, and quantised weights are packed"
            way_out = "Use variant='lora', or LoRA(variant='pissa') without quantisation"
            raise ValueError(explain("QLoRA(variant='pissa')", why, way_out))
        super().__init__(
            rank, alpha, targets, variant=variant, dropout=dropout, train=train, name=name, checkpoint=checkpoint
        )
        self.base = QuantizedBase(kind, double_quant=double_quant, compute_dtype=compute_dtype, skip=skip)

    def predict(self, step: PredictedStep) -> "QLoRA":
        predicted = copy.copy(self)
        predicted.base = self.base.predict(step)
        return predicted

    def apply(self, model: nn.Module) -> None:
        # A copy, so that a second model gets the configured skip.
        base, skip = copy.copy(self.base), self.base.skip
        if self.train:  # fully trained modules cannot be packed
            base.skip = [*as_list(skip), *find_layers(model, self.train, "train")]
        base.apply(model)
        self.base.report = base.report
        super().apply(model)

    def describe_effect(self, model: nn.Module) -> str:
        beside = super().describe_effect(model)
        if not beside:
            return ""
        return f"{beside}; {self.base.describe_effect(model)}"
