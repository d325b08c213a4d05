"""Export a fine-tuned Hugging Face model to a plain folder for ``from_pretrained``."""

import copy
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_fasttrain.core.atomic_write import make_folder, sync_folder, temporary_path
from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.core.modules.select import Sharing, is_part_of
from lightning_fasttrain.finetune.adapters.merge import merge_adapters_, unmerge_adapters_
from lightning_fasttrain.finetune.adapters.merge_quantized import find_trained_copies
from lightning_fasttrain.finetune.files.adapter_config import Folder
from lightning_fasttrain.finetune.files.adapter_files import refuse_shards
from lightning_fasttrain.finetune.quantized.quantized_layer import (
    FLOATS,
    dequantized_weight,
    is_quantized,
    was_transposed,
)
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    adapter_holders,
    find_modules,
    first_few,
    is_torchaos,
    names_in,
    names_not_in,
    plain_name,
)
from lightning_fasttrain.finetune.selection.float32_adapters import has_prompt, rounded_as, switches
from lightning_fasttrain.finetune.selection.targets import find_hugging_face_model


@check_arguments
def export_model(model: nn.Module, folder: Folder, *, dtype: torch.dtype | None = None) -> Path:
    """Save the Hugging Face model in ``model`` as a plain one: adapters merged, unquantised weights, in safetensors.

    ``from_pretrained(folder)`` returns a model with the same outputs, without PEFT, bitsandbytes or this package; other
    programs can read the folder too, such as converters to GGUF. The configuration and generation settings are saved
    with the weights; save the tokenizer there too: ``tokenizer.save_pretrained(folder)``. The folder appears only when
    it is complete. ``model`` is unchanged bit for bit, except that gradients of the adapters are removed; during the
    export host memory holds its weights twice. In distributed runs every process must call this function, and rank 0
    writes.

    Args:
        model: a Hugging Face model, or a module that holds one; with adapters of any kind that can be merged, with
            merged adapters, or without adapters.
        folder: path of the new folder, which must not exist or must be empty.
        dtype: dtype of all floating-point weights; None keeps each dtype, and is refused for a quantised model.

    Returns:
        The folder.

    Raises:
        TypeError: there is no Hugging Face model in ``model``, or PEFT cannot merge this kind of adapter.
        ValueError: ``model`` holds several, or virtual tokens of prompt or prefix tuning; the folder is in use; weights
            are sharded, or are quantised and no ``dtype`` is given; the configuration's class has other weights, or
            ties weights that were trained apart; a merged weight would be infinite or NaN.

    Example:
        >>> import transformers, lightning_fasttrain as ft
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        >>> undo = ft.apply(model, [ft.LoRA(rank=2)])
        >>> sorted(path.name for path in export_model(model, getfixture("tmp_path") / "model").iterdir())
        [...'config.json', 'generation_config.json', 'model.safetensors']

    Source:
        ``PreTrainedModel.save_pretrained`` writes the files.
    """
    require("transformers", extra="finetune")
    why, way_out = "so from_pretrained could not load it", "Use unload_adapters_(model), and save its state_dict()"
    of_several = "Name one: export_model(model.{}, …)"
    _, root = find_hugging_face_model(model, f"export_model of a {type(model).__name__}", why, way_out, of_several)
    if any(map(has_prompt, model.modules())):
        what = f"export_model of a {type(root).__name__} with virtual tokens"
        why = "they are prepended to the input, and a plain model has no place for them"
        way_out = "Save them with save_adapter, or unload them: unload_adapters_(model, merge=False)"
        raise ValueError(explain(what, why, way_out))
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        why = "the path already exists and is not overwritten"
        raise ValueError(explain(f"{target}", why, "Choose a new folder, or move the existing one"))
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(explain(f"dtype={dtype}", "weights are saved in floats", f"Use one of {FLOATS}"))
    if dtype is None and (any(map(is_torchaos, root.parameters())) or any(map(is_quantized, root.modules()))):
        why = "quantised weights are exported as floats, and the dtype must be chosen"
        raise ValueError(explain(f"{type(root).__name__} without dtype=", why, "Use for example dtype=torch.bfloat16"))
    refuse_shards(dict(root.named_parameters()))
    with _merge_for_now(root):
        _write(target, _plain_twin(root, _plain_state(root, dtype)))
    return target


