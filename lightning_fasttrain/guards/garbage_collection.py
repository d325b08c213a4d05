"""Spare Python's garbage collector the objects that a run keeps until its end."""

import gc
from collections.abc import Mapping
from typing import ClassVar

import lightning as L
from torch import nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Technique

_FULL = 2  # the oldest generation


@check_arguments
def freeze_survivors(collections: PositiveInt = 3) -> Undo:
    """Exclude the objects that survive the next full garbage collections from all later ones.

    A full collection goes through every object that Python knows. Torch, Lightning and compiled code are half a
    million objects, which takes 0.2 s or more, once in some dozens of steps. Meanwhile nothing is launched, and the
    other ranks of a job wait. These objects live until the end of the run, so looking at them once is enough. What
    later steps leave behind is collected as before, and objects without reference cycles are freed at once in any case.

    Args:
        collections: number of full collections whose survivors are excluded. The first of a run sees what was
            imported, later ones what compiled code and the first validation have left. There are not more, so that an
            object of a reference cycle that ends later cannot be kept again and again.

    Returns:
        How to include all objects again. It does nothing if some were excluded before, by other code.

    Raises:
        TypeError, ValueError: ``collections`` is not an integer of at least 1.

    Example:
        >>> import gc
        >>> before, undo = gc.get_freeze_count(), freeze_survivors()
        >>> _ = gc.collect()  # Python's own comes after some steps
        >>> gc.get_freeze_count() > before, undo()
        (True, None)

    Source:
        ``gc.freeze``, https://docs.python.org/3/library/gc.html#gc.freeze. torchtitan's ``GarbageCollection`` collects
        at fixed steps instead, on all ranks at once.
    """
    left, are_ours = collections, gc.get_freeze_count() == 0

    def freeze(phase: str, info: Mapping[str, int]) -> None:
        nonlocal left
        if phase == "stop" and info["generation"] == _FULL and left > 0:
            left -= 1
            gc.freeze()

    def undo() -> None:
        gc.callbacks.remove(freeze)
        if are_ours:
            gc.unfreeze()

    gc.callbacks.append(freeze)
    return undo


class GarbageCollection(Technique):
    """Spare Python's garbage collector the objects that a run keeps; see :func:`freeze_survivors`.

    Acts from ``setup`` to teardown, in every entry point of the Trainer, without a hook of its own in a step.

    Args:
        collections: as for :func:`freeze_survivors`.

    Raises:
        TypeError, ValueError: ``collections`` is not an integer of at least 1.

    Example:
        >>> fewer_pauses = GarbageCollection()

    Source:
        See :func:`freeze_survivors`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "full garbage collections of Python, a pause of 0.2 s or more, skip what lives on anyway"
    when: ClassVar[str] = "steps take less than a few hundred ms, or many ranks wait for each other"
    in_a_loop: ClassVar[str] = "guards.freeze_survivors()"
    predicted: ClassVar[bool] = True

    def __init__(self, collections: PositiveInt = 3) -> None:
        self.collections = collections

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        return freeze_survivors(self.collections)

    def outcome(self, model: nn.Module) -> str:
        frozen = gc.get_freeze_count()
        return f"{frozen:,} objects were left out of collections" if frozen else ""
