"""Settings for the choice of a ZeRO stage, and the step for which it is chosen."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, IterableDataset

from lightning_fasttrain.core.host.lightning import training_loader
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from lightning_fasttrain.strategy.memory_limits import check_headroom
from lightning_fasttrain.strategy.zero.zero_states import STAGES
from lightning_fasttrain.technique import Technique

_KNOWN = inspect.signature(DeepSpeedStrategy.__init__).parameters
# Settings of Lightning's strategy that a stage determines, so that they cannot be combined with stage=.
_PART_OF_STAGE = (
    "zero_optimization",
    "offload_optimizer",
    "offload_parameters",
    "offload_params_device",
    "offload_optimizer_device",
    "remote_device",
)
# Settings that Lightning's strategy uses itself, so that they take effect beside a config.
_BESIDE_CONFIG = (
    *("accelerator", "parallel_devices", "cluster_environment", "precision", "precision_plugin"),
    *("process_group_backend", "timeout", "logging_level", "load_full_weights", "exclude_frozen_parameters"),
    *("remote_device", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
)


def without_defaults(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings that differ from Lightning's defaults, since LightningCLI passes all settings explicitly."""
    return {key: value for key, value in settings.items() if key not in _KNOWN or value != _KNOWN[key].default}


def check_stage(
    stage: int | str, config: str | Path | Mapping[str, object] | None, settings: Mapping[str, object]
) -> str:
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
    unknown = list(without(settings, _KNOWN))
    if unknown:
        why = "neither it nor Lightning's DeepSpeedStrategy has such a setting"
        if unknown[0] in Sharding.__dataclass_fields__:
            why += ", FSDP2Strategy has"
        raise TypeError(explain(f"ZeRO with {unknown[0]}={settings[unknown[0]]!r}", why, "Leave it out"))
    if config is not None:
        _check_beside_config(stage, settings)
        return name
    twice = [key for key in _PART_OF_STAGE if key in settings]
    if twice:
        what = f"stage={stage!r} with {twice[0]}={settings[twice[0]]!r}"
        why = "the stage determines the placement of gradients, optimizer state and parameters, offload included"
        raise ValueError(explain(what, why, "Leave it out, and choose a stage, such as stage='2+offload'"))
    return name


def _check_beside_config(stage: int | str, settings: Mapping[str, object]) -> None:
    if stage != "auto":
        why = "both set the stage"
        raise ValueError(explain(f"stage={stage!r} with a DeepSpeed config", why, "Leave one of the two out"))
    ignored = sorted(without(settings, _BESIDE_CONFIG))
    if ignored:
        why = "DeepSpeed's settings are read from the config, so this one would be ignored"
        raise ValueError(explain(f"a DeepSpeed config with {ignored[0]}=", why, "Write it into the config"))


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the DeepSpeed config in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not contain a JSON object.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(explain(f"config={str(path)!r}", "there is no such file", "Check the path"))
    try:
        config = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(explain(f"config={str(path)!r}", f"it is not valid JSON ({error})", _AS_JSON)) from None
    if not isinstance(config, dict):
        why = f"it contains a {type(config).__name__} instead of DeepSpeed's settings"
        raise ValueError(explain(f"config={str(path)!r}", why, _AS_JSON))
    return config


_AS_JSON = 'Write a JSON object, such as {"zero_optimization": {"stage": 2}}, or pass the settings as a dict'


@dataclass
class StageQuestion:
    """Requested stage, validated, with the corresponding DeepSpeed settings.

    Args:
        stage: ``"auto"`` or a stage.
        memory_gib: memory of a rank.
        headroom: fraction of the memory that stays free.
        nvme_path: folder to offload to.
        config: the user's DeepSpeed config, if any; a path is replaced by the settings in the file.
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
        check_headroom(self.headroom)
        if isinstance(self.config, str | Path):
            self.config = read_config(self.config)
        named = self.config is not None or self.stage != "auto"
        if named and self.memory_gib is not None:
            other = f"stage={self.stage!r}"
            if self.config is not None:
                other = "a config"
            what = f"memory_gib={self.memory_gib} with {other}"
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
        level, _, where = ("0" if self.open else str(self.stage)).partition("+")
        settings: dict[str, Any] = {"stage": int(level), "offload_optimizer": bool(where)}
        if not where:
            return settings
        device = "nvme" if where == "nvme" else "cpu"
        settings["offload_optimizer_device"] = device
        if level == "3":
            settings |= {"offload_parameters": True, "offload_params_device": device, "remote_device": device}
        if where == "nvme":
            if self.nvme_path is None:
                why = "there is no folder to offload to"
                raise ValueError(explain("stage='3+nvme' without nvme_path", why, "Give nvme_path="))
            settings["nvme_path"] = self.nvme_path
        return settings


def step_to_predict(trainer: L.Trainer) -> dict[str, Any]:
    """Return the batch and the techniques of a step for ``predict_strategies``; no batch if none can be read."""
    loader = training_loader(trainer)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        say("ZeRO stage: chosen without activations, since a batch of this loader cannot be read without consuming it")
        return {}
    # Techniques that change the model are applied already.
    techniques = [c for c in trainer.callbacks if isinstance(c, Technique) and c.surgery is None]
    before = random_state()
    try:
        return {"batch": read_batch(loader), "techniques": techniques}
    except Exception as error:
        # A user's dataset may do anything; the choice continues without activations.
        say("ZeRO stage: chosen without activations, since a batch cannot be read: %s", error)
        return {}
    finally:
        set_random_state(before)


def read_batch(loader: DataLoader) -> Any:
    """Read one batch from the loader's dataset directly, and collate it as the loader does.

    The loader's sampler and workers are not used, so their state does not change.
    """
    dataset: Any = loader.dataset  # map-style, as the caller has checked
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    size: Any = loader.batch_size or vars(loader.batch_sampler)["batch_size"]
    return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])
