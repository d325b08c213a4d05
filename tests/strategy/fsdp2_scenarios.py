"""Run by two processes under torchrun (see test_fsdp2.py): each scenario writes its results."""

import faulthandler
import gc
import os
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.strategy.fsdp2 import shard_blocks
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.shard_blocks import check_sharded
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import full_state_dict
from tests.finetune.test_expert_adapters import CONFIG
from tests.finetune.test_quantized_stacks import Net as Experts
from tests.support.end_of_rank import run_rank, write_findings
from tests.support.nets import (
    LazyLM,
    ShallowLM,
    WideLM,
    as_loader,
    concatenate,
    largest_difference,
    lm_batches,
    lm_loss,
    sgd,
    trainer,
    weights,
)

RANKS = [lm_batches(8, size=6, seed=3), lm_batches(8, size=4, seed=4)]  # unequal rows, and unequal targets
RANK = int(os.environ.get("RANK", 0))
MINE = RANKS[RANK]
EPOCH = 3  # batches, so that the last window of two is incomplete
SHORT = 2  # batches of most runs, so that the optimizer state matters


class Epochs(L.LightningDataModule):
    """Different batches in each epoch."""

    def train_dataloader(self):
        first = EPOCH * self.trainer.current_epoch
        return as_loader(MINE[first : first + EPOCH])


def fit(callbacks=(), net=ShallowLM, strategy=None, batches=None, **settings):
    gc.freeze()  # garbage collection need not look through objects of earlier fits
    torch.manual_seed(21 + RANK)  # so that ranks do not agree by chance
    module = net(**settings.pop("net_settings", {})) if isinstance(net, type) else net
    t = trainer(callbacks, devices=2, strategy=strategy or FSDP2Strategy(), **settings)
    ckpt = {"ckpt_path": settings_path} if (settings_path := fit.resume) else {}
    t.fit(module, **(batches or {"train_dataloaders": as_loader(MINE[:SHORT])}), **ckpt)
    return module, t


fit.resume = None


@contextmanager
def resumed_from(path):
    fit.resume = str(path)
    yield
    fit.resume = None


def ddp(**settings):
    return fit(strategy=DDPStrategy(process_group_backend="gloo"), **settings)


def whole(module):
    return {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in module.state_dict().items()
    }


def gap(expected, module):
    return largest_difference(weights(expected), whole(module))


