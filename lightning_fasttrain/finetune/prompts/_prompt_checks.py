"""Which model gets virtual tokens, whether it can have such ones, and what they must be told of it."""

import inspect
from typing import Any

from torch import nn

from lightning_fasttrain._blocks import keep_outermost
from lightning_fasttrain._checks import positive_int
from lightning_fasttrain._messages import explain

HEADS = ("classifier", "score")  # what classifiers call theirs, and PEFT goes by
_KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")


def check_config(peft: Any, config: Any) -> None:
    if not isinstance(config, peft.PeftConfig) or config.peft_type.value not in _KINDS:
        given = config.peft_type.value if isinstance(config, peft.PeftConfig) else type(config).__name__
        why = f"virtual tokens are of the kinds {', '.join(_KINDS)}"
        way_out = "Use one such as peft.PromptTuningConfig(num_virtual_tokens=20); LoRA and others: add_adapter_"
        raise TypeError(explain(f"config is a {given}", why, way_out))
    positive_int("num_virtual_tokens", config.num_virtual_tokens)


def hugging_face_model(model: nn.Module) -> tuple[str, Any]:
    """What its name adds to those of its parts, and the model."""
    from transformers import PreTrainedModel

    found = keep_outermost({name: m for name, m in model.named_modules() if isinstance(m, PreTrainedModel)})
    if not found:
        why = "there is no Hugging Face model in it, and what other models take for input, mask and cache is unknown"
        raise TypeError(explain(f"virtual tokens for {type(model).__name__}", why, "Use LoRA, which suits any module"))
    if len(found) > 1:
        names = ", ".join(f"'{name}'" for name in found)
        why = f"there are several Hugging Face models in it: {names}"
        way_out = f"Add them to one: add_prompt_(module.{next(iter(found))}, peft.PromptTuningConfig(...))"
        raise ValueError(explain(f"virtual tokens for {type(model).__name__}", why, way_out))
    name, root = next(iter(found.items()))
    return f"{name}.".removeprefix("."), root


def task_of(root: nn.Module) -> str:
    """What a model is for, as PEFT calls it, by the list of classes that Hugging Face's Auto classes choose from."""
    from transformers.models.auto import modeling_auto

    names = {base.__name__ for base in type(root).__mro__}
    for task, classes in (
        ("CAUSAL_LM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("SEQ_2_SEQ_LM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("SEQ_CLS", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("FEATURE_EXTRACTION", modeling_auto.MODEL_MAPPING_NAMES),
    ):
        known: set[str] = set()
        for entry in classes.values():
            known.update([entry] if isinstance(entry, str) else entry)
        if names & known:
            return task
    return "unknown"


def check_model(root: Any, config: Any, outside: list[str]) -> None:
    task, prefix = config.task_type, config.peft_type.value == "PREFIX_TUNING"
    takes = set(inspect.signature(type(root).forward).parameters)
    decodes = root.config.is_encoder_decoder
    if (
        task not in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
        or decodes != (task == "SEQ_2_SEQ_LM")
        or not {"input_ids", "inputs_embeds"} <= takes
    ):
        raise TypeError(
            explain(
                f"virtual tokens for {type(root).__name__}, of task {task}",
                "PEFT puts them before the text of language models, sequence classifiers and models without head; for "
                "others it leaves labels where they were",
                "Use LoRA, which suits any module",
            )
        )
    backbone = getattr(root, root.base_model_prefix, root)
    if prefix and "past_key_values" not in takes | set(inspect.signature(type(backbone).forward).parameters):
        why = "a prefix is put into a key-value cache, and this model has none"
        raise ValueError(explain(f"PREFIX_TUNING of {type(root).__name__}", why, "Use PromptTuning"))
    if prefix and any(getattr(module, "gradient_checkpointing", False) for module in root.modules()):
        what = f"PREFIX_TUNING of {type(root).__name__} with its own activation checkpointing"
        why = "that takes away the cache, which a prefix is put into"
        raise ValueError(explain(what, why, "Use ActivationCheckpointing() instead, which leaves it"))
    if outside:
        why = f"that is outside of {type(root).__name__}, whose parts alone the adapter's file can name"
        raise ValueError(explain(f"train={outside}", why, "Make the head a part of it, or use LoRA"))


def fill_(config: Any, root: Any) -> None:
    """What PEFT does not find in every model's settings, or takes for another number; a prefix has sizes of its own."""
    if config.peft_type.value != "PREFIX_TUNING":
        if config.token_dim is None:
            config.token_dim = root.get_input_embeddings().embedding_dim
        if config.num_attention_heads is None:
            config.num_attention_heads = root.config.num_attention_heads
