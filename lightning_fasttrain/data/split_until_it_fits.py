"""When a step runs out of memory, the same batch again in smaller parts, as if the first try had never been."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lightning_fasttrain._messages import say
from lightning_fasttrain.data.trial._put_back import remember, remember_gradients

Result = TypeVar("Result")


def split_until_it_fits(attempt: Callable[[int], Result], model: nn.Module, n: int, most: int) -> tuple[Result, int]:
    """Run ``attempt(n)``; each time it runs out of memory, put everything back and run it with twice as many parts.

    Put back are the random states (torch, CUDA, Python, NumPy), the model's buffers (BatchNorm), its metrics, the plain
    values and lists among its attributes, and its gradients, so the result is that of a run which had the larger ``n``
    from the start. Gradients that are there beforehand, within an accumulation window, are copied for it. What the
    attempt does elsewhere is not undone.

    Args:
        attempt: runs forward and backward of one batch in the given number of parts.
        model: whose buffers, metrics and gradients the attempt changes.
        n: parts of the first attempt.
        most: the largest useful number: the samples in the batch.

    Returns:
        What the attempt returned, and the number of parts that fitted.

    Raises:
        torch.OutOfMemoryError: it does not fit one sample at a time either.

    Example:
        >>> def attempt(n):
        ...     if n < 4:
        ...         raise torch.OutOfMemoryError("too large")
        ...     return "done"
        >>> split_until_it_fits(attempt, nn.Linear(1, 1), n=1, most=8)
        ('done', 4)

    Source:
        Composer's ``device_train_microbatch_size='auto'`` halves likewise; it puts back nothing but gradients.
    """
    put_back, put_back_gradients = remember([model]), remember_gradients(model)
    while True:
        try:
            return attempt(n), n
        except torch.OutOfMemoryError as error:
            if n >= most:
                error.add_note(
                    f"Out of memory with {n} micro-batches of one sample each. Next: ActivationCheckpointing, a lower "
                    "precision, or a smaller model."
                )
                raise
        # Outside the handler: the error's traceback holds the activations of the failed attempt.
        put_back()
        put_back_gradients()
        gc.collect()
        torch.cuda.empty_cache()
        say("Out of memory with %d micro-batches: the same batch again with %d", n, min(2 * n, most))
        n = min(2 * n, most)
