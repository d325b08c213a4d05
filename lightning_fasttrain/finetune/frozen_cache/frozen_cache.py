"""Compute the outputs of a frozen part of a model once for each sample, and read them afterwards."""

import os
from pathlib import Path
from typing import ClassVar

import lightning as L
from torch import nn

from lightning_fasttrain.core.atomic_write import refuse_unwritable
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import Undo, wrappers_in, wrappers_on
from lightning_fasttrain.finetune.frozen_cache.cached_forward import CachedForward, why_not_frozen
from lightning_fasttrain.finetune.selection.gradual_unfreezing import GradualUnfreezing
from lightning_fasttrain.technique import Conflict, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep


@check_arguments
def cache_frozen_(model: nn.Module, part: str, folder: str | os.PathLike[str] | None = None) -> CachedForward:
    """Keep the outputs of a frozen part of ``model`` by sample, in place, and read them when a sample comes again.

    Samples are distinguished by a hash of what the part is called with, row by row, so neither the order of batches,
    their size, workers, micro-batches nor a resumed run matter, and an input that is augmented differently is another
    sample, which is computed. The hash of weights, settings, autocast and device belongs to it as well. Rows of a batch
    that are known are read, the others are computed together. Where a batch is read or computed as a whole, as with
    equal batch sizes, the values are those of the plain step bit for bit on most kernels; a row that was computed in a
    batch of another size is equal to rounding.

    In the first call the part is examined: the same batch twice with other random numbers, and without its last row. A
    text that is padded to another length is another sample, so pad to a fixed one. Each call waits once for the device,
    as the hashes are needed on the host. Hooks inside the part see only what is computed.

    Args:
        model: any module.
        part: qualified name of the part, such as ``"backbone"`` or ``"vae.encoder"``; it is called with tensors, and
            returns tensors with one row for each sample.
        folder: where outputs are kept, in safetensors files, for later runs and for other processes; None keeps them
            in host memory.

    Returns:
        The replacement of the part's ``forward``: with ``hits`` and ``misses``, ``flush()``, and ``undo()``.

    Raises:
        ValueError: there is no such part, or it has parameters that train; in its first call: its inputs require a
            gradient, it draws random numbers, or a sample's output depends on other samples.
        OSError: ``folder`` cannot be written to.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = net[0].requires_grad_(False)
        >>> cached = cache_frozen_(net, "0")
        >>> x = torch.randn(3, 4)
        >>> for _ in range(2):
        ...     net(x).sum().backward()
        >>> cached.misses, cached.hits
        (3, 3)

    Source:
        The precomputed features of linear probing and the cached latents of diffusion trainers, such as
        ``--cache_latents`` of Hugging Face's diffusers examples, which are keyed by file and refuse augmentation.
    """
    module = find_module(model, part, "part")
    if existing := next(wrappers_on(module, CachedForward), None):
        return existing
    if reason := why_not_frozen(module):
        raise ValueError(explain(f"FrozenCache of '{part}' ({type(module).__name__})", *reason))
    if is_sharded(module):
        why = "its weights are sharded, so no rank can tell whether they have changed"
        raise ValueError(explain(f"FrozenCache of '{part}'", why, "Leave the part out of the sharding"))
    if folder is not None:
        refuse_unwritable(folder, f"FrozenCache(folder={os.fspath(folder)!r})")
    cached = CachedForward(module, part, None if folder is None else Path(folder))
    cached.install()
    return cached


class FrozenCache(Technique):
    """Compute the outputs of a frozen part once for each sample; see :func:`cache_frozen_`.

    Acts after every other operation on the model, so that adapters and compiled code belong to the part; undone at
    teardown. Files are completed at the end of each epoch, when the outputs of other processes are found as well. A
    warning tells that no input of an epoch had been seen before, as with random augmentation; from then on nothing more
    is kept.

    Args:
        part: as for the function.
        folder: as for the function.

    Raises:
        ValueError: in ``fit``: as for the function.

    Example:
        >>> import lightning_fasttrain as ft
        >>> probing = ft.finetune.FrozenCache("backbone")
        >>> latents = ft.finetune.FrozenCache("vae.encoder", folder="latents")

    Source:
        See :func:`cache_frozen_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.UNPAD
    effect: ClassVar[str] = "outputs of a frozen part are computed once for each sample, and read in later epochs"
    when: ClassVar[str] = (
        "a frozen encoder or backbone takes much of the step, and the same samples come in several epochs; not with "
        "random augmentation before it"
    )
    in_a_loop: ClassVar[str] = "finetune.cache_frozen_(model, part)"
    predicted: ClassVar[bool] = True

    def __init__(self, part: str, folder: str | os.PathLike[str] | None = None) -> None:
        self.part = part
        self.folder = folder
        self._cached: CachedForward | None = None
        self._before = (0, 0)

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "it unfreezes the part in the course of the run, and its outputs change from then on"
        return (Conflict(GradualUnfreezing, why, "Use FrozenCache for the epochs in which the part is frozen"),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.trains == 1:
            return "no parameter is frozen"
        return None

    def apply(self, model: nn.Module) -> Undo:
        already = set(wrappers_in(model, CachedForward))
        self._cached = cached = cache_frozen_(model, self.part, self.folder)
        self._before = (cached.hits, cached.misses)
        return (lambda: None) if cached in already else cached.undo

    def predict(self, step: PredictedStep) -> None:
        step.notes.append("Outputs that FrozenCache keeps in host memory are not counted.")

    def describe_effect(self, model: nn.Module) -> str:
        if not any(wrappers_in(model, CachedForward)):
            return ""
        where = "host memory"
        if self.folder is not None:
            where = f"'{os.fspath(self.folder)}'"
        return f"outputs of '{self.part}' are kept in {where}"

    def outcome(self, model: nn.Module) -> str:
        cached = self._cached
        if cached is None or not cached.hits + cached.misses:
            return ""
        return f"{cached.hits:,} outputs of '{self.part}' were read, {cached.misses:,} computed"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if self._cached is None or self._cached.ran:
            return None
        return f"'{self.part}' was not called, or inside of compiled code", "Name a part that training_step calls"

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: no batch of the epoch has been computed; other processes may have written files."""
        if self._cached is not None:
            self._cached.flush()
            self._before = (self._cached.hits, self._cached.misses)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: all samples of the epoch have been seen, and later epochs show them again."""
        cached = self._cached
        if cached is None:
            return
        cached.flush()
        hits, misses = cached.hits - self._before[0], cached.misses - self._before[1]
        if trainer.current_epoch > 0 and self._before[1] and misses and not hits and cached.is_keeping:
            cached.is_keeping = False
            why = f"none of the {misses:,} inputs of this epoch had been seen before, so they are augmented anew"
            warn(explain(f"FrozenCache of '{self.part}'", why, "Remove the augmentation, or FrozenCache"))
