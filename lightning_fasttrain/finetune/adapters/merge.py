"""Merge adapters into the weights, or unmerge them."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.select import as_list
from lightning_fasttrain.finetune.adapters.adapter_checks import refuse_merged, refuse_parted, refuse_unknown
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_names, adapter_parameters, use_adapter_
from lightning_fasttrain.finetune.adapters.merge_quantized import (
    Originals,
    QuantizedMerge,
    check_way,
    find_quantized_under,
    find_trained_copies,
    list_adapters,
    tuner_layers,
    wrappers_in,
)
from lightning_fasttrain.finetune.quantized.load_quantized import Original
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.finetune.quantized.quantized_tensor import holder_under
from lightning_fasttrain.finetune.selection.base_fingerprint import is_torchaos, names_in


@dataclass(frozen=True)
class MergeReport:
    """Result of :func:`merge_adapters_`; its string is a one-line summary.

    Args:
        names: names of the merged adapters.
        layers: qualified names of the layers that they were merged into.
        into: the chosen way to merge, if layers were quantised.
        against_trained: name of each quantised layer → ‖difference‖ / ‖output‖ between its outputs after merging and
            as trained (quantised weights with the unmerged adapter).
        against_original: for ``into="original"``, the same difference to the original weights with the unmerged
            adapter, which is the rounding error of merging itself.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    into: str | None = None
    against_trained: dict[str, float] = field(default_factory=dict)
    against_original: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{', '.join(self.names)} merged into {len(self.layers)} layers"]
        if self.against_trained:
            parts.append(f"{len(self.against_trained)} of them {self.into}")
            why = ""
            if self.into == "original":
                why = ", which is the quantization error"
            parts.append(f"outputs differ from the trained model by {_spread(self.against_trained)}{why}")
        if self.against_original:
            parts.append(f"from the unmerged adapter on the original weights by {_spread(self.against_original)}")
        return "; ".join(parts)


@check_arguments
def merge_adapters_(
    model: nn.Module,
    names: str | Iterable[str] | None = None,
    *,
    into: str | None = None,
    original: Original | None = None,
    batch: object = None,
) -> MergeReport:
    """Merge the adapters into the base weights, in place, so that the forward is as fast as without adapters.

    The original weights are kept in host memory for :func:`unmerge_adapters_`; quantised weights stay on their device.
    The adapters' parameters, fully trained modules included, are frozen while merged, since they would get no gradient:
    a run that has nothing else to train is refused. If anything fails, the model is not changed.

    A quantised weight cannot hold the sum exactly. There are three ways to merge, one of which must be chosen:

    * ``"requantized"``: dequantise, add, quantise again. Same size as before; the rounding error is about that of the
      first quantization.
    * ``"dequantized"``: plain layers with the dequantised weights, plus the adapter: the model as it was trained.
    * ``"original"``: plain layers with the weights from before quantising, plus the adapter. Bit for bit the result of
      merging into the full-precision model. It differs from the trained model by the quantization error, which often
      improves the result, since the weights are more precise, but not always: measure it.

    Plain layers get the dtype that most of the model's other parameters have.

    Args:
        model: any module with adapters.
        names: adapters to merge; by default the active ones. Other adapters named here become the active ones.
        into: ``"requantized"``, ``"dequantized"`` or ``"original"``; only with quantised layers.
        original: for ``"original"``, the full-precision model: a module, its state dict, a safetensors file or folder.
        batch: batch to call ``model`` with to measure the error of quantised layers on their real inputs (a dict is
            passed by keywords, a tuple by position). By default their inputs are drawn from a normal distribution.

    Returns:
        A report of the merged adapters and layers, and of the measured error.

    Raises:
        ValueError: adapters are already merged, disabled, or would make a weight infinite or NaN; a weight has an
            adapter under some of its names only; a name is unknown; ``into`` is missing or unused; ``original`` lacks a
            layer or belongs to another model.
        TypeError: PEFT cannot merge this kind of adapter into that layer, or a parametrization computes its weight.

    Example:
        >>> import peft, torch, lightning_fasttrain as ft
        >>> net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)
        >>> _ = ft.finetune.add_adapter_(net, peft.LoraConfig(r=2, init_lora_weights=False), "0")
        >>> before = net(x)
        >>> print(merge_adapters_(net))
        default merged into 1 layers
        >>> torch.allclose(net(x), before, atol=1e-6)
        True

    Source:
        Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1; for plain layers PEFT's ``merge``.
    """
    return merge_layers_(model, tuner_layers(model), names, into, original, batch, stay=True)


