"""Check an adapter's configuration and existing adapters before anything is changed."""

import importlib.util
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import nn

from lightning_fasttrain.core.checks.annotations import to_plain
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import Sharing, is_tuner, list_names_above
from lightning_fasttrain.finetune.quantized.quantized_layer import in_8_bits, is_quantized
from lightning_fasttrain.finetune.selection.base_fingerprint import is_torchaos, names_not_in
from lightning_fasttrain.finetune.selection.float32_adapters import switches
from lightning_fasttrain.finetune.selection.targets import is_product, method_of, owner_of, require_peft

if TYPE_CHECKING:
    from peft import PeftConfig

# Initialized from the values or the dtype of the weight.
_DECOMPOSED = ("pissa", "corda", "loftq", "lora_ga", "orthogonal")


def check_config(config: "PeftConfig") -> None:
    peft = require_peft()
    if isinstance(config, peft.PeftConfig) and not config.is_prompt_learning:
        return _refuse_for_whole_models(config, peft)
    given = type(config).__name__
    why, way_out = "expected a PEFT configuration", "Use for example peft.LoraConfig(r=16)"
    if isinstance(config, L.Callback):
        why, way_out = f"{why}, got a technique", f"Use apply(model, [{given}(...)])"
    elif isinstance(config, peft.PeftConfig):
        why = "it prepends virtual tokens to the input rather than adding adapter layers"
        way_out = "Use add_prompt_(model, config)"
    raise TypeError(explain(f"config={given}", why, way_out))


def _refuse_for_whole_models(config: "PeftConfig", peft: Any) -> None:
    """Refuse kinds that PEFT cannot add to the layers of any module, as several share state in a ``PeftModel``."""
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    is_of_layers = inspect.isclass(tuner) and issubclass(tuner, peft.tuners.tuners_utils.BaseTuner)
    shares = getattr(tuner, "uses_shared_state", False)
    if is_of_layers and hasattr(config, "target_modules") and not shares:
        return
    why = "PEFT adds this kind to a whole Hugging Face model, in a PeftModel that holds a part of it"
    way_out = "Use peft.get_peft_model(model, config), or another kind, such as peft.LoraConfig(r=16)"
    raise TypeError(explain(f"config={type(config).__name__}", why, way_out))


def make_settings_plain_(config: "PeftConfig") -> None:
    """Convert settings that came from a config file to plain Python, as the adapter's file can hold them."""
    vars(config).update(to_plain(Any, vars(config)))


