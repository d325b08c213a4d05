"""Suggest changes: workers of the loader, batches without padding, and a smaller optimizer state."""

import itertools
import math
import os
import time
from collections.abc import Sized
from contextlib import suppress

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader

from lightning_fasttrain.core.batch.padding_share import BATCHES, measure_padding
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import format_bytes
from lightning_fasttrain.dry_run.rehearsal.peek_batches import combine, reading_ahead
from lightning_fasttrain.dry_run.verification.short_run import copy_module, quietly
from lightning_fasttrain.optim import build_optimizer, optimizer_state_bytes

_LEANER = "adamw8bit"
_BATCHES, _SECONDS = 8, 5.0


def suggest_workers(loader: object, step_ms: float) -> str:
    """Measure the time to load a batch in one process, and suggest how many workers hide it behind the steps.

    The first samples are read and collated without the loader's own sampler, whose state does not change.

    Args:
        loader: the training loader; only a ``DataLoader`` is measured.
        step_ms: time of a step.

    Returns:
        A sentence; "" if there is nothing to change.

    Example:
        >>> suggest_workers(DataLoader(range(100), batch_size=4), step_ms=50.0)
        ''
    """
    if not isinstance(loader, DataLoader):
        return ""
    batch_ms = _measure(loader)
    if batch_ms is None:
        return ""
    needed = 0
    if batch_ms > 0.05 * step_ms:  # a smaller share would not be noticed
        needed = math.ceil(batch_ms / step_ms)
    workers, cores = min(needed, os.cpu_count() or 1), os.cpu_count() or 1
    took = f"A batch takes the loader {batch_ms:,.1f} ms and a step {step_ms:,.1f} ms"
    if workers > loader.num_workers:
        hides = "hides it" if needed <= cores else f"hides a part of it; {needed} would hide all"
        return f"{took}: DataLoader(num_workers={workers}, persistent_workers=True) {hides}."
    if needed > cores:
        return f"{took}: more than {loader.num_workers} workers on {cores} cores can hide. Prepare samples ahead."
    return ""


def suggest_trimming(batch: object, loader: object = None) -> str:
    """Suggest micro-batches without padding if much of a few batches seems to be padding.

    Args:
        batch: one batch of the loader.
        loader: the loader, of which a few batches are read ahead; None to look at the one batch alone.

    Returns:
        A sentence with the share of padding, and of the tokens that would be left; "" if there is little padding.

    Example:
        >>> import torch
        >>> ids = torch.tensor([[5, 6] + [0] * 62, [7] * 64, *[[8] + [0] * 63] * 14])
        >>> batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        >>> print(suggest_trimming(batch, DataLoader([batch] * 9, batch_size=None)))
        92% of the tokens of 4 batches seem to be padding (['attention_mask'] = 0): MicroBatching(8) would run ×0.18 ...
    """
    if loader is not None:
        with suppress(Exception), reading_ahead(combine(loader)) as batches:  # such as a loader that cannot start over
            return str(measure_padding(itertools.islice(batches, BATCHES)))
    return str(measure_padding([batch]))


def suggest_leaner_optimizer(module: L.LightningModule) -> str:
    """Suggest an 8-bit optimizer if it makes the state of Adam or AdamW smaller.

    Args:
        module: the model, of which a copy configures its optimizers.

    Returns:
        A sentence; "" for another optimizer, or if the state would not be smaller.
    """
    copied = copy_module(module)
    with quietly(), isolate_rng():
        optimizers, _ = configured_optimizers(copied)
        if not optimizers or type(optimizers[0]) not in (Adam, AdamW):  # a subclass may keep other state
            return ""
        now = optimizer_state_bytes(optimizers[0])
        try:
            leaner = optimizer_state_bytes(build_optimizer(copied, _LEANER))
        except ModuleNotFoundError:
            return ""
    if leaner > 0.9 * now:
        return ""
    made = f"ft.build_optimizer(self, {_LEANER!r}, ...)"
    name = type(optimizers[0]).__name__
    return f"{name}'s state takes {format_bytes(now)}; {made} keeps it in {format_bytes(leaner)}, and rounds it."


def _measure(loader: DataLoader[object]) -> float | None:
    """Return the milliseconds to load a batch in one process; None if it cannot be measured."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None or not isinstance(loader.dataset, Sized):
        return None
    dataset, count = loader.dataset, len(loader.dataset)
    times: list[float] = []
    with isolate_rng():
        for first in range(0, min(_BATCHES * size, count), size):
            began = time.perf_counter()
            indices = range(first, min(first + size, count))
            loader.collate_fn([dataset[index] for index in indices])
            times.append(1e3 * (time.perf_counter() - began))
            if sum(times) > 1e3 * _SECONDS:
                break
    # The median, since the first sample may open files.
    return sorted(times)[len(times) // 2] if times else None