@check_arguments
def unmerge_adapters_(model: nn.Module) -> None:
    """Restore the weights from before merging bit for bit, and let the adapters train again.

    PEFT subtracts the merged change instead, which leaves a rounding error.

    Raises:
        ValueError: no adapter is merged, or PEFT merged it, which keeps no original weights.

    Example:
        >>> import peft, torch, lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        >>> before = net[0].weight.detach().clone()
        >>> _ = ft.finetune.add_adapter_(net, peft.LoraConfig(r=2, init_lora_weights=False), "0")
        >>> _ = merge_adapters_(net)
        >>> unmerge_adapters_(net)
        >>> torch.equal(net[0].base_layer.weight, before)
        True

    Source:
        Ours; checked bit for bit against a copy from before merging.
    """
    layers = {name: layer for name, layer in tuner_layers(model).items() if layer.merged}
    if not layers:
        raise ValueError(explain("unmerge_adapters_", "no adapter is merged", "Call merge_adapters_ first"))
    for name, layer in layers.items():
        if not isinstance(vars(layer).get("unmerge"), Originals):
            why = "PEFT merged it, and keeps no original weights"
            raise ValueError(explain(f"'{name}'", why, "Call PEFT's unmerge_adapter()"))
    # Of two tied layers, the second was merged into the already merged first one.
    for layer in reversed(layers.values()):
        layer.unmerge()


def merge_layers_(
    model: nn.Module,
    layers: Mapping[str, object],
    names: str | Iterable[str] | None,
    into: str | None,
    original: Original | None,
    batch: object,
    stay: bool = False,
) -> MergeReport:
    """Check everything, and merge into these layers, which ``stay`` in the model or are unloaded afterwards."""
    chosen = _choose_names(model, layers, names)
    quantized = {name: layer for name, layer in layers.items() if find_quantized_under(layer)}
    refuse_merged(model, "merging")
    refuse_parted(model, "merging the adapter")
    check_way(model, quantized, into, original)
    if stay:
        _refuse_unmergeable(quantized)
    _refuse_unwritable(layers)
    way = QuantizedMerge(model, quantized, into, original, batch)
    merged = _merge(model, layers, chosen, way)
    report = MergeReport(tuple(chosen), tuple(merged), into, way.against_trained, way.against_original)
    say("merge_adapters_: %s", report)
    return report


def _merge(model: nn.Module, layers: Mapping[str, object], names: list[str], way: QuantizedMerge) -> list[str]:
    """Merge the named adapters, or leave the model as it is if that fails; return the names of the merged layers."""
    brought = adapter_parameters(model)
    parameters = [p for name, p in model.named_parameters() if name in brought]
    trained = list(filter(attrgetter("requires_grad"), parameters))
    active = _list_active(layers)
    with ExitStack() as on_error:
        if names != active:
            # Undone in reverse: first the active names, which makes all their parameters train, then ``requires_grad``.
            on_error.callback(_train_only, parameters, trained)
            on_error.callback(use_adapter_, model, active)
            use_adapter_(model, names)
            trained = list(filter(attrgetter("requires_grad"), parameters))
        merged: list[str] = []
        for name, layer in layers.items():
            if not list_adapters(layer) & set(names):
                continue
            originals = Originals(layer)
            # Also for the layer in which merging fails.
            on_error.callback(originals)
            try:
                _merge_one(name, layer, names, way)
            except ValueError as error:
                # PEFT's message for values that are not finite contains this word.
                if "NaNs" not in str(error):
                    raise
                what = f"merging {', '.join(names)} into '{name}'"
                why = "the merged weight would hold infinite or NaN values"
                raise ValueError(explain(what, why, "Use an earlier checkpoint")) from error
            if layer.merged:
                layer.unmerge = originals
                merged.append(name)
        on_error.pop_all()
    for parameter in trained:
        parameter.requires_grad_(False)
        parameter.grad = None
    if merged:
        # The first layer holds them, since it is unmerged last: only then are all weights restored.
        vars(layers[merged[0]])["unmerge"].trained = trained
    return merged


