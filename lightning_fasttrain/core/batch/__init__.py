"""Read a batch: its size, its leaves, its labels, and how much of it is padding.

From the bottom up: ``host_copies``, ``leaves``, ``padded_axes``, ``padding_share``.
"""

from lightning_fasttrain.core.batch.leaves import (
    LABELS,
    batch_of,
    count_batch,
    count_bytes,
    find_labels,
    is_integer,
    kind_of_batch,
    loss_in,
    with_loss,
)

__all__ = [
    "LABELS",
    "batch_of",
    "count_batch",
    "count_bytes",
    "find_labels",
    "is_integer",
    "kind_of_batch",
    "loss_in",
    "with_loss",
]
