"""Prompt tuning and prefix tuning, as techniques."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_fasttrain.core.checks import PositiveInt, one_of
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.finetune.adapters.lora import Adapter
from lightning_fasttrain.finetune.prompts.add_prompt import add_prompt_, find_language_model
from lightning_fasttrain.finetune.selection.base_fingerprint import adapters_on
from lightning_fasttrain.finetune.selection.float32_adapters import has_prompt
from lightning_fasttrain.finetune.selection.targets import require_peft


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
    when: ClassVar[str] = "a large model, a small task, and thousands of tasks to be kept; not for small models"
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

    def took_hold(self, model: nn.Module) -> str:
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
    when: ClassVar[str] = "as PromptTuning, where virtual tokens before the input alone are too few"
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

    def took_hold(self, model: nn.Module) -> str:
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
