"""The tensors that an adapter's file must hold for a model, by layer."""

import copy
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import Sharing, is_inside, list_names_above
from lightning_fasttrain.finetune.adapters.initializations import copy_config_for
from lightning_fasttrain.finetune.files.adapter_config import WEIGHTS
from lightning_fasttrain.finetune.quantized.load_quantized import DTYPES
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.finetune.quantized.quantized_tensor import shown_as_parameters
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    adapter_holders,
    adapters_on,
    base_names,
    first_few,
    names_not_in,
    names_outside,
    plain_name,
    prefix_of,
    refuse_other_base,
)
from lightning_fasttrain.finetune.selection.targets import (
    find_target_parameters,
    has_ending,
    match_exactly,
    method_of,
    require_peft,
)

if TYPE_CHECKING:
    from peft import PeftConfig

PREFIX = "base_model.model."
WRONG_BASE = "Load the base that it was trained with, or pass check_base=False if you know that it matches"
TOKENS = ".token_adapter.trainable_tokens_delta"  # PEFT's name for single rows of an embedding


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
        copies: tensors under further names of a module in several places → those under its first name.
    """

    prefix: str
    root: nn.Module
    targets: list[str]
    whole: list[str]
    scaled: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)


def refuse_other_model(what: str, why: str) -> NoReturn:
    """Refuse an adapter whose file does not fit the model.

    Raises:
        ValueError: always.
    """
    raise ValueError(explain(f"{what} is for another model", why, "Load the model that it was trained with"))


def find_place(
    model: nn.Module, keys: list[str], config: "PeftConfig", name: str, source: Path, fingerprint: Fingerprint | None
) -> Place:
    """Find the module in ``model`` that has all layers named in the file, and no further ones that the settings name.

    Raises:
        ValueError: no module has them, or several have; the module has another fingerprint than the file's base.
    """
    if not _layers_in_file(keys, config):
        why = f"it has no tensors of a {method_of(config)} adapter"
        raise ValueError(explain(f"{source / WEIGHTS}", why, "Save it again"))
    place = _find_only_place(model, keys, config, name)
    root = place.root if place is not None else _nearest_place(model, keys, fingerprint, name)
    what = f"the adapter in {source}"
    if fingerprint is not None:
        refuse_other_base(fingerprint, root, what, WRONG_BASE)
    layers, keys = plain_modules(root), names_not_in(keys, _find_copies(root, keys))
    targets = _layers_in_file(keys, config)
    if place is None:
        absent = names_not_in(targets, layers) or names_outside(keys, set(targets))
        refuse_other_model(what, f"{type(model).__name__} has no {first_few(absent)}")
    meant = {*_layers_meant(layers, config), *_tensors_meant(place.root, config).values()}
    more = sorted(meant - {*targets, *place.whole})
    if more:
        refuse_other_model(what, f"it has no tensors for {first_few(more)}, which its settings include")
    return place


def _find_only_place(model: nn.Module, keys: list[str], config: "PeftConfig", name: str) -> Place | None:
    found, every_key = [], keys
    for prefix, root in _candidates(model, name).items():
        copies = _find_copies(root, every_key)
        keys = names_not_in(every_key, copies)
        targets, tokens = _layers_in_file(keys, config), _tokens_in_file(keys, config)
        inside = {*targets, *tokens}
        rest = names_outside(keys, inside)
        layers, owned = plain_modules(root), set(base_names(root).values())
        whole = _find_whole(layers, config, rest)
        foreign = names_outside(names_not_in(rest, owned), set(whole))
        if inside <= layers.keys() and not foreign:
            tensors = {tensor: name for tensor, name in _tensors_meant(root, config).items() if name in targets}
            alone = names_not_in(targets, tensors.values())
            found.append(Place(prefix, root, alone, whole, tokens=tokens, tensors=tensors, copies=copies))
    if len(found) > 1:
        names = [place.prefix.removesuffix(".") or "the model itself" for place in found]
        why = f"{first_few(names)} have its layers"
        way_out = f"Name one: load_adapter_(model.{names[0]}, …)"
        raise ValueError(explain(f"{type(model).__name__} has several places for the adapter", why, way_out))
    return next(iter(found), None)


def _find_copies(root: nn.Module, keys: Collection[str]) -> dict[str, str]:
    """Map the tensors under further names of modules in several places to those under the module's first name."""
    holders, firsts = adapter_holders(root), dict[str, str]()
    for names in Sharing(root).names.values():
        first, *others = [plain for name in names if (plain := plain_name(name, holders)) is not None] or [""]
        firsts.update(dict.fromkeys(others, first))
    found: dict[str, str] = {}
    for key in keys:
        above = next((name for name in reversed(list_names_above(key)) if name in firsts), None)
        if above is not None and firsts[above] != above:
            found[key] = f"{firsts[above]}{key.removeprefix(above)}"
    return {key: first for key, first in found.items() if first in keys}