def _merge_one(name: str, layer: object, names: list[str], way: QuantizedMerge) -> None:
    here = names_in(names, list_adapters(layer))
    if is_quantized(layer.get_base_layer()):
        # PEFT's layer still wraps the new base layer, and regards its adapters as merged.
        layer.base_layer = way.merge_layer(name, layer, names)
        layer.merged_adapters[:] = here
        return
    for wrapper in wrappers_in(layer):
        if holder_under(wrapper) is not None:
            way.merge_tensor(name, wrapper, here)
            wrapper.merged_adapters[:] = here
        else:
            _merge_plain(name, wrapper, names)


def _merge_plain(name: str, wrapper: object, names: list[str]) -> None:
    try:
        wrapper.merge(safe_merge=True, adapter_names=names)
    except (ValueError, NotImplementedError) as error:
        if "NaNs" in str(error):
            raise
        what, why = f"merging {', '.join(names)} into '{name}'", "PEFT cannot merge this kind of adapter"
        if str(error):
            why += f" into this layer: {str(error).rstrip('.')}"
        raise TypeError(explain(what, why, "Keep it beside the base: save_adapter and load_adapter_")) from error


def _choose_names(model: nn.Module, layers: Mapping[str, object], names: str | Iterable[str] | None) -> list[str]:
    there, active = adapter_names(model), _list_active(layers)
    chosen = active
    if names is not None:
        chosen = list(dict.fromkeys(as_list(names)))
    if not chosen:
        raise ValueError(explain("merging", "no adapter is active or named", f"Existing adapters: {', '.join(there)}"))
    refuse_unknown(chosen, there)
    if any(map(attrgetter("disable_adapters"), layers.values())):
        raise ValueError(explain("merging", "the adapters are disabled", "Call enable_adapters_(model) first"))
    for name, wrapper in find_trained_copies(model).items():
        whole = names_in(chosen, wrapper.modules_to_save)
        if len(whole) > 1:
            why = "only one of the copies can be kept"
            raise ValueError(explain(f"'{name}' is fully trained in {' and '.join(whole)}", why, "Name one"))
    return chosen


def _refuse_unmergeable(quantized: Mapping[str, object]) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in quantized.items():
        if type(layer).merge is BaseTunerLayer.merge:
            what = f"'{name}', a quantised {type(layer).__module__.split('.')[-2]} layer"
            why = "PEFT's layer would apply the adapter again after merging"
            raise TypeError(explain(what, why, "Use unload_adapters_(model, into=...)"))


def _refuse_unwritable(layers: Mapping[str, object]) -> None:
    """Refuse layers whose weight cannot hold the sum: those that torchao quantised, and computed weights."""
    for name, layer in layers.items():
        base = layer.get_base_layer()
        weight = base._parameters.get("weight")
        if weight is None and isinstance(getattr(base, "weight", None), Tensor) and not is_quantized(base):
            why = "its weight is computed from other parameters at each call, so a merged weight would be lost"
            way_out = "Call parametrize.remove_parametrizations(layer, 'weight') before the adapter is added"
            raise TypeError(explain(f"merging into '{name}'", why, way_out))
        if weight is not None and is_torchaos(weight):
            why = "torchao quantised its weight with unknown settings, so the merged weight cannot be quantised again"
            way_out = "Save the adapter, load it into the unquantised model with load_adapter_, and merge it there"
            raise TypeError(explain(f"merging into '{name}'", why, way_out))


def _list_active(layers: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys(chain(*map(attrgetter("active_adapters"), layers.values()))))


def _train_only(parameters: list[nn.Parameter], trained: list[nn.Parameter]) -> None:
    chosen = set(trained)
    for parameter in parameters:
        parameter.requires_grad_(parameter in chosen)


def _spread(errors: dict[str, float]) -> str:
    return f"{max(errors.values()):.2g} at most, {sum(errors.values()) / len(errors):.2g} on average"
