"""What PEFT's model with virtual tokens lacks: outputs as long as the labels, and a prefix that can be recomputed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import explain

# What a model returns along its sequence, which virtual tokens make longer.
_LONGER = {
    "SEQ_CLS": ("hidden_states",),
    "SEQ_2_SEQ_LM": ("encoder_last_hidden_state", "encoder_hidden_states"),
}
_LONGER_ELSEWHERE = ("logits", "last_hidden_state", "hidden_states")


def cut_virtual_tokens(prompted: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
    """Hook of the forward: make what it returns as long as what it was given.

    Raises:
        ValueError: it was given what has virtual tokens in it already; or returns a tuple.
    """
    config = prompted.active_peft_config
    if prompted._adapters_disabled:
        return
    if given.get("past_key_values") is not None or given.get("encoder_outputs") is not None:
        why = "virtual tokens are in it already, and would be put in a second time"
        way_out = "Leave it out, or generate with model.generate(...)"
        raise ValueError(explain(f"a cache given to a {type(prompted).__name__}", why, way_out))
    if config.peft_type.value == "PREFIX_TUNING":  # its tokens are in the cache, not in the sequence
        return
    if isinstance(output, tuple):
        why = "in a tuple it cannot be told which parts the virtual tokens have made longer"
        raise ValueError(explain("return_dict=False with virtual tokens", why, "Leave it out"))
    # The order of these three in the forward of all of PEFT's models.
    given = dict(zip(("input_ids", "attention_mask", "inputs_embeds"), args, strict=False)) | given
    source = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    for name in _LONGER.get(config.task_type, _LONGER_ELSEWHERE):
        value = output.get(name)
        if isinstance(value, tuple):
            output[name] = tuple(part[:, -source.shape[1] :] for part in value)
        elif value is not None:
            output[name] = value[:, -source.shape[1] :]  # they come first, so the end is what was given


class StillPrompt:
    """Replaces ``get_prompt`` of PEFT's model: while gradients are taken, a prefix's cache stays as it is.

    Each layer puts its prefix before what it is given, and keeps none of that. The result is the same, but a block that
    is run a second time, as activation checkpointing does, finds the cache as it was the first time. The object holds
    the model rather than a bound method, so that a copy of the model has its own.
    """

    def __init__(self, prompted: Any) -> None:
        self.prompted = prompted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.cache_utils import EncoderDecoderCache

        cache = type(self.prompted).get_prompt(self.prompted, *args, **kwargs)
        if isinstance(cache, Tensor) or not torch.is_grad_enabled():  # generation is to go on with its cache
            return cache
        of_decoder = cache
        if isinstance(cache, EncoderDecoderCache):
            cache.cross_attention_cache.update = _return_as_given
            cache.is_updated = _NeverUpdated(cache.is_updated)  # a block that runs again would look there
            of_decoder = cache.self_attention_cache
        for layer in of_decoder.layers:
            layer.update = partial(_put_behind_prefix, layer)  # on this cache alone: each forward gets a new one
        return cache


class GenerateWithCache:
    """Replaces ``generate`` of PEFT's model, which without a cache leaves a prefix out and says nothing."""

    def __init__(self, prompted: Any) -> None:
        self.prompted = prompted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prefixed = self.prompted.active_peft_config.peft_type.value == "PREFIX_TUNING"
        if prefixed and kwargs.get("use_cache") is False and not self.prompted._adapters_disabled:
            raise ValueError(
                explain("use_cache=False", "the prefix is in the cache", "Leave it out, or use PromptTuning")
            )
        return type(self.prompted).generate(self.prompted, *args, **kwargs)


def _put_behind_prefix(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([layer.keys, keys], dim=-2), torch.cat([layer.values, values], dim=-2)


def _return_as_given(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return keys, values


class _NeverUpdated(dict[int, bool]):
    """Which layers' keys and values of the encoder's output are in the cache: none, ever."""

    def __setitem__(self, layer: int, updated: bool) -> None:
        pass
