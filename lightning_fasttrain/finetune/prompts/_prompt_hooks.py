"""Hooks for PEFT's models with virtual tokens: outputs as long as the labels, and a prefix that can be recomputed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Replacement
from lightning_fasttrain.finetune.selection.targets import method_of

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
    if given.get("past_key_values") is not None or given.get("encoder_outputs") is not None:
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
