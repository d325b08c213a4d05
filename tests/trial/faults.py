"""Steps and models with something that a technique's trial may leave out: each is a way in which training goes wrong.

Every fault is a language model whose parts are replaced, trained on three batches of padded rows.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM, ROWS, LENGTH = 13, 8, 6, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A residual block with attention that padding takes no part in."""

    def __init__(self, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out, self.mlp = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), mlp()

    def mix(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x), mask)
        return x + self.mlp(self.norm_mlp(x))


class Plain(L.LightningModule):
    """Nothing unusual: techniques must train it, and not refuse it."""

    block: Callable[[], nn.Module] = Block
    refusable = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(2)])
        self.begin()
        self.double()

    def begin(self) -> None:
        """Add what the fault needs."""

    def embed_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return self.embed(batch["ids"])

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        x, mask = self.embed_tokens(batch), batch["mask"][:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def list_batches(count: int = 3) -> list[dict[str, Tensor]]:
    """Rows of 3 to 8 tokens, with other numbers of targets; the shortest has none."""
    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, Tensor]] = []
    for _ in range(count):
        ids, labels = (torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator) for _ in range(2))
        lengths = torch.randint(4, LENGTH + 1, (ROWS,), generator=generator)
        lengths[0], lengths[1] = LENGTH, 3
        mask = torch.arange(LENGTH) < lengths[:, None]
        counted = mask & (torch.rand(ROWS, LENGTH, generator=generator) < 0.7)
        counted[0], counted[1] = True, False
        found.append({"ids": ids * mask, "mask": mask, "labels": labels.masked_fill(~counted, -100)})
    return found


# State of the step.


class Counter(Plain):
    """A warm-up of the loss by a number of its own."""

    refusable = True

    def begin(self) -> None:
        self.count = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        return self.loss(batch) * (1 - 0.5**self.count)


class Counts(Counter):
    """The same in a collections.Counter."""

    def begin(self) -> None:
        self.counts = collections.Counter()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.counts["steps"] += 1
        return self.loss(batch) * (1 - 0.5 ** self.counts["steps"])


@dataclasses.dataclass
class Progress:
    steps: int = 0


class InDataclass(Counter):
    def begin(self) -> None:
        self.progress = Progress()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.progress.steps += 1
        return self.loss(batch) * (1 - 0.5**self.progress.steps)


