"""Wrap data loaders: prefetch batches, replace bad samples, share out batches, and grow batches during training.

From the bottom up: ``device_prefetch``, ``even_epochs``, ``sample_guard``, ``global_batch``, ``growth_schedule``,
``batch_size_warmup``, ``sequence_length_warmup``, ``progressive_resizing``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.loaders.batch_size_warmup import BatchSizeWarmup, grow_windows, scale_rates_
    from lightning_fasttrain.loaders.device_prefetch import DevicePrefetch, prefetch_to_device
    from lightning_fasttrain.loaders.even_epochs import EvenEpochs, even_epochs
    from lightning_fasttrain.loaders.global_batch import GlobalBatch, global_batches
    from lightning_fasttrain.loaders.growth_schedule import Growth
    from lightning_fasttrain.loaders.progressive_resizing import (
        ProgressiveResizing,
        check_image_sizes,
        grow_images,
        resize_images,
    )
    from lightning_fasttrain.loaders.sample_guard import SampleGuard, guard_samples
    from lightning_fasttrain.loaders.sequence_length_warmup import SequenceLengthWarmup, cut_sequences, grow_sequences
    from lightning_fasttrain.technique.duration import Length, read_length

__all__ = [
    "BatchSizeWarmup",
    "DevicePrefetch",
    "EvenEpochs",
    "GlobalBatch",
    "Growth",
    "Length",
    "ProgressiveResizing",
    "SampleGuard",
    "SequenceLengthWarmup",
    "check_image_sizes",
    "cut_sequences",
    "even_epochs",
    "global_batches",
    "grow_images",
    "grow_sequences",
    "grow_windows",
    "guard_samples",
    "prefetch_to_device",
    "read_length",
    "resize_images",
    "scale_rates_",
]
