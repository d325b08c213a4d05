"""Run PEFT's data-dependent LoRA initializations (EVA, CorDA, LoRA-GA, LoftQ) with the inputs that they need."""

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.finetune.selection.base_fingerprint import first_tensor, has_fake_parameters
from lightning_fasttrain.finetune.selection.float32_adapters import without_adapters

if TYPE_CHECKING:
    from peft import PeftConfig

Batches = Collection[Any]
_TOKENS = {"input_ids", "attention_mask"}
_NEVER_LINEAR = nn.Embedding, nn.modules.conv._ConvNd, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm
_FOR_LINEAR_LAYERS = ("pissa", "corda", "olora", "eva", "orthogonal")


def check_start(config: "PeftConfig", layers: Mapping[str, nn.Module], batches: Batches | None) -> None:
    """Refuse an initialization that PEFT would fail at or silently ignore.

    Raises:
        ValueError: it needs ``batches``, a preparatory pass over data, or a GPU; or is for linear layers alone.
    """
    start = getattr(config, "init_lora_weights", True)
    what = f"init_lora_weights='{start}'"
    # PEFT fails at such a layer after it has changed the weights of the linear layers before it.
    others = [name for name, layer in layers.items() if isinstance(layer, _NEVER_LINEAR)]
    if others and isinstance(start, str) and start.startswith(_FOR_LINEAR_LAYERS):
        why = "PEFT computes this initialization for linear layers alone"
        way_out = "Leave these layers out of the targets, or use init_lora_weights=True"
        raise ValueError(explain(f"{what} on {list_some(others)}", why, way_out))
    if batches and start not in ("eva", "corda"):
        raise ValueError(explain(f"batches= with {what}", "this initialization uses no data", "Remove batches="))
    if start == "loftq" and not torch.cuda.is_available():
        why = "PEFT computes it on a GPU, and no GPU is available"
        raise ValueError(explain(what, why, "Use 'pissa', which decomposes the weight too"))
    if start == "eva" and batches is None:
        why = "this initialization computes the principal components of the layers' inputs, and needs data"
        raise ValueError(explain(what, why, "Pass batches= that the model can be called with"))
    if start == "corda" and batches is None and not _all_have(layers, "eigens"):
        why = "this initialization computes the covariance of the layers' inputs, and needs data"
        raise ValueError(explain(what, why, "Pass batches= that the model can be called with"))
    if start == "lora_ga" and not _all_have(layers, "_peft_loraga_grad"):
        why = "this initialization needs gradients, and PEFT would silently start without them"
        way_out = "Call peft.tuners.lora.loraga.preprocess_loraga(model, config, train_step) first"
        raise ValueError(explain(what, why, way_out))


def prepare_start(model: nn.Module, root: nn.Module, config: Any, batches: Batches | None) -> None:
    """Run CorDA's pass over the data, which comes before the adapter is added."""
    if batches and has_fake_parameters(root):
        config.init_lora_weights = True  # a prediction needs only the sizes
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


def finish_start_(model: nn.Module, root: nn.Module, config: "PeftConfig", name: str, batches: Batches | None) -> None:
    """Run EVA's pass over the data, which comes after the adapter is added and redistributes ranks among layers."""
    if not batches or config.init_lora_weights != "eva":
        return
    from peft.tuners.lora.eva import initialize_lora_eva_weights

    plain: dict[str, Any] = {}
    if not all(isinstance(batch, Mapping) and _TOKENS & batch.keys() for batch in batches):
        # By default PEFT ignores padding, which only batches of tokens have.
        plain = {"prepare_model_inputs_fn": None, "prepare_layer_inputs_fn": None}
    with in_eval(model), warnings.catch_warnings(action="ignore"):  # for example about several processes
        initialize_lora_eva_weights(
            _AsPeftModel(root, name),  # pyright: ignore[reportArgumentType]
            list(batches),
            forward_fn=lambda _, batch: call(model, batch),
            adapter_name=name,
            show_progress_bar=False,
            **plain,
        )


def copy_config_for(
    config: "PeftConfig", layers: set[str] | str, scaled: set[str] | str, whole: list[str] | None = None
) -> Any:
    """Return a copy of a configuration for other layers, whose initialization does not change them.

    Args:
        config: PEFT's configuration.
        layers: names of the layers, or a regular expression for them.
        scaled: likewise, those that (IA)³ scales at their input.
        whole: names of the modules that are trained in full.
    """
    config = copy.deepcopy(config)
    config.target_modules, config.modules_to_save = layers, whole
    if hasattr(config, "init_lora_weights"):
        # The tensors have the same names and shapes; PiSSA would change the layers.
        config.init_lora_weights = True
    if hasattr(config, "feedforward_modules"):
        config.feedforward_modules = scaled
    return config


def call(model: nn.Module, batch: object) -> Any:
    """Call ``model`` with ``batch``: a dict is passed by keywords, a tuple by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _rows(batch: object) -> Iterator[Any]:
    """Yield the samples of a batch one at a time, as PEFT's CorDA requires."""
    for i in range(len(first_tensor(tree_leaves(batch)))):
        yield tree_map_only(Tensor, lambda tensor, i=i: tensor[i : i + 1], batch)


def _all_have(layers: Mapping[str, nn.Module], attribute: str) -> bool:
    return all(hasattr(layer, attribute) for layer in layers.values())


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Set ``model`` to eval mode without gradients, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training  # ``train()`` would also set the submodules


class _AsPeftModel(nn.Module):
    """Minimal stand-in for a ``PeftModel``, around a model that PEFT's layers were added to."""

    def __init__(self, root: nn.Module, name: str) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = root
        self.peft_config, self.active_adapters = vars(root)["peft_config"], [name]

    def disable_adapter(self) -> AbstractContextManager[None]:
        return without_adapters(self)
