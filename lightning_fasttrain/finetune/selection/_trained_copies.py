"""Copies of modules that train in full beside an adapter."""

from torch import nn

from lightning_fasttrain.finetune.selection._adapter_switches import switches, trained_copies
from lightning_fasttrain.finetune.selection.freezing import update_statistics_


def finish_copies_(root: nn.Module, name: str) -> None:
    """Let the copies of adapter ``name`` train as their modules would: with the same ties, and running statistics.

    PEFT copies one module after the other, after everything was frozen.
    """
    first: dict[nn.Parameter, nn.Parameter] = {}
    for wrapper in switches(root):
        copy = trained_copies(wrapper).get(name)
        if copy is None:
            continue
        update_statistics_(copy)
        for key, original in wrapper.original_module.named_parameters(remove_duplicate=False):
            owner, _, own = key.rpartition(".")
            copy.get_submodule(owner)._parameters[own] = first.setdefault(original, copy.get_parameter(key))
