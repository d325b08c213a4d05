"""Write checkpoints that are never half-written, check and find them, and resume from the exact batch.

From the bottom up: ``checkpoint_folder``, ``remote_checkpoint``, ``newest_checkpoint``, ``background_save``,
``atomic_checkpoints``, ``loader_state``, ``run_fingerprint``, ``resume_state``, ``exact_resume``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.checkpoint.atomic_checkpoints import (
        AtomicCheckpointIO,
        AtomicCheckpoints,
        BackgroundCheckpointIO,
    )
    from lightning_fasttrain.checkpoint.checkpoint_folder import verify_checkpoint
    from lightning_fasttrain.checkpoint.exact_resume import ExactResume
    from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader, resumable
    from lightning_fasttrain.checkpoint.newest_checkpoint import newest_checkpoint
    from lightning_fasttrain.checkpoint.remote_checkpoint import newest_remote_checkpoint
    from lightning_fasttrain.core.safe_load import CorruptCheckpoint
    from lightning_fasttrain.core.state.rng import random_state, set_random_state

__all__ = [
    "AtomicCheckpointIO",
    "AtomicCheckpoints",
    "BackgroundCheckpointIO",
    "CorruptCheckpoint",
    "ExactResume",
    "ResumableLoader",
    "newest_checkpoint",
    "newest_remote_checkpoint",
    "random_state",
    "resumable",
    "set_random_state",
    "verify_checkpoint",
]
