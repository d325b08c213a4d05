"""Scenarios of tensor_scenarios.py: shares of the tokens, and dropout on the shares of single ranks."""

import torch
import torch.distributed as dist
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.strategy import tensor_scenarios as base
from tests.support.nets import largest_difference, weights


def divided(tensor):
    return FSDP2Strategy(tensor_parallel=tensor, sequence_parallel=True)


def beside_others(found):
    """Train with other techniques; refuse what cannot be divided."""
    mine = base.batches_of("gpt", base.RANK // 2, 2)
    settings = {"layers": 1}
    plain, _ = base.one_process("gpt", base.WORLD // 2, count=2, **settings)
    for name, callbacks in (
        ("CompileBlocks", [ft.CompileBlocks(backend="eager")]),
        ("others", [ft.ActivationCheckpointing(), ft.MicroBatching(2)]),
    ):
        module, _ = base.fit("gpt", 2, callbacks, settings, mine, divided(2))
        found[f"divided with {name}"] = largest_difference(weights(plain), base.whole(module))
    torch._dynamo.reset()
    odd = [{name: values[:, :7] for name, values in mine[0].items() if name != "labels"}]
    found["refused odd"] = base.refusal(lambda: base.fit("gpt", 2, batches=odd, strategy=divided(2)))
    module = base.Net("gpt")
    module.net.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0,))
    trainer = base.trainer(devices=base.WORLD, strategy=divided(2))
    found["refused between"] = base.refusal(lambda: trainer.fit(module, base.as_loader(mine)))


class Masks:
    """Notes which values the dropout layers of a model keep, or has them keep given ones."""

    def __init__(self, net, kept=None):
        self.kept, self.given = [], iter(kept or ())
        for layer in net.modules():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_hook(self.note if kept is None else self.replace)

    def note(self, layer, args, output):
        # What was zero before is nowhere. The rate is zero where blocks are compared.
        if layer.p > 0:
            self.kept.append((output != 0).float())

    def replace(self, layer, args, output):
        return args[0] * next(self.given) / (1 - layer.p)


def assemble(masks, shapes):
    """Return the masks of all values from those of the ranks of a group; what is not divided must be the same."""
    gathered = [None] * base.WORLD
    dist.all_gather_object(gathered, masks)
    whole, same = [], []
    for place, shape in enumerate(shapes):
        parts = [mine[place] for mine in gathered]
        axis = next((a for a, size in enumerate(shape) if parts[0].shape[a] != size), None)
        same.append((axis is not None) != torch.equal(parts[0], parts[1]))
        whole.append(parts[0] if axis is None else torch.cat(parts, axis))
    return whole, all(same)


def dropout(found):
    """Compare the loss with dropout with that of one process which drops the same values."""
    batch = base.batches_of("gpt", 0, 1)
    replicated = FSDP2Strategy(tensor_parallel=base.WORLD)
    for name, kind, strategy in (
        ("split", "dropping encoder", replicated),
        ("divided", "dropping gpt", divided(base.WORLD)),
        ("context", "dropping gpt", FSDP2Strategy(context_parallel=base.WORLD)),
    ):
        plain = base.Net(kind)
        shapes = Masks(plain.net)
        plain.loss(batch[0])
        module = base.Net(kind)
        seen = Masks(module.net)
        base.trainer(devices=base.WORLD, strategy=strategy).fit(module, base.as_loader(batch))
        kept, found[f"{name} masks"] = assemble(seen.kept, [mask.shape for mask in shapes.kept])
        plain = base.Net(kind)
        Masks(plain.net, kept)
        found[f"{name} dropout"] = abs(plain.loss(batch[0]).item() - module.losses[0].item())
    for name, attention, options in (
        ("split", "naive", {"tensor_parallel": 2}),
        ("divided", "naive", {"tensor_parallel": 2, "sequence_parallel": True}),
        ("context", "sdpa", {"context_parallel": 2}),
    ):
        runs = []
        settings = {"dropout": 0.3, "attention": attention}
        for callbacks in ([], [ft.ActivationCheckpointing()]):
            strategy = FSDP2Strategy(**options)
            module, _ = base.fit("short gpt", 2, callbacks, settings=settings, count=1, strategy=strategy)
            runs.append(base.whole(module))
        found[f"{name} dropout recomputed"] = largest_difference(*runs)
