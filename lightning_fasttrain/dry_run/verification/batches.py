"""Which batches a verification runs: some that differ, as many rows of them as fit the device, and one to validate."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.core.messages import explain, format_bytes
from lightning_fasttrain.data.normalizer.trial.sample_rows import rank_rows
from lightning_fasttrain.data.split_batch import batch_size, pick_rows
from lightning_fasttrain.dry_run.verification.short_run import quietly
from lightning_fasttrain.predict.predict_memory import predict_memory

_SHARE = 0.9  # of the free memory, as far as a prediction is trusted
# More than a step takes for each byte of weights or of its batch; where that fits, nothing is predicted.
_PER_WEIGHT, _PER_BATCH = 64, 2**16


def take_batches(batch: Any, steps: int) -> tuple[list[Any], list[str]]:
    """A batch for each step, which differ from one step to the next where they can, and notes on it.

    Raises:
        ValueError: a loader has too few.
    """
    if isinstance(batch, DataLoader):
        batches = list(itertools.islice(batch, steps))
        if len(batches) < steps:
            why = f"the loader has {len(batches)} batches"
            raise ValueError(explain(f"steps={steps}", why, f"Use steps={max(1, len(batches))}"))
        return batches, []
    batches = [apply_to_collection(batch, Tensor, torch.clone)]
    if steps == 1:
        return batches, []
    with suppress(ValueError):  # a batch without rows
        size = batch_size(batch)
        if size > 1:
            # The first half of the rows, each twice: as large as the batch, with other sums and other counts.
            other = pick_rows(batch, [row // 2 for row in range(size)])
            return [(batches[0], other)[step % 2] for step in range(steps)], []
    return batches * steps, ["All steps see the same batch: it has no rows to make another one of."]


def take_validation(batch: Any, training: Any) -> Any:
    """The batch that is validated: the first of a loader, and by default the first that is trained on."""
    if batch is None:
        return training
    return next(iter(batch)) if isinstance(batch, DataLoader) else batch


def fit_rows(module: L.LightningModule, batches: Sequence[Any], device: torch.device) -> int | None:
    """How many rows of the largest batch a plain step can take on a device; None for all, or where nothing is known.

    Args:
        module: left as it is.
        batches: those of the steps.
        device: where they would run, with the memory that is free there.

    Raises:
        ValueError: not even one row fits.
    """
    free, size = free_bytes(device), max(map(count_rows, batches))
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    largest = max(batches, key=count_rows)
    if free is None or size < 2 or _PER_WEIGHT * weights + _PER_BATCH * count_bytes(largest) < free:
        return None
    # The first of all runs is in float32, whatever the weights are.
    narrowest = min((p.element_size() for p in module.parameters() if p.is_floating_point()), default=4)
    rows, times = size, max(1.0, 4 / narrowest)
    while (nbytes := _predict(module, pick_rows(largest, list(range(rows))), device, times)) is not None:
        if nbytes <= _SHARE * free:
            return None if rows == size else rows
        if rows == 1:
            why = f"it takes {format_bytes(nbytes)}, as predicted, and {format_bytes(free)} are free"
            way_out = "Verify a smaller model of the same kind, or give shorter samples"
            raise ValueError(explain("a plain step of one row", why, way_out))
        rows = max(1, int(rows * min(0.5, _SHARE * free / nbytes)))
    return None


def keep_rows(batches: Sequence[Any], rows: int) -> list[Any]:
    """So many rows of each batch, those first that differ most from one another."""
    kept = []
    for batch in batches:
        size = count_rows(batch)
        kept.append(batch if size <= rows else pick_rows(batch, sorted(rank_rows(batch, size)[:rows])))
    return kept


def count_rows(batch: Any) -> int:
    """The rows of a batch; 1 of one that cannot be cut."""
    try:
        return batch_size(batch)
    except ValueError:
        return 1


def _predict(module: L.LightningModule, batch: Any, device: torch.device, times: float) -> int | None:
    try:
        with quietly():
            return int(times * predict_memory(module, batch, device=device.type).peak_bytes)
    except Exception:  # of the module's own too, which may need numbers
        return None
