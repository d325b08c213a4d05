"""Scenarios of tensor_scenarios.py in which each rank has a share of the tokens of every sequence."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from tests.strategy import tensor_scenarios as base
from tests.support.nets import as_loader, largest_difference, weights

HEADS = {"vocab_size": base.VOCABULARY, "num_key_value_heads": 1, "tie_word_embeddings": True}


class Llama(base.Net):
    """A Llama whose heads share keys and values, with its own loss over sequences that are padded on both sides."""

    def __init__(self, **settings):
        super().__init__("llama", **{**HEADS, **settings})

    def loss(self, batch):
        tokens = batch["inputs"]
        mask = torch.ones_like(tokens)
        mask[0, :3] = mask[1, 6:] = 0
        return self.net(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss


class Padded(base.Net):
    """A Llama whose batches are padded; after cutting, they may have as many tokens as a head has features."""

    def __init__(self):
        super().__init__("llama", **{**HEADS, "num_key_value_heads": 2})

    def loss(self, batch):
        return self.net(**batch).loss

    @staticmethod
    def batches():
        tokens = torch.randint(base.VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(3))
        mask = (torch.arange(8) < torch.tensor([[8], [5], [3], [4]])).long()
        return [{"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}] * 2


class Translator(base.Net):
    """A BART whose decoder reads the encoder's output of as many tokens as it has itself, or of fewer."""

    def __init__(self, source=8):
        super().__init__("bart")
        self.source = source

    def loss(self, batch):
        return self.net(batch["inputs"][:, : self.source], labels=batch["inputs"]).loss


class Rotary(nn.Module):
    """A block that counts positions itself, from the tokens that it sees."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.attention = nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(x.shape[1])[:, None] / torch.tensor([1.0, 10.0])

        def turn(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

        mixed = F.scaled_dot_product_attention(query=turn(q), key=turn(k), value=v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Gated(nn.Module):
    """A block that adds the mean over its tokens, by a gate that is initialized to zero."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(16, 48), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2) + self.gate * x.mean(1, keepdim=True)


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block):
        super().__init__()
        self.tokens, self.head = nn.Embedding(base.VOCABULARY, 16), nn.Linear(16, base.VOCABULARY)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "gpt": lambda: base.Net("gpt"),
    "llama": Llama,
    "bert": lambda: base.Net("bert"),
    "bart": Translator,
    "gpt2": lambda: base.Net("gpt2"),  # gives its blocks a cache by position
}
KINDS = {2: tuple(MODELS), 4: ("gpt",)}


def fit(module, callbacks=(), count=3, strategy=None, batches=None, **options):
    torch.manual_seed(21 + base.RANK)
    strategy = strategy or FSDP2Strategy(context_parallel=2)
    data_rank = base.RANK // strategy.sharding.ranks_per_batch
    t = base.trainer(callbacks, devices=base.WORLD, strategy=strategy, **options)
    t.fit(module, as_loader(batches or base.batches_of(module.kind, data_rank, count)))
    return t


