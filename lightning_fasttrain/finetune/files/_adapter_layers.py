"""Match the tensors in an adapter's file to layers of a model, and compare them with the expected tensors."""

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.finetune.quantized._quantized_layer import is_quantized
from lightning_fasttrain.finetune.quantized._quantized_tensor import shown_as_parameters
from lightning_fasttrain.finetune.quantized._tensor_files import DTYPES
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    adapter_holders,
    adapters_on,
    base_names,
    first_few,
    plain_name,
)
from lightning_fasttrain.finetune.selection.targets import find_target_parameters, require_peft

PREFIX = "base_model.model."
TOKENS = ".token_adapter.trainable_tokens_delta"  # PEFT's name for single rows of an embedding
# Integers that are not sizes.
_NO_SIZE = re.compile("seed|key|alpha|step|init|final|warmup|interval|delta|transform|lambda")


@dataclass
class Place:
    """Module in a model that an adapter's file belongs to, with its layers.

    Attributes:
        prefix: prefix that the model adds to the names in the file.
        root: the module whose layers the file names.
        targets: names of the layers with an adapter, relative to ``root``.
        whole: names of the modules that were trained in full.
        scaled: names of the targets that (IA)³ scales at their input.
        tokens: name of each embedding with trained rows → the indices of the rows.
        tensors: name of each tensor with an adapter, such as a layer's experts → name of its module.
    """

    prefix: str
    root: nn.Module
    targets: list[str]
    whole: list[str]
    scaled: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


def layers_in_file(keys: Iterable[str], config: Any) -> list[str]:
    """Return the names of the layers that the file has adapter tensors for."""
    peft: Any = require_peft()
    mark = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
    found = {}
    for key in keys:
        parts = key.split(".")
        # From the end: a module of the model may have the same name as PEFT's prefix.
        at = next((i for i in reversed(range(1, len(parts))) if parts[i].startswith(mark)), None)
        if at is not None:
            name = ".".join(parts[:at])
            if getattr(config, "target_parameters", None):  # PEFT's layers for the tensors of one module are nested
                while name.endswith(".base_layer"):
                    name = name.removesuffix(".base_layer")
            found[name] = None
    return list(found)


def find_place(model: nn.Module, keys: list[str], config: Any, name: str) -> Place | None:
    """Find the module in ``model`` that has all layers named in the file; None if there is none.

    Raises:
        ValueError: several modules have them.
    """
    targets, tokens = layers_in_file(keys, config), tokens_in_file(keys, config)
    inside = {*targets, *tokens}
    rest = [key for key in keys if not is_inside(key, inside)]
    found = []
    for prefix, root in candidates(model, name).items():
        layers, owned = plain_modules(root), set(base_names(root).values())
        whole = _find_whole(layers, config, rest)
        ours = [key for key in rest if key in owned or is_inside(key, set(whole))]
        if all(name in layers for name in inside) and len(ours) == len(rest):
            tensors = {tensor: name for tensor, name in tensors_meant(root, config).items() if name in targets}
            alone = [name for name in targets if name not in tensors.values()]
            found.append(Place(prefix, root, alone, whole, tokens=tokens, tensors=tensors))
    if len(found) > 1:
        names = [place.prefix.removesuffix(".") or "the model itself" for place in found]
        why = f"{first_few(names)} have its layers"
        way_out = f"Name one: load_adapter_(model.{names[0]}, …)"
        raise ValueError(explain(f"{type(model).__name__} has several places for the adapter", why, way_out))
    return found[0] if found else None


def tensors_meant(root: nn.Module, config: Any) -> dict[str, str]:
    """Map the tensors in this model that match the file's settings to the names of their modules."""
    try:
        return find_target_parameters(root, getattr(config, "target_parameters", None) or ())
    except ValueError:  # the file is for another model
        return {}


