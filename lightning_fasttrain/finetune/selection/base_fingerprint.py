"""Which weights an adapter was trained beside: a short hash of each frozen layer, to be compared with another model."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.heads import is_a, stands_for

Fingerprint = dict[str, str]
_SAMPLES = 64  # of each weight; with another number no stored fingerprint fits any more
# PEFT's, and the child in which they hold what is the base's.
_HOLDERS = {
    "BaseTunerLayer": "base_layer",
    "TrainableTokensWrapper": "token_adapter",  # which is such a layer itself
    "AuxiliaryTrainingWrapper": "original_module",
    "PeftModel": "base_model",
}


def base_fingerprint(model: nn.Module) -> Fingerprint:
    """A short hash of each weight of the base: its shape, and 64 of its numbers as bfloat16.

    Rounding to bfloat16 makes a model equal its own copies in float32 and bfloat16. What an adapter brought is left
    out, and layers have the names that they have without one. Quantised weights are hashed as they are packed, since
    the model that they came from is another one: compare like with like.

    Args:
        model: any module, with or without adapters.

    Returns:
        Name of each parameter → 12 hexadecimal digits, preceded by ``"q"`` if it is quantised; ``"?"`` where beside an
        adapter stands what is not the base's any more: weights that an adapter has changed where it began, as PiSSA
        does, or is merged into, and what trains with it.

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
        if plain is None or id(parameter) in seen:  # tied, or known to an adapter by another name
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
    # One copy to the host for all of them, rather than one for each.
    on_host = torch.cat(samples).cpu().view(-1, _SAMPLES) if samples else torch.empty(0, _SAMPLES)
    for name, (kind, shape), numbers in zip(names, kinds, on_host, strict=True):
        digest = hashlib.sha256(f"{shape}".encode() + numbers.numpy().tobytes()).hexdigest()
        found[name] = kind + digest[:12]
    # Sorted, so that equal models give equal bytes in files.
    return dict(sorted(found.items()))


def is_fingerprint(value: object) -> bool:
    """Whether what was read from a file is one."""
    return isinstance(value, dict) and all(isinstance(part, str) for item in value.items() for part in item)


def base_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter of the base → what it would be called without adapters; theirs are left out."""
    holders = adapter_holders(model)
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name, holders)
        if plain is not None:
            found[name] = plain
    return found


def adapters_on(module: nn.Module) -> dict[str, Any]:
    """Name → configuration of the adapters that PEFT has put into this module, or before its input."""
    own = vars(module)
    return {} if is_a(module, "BaseTuner") else own.get("peft_config") or own.get("_peft_config") or {}


def adapter_holders(model: nn.Module) -> dict[str, str]:
    """Name of each of PEFT's modules in ``model`` that hold one of the base's → what that child is called."""
    return {name: part for name, module in model.named_modules() if (part := held_child(module))}


def plain_name(name: str, holders: Mapping[str, str]) -> str | None:
    """What a module or parameter would be called without adapters; None for what they brought."""
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
    way_out: str = "Load the base that it was trained beside",
) -> None:
    """Compare a model with the fingerprint of the one that an adapter was trained beside.

    Where just one of the two is quantised, only names can be compared.

    Raises:
        ValueError: they differ; the message names the first three that do.
    """
    found = base_fingerprint(model)
    missing = [name for name in expected if name not in found]
    more = [name for name in found if name not in expected]
    other = [name for name in expected if name in found and _differ(expected[name], found[name])]
    for names, how in ((missing, "this model lacks"), (more, "the other lacked"), (other, "other weights are in")):
        if names:
            base = f"{what} was trained beside another base than {type(model).__name__}"
            raise ValueError(explain(base, f"{how} {first_few(names)}", way_out))


def first_few(names: list[str]) -> str:
    """The first three, and how many more; cut where a name is absurd, since it may come from a file."""
    return list_some([repr(name[:120]) for name in names])


def _changed_names(model: nn.Module) -> set[str]:
    """Names of parameters of the base that are not what they were before there were adapters."""
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if held_child(module) == "base_layer"
    }
    configs = [config for module in model.modules() for config in adapters_on(module).values()]
    if not configs:
        return set()
    changed = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if any(getattr(config, "bias", "none") != "none" for config in configs):
        # Biases that PEFT trains in place; they stay changed when they are frozen.
        changed |= {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    begun = any(changes_base(config) for config in configs)
    for name, layer in layers.items():
        if begun or layer.merged:
            changed |= {f"{name}.base_layer.{key}" for key, _ in layer.base_layer.named_parameters()}
    return changed


def changes_base(config: Any) -> bool:
    start = getattr(config, "init_lora_weights", True)
    # These starts write to A and B alone; all others of PEFT's also to the weight.
    decomposed = isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal", "mica")
    return decomposed or getattr(config, "kasa_config", None) is not None


def held_child(module: nn.Module) -> str | None:
    """The child of one of PEFT's modules that is the base's; asked by name, as PEFT need not be installed.

    A layer that holds a tensor for another module is called as that tensor is.
    """
    if stands_for(module):
        return "weight"
    return next((_HOLDERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _HOLDERS), None)


def _differ(a: str, b: str) -> bool:
    comparable = "?" not in (a, b) and a.startswith("q") == b.startswith("q")
    return comparable and a != b


def _gather_whole(parameter: nn.Parameter) -> Tensor:
    """Its values; where they are sharded, by FSDP2 or ZeRO, those of all ranks, which must all ask."""
    values = parameter.detach()
    if is_torchaos(values):
        return values.dequantize()
    if isinstance(values, DTensor):
        # With offload the shards are on the host, and collectives run on the device of the mesh.
        return values.to(values.device_mesh.device_type).full_tensor()
    if not hasattr(parameter, "ds_id"):  # DeepSpeed's mark of a parameter that ZeRO 3 has cut up
        return values
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()  # it is gone when the ``with`` ends


def is_torchaos(tensor: Tensor) -> bool:
    """Whether torchao has quantised it: a tensor of a class of its own, which stands for its floats."""
    return type(tensor).__module__.partition(".")[0] == "torchao" and is_traceable_wrapper_subclass(tensor)


def _sample(values: Tensor, quantized: bool) -> Tensor:
    """64 of the numbers, evenly spread, as int32."""
    flat = values.reshape(-1)
    # From the first number to the last; a tensor of fewer has some twice.
    at = torch.arange(_SAMPLES, device=flat.device) * max(flat.numel() - 1, 0) // (_SAMPLES - 1)
    taken = flat[at] if flat.numel() else flat.new_zeros(_SAMPLES)
    return taken.to(torch.int32) if quantized else taken.to(torch.bfloat16).view(torch.int16).to(torch.int32)
