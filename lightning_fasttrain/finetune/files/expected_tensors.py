"""Create the tensors that an adapter's file must hold for a model, and compare the file with them."""

import copy
import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.finetune.adapters.initializations import copy_config_for
from lightning_fasttrain.finetune.files.adapter_layers import PREFIX, TOKENS, Place, plain_modules, refuse_other_model
from lightning_fasttrain.finetune.quantized.load_quantized import DTYPES
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.finetune.quantized.quantized_tensor import shown_as_parameters
from lightning_fasttrain.finetune.selection.base_fingerprint import base_names, first_few
from lightning_fasttrain.finetune.selection.qualified_names import names_not_in
from lightning_fasttrain.finetune.selection.targets import match_exactly, method_of, require_peft

if TYPE_CHECKING:
    from peft import PeftConfig

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
