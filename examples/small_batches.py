"""Make batches for small models of transformers: texts, images, sounds, or texts with one image or sound each.

What a model takes is read from the arguments of its forward and the sizes in its configuration. Pixels and sounds have
one of several layouts, which are listed for the caller to try. Where a model replaces the embeddings of certain tokens,
there are as many of them as the model itself computes features of an image or sound.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

WORDS, LENGTH, ROWS, GRID = 99, 12, 6, 4
Batch = dict[str, Tensor]
Way = tuple[str, Callable[[], Batch]]


class Layout(NamedTuple):
    """Images or sounds as one tensor, under the name that a model's forward has for them."""

    word: str  # "images" or "sound"
    name: str
    values: Tensor
    size: int  # the side of an image in pixels, or the steps of a sound


def list_batches(task: str, net: nn.Module) -> list[Way]:
    """Return what batches that a model may take hold, and functions that make them, in the order to try them in."""
    names = set(inspect.signature(net.forward).parameters)
    layouts = {"images": image_layouts(net, names), "sound": sound_layouts(net, names)}
    text: Way = "text", functools.partial(text_batch, task, net)
    alone: list[Way] = []
    mixed: list[Way] = []
    bare: list[Way] = []  # without sizes and masks
    for word, several in layouts.items():
        for layout in several:
            alone.append((word, functools.partial(media_batch, task, net, layout)))
            mixed.append((f"text and {word}", functools.partial(mixed_batch, task, net, layout)))
            bare.append((f"text and {word}", functools.partial(mixed_batch, task, net, layout, is_bare=True)))
    if "input_ids" not in names:
        return alone
    if task in ("images", "sound", "speech"):
        return [*alone, *mixed, *bare, text]
    return [*mixed, *bare, text] if task == "vision-language" else [text, *mixed, *bare]


