"""LoRA on tensors that are held in 4 bits, such as experts, with PEFT's layers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.heads import is_a
from lightning_fasttrain.finetune.quantized._quantized_tensor import holder_under, stand_in


def use_held_tensors_(model: nn.Module) -> None:
    """Let PEFT's wrappers in ``model`` adapt tensors that are held in 4 bits.

    PEFT adds the product of the two low-rank matrices to the parameter for the duration of the forward. Here it is
    added to the dequantised tensor that the module's forward gets, and recomputed in the backward.
    """
    for module in model.modules():
        if is_a(module, "ParamWrapper") and holder_under(module) is not None:
            wrapper: Any = module
            wrapper.get_param, wrapper._activate_lora = GivesStandIn(wrapper), AddsToHeld(wrapper)


class GivesStandIn:
    """Replacement of ``get_param`` of PEFT's wrapper, which reads shape, dtype and device of the result."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self) -> Tensor:
        holder = holder_under(self.wrapper)
        return type(self.wrapper).get_param(self.wrapper) if holder is None else stand_in(holder)


class AddsToHeld:
    """Replacement of ``_activate_lora`` of PEFT's wrapper, a context in which the adapter is applied."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, active: list[str]) -> AbstractContextManager[None]:
        holder, names = holder_under(self.wrapper), [name for name in active if name in self.wrapper.lora_A]
        if holder is None or not names:
            return type(self.wrapper)._activate_lora(self.wrapper, active)
        return self._while_it_lasts(holder, names)

    @contextmanager
    def _while_it_lasts(self, holder: nn.Module, names: list[str]) -> Iterator[None]:
        vars(holder)["added"] = partial(self.add_to, names=names)  # by ``vars``, as the holder is a module
        try:
            yield
        finally:
            del vars(holder)["added"]

    def add_to(self, weight: Tensor, names: list[str]) -> Tensor:
        """Return ``weight`` [n, rows, columns] plus the named adapters, with the operations that PEFT uses."""
        wrapper = self.wrapper
        # As in PEFT: several adapters are summed first; a single one over several experts is one ``baddbmm``.
        if len(names) > 1 or wrapper.num_experts == 1:
            return weight + sum(wrapper.get_delta_weight(name) for name in names).to(weight.dtype)
        lhs, rhs, scaling = wrapper.get_delta_factors(names[0])
        # Autocast would run ``baddbmm`` in half precision and round the complete stack.
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, lhs.to(weight.dtype), rhs.to(weight.dtype), alpha=scaling)
