"""Match the tensors in an adapter's file to layers of a model."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lightning as L
from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import Sharing, is_inside, list_names_above
from lightning_fasttrain.finetune.files.adapter_folder import WEIGHTS
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    adapter_holders,
    adapters_on,
    base_names,
    first_few,
    plain_name,
    refuse_other_base,
)
from lightning_fasttrain.finetune.selection.qualified_names import names_not_in, names_outside, prefix_of
from lightning_fasttrain.finetune.selection.targets import find_target_parameters, has_ending, method_of, require_peft

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
