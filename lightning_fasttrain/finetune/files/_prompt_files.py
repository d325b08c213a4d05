"""Load virtual tokens from an adapter's file."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import list_names_above
from lightning_fasttrain.finetune.adapters.add_adapter import use_prompt_
from lightning_fasttrain.finetune.files._adapter_layers import WRONG_BASE, refuse_other_model
from lightning_fasttrain.finetune.files._expected_tensors import refuse_not_finite
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
from lightning_fasttrain.finetune.selection.targets import method_of

if TYPE_CHECKING:
    from peft import PeftConfig

# Settings that are not taken from a file: no tokenizer may be loaded, and the model determines the sizes.
_FROM_HERE: dict[str, Any] = {
    "prompt_tuning_init": "RANDOM",
    "prompt_tuning_init_text": None,
    "tokenizer_name_or_path": None,
    **dict.fromkeys(("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")),
    "encoder_hidden_size": None,
}


def load_prompts_(
    model: nn.Module,
    source: Path,
    file: object,
    config: "PeftConfig",
    name: str,
    trainable: bool,
    fingerprint: Fingerprint | None,
) -> list[str]:
    """Load a file of virtual tokens into ``model``, and return the name of the Hugging Face model.

    See :func:`~lightning_fasttrain.finetune.load_adapter_`.
    """
    from peft.utils.save_and_load import set_peft_model_state_dict

    check_prompt_config(config)
    what, place, root = f"the adapter in {source}", *find_language_model(model)
    there, task = adapters_on(root).get(name), task_of(plain_model(root))
    if fingerprint is not None:
        refuse_other_base(fingerprint, root, what, WRONG_BASE)
    network = method_of(config) == "P_TUNING" or getattr(config, "prefix_projection", False)
    if network and (trainable or (there is not None and not there.inference_mode)):
        why = "a network computed its virtual tokens, and the file does not hold that network"
        way_out = "Resume from Lightning's checkpoint, or load it under another name with trainable=False"
        raise ValueError(explain(f"training {what} on", why, way_out))
    for key, value in _FROM_HERE.items():
        if hasattr(config, key):
            # Settings of the existing adapter, so that the two are identical.
            setattr(config, key, getattr(there, key, value))
    if task != "unknown" and config.task_type not in (None, task):
        why = f"its task is {config.task_type}, and this model's task is {task}"
        refuse_other_model(what, why)
    shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    expected = _shapes_here(config, plain_model(root))
    wrong = [key for key in {**expected, **shapes} if expected.get(key) != shapes.get(key)]
    if wrong:
        key = wrong[0]
        why = f"'{key[:120]}' is {shapes.get(key, 'missing')}, expected {expected.get(key, 'no such tensor')}"
        refuse_other_model(what, why)
    refuse_not_finite(file, str(source))
    add_prompt_(model, config, name=name)
    prompted = model.get_submodule(place)
    set_peft_model_state_dict(prompted, {key: file.get_tensor(key) for key in shapes}, adapter_name=name)
    use_prompt_(prompted, name, trainable)
    return [place]


def _shapes_here(config: "PeftConfig", base: Any) -> dict[str, list[int]]:
    """Return the shapes of the tensors in PEFT's file of such virtual tokens for this model."""
    from peft.utils.other import _prepare_prompt_learning_config

    filled = copy.deepcopy(config)
    fill_(filled, base)
    _prepare_prompt_learning_config(filled, base.config)
    virtual = [filled.num_virtual_tokens * (1 + base.config.is_encoder_decoder), filled.token_dim]
    if method_of(filled) == "PREFIX_TUNING":
        virtual = [filled.num_virtual_tokens, 2 * filled.num_layers * filled.token_dim]
    shapes = {"prompt_embeddings": virtual}
    whole = tuple(filled.modules_to_save or ())
    if filled.task_type == "SEQ_CLS":
        whole += ("classifier", "score")  # PEFT trains these
    for name, plain in base_names(base).items():
        # PEFT trains a module in full if its name has one of these suffixes.
        if any(module.endswith(whole) for module in list_names_above(plain)):
            shapes[f"base_model.{plain}"] = list(base.get_parameter(name).shape)
    return shapes
