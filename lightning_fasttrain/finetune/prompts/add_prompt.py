"""Virtual tokens that train before the input of a frozen Hugging Face model."""

import copy
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.blocks import keep_outermost
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.finetune.adapters._adapter_checks import check_name, is_there, without_namesakes
from lightning_fasttrain.finetune.adapters.add_adapter import train_mode, use_prompt_
from lightning_fasttrain.finetune.prompts._prompt_hooks import GenerateWithCache, StillPrompt, cut_virtual_tokens
from lightning_fasttrain.finetune.selection._adapter_switches import has_prompt
from lightning_fasttrain.finetune.selection._float32_adapters import keep_in_float32_
from lightning_fasttrain.finetune.selection.base_fingerprint import adapters_on
from lightning_fasttrain.finetune.selection.freezing import freeze_
from lightning_fasttrain.finetune.selection.targets import find_targets, refuse_tied, require_peft

_KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")


@notices_late_parameters
def add_prompt_(model: nn.Module, config: Any, *, train: Iterable[str] = (), name: str = "default") -> str:
    """Put virtual tokens before the input of the Hugging Face model in ``model``, in place, and freeze all else.

    A ``PeftModel`` takes the place of the Hugging Face model, which is inside as ``base_model``: keys of the
    ``state_dict`` have that word in them from then on. It is called and generates as ``peft.get_peft_model`` makes it,
    best with keywords, and has all attributes of the model inside. From logits and hidden states the positions of the
    virtual tokens are cut, so that these are as long as the labels. A cache cannot be given to ``forward``; behind a
    prefix ``generate`` needs its own (``use_cache=True``); and learned positions must be enough for all tokens.

    A causal model that is given labels learns to predict the first token as well, from the virtual ones. The head of a
    sequence classifier trains too, as PEFT wants it. Prompt tuning a decoder for classification needs inputs that are
    padded on the left: Hugging Face's take the last position for the last token.

    Args:
        model: a module that holds just one Hugging Face model: a causal or an encoder-decoder language model, a
            sequence classifier, or the bare model without a head.
        config: ``peft.PromptTuningConfig``, ``peft.PrefixTuningConfig`` or ``peft.PromptEncoderConfig``. A copy of it
            is used, with what the model tells filled in.
        train: names of modules in the Hugging Face model, as seen from there, that train whole and are saved too.
        name: of this adapter, among several.

    Returns:
        Qualified name of the ``PeftModel``. If there is an adapter of this name and kind, nothing is done.

    Raises:
        TypeError: ``config`` is none of those; there is no Hugging Face model, or one for another task.
        ValueError: there are several, or ``model`` is one itself; an adapter of another kind is there; a prefix is for
            a model with activation checkpointing of its own, which takes away the cache that it is put into.
        ModuleNotFoundError: PEFT is not installed.

    Example:
        >>> import peft, torch, transformers
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
        >>> net = nn.ModuleDict({"lm": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))})
        >>> add_prompt_(net, peft.PromptTuningConfig(num_virtual_tokens=3))
        'lm'
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['lm.prompt_encoder.default.embedding.weight']
        >>> net["lm"](torch.tensor([[1, 2, 3, 4]])).logits.shape
        torch.Size([1, 4, 9])

    Source:
        ``peft.get_peft_model``. Checked against it, bit for bit, on four kinds of models.
    """
    check_prompt_config(config)
    check_name(name)
    place, root = find_language_model(model)
    base, config = plain_model(root), copy.deepcopy(config)
    there = {one: settings for module in model.modules() for one, settings in adapters_on(module).items()}
    trained_whole, whole = list(train), config.modules_to_save or []
    if trained_whole:
        trained_whole = without_namesakes(list(find_targets(base, trained_whole)), base)
        refuse_tied(base, trained_whole)
    config.modules_to_save = [*whole, *trained_whole] or None
    fill_(config, base)
    # PEFT fills in what is None when it adds the adapter; without that the same one asked for again would differ.
    for setting, value in vars(there.get(name, config)).items():
        if getattr(config, setting, 0) is None:
            setattr(config, setting, value)
    if is_there(there, name, config):
        train_mode(root)
        return place
    as_asked = copy.copy(config.modules_to_save)  # PEFT adds a classifier's head to it, and would again
    with ExitStack() as on_error:
        on_error.callback(freeze_(model))
        prompted = _put_before(base, root, config, name)
        on_error.pop_all()
    config.modules_to_save = as_asked
    use_prompt_(prompted, name, trainable=not config.inference_mode)
    # So that a later cast of the model does not round them.
    keep_in_float32_(prompted.prompt_encoder)
    for where, module in list(model.named_modules(remove_duplicate=False)):  # wherever it is held
        if module is base and prompted is not root:
            parent, _, last = where.rpartition(".")
            setattr(model.get_submodule(parent), last, prompted)
    train_mode(prompted)
    trained, total = count_parameters(model)
    say(
        "%s '%s': %d virtual tokens before the input of %s; trains %s of %s parameters (%.2f%%)",
        config.peft_type.value, name, config.num_virtual_tokens, type(base).__name__,
        f"{trained:,}", f"{total:,}", 100 * trained / total,
    )  # fmt: skip
    return place