def _layers_in_file(keys: Iterable[str], config: "PeftConfig") -> list[str]:
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
            # PEFT's layer for an attention has another one inside, for the output projection.
            name = name.removesuffix(".base_layer.out_proj")
            # PEFT's layers for the tensors of one module are nested.
            if getattr(config, "target_parameters", None):
                while name.endswith(".base_layer"):
                    name = name.removesuffix(".base_layer")
            found[name] = None
    return list(found)


def _tensors_meant(root: nn.Module, config: "PeftConfig") -> dict[str, str]:
    """Map the tensors in this model that match the file's settings to the names of their modules."""
    try:
        return find_target_parameters(root, getattr(config, "target_parameters", None) or ())
    except ValueError:  # the file is for another model
        return {}


def _tokens_in_file(keys: Iterable[str], config: "PeftConfig") -> dict[str, list[int]]:
    """Map the embeddings that the file holds single rows of to the rows' indices in the settings."""
    rows = getattr(config, "trainable_token_indices", None) or {}
    found: dict[str, list[int]] = {}
    for key in keys:
        name = key.removesuffix(TOKENS)
        if name != key:
            if isinstance(rows, dict):
                found[name] = next((own for end, own in rows.items() if has_ending(name, [end])), [])
            else:
                found[name] = rows
    return found


