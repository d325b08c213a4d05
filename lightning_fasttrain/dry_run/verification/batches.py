"""Choose the batches of a verification: distinct ones, with as many rows as fit the device, and one for validation."""

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
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.core.messages import explain, format_bytes
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.data.normalizer.trial.sample_rows import rank_rows
from lightning_fasttrain.data.split_batch import pick_rows
from lightning_fasttrain.dry_run.verification.short_run import quietly
from lightning_fasttrain.predict.predict_memory import predict_memory

_SHARE = 0.9  # of the free memory: margin for errors of the prediction
# More bytes than a step takes per byte of weights or of its batch; if that fits, nothing is predicted.
_PER_WEIGHT, _PER_BATCH = 64, 2**16


def take_batches(batch: object, steps: int) -> tuple[list[Any], list[str]]:
    """Return a batch for each step, distinct from one step to the next where possible, and notes about them.

    Raises:
        ValueError: the loader has too few batches.
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
            # The first half of the rows, each twice: the same batch size with other sums and other counts.
            other = pick_rows(batch, [row // 2 for row in range(size)])
            return list(itertools.islice(itertools.cycle([*batches, other]), steps)), []
    return batches * steps, ["All steps see the same batch: it has no rows from which to make another one."]


def take_validation(batch: object, training: object) -> Any:
    """Return the batch for validation: the first of a loader, by default the first training batch."""
    if batch is None:
        return training
    return next(iter(batch)) if isinstance(batch, DataLoader) else batch


def fit_rows(module: L.LightningModule, batches: Sequence[object], device: torch.device) -> int | None:
    """Return how many rows of the largest batch a plain step can process; None for all, or if unknown.

    Args:
        module: the module, which is not changed.
        batches: the batches of the steps.
        device: the device on which they would run, with its current free memory.

    Raises:
        ValueError: not even one row fits.
    """
    free, size = free_bytes(device), max(map(count_rows, batches))
    weights = bytes_of((*module.parameters(), *module.buffers()))
    largest = max(batches, key=count_rows)
    if free is None or size < 2 or _PER_WEIGHT * weights + _PER_BATCH * count_bytes(largest) < free:
        return None
    # The first run is in float32, whatever the dtype of the weights.
    narrowest = min((p.element_size() for p in module.parameters() if p.is_floating_point()), default=4)
    rows, times = size, max(1.0, 4 / narrowest)
    while (nbytes := _predict(module, pick_rows(largest, list(range(rows))), device, times)) is not None:
        if nbytes <= _SHARE * free:
            return None if rows == size else rows
        if rows == 1:
            why = f"it takes {format_bytes(nbytes)} (predicted), and {format_bytes(free)} are free"
            way_out = "Verify a smaller model of the same kind, or pass shorter samples"
            raise ValueError(explain("a plain step of one row", why, way_out))
        rows = max(1, int(rows * min(0.5, _SHARE * free / nbytes)))
    return None


def keep_rows(batches: Sequence[object], rows: int) -> list[Any]:
    """Keep ``rows`` rows of each batch, those that differ most from one another first."""
    kept = []
    for batch in batches:
        size = count_rows(batch)
        if size > rows:
            batch = pick_rows(batch, sorted(rank_rows(batch, size)[:rows]))
        kept.append(batch)
    return kept


def count_rows(batch: object) -> int:
    """Return the number of rows of a batch; 1 if it cannot be split."""
    try:
        return batch_size(batch)
    except ValueError:
        return 1


def _predict(module: L.LightningModule, batch: object, device: torch.device, times: float) -> int | None:
    try:
        with quietly():
            return int(times * predict_memory(module, batch, device=device.type).peak_bytes)
    except Exception:  # errors of the module too, which may need real values
        return None
