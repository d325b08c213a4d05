"""Run by one and by two processes under torchrun (see test_zero.py): each scenario writes its results.

The two launches run side by side and exchange checkpoints, so that both directions of resharding are tested.
"""

import functools
import gc
import json
import os
import shutil
import sys
import time
import traceback
import weakref
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn
from torch.nn import functional

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.zero.zero_states import predict_model_states
from lightning_fasttrain.strategy.zero.zero_strategy import FabricZeROStrategy, ZeROStrategy
from tests.strategy import zero_guards, zero_steps
from tests.strategy.zero_launches import DEPTH, EQUAL, IN_FABRIC, WEIGHED
from tests.strategy.zero_steps import whole
from tests.support.end_of_rank import write_findings
from tests.support.nets import (
    LazyLM,
    TinyLM,
    as_loader,
    concatenate,
    largest_difference,
    lm_batches,
    lm_loss,
    sgd,
    trainer,
    weights,
)
from tests.support.s3_server import BUCKET

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ALL = [lm_batches(5, size=6, seed=3), lm_batches(5, size=4, seed=4)]  # different rows and numbers of targets per rank
MINE = ALL[RANK]
EPOCH = 3  # batches of most runs
WINDOWS = ((0, 1), (2,))  # accumulation over 2 of 3 batches
OPTIMIZERS = {"sgd": (sgd, {"lr": 0.1}), "adamw": (torch.optim.AdamW, {"lr": 0.01})}


def net(kind, cls=TinyLM, **more):
    optimizer, settings = OPTIMIZERS[kind]
    return cls(optimizer=optimizer, depth=DEPTH, **settings, **more)


def fit(module, strategy, callbacks=(), batches=None, path=None, **settings):
    gc.freeze()  # DeepSpeed collects garbage at each start of stage 3: skip objects of earlier fits
    torch.manual_seed(11)
    t = trainer(callbacks, devices=RANKS, strategy=strategy, **settings)
    t.fit(module, as_loader(MINE[:EPOCH] if batches is None else batches), ckpt_path=path)
    return t


def mean_losses(module):
    losses = torch.stack(module.losses)
    dist.all_reduce(losses)
    return losses / RANKS


