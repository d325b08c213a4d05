"""Virtual tokens out of an adapter's file."""

import copy
import itertools
from pathlib import Path
from typing import Any

from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.finetune.adapters.add_adapter import use_prompt_
from lightning_fasttrain.finetune.files._adapter_layers import refuse_not_finite
from lightning_fasttrain.finetune.prompts.add_prompt import (
    add_prompt_,
    check_prompt_config,
    fill_,
    find_language_model,
    plain_model,
    task_of,
)
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    adapters_on,
    base_names,
    refuse_other_base,
)

# What is not taken from a file: it must not ask for a tokenizer, and the sizes follow from the model.
_FROM_HERE: dict[str, Any] = {
    "prompt_tuning_init": "RANDOM",
    "prompt_tuning_init_text": None,
    "tokenizer_name_or_path": None,
    **dict.fromkeys(("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")),
    "encoder_hidden_size": None,
}
WRONG_BASE = "Load the base that it was trained beside, or pass check_base=False if you know that it fits"


def load_prompts_(
    model: nn.Module,
    source: Path,
    file: Any,
    config: Any,
    name: str,
    trainable: bool,
    fingerprint: Fingerprint | None,
) -> list[str]:
    """As :func:`~lightning_fasttrain.finetune.load_adapter_`, for files of virtual tokens; returns the model's name."""
    from peft.utils.save_and_load import set_peft_model_state_dict

    check_prompt_config(config)
    what, place, root = f"the adapter in {source}", *find_language_model(model)
    there, task = adapters_on(root).get(name), task_of(plain_model(root))
    if fingerprint is not None:
        refuse_other_base(fingerprint, root, what, WRONG_BASE)
    network = config.peft_type.value == "P_TUNING" or getattr(config, "prefix_projection", False)
    if network and (trainable or (there is not None and not there.inference_mode)):
        why = "its virtual tokens came out of a network, which is not in the file"
        way_out = "Resume from Lightning's checkpoint, or load it under another name with trainable=False"
        raise ValueError(explain(f"training {what} on", why, way_out))
    for key, value in _FROM_HERE.items():
        if hasattr(config, key):
            setattr(config, key, getattr(there, key, value))  # those of the one that is there, so that it is the same
    if task != "unknown" and config.task_type not in (None, task):
        why = f"its task is {config.task_type}, and here it is {task}"
        raise ValueError(explain(f"{what} is for another model", why, "Load the model that it was trained beside"))
    shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    expected = _shapes_here(config, plain_model(root))
    wrong = [key for key in {**expected, **shapes} if expected.get(key) != shapes.get(key)]
    if wrong:
        key = wrong[0]
        why = f"'{key[:120]}' is {shapes.get(key, 'not there')}, and here {expected.get(key, 'nothing')}"
        raise ValueError(explain(f"{what} is for another model", why, "Load the model that it was trained beside"))
    refuse_not_finite(file, str(source))
    add_prompt_(model, config, name=name)
    prompted = model.get_submodule(place)
    set_peft_model_state_dict(prompted, {key: file.get_tensor(key) for key in shapes}, adapter_name=name)
    use_prompt_(prompted, name, trainable)
    return [place]


def _shapes_here(config: Any, base: Any) -> dict[str, list[int]]:
    """Of the tensors that PEFT's file of such virtual tokens before this model would hold."""
    from peft.utils.other import _prepare_prompt_learning_config

    filled = copy.deepcopy(config)
    fill_(filled, base)
    _prepare_prompt_learning_config(filled, base.config)
    virtual = [filled.num_virtual_tokens * (1 + base.config.is_encoder_decoder), filled.token_dim]
    if filled.peft_type.value == "PREFIX_TUNING":
        virtual = [filled.num_virtual_tokens, 2 * filled.num_layers * filled.token_dim]
    shapes = {"prompt_embeddings": virtual}
    heads = ["classifier", "score"] if filled.task_type == "SEQ_CLS" else []  # which PEFT lets train
    for name, plain in base_names(base).items():
        if _trains_whole(plain, [*heads, *(filled.modules_to_save or [])]):
            shapes[f"base_model.{plain}"] = list(base.get_parameter(name).shape)
    return shapes


def _trains_whole(parameter: str, names: list[str]) -> bool:
    """PEFT takes modules whose names end so, be it in the middle of a word."""
    modules = itertools.accumulate(parameter.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}")
    return any(module.endswith(tuple(names)) for module in modules)
