"""Adapters of a model that can be enabled and disabled."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_fasttrain.core.modules.select import TUNER, WRAPPER, is_a
from lightning_fasttrain.finetune.selection.base_fingerprint import PEFT_MODEL, adapters_on


def has_prompt(module: nn.Module) -> bool:
    """Check whether ``module`` is a ``PeftModel`` that prepends virtual tokens to the input of its base model."""
    return is_a(module, PEFT_MODEL) and bool(adapters_on(module))


def switches(model: nn.Module) -> Iterator[Any]:
    """Iterate over everything in ``model`` that can be enabled and disabled: PEFT's layers, wrappers and prompts."""
    for module in model.modules():
        if is_a(module, TUNER, WRAPPER):
            yield module
        if has_prompt(module):
            yield _PromptSwitch(module)


def trained_copies(wrapper: object) -> dict[str, nn.Module]:
    """Map adapters to the copies of a module that train in full, if ``wrapper`` is PEFT's wrapper around one."""
    if is_a(wrapper, WRAPPER) and "modules_to_save" in wrapper._modules:
        return dict(wrapper.modules_to_save.items())
    return {}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of ``model`` in a ``with`` block; those that were disabled before stay so afterwards."""
    enabled = [layer for layer in switches(model) if not layer.disable_adapters]
    try:
        for layer in enabled:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)


class _BaseCall:
    """A method of the base model that replaces the prompted model's; ``replaced`` holds the instance's own."""

    def __init__(self, call: Callable[..., object], replaced: Mapping[str, object]) -> None:
        self.call, self.replaced = call, replaced
        # Callers that inspect the signature see that of the base model.
        functools.update_wrapper(self, call)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.call(*args, **kwargs)


class _PromptSwitch:
    """Enable and disable virtual tokens, with the interface of PEFT's layers."""

    def __init__(self, prompted: object) -> None:
        self.prompted = prompted

    @property
    def disable_adapters(self) -> bool:
        return self.prompted._adapters_disabled

    def enable_adapters(self, on: bool) -> None:
        """Enable or disable the prompt, like PEFT's ``disable_adapter``; also for ``generate`` of encoder-decoders."""
        own = vars(self.prompted)
        for name in ("forward", "generate", "prepare_inputs_for_generation"):
            stands_in = own.get(name)
            if isinstance(stands_in, _BaseCall):
                own.pop(name)
                own.update(stands_in.replaced)
            if not on and hasattr(self.prompted.base_model, name):
                replaced = {name: own[name]} if name in own else {}
                setattr(self.prompted, name, _BaseCall(getattr(self.prompted.base_model, name), replaced))
        self.prompted._adapters_disabled = not on

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over adapter names and the encoders of their virtual tokens."""
        return self.prompted.prompt_encoder.named_children()
