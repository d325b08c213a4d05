"""When a step runs out of memory, restore the state from before it and repeat the batch in smaller micro-batches."""

import gc
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.state.restore import remember, remember_gradients
from lightning_fasttrain.data.out_of_memory.rank_vote import Agreement, Outcome, Verdict

Result = TypeVar("Result")
_WAYS_OUT = (
    "Next: then=[ActivationCheckpointing(), ActivationOffload()] if not in use yet, shorter samples, "
    "FusedLossHead, a lower precision, or a smaller model"
)
_MIB = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 2.0**10}


@check_arguments
def split_until_it_fits(
    attempt: Callable[[int], Result],
    model: nn.Module,
    n: PositiveInt,
    most: PositiveInt,
    *,
    then: Iterable[Callable[[], object]] = (),
    agree: Agreement | None = None,
) -> tuple[Result, int]:
    """Run ``attempt(n)``; whenever it runs out of memory, restore the state and run it with twice as many
    micro-batches.

    Restored are the random states (torch, CUDA, Python, NumPy), the model's buffers (BatchNorm), its metrics, the plain
    values and lists among its attributes, and its gradients, so the result is that of a run which had the larger ``n``
    from the start. Gradients that exist beforehand, within an accumulation window, are copied for this. Other side
    effects of the attempt are not undone.

    Args:
        attempt: runs forward and backward of one batch in the given number of micro-batches.
        model: whose buffers, metrics and gradients the attempt changes.
        n: number of micro-batches of the first attempt.
        most: the largest useful number: the samples in the batch.
        then: fallbacks, applied one after another, where single samples do not fit either. After each the search
            restarts with one micro-batch, since the memory it saves may be enough for larger ones.
        agree: on several ranks, how they exchange outcomes, so that all continue in the same way. The attempt must not
            wait for other ranks, so gradients must be synchronized afterwards.

    Returns:
        The result of the attempt, and the number of micro-batches that fitted.

    Raises:
        torch.OutOfMemoryError: single samples do not fit either, on this rank or another.
        RuntimeError: another rank failed otherwise, or has exited.

    Example:
        >>> def attempt(n):
        ...     if n < 4:
        ...         raise torch.OutOfMemoryError("too large")
        ...     return "done"
        >>> split_until_it_fits(attempt, nn.Linear(1, 1), n=1, most=8)
        ('done', 4)

    Source:
        Composer's ``device_train_microbatch_size='auto'`` halves likewise, but restores only gradients.
    """
    agree = agree or Agreement()
    measures = list(then)
    restore, restore_gradients = remember([model]), remember_gradients(model)
    while True:
        try:
            result = attempt(n)
        except torch.OutOfMemoryError as error:
            worst = agree(Outcome.TOO_LARGE if n < most else Outcome.TOO_LARGE_IN_ONES, most)
            if worst.outcome is Outcome.FAILED or (worst.outcome is Outcome.TOO_LARGE_IN_ONES and not measures):
                error.add_note(_note(error, n, most))
                raise
        except BaseException:  # including KeyboardInterrupt: the others wait for an answer
            agree.give_up()
            raise
        else:
            worst = agree(Outcome.FITS, most)
            if worst.outcome is Outcome.FITS:
                return result, n
            del result  # the next attempt needs its memory
            _end_with(worst, n, bool(measures))
        # Outside the handler, since the error's traceback holds the activations of the failed attempt.
        restore()
        restore_gradients()
        gc.collect()  # frees tensors that lie in cycles of references
        torch.cuda.empty_cache()
        if worst.outcome is Outcome.TOO_LARGE_IN_ONES:
            measures.pop(0)()
            n = 1
        else:
            where = f" on rank {worst.rank}" if agree.has_others else ""
            say("Out of memory with %d micro-batches%s: repeating the batch with %d", n, where, min(2 * n, worst.most))
            n = min(2 * n, worst.most)


def _end_with(worst: Verdict, n: int, has_more: bool) -> None:
    """Raise on a rank whose attempt fitted, if another rank cannot continue."""
    if worst.outcome is Outcome.FAILED:
        way_out = "Look at the first error in the output of that rank"
        raise RuntimeError(explain(f"rank {worst.rank} failed in this step", "no rank can continue alone", way_out))
    if worst.outcome is Outcome.TOO_LARGE_IN_ONES and not has_more:
        why = "its samples do not fit one at a time, and no rank can continue alone"
        raise torch.OutOfMemoryError(explain(f"rank {worst.rank}, with {n} micro-batches", why, _WAYS_OUT))


def _note(error: torch.OutOfMemoryError, n: int, most: int) -> str:
    of_one = " of one sample each" if n >= most else ""
    return f"Out of memory with {n} micro-batches{of_one}{_shortfall(error)}. {_WAYS_OUT}."


def _shortfall(error: torch.OutOfMemoryError) -> str:
    """Describe how much memory was missing, if the allocator reports it.

    Example:
        >>> said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB of which 512.00 MiB is free."
        >>> _shortfall(torch.OutOfMemoryError(said))
        ': at least 1536 MiB more are needed'
    """
    number = r"([\d.]+) (bytes|KiB|MiB|GiB)"
    told = re.search(rf"allocate {number}.*of which {number} is free", f"{error}", re.DOTALL)
    if told is None:
        return ""
    asked, unit, free, unit_of_free = told.groups()
    missing = float(asked) * _MIB[unit] - float(free) * _MIB[unit_of_free]
    return f": at least {max(missing, 1.0):.0f} MiB more are needed"
