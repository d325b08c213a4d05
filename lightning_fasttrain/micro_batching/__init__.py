"""Run a batch as micro-batches that add up to the step of the unsplit batch.

``normalizer`` finds what a loss is divided by; where that does not suffice, ``backbone`` splits the model instead.
``out_of_memory`` finds how many micro-batches fit, ``padding`` removes what is not computed with, and
``token_weighted_accumulation`` sums several batches.

From the bottom up: ``out_of_memory``, ``normalizer``, ``padding``, ``step_gradients``, ``micro_batch_forward``,
``find_backbone``, ``micro_batch_logging``, ``micro_batch_graphs``, ``accumulate_gradients``, ``micro_batch_closure``,
``micro_batching``, ``token_weighted_accumulation``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.core.batch.leaves import split_batch
    from lightning_fasttrain.micro_batching.accumulate_gradients import accumulate_gradients, accumulate_window
    from lightning_fasttrain.micro_batching.micro_batch_forward import micro_batch_forward_
    from lightning_fasttrain.micro_batching.micro_batching import MicroBatching
    from lightning_fasttrain.micro_batching.normalizer.count_targets import count_next_tokens, count_targets
    from lightning_fasttrain.micro_batching.normalizer.find_split import find_count
    from lightning_fasttrain.micro_batching.out_of_memory import split_until_it_fits
    from lightning_fasttrain.micro_batching.padding.pack import PackedDocuments, check_documents, pack
    from lightning_fasttrain.micro_batching.padding.packed_forward import remove_padding_
    from lightning_fasttrain.micro_batching.padding.padding_free import PaddingFree, check_padding_free
    from lightning_fasttrain.micro_batching.padding.trim_search import TrimPadding
    from lightning_fasttrain.micro_batching.token_weighted_accumulation import TokenWeightedAccumulation
    from lightning_fasttrain.trial.read_normalizers import Normalizers, read_normalizers

__all__ = [
    "MicroBatching",
    "Normalizers",
    "PackedDocuments",
    "PaddingFree",
    "TokenWeightedAccumulation",
    "TrimPadding",
    "accumulate_gradients",
    "accumulate_window",
    "check_documents",
    "check_padding_free",
    "count_next_tokens",
    "count_targets",
    "find_count",
    "micro_batch_forward_",
    "pack",
    "read_normalizers",
    "remove_padding_",
    "split_batch",
    "split_until_it_fits",
]
