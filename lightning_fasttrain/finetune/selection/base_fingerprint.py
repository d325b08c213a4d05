"""Fingerprint of the base model that an adapter was trained with: a short hash of each frozen weight."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.select import TUNER, WRAPPER, is_a, is_inside, stands_for


def find_modules(model: nn.Module, is_meant: Callable[[nn.Module], object]) -> dict[str, Any]:
    """Map all names of the modules for which ``is_meant`` returns a true value to these modules."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if is_meant(module)}


def list_trainable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def has_fake_parameters(model: nn.Module) -> bool:
    """Check whether ``model`` holds fake tensors, as it does while a run is predicted."""
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def names_in(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return those ``names`` that are among ``others``, in their order."""
    return [name for name in names if name in others]


def names_not_in(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return those ``names`` that are not among ``others``, in their order."""
    return [name for name in names if name not in others]


def names_outside(names: Iterable[str], modules: Collection[str]) -> list[str]:
    """Return the ``names`` that do not belong to a part of one of the ``modules``, in their order."""
    return [name for name in names if not is_inside(name, modules)]


def strip_prefix(names: Iterable[str], prefix: str) -> list[str]:
    """Return the ``names`` without ``prefix``; a name that does not begin with it stays as it is."""
    return [name.removeprefix(prefix) for name in names]


def prefix_of(name: str) -> str:
    """Return the name of a module with a dot, which begins the names of its parts; "" for the model, named ""."""
    return f"{name}.".removeprefix(".")


def first_tensor(leaves: Iterable[object]) -> Tensor:
    """Return the first tensor among the leaves of a structure, which must hold one."""
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))


Fingerprint = dict[str, str]
# Values of each weight; another number would invalidate all stored fingerprints.
_SAMPLES = 64
PEFT_MODEL = "peft.peft_model.PeftModel"
# PEFT's classes, and the child in which each holds the module of the base model.
_HOLDERS = {
    TUNER: "base_layer",
    "peft.utils.other.TrainableTokensWrapper": "token_adapter",  # which is such a layer itself
    WRAPPER: "original_module",  # also of the one above, which therefore comes first
    PEFT_MODEL: "base_model",
}


@check_arguments
def base_fingerprint(model: nn.Module) -> Fingerprint:
    """Return a short hash of each weight of the base model: of its shape, and 64 of its values as bfloat16.

    Rounding to bfloat16 gives a model and its copies in float32 and bfloat16 the same fingerprint. Parameters of
    adapters are left out, and layers have the names that they have without adapters. Quantised weights are hashed as
    they are packed, so compare a quantised model only with one that is quantised in the same way.

    Args:
        model: any module, with or without adapters.

    Returns:
        Name of each parameter → 12 hexadecimal digits, preceded by ``"q"`` if it is quantised; ``"?"`` for a
        weight that is no longer that of the base model: because the initialization of an adapter changed it, as PiSSA
        does, because an adapter is merged into it, or because it trains with the adapter.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> base_fingerprint(net) == base_fingerprint(net.bfloat16())
        True
    """
    names, kinds, samples = [], [], []
    found: Fingerprint = {}
    plain_names, changed = base_names(model), _changed_names(model)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = plain_names.get(name)
        # The parameter is tied, or an adapter lists it under a second name.
        if plain is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if name in changed:
            found[plain] = "?"
        else:
            names.append(plain)
            quantized = not parameter.is_floating_point() or getattr(parameter, "quant_state", None) is not None
            quantized = quantized or is_torchaos(parameter)
            whole = _gather_whole(parameter)
            kinds.append(("q" if quantized else "", tuple(whole.shape)))
            samples.append(_sample(whole, quantized=quantized and not is_torchaos(parameter)))
    # One copy to the host for all samples instead of one per weight.
    on_host = torch.cat(samples).cpu().view(-1, _SAMPLES) if samples else torch.empty(0, _SAMPLES)
    for name, (kind, shape), values in zip(names, kinds, on_host, strict=True):
        digest = hashlib.sha256(f"{shape}".encode() + values.numpy().tobytes()).hexdigest()
        found[name] = kind + digest[:12]
    # Sorted, so that equal models give identical files.
    return dict(sorted(found.items()))


def is_fingerprint(value: object) -> bool:
    """Check whether a value that was read from a file is a fingerprint."""
    return isinstance(value, dict) and all(isinstance(part, str) for item in value.items() for part in item)


