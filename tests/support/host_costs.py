"""What the hosts do again for every Trainer, for every seed and for every few objects; in tests that adds up."""

import functools
import gc
import inspect

import lightning as L
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.trainer.connectors.logger_connector import result


@functools.cache
def spare() -> None:
    """Have it done once, or less often, in this process and its forks, which may call this again."""
    registry.entry_points = functools.cache(registry.entry_points)  # looks through all that is installed
    L.Trainer.__signature__ = inspect.signature(L.Trainer)  # asked for at each start
    inspect.stack.__defaults__ = (0,)  # file names are read from it, at each loading of a checkpoint; not their lines
    gc.set_threshold(50_000, 20, 50)
    if not torch.cuda.is_available():
        torch.cuda._cached_device_count = 0  # a CUDA build would search for the driver at each optimizer step
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            absent.manual_seed_all = _forget  # would be kept, with the stack of who asked, until the device is there
        result._ResultMetric.to = _stay  # looks through each value that is logged for what to move


def _stay(value: object, *_: object, **__: object) -> object:
    return value


def _forget(seed: int) -> None:
    pass
