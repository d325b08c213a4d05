"""Puts PEFT's virtual tokens before a Hugging Face model's input, in the place of its own ``forward``."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain._messages import explain
from lightning_fasttrain._surgery import Undo, WrappedForward

# What a model returns along the sequence, which the virtual tokens make longer.
_OF_DECODER = ("logits", "last_hidden_state", "hidden_states")
_OF_ENCODER = ("encoder_last_hidden_state", "encoder_hidden_states")
_OF_CLASSIFIER = ("hidden_states",)


class PromptForward(WrappedForward):
    """Stands in the place of a Hugging Face model's ``forward``, which PEFT calls with its virtual tokens added.

    PEFT's own model does the work, but it is held here instead of being put around the user's: just its prompt
    encoders are the user's model's, as ``prompt_encoder``. What comes out is as long as what went in.

    Args:
        root: the model, a ``PreTrainedModel`` that PEFT's model was made for.
        frame: PEFT's model.
        shortens: keys of the output from which the positions of the virtual tokens are cut.
    """

    module: Any

    def __init__(self, root: nn.Module, frame: Any) -> None:
        super().__init__(root)
        self.frame = frame
        self.names = list(inspect.signature(type(root).forward).parameters)[1:]
        self.disable_adapters = False  # PEFT's name for it, as its layers have it
        self.generating = False
        del frame.base_model  # a child of it no more
        frame.base_model = _Inside(self)
        frame.get_prompt = _Prompts(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.disable_adapters or self.generating:
            return self.inner(*args, **kwargs)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        _refuse_what_holds_the_prompt(given)
        as_tuple = given.pop("return_dict", None) is False or self.module.config.return_dict is False
        output = self.frame.forward(**given, return_dict=True)
        if not self.is_prefix:
            source = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
            self._shorten_(output, source.shape[1])
        return output.to_tuple() if as_tuple else output

    __signature__: Any

    @property
    def is_prefix(self) -> bool:
        return self.frame.active_peft_config.peft_type.value == "PREFIX_TUNING"

    def _shorten_(self, output: Any, length: int) -> None:
        task = self.frame.active_peft_config.task_type
        names = {"SEQ_CLS": _OF_CLASSIFIER, "SEQ_2_SEQ_LM": _OF_ENCODER}.get(task, _OF_DECODER)
        for name in names:
            value = output.get(name)
            if isinstance(value, tuple):
                output[name] = tuple(one[:, -length:] for one in value)
            elif value is not None:
                output[name] = value[:, -length:]

    def named_children(self) -> Any:
        """The prompt encoders, by the name of the adapter."""
        return self.frame.prompt_encoder.named_children()

    def enable_adapters(self, on: bool) -> None:
        self.disable_adapters = not on

    def use(self, name: str) -> None:
        """Let the forward put in the virtual tokens of this name, and only them train."""
        self.frame.active_adapter = name
        for other, encoder in self.named_children():
            encoder.requires_grad_(other == name and not self.frame.peft_config[name].inference_mode)

    def install(self) -> Undo:
        undo = super().install()
        if "generate" in dir(type(self.module)):
            self.module.generate = _Generate(self)

        def take_out() -> None:
            undo()
            if isinstance(self.module.__dict__.get("generate"), _Generate):
                del self.module.generate

        return take_out


class _SignatureOfModel:
    """By which Hugging Face's generation finds out what the model takes."""

    def __get__(self, forward: PromptForward | None, owner: Any) -> inspect.Signature:
        if forward is None:
            raise AttributeError("__signature__")
        signature = inspect.signature(type(forward.module).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


PromptForward.__signature__ = _SignatureOfModel()


def prompts_on(module: nn.Module) -> PromptForward | None:
    """What puts virtual tokens before this very module's input, if anything does."""
    holder = module.__dict__.get("forward")
    while isinstance(holder, WrappedForward):
        if isinstance(holder, PromptForward):
            return holder
        holder = holder.previous
    return None


def _refuse_what_holds_the_prompt(given: dict[str, Any]) -> None:
    for name in ("past_key_values", "encoder_outputs"):
        if given.get(name) is not None:
            raise ValueError(
                explain(
                    f"{name} given to a model with virtual tokens",
                    "they are in it already, and would be put in once more",
                    "Generate with model.generate(...), or leave it out",
                )
            )


class _Inside:
    """What PEFT's model takes for the model inside of it: calls go past what stands in the place of ``forward``."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.prompts.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        root = self.prompts.module
        return type(root).generate(root, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "prompts" or name.startswith("__"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.prompts.module, name)


class _Prompts:
    """Stands in the place of the ``get_prompt`` of PEFT's model."""

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

    What is computed is the same; but a block that is run again, as activation checkpointing does, finds the same.
    """
    from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        cache.cross_attention_cache.update = _as_given
        cache.is_updated = _NeverUpdated(cache.is_updated)
        cache = cache.self_attention_cache
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.update = partial(_after_prefix, layer)


def _after_prefix(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([layer.keys, keys], dim=-2), torch.cat([layer.values, values], dim=-2)


def _as_given(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return keys, values


class _NeverUpdated(dict[int, bool]):
    def __setitem__(self, layer: int, updated: bool) -> None:
        pass


class _Generate:
    """Stands in the place of a model's ``generate``: PEFT puts the virtual tokens into its cache at the first step."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prompts, frame, root = self.prompts, self.prompts.frame, self.prompts.module
        if prompts.disable_adapters:
            return frame.base_model.generate(*args, **kwargs)
        if args:
            kwargs = {"inputs": args[0], **dict(zip(("generation_config",), args[1:], strict=False)), **kwargs}
        if "inputs" in kwargs:
            kwargs["input_ids"] = kwargs.pop("inputs")
        prompts.generating = True
        root.prepare_inputs_for_generation = frame.prepare_inputs_for_generation
        try:
            generate = frame.generate if root.config.is_encoder_decoder else frame.base_model.generate
            return generate(**kwargs)
        finally:
            prompts.generating = False
            del root.prepare_inputs_for_generation
