"""Switches dropout off, so that steps which draw masks of their own can be compared."""

from contextlib import ExitStack

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_fasttrain._surgery import Undo, patch


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
    undo = ExitStack()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            rate = "drop" in name.lower() or (name == "p" and isinstance(module, _DropoutNd))
            if rate and isinstance(value, float) and value > 0:
                undo.callback(patch(module, name, 0.0))
    return undo.close