def agree(state):
    """Return the largest difference of these weights between the ranks."""
    flat = torch.cat([value.flatten() for value in state.values()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    gap = (flat - other).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def steps_by_hand(kind, epochs, clip, weighted=False, cls=TinyLM):
    """Reference in one process with plain PyTorch: the mean over ranks and batches of a window, or over all targets."""
    module, losses = net(kind, cls), []
    optimizer, schedule = module.configure_optimizers(), None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
    for window in WINDOWS * epochs:
        optimizer.zero_grad()
        if weighted:
            module.loss(concatenate([rank[i] for i in window for rank in ALL[:RANKS]])).backward()
        for i in window if not weighted else ():
            loss = sum(module.loss(rank[i]) for rank in ALL[:RANKS]) / RANKS
            losses.append(loss.detach())
            (loss / 2).backward()  # Lightning divides by accumulate_grad_batches in an incomplete window too
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return module, losses


def whole_difference(expected, module):
    return largest_difference(weights(expected), whole(module))


def equals_one_process(found, folder):
    """4 steps with accumulation, incomplete windows, clipping, checkpointing; also compiled, sharded and unsharded."""
    linear, settings = functional.linear, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    for kind in OPTIMIZERS:
        expected, losses = steps_by_hand(kind, 2, 0.3)
        for stage in EQUAL[kind]:
            module = net(kind)
            techniques = [ft.ActivationCheckpointing()]
            compiled = kind == "adamw" and stage in (2, "3+offload")
            techniques += [ft.CompileBlocks(backend="eager")] if compiled else []
            t = fit(module, ZeROStrategy(stage=stage), techniques, max_epochs=2, **settings)
            torch._dynamo.reset()
            trained = whole(module)
            found[f"{kind} {stage}"] = {
                "losses": (mean_losses(module) - torch.stack(losses)).abs().max().item(),
                "weights": largest_difference(weights(expected), trained),
                "agree": agree(trained),
                "steps": [t.global_step, t.strategy.engine.deepspeed.global_steps],
            }
            found["linear restored"] = functional.linear is linear and found.get("linear restored", True)


def weighs_tokens(found, folder):
    """Windows of unequal numbers of targets, on unequal ranks, in micro-batches."""
    for kind in OPTIMIZERS:
        expected, _ = steps_by_hand(kind, 1, 0.3, weighted=True)
        for stage in WEIGHED[kind]:
            module = net(kind)
            techniques = [ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)]
            fit(module, ZeROStrategy(stage=stage), techniques, max_epochs=1, gradient_clip_val=0.3)
            found[f"tokens {kind} {stage}"] = whole_difference(expected, module)


class Scheduled(TinyLM):
    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SavesOnTheWay(L.Callback):
    """Saves a checkpoint at several places, and the weights, at the end of the first epoch."""

    def __init__(self, places, beside):
        self.places, self.beside = places, beside

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            for place in self.places:
                trainer.save_checkpoint(place)
            end = whole(pl_module)
            if RANK == 0:
                torch.save(end, self.beside)


def place_of(path, stage):
    """Return where a run resumes from: for some stages a copy in object storage."""
    return f"s3://{BUCKET}/{path.name}" if stage in (1, 3) else path


def resumes(found, folder):
    """The run that saves continues, to be compared with the one that resumes, and with plain PyTorch."""
    expected, _ = steps_by_hand("adamw", 2, float("inf"), cls=Scheduled)
    for stage in (0, 1, 2, 3, "3+offload"):
        path, settings = folder / f"by-{RANKS}-stage-{stage}", {"accumulate_grad_batches": 2, "max_epochs": 2}
        resumed, through = net("adamw", Scheduled), net("adamw", Scheduled)
        saves = SavesOnTheWay({path, place_of(path, stage)}, folder / f"weights-{RANKS}-{stage}")
        fit(through, ZeROStrategy(stage=stage), [saves], **settings)
        t = fit(resumed, ZeROStrategy(stage=stage), path=place_of(path, stage), **settings)
        end = whole(through)
        found[f"through {stage}"] = largest_difference(weights(expected), end)
        found[f"resumed {stage}"] = largest_difference(end, whole(resumed))
        found[f"rate {stage}"] = [t.global_step, t.optimizers[0].param_groups[0]["lr"] / 0.01]
    dist.barrier()
    (folder / f"ready-{RANKS}").touch()


def whole_difference_of(expected, module):
    return largest_difference(whole(expected), whole(module))


class State(L.Callback):
    """Weights and Adam state at the start of training, gathered from all ranks."""

    def on_train_start(self, trainer, pl_module):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        groups = trainer.optimizers[0].param_groups
        self.decay, self.rate = [group["weight_decay"] for group in groups], groups[1]["lr"]
        named = {n: p for n, p in pl_module.named_parameters() if p.requires_grad}
        self.state = {n: safe_get_full_fp32_param(p).clone() for n, p in named.items()}
        for key in ("exp_avg", "exp_avg_sq"):
            self.state |= {f"{n} {key}": safe_get_full_optimizer_state(p, key).clone() for n, p in named.items()}


def go_on_by_hand(state):
    """Take two steps of plain PyTorch in one process from weights and Adam state after two."""
    module = net("adamw", Scheduled)
    optimizer = module.configure_optimizers()["optimizer"]
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        parameter.data.copy_(state[name])
        moments = {key: state[f"{name} {key}"].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(2.0), **moments}
    for i in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.9 ** (2 + i)
        optimizer.zero_grad()
        (sum(module.loss(rank[i]) for rank in ALL[:RANKS]) / RANKS).backward()
        optimizer.step()
    return module


def reshards(found, folder):
    """Resume the other launch's checkpoint: of 1 process on 2, of 2 on 1."""
    others = 3 - RANKS
    for _ in range(900):
        if (folder / f"ready-{others}").exists():
            break
        time.sleep(0.1)
    for stage in (1, 2, 3, "3+offload"):
        path = folder / f"by-{others}-stage-{stage}"
        state, module = State(), net("adamw", Scheduled)
        place = place_of(path, stage)
        t = fit(module, ZeROStrategy(stage=stage, universal=True), [state], MINE[:2], path=place, max_epochs=2)
        saved = read_shards(path, stage)
        found[f"resharded {stage}"] = {
            "steps": t.global_step,
            "decay": state.decay,
            "rate": state.rate / 0.01,
            "differ": [name for name in state.state if not torch.equal(state.state[name], saved[name])],
            "went on": whole_difference(go_on_by_hand(state.state), module),
        }
    path = folder / f"by-{others}-stage-2"
    found["other world"] = error_of(lambda: fit(net("adamw"), ZeROStrategy(stage=2), path=path, max_epochs=2))
    found["sgd universal"] = error_of(
        lambda: fit(net("sgd"), ZeROStrategy(stage=2, universal=True), path=path, max_epochs=2)
    )
    found["other stage"] = error_of(
        lambda: fit(net("adamw"), ZeROStrategy(stage=3), path=folder / f"by-{RANKS}-stage-2", max_epochs=2)
    )


def read_shards(path, stage):
    """Read weights and Adam state of a checkpoint from DeepSpeed's files, and join them manually."""
    from lightning_fasttrain.strategy.consolidate import ZeROFiles

    files = ZeROFiles.read(path / "checkpoint")
    saved = dict(files.masters())
    for key in ("exp_avg", "exp_avg_sq"):
        for shard in files.shards:
            states = shard["optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"]["state"]
            flat = [states[i][key] for i in sorted(states)]
            shard["fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"] = flat
        saved |= {f"{name} {key}": value for name, value in files.masters()}
    return saved


def error_of(action):
    """Return the errors of all ranks; every one of them must raise."""
    try:
        action()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def saves_whole_or_not_at_all(found, folder):
    path = folder / f"whole-{RANKS}" / "a.ckpt"
    module = net("adamw")
    t = fit(module, ZeROStrategy(stage=2), batches=MINE[:2], max_epochs=1)
    t.save_checkpoint(path)
    before = sorted(p.name for p in (path / "checkpoint").iterdir())
    writer = t.strategy.engine.deepspeed.checkpoint_engine
    save = writer.save

    def fails_on_the_last_rank(state_dict, path):
        save(state_dict, path)
        if RANK == RANKS - 1:
            raise OSError("no space left on device")

    writer.save = fails_on_the_last_rank
    found["failed save"] = error_of(lambda: t.save_checkpoint(path))
    writer.save = save
    found["untouched"] = before == sorted(p.name for p in (path / "checkpoint").iterdir())
    other = path.parent / "b.ckpt"
    t.save_checkpoint(other)
    dist.barrier()
    if RANK == 0:
        next(other.glob("checkpoint/*optim_states.pt")).write_bytes(b"cut short")
    dist.barrier()
    try:
        t = fit(net("adamw"), ZeROStrategy(stage=2), batches=MINE[:2], path=other, max_epochs=2)
        found["fell back"] = t.global_step
    except Exception as error:
        found["fell back"] = repr(error)


class Wide(L.LightningModule):
    """A model whose parameters need much more memory than its activations."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def chooses(found, folder):
    """Ranks with different memory choose the same stage: the one that fits the smallest."""
    module, batches = Wide(), [torch.ones(2, 256)] * 2
    stage_0 = predict_model_states(module, module.configure_optimizers(), world_size=RANKS, stages=("0",))[0]
    gib = [1.0, 0.99 * stage_0.device / 0.9 / 2**30][RANK]  # slightly less than stage 0 needs
    t = fit(module, ZeROStrategy(memory_gib=gib), batches=batches, max_epochs=1)
    found["chosen"] = [t.strategy.options.stage, t.strategy.stage]
    found["too small"] = error_of(
        lambda: fit(Wide(), ZeROStrategy(memory_gib=[1.0, 1e-6][RANK or RANKS == 1]), batches=batches, max_epochs=1)
    )


def adapts(found, folder):
    """Compare frozen, quantised and adapted modules with DDP."""
    makers = {
        "LoRA": lambda: [ft.LoRA(rank=2)],
        "QLoRA int8": lambda: [ft.QLoRA(rank=2, kind="int8", checkpoint="full")],
        "QLoRA nf4": lambda: [ft.QLoRA(rank=2, checkpoint="full")],
        "FusedLossHead": lambda: [ft.FusedLossHead("head")],
    }
    for name, make in makers.items():
        cls = LazyLM if name == "LoRA" else TinyLM
        expected = net("adamw", cls)
        fit(expected, DDPStrategy(process_group_backend="gloo"), make(), MINE[:3], max_epochs=1)
        for stage in (2, 3):
            module = net("adamw", cls)
            t = fit(module, ZeROStrategy(stage=stage), make(), MINE[:3], max_epochs=1)
            found[f"{name} {stage}"] = whole_difference_of(expected, module)
            if name.startswith("QLoRA"):
                path = folder / f"{name}-{stage}.ckpt"
                t.save_checkpoint(path)
                if RANK == 0:
                    torch.save({n: v.clone() for n, v in expected.state_dict().items()}, f"{path}.expected")


def keeps_adapters(found, folder):
    """Checkpoints that hold only what trains: resumed, from another base, and for another adapter."""
    for name, make, stages in (("LoRA", ft.LoRA, (2,)), ("QLoRA", ft.QLoRA, (3,))):
        for stage in stages:
            save = ModelCheckpoint(folder / f"kept-{name}-{stage}", filename="{epoch}", save_top_k=-1)
            path = folder / f"kept-{name}-{stage}" / "epoch=0.ckpt"
            through, resumed = net("adamw"), net("adamw")
            two = {"batches": MINE[:2], "max_epochs": 2}
            fit(through, ZeROStrategy(stage=stage), [make(rank=2), save], enable_checkpointing=True, **two)
            fit(resumed, ZeROStrategy(stage=stage), [make(rank=2)], path=path, **two)
            found[f"kept {name} {stage}"] = whole_difference_of(through, resumed)
            if RANK == 0:
                held = torch.load(next((path / "checkpoint").glob("*model_states.pt")), weights_only=False)
                found[f"held {name} {stage}"] = [*held["module"], *(held.get("frozen_param_fragments") or {})]
            other = net("adamw")
            torch.nn.init.constant_(other.blocks[1].up.weight, 0.01)
            found[f"kept {name} {stage} other base"] = error_of(
                lambda other=other, m=make, s=stage, p=path: fit(other, ZeROStrategy(stage=s), [m(rank=2)], path=p)
            )


def twin(found, folder):
    """A Fabric loop: accumulation, clipping, resuming."""
    for kind in OPTIMIZERS:
        expected, losses = fabric_by_hand(kind, 2, 0.3)
        for stage in IN_FABRIC[kind]:
            path = folder / f"fabric-{RANKS}-{kind}-{stage}"
            module, seen, norms, _ = fabric_loop(kind, stage, 2, 0.3, save=path)
            other, again, _, step = fabric_loop(kind, stage, 1, 0.3, load=path)
            seen = [loss.clone() for loss in seen]
            mean = torch.stack(seen)
            dist.all_reduce(mean)
            found[f"fabric {kind} {stage}"] = {
                "losses": (mean / RANKS - torch.stack(losses)).abs().max().item(),
                "weights": whole_difference(expected, module),
                "resumed": len(again) == 3 and all(map(torch.equal, seen[3:], again)) and step == 2,
                "norm": norms[0].item(),
            }


def fabric_by_hand(kind, epochs, clip):
    module, losses = net(kind), []
    optimizer = module.configure_optimizers()
    for window in WINDOWS * epochs:
        optimizer.zero_grad()
        for i in window:
            loss = sum(module.loss(rank[i]) for rank in ALL[:RANKS]) / RANKS
            losses.append(loss.detach())
            (loss / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module, losses


def fabric_loop(kind, stage, epochs, clip, save=None, load=None, strategy=None):
    fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy or FabricZeROStrategy(stage=stage))
    fabric.launch()
    gc.freeze()
    module, losses, norms, state = net(kind), [], [], {"step": 0}
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state |= {"model": model, "optimizer": optimizer}
    if load is not None:
        fabric.load(load, state)
    for epoch in range(epochs):
        for window in WINDOWS:
            for i in window:
                with fabric.no_backward_sync(model, enabled=i != window[-1]):
                    loss = lm_loss(model(MINE[i]["input_ids"]), MINE[i])
                    losses.append(loss.detach())
                    fabric.backward(loss / len(window))
            if clip is not None:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=clip))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0 and save is not None:
            fabric.save(save, {**state, "step": 2})
    return module, losses, norms, state["step"]


# Problems of DeepSpeed and Lightning, each compared with Lightning's own strategy, adapted only to run on a CPU.


class OnCPU:
    def setup_environment(self):
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _auto_select_batch_size(self):
        return 1


class Stock(OnCPU, DeepSpeedStrategy):
    def _setup_model_and_optimizer(self, *args):
        with rank_given(self.local_rank):
            return super()._setup_model_and_optimizer(*args)

    def _initialize_deepspeed_inference(self, *args):
        with rank_given(self.local_rank):
            return super()._initialize_deepspeed_inference(*args)


class StockFabric(FabricDeepSpeedStrategy):
    def setup_environment(self):
        self.accelerator.setup_device(self.root_device)
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    def _initialize_engine(self, *args):
        with rank_given(self.local_rank):
            return super()._initialize_engine(*args)


class rank_given:
    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        import deepspeed

        self.initialize = deepspeed.initialize

        def initialize(args, **kwargs):
            args.device_rank = self.rank
            return self.initialize(args=args, **kwargs)

        deepspeed.initialize = initialize

    def __exit__(self, *error):
        import deepspeed

        deepspeed.initialize = self.initialize


class Hooks(L.Callback):
    def __init__(self):
        self.count = {"on_before_optimizer_step": 0, "on_before_zero_grad": 0}

    def on_before_optimizer_step(self, *args):
        self.count["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, *args):
        self.count["on_before_zero_grad"] += 1


class CountsSteps(TinyLM):
    steps = 0

    def optimizer_step(self, *args, **kwargs):
        self.steps += 1
        return super().optimizer_step(*args, **kwargs)


def mends(found, folder):
    for name, make in {"ours": lambda: ZeROStrategy(stage=2), "stock": lambda: Stock(stage=2)}.items():
        hooks, module = Hooks(), net("sgd", CountsSteps)
        t = fit(module, make(), [hooks], max_epochs=2, accumulate_grad_batches=2)
        engine = t.strategy.model if name == "stock" else t.strategy.engine.deepspeed
        found[f"steps {name}"] = [t.global_step, engine.global_steps]
        found[f"hooks {name}"] = {**hooks.count, "optimizer_step": module.steps}
        one = net("sgd")
        before = {n: p.detach().clone() for n, p in one.named_parameters()}
        fit(one, make(), max_steps=1, accumulate_grad_batches=2, batches=MINE[:2])
        moved = {n: p.detach() - before[n] for n, p in one.named_parameters()}
        plain = net("sgd")
        (sum(plain.loss(b) for b in MINE[:2]) / 2).backward()
        gradient = {n: p.grad for n, p in plain.named_parameters()}
        ratios = [(moved[n] / (-0.1 * gradient[n]))[gradient[n].abs() > 1e-4] for n in moved]
        found[f"scale {name}"] = torch.cat([r.flatten() for r in ratios]).median().item()
        found[f"validation {name}"] = calls_of_a_hook(make())
    for name, make in {"ours": lambda: FabricZeROStrategy(stage=2), "stock": lambda: StockFabric(stage=2)}.items():
        module, *_ = fabric_loop("sgd", None, 1, None, strategy=make())
        expected, _ = fabric_by_hand("sgd", 1, float("inf"))
        found[f"unclipped {name}"] = whole_difference(expected, module)
    stale(found, folder)


def calls_of_a_hook(strategy):
    """A forward hook of the user's, on a block, through ``trainer.validate``."""
    module, calls = net("sgd"), []
    module.blocks[0].register_forward_hook(lambda *args: calls.append(1))
    trainer(devices=RANKS, strategy=strategy).validate(module, as_loader(MINE), verbose=False)
    return len(calls)


def stale(found, folder):
    """Save again into a folder with a checkpoint of more ranks."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for name, make in {"ours": lambda: ZeROStrategy(stage=2), "stock": lambda: Stock(stage=2)}.items():
        path = folder / f"reused-{name}"
        module = net("sgd")
        t = fit(module, make(), batches=MINE[:1], max_epochs=1)
        t.save_checkpoint(path)
        piece = path / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        shutil.copy(piece, piece.with_name(piece.name.replace("rank_0", "rank_1", 1)))  # as if of two ranks
        t.save_checkpoint(path)
        try:
            state = get_fp32_state_dict_from_zero_checkpoint(path)
            found[f"reused {name}"] = largest_difference(whole(module), {n: state[n] for n in whole(module)})
        except Exception as error:
            found[f"reused {name}"] = repr(error)


def goes_on(found, folder):
    """Fit, validate, test and fit again with one module, which keeps nothing of DeepSpeed's in between."""
    module, batches = net("sgd"), MINE[:2]
    fit(module, ZeROStrategy(stage=3), batches=batches, max_epochs=1)
    t = trainer(devices=RANKS, strategy=ZeROStrategy(stage=1), max_epochs=1)
    plain = net("sgd")
    t.fit(plain, as_loader(batches))
    t.validate(plain, as_loader(batches), verbose=False)
    t.fit_loop.max_epochs = 2
    t.fit(plain, as_loader(batches))
    gc.collect()
    found["kept"] = [getattr(p, "_hp_mapping", None) is not None for p in plain.parameters()]
    expected, module = net("sgd"), plain
    optimizer = expected.configure_optimizers()
    for batch in batches * 2:
        optimizer.zero_grad()
        expected.loss(batch).backward()
        optimizer.step()
    found["fit twice"] = whole_difference(expected, module)
    validated = net("sgd")
    trainer(devices=RANKS, strategy=ZeROStrategy()).validate(
        validated, as_loader(batches), ckpt_path=folder / "by-1-stage-2", verbose=False
    )
    saved = torch.load(folder / "weights-1-2", weights_only=True)
    found["validated"] = largest_difference(saved, whole(validated))
    t.strategy.engine.release()
    found["hooks left"] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


class CallsParts(TinyLM):
    """It does not call itself, so each step of stage 3 is as the one before, and what it releases is cached."""

    def loss(self, batch):
        return lm_loss(self.forward(batch["input_ids"]), batch)


def changes_trainers(found, folder):
    """Train one module with two Trainers, or two Fabrics, in turn; nothing of a Trainer's run stays in memory."""
    expected = net("sgd", CallsParts)
    optimizer = expected.configure_optimizers()
    for batches in [*zip(*ALL[:RANKS], strict=True)][:2] * 2:
        optimizer.zero_grad()
        (sum(map(expected.loss, batches)) / RANKS).backward()
        optimizer.step()
    for stage in (0, 1, 2, 3):
        module = net("sgd", CallsParts)
        for _ in range(2):
            trainer(devices=RANKS, strategy=ZeROStrategy(stage=stage)).fit(module, as_loader(MINE[:2]))
        found[f"two Trainers {stage}"] = whole_difference(expected, module)
        gc.collect()  # calls the destructor of the first engine, which must leave what the second keeps on parameters
        found[f"kept {stage}"] = [getattr(p, "_hp_mapping", None) is not None for p in module.parameters()]
        reference = weakref.ref(module)
        del module
        gc.collect()
        found[f"freed {stage}"] = reference() is None
    for stage in (2, 3):
        module = net("sgd", CallsParts)
        for root in (module, nn.Sequential(module)):
            fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=FabricZeROStrategy(stage=stage))
            fabric.launch()
            model, optimizer = fabric.setup(root, module.configure_optimizers())
            for batch in MINE[:2]:
                fabric.backward(lm_loss(model(batch["input_ids"]), batch))
                optimizer.step()
                optimizer.zero_grad()
        found[f"two Fabrics {stage}"] = whole_difference(expected, module)