def text_batch(task: str, net: Any, before: int = 0, token: int = 0) -> Batch:
    """Return texts that are padded on the right, with some tokens of an image or sound before each of them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([12, 7, 9, 12, 5, 8])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    pad = getattr(net.config.get_text_config(), "pad_token_id", None) or 0
    ids = tokens.masked_fill(mask == 0, pad)
    if before and not getattr(net.config, "is_encoder_decoder", False):
        labels = torch.cat([torch.full((ROWS, before), -100), labels], 1)
    if task in ("images", "sound"):
        labels = torch.arange(ROWS) % net.config.num_labels
    ids = torch.cat([torch.full((ROWS, before), token), ids], 1)
    mask = torch.cat([torch.ones(ROWS, before, dtype=torch.long), mask], 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def media_batch(task: str, net: Any, layout: Layout) -> Batch:
    """Return images or sounds with labels alone."""
    batch = {layout.name: layout.values, **extra_inputs(net, layout, None, None)}
    return {**batch, "labels": text_batch(task, net)["labels"]}


def mixed_batch(task: str, net: Any, layout: Layout, is_bare: bool = False) -> Batch:
    """Return texts with an image or sound in each."""
    word = "image" if layout.word == "images" else "audio"
    names = (f"{word}_token_id", f"{word}_token_index", f"{word}_patch_id")
    given = [getattr(net.config, name, None) for name in names]
    token = next((value for value in given if isinstance(value, int)), 3)
    text = text_batch(task, net, count_features(net, word, layout, is_bare), token)
    ids = text["input_ids"]
    if is_bare:
        return {**text, layout.name: layout.values}
    return {**text, layout.name: layout.values, **extra_inputs(net, layout, ids, ids == token)}


def count_features(net: Any, word: str, layout: Layout, is_bare: bool) -> int:
    """Return how many tokens of a row a model replaces by features of its image or sound."""
    owners = [getattr(net, "model", None), net]
    names = [f"get_{word}_features", f"get_{word}_embeds"]
    found = [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]
    if not found:
        return 0
    extra = {} if is_bare else extra_inputs(net, layout, None, None)
    inputs = {layout.name: layout.values, **extra}
    taken = set(inspect.signature(found[0]).parameters)
    features: Any = found[0](**{name: values for name, values in inputs.items() if name in taken})
    features = getattr(features, "pooler_output", features)
    several = [features] if isinstance(features, Tensor) else list(features)
    total = sum(values.numel() // values.shape[-1] for values in several)
    if total % ROWS:
        raise ValueError(f"{total} features of {ROWS} rows")
    return total // ROWS


def extra_inputs(net: Any, layout: Layout, ids: Tensor | None, placed: Tensor | None) -> Batch:
    """Return what else a forward takes about an image or sound: sizes, grids, masks, and where its tokens are."""
    found = _about_images(layout) if layout.word == "images" else _about_sounds(layout)
    if ids is not None and placed is not None:
        found.update(_about_places(layout, ids, placed))
    names = inspect.signature(net.forward).parameters
    return {name: given for name, given in found.items() if name in names}


def _about_images(layout: Layout) -> Batch:
    values, rows = layout.values, torch.ones(ROWS, 1, dtype=torch.long)
    grid = rows * torch.tensor([1, GRID, GRID])
    found = {
        "image_grid_thw": grid,
        "image_grid_hw": grid[:, 1:],
        "spatial_shapes": grid[:, 1:],
        "target_sizes": grid[:, 1:],
        "image_sizes": rows * torch.tensor([layout.size, layout.size]),
        "image_merge_sizes": 2 * rows[:, 0],
        "num_local_patches": 0 * rows[:, 0],
        "aspect_ratio_ids": rows,
        "pixel_attention_mask": torch.ones(_without_channels(values), dtype=torch.long),
        "high_res_pixel_values": values,
        "pixel_values_images": values,
        "image_position_ids": torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).repeat(ROWS, 1, 1),
    }
    if values.ndim == 6:
        found["aspect_ratio_mask"] = torch.ones(values.shape[:3], dtype=torch.long)
    return found


def _about_sounds(layout: Layout) -> Batch:
    mask = torch.ones(ROWS, layout.size, dtype=torch.long)
    return dict.fromkeys(("input_features_mask", "feature_attention_mask"), mask)


def _about_places(layout: Layout, ids: Tensor, placed: Tensor) -> Batch:
    found = {name: placed.long() for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")}
    found["qformer_input_ids"] = ids
    found["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    found["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
    found["image_embeds_position_mask"] = placed
    if layout.values.ndim == 6:
        found["cross_attention_mask"] = torch.ones(*ids.shape, *layout.values.shape[1:3], dtype=torch.long)
    return found


def _without_channels(values: Tensor) -> torch.Size:
    """Return the shape of a mask of pixels or patches."""
    if values.ndim == 5:
        return values.shape[:2] + values.shape[3:]
    return values.shape[:2] if values.ndim == 3 else values.shape


def image_layouts(net: Any, names: set[str]) -> list[Layout]:
    """Return images as pixels, as pixels of several parts of each image, and as flattened patches."""
    config = net.config
    name = next((name for name in ("pixel_values", "flattened_patches", "image_patches") if name in names), None)
    if name is None:
        return []
    channels = first_number(config, "^(num_channels|in_channels|in_chans|channels)$", 3)
    patch = first_number(config, "^(spatial_)?patch_size$", 8)
    times = first_number(config, "^temporal_patch_size$", 1)
    sides = dict.fromkeys((first_number(config, "image_size|img_size", 32), 32, 64))
    layouts: list[Layout] = []
    tiles = first_number(config, "^max_num_tiles$", 1)
    for side in sides:
        pixels = channels, side, side
        shapes = [(ROWS, *pixels), (ROWS, 1, *pixels), (ROWS, 2, *pixels), (ROWS, 1, tiles, *pixels)]
        layouts.extend(Layout("images", name, _random(shape), side) for shape in shapes)
    of_patch = channels * patch * patch
    coordinates = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).repeat(ROWS, 1, 1)
    with_places = torch.cat([coordinates + 1.0, _random((ROWS, GRID * GRID, of_patch))], -1)
    flat = _random((ROWS * GRID * GRID, times * of_patch))
    parts = flat.unflatten(0, (ROWS, -1))
    patches = [flat, parts, with_places, _random((ROWS * GRID * GRID, channels, patch, patch))]
    flattened = [Layout("images", name, values, patch * GRID) for values in patches]
    are_first = {"image_grid_thw", "spatial_shapes", "flattened_patches", "image_patches"} & names
    return [*flattened, *layouts] if are_first else [*layouts, *flattened]


def sound_layouts(net: Any, names: set[str]) -> list[Layout]:
    """Return sounds as spectra, with time as the second or the last axis, and as waves."""
    name = next((name for name in ("input_features", "input_values") if name in names), None)
    if name is None:
        return []
    bins = {first_number(net.config, "num_mel_bins|feature_size|feat_per_channel", 16): None}
    bins[first_number(net.config, "feature_projection_input_dim|input_dim|mel|input_feat", 16)] = None
    lengths = {2 * first_number(net.config, "max_source_positions", 32): None, 64: None, 200: None}
    waves = [Layout("sound", name, _random(shape), 1600) for shape in ((ROWS, 1600), (ROWS, 1, 1600))]
    spectra: list[Layout] = []
    for length in lengths:
        for size in bins:
            for shape in ((ROWS, size, length), (ROWS, length, size)):
                spectra.append(Layout("sound", name, _random(shape), length))
    return [*waves, *spectra] if name == "input_values" else [*spectra, *waves]


def first_number(config: Any, pattern: str, default: int) -> int:
    """Return the first whole number under a name in a configuration, or in those inside it."""
    inner: list[Any] = []
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            inner.append(value)
        elif re.search(pattern, name) and not isinstance(value, bool):
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int):
                return value
    for part in sorted(inner, key=lambda part: "text" in part.model_type):
        if (found := first_number(part, pattern, 0)) > 0:
            return found
    return default


def _random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
