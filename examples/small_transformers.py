"""Build small models of the classes of transformers, each with a batch that it can be trained on.

A configuration is derived from the default one of a class: few layers, heads and words, and no dropout. Where the model
cannot be built so, or has no finite loss, a few changes are tried one after the other, and then two of them together.
"""

import functools
import itertools
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from examples.small_batches import WORDS, Batch, list_batches

SEARCH_S = 15  # of the processor, for one class
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
LARGE = 2**20
# Names of numbers in configurations → small values; the first that matches counts.
SMALL = {
    r"(image|audio)_token_(id|index)": 3,
    r"feat_extract|conv_(dim|stride|kernel)": LARGE,  # of one length, and small
    r"tokens_per_image|soft_tokens": 4,
    r"per_tok|top_?k|num_selected|moe_k": 2,
    r"vocab|num_embeddings$|num_tokens$": WORDS,
    r"^num_labels$": 3,
    r"layer_offset": 1,
    r"mamba_(d_head|head_?dim)": 16,
    r"(key_value|kv)_heads|num_key_value|multi_query_group": 2,
    r"head_?dim|d_head$|d_kv|kv_channels|attention_head_size|dim_head|head_size|qk_\w*dim|v_dim|rotary_dim": 8,
    r"heads?$|heads?_\w*$|n_heads?|num_attention_head": 4,
    r"(layers?|blocks?|depth|_layer)$|num_hidden_layers|n_layers?|layers?_\w*num": 2,
    r"intermediate|ffn|d_ff|mlp_dim|n_inner|inner_dim|feed_forward|mlp_hidden|d_inner|d_ssm": 64,
    r"lora_rank|low_rank|lora_dim": 8,
    r"experts?$|num_(local|routed|shared)?_?experts|expert_num": 4,
    r"n_group|topk_group|num_groups|n_groups|num_group": 1,
    r"hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|^dim$|width|channels?$|_dim$|hidden": 32,
    r"position|n_ctx|max_seq|max_length|seq_len|source|target|context_length|window": 64,
    r"image_size|input_size|img_size": 32,
    r"patch_size|patch_stride": 8,
    r"num_mel_bins|feature_size|num_mel|feat_per_channel": 16,
}
# Settings that are no numbers, or have no default that works.
GIVEN: dict[str, Any] = {
    "default_language": "en_XX",
    "attention_types": [[["global", "local"], 1]],
    "axial_pos_embds_dim": [16, 16],
    "axial_pos_shape": [4, 4],
    "image_grid_pinpoints": [[32, 32]],
    "projector_patch_to_query_dict": {16: 4, 64: 4},
    "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4},
}
# What stands for None with the change that fills it.
MISSING: dict[str, Any] = {
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
ROTATIONS = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
Changes = tuple[tuple[str, Any], ...]
DEFAULT, FILLED = object(), object()  # as the class has it; a small number in the place of None
# What is tried one after the other, and in pairs: settings whose names match a pattern have another value.
CHANGES: Changes = (
    ("$^", DEFAULT),
    ("(key_value|kv)_heads", 4),
    ("^rope_(parameters|scaling)$", ROTATIONS),
    ("", FILLED),
    ("type", DEFAULT),
    ("head_dim|head_size|d_kv", DEFAULT),
    ("head_?dim|d_head", 16),
    ("heads", DEFAULT),
    ("hidden_size_per_layer", 0),
    ("^is_decoder$", True),
)
# Networks for images are small with the widths that they have.
WIDER: Changes = (
    ("embed_dim|hidden_(size|dim)|_dim$|channels", DEFAULT),
    ("image_size|patch|stride|kernel", DEFAULT),
    (r"^(?!.*drop)(?!.*(layers?|blocks?|depths?)$)", DEFAULT),
)


class Built(NamedTuple):
    """A small model, a batch for it, and what the batch holds, such as "text and images"."""

    net: nn.Module
    batch: Batch
    inputs: str


def list_classes(task: str) -> Iterator[tuple[str, str]]:
    """Return the classes with the first type of model of each."""
    seen: set[str] = set()
    for kind, names in getattr(modeling_auto, TASKS[task]).items():
        name = names[0] if isinstance(names, tuple | list) else names
        if name not in seen:
            seen.add(name)
            yield kind, name


def small_settings(config: Any, changes: Changes) -> dict[str, Any]:
    """Return arguments that make a configuration small."""
    chosen: dict[str, Any] = {}
    values = vars(config)
    layers = {value for name, value in values.items() if re.search("layers?$", name) and type(value) is int}
    for name, value in values.items():
        change = _find_change(name, changes)
        if isinstance(value, transformers.PretrainedConfig):
            chosen[name] = {"model_type": value.model_type, **small_settings(value, changes)}
        elif name.startswith("_") or change is DEFAULT:
            continue
        elif change is not None:
            chosen[name] = {**(value or {}), **change} if isinstance(change, dict) else change
        elif name in GIVEN:
            chosen[name] = GIVEN[name]
        elif isinstance(value, list) and len(value) in layers - {1, 2}:
            chosen[name] = _of_two_layers(name, value)
        elif value is not None:
            chosen.update(_small_value(name, value, values))
        elif ("", FILLED) in changes and (small := MISSING.get(name, _small(name, LARGE))) != LARGE:
            chosen[name] = small
    return chosen


def _find_change(name: str, changes: Changes) -> Any:
    found = [value for pattern, value in changes if value is not FILLED and re.search(pattern, name)]
    return found[0] if found else None


def _of_two_layers(name: str, value: list[Any]) -> list[Any]:
    """Shorten a list of one entry per layer to two, which differ if any do."""
    if all(type(item) is int for item in value):
        return [_small(name.rstrip("s"), item) for item in value[:2]]
    kinds = list(dict.fromkeys(map(repr, value)))
    return [next(item for item in value if repr(item) == kind) for kind in (kinds * 2)[:2]]


def _small_value(name: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return a small value of one setting by its name, or nothing."""
    if isinstance(value, bool):
        return {}
    if re.search("token_(id|index)$", name) and isinstance(value, int):
        special = sorted(key for key in values if re.search("token_(id|index)$", key))
        return {name: value if value < 3 else 3 + special.index(name)}
    if isinstance(value, float) and re.search("drop|jitter|noise|mask_\\w*prob", name):
        return {name: 0.0}
    if name in ("layer_types", "layers_block_type") and isinstance(value, list):
        return {name: list(dict.fromkeys(value))[:2] if len(set(value)) > 1 else value[:2]}
    if re.search("feature_layers?$", name):
        return {name: -1 if isinstance(value, int) else [-1 for _ in value]}
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        return {name: [_small(name.rstrip("s"), item) for item in value]}
    if isinstance(value, int):
        return {name: _small(name, value)}
    return {}


def _small(name: str, value: int) -> int:
    if value < 2:
        return value
    return next((min(value, small) for pattern, small in SMALL.items() if re.search(pattern, name)), value)


def build(task: str, kind: str, name: str) -> Built:
    """Build a small model of a class with a batch, or raise the first error if no way that is tried works."""
    changes, which = _find_way(task, kind, name)
    net = _make_model(kind, name, changes)
    inputs, make = list_batches(task, net)[which]
    return Built(net, make(), inputs)


@functools.cache
def _find_way(task: str, kind: str, name: str) -> tuple[Changes, int]:
    """Return the changes of the configuration and the number of the batch with which a model can be trained."""
    errors: list[Exception] = []
    text_alone: list[tuple[Changes, int]] = []
    takes_media = task in ("vision-language", "speech")
    deadline = time.process_time() + SEARCH_S
    singles = CHANGES + WIDER if task == "images" else CHANGES
    for changes in [*((change,) for change in singles), *itertools.combinations(singles[1:], 2)]:
        if time.process_time() > deadline:
            break
        which, inputs = _find_batch(task, kind, name, changes, errors)
        if which is None:
            continue
        if not (takes_media and inputs == "text"):
            return changes, which
        text_alone.append((changes, which))  # with other changes it may take images or sounds
    if text_alone:
        return text_alone[0]
    raise errors[0]


def _find_batch(task: str, kind: str, name: str, changes: Changes, errors: list[Exception]) -> tuple[int | None, str]:
    """Return the first batch on which a model can be trained, and what it holds; note why others are not."""
    try:
        net = _make_model(kind, name, changes)
    except Exception as error:
        errors.append(error)
        return None, ""
    for which, (inputs, make) in enumerate(list_batches(task, net)):
        try:
            refuse_untrainable(net, make(), inputs)
        except Exception as error:
            errors.append(error)
        else:
            return which, inputs
    return None, ""


def _make_model(kind: str, name: str, changes: Changes) -> nn.Module:
    make_model: Any = getattr(transformers, name)
    make_config: Any = make_model.config_class or configuration_auto.CONFIG_MAPPING[kind]
    config = make_config(**small_settings(make_config(), changes))
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        for token in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    torch.manual_seed(0)
    return make_model(config).train()


def refuse_untrainable(net: nn.Module, batch: Batch, inputs: str) -> None:
    """Raise if the loss of a batch is not finite, or if its gradient does not depend on what it holds beside text."""
    before = _gradients(net, batch)
    media = {name: values.roll(1, 0) for name, values in batch.items() if values.is_floating_point()}
    if "text and" in inputs and media:
        after = _gradients(net, {**batch, **media})
        if all(torch.equal(values, after[name]) for name, values in before.items()):
            raise ValueError(f"its gradient does not depend on {', '.join(media)}")


def _gradients(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss = loss_of(net, batch)
    if not loss.isfinite():
        raise ValueError(f"its loss is {loss.item()}")
    net.zero_grad()
    loss.backward()
    found = {name: value.grad for name, value in net.named_parameters() if value.grad is not None}
    if not all(gradient.isfinite().all() for gradient in found.values()):
        raise ValueError("its gradient is not finite")
    net.zero_grad()
    return found


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return net(**batch).loss
