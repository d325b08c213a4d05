"""What the hosts do again for every Trainer, for every seed and for every few objects; in tests that adds up."""

import functools
import gc
import inspect

import lightning as L
import torch
from lightning.fabric.utilities import registry


@functools.cache
def spare() -> None:
    """Have it done once, or less often, in this process and its forks, which may call this again."""
    registry.entry_points = functools.cache(registry.entry_points)  # looks through all that is installed
    L.Trainer.__signature__ = inspect.signature(L.Trainer)  # asked for at each start
    gc.set_threshold(50_000, 20, 50)
    if not torch.cuda.is_available():
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            absent.manual_seed_all = _forget  # would be kept, with the stack of who asked, until the device is there


def _forget(seed: int) -> None:
    pass
