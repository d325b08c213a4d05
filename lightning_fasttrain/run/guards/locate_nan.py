"""Locate the origin of the first NaN of a step; used only after a bad step, when time does not matter."""

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.host.zero_steps import whole_gradient
from lightning_fasttrain.core.modules.wrapped_forward import first_line, patch
from lightning_fasttrain.core.state.restore import remember
from lightning_fasttrain.run.guards.step_guard import local_values


def is_unfinite(values: object) -> bool:
    """Whether a tensor among ``values`` contains NaN or infinity. Waits for the device."""
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.is_floating_point() and not local_values(value).isfinite().all():
            return True
    return False


def first_layer_in_forward(model: nn.Module, repeat: Callable[[], object]) -> str:
    """Repeat the forward and return the first module whose output is not finite although its inputs are.

    Gradients are not computed, changes that ``repeat`` makes to the model and the random states are undone, and its
    logged values are dropped.

    Args:
        model: the model whose modules are watched.
        repeat: runs the forward.

    Returns:
        Half a sentence for a message.
    """
    found: list[str] = []
    with ExitStack() as undo:
        # The repeated forward changes statistics and random states.
        undo.callback(remember([model]))
        for hook in ("log", "log_dict"):
            if hasattr(model, hook):
                undo.callback(patch(model, hook, lambda *args, **kwargs: None))
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(_note(name, found), with_kwargs=True).remove)
        try:
            # The hooks of inner modules run before those of the modules around them, so the first finding is
            # the innermost module.
            with torch.no_grad():
                repeat()
        except Exception as error:
            # The step itself ran, so only the search for its NaN fails here.
            return f"its layer was not found ({first_line(error)})"
    return next(iter(found), "the non-finite value could not be reproduced by repeating the forward")


def _note(name: str, found: list[str]) -> Callable[..., None]:
    def look(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if found or not is_unfinite(output):
            return
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        # Only the module's own weights: an inner module's would have been found there.
        own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if is_unfinite((args, kwargs)):
            found.append(f"in the input of {where}")
        elif is_unfinite(list(own)):
            found.append(f"in a weight of {where}")
        else:
            found.append(f"in the output of {where}")

    return look


def last_bad_gradient(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the parameter nearest to the loss whose gradient is not finite, as half a sentence; "" if all are finite.

    The backward passes a NaN on from the loss to the first layers. In models that define their layers in the order of
    the forward, the NaN therefore began in the last-defined of the bad ones. Under ZeRO all ranks take part.
    """
    for name, parameter in reversed(list(named)):
        if is_unfinite(whole_gradient(parameter)):
            return f"in the gradient of {name}"
    return ""