def tokens_in_file(keys: Iterable[str], config: Any) -> dict[str, list[int]]:
    """Map the embeddings that the file holds single rows of to the rows' indices in the settings."""
    rows = getattr(config, "trainable_token_indices", None) or {}
    found: dict[str, list[int]] = {}
    for key in keys:
        name = key.removesuffix(TOKENS)
        if name != key:
            named = rows if isinstance(rows, dict) else {name: rows}
            found[name] = next((rows for end, rows in named.items() if _ends(name, [end])), [])
    return found


def refuse_other_tokens(place: Place, file: Any, what: str) -> None:
    """Refuse rows that the embedding in this model lacks, or whose count differs from the settings.

    Raises:
        ValueError: the rows do not fit; the message names them.
    """
    layers = plain_modules(place.root)
    for name, rows in place.tokens.items():
        table = layers[name]
        stored = file.get_slice(f"{PREFIX}{name}{TOKENS}").get_shape()[0]
        known = table.num_embeddings if isinstance(table, nn.Embedding) else 0
        wrong = [row for row in rows if not 0 <= row < known]
        if wrong or len(set(rows)) != stored:
            why = (
                f"it trained rows {first_few([str(row) for row in wrong or rows])} of '{name}', which has {known} rows"
            )
            why += f", and holds {stored} rows"
            way_out = "Add the same tokens to the base first with resize_token_embeddings"
            raise ValueError(explain(f"the adapter in {what} is for another vocabulary", why, way_out))


