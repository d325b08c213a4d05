"""Run by two processes (see test_strategies_of_configs.py): strategies with every setting out of a config."""

import faulthandler
import os
import sys
from pathlib import Path

import lightning as L
import yaml
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from tests.strategy.zero_steps import whole as gathered
from tests.support.end_of_rank import run_rank, write_findings
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.test_config_values import foreign_values

RANK = int(os.environ.get("RANK", 0))
BATCHES = [lm_batches(2, seed=3), lm_batches(2, seed=4)]  # of each rank
BETAS = [0.9, 0.95]
COLUMNS, ROWS = [{"_target_": f"torch.distributed.tensor.parallel.{way}wiseParallel"} for way in ("Col", "Row")]
# fmt: off
COMMON = {"process_group_backend": "gloo", "timeout": {"_target_": "datetime.timedelta", "minutes": 3}}
OF_DEEPSPEED = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": BETAS, "torch_adam": True}},
}
SETTINGS = {
    "FSDP2Strategy shards": {
        "reshard_after_forward": 2, "offload": "cpu", "replicas": 1, "blocks": ["blocks.0", "blocks.*"],
        "reduce_dtype": "float32", "float32_residual": True, "broadcast_buffers": True, "reduce_once": True,
        "async_checkpoints": True, **COMMON,
    },
    "FSDP2Strategy tensor": {
        "tensor_parallel": 2, "sequence_parallel": False, "tensor_plan": {
            "blocks.0.up": "colwise", "blocks.0.down": ROWS, "blocks.1.up": COLUMNS, "blocks.1.down": "rowwise",
        }, "context_parallel": 1, **COMMON,
    },
    "ZeROStrategy stage": {
        "stage": 2, "headroom": 0.2, "trusted": False, "universal": True, "reduce_bucket_size": 1000,
        "overlap_comm": False, **COMMON,
    },
    "ZeROStrategy auto": {"stage": "auto", "memory_gib": 0.5, "headroom": 0.2, **COMMON},
    "ZeROStrategy config": {"config": OF_DEEPSPEED, **COMMON},
}
# fmt: on


def strategy_of(case, fabric=False):
    """The strategy of a case, as Hydra makes it, and what it keeps of other classes than plain Python's."""
    name, settings = case.split()[0], SETTINGS[case]
    if fabric:
        name = f"strategy.Fabric{name}"
        settings = {key: value for key, value in settings.items() if key != "reduce_once"}
    made = instantiate(OmegaConf.create({"_target_": f"lightning_fasttrain.{name}", **settings}))
    return made, list(map(repr, foreign_values(made)))


def ranks_of(case):
    """The batches of each data rank; the ranks of a tensor group compute the same ones."""
    return BATCHES[:1] if case.endswith("tensor") else BATCHES


def batches_of(case):
    return ranks_of(case)[RANK % len(ranks_of(case))]


def net():
    return ShallowLM(betas=BETAS)


def by_hand(case):
    """The weights after two epochs of one process with plain PyTorch: the mean over the data ranks."""
    module, ranks = net(), ranks_of(case)
    optimizer = module.configure_optimizers()
    for batches in [*zip(*ranks, strict=True)] * 2:
        optimizer.zero_grad()
        for batch in batches:
            (module.loss(batch) / len(ranks)).backward()
        optimizer.step()
    return weights(module)


def whole(module):
    state = {}
    for name, value in gathered(module).items():
        state[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() for name, value in state.items()}


class SaveFirstEpoch(L.Callback):
    def __init__(self, path: str):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit(case, path, resumed):
    strategy, foreign = strategy_of(case)
    module = net()
    t = trainer([] if resumed else [SaveFirstEpoch(path)], devices=2, strategy=strategy, max_epochs=2)
    t.fit(module, as_loader(batches_of(case)), ckpt_path=path if resumed else None)
    return whole(module), t.global_step, foreign


def loop(case, path, resumed):
    """The same in a Fabric loop."""
    strategy, foreign = strategy_of(case, fabric=True)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = net()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resumed:
        fabric.load(path, state)
    for epoch in range(state["epoch"], 2):
        for batch in batches_of(case):
            optimizer.zero_grad()
            fabric.backward(model.loss(batch))
            optimizer.step()
        state["epoch"] = epoch + 1
        if epoch == 0 and not resumed:
            fabric.save(path, state)
            getattr(strategy, "wait", int)()
    return whole(module), state["epoch"], foreign


class Batches(L.LightningDataModule):
    def train_dataloader(self):
        return as_loader(BATCHES[RANK])


class Net(ShallowLM):
    """Its arguments are those that a command line can give."""

    def __init__(self, betas: list[float]):
        super().__init__(betas=betas)


def command_line(case, path, resumed):
    """The same by LightningCLI, out of a file."""
    settings = {**SETTINGS[case], "timeout": "0:03:00"}
    spec = {"class_path": f"lightning_fasttrain.{case.split()[0]}", "init_args": settings}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    quiet["use_distributed_sampler"] = False
    run = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "strategy": spec, **quiet}
    if not resumed:
        run["callbacks"] = [{"class_path": f"{__name__}.SaveFirstEpoch", "init_args": {"path": str(path)}}]
    file = path.with_name(f"{RANK}.yaml")
    config = {"trainer": run, "model": {"betas": BETAS}, "ckpt_path": str(path) if resumed else None}
    file.write_text(yaml.safe_dump(config))
    cli = LightningCLI(Net, Batches, args=["fit", "--config", str(file)], save_config_callback=None)
    return whole(cli.model), cli.trainer.global_step, list(map(repr, foreign_values(cli.trainer.strategy)))


class Configured(ShallowLM):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters()


def refused(case, folder):
    """What a run says of a config among its hyper-parameters, and its number of steps."""
    saves = ModelCheckpoint(folder / "refused")
    t = trainer([saves], devices=2, strategy=strategy_of(case)[0], enable_checkpointing=True)
    try:
        t.fit(Configured(OmegaConf.create({"widths": [1]})), as_loader(batches_of(case)))
    except ValueError as error:
        return str(error), t.global_step
    return "", t.global_step


RUNS = [(case, run) for case in SETTINGS for run in (fit, loop)]
RUNS += [(case, command_line) for case in ("FSDP2Strategy shards", "ZeROStrategy config")]
REFUSED = ("FSDP2Strategy shards", "ZeROStrategy stage")


def main(path, folder):
    faulthandler.dump_traceback_later(150, exit=True)
    found = {}
    for case, run in RUNS:
        name = f"{run.__name__} {case}"
        end, steps, foreign = run(case, Path(folder) / name, False)
        again, steps_again, _ = run(case, Path(folder) / name, True)
        found[name] = {
            "to plain PyTorch": largest_difference(by_hand(case), end),
            "to resumed": largest_difference(end, again),
            "steps": [steps, steps_again],
            "foreign": foreign,
        }
    for case in REFUSED:
        found[f"refused {case}"] = refused(case, Path(folder))
    write_findings(path, found)


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
