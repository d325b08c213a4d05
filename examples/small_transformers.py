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

SEARCH_S = 12
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
# Names of numbers in configurations → small values; the first that matches counts.
SMALL = {
    r"(image|audio)_token_(id|index)": 3,
    r"feat_extract|conv_(dim|stride|kernel)": 2**20,  # of one length, and small
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
    "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4},
}
DEFAULT, FILLED = object(), object()  # as the class has it; a small number in the place of None
# What is tried one after the other, and in pairs: settings whose names match a pattern have another value.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("$^", DEFAULT),
    ("(key_value|kv)_heads", 4),
    ("", FILLED),
    ("type", DEFAULT),
    ("head_dim|head_size|d_kv", DEFAULT),
    ("head_?dim|d_head", 16),
    ("heads", DEFAULT),
    ("hidden_size_per_layer", 0),
    ("^is_decoder$", True),
)
# Networks for images are small with the widths that they have.
WIDER: tuple[tuple[str, Any], ...] = (
    ("embed_dim|hidden_(size|dim)|_dim$|channels", DEFAULT),
    ("image_size|patch|stride|kernel", DEFAULT),
    (r"^(?!.*(layers?|blocks?|depths?)$)", DEFAULT),
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


def small_settings(config: Any, changes: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return arguments that make a configuration small."""
    chosen: dict[str, Any] = {}
    values = vars(config)
    layers = {value for name, value in values.items() if re.search("layers?$", name) and type(value) is int}
    for name, value in values.items():
        if isinstance(value, transformers.PretrainedConfig):
            chosen[name] = {"model_type": value.model_type, **small_settings(value, changes)}
        elif name.startswith("_"):
            continue
        elif (change := _find_change(name, changes)) is not None:
            if change is not DEFAULT:
                chosen[name] = change
        elif name in GIVEN:
            chosen[name] = GIVEN[name]
        elif value is None:
            if ("", FILLED) in changes and (small := _small(name, 2**20)) < 2**20:
                chosen[name] = small
        elif isinstance(value, list) and len(value) in layers - {1, 2}:
            chosen[name] = _of_two_layers(name, value)
        else:
            chosen.update(_small_value(name, value, values))
    return chosen


def _find_change(name: str, changes: list[tuple[str, Any]]) -> Any:
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
    if isinstance(value, dict) and "mrope_section" in value:
        return {name: {**value, "mrope_section": [2, 1, 1]}}
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
    batch = make()
    net.zero_grad()
    return Built(net, batch, inputs)


@functools.cache
def _find_way(task: str, kind: str, name: str) -> tuple[tuple[tuple[str, Any], ...], int]:
    """Return the changes of the configuration and the number of the batch with which a model can be trained."""
    errors: list[Exception] = []
    text_alone: tuple[tuple[tuple[str, Any], ...], int] | None = None
    deadline = time.monotonic() + SEARCH_S
    singles = CHANGES + WIDER if task == "images" else CHANGES
    for changes in [*((change,) for change in singles), *itertools.combinations(singles[1:], 2)]:
        if time.monotonic() > deadline:
            break
        try:
            net = _make_model(kind, name, changes)
        except Exception as failure:
            errors.append(failure)
            continue
        for which, (inputs, make) in enumerate(list_batches(task, net)):
            if inputs == "text" and text_alone is not None:
                continue
            try:
                _refuse_untrainable(net, make(), inputs)
            except Exception as failure:
                errors.append(failure)
                continue
            if inputs == "text" and task in (
                "vision-language",
                "speech",
            ):  # images or sounds may be read with other changes
                text_alone = changes, which
            else:
                return changes, which
    if text_alone is not None:
        return text_alone
    raise errors[0]


def _make_model(kind: str, name: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    make_model: Any = getattr(transformers, name)
    make_config: Any = make_model.config_class or configuration_auto.CONFIG_MAPPING[kind]
    config = make_config(**small_settings(make_config(), list(changes)))
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        for token in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    torch.manual_seed(0)
    return make_model(config).train()


def _refuse_untrainable(net: nn.Module, batch: Batch, inputs: str) -> None:
    """Raise if the loss of a batch is not finite, or if its gradient does not depend on what it holds beside text."""
    before = _gradients(net, batch)
    media = {name: -values for name, values in batch.items() if values.is_floating_point()}
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
    net.zero_grad()
    return found


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return net(**batch).loss