class CounterInBuffer(Counter):
    def begin(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(batch) * (1 - 0.5**self.steps)


class Hidden(Plain):
    """A hidden state that goes on from batch to batch."""

    refusable = True

    def begin(self) -> None:
        self.state = torch.zeros(DIM)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed_tokens(batch)
        self.state = 0.5 * self.state.to(x) + x.detach().mean((0, 1))
        return self.loss(batch) + (self.head(self.state.to(x))).square().mean()


class Queue(Plain):
    """Losses of earlier batches in a deque, which scale the present one."""

    refusable = True

    def begin(self) -> None:
        self.queue: collections.deque[float] = collections.deque([1.0], maxlen=4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        scaled = loss / sum(self.queue)
        self.queue.append(float(loss))
        return scaled


class Teacher(Plain):
    """A teacher without gradients, written by the step."""

    refusable = True

    def begin(self) -> None:
        self.teacher = nn.Linear(DIM, VOCAB)
        self.teacher.load_state_dict(self.head.state_dict())
        self.teacher.requires_grad_(requires_grad=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for one, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            one.data.lerp_(other.data, 0.3)
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        kept = batch["labels"] != -100
        drift = (logits - self.teacher(self.embed_tokens(batch))).square().mean(-1)
        return loss + (drift * kept).sum() / kept.sum()


class OwnGenerator(Plain):
    """Noise from a generator of its own, one number for each batch."""

    refusable = True

    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + torch.rand((), generator=self.generator))


class StateOfBlock(Plain):
    """A block whose temperature falls with each forward."""

    refusable = True

    class Cooling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 2.0

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.temperature *= 0.9
            return super().forward(x, mask) / self.temperature

    block = Cooling


class GeneratorOfBlock(Plain):
    """A block that draws from a generator of its own."""

    refusable = True

    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask) * (1 + torch.rand((), generator=self.noise))

    block = Noisy


class DeepStateOfBlock(Plain):
    """A block with numbers in a dataclass, in a dict of dicts, and in a tensor that is no buffer."""

    refusable = True

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.progress, self.counts, self.calls = Progress(), {"of": {"block": 0}}, torch.zeros(())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.progress.steps += 1
            self.counts["of"]["block"] += 1
            self.calls += 1
            calls = self.progress.steps + self.counts["of"]["block"] + self.calls
            return super().forward(x, mask) * (1 + 1 / calls)

    block = Counting


class LazyBlock(Plain):
    """A block that initializes itself in its first forward."""

    class Lazy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.is_ready = False

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if not self.is_ready:
                self.is_ready = True
                self.out.weight.data.mul_(0.5)
            return super().forward(x, mask)

    block = Lazy
    refusable = True


# Padding that takes part.


class Convolves(Plain):
    class Convolved(Block):
        def __init__(self) -> None:
            super().__init__()
            self.near = nn.Conv1d(DIM, DIM, 3, padding=1)

        def mix(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.near(x.mT).mT

    block = Convolved


class Pools(Plain):
    class Pooled(Block):
        def mix(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out(x.mean(1, keepdim=True)).expand_as(x)

    block = Pooled


class Unmasked(Plain):
    class Attending(Block):
        def mix(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().mix(x, torch.ones_like(mask))

    block = Attending


class Fourier(Plain):
    class Transformed(Block):
        def mix(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.fft.fft(x, dim=1).real / LENGTH

    block = Transformed


class PositionsFromTheEnd(Plain):
    def embed_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        x = super().embed_tokens(batch)
        return x + torch.arange(x.shape[1], 0, -1).to(x)[:, None] / LENGTH


class NormalizesTokens(Plain):
    class Normalized(Block):
        def mix(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1)

    block = Normalized


# Mixing of tokens or rows that is initialized to nothing.


class ZeroConvolution(Plain):
    class Mixing(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.near = nn.Conv1d(2 * DIM, 2 * DIM, 3, padding=1, groups=2 * DIM)
            nn.init.zeros_(self.near.weight)
            nn.init.zeros_(self.near.bias)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(x))
            return self.down(h + self.near(h.mT).mT)

    block = staticmethod(lambda: Block(ZeroConvolution.Mixing))


class ZeroGate(Plain):
    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.gate * x.mean(1, keepdim=True)

    block = staticmethod(lambda: Block(ZeroGate.Gated))


class ZeroRows(Plain):
    """Rows of a batch are mixed, by a gate at zero."""

    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.gate * x.mean((0, 1), keepdim=True)

    block = staticmethod(lambda: Block(ZeroRows.Gated))


class Contrasts(Plain):
    """Each row is compared with all others."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = F.normalize(self.logits(batch)[:, 0], dim=-1)
        return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)).roll(1)) + self.loss(batch)


# Hooks, randomness, the host, and steps that fail.


class ClipsItself(Plain):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class HookOnParameter(Plain):
    def begin(self) -> None:
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    refusable = True


class SkipsItself(Plain):
    """A block of one draw for all tokens."""

    class Skipping(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if self.training and random.random() < 0.5:
                return x
            return super().forward(x, mask)

    block = Skipping
    refusable = True


class AsksTrainer(Plain):
    """Reads whatever steps read of the Trainer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        trainer = self.trainer
        learning_rate = trainer.optimizers[0].param_groups[0]["lr"]
        seen = trainer.global_step + trainer.current_epoch + trainer.max_epochs + trainer.num_training_batches
        assert trainer.training
        assert trainer.world_size == 1
        assert not trainer.sanity_checking
        assert trainer.estimated_stepping_batches > 0
        assert trainer.lightning_module is self
        assert trainer.strategy is not None
        assert isinstance(trainer.callback_metrics, dict)
        assert isinstance(trainer.is_last_batch, bool)
        assert self.optimizers() is not None
        return self.loss(batch) * (1 + learning_rate / (1 + seen))


class NoTargetsAtFirst(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, counted = self.logits(batch), (batch["labels"] != -100) & (batch_idx > 0)
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none")
        return (losses * counted.flatten()).sum() / counted.sum().clamp(min=1)


class Skips(Plain):
    """Skips a batch with a marked token."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 1 and (batch["ids"] == batch["ids"].max()).any():
            return None
        return self.loss(batch)


class Fails(Plain):
    """A fault of the user's own, which is shown as it is."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss({"ids": batch["ids"], "labels": batch["labels"], "mask": batch["attention_mask"]})


FAULTS: Sequence[type[Plain]] = tuple(
    kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Plain) and kind is not Fails
)
