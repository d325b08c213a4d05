"""Switches dropout off, so that steps which draw masks of their own can be compared."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patch, undo_all, wrappers_on


def without_dropout(model: nn.Module) -> Undo:
    """Set every rate of dropout in ``model`` to zero: of dropout layers, and numbers called ``…drop…`` in others.

    A rate that is written into a function call, or into a compiled graph, is not found. Norms keep their modes.

    Returns:
        How to undo it.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.LSTM(2, 2, num_layers=2, dropout=0.1))
        >>> undo = without_dropout(net)
        >>> net[0].p, net[1].dropout, undo(), net[0].p
        (0.0, 0.0, None, 0.5)
    """
    return undo_all([patch(module, name, 0.0) for module, name in _rates(model)])


def has_dropout(model: nn.Module) -> bool:
    """Whether :func:`without_dropout` would find a rate to switch off.

    Example:
        >>> has_dropout(nn.Dropout(0.5)), has_dropout(nn.Dropout(0.0))
        (True, False)
    """
    return next(_rates(model), None) is not None


def _rates(model: nn.Module) -> Iterator[tuple[object, str]]:
    for module in model.modules():
        # A replaced forward may drop the whole block.
        for holder in (module, *wrappers_on(module, WrappedForward)):
            for name, value in list(vars(holder).items()):
                rate = "drop" in name.lower() or (name == "p" and isinstance(holder, _DropoutNd))
                if rate and isinstance(value, float) and value > 0:
                    yield holder, name
