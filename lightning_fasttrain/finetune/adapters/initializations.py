"""Adapters that begin with what data, gradients or a quantiser say: PEFT's own starts, given what they need."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.heads import is_a

Batches = Collection[Any]
_TOKENS = {"input_ids", "attention_mask"}


def check_start(config: Any, layers: Mapping[str, nn.Module], batches: Batches | None) -> None:
    """Refuse a start that PEFT would fail at, or pass by without a word.

    Raises:
        ValueError: it needs ``batches``, a pass over data that was not made, or a GPU.
    """
    start = getattr(config, "init_lora_weights", True)
    what = f"init_lora_weights='{start}'"
    if batches and start not in ("eva", "corda"):
        raise ValueError(explain(f"batches= with {what}", "it begins without data", "Leave batches= out"))
    if start == "loftq" and not torch.cuda.is_available():
        why = "PEFT computes it on a GPU, and there is none"
        raise ValueError(explain(what, why, "Begin with 'pissa', which decomposes the weight too"))
    if start == "eva" and batches is None:
        why = "it begins with the directions in which the inputs of the layers vary"
        raise ValueError(explain(what, why, "Give batches= some that the model can be called with"))
    if start == "corda" and batches is None and not _all_have(layers, "eigens"):
        why = "it begins with the covariance of the inputs of the layers"
        raise ValueError(explain(what, why, "Give batches= some that the model can be called with"))
    if start == "lora_ga" and not _all_have(layers, "_peft_loraga_grad"):
        why = "it begins with gradients, and PEFT would begin without them and not say so"
        way_out = "Call peft.tuners.lora.loraga.preprocess_loraga(model, config, train_step) first"
        raise ValueError(explain(what, why, way_out))


def prepare_start(model: nn.Module, root: nn.Module, config: Any, batches: Batches | None) -> None:
    """CorDA looks at the data before there is an adapter."""
    if batches and any(isinstance(parameter, FakeTensor) for parameter in root.parameters()):
        config.init_lora_weights = True  # a prediction wants the sizes alone
    if not batches or config.init_lora_weights != "corda":
        return
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    def run() -> None:
        for batch in batches:
            for row in _rows(batch):
                call(model, row)

    config.corda_config = config.corda_config or CordaConfig(corda_method="kpm")
    with in_eval(model):
        preprocess_corda(root, config, run_model=run)


def finish_start_(model: nn.Module, root: nn.Module, config: Any, name: str, batches: Batches | None) -> None:
    """EVA looks at the data once there is an adapter, and gives some layers more of the ranks, and others less."""
    if not batches or config.init_lora_weights != "eva":
        return
    from peft.tuners.lora.eva import initialize_lora_eva_weights

    of_tokens = all(isinstance(batch, Mapping) and _TOKENS & batch.keys() for batch in batches)
    # By default PEFT leaves out what is padded, of batches of tokens.
    plain: dict[str, Any] = {} if of_tokens else {"prepare_model_inputs_fn": None, "prepare_layer_inputs_fn": None}
    with in_eval(model), warnings.catch_warnings(action="ignore"):  # of several processes, say
        initialize_lora_eva_weights(
            _AsPeftModel(root, name),  # pyright: ignore[reportArgumentType]
            list(batches),
            forward_fn=lambda _, batch: call(model, batch),
            adapter_name=name,
            show_progress_bar=False,
            **plain,
        )


def call(model: nn.Module, batch: Any) -> Any:
    """A dict is passed by keywords, a tuple by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple | list) else (batch,)))


def _rows(batch: Any) -> Iterator[Any]:
    """One sample after the other: PEFT's CorDA takes no more at a time."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    for i in range(len(tensors[0])):
        yield tree_map_only(Tensor, lambda tensor, i=i: tensor[i : i + 1], batch)


def _all_have(layers: Mapping[str, nn.Module], attribute: str) -> bool:
    return all(hasattr(layer, attribute) for layer in layers.values())


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout; then each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training  # ``train()`` would set what lies inside, too


class _AsPeftModel(nn.Module):
    """What PEFT asks a ``PeftModel`` for, of a model that its layers were put into."""

    def __init__(self, root: nn.Module, name: str) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = root
        self.peft_config, self.active_adapters = vars(root)["peft_config"], [name]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        layers: list[Any] = [module for module in self.modules() if is_a(module, "BaseTunerLayer")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
