"""Choice of the ZeRO stage with the same result on all ranks."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DeepSpeedStrategy
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.distributed import rank_count, smallest_over_ranks
from lightning_fasttrain.core.host.lightning import training_loader
from lightning_fasttrain.core.messages import explain, say, wide_enough
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.predict import predict_memory
from lightning_fasttrain.strategy.choose._limits import check_limits
from lightning_fasttrain.strategy.choose.choose_stage import StageChoice, choose_stage
from lightning_fasttrain.strategy.choose.model_states import STAGES, ZeROSizes
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from lightning_fasttrain.technique import Technique

# Settings of Lightning's strategy that a stage determines, so that they cannot be combined with stage=.
_PART_OF_STAGE = (
    "zero_optimization",
    "offload_optimizer",
    "offload_parameters",
    "offload_params_device",
    "offload_optimizer_device",
    "remote_device",
)


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from Lightning's defaults, since LightningCLI passes all settings explicitly."""
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters
    return {key: value for key, value in settings.items() if key not in known or value != known[key].default}


def check_stage(stage: int | str, config: str | Path | dict[str, Any] | None, settings: Mapping[str, Any]) -> str:
    """Return ``stage`` as one of :data:`STAGES` or ``"auto"``, or refuse it.

    Raises:
        TypeError: a setting does not exist.
        ValueError: the stage does not exist, or conflicts with settings that a stage determines.
    """
    name = str(stage)
    if isinstance(stage, bool) or name not in (*STAGES, "auto"):
        words = []
        for word in STAGES:
            words.append(word if word.isdigit() else repr(word))
        way_out = f"Use stage='auto', or one of {', '.join(words)}"
        raise ValueError(explain(f"stage={stage!r}", "ZeRO has no such stage", way_out))
    known = inspect.signature(DeepSpeedStrategy.__init__).parameters
    unknown = [key for key in settings if key not in known]
    if unknown:
        why = "neither it nor Lightning's DeepSpeedStrategy has such a setting"
        if unknown[0] in Sharding.__dataclass_fields__:
            why += ", FSDP2Strategy has"
        raise TypeError(explain(f"ZeRO with {unknown[0]}={settings[unknown[0]]!r}", why, "Leave it out"))
    twice = [key for key in _PART_OF_STAGE if key in settings]
    if twice:
        what = f"stage={stage!r} with {twice[0]}={settings[twice[0]]!r}"
        why = "the stage determines the placement of gradients, optimizer state and parameters, offload included"
        raise ValueError(explain(what, why, "Leave it out, and choose a stage, such as stage='2+offload'"))
    if config is not None and stage != "auto":
        why = "both set the stage"
        raise ValueError(explain(f"stage={stage!r} with a DeepSpeed config", why, "Leave one of the two out"))
    if config is not None and settings:
        why = "DeepSpeed's settings are read from the config, so this one would be ignored"
        raise ValueError(explain(f"a DeepSpeed config with {sorted(settings)[0]}=", why, "Write it into the config"))
    return name


def settings_of_stage(stage: str, nvme_path: str | None) -> dict[str, Any]:
    """Return the arguments of Lightning's DeepSpeed strategies for a stage."""
    level, _, where = stage.partition("+")
    device = "nvme" if where == "nvme" else "cpu"
    settings: dict[str, Any] = {"stage": int(level), "offload_optimizer": bool(where)}
    if where:
        settings["offload_optimizer_device"] = device
    if where and level == "3":
        settings |= {"offload_parameters": True, "offload_params_device": device, "remote_device": device}
    if where == "nvme":
        if nvme_path is None:
            why = "there is no folder to offload to"
            raise ValueError(explain("stage='3+nvme' without nvme_path", why, "Give nvme_path="))
        settings["nvme_path"] = nvme_path
    return settings


