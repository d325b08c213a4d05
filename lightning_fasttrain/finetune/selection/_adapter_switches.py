"""What of a model's adapters can be switched on and off."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_fasttrain.core.modules.heads import is_a
from lightning_fasttrain.finetune.selection.base_fingerprint import adapters_on


def has_prompt(module: nn.Module) -> bool:
    """Whether this is a ``PeftModel`` that puts virtual tokens before the input of the model inside."""
    return is_a(module, "PeftModel") and bool(adapters_on(module))


def switches(model: nn.Module) -> Iterator[Any]:
    """All in ``model`` that can be switched on and off: PEFT's layers and wrappers, and virtual tokens."""
    for module in model.modules():
        if is_a(module, "BaseTunerLayer") or is_a(module, "AuxiliaryTrainingWrapper"):
            yield module
        if has_prompt(module):
            yield _PromptSwitch(module)


class _BaseCall:
    """A method of the base instead of the prompted model's; it remembers what the object had there of its own."""

    def __init__(self, call: Callable[..., Any], replaced: dict[str, Any]) -> None:
        self.call, self.replaced = call, replaced
        functools.update_wrapper(self, call)  # whoever asks for arguments sees the base's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _PromptSwitch:
    """Switches virtual tokens on and off, with the methods of PEFT's layers."""

    def __init__(self, prompted: Any) -> None:
        self.prompted = prompted

    @property
    def disable_adapters(self) -> bool:
        return self.prompted._adapters_disabled

    def enable_adapters(self, on: bool) -> None:
        """As PEFT's ``disable_adapter`` does for a ``with``, and for generation of encoder-decoders as well."""
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
        """Name of an adapter → the encoder of its virtual tokens."""
        return self.prompted.prompt_encoder.named_children()
