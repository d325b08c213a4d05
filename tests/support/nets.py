"""Small models and data that many tests use, and the plain runs that techniques are compared with."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fasttrain.core.messages import log

VOCAB, DIM = 17, 8


class Block(nn.Module):
    """A residual block with everything that surgery must not disturb: dropout, kwargs, a tuple as output.

    It mixes no tokens, so that it needs no mask; it gets one as blocks with attention do.
    """

    def __init__(self, dim: int = DIM, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + scale * self.dropout(self.down(hidden)), hidden


class TinyLM(L.LightningModule):
    """A language model with a tied head; its loss is the mean over the targets that are not padding."""

    def __init__(
        self,
        depth: int = 3,
        dropout: float = 0.0,
        lazy: bool = False,
        frozen: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.depth, self.p, self.make_optimizer, self.settings = depth, dropout, optimizer, {"lr": 0.01, **settings}
        self.frozen = frozen  # the embedding, and so the head
        self.embed: nn.Embedding | None = None
        self.losses: list[Tensor] = []
        if not lazy:
            self.build()

    def build(self) -> None:
        if self.embed is not None:
            return
        generator_state = torch.get_rng_state()
        torch.manual_seed(7)  # the same weights in every run
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(DIM, self.p) for _ in range(self.depth)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.embed.requires_grad_(not self.frozen)
        torch.set_rng_state(generator_state)

    def forward(self, ids: Tensor, kept: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x, scale=0.9, mask=kept)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        # Models that are made of this one may take the ids alone.
        takes_mask = "kept" in inspect.signature(type(self).forward).parameters
        masks = [(batch["labels"] != -100)[:, None, None]] if takes_mask else []
        return lm_loss(self(batch["input_ids"], *masks), batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), **self.settings)


def lm_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


class ShallowLM(TinyLM):
    """As few blocks as are a series: for what costs by the block."""

    def __init__(self, depth: int = 2, **settings: Any) -> None:
        super().__init__(depth, **settings)


class WideLM(TinyLM):
    """Rows of whole blocks of 64 numbers, which bitsandbytes multiplies by itself when they are in 4 bits."""

    def build(self) -> None:
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, 64)
        self.blocks = nn.ModuleList([Block(64) for _ in range(2)])
        self.head = nn.Linear(64, VOCAB, bias=False)


class LazyLM(TinyLM):
    """The same model, built where sharded strategies want it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(lazy=True, **kwargs)

    def configure_model(self) -> None:
        self.build()


class HeadFirst(nn.Module):
    """A language model that registers its head before everything else, as litgpt's does."""

    def __init__(self, dim: int = DIM, tied: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        blocks = nn.ModuleList([Block(dim) for _ in range(2)])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCAB, dim), "h": blocks, "ln_f": nn.LayerNorm(dim)})
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x, _ = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def lm_batches(count: int, size: int = 6, length: int = 5, seed: int = 3) -> list[dict[str, Tensor]]:
    """Batches whose rows hold very different numbers of targets: what makes plain averaging wrong."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (size, length), generator=g)
        labels = torch.randint(VOCAB, (size, length), generator=g)
        kept = torch.randint(1, length + 1, (size,), generator=g)
        labels[torch.arange(length)[None] >= kept[:, None]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def padded_batches(filled: Sequence[int]) -> list[dict[str, Tensor]]:
    """Batches of 8 rows and 32 tokens, with the number of tokens of each row but the first, which has all."""
    batches = []
    for tokens in filled:
        lengths = torch.tensor([32] + [tokens] * 7)
        kept = torch.arange(32)[None] < lengths[:, None]
        ids = torch.randint(2, 12, kept.shape, generator=torch.Generator().manual_seed(tokens)) * kept
        batches.append({"input_ids": ids, "labels": ids.masked_fill(~kept, -100)})
    return batches


def as_loader(batches: Sequence[Any]) -> DataLoader:
    return DataLoader(_Listed(batches), batch_size=None, shuffle=False)


class _Listed(torch.utils.data.Dataset):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def concatenate(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def trainer(callbacks: Any = (), **settings: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **settings,
        },
        callbacks=list(callbacks),
    )


def fit(module: L.LightningModule, batches: Sequence[Any], callbacks: Any = (), **settings: Any) -> L.LightningModule:
    torch.manual_seed(11)
    trainer(callbacks, **settings).fit(module, as_loader(batches))
    return module


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the package logs within, as it can be seen at INFO."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def trains(module: nn.Module) -> list[str]:
    """Names of the parameters that train."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same names, with the same values bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def untied(kind: type[TinyLM] = TinyLM, **settings: Any) -> TinyLM:
    """A model whose head has a weight of its own."""
    model = kind(**settings)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two dicts of tensors, relative to the largest entry of the first; keys must agree."""
    assert set(a) == set(b)
    top = max(float(value.abs().max()) for value in a.values())
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a) / top


class Gradients(L.Callback):
    """Keeps the gradient of every optimizer step, as the optimizer sees it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append(gradients(pl_module))


def sgd(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **settings)


def names_in(module: nn.Module, groups: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The parameters of each group, by name."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {group["name"]: [names[parameter] for parameter in group["params"]] for group in groups}


def take_steps(module: Any, *optimizers: torch.optim.Optimizer, batches: Sequence[Any]) -> Any:
    """Train in a bare loop, with one or several optimizers."""
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        module.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return module
