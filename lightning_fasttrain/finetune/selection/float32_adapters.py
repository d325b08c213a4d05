"""Switch adapters on and off, and keep their weights in float32 beside a model in low precision."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.select import TUNER, WRAPPER, is_a, is_tuner
from lightning_fasttrain.core.modules.wrapped_forward import Replacement
from lightning_fasttrain.finetune.selection.base_fingerprint import PEFT_MODEL, adapters_on

_LOW = (torch.bfloat16, torch.float16)
_DICTS = (nn.ModuleDict, nn.ParameterDict)
_BUFFER_DICT = "peft.tuners._buffer_dict.BufferDict"


class StaysInFloat32(Replacement):
    """Replacement of a module's ``_apply`` that moves float32 tensors to other devices but does not round them.

    ``model.to(torch.bfloat16)`` and ``Trainer(precision="bf16-true")`` call ``_apply``.
    """

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        rounded = {*self.module.buffers()} - {*self.tensors()}

        def move(tensor: Tensor) -> Tensor:
            moved = function(tensor)
            is_rounded = tensor.dtype is torch.float32 and moved.dtype in _LOW and tensor not in rounded
            if is_rounded:
                return tensor.to(moved.device)
            return moved

        return type(self.module)._apply(self.module, move, recurse)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors that stay in float32."""
        yield from self.module.parameters()
        yield from self.module.buffers()


class TrainsInFloat32(StaysInFloat32):
    """Keep a copy of a module that trains in full in float32, and let it compute in the dtypes of that module.

    The copy's forward sees its parameters rounded to those dtypes, so that outputs are those of a rounded module,
    and the optimizer updates them in float32. Buffers are rounded with the base, since modules update them in place.
    """

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        super().__init__(module)
        self.original = original
        self.hooks = (
            module.register_forward_pre_hook(_Rounds(self, True)),
            module.register_forward_hook(_Rounds(self, False), always_call=True),
        )

    def tensors(self) -> Iterator[Tensor]:
        yield from self.module.parameters()

    def round_(self) -> None:
        """Let the module's attributes be the rounded parameters, without changing which parameters it has."""
        for name, tensor in rounded_as(self.original, self.module).items():
            owner, _, own = name.rpartition(".")
            # An attribute of the object comes before a parameter of this name, which nn.Module looks up later.
            vars(self.module.get_submodule(owner))[own] = tensor

    def restore_(self) -> None:
        for module in self.module.modules():
            for name in module._parameters:
                vars(module).pop(name, None)

    def remove(self) -> None:
        """Round the module as the one that it replaces is, and remove this object from it."""
        for hook in self.hooks:
            hook.remove()
        for name, tensor in rounded_as(self.original, self.module).items():
            self.module.get_parameter(name).data = tensor.detach()
        vars(self.module).pop("_apply", None)


class _Rounds:
    """Hook before or after the forward of a copy in float32."""

    def __init__(self, copy: TrainsInFloat32, before: bool) -> None:
        self.copy, self.before = copy, before

    def __call__(self, *_: object) -> None:
        if self.before:
            self.copy.round_()
        else:
            self.copy.restore_()


def rounded_as(original: nn.Module, copy: nn.Module) -> dict[str, Tensor]:
    """Return those parameters of ``copy`` that have fewer bits in ``original``, rounded to them, with a graph."""
    dtypes = {name: parameter.dtype for name, parameter in original.named_parameters(remove_duplicate=False)}
    rounded: dict[str, Tensor] = {}
    for name, parameter in copy.named_parameters(remove_duplicate=False):
        dtype = dtypes.get(name, parameter.dtype)
        if dtype in _LOW and parameter.dtype is torch.float32:
            rounded[name] = parameter.to(dtype)
    return rounded


def keep_adapter_in_float32_(layers: Iterable[Any], name: str) -> None:
    """Convert what trains of adapter ``name`` in PEFT's ``layers`` to float32, and keep it there.

    PEFT gives adapters the dtype of the layer. In bfloat16 an update of less than 1/256 of a weight is rounded away;
    ``peft.get_peft_model`` therefore does the same, once, for adapters, but not for modules that train in full.
    """
    for layer in layers:
        for container in _containers(layer):
            if name in container:
                keep_in_float32_(container)
        whole = trained_copies(layer).get(name)
        if whole is not None and not _is_read_by_its_parent(whole) and not stays_in_float32(whole):
            _keep(TrainsInFloat32(whole, layer.original_module))


def keep_in_float32_(module: nn.Module) -> None:
    _keep(StaysInFloat32(module))


def _keep(stays: StaysInFloat32) -> None:
    for tensor in stays.tensors():
        if tensor.dtype in _LOW:
            # By ``.data``: the parameter stays the same object for optimizers and tied weights.
            tensor.data = tensor.data.float()
    stays.module._apply = stays


def kept_in_float32(model: nn.Module) -> set[Tensor]:
    """Return the tensors of ``model`` that are kept in float32."""
    kept: set[Tensor] = set()
    for module in filter(stays_in_float32, model.modules()):
        kept.update(vars(module)["_apply"].tensors())
    return kept


def stays_in_float32(module: nn.Module) -> bool:
    """Check whether ``module`` is kept in float32."""
    return isinstance(vars(module).get("_apply"), StaysInFloat32)


def let_round_(model: nn.Module) -> None:
    """Allow all of ``model`` to be rounded again, for DeepSpeed, which updates its own float32 copies."""
    for module in filter(stays_in_float32, model.modules()):
        round_again_(module)


def round_again_(module: nn.Module) -> None:
    """Allow ``module`` to be rounded again; a copy that trains in full gets the dtypes of the base at once."""
    stays = vars(module).get("_apply")
    if isinstance(stays, TrainsInFloat32):
        stays.remove()
    elif isinstance(stays, StaysInFloat32):
        del module._apply


def _is_read_by_its_parent(module: nn.Module) -> bool:
    """Check for the projection of ``nn.MultiheadAttention``, which computes with its weight and never calls it."""
    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _containers(layer: Any) -> list[Any]:
    """Return the containers of a PEFT layer that have an entry per adapter; copies of complete modules do not count."""
    if not is_tuner(layer):
        return []
    children = dict(layer.named_children())
    children.pop("base_layer", None)  # its containers do not belong to an adapter
    return [child for child in children.values() if isinstance(child, _DICTS) or is_a(child, _BUFFER_DICT)]


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