def check_name(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        why = "adapter names are used in state_dict keys and folder names"
        raise ValueError(explain(f"name={name!r}", why, "Use letters, digits, _ and -"))


def refuse_namesake(name: str, names: Iterable[str]) -> None:
    """Refuse an adapter name that is also part of a module name: PEFT could not tell their keys apart."""
    if any(name in one.split(".") for one in names):
        why = "a module of the model has this name, and PEFT tells adapters from modules by their names"
        raise ValueError(explain(f"adapter '{name}'", why, "Give the adapter another name"))


def refuse_unknown(names: Iterable[str], there: list[str]) -> None:
    for name in names:
        if name not in there:
            listed = f"Existing adapters: {', '.join(there)}"
            raise ValueError(explain(f"adapter '{name}'", "the model has no adapter of this name", listed))


def refuse_merged(model: nn.Module, what: str) -> None:
    """Refuse an operation while an adapter is merged, since PEFT would silently unmerge it.

    Raises:
        ValueError: an adapter is merged.
    """
    merged: dict[str, None] = {}
    for layer in switches(model):
        # Virtual tokens cannot be merged, and their switches have no such attribute.
        merged.update(dict.fromkeys(getattr(layer, "merged_adapters", ())))
    if merged:
        why = f"adapter {', '.join(merged)} is already merged into the weights"
        raise ValueError(explain(what, why, "Call unmerge_adapters_(model) first"))


def refuse_parted(model: nn.Module, what: str) -> None:
    """Refuse adapters that change a weight under some of its names only, or in several ways, as merging would not.

    Raises:
        ValueError: two modules share a weight, and have different adapters, or only one has an adapter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in Sharing(model).groups:
        adapters = {key: _adapter_over(key, modules) for key in group}
        mine = next(filter(adapters.get, group), None)
        if mine is None:
            continue
        apart = [key for key, adapter in adapters.items() if adapter is not adapters[mine]]
        if apart:
            (owner, own), (other, _) = owner_of(mine), owner_of(apart[0])
            why = f"it shares its {own} with '{other}', which does not have the same adapter"
            way_out = "Name the input embedding for rows of a tied head, or untie the two first"
            raise ValueError(explain(f"{what} on '{owner}'", why, way_out))


def _adapter_over(key: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the adapter that changes a parameter of the base model."""
    for name in list_names_above(key):
        if is_tuner(modules[name]) and key.startswith(f"{name}.base_layer."):
            # PEFT's layers for rows of tied modules are several, which share the rows.
            return getattr(modules[name], "trainable_tokens_delta", modules[name])
    return None


def largest_rank(layer: nn.Module) -> int:
    """Return the largest rank of an adapter; a layer without features, such as a convolution, sets no limit."""
    return min(getattr(layer, "in_features", 1 << 62), getattr(layer, "out_features", 1 << 62))


def check_layers(found: dict[str, nn.Module], config: "PeftConfig") -> None:
    rank = getattr(config, "r", None)
    for name, layer in found.items():
        if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
            why = "nn.MultiheadAttention uses its weight without calling the layer, so an adapter would have no effect"
            raise TypeError(explain(f"target '{name}'", why, f"Target '{name.rpartition('.')[0]}'"))
        if isinstance(layer, nn.MultiheadAttention):
            _check_attention(name, config)
        if not is_product(layer):
            why = f"{type(layer).__name__} does not compute x·Wᵀ + b, to which an adapter would add B·A·x"
            way_out = "Leave it out of the targets, or train it in full with train="
            raise TypeError(explain(f"target '{name}'", why, way_out))
        # By name, since each library has normalization layers of its own.
        if method_of(config) == "LN_TUNING" and "norm" not in type(layer).__name__.lower():
            why = f"LN tuning trains a copy of a normalization layer, and this is a {type(layer).__name__}"
            raise TypeError(explain(f"target '{name}'", why, "Target normalization layers, or use freeze_"))
        weight = layer._parameters.get("weight")
        if is_quantized(layer) or (weight is not None and is_torchaos(weight)):
            _check_quantized_start(name, config)
        if is_quantized(layer):
            _check_quantized(name, layer, config)
        smallest = largest_rank(layer)
        if isinstance(rank, int) and rank > smallest:
            why = f"the layer is {layer.in_features} → {layer.out_features}, so its rank is at most {smallest}"
            way_out = f"Use rank={smallest} or less, or leave '{name}' out of the targets"
            raise ValueError(explain(f"rank={rank} for '{name}'", why, way_out))


def check_parameters(found: Iterable[str], config: "PeftConfig") -> None:
    """Refuse adapters on stacked tensors other than LoRA, and initializations that decompose a layer's weight."""
    start = getattr(config, "init_lora_weights", True)
    for name in found:
        if method_of(config) != "LORA":
            why = "PEFT adapts tensors that a module itself multiplies with by LoRA alone"
            raise TypeError(explain(f"{method_of(config)} on the tensor '{name}'", why, "Use peft.LoraConfig"))
        if isinstance(start, str) and start not in ("gaussian", "eva"):
            why = "this initialization decomposes one layer's weight, and this tensor is a stack of weights"
            raise TypeError(explain(f"'{start}' on the tensor '{name}'", why, "Use init_lora_weights=True"))


def _check_attention(name: str, config: "PeftConfig") -> None:
    start = getattr(config, "init_lora_weights", True)
    if isinstance(start, str) and start != "gaussian":
        why = "PEFT has this initialization for a layer with one weight, and nn.MultiheadAttention has several"
        raise TypeError(explain(f"'{start}' on '{name}'", why, "Use init_lora_weights=True"))


def _check_quantized_start(name: str, config: "PeftConfig") -> None:
    start = getattr(config, "init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_DECOMPOSED):
        why = "this initialization needs the values of the weight, and a quantised weight is packed"
        way_out = "Use variant='lora', or add the adapter to the model in full precision"
        raise TypeError(explain(f"'{start}' on '{name}', which is quantised", why, way_out))


def _check_quantized(name: str, layer: object, config: "PeftConfig") -> None:
    """Refuse adapters on bitsandbytes layers that PEFT does not support, before PEFT fails late or misreads weights."""
    kind = method_of(config)
    unaligned = not in_8_bits(layer) and layer.in_features % 64 and not layer.weight.is_cuda
    if getattr(config, "use_dora", False) and unaligned:
        # The forward of this package avoids the error, but PEFT computes DoRA's norms itself.
        why = "bitsandbytes dequantises rows whose length is not a multiple of 64 wrongly on CPUs with AVX-512"
        raise TypeError(explain(f"DoRA on '{name}', in 4 bits on the CPU", why, "Use variant='lora', or kind='int8'"))
    package = type(config).__module__.removesuffix(".config")  # layers for bitsandbytes are in its ``bnb.py``
    if importlib.util.find_spec(f"{package}.bnb") is None:
        why = "PEFT does not support this adapter on quantised weights"
        way_out = "Use LoRA or IA3, or an unquantised base"
        raise TypeError(explain(f"{kind} on '{name}', which is quantised", why, way_out))


def without_namesakes(names: list[str], root: nn.Module) -> list[str]:
    """Refuse names that PEFT's suffix matching would also find in other modules, and return ``names``."""
    for name, other in find_namesakes(names, root).items():
        why = f"PEFT would also train '{other}', whose name has the same ending"
        raise ValueError(explain(f"train=['{name}']", why, "Give the module a unique name in the model"))
    return names


def find_namesakes(names: list[str], root: nn.Module) -> dict[str, str]:
    """Map those of the names that end the name of another module, which PEFT would take for them, to that name."""
    modules, found = dict(root.named_modules(remove_duplicate=False)), dict[str, str]()
    for name in names:
        for other in names_not_in(modules, names):
            is_other = other.endswith(name) and modules[other] is not modules[name]
            if is_other and not other.startswith(f"{name}."):
                found.setdefault(name, other)
    return found


def is_there(there: dict[str, Any], name: str, config: "PeftConfig") -> bool:
    kinds = {one.peft_type for one in there.values()}
    if kinds - {config.peft_type}:
        other = kinds.pop().value
        why = "PEFT cannot combine adapters of two kinds in one model or save them in one file"
        way_out = f"Use {other} for both, or unload the first: unload_adapters_(model)"
        raise ValueError(explain(f"{method_of(config)} beside {other}", why, way_out))
    if name not in there:
        return False
    ours, theirs = meaning_of(config), meaning_of(there[name])
    if ours != theirs:
        differs = [key for key, value in ours.items() if theirs.get(key) != value]
        why = f"an adapter of this name exists, with another {', '.join(differs)}"
        raise ValueError(explain(f"adapter '{name}'", why, "Use another name, or the same settings"))
    return True


def meaning_of(config: "PeftConfig") -> dict[str, Any]:
    """Return the settings in which two configurations of the same adapter must agree, with lists and sets sorted."""
    ignored = {"base_model_name_or_path", "inference_mode", "peft_version", "auto_mapping", "revision", "task_type"}
    if getattr(config, "init_lora_weights", True) == "eva":
        ignored |= {"rank_pattern", "alpha_pattern", "target_modules"}  # filled in by EVA
    meaning: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        if key not in ignored and value not in (None, {}):
            meaning[key] = sorted(value) if isinstance(value, list | set | tuple) else value
    return meaning
