"""The reference model, a GPT, and its sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import trained_parameters
from lightning_fasttrain.optim.named.build_optimizer import build_optimizer

# GPT-2's 50,257 tokens, rounded up to a multiple of 64 so that the head's matrix product fits the hardware.
GPT2_VOCABULARY = 50_304

ATTENTIONS = ("sdpa", "naive")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a :class:`GPT`.

    Args:
        vocabulary: number of different tokens, V.
        context: longest sequence, in tokens.
        layers: number of blocks.
        heads: attention heads per block; must divide ``width``.
        width: size of the hidden state, D.
        dropout: probability, at the embeddings and at both residual branches and on the attention weights.
        attention: ``"sdpa"`` for torch's fused attention, ``"naive"`` for one that keeps every [T, T] table.

    Raises:
        ValueError: a count below one, ``heads`` that do not divide ``width``, or an unknown ``attention``.
    """

    vocabulary: int = 256
    context: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            positive_int(name, getattr(self, name))
        one_of("attention", self.attention, ATTENTIONS)
        if self.width % self.heads:
            why = "each head takes an equal share of the width"
            way_out = f"Use a width of {math.ceil(self.width / self.heads) * self.heads}"
            raise ValueError(explain(f"heads={self.heads} with width={self.width}", why, way_out))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention written out: softmax(q·kᵀ/√d + mask)·v, with the whole [T, T] table in memory.

    Args:
        q: queries [B, H, T, d].
        k: keys [B, H, T, d].
        v: values [B, H, T, d].
        dropout: probability on the attention weights.

    Returns:
        [B, H, T, d].

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.
    """
    length = q.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [B, H, T, T]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    # F.dropout drops in evaluation too, so the caller gives 0 there.
    return F.dropout(weights, dropout) @ v


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values. [B, T, D] → [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.width // config.heads
        self.kind = config.attention
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # The number of heads comes from the projection: under tensor parallelism a rank has a part of them.
        heads = self.qkv(x).view(batch, length, 3, -1, self.head_width)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, d]
        dropout = self.dropout if self.training else 0.0
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            mixed = naive_attention(q, k, v, dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """One pre-norm transformer block. [B, T, D] → [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a head tied to the token embedding.

    Args:
        config: its shape.

    Raises:
        ValueError: at the first call with a sequence longer than ``config.context``.

    Example:
        >>> net = GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8))
        >>> net(torch.zeros(3, 5, dtype=torch.long)).shape
        torch.Size([3, 5, 16])

    Source:
        Radford et al. 2019 (GPT-2): pre-norm, tied head, residual projections drawn 1/√(2·layers) smaller.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        # Tied before weights are drawn, so that the shared one is drawn once.
        self.head.weight = self.tokens.weight
        self._draw_weights()

    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02
                if name.endswith(("attention.out.weight", "down.weight")):  # the end of a branch
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(self, idx: Tensor) -> Tensor:
        """Map token ids (B, T) to the hidden states (B, T, D) that the head reads."""
        length = idx.size(1)
        if length > self.config.context:
            why = f"the model has {self.config.context} learned positions"
            way_out = f"Cut it to {self.config.context} tokens, or build the GPT with context={length}"
            raise ValueError(explain(f"a sequence of {length} tokens", why, way_out))
        x = self.tokens(idx) + self.positions(torch.arange(length, device=idx.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, idx: Tensor) -> Tensor:
        """Map token ids (B, T) to logits (B, T, V)."""
        return self.head(self.hidden(idx))


def matrices_and_others(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices, embeddings included, decay; others do not; tied ones are listed once.

    Example:
        >>> [len(group["params"]) for group in matrices_and_others(nn.Linear(2, 2), 0.1)]
        [1, 1]
    """
    trainable = trained_parameters(module)
    matrices = [parameter for parameter in trainable if parameter.dim() > 1]
    others = [parameter for parameter in trainable if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class GPTModule(L.LightningModule):
    """Trains a :class:`GPT` on batches of (inputs, targets), each of token ids (B, T).

    Args:
        config: the shape of the model.
        lr: learning rate.
        weight_decay: of the matrices only.
        fused: AdamW in one kernel; False is the plain loop over parameters, None is torch's own choice.
        name: of another optimizer, as for :func:`~lightning_fasttrain.build_optimizer`.
        updates: for weights in bfloat16, as there.
    """

    def __init__(
        self,
        config: GPTConfig,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        fused: bool | None = None,
        name: str = "adamw",
        updates: str | None = None,
    ) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.lr = lr
        self.weight_decay = weight_decay
        self.fused = fused
        self.name, self.updates = name, updates

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy over the targets of ``batch``, in nats."""
        inputs, targets = batch
        return F.cross_entropy(self.gpt(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = matrices_and_others(self, self.weight_decay)
        if self.name != "adamw" or self.updates is not None:
            rates = {"lr": self.lr, "betas": (0.9, 0.95)}
            return build_optimizer(self, self.name, groups=groups, updates=self.updates, **rates)
        # foreach would be chosen on a GPU when nothing is said; the naive rung must really be the loop.
        foreach = False if self.fused is False else None
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=self.fused, foreach=foreach)


@dataclass(frozen=True)
class Size:
    """A model and the batch it is trained with.

    Args:
        model: the shape of the GPT.
        batch: sequences per optimizer step, each as long as the model's context.
        tokens: ``"bytes"``, ``"words"`` or ``"bpe"``, how text becomes token ids.
        steps: timed steps of a turn.
        micro_batches: parts that its batch is split into.
        minutes: that a ladder may take before it compares times in the fewest turns.
    """

    model: GPTConfig
    batch: int
    tokens: str = "bytes"
    steps: int = 2
    micro_batches: int = 4
    minutes: float = 5.0


def _gpt2(layers: int, width: int, heads: int) -> Size:
    model = GPTConfig(vocabulary=GPT2_VOCABULARY, context=1024, layers=layers, heads=heads, width=width)
    return Size(model, batch=32, tokens="bpe", steps=3, minutes=6.0)


SIZES = {
    # For a CPU: few parameters and many tokens, so that memory is activations, as it is in a real run on a GPU.
    "nano": Size(GPTConfig(context=256, layers=6, heads=4, width=128), batch=32, steps=2, micro_batches=16),
    "tiny": Size(GPTConfig(context=512, layers=4, heads=4, width=256), batch=32, steps=1, micro_batches=16),
    # The default: a vocabulary whose logits matter as they do in life, and a run within six minutes on two cores.
    "mini": Size(
        GPTConfig(vocabulary=8192, context=256, layers=3, heads=4, width=192),
        batch=32,
        tokens="words",
        steps=1,
        micro_batches=16,
    ),
    "gpt2-small": _gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-xl": _gpt2(layers=48, width=1600, heads=25),
}


def size_named(name: str) -> Size:
    """Look up a size by name.

    Raises:
        ValueError: there is none; the message lists the sizes.

    Example:
        >>> size_named("tiny").model.width
        256
    """
    return SIZES[one_of("size", name, tuple(SIZES))]


@dataclass(frozen=True)
class Specimen:
    """A model and a batch for it, both made on request.

    Args:
        module: makes the LightningModule, with random weights; it has ``loss(batch)`` and uses AdamW.
        batch: makes one batch of random data, on the CPU.
    """

    module: Callable[[], L.LightningModule]
    batch: Callable[[], Any]


def reference_gpt(size: str = "nano", batch: int = 8) -> Specimen:
    """Return the reference GPT in one of the ladder's sizes; its batch is (inputs, targets), each [batch, context]."""
    config = size_named(size).model

    def draw() -> Tensor:
        return torch.randint(config.vocabulary, (batch, config.context))

    return Specimen(lambda: GPTModule(config), lambda: (draw(), draw()))
