"""Virtual tokens out of an adapter's file."""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from lightning_fasttrain._messages import explain
from lightning_fasttrain.finetune.files._adapter_layers import refuse_not_finite
from lightning_fasttrain.finetune.parts.base_fingerprint import Fingerprint, refuse_other_base
from lightning_fasttrain.finetune.prompts.add_prompt import DERIVED, add_prompt_, set_prompt_state_

# What is not taken from a file: it must not ask for a tokenizer, and PEFT finds the sizes out from the model.
_FROM_HERE: dict[str, Any] = {
    "prompt_tuning_init": "RANDOM",
    "prompt_tuning_init_text": None,
    "tokenizer_name_or_path": None,
    **dict.fromkeys(DERIVED),
}
WRONG_BASE = "Load the base that it was trained beside, or pass check_base=False if you know that it fits"
_KEY = "prompt_embeddings"


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
    what, kind = f"the adapter in {source}", config.peft_type.value
    root, prefix = _language_model(model)
    if fingerprint is not None:
        refuse_other_base(fingerprint, root, what, WRONG_BASE)
    if trainable and (kind == "P_TUNING" or getattr(config, "prefix_projection", False)):
        why = "its virtual tokens came out of a network, which is not in the file"
        raise ValueError(explain(f"trainable=True for {what}", why, "Resume from Lightning's checkpoint"))
    there = (vars(root).get("peft_config") or {}).get(name)
    for key, value in _FROM_HERE.items():
        if hasattr(config, key):
            setattr(config, key, getattr(there, key, value))
    keys = list(file.keys())
    shape = list(file.get_slice(_KEY).get_shape()) if _KEY in keys else None
    if shape != _shape(config, root):
        why = f"'{_KEY}' is {shape or 'not there'}, and here {_shape(config, root)}"
        raise ValueError(explain(f"{what} is for another model", why, "Load the model that it was trained beside"))
    refuse_not_finite(file, str(source))
    whole: list[str] = []
    for one in config.modules_to_save or []:
        if any(key.startswith(f"base_model.{one}.") for key in keys):
            whole.append(f"{prefix}{one}")
    config.modules_to_save = None
    add_prompt_(model, config, train=whole, name=name)
    set_prompt_state_(root, name, {key: file.get_tensor(key) for key in keys})
    encoders: Any = root.get_submodule("prompt_encoder")
    encoders[name].requires_grad_(trainable)
    return [prefix.removesuffix(".")]


def _language_model(model: nn.Module) -> tuple[Any, str]:
    from transformers import PreTrainedModel

    found = {module: name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    if not found:
        why = "there is no Hugging Face model in it, whose input virtual tokens stand before"
        raise TypeError(explain(f"virtual tokens for {type(model).__name__}", why, "Load them into such a model"))
    root, name = next(iter(found.items()))
    return root, f"{name}." if name else ""


def _shape(config: Any, root: Any) -> list[int]:
    """Of the virtual tokens here, as PEFT derives it from the model."""
    from peft.utils.other import _prepare_prompt_learning_config

    filled = _prepare_prompt_learning_config(copy.deepcopy(config), root.config)
    if filled.peft_type.value == "PREFIX_TUNING":
        return [filled.num_virtual_tokens, 2 * filled.num_layers * filled.token_dim]
    parts = filled.num_transformer_submodules or (2 if config.task_type == "SEQ_2_SEQ_LM" else 1)
    return [filled.num_virtual_tokens * parts, filled.token_dim]
