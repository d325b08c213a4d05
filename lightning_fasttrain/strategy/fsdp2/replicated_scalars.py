"""Parameters without a dimension, such as CLIP's ``logit_scale``: replicated, with their gradients averaged."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fasttrain.core.distributed import rank_count

_replicated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def replicate_scalars_(model: nn.Module, device: torch.device | None = None) -> set[nn.Parameter]:
    """Average the gradients of all parameters without a dimension over the ranks, in each backward.

    FSDP2 cannot shard them. They stay plain parameters, whose hooks average what has been summed so far: the average of
    earlier micro-batches is identical on all ranks, so that averaging it again does not change it.

    Args:
        model: the model; calling it a second time does nothing.
        device: the device to move them to; by default they are not moved.

    Returns:
        These parameters, for ``fully_shard`` to ignore.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> net.scale = nn.Parameter(torch.tensor(1.0))
        >>> len(replicate_scalars_(net))
        1
    """
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0 and parameter.is_floating_point()}
    for parameter in scalars:
        if device is not None and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
        if parameter.requires_grad and not is_replicated(parameter):
            _replicated[parameter] = True
            parameter.register_post_accumulate_grad_hook(_average_)
    return scalars


def is_replicated(parameter: Tensor) -> bool:
    """Return whether the gradient of a parameter is averaged by :func:`replicate_scalars_`."""
    return parameter in _replicated


@torch.no_grad()
def _average_(parameter: Tensor) -> None:
    # Not ReduceOp.AVG, which gloo lacks. Ranks of a tensor group have the same gradient.
    if rank_count() > 1 and parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank_count())
