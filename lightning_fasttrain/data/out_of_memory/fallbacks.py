"""What is done, one after another, where a batch does not fit one sample at a time either."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from torch import nn

from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.technique import Exactness, Surgery, Technique, apply

_SAVES = (Surgery.CHECKPOINT, Surgery.OFFLOAD)


class FurtherSavings:
    """Techniques that wait until they are needed, in their order; those that were stay for the rest of the run.

    Args:
        techniques: exact ones that change how activations are kept, and nothing that an optimizer holds.

    Attributes:
        taken: how many are in use, or were when the last run ended.

    Raises:
        TypeError, ValueError: another kind of technique, or one that measures before it decides.
    """

    def __init__(self, techniques: Iterable[Technique]) -> None:
        self.techniques = [_refuse_others(technique) for technique in techniques]
        self.taken = 0
        self._undo: ExitStack | None = None

    def try_on(self, model: nn.Module) -> None:
        """Apply all and undo it, so that what cannot be applied is an error now and not at step one thousand."""
        with ExitStack() as undo:
            for technique in self.techniques:
                undo.enter_context(apply(model, [technique]))

    def take_again(self, model: nn.Module) -> None:
        """Those that were in use before."""
        for technique in self.techniques[: self.taken]:
            self._apply(technique, model)

    def list_left(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """What is still to be tried."""
        for technique in self.techniques[self.taken :]:
            yield partial(self._take, technique, model)

    def _take(self, technique: Technique, model: nn.Module) -> None:
        say("Out of memory one sample at a time: from here on with %s, and the same batch again in one", technique)
        self._apply(technique, model)
        self.taken += 1

    def _apply(self, technique: Technique, model: nn.Module) -> None:
        self._undo = self._undo or ExitStack()
        self._undo.enter_context(apply(model, [technique]))

    def close(self) -> None:
        """Undo what is in use; the next run begins with it."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


def _refuse_others(technique: Technique) -> Technique:
    what, way_out = f"then=[{technique!r}]", "Use ActivationCheckpointing() and ActivationOffload()"
    if not isinstance(technique, Technique):
        raise TypeError(explain(what, "it is no technique", way_out))
    if technique.surgery not in _SAVES or technique.exactness is not Exactness.EXACT:
        why = "in the middle of a run only what changes nothing but how activations are kept can begin"
        raise ValueError(explain(what, why, way_out))
    if getattr(getattr(technique, "policy", None), "measures", False):  # MemoryBudget
        why = "its policy measures whole steps before it decides, and is needed inside of one"
        raise ValueError(explain(what, why, "Use ActivationCheckpointing(), or list it among the callbacks"))
    return technique