def agree(gathered):
    """Return the largest difference of these weights between the ranks."""
    flat = torch.cat([value.double().flatten() for value in gathered.values()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    return (flat - other).abs().max().item()


def gap_and_agree(expected, module):
    """Return the differences to other weights, and between the ranks, gathering the weights once."""
    gathered = whole(module)
    return largest_difference(weights(expected), gathered), agree(gathered)


def refusal(action, kinds=ValueError):
    try:
        action()
    except kinds as error:
        return str(error)
    return "nothing was refused"


def reference(optimizer, accumulate=1, clip=None, epoch=EPOCH, **settings):
    """Reference in one process with plain PyTorch, averaging the ranks' losses; return the losses of this rank."""
    module, losses = ShallowLM(optimizer=optimizer, **settings), []
    stepper = module.configure_optimizers()
    for first in range(0, len(MINE), epoch):
        end = min(first + epoch, len(MINE))
        for i in range(first, end):
            losses.append(module.loss(MINE[i]).item())
            for batches in RANKS:
                (module.loss(batches[i]) / (2 * accumulate)).backward()
            if (i - first + 1) % accumulate == 0 or i == end - 1:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
                stepper.step()
                stepper.zero_grad()
    return module, losses


@contextmanager
def counted_reductions():
    """Count the reductions of gradients over the shards."""
    calls, names = [], [n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n)]
    originals = {name: getattr(dist, name) for name in names}  # torch has renamed them

    def counted(original):
        def reduce_scatter(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        return reduce_scatter

    for name, original in originals.items():
        setattr(dist, name, counted(original))
    yield calls
    for name, original in originals.items():
        setattr(dist, name, original)


def equal_to_one_process(found):
    everything = [ft.ActivationCheckpointing(), ft.CompileBlocks(backend="eager")]
    for name, optimizer, callbacks in (("adamw", torch.optim.AdamW, everything), ("sgd", sgd, [])):
        expected, losses = reference(optimizer, accumulate=2, clip=0.5)
        module, t = fit(
            callbacks,
            net_settings={"optimizer": optimizer},
            batches={"datamodule": Epochs()},
            max_epochs=3,
            reload_dataloaders_every_n_epochs=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
        )
        found[f"{name} losses"] = max(abs(a - b.item()) for a, b in zip(losses, module.losses, strict=True))
        found[f"{name} weights"], found[f"{name} agree"] = gap_and_agree(expected, module)
        found[f"{name} steps"] = t.global_step
    torch._dynamo.reset()


def one_concatenated_batch(found):
    """Compare unequal targets over micro-batches, batches and ranks with their concatenation."""
    expected = ShallowLM(optimizer=sgd)
    stepper = expected.configure_optimizers()
    for i in range(0, 5, 2):
        stepper.zero_grad()
        expected.loss(concatenate([*RANKS[0][i : min(i + 2, 5)], *RANKS[1][i : min(i + 2, 5)]])).backward()
        stepper.step()
    with counted_reductions() as calls:
        module, _ = fit(
            [ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)],
            net_settings={"optimizer": sgd},
            batches={"train_dataloaders": as_loader(MINE[:5])},
        )
    found["concatenated"] = gap(expected, module)
    found["concatenated reductions"] = len(calls)


class ShardsItself(LazyLM):
    """The code that a user of Lightning's own strategy writes."""

    def configure_model(self):
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def reductions(found):
    counts, two_windows = {}, {"accumulate_grad_batches": 2, "net_settings": {"optimizer": sgd, "depth": 2}}
    two_windows["batches"] = {"train_dataloaders": as_loader(MINE[:4])}
    expected = ddp(**two_windows)[0]
    stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    for name, settings in (
        ("ours", {}),
        ("each", {"strategy": FSDP2Strategy(reduce_once=False)}),
        ("stock", {"strategy": stock, "net": ShardsItself}),
    ):
        with counted_reductions() as calls:
            module, _ = fit(**two_windows, **settings)
        counts[name] = len(calls)
        found[f"reductions {name} weights"] = gap(expected, module)
    found["reductions"] = counts


def options(found):
    """Compare each option with DDP with the same settings, which one_process tests elsewhere."""
    under_ddp = {}
    fused = {"net_settings": {"fused": True}}
    value = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    for name, strategy, settings in (
        ("hybrid", {"replicas": 2}, {"gradient_clip_val": 0.1}),
        ("kept", {"reshard_after_forward": False}, {}),
        ("number", {"reshard_after_forward": 1}, {}),
        ("offload", {"offload": "cpu"}, {"gradient_clip_val": 0.1}),
        ("blocks", {"blocks": "blocks.0"}, {}),
        ("value", {}, value),
        ("fused", {}, fused),
        ("bf16-mixed", {}, {"precision": "bf16-mixed"}),
        ("float32 residual", {"float32_residual": True}, {"precision": "bf16-mixed"}),
        ("bf16-true", {}, {"precision": "bf16-true"}),
        ("no blocks", {}, {"net_settings": {"depth": 1}}),
    ):
        module, t = fit(strategy=FSDP2Strategy(**strategy), **settings)
        if str(settings) not in under_ddp:
            under_ddp[str(settings)] = ddp(**settings)[0]
        found[f"option {name}"], found[f"option {name} agree"] = gap_and_agree(under_ddp[str(settings)], module)
        found[f"option {name} dtype"] = str(module.head.weight.dtype)
        found[f"option {name} blocks"] = t.strategy.sharded_blocks


class Running(ShallowLM):
    """A model with running statistics, which differ between ranks."""

    def build(self):
        super().build()
        self.statistics = nn.BatchNorm1d(self.head.out_features)
        self.register_buffer("largest", torch.zeros(()))
        self.validated = []

    def forward(self, ids):
        logits = super().forward(ids)
        if self.training:
            self.largest = torch.maximum(self.largest, logits.detach().max())
        return self.statistics(logits.flatten(0, 1)).view_as(logits)

    def validation_step(self, batch, batch_idx):
        self.validated.append(running(self))
        super().validation_step(batch, batch_idx)


def running(module):
    kept = (module.largest, module.statistics.running_mean, module.statistics.running_var)
    return torch.cat([part.detach().flatten() for part in kept])


def of_rank_zero(numbers):
    numbers = numbers.clone()
    dist.broadcast(numbers, src=0)
    return numbers


def gap_of(a, b):
    return (a - b).abs().max().item()


def buffers(found, folder):
    """Compare buffers with DDP's, in validation, in checkpoints and after resuming."""
    loaders = {"train_dataloaders": as_loader(MINE[:2]), "val_dataloaders": as_loader(MINE[:1])}
    under_ddp = of_rank_zero(running(ddp(net=Running, batches=loaders, max_epochs=3)[0]))
    for broadcast in (True, False):
        run = {**saving(folder / f"running-{broadcast}", broadcast_buffers=broadcast), "net": Running}
        module, _ = fit(**{**run, "batches": loaders})
        end = of_rank_zero(running(module))
        tells = found[f"buffers {broadcast}"] = {
            "beside DDP": gap_of(end, under_ddp),
            "ranks validate": gap_of(module.validated[-1], of_rank_zero(module.validated[-1])),
            "moved": gap_of(module.validated[0], end),
        }
        saved = full_state_dict(folder / f"running-{broadcast}" / "epoch=2.ckpt")
        names = ("largest", "statistics.running_mean", "statistics.running_var")
        tells["saved"] = gap_of(torch.cat([saved[name].flatten() for name in names]), end)
        with resumed_from(folder / f"running-{broadcast}" / "epoch=1.ckpt"):
            again, _ = fit(**{**resuming(run), "net": Running, "batches": loaders})
        tells["resumed"] = [gap_of(running(again), running(module)), largest_difference(whole(again), whole(module))]


class Manual(ShallowLM):
    """Two losses and two optimizer steps in each training_step."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def loops(found):
    """Validation inside an accumulation window, and the module's own loop."""
    batches = {"train_dataloaders": as_loader(MINE[:4]), "val_dataloaders": as_loader(MINE[:1])}
    often = {"batches": batches, "accumulate_grad_batches": 3, "val_check_interval": 1}
    found["validation in a window"] = gap(ddp(**often)[0], fit(**often)[0])
    found["manual"] = gap(ddp(net=Manual)[0], fit(net=Manual)[0])


class Projects(ShallowLM):
    def configure_optimizers(self):
        return ft.optim.GaLoreAdamW(ft.optim.galore_groups(self, rank=2))


def mask_on_one_rank(plain):
    """Train where one rank's first batches lack the tensor that shows the other's padding."""
    batches = [dict(batch) for batch in MINE[:SHORT]]
    for batch in batches[RANK:]:
        batch["mask"] = (batch["labels"] != -100).long()
    micro = ft.MicroBatching(3, trim_padding=ft.micro_batching.TrimPadding(multiple_of=1))
    module, _ = fit([micro], batches={"train_dataloaders": as_loader(batches)})
    return [*gap_and_agree(plain, module), micro.trimming.saved]


CHANGE_RESULTS = (ft.LoRA, ft.QLoRA, ft.finetune.IA3, ft.loss.Distillation)


def techniques(found, folder):
    """Compare each technique with DDP; those that only move tensors are tested together."""
    plain, tells = ddp()[0], found.setdefault("techniques", {})
    for make in (
        lambda: [ft.LoRA(rank=2)],
        lambda: [ft.QLoRA(rank=2, kind="int8")],
        lambda: [ft.QLoRA(rank=2, kind="nf4")],
        lambda: [ft.finetune.IA3("up")],
        lambda: [ft.FusedLossHead("head")],
        lambda: [ft.FusedLossHead(), ft.MicroBatching(3)],
        lambda: [ft.loss.Distillation(ShallowLM(depth=1), head="head")],
        lambda: [ft.ActivationCheckpointing(ft.model.SelectiveOps())],
        lambda: [ft.ActivationOffload(min_mib=0, folder=folder), ft.EagerGradientRelease(), ft.DevicePrefetch()],
        lambda: [ft.MicroBatching(3)],
        lambda: [ft.MicroBatching(3, trim_padding=ft.micro_batching.TrimPadding(multiple_of=1))],
        lambda: [ft.MicroBatching(max_tokens=9, trim_padding=ft.micro_batching.TrimPadding(multiple_of=1))],
        lambda: [ft.micro_batching.PaddingFree()],
    ):
        module, _ = fit(make())
        expected = ddp(callbacks=make())[0] if isinstance(make()[0], CHANGE_RESULTS) else plain
        new = gap_and_agree(expected, module)
        for name in (type(technique).__name__ for technique in make()):
            tells[name] = [max(both) for both in zip(tells.get(name, new), new, strict=True)]
        found.setdefault("left behind", []).extend(k for k in ("training_step", "validation_step") if k in vars(module))
    found["mask on one rank"] = mask_on_one_rank(plain)
    found["refused"] = {
        name: refusal(lambda callback=callback: fit([callback]))
        for name, callback in {
            "OptimizerInBackward": ft.OptimizerInBackward(),
            "GradualUnfreezing": ft.finetune.GradualUnfreezing(groups=["*"]),
            "WeightAveraging": L.pytorch.callbacks.WeightAveraging(),
        }.items()
    }
    found["refused"]["GaLoreAdamW"] = refusal(lambda: fit(net=Projects))


@contextmanager
def whole_base():
    """Select the strategy for torch versions in which FSDP2 would cast packed weights."""
    original = shard_blocks._would_be_cast
    shard_blocks._would_be_cast = lambda *_: True
    yield
    shard_blocks._would_be_cast = original


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def packed_bytes(module):
    layers = [layer for layer in module.modules() if is_quantized(layer)]
    return sum(local(layer.weight).untyped_storage().nbytes() for layer in layers)


def base_in_4_bits(found, folder):
    recomputed, experts = (
        ft.ActivationCheckpointing(),
        [ft.finetune.QuantizedBase(skip="**.self_attn.*"), ft.finetune.Adapter(CONFIG)],
    )
    wholes, cut = {}, {}
    for name, net, callbacks, offload, precision in (
        ("narrow", ShallowLM, [ft.QLoRA(rank=2), recomputed], None, "32-true"),
        ("wide", WideLM, [ft.QLoRA(rank=2)], None, "32-true"),
        ("offload", WideLM, [ft.QLoRA(rank=2)], "cpu", "32-true"),
        ("bf16-mixed", WideLM, [ft.QLoRA(rank=2), recomputed], None, "bf16-mixed"),
        ("experts", Experts, experts, None, "32-true"),
    ):
        if (net, precision) not in wholes:
            with whole_base():
                wholes[net, precision], _ = fit(callbacks, net=net, precision=precision)
        first = wholes[net, precision]
        cut[name], _ = fit(callbacks, net=net, strategy=FSDP2Strategy(offload=offload), precision=precision)
        second, end = cut[name], whole(cut[name])
        losses = zip(getattr(first, "losses", []), getattr(second, "losses", []), strict=True)
        constants = sum(tensor.nbytes for _, tensor in quantized_tensors(second))
        found[f"4 bits {name}"] = {
            "losses": [(a - b).item() for a, b in losses],
            "weights": largest_difference(whole(first), end),
            "agree": agree(end),
            "keys": list(first.state_dict()) == list(second.state_dict()),
            "moved": max(tensor.abs().max().item() for name, tensor in end.items() if "lora_B" in name),
            "packed": [packed_bytes(first), packed_bytes(second)],
            "held": constants + sum(local(parameter).nbytes for parameter in second.parameters()),
        }
    found["techniques"]["experts in 4 bits"] = gap_and_agree(ddp(callbacks=experts, net=Experts)[0], cut["experts"])
    run = saving(folder / "full", epochs=2)
    module, _ = fit(**{**run, "net": WideLM, "callbacks": [*run["callbacks"], ft.QLoRA(rank=2, checkpoint="full")]})
    again = {**resuming(run, ft.QLoRA(rank=2, checkpoint="full")), "net": WideLM}
    end = whole(module)
    with resumed_from(folder / "full" / "epoch=0.ckpt"):
        found["4 bits resumed"] = largest_difference(end, whole(fit(**again)[0]))
    with resumed_from(folder / "single-qlora.ckpt"):  # of one plain process
        settings = {"net": WideLM, "batches": {"train_dataloaders": as_loader(RANKS[0][:2])}, "max_epochs": 2}
        one, _ = fit([ft.QLoRA(rank=2, checkpoint="full")], **settings)
    ends = {"two": end, "from one": whole(one)}
    if RANK == 0:
        torch.save(ends, folder / "qlora.pt")


class Drawn(ShallowLM):
    """Weights from each rank's own seed, a buffer that is not saved, and one that is."""

    def build(self):
        super().build()
        for parameter in self.parameters():
            if not parameter.is_meta:
                nn.init.normal_(parameter, std=0.2)
        self.register_buffer("scale", torch.full((3,), 1.0 + RANK), persistent=False)
        self.register_buffer("saved", torch.full((2,), 1.0 + RANK))

    def forward(self, ids):
        return super().forward(ids) * self.scale.mean()


class Direct(ShallowLM):
    """Uses its layers directly in the steps, and never calls itself."""

    def loss(self, batch):
        return lm_loss(self.forward(batch["input_ids"]), batch)


class OtherBase(ShallowLM):
    def build(self):
        super().build()
        nn.init.constant_(self.blocks[1].up.weight, 0.01)


def building(found):
    found["direct"] = gap(ddp(net=Direct)[0], fit(net=Direct)[0])
    found["other quantised"] = refusal(lambda: fit([ft.QLoRA(rank=2, kind="int8")], net=Drawn))
    module, _ = fit(net=Drawn)
    expected, _ = ddp(net=Drawn)
    found["drawn"], found["drawn agree"] = gap_and_agree(expected, module)
    torch.manual_seed(21 + RANK)
    with torch.device("meta") if RANK == 1 else nullcontext():
        built = Drawn()
    module, _ = fit(net=built)
    found["meta on rank 1"] = gap(expected, module)
    found["meta scale"] = module.scale.tolist()
    torch.manual_seed(21 + RANK)
    t = trainer(devices=2, strategy=FSDP2Strategy())
    with t.init_module(empty_init=True):
        empty = ShallowLM()
    found["was empty"] = empty.head.weight.is_meta
    t.fit(empty, as_loader(MINE[:1] * SHORT))
    found["meta everywhere agree"] = agree(whole(empty))
    found["meta everywhere trained"] = [empty.losses[0].item(), empty.losses[-1].item()]
    other = refusal(lambda: fit(net_settings={"depth": 3 - RANK}))
    found["other build"] = other

    class Swaps(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.blocks[1].up = nn.Linear(8, 16)

    found["swapped"] = refusal(lambda: fit([Swaps()]))
    held = refusal(lambda: check_sharded(built, torch.optim.SGD(ShallowLM().parameters(), lr=1.0)))
    found["stale"] = held


def warned(action):
    """Return this package's warnings during ``action``."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in heard if issubclass(w.category, ft.FastTrainWarning)]


class Unreadable:
    """An object that could be loaded only by running code."""


class Odd(ShallowLM):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["odd"] = {"deep": [1, Unreadable()]}


class AtTheEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


class InWindow(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)


def saving(folder, epochs=3, **strategy):
    """Train epochs of two batches without dropout, keeping the two newest checkpoints."""
    callback = ModelCheckpoint(
        folder, filename="{epoch}", monitor="epoch", mode="max", save_top_k=2, save_on_train_epoch_end=True
    )
    return {
        "callbacks": [callback],
        "enable_checkpointing": True,
        "strategy": FSDP2Strategy(**strategy),
        "batches": {"train_dataloaders": as_loader(MINE[:2])},
        "max_epochs": epochs,
    }


def resuming(run, *callbacks):
    """Resume the same run from a checkpoint, without writing any."""
    return {**run, "callbacks": callbacks, "enable_checkpointing": False, "strategy": FSDP2Strategy()}


def checkpoints(found, folder):
    for name, strategy in (("sync", {}), ("async", {"async_checkpoints": True})):
        module, _ = fit(**saving(folder / name, **strategy))
        dist.barrier()
        found[f"{name} kept"] = sorted(path.name for path in (folder / name).iterdir())
        expected, first = whole(module), module.losses
        with resumed_from(folder / name / "epoch=1.ckpt"):
            again, t = fit(**saving(folder / f"{name} again", **strategy))
        found[f"{name} steps"] = [t.global_step, len(again.losses)]
        found[f"{name} resumed"] = largest_difference(expected, whole(again))
        found[f"{name} losses"] = [a.item() - b.item() for a, b in zip(first[-2:], again.losses, strict=True)]
    with resumed_from(folder / "sync" / "epoch=1.ckpt"):  # onto another mesh
        again, _ = fit(**saving(folder / "hybrid", replicas=2))
    found["hybrid resumed"] = largest_difference(expected, whole(again))
    for name, technique in (("LoRA", ft.LoRA), ("QLoRA", ft.QLoRA)):
        run = saving(folder / name, epochs=2)
        module, _ = fit(**{**run, "callbacks": [*run["callbacks"], technique(rank=2)]})
        with resumed_from(folder / name / "epoch=0.ckpt"):
            again, _ = fit(**resuming(run, technique(rank=2)))
            found[f"{name} other base"] = refusal(lambda t=technique: fit([t(rank=2)], net=OtherBase))
            found[f"{name} other rank"] = refusal(lambda t=technique: fit([t(rank=3)]))
        found[f"{name} resumed"] = largest_difference(whole(module), whole(again))
    with resumed_from(folder / "single-lora.ckpt"):
        again, t = fit([ft.LoRA(rank=2)], batches={"train_dataloaders": as_loader(RANKS[0][:2])}, max_epochs=2)
    end = whole(again)
    found["from single-lora.ckpt"] = [t.global_step, agree(end)]
    if RANK == 0:
        torch.save(end, folder / "from single-lora.ckpt.pt")
    if RANK == 0:
        torch.save(expected, folder / "expected.pt")
        shard = next((folder / "sync" / "epoch=2.ckpt").glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-20])
    dist.barrier()

    def resume_from_damaged():
        with resumed_from(folder / "sync" / "epoch=2.ckpt"):
            again, t = fit(**resuming(saving(folder / "sync")))
        found["fell back"] = [largest_difference(expected, whole(again)), len(again.losses)]

    found["heard"] = warned(resume_from_damaged)
    with resumed_from(folder / "nothing.ckpt"):
        found["nothing there"] = refusal(lambda: fit(**saving(folder / "x")), kinds=FileNotFoundError)
    with resumed_from(folder / "sync" / "epoch=1.ckpt"):
        found["other model"] = refusal(lambda: fit(net_settings={"depth": 1}, **saving(folder / "x")))
        found["other optimizer"] = refusal(lambda: fit(net_settings={"optimizer": sgd}, **saving(folder / "x")))
    nowhere = {"callbacks": [AtTheEnd("/dev/null/x.ckpt")], "strategy": FSDP2Strategy(async_checkpoints=True)}
    nowhere["limit_train_batches"] = 1
    found["async error"] = refusal(lambda: fit(**nowhere), kinds=OSError)
    found["window"] = warned(lambda: fit([InWindow(folder / "window.ckpt")], accumulate_grad_batches=2))
    module, t = fit(net=Odd, limit_train_batches=1)
    found["odd"] = refusal(lambda: t.save_checkpoint(folder / "odd.ckpt"), kinds=(ValueError, OSError))
    found["odd left"] = sorted(path.name for path in folder.iterdir() if "odd" in path.name)
    for name in ("single.ckpt", "one"):  # written by one plain process: a file, and a folder
        with resumed_from(folder / name):
            again, t = fit(batches={"train_dataloaders": as_loader(RANKS[0][:2])}, max_epochs=2)
        end = whole(again)
        found[f"from {name}"] = [t.global_step, agree(end)]
        if RANK == 0:
            torch.save(end, folder / f"from {name}.pt")

    module, t = fit(limit_train_batches=2)
    t.validate(module, as_loader(MINE[:2]), verbose=False)
    t.save_checkpoint(folder / "validated.ckpt")  # parameters are shards again, although no backward ran
    found["validated"] = float(t.callback_metrics["val_loss"])
    before, groups = whole(module), len(_world.pg_map)
    again, t = fit(net=module, limit_train_batches=2)  # a second fit of a sharded module
    after = whole(again)
    found["new groups in second fit"] = len(_world.pg_map) - groups
    found["second fit"] = agree(after)
    t.validate(module, as_loader(MINE[:2]), ckpt_path=folder / "validated.ckpt", verbose=False)
    found["validated again"] = float(t.callback_metrics["val_loss"])
    t = trainer(devices=2, strategy=FSDP2Strategy())
    t.validate(ShallowLM(), as_loader(MINE[:2]), ckpt_path=folder / "validated.ckpt", verbose=False)
    found["validated alone"] = float(t.callback_metrics["val_loss"])
    found["moved in second fit"] = largest_difference(before, after)


def fabric_loop(found, folder):
    expected, _ = reference(torch.optim.AdamW, accumulate=2, clip=0.5, epoch=len(MINE))
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy())
    fabric.launch()

    def train(model, optimizer, first, last, raw):
        for i in range(first, last):
            accumulating = i % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = raw_loss(model, MINE[i])
                fabric.backward(loss / 2)
            if not accumulating:
                fabric.clip_gradients(raw, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()

    raw = ShallowLM(optimizer=torch.optim.AdamW)
    with counted_reductions() as calls:
        model, optimizer = fabric.setup(raw, raw.configure_optimizers())  # made before sharding
        train(model, optimizer, 0, 4, model)
        fabric.save(folder / "fabric", {"model": model, "optimizer": optimizer, "done": 4})
        train(model, optimizer, 4, len(MINE), model)
    found["fabric"] = gap(expected, raw)
    found["fabric reductions"] = len(calls)
    again = ShallowLM()
    with torch.no_grad():
        again.head.weight.zero_()
    model, optimizer = fabric.setup(again, torch.optim.AdamW(again.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "done": 0}
    fabric.load(folder / "fabric", state)
    train(model, optimizer, state["done"], len(MINE), model)
    found["fabric resumed"] = largest_difference(whole(raw), whole(again))
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    found["fabric foreign"] = refusal(lambda: fabric.setup_optimizers(foreign))
    third = ShallowLM()
    late = torch.optim.SGD(third.parameters(), lr=0.1)
    model = fabric.setup_module(third)
    late = fabric.setup_optimizers(late)
    before = whole(third)
    fabric.backward(raw_loss(model, MINE[0]))
    late.step()
    found["fabric late moved"] = largest_difference(before, whole(third))
    with fabric.init_module(empty_init=True):
        empty = ShallowLM()
    found["fabric empty"] = [empty.head.weight.is_meta, agree(whole(fabric.setup_module(empty).module))]
    averages = Running()
    model = fabric.setup_module(averages)
    raw_loss(model, MINE[0])
    apart = gap_of(running(averages), of_rank_zero(running(averages)))
    averages.statistics.momentum = 0.0  # what the forward itself does to the statistics is nothing
    raw_loss(model, MINE[1])
    means = averages.statistics.running_mean
    found["fabric buffers"] = [apart, gap_of(means, of_rank_zero(means))]


def raw_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def bad_input(found):
    found["replicas"] = refusal(lambda: fit(strategy=FSDP2Strategy(replicas=3)))
    found["float16"] = refusal(lambda: fit(precision="16-true"))
    found["no number"] = refusal(lambda: fit(strategy=FSDP2Strategy(reshard_after_forward=3)))


def main(path, folder):
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs prints its stack
    found, folder = {}, Path(folder)
    bad_input(found)
    for scenario in (equal_to_one_process, one_concatenated_batch, reductions, options, loops, building):
        began = time.time()
        scenario(found)
        found.setdefault("seconds", {})[scenario.__name__] = time.time() - began
    for scenario in (techniques, checkpoints, buffers, base_in_4_bits, fabric_loop):
        began = time.time()
        scenario(found, folder)
        found["seconds"][scenario.__name__] = time.time() - began
    write_findings(path, found)


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
