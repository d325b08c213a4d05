"""Techniques that change the batch: how it is split, ordered and moved to the device.

``normalizer`` finds what a loss is divided by; where that does not suffice, ``trunk`` splits the model instead.
``out_of_memory`` finds how many micro-batches fit, ``accumulation`` sums several batches, ``warmup`` grows batch sizes,
sequence lengths and image sizes, and ``loaders`` wraps the data loaders.

From the bottom up: ``out_of_memory``, ``loaders``, ``normalizer``, ``padding``, ``step_gradients``,
``trunk``, ``accumulate_gradients``, ``closure``, ``micro_batching``, ``accumulation``, ``warmup``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.batch.leaves import split_batch
    from lightning_fasttrain.data.accumulate_gradients import accumulate_gradients, accumulate_window
    from lightning_fasttrain.data.accumulation.global_batch import GlobalBatch
    from lightning_fasttrain.data.accumulation.token_weighted_accumulation import TokenWeightedAccumulation
    from lightning_fasttrain.data.loaders.device_prefetch import DevicePrefetch, prefetch_to_device
    from lightning_fasttrain.data.loaders.even_epochs import EvenEpochs, even_epochs
    from lightning_fasttrain.data.loaders.global_batches import global_batches
    from lightning_fasttrain.data.loaders.sample_guard import SampleGuard, guard_samples
    from lightning_fasttrain.data.micro_batching import MicroBatching
    from lightning_fasttrain.data.normalizer.count_targets import count_next_tokens, count_targets
    from lightning_fasttrain.data.normalizer.find_count import find_count
    from lightning_fasttrain.data.out_of_memory import split_until_it_fits
    from lightning_fasttrain.data.padding.pack import PackedDocuments, check_documents, pack
    from lightning_fasttrain.data.padding.packed_forward import remove_padding_
    from lightning_fasttrain.data.padding.padding_free import PaddingFree, check_padding_free
    from lightning_fasttrain.data.padding.trim_search import TrimPadding
    from lightning_fasttrain.data.trunk.micro_batch_forward import micro_batch_forward_
    from lightning_fasttrain.data.warmup.batch_size_warmup import BatchSizeWarmup, grow_windows, scale_rates_
    from lightning_fasttrain.data.warmup.growth_schedule import Growth
    from lightning_fasttrain.data.warmup.progressive_resizing import (
        ProgressiveResizing,
        check_image_sizes,
        grow_images,
        resize_images,
    )
    from lightning_fasttrain.data.warmup.sequence_length_warmup import (
        SequenceLengthWarmup,
        cut_sequences,
        grow_sequences,
    )
    from lightning_fasttrain.technique.duration import Length, read_length
    from lightning_fasttrain.trial.read_normalizers import Normalizers, read_normalizers

__all__ = [
    "BatchSizeWarmup",
    "DevicePrefetch",
    "EvenEpochs",
    "GlobalBatch",
    "Growth",
    "Length",
    "MicroBatching",
    "Normalizers",
    "PackedDocuments",
    "PaddingFree",
    "ProgressiveResizing",
    "SampleGuard",
    "SequenceLengthWarmup",
    "TokenWeightedAccumulation",
    "TrimPadding",
    "accumulate_gradients",
    "accumulate_window",
    "check_documents",
    "check_image_sizes",
    "check_padding_free",
    "count_next_tokens",
    "count_targets",
    "cut_sequences",
    "even_epochs",
    "find_count",
    "global_batches",
    "grow_images",
    "grow_sequences",
    "grow_windows",
    "guard_samples",
    "micro_batch_forward_",
    "pack",
    "prefetch_to_device",
    "read_length",
    "read_normalizers",
    "remove_padding_",
    "resize_images",
    "scale_rates_",
    "split_batch",
    "split_until_it_fits",
]
