"""Prompt tuning, prefix tuning and P-tuning: trained vectors in front of a frozen model's inputs, as PEFT's modules."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of, positive_int
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import is_a, list_places, replace_modules_
from lightning_fasttrain.core.modules.wrapped_forward import Replacement
from lightning_fasttrain.finetune.adapters.adapter_checks import check_name, is_there, without_namesakes
from lightning_fasttrain.finetune.adapters.add_adapter import report_added, train_mode, use_prompt_
from lightning_fasttrain.finetune.adapters.lora import Adapter
from lightning_fasttrain.finetune.selection.base_fingerprint import PEFT_MODEL, adapters_on, has_fake_parameters
from lightning_fasttrain.finetune.selection.float32_adapters import (
    has_prompt,
    keep_adapter_in_float32_,
    keep_in_float32_,
)
from lightning_fasttrain.finetune.selection.freezing import freeze_
from lightning_fasttrain.finetune.selection.targets import (
    find_hugging_face_model,
    find_layers,
    method_of,
    refuse_tied,
    require_peft,
)

if TYPE_CHECKING:
    from peft import PeftConfig

_KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")


@check_arguments
@notices_late_parameters
def add_prompt_(model: nn.Module, config: "PeftConfig", *, train: Iterable[str] = (), name: str = "default") -> str:
    """Prepend virtual tokens to the input of the Hugging Face model in ``model``, in place, and freeze everything else.

    A ``PeftModel`` replaces the Hugging Face model, which it holds as ``base_model``: keys of the ``state_dict``
    contain that word afterwards. Its forward and ``generate`` work as in ``peft.get_peft_model``, preferably with
    keyword arguments, and it has all attributes of the model inside. The positions of the virtual tokens are cut from
    logits and hidden states, so that these are as long as the labels. A cache cannot be passed to ``forward``; with a
    prefix ``generate`` needs its own cache (``use_cache=True``); learned positions must be enough for all tokens.

    A causal model that gets labels also learns to predict the first token, from the virtual tokens. The head of a
    sequence classifier trains too, as in PEFT. Prompt tuning of a decoder for classification needs left-padded inputs,
    since Hugging Face's classifiers use the last position as the last token.

    Args:
        model: a module that holds exactly one Hugging Face model: a causal or an encoder-decoder language model, a
            sequence classifier, or the bare model without a head.
        config: ``peft.PromptTuningConfig``, ``peft.PrefixTuningConfig`` or ``peft.PromptEncoderConfig``. A copy of it
            is used, with the model's task and sizes filled in.
        train: names of modules, relative to the Hugging Face model, that are trained in full and saved too.
        name: name of this adapter, among several.

    Returns:
        Qualified name of the ``PeftModel``. If an adapter of this name and kind exists, the model is not changed.

    Raises:
        TypeError: ``config`` has another type; there is no Hugging Face model, or one for another task.
        ValueError: there are several Hugging Face models, or ``model`` is one itself; an adapter of another kind
            exists; a prefix is requested for a model with its own activation checkpointing, which removes the cache
            that holds the prefix.
        RuntimeError: a prefix is requested, and the installed PEFT does not know the name by which the installed
            transformers passes the cache. ``generate`` raises it for each kind.
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
        ``peft.get_peft_model``. Verified bit for bit against it on four kinds of models.
    """
    check_prompt_config(config)
    check_name(name)
    place, root = find_language_model(model)
    base, config = plain_model(root), copy.deepcopy(config)
    there: dict[str, Any] = {}
    for module in model.modules():
        there.update(adapters_on(module))
    trained_whole, whole = list(train), config.modules_to_save or []
    if trained_whole:
        trained_whole = without_namesakes(list(find_layers(base, trained_whole, "train")), base)
        refuse_tied(base, trained_whole)
    config.modules_to_save = [*whole, *trained_whole] or None
    fill_(config, base)
    if method_of(config) == "PREFIX_TUNING":
        refuse_renamed_cache(f"a prefix for {type(base).__name__}")
    # PEFT fills in settings that are None when it adds the adapter; without this, adding it again would differ.
    for setting, value in vars(there.get(name, config)).items():
        if getattr(config, setting, 0) is None:
            setattr(config, setting, value)
    if is_there(there, name, config):
        train_mode(root)
        return place
    # PEFT adds a classifier's head to it, and would add it again.
    as_asked = copy.copy(config.modules_to_save)
    places = list_places(model)
    with ExitStack() as on_error:
        on_error.callback(freeze_(model))
        prompted = _put_before(base, root, config, name)
        on_error.pop_all()
    config.modules_to_save = as_asked
    use_prompt_(prompted, name, trainable=not config.inference_mode)
    # Keeps a later cast of the model from rounding them.
    keep_in_float32_(prompted.prompt_encoder)
    keep_adapter_in_float32_(prompted.modules(), name)
    if prompted is not root:
        replace_modules_(places, {base: prompted})
    train_mode(prompted)
    what = f"{config.num_virtual_tokens} virtual tokens before the input of {type(base).__name__}"
    report_added(model, config, name, what)
    return place


def find_language_model(model: nn.Module) -> tuple[str, Any]:
    """Return the name of the Hugging Face model in ``model``, and that model or the ``PeftModel`` around it.

    Raises:
        TypeError: there is no Hugging Face model.
        ValueError: there are several, or it is ``model`` itself.
    """
    what = f"virtual tokens for {type(model).__name__}"
    why = "and other models' input, mask and cache arguments are unknown"
    way_out, of_several = "Use LoRA, which supports any module", "Hold each in a separate module, or use LoRA"
    name, root = find_hugging_face_model(model, what, why, way_out, of_several, PEFT_MODEL)
    if not name and not is_a(root, PEFT_MODEL):
        why = "a PeftModel replaces it, which needs a parent module to hold it"
        raise ValueError(explain(what, why, "Hold it in a module, or use peft.get_peft_model(model, config)"))
    return name, root


def plain_model(root: Any) -> Any:
    """Return the Hugging Face model inside a ``PeftModel`` with virtual tokens; else ``root`` itself."""
    if has_prompt(root):
        return root.base_model
    return root


def fill_(config: "PeftConfig", base: Any) -> None:
    """Fill in the task of the model, and the sizes that PEFT does not find or confuses.

    Raises:
        TypeError: PEFT has no virtual tokens for this task.
    """
    config.task_type = config.task_type or task_of(base)
    known = config.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
    if not known or base.config.is_encoder_decoder != (config.task_type == "SEQ_2_SEQ_LM"):
        what = f"virtual tokens for {type(base).__name__}, of task {config.task_type}"
        why = "PEFT supports them for language models, sequence classifiers and models without a head"
        raise TypeError(explain(what, why, "Use LoRA, which supports any module"))
    if method_of(config) != "PREFIX_TUNING":  # prefix tuning has its own sizes
        config.token_dim = config.token_dim or base.get_input_embeddings().embedding_dim
        config.num_attention_heads = config.num_attention_heads or base.config.num_attention_heads


def task_of(base: nn.Module) -> str:
    """Return a model's PEFT task type, from the classes that Hugging Face's Auto classes choose from."""
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


def check_prompt_config(config: "PeftConfig") -> None:
    peft = require_peft()
    if not isinstance(config, peft.PeftConfig) or method_of(config) not in _KINDS:
        why = f"expected a PEFT configuration of kind {', '.join(_KINDS)}"
        way_out = "Use for example peft.PromptTuningConfig(num_virtual_tokens=20); for LoRA and others use add_adapter_"
        raise TypeError(explain(f"config is a {type(config).__name__}", why, way_out))
    positive_int("num_virtual_tokens", config.num_virtual_tokens)


def refuse_renamed_cache(what: str) -> None:
    """Refuse what needs a cache where PEFT would pass it by a name that the installed transformers has changed.

    PEFT 0.21 with transformers 5.24 refuses a prefix for classifiers, and generates other tokens than it should.

    Raises:
        RuntimeError: it would.
    """
    installed = {package: Version(version(package)) for package in ("peft", "transformers")}
    if installed["transformers"] < Version("5.24") or installed["peft"] >= Version("0.22"):
        return
    why = "PEFT {peft} passes past_key_values, which transformers {transformers} calls cache".format(**installed)
    way_out = "Install transformers<5.24 or a newer PEFT, or use LoRA, which works with these versions"
    raise RuntimeError(explain(what, why, way_out))


def _put_before(base: nn.Module, root: Any, config: "PeftConfig", name: str) -> Any:
    """Return PEFT's model for ``base`` and its task, with virtual tokens of this name."""
    peft = require_peft()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT reads it
        if has_fake_parameters(base):
            # Rows of fake embeddings cannot initialize the tokens; new tensors become fake later.
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