def _candidates(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Map prefixes to the modules whose layers an adapter's file may name: adapted modules, or else candidates."""
    from transformers import PreTrainedModel

    there: dict[str, nn.Module] = {}
    found: dict[str, nn.Module] = {}
    for place, module in model.named_modules():
        if name in adapters_on(module):
            there[prefix_of(place)] = module
        if isinstance(module, PreTrainedModel):
            found[prefix_of(place)] = module
    if there:
        return there
    if isinstance(model, L.LightningModule):
        for child, module in model.named_children():
            found[f"{child}."] = module
    return {**found, "": model}


def plain_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Map the names that modules have without adapters to the modules; adapter modules are skipped."""
    holders = adapter_holders(root)
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if plain := plain_name(name, holders):
            found[plain] = module
    return found


def _layers_meant(layers: Mapping[str, nn.Module], config: "PeftConfig") -> set[str]:
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
        if has_ending(name, ends) and not has_ending(name, out) and not trains_whole:
            meant.add(name)
    return meant


def _find_whole(layers: Mapping[str, nn.Module], config: "PeftConfig", rest: list[str]) -> list[str]:
    found: list[str] = []
    ends = tuple(getattr(config, "modules_to_save", None) or ())
    for name in layers:
        if name.endswith(ends) and not is_inside(name, found) and any(key.startswith(f"{name}.") for key in rest):
            found.append(name)
    return found


def _nearest_place(model: nn.Module, keys: list[str], fingerprint: Mapping[str, str] | None, name: str) -> nn.Module:
    """Return the module that has most of the names, for an error message about the missing ones."""
    wanted = {key.rpartition(".")[0] for key in fingerprint or keys}
    parts = wanted.union(*map(list_names_above, wanted))
    return max(_candidates(model, name).values(), key=lambda root: len(parts & set(plain_modules(root))))


# Integers that are not sizes.
_NO_SIZE = re.compile("seed|key|alpha|step|init|final|warmup|interval|delta|transform|lambda")


def expected_tensors(place: Place, config: "PeftConfig") -> dict[str, Tensor]:
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
            # The warnings are raised again when the adapter is added.
            with warnings.catch_warnings(action="ignore"):
                peft.inject_adapter_in_model(config, skeleton, adapter_name="file")
            return get_peft_model_state_dict(skeleton, adapter_name="file", save_embedding_layers=False)
        except NotImplementedError:
            # The initialization of a few kinds reads values, which a meta tensor does not have.
            continue
        except Exception as error:
            why = f"PEFT cannot create it: {error}"
            raise ValueError(explain(f"the adapter's {method_of(config)}", why, "Save it again")) from error
    why = "PEFT cannot create it on the meta device"
    raise ValueError(explain(f"{method_of(config)}", why, "Use peft.PeftModel"))


def _config_for(place: Place, config: "PeftConfig") -> Any:
    config = copy_config_for(config, match_exactly(place.targets), match_exactly(place.scaled), place.whole or None)
    if place.tokens:
        config.trainable_token_indices = place.tokens
    if place.tensors:
        config.target_parameters = list(place.tensors)
    return config


def _skeleton(place: Place, config: "PeftConfig", device: str) -> nn.Module:
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


def refuse_other_tensors(
    root: nn.Module, file: object, keys: list[str], expected: Mapping[str, Tensor], what: str
) -> None:
    """Refuse a file whose tensor names, shapes or dtypes differ from the expected adapter's.

    PEFT also saves the base's embeddings with an adapter that targets them; these must equal this model's.

    Raises:
        ValueError: the tensors differ.
    """
    own = {plain: name for name, plain in base_names(root).items()}
    missing = names_not_in(expected, set(keys))
    more = [key for key in keys if key not in expected and key.replace("base_layer.", "") not in own]
    for names, how in ((missing, "it lacks"), (more, "this model does not have")):
        if names:
            refuse_other_model(what, f"{how} {first_few(names)}")
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
            refuse_other_model(what, why)
        elif DTYPES.get(dtype, torch.bool).is_floating_point != expected[key].is_floating_point() or dtype[:2] == "F8":
            why = f"'{key[:120]}' is in {dtype}, expected {expected[key].dtype}"
            raise ValueError(explain(f"{what} holds tensors of another dtype", why, "Save it again"))


def refuse_not_finite(file: object, what: str) -> None:
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


def refuse_other_ties(place: Place, file: object, what: str) -> None:
    """Refuse different values for modules that trained in full and are tied in this model; PEFT trains them apart.

    Raises:
        ValueError: they differ; the message names two.
    """
    layers, first = plain_modules(place.root), dict[nn.Parameter, str]()
    for name in place.whole:
        for key, parameter in layers[name].named_parameters():
            mine, other = f"{name}.{key}", first.setdefault(parameter, f"{name}.{key}")
            if mine == other:
                continue
            if not torch.equal(file.get_tensor(f"{PREFIX}{mine}"), file.get_tensor(f"{PREFIX}{other}")):
                why = f"'{mine}' and '{other}' share their weight in this model, and differ in the file"
                raise ValueError(explain(what, why, "Untie the two in the model first"))


def refuse_other_copies(place: Place, file: object, what: str) -> None:
    """Refuse different values for one module in several places; PEFT trains the places apart.

    Raises:
        ValueError: they differ; the message names two.
    """
    for key, first in place.copies.items():
        if not torch.equal(file.get_tensor(f"{PREFIX}{key}"), file.get_tensor(f"{PREFIX}{first}")):
            why = f"'{first}' and '{key}' are of one module in this model, and differ in the file"
            way_out = "Give each place a module of its own first, such as a copy.deepcopy"
            raise ValueError(explain(what, why, way_out))


def refuse_sizes_beyond_the_layers(place: Place, config: "PeftConfig", file: object, what: str) -> None:
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
        sizes += [getattr(layers[name], "in_features", 1), getattr(layers[name], "out_features", 1)]
        for parameter in layers[name].parameters(recurse=False):
            sizes += parameter.shape
    for name in set(place.tensors.values()):
        for parameter in _meta_tensors(layers[name]).parameters():
            sizes += parameter.shape
    return max(sizes)


def _integers(value: object) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | set | tuple):
        value = [value]
    # ``isinstance`` would include bool, which is a subclass of int.
    return [number for number in value if type(number) is int]


def _is_same(parameter: Tensor, stored: Tensor) -> bool:
    # In bfloat16, since the base may have been saved in another precision.
    return bool((parameter.detach().cpu().to(torch.bfloat16) == stored.to(torch.bfloat16)).all())


def refuse_other_tokens(place: Place, file: object, what: str) -> None:
    """Refuse rows that the embedding or head in this model lacks, or whose count differs from the settings.

    Raises:
        ValueError: the rows do not fit; the message names them.
    """
    layers = plain_modules(place.root)
    for name, rows in place.tokens.items():
        table = layers[name]
        stored = file.get_slice(f"{PREFIX}{name}{TOKENS}").get_shape()[0]
        known = getattr(table, "num_embeddings", getattr(table, "out_features", 0))
        wrong = [row for row in rows if not 0 <= row < known]
        if wrong or len(set(rows)) != stored:
            why = f"it trained rows {first_few(list(map(str, wrong or rows)))} of '{name}', "
            why += f"which has {known} rows, and holds {stored} rows"
            way_out = "Add the same tokens to the base first with resize_token_embeddings"
            raise ValueError(explain(f"the adapter in {what} is for another vocabulary", why, way_out))
