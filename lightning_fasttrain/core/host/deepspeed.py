"""DeepSpeed's import and start on any device, with the global state restored that it changes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.modules.wrapped_forward import Undo


def import_deepspeed() -> Any:
    """Import DeepSpeed without its warning about a missing accelerator, or raise an error that names the extra.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """
    if torch.cuda.is_available() or "DS_ACCELERATOR" in os.environ:
        return require("deepspeed", extra="deepspeed")
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        deepspeed = require("deepspeed", extra="deepspeed")
        # Called while the variable is set: DeepSpeed caches the result.
        deepspeed.accelerator.get_accelerator()
        return deepspeed
    finally:
        del os.environ["DS_ACCELERATOR"]


def enter_deepspeed(device_type: str) -> Undo:
    """Prepare for DeepSpeed, and return a function that restores the global state it changes.

    Stage 3 replaces ``torch.nn.functional.linear`` permanently. On a CPU, DeepSpeed's CPU accelerator is selected,
    even if the machine has a GPU, and the environment variables of the process group, which Lightning sets for
    DeepSpeed, are removed at the end: with them, the next Trainer in this process would assume an external launcher.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    undo = ExitStack()
    undo.callback(setattr, functional, "linear", functional.linear)
    if device_type != "cpu":
        return undo.close
    before: Any = get_accelerator()
    if before.device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
        undo.callback(set_accelerator, before)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name not in os.environ:
            undo.callback(os.environ.pop, name, None)
    return undo.close


@contextmanager
def without_needless_ops() -> Iterator[None]:
    """Start DeepSpeed's process group without compiling its shared-memory kernel, which gloo does not need."""
    ops = import_deepspeed().ops.__compatible_ops__
    before = ops.get("deepspeed_shm_comm")
    ops["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        if before is None:
            del ops["deepspeed_shm_comm"]
        else:
            ops["deepspeed_shm_comm"] = before