def candidates(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Map prefixes to the modules whose layers an adapter's file may name: adapted modules, or else candidates."""
    from transformers import PreTrainedModel

    named = {f"{prefix}.".removeprefix("."): module for prefix, module in model.named_modules()}
    there = {prefix: module for prefix, module in named.items() if name in adapters_on(module)}
    if there:
        return there
    found = {prefix: module for prefix, module in named.items() if isinstance(module, PreTrainedModel)}
    if isinstance(model, L.LightningModule):
        found |= {f"{child}.": module for child, module in model.named_children()}
    return {**found, "": model}


def plain_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Map the names that modules have without adapters to the modules; adapter modules are skipped."""
    holders = adapter_holders(root)
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if plain := plain_name(name, holders):
            found[plain] = module
    return found


def layers_meant(layers: Mapping[str, nn.Module], config: Any) -> set[str]:
    """Return the names of the layers in this model that match the file's settings; empty if these are patterns.

    A model with more blocks than the trained one has all layers of the file, and further matching ones.
    """
    ends = config.target_modules
    if not ends or getattr(config, "layers_to_transform", None):
        return set()
    whole, out = config.modules_to_save or [], getattr(config, "exclude_modules", None) or []
    meant: set[str] = set()
    for name in layers:
        trains_whole = any(f".{one}." in f".{name}." for one in whole)
        if _ends(name, ends) and not _ends(name, out) and not trains_whole:
            meant.add(name)
    return meant


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _find_whole(layers: Mapping[str, nn.Module], config: Any, rest: list[str]) -> list[str]:
    found: list[str] = []
    for name in layers:
        meant = any(name.endswith(one) for one in getattr(config, "modules_to_save", None) or [])
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if meant and not inside and any(key.startswith(f"{name}.") for key in rest):
            found.append(name)
    return found


def expected_tensors(place: Place, config: Any) -> dict[str, Tensor]:
    """Return the tensors that a file of such an adapter for this model holds, without their values.

    PEFT itself creates the adapter, in copies of the layers that take no memory, so the model is not changed.

    Raises:
        ValueError: PEFT cannot create the adapter.
    """
    peft: Any = require_peft()
    from peft.utils.save_and_load import get_peft_model_state_dict

    config = _config_for(place, config)
    for device in ("meta", "cpu"):
        skeleton = _skeleton(place, config, device)
        try:
            with warnings.catch_warnings(action="ignore"):  # raised again when the adapter is added
                peft.inject_adapter_in_model(config, skeleton, adapter_name="file")
            return get_peft_model_state_dict(skeleton, adapter_name="file", save_embedding_layers=False)
        except NotImplementedError:  # the initialization of a few kinds reads values
            continue
        except Exception as error:
            why = f"PEFT cannot create it: {error}"
            raise ValueError(explain(f"the adapter's {config.peft_type.value}", why, "Save it again")) from error
    raise ValueError(
        explain(f"{config.peft_type.value}", "PEFT cannot create it on the meta device", "Use peft.PeftModel")
    )


def _config_for(place: Place, config: Any) -> Any:
    config = copy.deepcopy(config)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # any initialization gives tensors of the same names and shapes
    config.target_modules = _match_exactly(place.targets)
    config.modules_to_save = place.whole or None
    if hasattr(config, "feedforward_modules"):
        config.feedforward_modules = _match_exactly(place.scaled)
    if place.tokens:
        config.trainable_token_indices = place.tokens
    if place.tensors:
        config.target_parameters = list(place.tensors)
    return config


def _skeleton(place: Place, config: Any, device: str) -> nn.Module:
    """Create a module with copies of the layers that the file is for, under their names."""
    layers, skeleton = plain_modules(place.root), nn.Module()
    names = [*place.targets, *place.whole, *place.tokens]
    if getattr(config, "bias", "none") == "all":
        names += [name for name, module in layers.items() if "bias" in module._parameters and name not in names]
    for name in names:
        _put(skeleton, name, _meta_copy(layers[name]) if device == "meta" else copy.deepcopy(layers[name]))
    for name in dict.fromkeys(place.tensors.values()):
        _put(skeleton, name, _meta_tensors(layers[name]))
    return skeleton


def _match_exactly(names: list[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def _put(skeleton: nn.Module, name: str, module: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in skeleton._modules:
            skeleton.add_module(parent, nn.Module())
        skeleton = skeleton.get_submodule(parent)
    skeleton.add_module(last, module)


def _meta_copy(layer: Any) -> nn.Module:
    if is_quantized(layer):
        return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    # Tensors in the memo are not copied, so the copy of the layer takes no memory.
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, memo)


def _meta_tensors(owner: Any) -> nn.Module:
    """Create a meta module with the tensors of ``owner``, for adapters on tensors."""
    bare: Any = nn.Module()
    bare.is_transposed = getattr(owner, "is_transposed", False)
    with shown_as_parameters(owner):
        for name, parameter in owner.named_parameters(recurse=False):
            bare.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="meta"), False))
    return bare


def nearest_place(model: nn.Module, keys: list[str], fingerprint: Mapping[str, str] | None, name: str) -> nn.Module:
    """Return the module that has most of the names, for an error message about the missing ones."""
    wanted = {key.rpartition(".")[0] for key in fingerprint or keys}
    parts = {part for key in wanted for part in _parents(key)}
    return max(candidates(model, name).values(), key=lambda root: len(parts & set(plain_modules(root))))


def is_inside(key: str, modules: set[str]) -> bool:
    """Check whether ``key`` names a tensor or module inside one of the ``modules``."""
    return any(parent in modules for parent in _parents(key)[:-1])


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def refuse_other_tensors(
    root: nn.Module, file: Any, keys: list[str], expected: Mapping[str, Tensor], what: str
) -> None:
    """Refuse a file whose tensor names, shapes or dtypes differ from the expected adapter's.

    PEFT also saves the base's embeddings with an adapter that targets them; these must equal this model's.

    Raises:
        ValueError: the tensors differ.
    """
    own = {plain: name for name, plain in base_names(root).items()}
    there = set(keys)
    missing = [key for key in expected if key not in there]
    more = [key for key in keys if key not in expected and key.replace("base_layer.", "") not in own]
    for names, how in ((missing, "it lacks"), (more, "this model does not have")):
        if names:
            raise ValueError(
                explain(
                    f"{what} has other tensors", f"{how} {first_few(names)}", "Load the model that it was trained with"
                )
            )
    for key in keys:
        part = file.get_slice(f"{PREFIX}{key}")
        shape, dtype = list(part.get_shape()), part.get_dtype()
        if key not in expected:
            parameter = root.get_parameter(own[key.replace("base_layer.", "")])
            if shape != list(parameter.shape) or not _is_same(parameter, file.get_tensor(f"{PREFIX}{key}")):
                why = f"'{key}' differs from this model's, so the base was changed"
                raise ValueError(explain(f"{what} holds a weight of its base", why, "Load that base, or use PeftModel"))
        elif shape != list(expected[key].shape):
            why = f"'{key[:120]}' is {shape}, expected {list(expected[key].shape)}"
            raise ValueError(explain(f"{what} is for another model", why, "Load the model that it was trained with"))
        elif DTYPES.get(dtype, torch.bool).is_floating_point != expected[key].is_floating_point() or dtype[:2] == "F8":
            why = f"'{key[:120]}' is in {dtype}, expected {expected[key].dtype}"
            raise ValueError(explain(f"{what} holds tensors of another dtype", why, "Save it again"))


def refuse_not_finite(file: Any, what: str) -> None:
    """Refuse an adapter with NaN or infinite values.

    Raises:
        ValueError: a tensor has such values; the message names the first one.
    """
    for key in file.keys():  # noqa: SIM118 (not a mapping)
        tensor = file.get_tensor(key)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            why = f"'{key[:120]}' holds NaN or infinity, so its training failed"
            way_out = "Use an earlier save, or repair the file with torch.nan_to_num and safetensors.torch.save_file"
            raise ValueError(explain(f"the adapter in {what}", why, way_out))


def refuse_sizes_beyond_the_layers(place: Place, config: Any, file: Any, what: str) -> None:
    """Refuse sizes in the settings that exceed the layers' sizes, before memory of that size is allocated.

    Raises:
        ValueError: a rank exceeds all layers' sizes, or another size exceeds all sizes in the model and in the file.
    """
    most_in_layers, most_in_file = _largest_size(place), 1
    for key in file.keys():  # noqa: SIM118 (not a mapping)
        most_in_file = max([most_in_file, *file.get_slice(key).get_shape()])
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        if _NO_SIZE.search(setting.name) or value == setting.default or setting.name == "trainable_token_indices":
            continue
        is_rank = setting.name == "r" or "rank" in setting.name
        limit = most_in_layers if is_rank else max(most_in_layers, most_in_file)
        beyond = [number for number in _integers(value) if number > limit]
        if beyond:
            why = f"{setting.name}={str(beyond[0])[:30]} is more than {limit}, the size of the largest target layer"
            raise ValueError(explain(f"the adapter in {what} is for another model", why, "Do not use this file"))


def _largest_size(place: Place) -> int:
    """Return the largest dimension of the layers and tensors that the adapter is for."""
    layers, sizes = plain_modules(place.root), [1]
    for name in place.targets:
        # A quantised weight is packed, so the layer's attributes are read too.
        sizes += [getattr(layers[name], f"{end}_features", 1) for end in ("in", "out")]
        sizes += [size for parameter in layers[name].parameters(recurse=False) for size in parameter.shape]
    for name in set(place.tensors.values()):
        tensors = _meta_tensors(layers[name])
        sizes += [size for parameter in tensors.parameters() for size in parameter.shape]
    return max(sizes)


def _integers(value: object) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list | set | tuple) else [value]
    return [number for number in values if type(number) is int]  # excludes bool, which is a subclass of int


def _is_same(parameter: Tensor, stored: Tensor) -> bool:
    # In bfloat16, since the base may have been saved in another precision.
    return bool((parameter.detach().cpu().to(torch.bfloat16) == stored.to(torch.bfloat16)).all())