@contextmanager
def _merge_for_now(root: nn.Module) -> Iterator[None]:
    """Merge the adapters inside a ``with`` block, and unmerge them afterwards."""
    layers: list[Any] = list(switches(root))
    # Merged adapters stay merged: the current weights are exported.
    if not layers or any(getattr(layer, "merged", False) for layer in layers):
        yield
        return
    quantized = any(is_quantized(module) for layer in layers for module in layer.modules())
    merge_adapters_(root, into="dequantized" if quantized else None)
    try:
        yield
    finally:
        unmerge_adapters_(root)


def _plain_state(root: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the unquantised weights on the host, under the names that they have without adapters."""
    holders, state = adapter_holders(root), dict[str, Tensor]()
    quantized = find_modules(root, is_quantized)
    for key, tensor in root.state_dict().items():
        is_packed = is_part_of(key, quantized) and key.removesuffix(".bias") not in quantized
        plain = plain_name(key, holders)  # None: the key belongs to an adapter
        if plain is not None and not is_packed:
            state[plain] = tensor.dequantize() if is_torchaos(tensor) else tensor
    for name, layer in quantized.items():
        weight = dequantized_weight(layer)
        shape = vars(layer).get("stands_for", weight.shape)
        if plain := plain_name(f"{name}.weight", holders):
            state[plain] = weight.T.contiguous() if was_transposed(layer) else weight.view(shape)
    state.update(_trained_whole(root, holders))
    for name, tensor in state.items():
        state[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
    return state


def _trained_whole(root: nn.Module, holders: dict[str, str]) -> dict[str, Tensor]:
    """Return the weights of modules that were fully trained with an adapter, from the trained copies."""
    found: dict[str, Tensor] = {}
    for name, wrapper in find_trained_copies(root).items():
        copies, place = wrapper.modules_to_save, plain_name(f"{name}.original_module", holders)
        for active in names_in(wrapper.active_adapters, copies):
            state = {**copies[active].state_dict(), **rounded_as(wrapper.original_module, copies[active])}
            for key, value in state.items():
                found[f"{place}.{key}"] = value
    return found


def _plain_twin(root: Any, state: dict[str, Tensor]) -> Any:
    """Create a model of the same class and configuration with these weights, as ``from_pretrained`` would.

    Raises:
        ValueError: the configuration describes a model with other weights.
    """
    config = copy.deepcopy(root.config)
    vars(config).pop("quantization_config", None)  # the files hold floats
    with torch.device("meta"):
        twin = type(root)(config)
    try:
        # Assigned, since meta parameters have no memory to copy to; strict, so that none stays on meta.
        twin.load_state_dict(state, assign=True)
    except RuntimeError as error:
        expected = twin.state_dict()
        names = [*names_not_in(expected, state), *names_not_in(state, expected)]
        names += [name for name in names_in(expected, state) if expected[name].shape != state[name].shape]
        why = f"{first_few(names)} differ from the weights in its configuration, so from_pretrained could not load it"
        raise ValueError(explain(f"export_model of a {type(root).__name__}", why, "Correct model.config")) from error
    twin.tie_weights()  # assigning separated the tied weights
    _refuse_lost_ties(twin, state)
    for group in Sharing(twin).groups:
        # One module in several places here is several in the twin, and save_pretrained writes shared memory only once.
        for parameter in list(dict.fromkeys(group.values()))[1:]:
            parameter.data = parameter.data.clone()
    if "generation_config" in vars(root):
        twin.generation_config = copy.deepcopy(root.generation_config)
    return twin


def _refuse_lost_ties(twin: Any, state: dict[str, Tensor]) -> None:
    """Refuse weights that differ from those to which the configuration ties them, and which would be lost."""
    for name, tensor in twin.state_dict().items():
        if tensor.data_ptr() != state[name].data_ptr() and not torch.equal(tensor, state[name]):
            why = f"'{name}' was trained apart from the weight that the configuration ties it to"
            way_out = "Train the two as one, or set model.config.tie_word_embeddings = False"
            raise ValueError(explain(f"export_model of a {type(twin).__name__}", why, way_out))


@rank_zero_only
def _write(target: Path, model: Any) -> None:
    make_folder(target.parent)
    unfinished = temporary_path(target.parent, target.name)
    make_folder(unfinished)
    try:
        # The warnings are about generation settings that were loaded that way.
        with warnings.catch_warnings(action="ignore"):
            model.save_pretrained(unfinished)
        for path in unfinished.iterdir():
            # All files are on disk before the folder is renamed, which is atomic.
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        sync_folder(unfinished)
        if sys.platform == "win32" and target.exists():
            target.rmdir()  # empty, which elsewhere a rename replaces
        os.replace(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(target.parent)
    _, parameters = count_parameters(model)
    say("export_model: %s with %s parameters in %s", type(model).__name__, f"{parameters:,}", target)
