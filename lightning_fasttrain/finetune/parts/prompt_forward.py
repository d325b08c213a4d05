"""Puts PEFT's virtual tokens before a Hugging Face model's input, from the place of its own ``forward``."""

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fasttrain._messages import explain
from lightning_fasttrain._surgery import Undo, WrappedForward, patch, wrappers_on

# What a model returns along its sequence, which virtual tokens make longer.
_LONGER = {
    "SEQ_CLS": ("hidden_states",),
    "SEQ_2_SEQ_LM": ("encoder_last_hidden_state", "encoder_hidden_states"),
}
_LONGER_ELSEWHERE = ("logits", "last_hidden_state", "hidden_states")


class PromptForward(WrappedForward):
    """Replaces a Hugging Face model's ``forward``, and has PEFT call that with virtual tokens added.

    PEFT's own model does the work. It is held here instead of being put around the user's, whose only new part are
    the encoders of the virtual tokens, as ``prompt_encoder``. What comes out is as long as what went in.

    Args:
        root: the model, a ``PreTrainedModel``.
        frame: the model of PEFT's that was made for it.

    Raises:
        ValueError: the forward is given something that has the virtual tokens in it already.
    """

    module: Any
    merged_adapters: ClassVar[tuple[str, ...]] = ()  # as PEFT's layers have it; here it is always empty

    def __init__(self, root: nn.Module, frame: Any) -> None:
        super().__init__(root)
        self.frame = frame
        self.names = list(inspect.signature(type(root).forward).parameters)[1:]
        self.disable_adapters = False  # called so by the layers of PEFT's other adapters
        self.generating = False
        self.longest = _positions(root)
        del frame.base_model  # as a child: PEFT's model is no part of the user's, nor the other way round
        frame.base_model = _Inside(self)
        frame.get_prompt = _Prompts(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.disable_adapters or self.generating:
            return self.inner(*args, **kwargs)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        self._refuse_what_has_the_prompt(given)
        source = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        length = source.shape[1]
        self._refuse_longer(length)
        as_tuple = not given.pop("return_dict", self.module.config.return_dict)
        output = self.frame.forward(**given, return_dict=True)
        if not self.is_prefix:
            self._shorten_(output, length)
        return output.to_tuple() if as_tuple else output

    @property
    def is_prefix(self) -> bool:
        """Whether the virtual tokens are keys and values of each layer, rather than inputs of the first."""
        return self.frame.active_peft_config.peft_type.value == "PREFIX_TUNING"

    def _refuse_what_has_the_prompt(self, given: dict[str, Any]) -> None:
        for name in ("past_key_values", "encoder_outputs"):
            if given.get(name) is not None:
                what = f"{name} given to {type(self.module).__name__}, which has virtual tokens"
                why = "they would be put in a second time"
                raise ValueError(explain(what, why, "Leave it out, or generate with model.generate(...)"))

    def _refuse_longer(self, length: int) -> None:
        tokens = self.frame.active_peft_config.num_virtual_tokens
        if self.longest is not None and length + tokens > self.longest:
            why = f"{type(self.module).__name__} has {self.longest} positions"
            way_out = f"Cut what is longer than {self.longest - tokens} tokens"
            raise ValueError(explain(f"a batch of {length} tokens, and {tokens} virtual ones", why, way_out))

    def _shorten_(self, output: Any, length: int) -> None:
        for name in _LONGER.get(self.frame.active_peft_config.task_type, _LONGER_ELSEWHERE):
            value = output.get(name)
            if isinstance(value, tuple):
                output[name] = tuple(one[:, -length:] for one in value)
            elif value is not None:
                output[name] = value[:, -length:]

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Name of an adapter → the encoder of its virtual tokens."""
        return self.frame.prompt_encoder.named_children()

    def enable_adapters(self, on: bool) -> None:
        """Switch the virtual tokens on or off."""
        self.disable_adapters = not on

    def use(self, name: str) -> None:
        """Let the forward put in the virtual tokens of this name, and only them train."""
        self.frame.active_adapter = name
        for other, encoder in self.named_children():
            encoder.requires_grad_(other == name and not self.frame.peft_config[name].inference_mode)

    def install(self) -> Undo:
        from transformers import GenerationMixin

        if isinstance(self.module, GenerationMixin):
            self.module.generate = _Generate(self)
        return super().install()


def _positions(root: Any) -> int | None:
    """How many positions a model has learned; None for those that compute theirs."""
    known: list[int] = []
    for name, table in root.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(table, nn.Embedding) and ("position" in last or last == "wpe"):
            first = 0 if table.padding_idx is None else table.padding_idx + 1  # where RoBERTa's begin
            known.append(table.num_embeddings - first)
    return min(*known, root.config.max_position_embeddings) if known else None


class _SignatureOfModel:
    """Lets ``inspect.signature`` find the model's own, by which Hugging Face's generation knows what it takes."""

    def __get__(self, forward: PromptForward | None, owner: Any) -> inspect.Signature:
        if forward is None:
            raise AttributeError("__signature__")
        signature = inspect.signature(type(forward.module).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


PromptForward.__signature__ = _SignatureOfModel()  # type: ignore[attr-defined]


def prompts_on(module: nn.Module) -> PromptForward | None:
    """What puts virtual tokens before the input of this very module, if anything does."""
    return next(wrappers_on(module, PromptForward), None)


def take_out_prompts_(root: nn.Module) -> None:
    """Give a model its own ``forward`` and ``generate`` back, and forget its virtual tokens; nothing if it has none."""
    prompts = prompts_on(root)
    if prompts is None:
        return
    prompts.undo()
    root.__dict__.pop("generate", None)
    del root.prompt_encoder, root.peft_config


class _Inside:
    """What PEFT's model takes for the model inside of it: calls go past what replaces ``forward``."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.prompts.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        root = self.prompts.module
        return type(root).generate(root, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "prompts" or name.startswith("__"):  # while this is being copied
            raise AttributeError(name)
        return getattr(self.prompts.module, name)


class _Prompts:
    """Replaces the ``get_prompt`` of PEFT's model."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = self.prompts.frame
        tokens, device = frame.prompt_tokens[frame.active_adapter], self.prompts.module.device
        if tokens.device != device:  # PEFT would copy them there at each step
            frame.prompt_tokens[frame.active_adapter] = tokens.to(device)
        prompt = type(frame).get_prompt(frame, *args, **kwargs)
        if not isinstance(prompt, Tensor) and not self.prompts.generating:
            _hold_still_(prompt)
        return prompt


def _hold_still_(cache: Any) -> None:
    """Let each layer of a key-value cache put its prefix before what it is given, and keep none of that.

    The result is the same, but a block that is run a second time, as activation checkpointing does, finds the cache
    as it was the first time.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        cache.cross_attention_cache.update = _as_given
        cache.is_updated = _NeverUpdated(cache.is_updated)
        cache = cache.self_attention_cache
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layer.update = partial(_after_prefix, layer)


def _after_prefix(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([layer.keys, keys], dim=-2), torch.cat([layer.values, values], dim=-2)


def _as_given(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return keys, values


class _NeverUpdated(dict[int, bool]):
    """Which layers' keys and values of the encoder's output are in the cache: none, ever."""

    def __setitem__(self, layer: int, updated: bool) -> None:
        pass


class _Generate:
    """Replaces a model's ``generate``: PEFT puts the virtual tokens into the cache at the first step."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompts, frame, root = self.prompts, self.prompts.frame, self.prompts.module
        if prompts.disable_adapters:
            return frame.base_model.generate(inputs, *args, **kwargs)
        kwargs.update(zip(("generation_config", "logits_processor", "stopping_criteria"), args, strict=False))
        if inputs is not None:
            kwargs["input_ids"] = inputs
        if prompts.is_prefix and not kwargs.setdefault("use_cache", True):
            why = "the prefix is in the cache"
            raise ValueError(explain("use_cache=False", why, "Leave it out, or use PromptTuning"))
        generate = frame.generate if root.config.is_encoder_decoder else frame.base_model.generate
        prompts.generating = True
        restore = patch(root, "prepare_inputs_for_generation", frame.prepare_inputs_for_generation)
        try:
            with warnings.catch_warnings():
                # They come from generate itself. Training had none either: positions begin with the virtual tokens.
                warnings.filterwarnings("ignore", message="Position ids are not supported")
                return generate(**kwargs)
        finally:
            restore()
            prompts.generating = False