def equal_to_one_process(found):
    """Compare the losses of all steps with clipping, and the weights after them."""
    for name in KINDS[base.WORLD]:
        make = MODELS[name]
        expected = make()
        losses = base.train_alone(expected, base.WORLD // 2, clip=0.5)
        module = make()
        fit(module, count=base.STEPS, gradient_clip_val=0.5)
        mine = [row[base.RANK // 2] for row in losses]
        found[f"context {name} losses"] = max(abs(a - b.item()) for a, b in zip(mine, module.losses, strict=True))
        found[f"context {name} moved"] = largest_difference(weights(make()), weights(expected))
        found[f"context {name} weights"] = largest_difference(weights(expected), base.whole(module))
    if base.WORLD == 4:
        plain, _ = base.one_process("short gpt", 2, count=3)
        module = base.Net("short gpt")
        fit(module, strategy=FSDP2Strategy(context_parallel=2, replicas=2))
        found["context replicas"] = largest_difference(weights(plain), base.whole(module))
        plain, _ = base.one_process("short gpt", 1, count=3)
        module = base.Net("short gpt")
        fit(module, strategy=FSDP2Strategy(context_parallel=4))
        found["context of four"] = largest_difference(weights(plain), base.whole(module))


def beside_others(found, folder):
    """Train with other techniques, and in Fabric; refuse what cannot be divided."""
    plain, _ = base.one_process("short gpt", base.WORLD // 2, count=2)
    for name, callbacks in (
        ("CompileBlocks", [ft.CompileBlocks(backend="eager")]),
        ("FusedLossHead", [ft.FusedLossHead()]),
        ("others", [ft.ActivationCheckpointing(), ft.MicroBatching(2)]),
    ):
        module = base.Net("short gpt")
        fit(module, callbacks, count=2)
        found[f"context with {name}"] = largest_difference(weights(plain), base.whole(module))
    torch._dynamo.reset()
    batches = base.batches_of("llama", 0, 2)
    torch.manual_seed(21)  # the adapters of rank zero
    alone = base.Net("llama")
    base.trainer([ft.QLoRA(rank=2)], strategy=SingleDeviceStrategy("cpu")).fit(alone, as_loader(batches))
    module = base.Net("llama")
    fit(module, [ft.QLoRA(rank=2)], batches=batches)
    adapted = {name: value for name, value in base.whole(module).items() if "lora" in name}
    found["context with QLoRA"] = largest_difference({n: weights(alone)[n] for n in adapted}, adapted)
    found["context QLoRA moved"] = max(value.abs().max().item() for n, value in adapted.items() if "lora_B" in n)
    in_fabric(found, folder)
    padded(found)
    refused(found)


def padded(found):
    """Cut padding off to lengths that the ranks of a group can share, where no multiple is asked for."""
    alone = Padded()
    base.trainer(strategy=SingleDeviceStrategy("cpu")).fit(alone, as_loader(Padded.batches()))
    divided = {"tensor_parallel": 2, "sequence_parallel": True}
    for name, options in (("context", {"context_parallel": 2}), ("sequence", divided)):
        micro = ft.MicroBatching(4, trim_padding=ft.micro_batching.TrimPadding(multiple_of=1))
        module = Padded()
        fit(module, [micro], strategy=FSDP2Strategy(**options), batches=Padded.batches())
        found[f"{name} with padding"] = largest_difference(weights(alone), base.whole(module))
        found[f"{name} saved"] = micro.trimming.saved


def in_fabric(found, folder):
    """Train with clipping in a Fabric loop, save, and load without context groups."""
    expected, _ = base.one_process("gpt", base.WORLD // 2, clip=0.5, count=3)
    fabric = L.Fabric(accelerator="cpu", devices=base.WORLD, strategy=FabricFSDP2Strategy(context_parallel=2))
    fabric.launch()
    module = base.Net("gpt")
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for batch in base.batches_of("gpt", base.RANK // 2, 3):
        fabric.backward(model.training_step(batch, 0))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "context", {"model": model, "optimizer": optimizer})
    other = L.Fabric(accelerator="cpu", devices=base.WORLD, strategy=FabricFSDP2Strategy())
    other.launch()
    again = base.Net("gpt")
    model, optimizer = other.setup(again, again.configure_optimizers())
    other.load(folder / "context", {"model": model, "optimizer": optimizer})
    found["context in fabric"] = largest_difference(weights(expected), base.whole(again))


def refused(found):
    mine = base.batches_of("gpt", base.RANK // 2, 1)
    turning, gated = base.Net("gpt"), base.Net("gpt")
    turning.net, gated.net = Stack(Rotary), Stack(Gated)
    short = [{name: values[:, :2] for name, values in mine[0].items() if name != "labels"}]
    odd = [{name: values[:, :7] for name, values in mine[0].items() if name != "labels"}]
    for name, module, batches in (
        ("other sequence", Translator(source=4), mine),
        ("eager", Llama(attn_implementation="eager"), mine),
        ("naive", base.Net("gpt", attention="naive"), mine),
        ("positions", turning, mine),
        ("gated", gated, mine),
        ("odd", base.Net("gpt"), odd),
        ("single tokens", base.Net("gpt"), short),
        ("batches", base.Net("gpt"), base.batches_of("gpt", base.RANK, 1)),
    ):
        found[f"context refused {name}"] = base.refusal(lambda m=module, b=batches: fit(m, batches=b))