# Outputs with a sequence dimension, which virtual tokens make longer.
_LONGER = {
    "SEQ_CLS": ("hidden_states",),
    "SEQ_2_SEQ_LM": ("encoder_last_hidden_state", "encoder_hidden_states"),
}
_LONGER_ELSEWHERE = ("logits", "last_hidden_state", "hidden_states")


def cut_virtual_tokens(prompted: object, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
    """Cut the virtual tokens from the outputs of the forward, so that they are as long as its inputs.

    Raises:
        ValueError: an input already contains virtual tokens, or the output is a tuple.
    """
    config = prompted.active_peft_config
    if prompted._adapters_disabled:
        return
    if any(given.get(name) is not None for name in ("past_key_values", "cache", "encoder_outputs")):
        why = "it already contains the virtual tokens, which would be added a second time"
        way_out = "Omit the cache, or use model.generate(...)"
        raise ValueError(explain(f"a cache passed to a {type(prompted).__name__}", why, way_out))
    # The virtual tokens are in the cache, not in the sequence.
    if method_of(config) == "PREFIX_TUNING":
        return
    if isinstance(output, tuple):
        why = "the outputs that virtual tokens make longer cannot be identified in a tuple"
        raise ValueError(explain("return_dict=False with virtual tokens", why, "Omit return_dict=False"))
    # All of PEFT's models take these three arguments in this order.
    given = dict(zip(("input_ids", "attention_mask", "inputs_embeds"), args, strict=False)) | given
    source = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    for name in _LONGER.get(config.task_type, _LONGER_ELSEWHERE):
        value = output.get(name)
        if isinstance(value, tuple):
            output[name] = tuple(tensor[:, -source.shape[1] :] for tensor in value)
        elif value is not None:
            # Virtual tokens come first, so the end belongs to the input.
            output[name] = value[:, -source.shape[1] :]


class StillPrompt(Replacement):
    """Replacement of ``get_prompt`` of PEFT's model that keeps a prefix's cache unchanged while gradients are computed.

    Each layer concatenates its prefix with the keys and values without storing them. The result is the same, but a
    block that is run a second time, as activation checkpointing does, finds the original cache.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        from transformers.cache_utils import EncoderDecoderCache

        cache = type(self.module).get_prompt(self.module, *args, **kwargs)
        # Generation needs to extend its cache.
        if isinstance(cache, Tensor) or not torch.is_grad_enabled():
            return cache
        of_decoder = cache
        if isinstance(cache, EncoderDecoderCache):
            cache.cross_attention_cache.update = _return_as_given
            # A recomputed block would read an updated cache.
            cache.is_updated = _NeverUpdated(cache.is_updated)
            of_decoder = cache.self_attention_cache
        for layer in of_decoder.layers:
            # Only on this cache: each forward gets a new one.
            layer.update = partial(_put_behind_prefix, layer)
        return cache


class GenerateWithCache(Replacement):
    """Replacement of ``generate`` of PEFT's model, which would silently ignore a prefix without a cache."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not self.module._adapters_disabled:
            base = self.module.base_model
            refuse_renamed_cache(f"generate of {type(base).__name__} with virtual tokens")
        prefixed = method_of(self.module.active_peft_config) == "PREFIX_TUNING"
        if prefixed and kwargs.get("use_cache") is False and not self.module._adapters_disabled:
            raise ValueError(
                explain("use_cache=False", "the cache holds the prefix", "Omit use_cache=False, or use PromptTuning")
            )
        return type(self.module).generate(self.module, *args, **kwargs)


def _put_behind_prefix(layer: object, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return torch.cat([layer.keys, keys], dim=-2), torch.cat([layer.values, values], dim=-2)


def _return_as_given(keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return keys, values


class _NeverUpdated(dict[int, bool]):
    """Mapping of cross-attention layers to whether they are cached, which stays False for all of them."""

    def __setitem__(self, layer: int, updated: bool) -> None:
        pass


class PromptTuning(Adapter):
    """Train a few virtual tokens before the input of a frozen Hugging Face model, and nothing else.

    A ``PeftModel`` replaces the model in the module that holds it, so keys of the ``state_dict`` change there; a
    model without a parent module needs ``peft.get_peft_model``. The head of a sequence classifier trains as well.

    Tens of thousands of parameters train, so gradients and optimizer states become negligible; activations take as
    much memory as before. Prompt tuning approaches full fine-tuning only in large models, and needs high learning
    rates, such as 0.3.

    Args:
        tokens: number of virtual tokens.
        start: initial values: ``"vocabulary"``, embeddings of random tokens of the vocabulary; ``"random"``, a normal
            distribution; or token ids, such as a tokenizer's ids for a description of the task, repeated or cut to
            ``tokens``.
        train, name, checkpoint: as for :class:`~lightning_fasttrain.finetune.Adapter`.

    Raises:
        TypeError, ValueError: ``tokens`` is not a positive integer, or ``start`` is unknown; when the run begins, see
            :func:`~lightning_fasttrain.finetune.add_prompt_`.

    Example:
        >>> prompts = PromptTuning(20)
        >>> described = PromptTuning(8, start=[17, 4, 256])

    Source:
        Lester et al. 2021, https://arxiv.org/abs/2104.08691, as PEFT implements it.
    """

    effect: ClassVar[str] = "trains a few virtual tokens before the input of a Hugging Face model"
    when: ClassVar[str] = "the model is large, the task small, and thousands of tasks are kept; not for small models"
    in_a_loop: ClassVar[str] = "apply(model, [finetune.PromptTuning(...)])"

    def __init__(
        self,
        tokens: PositiveInt = 20,
        *,
        start: str | Sequence[int] = "vocabulary",
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        self.start: list[int] = []
        if isinstance(start, str):
            one_of("start", start, ("vocabulary", "random"))
        else:
            self.start += map(int, start)
            if not self.start or min(self.start) < 0:
                raise ValueError(
                    explain(f"start={start!r}", "expected token ids of at least 0", "Use a tokenizer's input_ids")
                )
        kind = "RANDOM"
        if start == "vocabulary":
            kind = "SAMPLE_VOCAB"
        config = require_peft().PromptTuningConfig(num_virtual_tokens=tokens, prompt_tuning_init=kind)
        super().__init__(config, train=train, name=name, checkpoint=checkpoint)

    def describe_effect(self, model: nn.Module) -> str:
        if not any(map(has_prompt, model.modules())):
            return ""
        return f"{self.config.num_virtual_tokens} virtual tokens before the input"

    def apply(self, model: nn.Module) -> None:
        root = find_language_model(model)[1]
        # Existing adapters may be trained, and keep their values.
        known = list(adapters_on(root))
        _refuse_unknown(self.start, root)
        place = add_prompt_(model, self.config, train=self.train, name=self.name)
        if self.start and self.name not in known:
            _initialize_(model.get_submodule(place), self.name, self.start)


class PrefixTuning(Adapter):
    """Train a few virtual keys and values before those of every layer of a frozen Hugging Face model, nothing else.

    It trains more parameters than :class:`PromptTuning`, and comes closer to full fine-tuning in small models. See
    :class:`PromptTuning` for the changes to the model. The model must have a key-value cache, which holds the prefix;
    blocks can still be recomputed by activation checkpointing.

    Args:
        tokens: number of virtual tokens in each layer.
        projection: compute the prefix with a two-layer network during training, which is more stable and needs more
            memory: True for a network as wide as a layer's keys, or its width. ``save_adapter`` saves only the result.
        train, name, checkpoint: as for :class:`~lightning_fasttrain.finetune.Adapter`.

    Raises:
        TypeError, ValueError: ``tokens`` or ``projection`` is not a positive integer; when the run begins, see
            :func:`~lightning_fasttrain.finetune.add_prompt_`.

    Example:
        >>> prefix = PrefixTuning(30, projection=512)

    Source:
        Li & Liang 2021, https://arxiv.org/abs/2101.00190, as PEFT implements it.
    """

    effect: ClassVar[str] = "trains a few virtual keys and values before every layer's of a Hugging Face model"
    when: ClassVar[str] = "virtual tokens before the input alone, as of PromptTuning, are too few"
    in_a_loop: ClassVar[str] = "apply(model, [finetune.PrefixTuning(...)])"

    def __init__(
        self,
        tokens: PositiveInt = 30,
        *,
        projection: bool | PositiveInt = False,
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        width = None if isinstance(projection, bool) else projection
        config = require_peft().PrefixTuningConfig(
            num_virtual_tokens=tokens, prefix_projection=projection is not False, encoder_hidden_size=width
        )
        super().__init__(config, train=train, name=name, checkpoint=checkpoint)

    def describe_effect(self, model: nn.Module) -> str:
        if not any(map(has_prompt, model.modules())):
            return ""
        return f"{self.config.num_virtual_tokens} virtual tokens before every layer's keys and values"

    def apply(self, model: nn.Module) -> None:
        add_prompt_(model, self.config, train=self.train, name=self.name)


def _refuse_unknown(ids: list[int], root: Any) -> None:
    known = root.get_input_embeddings().num_embeddings
    if ids and max(ids) >= known:
        why = f"the vocabulary has {known} tokens"
        raise ValueError(explain(f"start holds token id {max(ids)}", why, "Use the model's own tokenizer"))


def _initialize_(root: Any, name: str, ids: list[int]) -> None:
    embeddings, weight = root.get_input_embeddings(), root.prompt_encoder[name].embedding.weight
    # In a prediction there are no values to copy.
    if isinstance(embeddings.weight, FakeTensor):
        return
    repeated = (ids * -(-len(weight) // len(ids)))[: len(weight)]
    with torch.no_grad():
        weight.copy_(embeddings(torch.tensor(repeated, device=embeddings.weight.device)))
