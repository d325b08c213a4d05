"""Techniques applied one after another where a batch does not fit one sample at a time either."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from torch import nn

from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.technique import Exactness, Surgery, Technique, apply

_SAVES = (Surgery.CHECKPOINT, Surgery.OFFLOAD)


class FurtherSavings:
    """Techniques that are applied when they are needed, in order, and stay for the rest of the run.

    Args:
        techniques: exact ones that change how activations are stored, and nothing that an optimizer holds.

    Attributes:
        taken: number of techniques in use, or in use when the last run ended.

    Raises:
        TypeError, ValueError: another kind of technique, or one that measures before it decides.
    """

    def __init__(self, techniques: Iterable[Technique]) -> None:
        self.techniques = [_refuse_others(technique) for technique in techniques]
        self.taken = 0
        self._undo: ExitStack | None = None

    def try_on(self, model: nn.Module) -> None:
        """Apply all techniques and undo it, so that errors are raised before training starts."""
        with ExitStack() as undo:
            for technique in self.techniques:
                undo.enter_context(apply(model, [technique]))

    def take_again(self, model: nn.Module) -> None:
        """Apply the techniques that were in use before."""
        for technique in self.techniques[: self.taken]:
            self._apply(technique, model)

    def list_left(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Yield functions that apply the remaining techniques."""
        for technique in self.techniques[self.taken :]:
            yield partial(self._take, technique, model)

    def _take(self, technique: Technique, model: nn.Module) -> None:
        say("Out of memory with single samples: applying %s from now on, and repeating the batch unsplit", technique)
        self._apply(technique, model)
        self.taken += 1

    def _apply(self, technique: Technique, model: nn.Module) -> None:
        self._undo = self._undo or ExitStack()
        self._undo.enter_context(apply(model, [technique]))

    def close(self) -> None:
        """Undo the techniques in use; the next run starts with them."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


def _refuse_others(technique: Technique) -> Technique:
    what, way_out = f"then=[{technique!r}]", "Use ActivationCheckpointing() and ActivationOffload()"
    if not isinstance(technique, Technique):
        raise TypeError(explain(what, f"expected a Technique, got {type(technique).__name__}", way_out))
    if technique.surgery not in _SAVES or technique.exactness is not Exactness.EXACT:
        why = "during a run, only techniques that change nothing but how activations are stored can start"
        raise ValueError(explain(what, why, way_out))
    if getattr(getattr(technique, "policy", None), "measures", False):  # MemoryBudget
        why = "MemoryBudget needs a few complete steps to measure, but this fallback starts inside a step"
        raise ValueError(explain(what, why, "Use ActivationCheckpointing(), or list it among the callbacks"))
    return technique
