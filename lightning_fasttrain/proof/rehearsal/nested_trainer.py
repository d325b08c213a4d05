"""Settings of a second Trainer in the processes of the first: with its ranks, without starting processes."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_fasttrain.core.device import return_unused_memory
from lightning_fasttrain.core.host.lightning import ddp_again
from lightning_fasttrain.core.state.rng import random_state, set_random_state


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


@contextmanager
def leaving_no_trace(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Restore random states, torch's global flags and the environment; only copies of the run's objects may act.

    On a GPU the run's weights and optimizer state are moved to host memory meanwhile, to make space for the copy.
    """
    numbers, switches, environment = random_state(), _switches(), dict(os.environ)
    move_back = _park(trainer, module)
    try:
        yield
    finally:
        return_unused_memory()  # the copies reference one another
        move_back()  # once the copies' memory is freed
        _set_switches(switches)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            # Code compiled for the copies would count towards the run's recompilation limit.
            dynamo.reset()
        # Random states come last, since the lines above may draw random numbers.
        set_random_state(numbers)


def _switches() -> tuple[Any, ...]:
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    return *deterministic, *cudnn, torch.is_grad_enabled(), torch.get_default_dtype()


def _set_switches(switches: tuple[Any, ...]) -> None:
    deterministic, warn_only, benchmark, of_cudnn, grad, dtype = switches
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, of_cudnn
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)


def _park(trainer: L.Trainer, module: L.LightningModule) -> Callable[[], None]:
    """Move tensors of the run from the GPU to the host; return how to move them back. The tensor objects stay."""
    parked: list[tuple[Tensor, torch.device]] = []
    held = [*module.parameters(), *module.buffers()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            held += filter(torch.is_tensor, state.values())
    for tensor in held:
        # Others may share the memory, as in an LSTM, and would not follow.
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes
        # Subclasses, such as quantized weights, may hold other tensors, which `data` does not move.
        if tensor.is_cuda and alone and type(tensor) in (Tensor, nn.Parameter):
            parked.append((tensor, tensor.device))
            tensor.data = tensor.data.cpu()

    def move_back() -> None:
        for tensor, device in parked:
            tensor.data = tensor.data.to(device)

    return move_back
