"""Count and list parameters, and find the tensors that quantised layers hold beside them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.modules.select import is_a


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer, in order.

    Example:
        >>> from torch.optim import SGD
        >>> net = nn.Linear(2, 1)
        >>> len(parameters_of(SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=0.1)))
        2
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one, in order."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor, as of an embedding's gradient, since torch has no norm for these."""
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor


def names_of_parameters(model: nn.Module) -> dict[Tensor, str]:
    """Map each parameter to its name, the first one if it is tied."""
    return {parameter: name for name, parameter in model.named_parameters()}


def count_uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that hold each parameter."""
    uses: Counter[nn.Parameter] = Counter()
    for module in model.modules():
        uses.update(module.parameters(recurse=False))
    return uses


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that the elements of all tensors take."""
    return sum(tensor.nbytes for tensor in tensors)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded, in the same memory."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def move_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return values near those of the parameters, each moved by up to 10%, or from 0 to about 0.1.

    What a model computes with them shows what it may compute in training, where gates and kernels that are initialized
    to 0 or 1 change. The values are the same in each call. Sharded parameters are moved in shards.

    Example:
        >>> [gate] = move_values([torch.zeros(2)])
        >>> bool((gate > 0).all())
        True
    """
    noise = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for parameter in parameters:
        local = local_part(parameter.detach())
        if local.is_floating_point() and not is_traceable_wrapper_subclass(local):  # quantized ones
            factor = 1 + 0.1 * (2 * torch.rand(local.shape, generator=noise) - 1)
            local = torch.where(local == 0, factor.to(local) / 10, local * factor.to(local))
        if isinstance(parameter, DTensor):
            shape, stride = parameter.shape, parameter.stride()
            local = DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
        found.append(local)
    return found


def parameters_of_kinds(model: nn.Module, *kinds: type[nn.Module], recurse: bool = True) -> set[Tensor]:
    """Return the parameters of all modules of these classes; without ``recurse``, not those of modules inside them."""
    found: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, kinds):
            found.update(module.parameters(recurse))
    return found


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter; the CPU if it has none.

    Example:
        >>> device_of(nn.ReLU())
        device(type='cpu')
    """
    return next(module.parameters(), torch.empty(0, device="cpu")).device


@check_arguments
def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters and of all parameters; 4-bit weights count with their unpacked size.

    A parameter that a strategy has sharded counts in full; a lazy one, which has no shape yet, counts as 0.
    """
    trained = total = 0
    for parameter in model.parameters():
        numbers = count_elements(parameter)
        total += numbers
        if parameter.requires_grad:
            trained += numbers
    return trained, total


def count_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, by the rules of :func:`count_parameters`."""
    if is_lazy(parameter):
        return 0
    state = getattr(parameter, "quant_state", None)
    # A 4-bit weight holds two numbers in a byte. A parameter that DeepSpeed has split up holds none itself.
    if state is not None:
        return state.shape.numel()
    return getattr(parameter, "ds_numel", parameter.numel())


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the constants and tables of bitsandbytes' linear layers, which are neither parameters nor buffers.

    Example:
        >>> import bitsandbytes as bnb
        >>> layer = bnb.nn.Linear4bit(64, 64, compress_statistics=False).to("cpu")
        >>> [(name, tensor.numel()) for name, tensor in quantized_tensors(layer)]
        [('weight.absmax', 64), ('weight.quant_map', 16)]
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for prefix, module in modules.items():
        held: dict[str, Any] = {}
        if is_a(module, "bitsandbytes.nn.Linear4bit"):
            held = _of_4bit(getattr(module.weight, "quant_state", module.quant_state))
        elif is_a(module, "bitsandbytes.nn.Linear8bitLt"):
            # The state takes SCB from the weight in the first forward.
            held = {"SCB": module.state.SCB}
            if held["SCB"] is None:
                held["SCB"] = module.weight.SCB
        for name, tensor in held.items():
            if tensor is not None:
                yield f"{prefix}.{name}".removeprefix("."), tensor


def _of_4bit(state: object) -> dict[str, Any]:
    if state is None:  # quantised when it is first moved
        return {}
    held = {"weight.absmax": state.absmax, "weight.quant_map": state.code}
    if state.nested:  # double quantisation: the constants are quantised themselves
        held["weight.nested_absmax"] = state.state2.absmax
        held["weight.nested_quant_map"] = state.state2.code
        held["weight.nested_offset"] = state.offset
    return held