def rounds(found, folder):
    """In bfloat16 the optimizer has float32 copies, which a consolidated file must contain."""
    from deepspeed.utils import safe_get_full_fp32_param

    for stage in (0, 1, 2, 3):
        module = net("adamw")
        t = fit(module, ZeROStrategy(stage=stage), batches=MINE[:3], max_epochs=1, precision="bf16-true")
        optimizer = t.strategy.engine.deepspeed.optimizer
        if stage:
            masters = {n: safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()}
        else:
            flat = [copy for group in optimizer.fp32_groups for copy in group]
            masters = {n: copy.clone() for (n, _), copy in zip(module.named_parameters(), flat, strict=True)}
        torch.save(masters, folder / f"masters-{stage}")
        t.save_checkpoint(folder / f"bf16-{stage}.ckpt")


class ByHand(TinyLM):
    """Two backward passes per step, in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch))
        self.manual_backward(2 * self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def steps_manually(found, folder):
    expected = net("sgd")
    optimizer = expected.configure_optimizers()
    for batch in MINE[:3]:
        optimizer.zero_grad()
        (3 * expected.loss(batch)).backward()
        optimizer.step()
    for stage in (0, 1, 2, 3):
        module = net("sgd", ByHand)
        fit(module, ZeROStrategy(stage=stage), batches=MINE[:3], max_epochs=1)
        found[f"manual {stage}"] = whole_difference(expected, module)


def counts_nothing(found, folder):
    """A window without targets changes nothing, and the next one is not affected."""
    empty = {"input_ids": MINE[0]["input_ids"], "labels": torch.full_like(MINE[0]["labels"], -100)}
    batches, expected = [empty, empty, *MINE[2:4]], net("sgd")
    optimizer = expected.configure_optimizers()
    expected.loss(concatenate(MINE[2:4])).backward()
    optimizer.step()
    for stage in (0, 1, 3, "2+offload"):
        module = net("sgd")
        fit(module, ZeROStrategy(stage=stage), [ft.TokenWeightedAccumulation(2)], batches, max_epochs=1)
        found[f"empty {stage}"] = whole_difference(expected, module)


def warns_inside_a_window(found, folder):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(folder / "window.ckpt")

    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(net("sgd"), ZeROStrategy(stage=2), [Saves()], MINE[:2], max_epochs=1, accumulate_grad_batches=2)
    found["window"] = [str(w.message) for w in seen if "accumulation window" in str(w.message)]


def refuses(found, folder):
    class Clips(TinyLM):
        def configure_gradient_clipping(self, *args, **kwargs):
            pass

    class Two(TinyLM):
        def configure_optimizers(self):
            return [super(Two, self).configure_optimizers() for _ in range(2)]

    lbfgs = TinyLM(optimizer=torch.optim.LBFGS, lr=0.1)
    for name, module, stage, callbacks in (
        ("EagerGradientRelease", net("sgd"), "2+offload", [ft.EagerGradientRelease()]),
        ("clipping by hand", Clips(), 2, []),
        ("two optimizers", Two(), 2, []),
        ("LBFGS", lbfgs, 0, []),
        ("Adafactor", TinyLM(optimizer=torch.optim.Adafactor), 2, []),
        ("Distillation", net("sgd"), 3, [ft.loss.Distillation(TinyLM(depth=2), alpha=0.5, head="head")]),
    ):
        try:
            fit(module, ZeROStrategy(stage=stage), callbacks, max_epochs=1)
            found[name] = "no error"
        except Exception as error:
            found[name] = str(error)
    path = folder / "hostile" / "a.ckpt"
    fit(net("sgd"), ZeROStrategy(stage=2), batches=MINE[:1], max_epochs=1).save_checkpoint(path)
    (path / "MANIFEST.json").unlink()
    found["no manifest"] = error_of(lambda: fit(net("sgd"), ZeROStrategy(stage=2), path=path, max_epochs=2))
    from lightning_fasttrain.checkpoint.checkpoint_folder import checkpoint_folder

    with checkpoint_folder(path, about={"stage": 2}) as staging:
        (staging / "checkpoint").mkdir()
        torch.save({"x": os.system}, staging / "checkpoint" / "mp_rank_00_model_states.pt")
    found["hostile"] = error_of(lambda: fit(net("sgd"), ZeROStrategy(stage=2), path=path, max_epochs=2))


def refuses_earlier_shards(found, folder):
    """A model that is sharded already, under strategies that cannot use its shards; under stage 3 it trains on."""
    strategies = {
        "stage 3": lambda: ZeROStrategy(stage=3),
        "stage 1": lambda: ZeROStrategy(stage=1),
        "auto": lambda: ZeROStrategy(memory_gib=1),
        "FSDP2": FSDP2Strategy,
        "DDP": lambda: DDPStrategy(process_group_backend="gloo"),
        "one device": lambda: "auto",
    }
    for first in ("stage 3", "FSDP2"):
        module = net("sgd")
        fit(module, strategies[first](), batches=MINE[:1], max_epochs=1)
        for name in strategies:
            then = functools.partial(fit, module, strategies[name](), [ft.MicroBatching(2)], MINE[:1], max_epochs=1)
            found[f"{first}, then {name}"] = error_of(then)
    module = net("sgd")
    fit(module, ZeROStrategy(stage=3), batches=MINE[:1], max_epochs=1)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricZeROStrategy(stage=2))
    fabric.launch()
    found["in Fabric"] = error_of(lambda: fabric.setup(module, module.configure_optimizers()))


def on_gpu(stage, path):
    """One process on one GPU: compare the losses with those of the CPU."""
    expected, module = net("adamw"), net("adamw")
    trainer(max_epochs=4).fit(expected, as_loader(MINE))
    trainer(max_epochs=4, accelerator="gpu", devices=1, strategy=ZeROStrategy(stage=stage)).fit(module, as_loader(MINE))
    worst = max((a.cpu() - b).abs().item() for a, b in zip(module.losses, expected.losses, strict=True))
    Path(path).write_text(json.dumps({"losses": worst}))
    time.sleep(1)
    os._exit(0)


TWO = (
    resumes,
    equals_one_process,
    weighs_tokens,
    chooses,
    adapts,
    keeps_adapters,
    changes_trainers,
    twin,
    zero_guards.skips_bad_steps,
    zero_guards.skips_in_fabric,
    zero_guards.ignores_padding,
    saves_whole_or_not_at_all,
    reshards,
)
ONE = (
    resumes,
    mends,
    zero_steps.counts_steps,
    zero_steps.resumes_in_16_bits,
    zero_steps.counts_steps_in_fabric,
    zero_steps.refuses_a_late_schedule,
    zero_steps.refuses_adagrad,
    rounds,
    counts_nothing,
    steps_manually,
    goes_on,
    changes_trainers,
    warns_inside_a_window,
    refuses,
    refuses_earlier_shards,
    saves_whole_or_not_at_all,
    chooses,
    reshards,
)


def main(path, only=()):
    folder, found = Path(path), {}
    for scenario in TWO if RANKS == 2 else ONE:
        if only and scenario.__name__ not in only:
            continue
        started = time.perf_counter()
        try:
            scenario(found, folder)
        except Exception:
            traceback.print_exc()
            found[scenario.__name__] = traceback.format_exc()
            if RANKS > 1:  # the other rank may wait for this one
                print(found[scenario.__name__], flush=True)
                os._exit(1)
        found[f"seconds {scenario.__name__}"] = time.perf_counter() - started
    write_findings(folder / f"found-{RANKS}.json", found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