def base_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter of the base model to its name without adapters; parameters of adapters are left out."""
    holders = adapter_holders(model)
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name, holders)
        if plain is not None:
            found[name] = plain
    return found


def adapters_on(module: nn.Module) -> dict[str, Any]:
    """Return name and configuration of the adapters and prompts that PEFT has added to ``module``."""
    # PEFT's model shares them with the model that it holds.
    if is_a(module, "peft.tuners.tuners_utils.BaseTuner"):
        return {}
    own = vars(module)
    return own.get("peft_config") or own.get("_peft_config") or {}


def adapter_holders(model: nn.Module) -> dict[str, str]:
    """Map all names of each PEFT module that holds a module of the base model to the name of that child."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: part for name, module in modules if (part := held_child(module))}


def plain_name(name: str, holders: Mapping[str, str]) -> str | None:
    """Return the name of a module or parameter without adapters; None if it belongs to an adapter."""
    parts = name.split(".")
    plain = []
    for i, part in enumerate(parts):
        held = holders.get(".".join(parts[:i]))
        if held is None:
            plain.append(part)
        elif held != part:
            return None
    return ".".join(plain)


def refuse_other_base(
    expected: Fingerprint,
    model: nn.Module,
    what: str,
    way_out: str = "Load the base model that it was trained with",
) -> None:
    """Refuse a model whose fingerprint differs from that of the base model that an adapter was trained with.

    If only one of the two is quantised, only names are compared.

    Raises:
        ValueError: they differ; the message names the first three that do.
    """
    found = base_fingerprint(model)
    missing, more = names_not_in(expected, found), names_not_in(found, expected)
    other = [name for name in expected if name in found and _differ(expected[name], found[name])]
    for names, how in ((missing, "this model lacks"), (more, "the base model lacked"), (other, "the values differ in")):
        if names:
            base = f"{what} was trained with another base model than {type(model).__name__}"
            raise ValueError(explain(base, f"{how} {first_few(names)}", way_out))


def first_few(names: list[str]) -> str:
    """Format the first three names and the number of others; long names, which may come from a file, are cut."""
    return list_some([repr(name[:120]) for name in names])


def _changed_names(model: nn.Module) -> set[str]:
    """Return the names of base parameters whose values may have changed since adapters were added."""
    modules: dict[str, Any] = dict(model.named_modules())
    configs: list[Any] = []
    for module in modules.values():
        configs += adapters_on(module).values()
    if not configs:
        return set()
    changed = set(list_trainable(model))
    if any(getattr(config, "bias", "none") != "none" for config in configs):
        # Biases that PEFT trains in place keep their trained values when they are frozen.
        changed |= {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    begun = any(map(changes_base, configs))
    for name, module in modules.items():
        if held_child(module) == "base_layer" and (begun or module.merged):
            changed.update(dict(module.base_layer.named_parameters(prefix=f"{name}.base_layer")))
    return changed


def changes_base(config: object) -> bool:
    start = getattr(config, "init_lora_weights", True)
    # These initializations write only to A and B; PEFT's other ones also change the weight.
    decomposed = isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal", "mica")
    return decomposed or getattr(config, "kasa_config", None) is not None


def held_child(module: nn.Module) -> str | None:
    """Return the name of the child of a PEFT module that belongs to the base model, or None.

    A layer that holds a tensor for another module has the name of that tensor.
    """
    if stands_for(module):
        return "weight"
    return next((child for kind, child in _HOLDERS.items() if is_a(module, kind)), None)


def _differ(a: str, b: str) -> bool:
    comparable = "?" not in (a, b) and a.startswith("q") == b.startswith("q")
    return comparable and a != b


def _gather_whole(parameter: nn.Parameter) -> Tensor:
    """Return the unsharded values of a parameter; under FSDP2 and ZeRO a collective that all ranks must call."""
    values = parameter.detach()
    if is_torchaos(values):
        return values.dequantize()
    if isinstance(values, DTensor):
        # With offload the shards are on the host, and collectives run on the device of the mesh.
        return values.to(values.device_mesh.device_type).full_tensor()
    # DeepSpeed marks parameters that ZeRO 3 has sharded with it.
    if not hasattr(parameter, "ds_id"):
        return values
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        # A copy, since the gathered values are freed when the ``with`` ends.
        return parameter.detach().clone()


def is_torchaos(tensor: Tensor) -> bool:
    """Check whether ``tensor`` is one of torchao's quantised tensor subclasses."""
    return type(tensor).__module__.partition(".")[0] == "torchao" and is_traceable_wrapper_subclass(tensor)


def _sample(values: Tensor, quantized: bool) -> Tensor:
    """Return 64 evenly spaced values, as int32."""
    flat = values.reshape(-1)
    # From the first value to the last; a smaller tensor has some of them twice.
    at = torch.arange(_SAMPLES, device=flat.device) * max(flat.numel() - 1, 0) // (_SAMPLES - 1)
    taken = flat[at] if flat.numel() else flat.new_zeros(_SAMPLES)
    if not quantized:
        taken = taken.to(torch.bfloat16).view(torch.int16)
    return taken.to(torch.int32)