@dataclass
class StageQuestion:
    """Requested stage, validated, with the corresponding DeepSpeed settings.

    Args:
        stage: ``"auto"`` or a stage.
        memory_gib: memory of a rank.
        headroom: fraction of the memory that stays free.
        nvme_path: folder to offload to.
        config: the user's DeepSpeed config, if any.
        settings: further arguments of Lightning's strategy.
    """

    stage: int | str
    memory_gib: float | None
    headroom: float
    nvme_path: str | None
    config: str | Path | dict[str, Any] | None
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.stage = check_stage(self.stage, self.config, self.settings)
        check_limits(self.headroom, memory_gib=self.memory_gib)
        named = self.config is not None or self.stage != "auto"
        if named and self.memory_gib is not None:
            what = f"memory_gib={self.memory_gib} with {'a config' if self.config is not None else f'{self.stage=}'}"
            why = "memory_gib is used by stage='auto' only"
            raise ValueError(explain(what, why, "Leave one of the two out"))

    @property
    def open(self) -> bool:
        """Whether the stage is still to be chosen."""
        return self.stage == "auto" and self.config is None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of Lightning's strategy; until a stage is chosen, those of stage 0."""
        if self.config is not None:
            return {"config": self.config}
        return settings_of_stage("0" if self.open else str(self.stage), self.nvme_path)


def choose_together(
    question: StageQuestion,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    local_ranks: int,
    precision: str,
    activation_bytes: int = 0,
) -> dict[str, Any]:
    """Choose the stage by the least memory of all ranks, with the same result on all; rank zero prints the table.

    Args:
        question: the requested stage; its ``stage`` is set to the chosen one.
        module: the model, with adapters and quantised layers in place.
        optimizer: the user's optimizer.
        device: device of this rank.
        local_ranks: number of processes that share this host.
        precision: Lightning's name of the precision.
        activation_bytes: bytes of activations that this rank expects; the maximum over all ranks is used.

    Returns:
        The ``zero_optimization`` section of DeepSpeed's config.

    Raises:
        ValueError: no stage fits; raised on all ranks, with the shortfall.
    """
    host = require("psutil", extra="deepspeed").virtual_memory().available // local_ranks
    free = host if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if question.memory_gib is not None:
        free = int(question.memory_gib * GIB)
    elif device.type == "cpu":
        host = 0  # host memory is the device's memory, so offload has no effect
    # Negated, so that the minimum yields the maximum.
    free, host, activations = smallest_over_ranks([free, host, -activation_bytes])
    bucket = question.settings.get("reduce_bucket_size")
    sizes = ZeROSizes(reduce_bucket=bucket) if bucket is not None else None
    world_size = rank_count()
    choice = choose_stage(
        module,
        optimizer,
        world_size=world_size,
        free_bytes=free,
        host_bytes=host,
        nvme_path=question.nvme_path,
        activation_bytes=-activations,
        precision=f"bf{precision}" if precision.startswith("16-") else precision,  # float16 has the same size
        headroom=question.headroom,
        sizes=sizes,
    )
    question.stage = choice.stage
    _show(choice)
    # Lightning builds the config, which has its own defaults.
    made = DeepSpeedStrategy(**question.arguments(), **question.settings).config
    assert made is not None
    given = {
        key: question.settings[key] for key in ("reduce_bucket_size", "sub_group_size") if key in question.settings
    }
    return {**made["zero_optimization"], **choice.sizes.as_config(), **given}  # the sizes assumed in the prediction


@rank_zero_only
def _show(choice: StageChoice) -> None:
    wide_enough(Console()).print(choice.as_table())


def predicted_activations(trainer: L.Trainer, module: L.LightningModule, device: torch.device) -> int:
    """Predict the bytes of activations of a step on one training batch; report it and return 0 if that fails."""
    loader = training_loader(trainer)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        say("ZeRO stage: chosen without activations, since a batch of this loader cannot be read without consuming it")
        return 0
    before = random_state()
    try:
        batch = _a_batch(loader)
        # Techniques that change the model are applied already.
        techniques = [c for c in trainer.callbacks if isinstance(c, Technique) and c.surgery is None]
        precision = "32-true" if trainer.precision == "32-true" else "bf16-true"  # DeepSpeed's "mixed" casts the model
        report = predict_memory(module, batch, techniques=techniques, precision=precision, device=device.type)
    except Exception as error:  # a user's step may do anything; the choice continues without activations
        say("ZeRO stage: chosen without activations, since they cannot be predicted: %s", error)
        return 0
    finally:
        set_random_state(before)
    return report.peaks["activations"] + report.peaks["temporaries"]


def _a_batch(loader: DataLoader) -> Any:
    """Read one batch from the loader's dataset directly, and collate it as the loader does.

    The loader's sampler and workers are not used, so their state does not change.
    """
    dataset: Any = loader.dataset  # map-style, as the caller has checked
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    size: Any = loader.batch_size or vars(loader.batch_sampler)["batch_size"]
    return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])
