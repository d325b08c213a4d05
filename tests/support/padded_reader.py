"""A small model whose blocks attend with a mask of padding, and padded batches for it."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTHS = [5, 9, 1, 6]
LONGEST, WIDTH, VOCAB = 9, 8, 20
EVERY = {"all": torch.ones(LONGEST, LONGEST), "earlier": torch.ones(LONGEST, LONGEST).tril()}


class Block(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        q, k, v = self.into(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return (x + self.down(F.gelu(self.up(self.norm(x)))),)


class Reader(L.LightningModule):
    """A small encoder, or decoder, with a loss over its tokens, or over the mean of all positions."""

    def __init__(self, sees: str = "all", pooling: str = "none", head: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sees, self.pooling = sees, pooling
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            (x,) = block(x, attention_mask=mask)
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        kept = batch["kept"]
        mask = kept[:, None, None] & (EVERY[self.sees] > 0)
        x = self(batch["ids"], mask)
        if self.pooling == "mean of all":
            return self.head(x.mean(1)).logsumexp(-1).mean()
        if self.pooling == "logged":
            self.log("size", x.mean())
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["ids"].masked_fill(~kept, -100))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded(side: str = "right", shift: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shift)
    kept = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(1, VOCAB, kept.shape, generator=generator) * kept
    batch = {"ids": ids, "kept": kept}
    return batch if side == "right" else {name: value.flip(1) for name, value in batch.items()}
