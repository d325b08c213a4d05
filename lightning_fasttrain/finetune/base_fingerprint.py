"""Which weights an adapter was trained beside: a short hash of each frozen layer, to be compared with another model."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain._messages import explain

Fingerprint = dict[str, str]
_SAMPLES = 64


def base_fingerprint(model: nn.Module) -> Fingerprint:
    """A short hash of each weight of the base: its shape, and 64 of its numbers as bfloat16.

    Rounding to bfloat16 makes a model equal its own copies in float32 and bfloat16. What an adapter brought is left
    out, and layers have the names that they have without one. Quantised weights are hashed as they are packed, since
    the model that they came from is another one: compare like with like.

    Args:
        model: any module, with or without adapters.

    Returns:
        Name of each parameter → 12 hexadecimal digits, preceded by ``"q"`` if it is quantised; ``"?"`` for layers whose
        weight an adapter has changed where it began, as PiSSA does.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> base_fingerprint(net) == base_fingerprint(net.bfloat16())
        True
    """
    names, kinds, samples = [], [], []
    found: Fingerprint = {}
    changed = any(_changes_base(config) for config in getattr(model, "peft_config", {}).values())
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if plain is not None and changed and "base_layer" in name.split("."):
            found[plain] = "?"
        elif plain is not None:
            names.append(plain)
            quantized = not parameter.is_floating_point() or getattr(parameter, "quant_state", None) is not None
            kinds.append(("q" if quantized else "", tuple(parameter.shape)))
            samples.append(_sample(parameter.detach(), quantized))
    # One copy to the host for all of them, rather than one for each.
    on_host = torch.cat(samples).cpu().view(-1, _SAMPLES) if samples else torch.empty(0, _SAMPLES)
    for name, (kind, shape), numbers in zip(names, kinds, on_host, strict=True):
        digest = hashlib.sha256(f"{shape}".encode() + numbers.numpy().tobytes()).hexdigest()
        found[name] = kind + digest[:12]
    return dict(sorted(found.items()))


def plain_name(name: str) -> str | None:
    """What a key would be called without adapters; None if an adapter brought it."""
    parts = name.split(".")
    if any(part.startswith(("lora_", "ia3_", "prompt_encoder", "modules_to_save", "vera_", "hada_")) for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def refuse_other_base(expected: Fingerprint, model: nn.Module, what: str) -> None:
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
            listed = ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise ValueError(
                explain(
                    f"{what} was trained beside another base than {type(model).__name__}",
                    f"{how} {listed}",
                    "Load the base that it was trained beside, or pass check_base=False if you know that it fits",
                )
            )


def _changes_base(config: Any) -> bool:
    start = getattr(config, "init_lora_weights", True)
    return isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal")


def _differ(a: str, b: str) -> bool:
    comparable = "?" not in (a, b) and a.startswith("q") == b.startswith("q")
    return comparable and a != b


def _sample(values: Tensor, quantized: bool) -> Tensor:
    """64 of the numbers, evenly spread, as int32."""
    flat = values.reshape(-1)
    at = torch.arange(_SAMPLES, device=flat.device) * max(flat.numel() - 1, 0) // (_SAMPLES - 1)
    taken = flat[at] if flat.numel() else flat.new_zeros(_SAMPLES)
    return taken.to(torch.int32) if quantized else taken.to(torch.bfloat16).view(torch.int16).to(torch.int32)
