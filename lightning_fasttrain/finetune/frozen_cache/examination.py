"""Find out, on the first batch, whether the outputs of a frozen module can be kept and used again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import list_some
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.finetune.frozen_cache.content_keys import is_cut
from lightning_fasttrain.finetune.selection.qualified_names import first_tensor, list_trainable


def why_not_frozen(module: nn.Module) -> tuple[str, str] | None:
    """Return why outputs of ``module`` cannot be kept, as its parameters train, and what to do; None if they can."""
    trainable = list_trainable(module)
    if not trainable:
        return None
    why = f"{len(trainable)} of its parameters train ({list_some(trainable)}), so its outputs change"
    return why, "Freeze it: lightning_fasttrain.finetune.freeze_(part), before the optimizer is created"


def why_not_repeatable(
    module: nn.Module, run: Callable[[Sequence[int] | None], object], output: object, rows: int
) -> tuple[str, str] | None:
    """Return why the output of a row is not the same at each call, and what to do; None if it is.

    Args:
        module: the module.
        run: rows to run it on, None for all → its output.
        output: its output for all rows, at the call before.
        rows: number of rows.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    to_eval = "Call .eval() on it, also where the model's train() is called: freeze_ keeps BatchNorm in eval mode"
    if norms:
        return f"BatchNorm normalizes by the batch in training mode ({list_some(norms)})", to_eval
    leaves = tree_leaves(output)
    if not any(is_cut(leaf, rows) for leaf in leaves):
        return "it returns no tensor with a row for each sample", "Name the module inside that does, with part="
    odd = [leaf for leaf in leaves if not (leaf is None or is_cut(leaf, rows))]
    if odd:
        kind = type(odd[0]).__name__
        return f"it returns a {kind} that has no row for each sample", "Name a module inside that returns tensors"
    with keep_random_state():  # the generators are no longer where they were before the first run, if it draws
        before = _generators(leaves)
        again = tree_leaves(run(None))
        drew = not all(map(torch.equal, before, _generators(leaves)))
    if drew or not _are_equal(leaves, again):
        return "it draws random numbers: dropout in training mode, or noise", to_eval
    if rows > 1 and not are_close(leaves, tree_leaves(run(range(rows - 1)))):
        return "the output of a sample depends on the other samples of its batch", "Name a part in which it does not"
    return None


def _generators(leaves: Sequence[object]) -> list[Tensor]:
    states, device = [torch.get_rng_state()], first_tensor(leaves).device
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _are_equal(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, Tensor) and not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def are_close(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the rows in ``others``, which may be fewer, agree up to the rounding of other batch sizes.

    Example:
        >>> x = torch.randn(3, 2)
        >>> are_close([x], [x[:2] * 1.0001]), are_close([x], [x[:2] * 2]), are_close([x], [x[:, :1]])
        (True, False, False)
    """
    if len(leaves) != len(others):
        return False
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, Tensor):
            continue
        if one.shape[1:] != other.shape[1:]:
            return False
        close = 1e-3 if one.dtype in (torch.float32, torch.float64) else 0.02
        first, second = one[: len(other)].double(), other.double()
        if first.numel() and (first - second).abs().amax() > close * first.abs().amax():
            return False
    return True
