"""Settings of a second Trainer in the processes of the first: with its ranks, without starting processes."""

from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_fasttrain.core.host.lightning import ddp_again


class SameProcesses(ClusterEnvironment):
    """The environment of a running Trainer, whose processes and connections already exist."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.ranks = trainer.global_rank, trainer.local_rank, trainer.node_rank
        self.size = trainer.world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # not used: connections already exist

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.ranks[0]

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.ranks[1]

    def node_rank(self) -> int:
        return self.ranks[2]


def find_unrehearsable(trainer: L.Trainer) -> str | None:
    """Return why a second run cannot be run beside this one; None if it can."""
    strategy = trainer.strategy
    # Exactly DDP: DeepSpeed's strategy, which shards, inherits from it.
    if type(strategy) is DDPStrategy or isinstance(strategy, SingleDeviceStrategy):
        return None
    return f"a copy cannot be run beside {type(strategy).__name__}"


def devices_again(trainer: L.Trainer) -> dict[str, Any]:
    """Return settings for a Trainer that runs on the devices of ``trainer``, on all its ranks."""
    strategy = trainer.strategy
    settings: dict[str, Any] = one_device_again(trainer)
    if isinstance(strategy, DDPStrategy):
        settings["devices"] = trainer.device_ids if strategy.root_device.type == "cuda" else trainer.num_devices
        settings["num_nodes"] = trainer.num_nodes
        settings["strategy"] = ddp_again(strategy, SameProcesses(trainer))
    return settings


def one_device_again(trainer: L.Trainer) -> dict[str, Any]:
    """Return settings for a Trainer on the device of this rank only."""
    device = trainer.strategy.root_device
    devices: int | list[int] = 1 if device.index is None else [device.index]
    return {"accelerator": type(trainer.accelerator)(), "devices": devices}