def find_language_model(model: nn.Module) -> tuple[str, Any]:
    """Name of the Hugging Face model in ``model``, and the model, or what PEFT has put around it.

    Raises:
        TypeError: there is none.
        ValueError: there are several, or it is ``model`` itself.
    """
    from transformers import PreTrainedModel

    peft = require_peft()
    kinds = (PreTrainedModel, peft.PeftModel)
    found = keep_outermost({name: module for name, module in model.named_modules() if isinstance(module, kinds)})
    what = f"virtual tokens for {type(model).__name__}"
    if not found:
        why = "there is no Hugging Face model in it, and what other models take for input, mask and cache is unknown"
        raise TypeError(explain(what, why, "Use LoRA, which suits any module"))
    if len(found) > 1:
        why = f"there are several Hugging Face models in it: {', '.join(map(repr, found))}"
        raise ValueError(explain(what, why, "Give each a module of its own, or use LoRA"))
    name, root = next(iter(found.items()))
    if not name and not isinstance(root, peft.PeftModel):
        why = "PEFT puts a model of its own around it, which needs a place to stand in"
        raise ValueError(explain(what, why, "Hold it in a module, or use peft.get_peft_model(model, config)"))
    return name, root


def plain_model(root: Any) -> Any:
    """The Hugging Face model, where PEFT has put virtual tokens before it."""
    return root.base_model if has_prompt(root) else root


def fill_(config: Any, base: Any) -> None:
    """Give a configuration the task of the model, and the sizes that PEFT does not find, or takes for others.

    Raises:
        TypeError: PEFT has no virtual tokens for this task.
    """
    config.task_type = config.task_type or task_of(base)
    known = config.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
    if not known or base.config.is_encoder_decoder != (config.task_type == "SEQ_2_SEQ_LM"):
        what = f"virtual tokens for {type(base).__name__}, of task {config.task_type}"
        why = "PEFT has them for language models, sequence classifiers and models without head"
        raise TypeError(explain(what, why, "Use LoRA, which suits any module"))
    if config.peft_type.value != "PREFIX_TUNING":  # which has sizes of its own
        config.token_dim = config.token_dim or base.get_input_embeddings().embedding_dim
        config.num_attention_heads = config.num_attention_heads or base.config.num_attention_heads


def task_of(base: nn.Module) -> str:
    """What a model is for, as PEFT calls it, by the list of classes that Hugging Face's Auto classes choose from."""
    from transformers.models.auto import modeling_auto

    names = {kind.__name__ for kind in type(base).__mro__}
    for task, classes in (
        ("CAUSAL_LM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("SEQ_2_SEQ_LM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("SEQ_CLS", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("FEATURE_EXTRACTION", modeling_auto.MODEL_MAPPING_NAMES),
    ):
        if names.intersection(classes.values()):
            return task
    return "unknown"


def check_prompt_config(config: Any) -> None:
    peft = require_peft()
    if not isinstance(config, peft.PeftConfig) or config.peft_type.value not in _KINDS:
        why = f"virtual tokens are of the kinds {', '.join(_KINDS)}"
        way_out = "Use one such as peft.PromptTuningConfig(num_virtual_tokens=20); LoRA and others: add_adapter_"
        raise TypeError(explain(f"config is a {type(config).__name__}", why, way_out))
    positive_int("num_virtual_tokens", config.num_virtual_tokens)


def _put_before(base: nn.Module, root: Any, config: Any, name: str) -> Any:
    """PEFT's model for this one and for its task, with virtual tokens of this name."""
    peft = require_peft()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
        if any(isinstance(parameter, FakeTensor) for parameter in base.parameters()):
            # whose rows cannot be taken for a start; what is made now becomes fake later
            stack.enter_context(unset_fake_temporarily())
            stack.callback(setattr, config, "prompt_tuning_init", getattr(config, "prompt_tuning_init", None))
            config.prompt_tuning_init = "RANDOM"
        if has_prompt(root):
            root.add_adapter(name, config)
            return root
        prompted = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING[config.task_type](base, config, adapter_name=name)
    prompted.get_prompt = StillPrompt(prompted)
    if hasattr(prompted, "generate"):
        prompted.generate = GenerateWithCache(prompted)
    prompted.register_forward_hook(cut_virtual_tokens, with_kwargs=True)
    return prompted
