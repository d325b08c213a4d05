"""Combine several LoRA adapters into one, and remove adapters."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.layer_kinds import find_tuners
from lightning_fasttrain.finetune.adapters._adapter_checks import refuse_merged, refuse_unknown
from lightning_fasttrain.finetune.adapters.add_adapter import adapted_modules, adapter_names, add_adapter_, use_adapter_
from lightning_fasttrain.finetune.selection._adapter_switches import switches
from lightning_fasttrain.finetune.selection._search import names_in, names_not_in
from lightning_fasttrain.finetune.selection.targets import match_exactly, method_of, require_peft

if TYPE_CHECKING:
    from peft import PeftConfig


@check_arguments
def combine_adapters_(
    model: nn.Module,
    weights: Mapping[str, float],
    *,
    name: str = "combined",
    how: str = "sum",
    density: float = 0.2,
    rank: PositiveInt | None = None,
) -> int:
    """Combine several LoRA adapters into a new one, in place, and activate it: Σ weight · ΔW in each layer.

    The other adapters stay; :func:`remove_adapter_` removes them. The sum is exact if its rank is the sum of their
    ranks; a smaller ``rank`` truncates it, layer by layer, by a singular value decomposition.

    Args:
        model: a module with LoRA adapters on linear layers.
        weights: name of an adapter → its weight; a negative weight makes the model forget a task.
        name: name of the new adapter.
        how: ``"sum"``; or ``"ties"``, which keeps only the largest values of each ΔW, and of these only the values
            with the majority sign, so that tasks interfere less with each other.
        density: fraction of the values to keep, for ``"ties"``.
        rank: rank of the new adapter; by default the sum of the ranks of the combined adapters.

    Returns:
        Rank of the new adapter.

    Raises:
        ValueError: an adapter is unknown, ``name`` is taken, ``density`` is outside (0, 1], or an adapter is merged, is
            not a plain LoRA, or also trains full modules or biases, which cannot be summed.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> for task in ("summaries", "titles"):
        ...     _ = add_adapter_(net, peft.LoraConfig(r=1), "0", name=task)
        >>> combine_adapters_(net, {"summaries": 0.7, "titles": 0.3})
        2
        >>> adapter_names(net)
        ['summaries', 'titles', 'combined']

    Source:
        PEFT's ``add_weighted_adapter``; Yadav et al. 2023, "TIES-Merging", https://arxiv.org/abs/2306.01708.
    """
    one_of("how", how, ("sum", "ties"))
    if not 0 < density <= 1:
        why = "density is the fraction of values to keep, in (0, 1]"
        raise ValueError(explain(f"density={density}", why, "Use 0.2, for example"))
    refuse_merged(model, "combine_adapters_")
    there = adapter_names(model)
    refuse_unknown(weights, there)
    if not weights or name in there:
        what, why = "weights={}", "no adapters to combine"
        if weights:
            what, why = f"name='{name}'", "an adapter of this name exists"
        raise ValueError(explain(what, why, f"Combine some of {', '.join(there)} under another name"))
    root, *others = adapted_modules(model).values()
    if others:
        why = "several of its modules have adapters"
        raise ValueError(explain(f"combining in {type(model).__name__}", why, "Combine them in one module at a time"))
    for one in weights:
        _refuse_unfit(one, vars(root)["peft_config"][one])
    layers = _layers(model, weights)
    if rank is None:
        rank = max(_sum_of_ranks(layer, weights) for layer in layers.values())
    factors = {place: _factors(layer, weights, how, density, rank) for place, layer in layers.items()}
    exactly = re.compile(match_exactly(layers))
    # With alpha = rank the scale is 1: the factors already include the weights.
    add_adapter_(model, require_peft().LoraConfig(r=rank, lora_alpha=rank), exactly, name=name)
    with torch.no_grad():
        for place, (a, b) in factors.items():
            layer: Any = model.get_submodule(place)
            # A layer with a smaller sum of ranks is padded with zeros.
            layer.lora_A[name].weight.zero_()[: len(a)] = a
            layer.lora_B[name].weight.zero_()[:, : len(a)] = b
    use_adapter_(model, name)
    return rank


@check_arguments
def remove_adapter_(model: nn.Module, name: str) -> None:
    """Remove one of several adapters from the model, in place; if it was active, activate the first remaining one.

    Raises:
        ValueError: there is no adapter of that name, it is the only one, or an adapter is merged.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> for task in ("summaries", "titles"):
        ...     _ = add_adapter_(net, peft.LoraConfig(r=1), "0", name=task)
        >>> remove_adapter_(net, "titles")
        >>> adapter_names(net)
        ['summaries']

    Source:
        PEFT's ``delete_adapter``.
    """
    refuse_merged(model, f"remove_adapter_(model, '{name}')")
    there = adapter_names(model)
    refuse_unknown([name], there)
    if there == [name]:
        why = "it is the only adapter"
        raise ValueError(explain(f"remove_adapter_(model, '{name}')", why, "Use unload_adapters_(model, merge=False)"))
    # Before the deletion: PEFT would choose for each layer separately, in alphabetical order.
    if any(name in layer.active_adapters for layer in switches(model)):
        use_adapter_(model, names_not_in(there, [name])[0])
    for layer in switches(model):
        layer.delete_adapter(name)
    for module in model.modules():
        (vars(module).get("peft_config") or {}).pop(name, None)


def _layers(model: nn.Module, weights: Mapping[str, float]) -> dict[str, Any]:
    found = {place: layer for place, layer in find_tuners(model).items() if set(weights) & set(layer.r)}
    for place, layer in found.items():
        # PEFT keeps the factors of embeddings in ``lora_embedding_A``.
        if not set(weights) & set(layer.lora_A):
            why = "adapters on embeddings cannot be combined here"
            raise ValueError(explain(f"combining in '{place}'", why, "Use PEFT's add_weighted_adapter"))
    return found


def _refuse_unfit(name: str, config: "PeftConfig") -> None:
    unfit: list[str] = []
    for key in ("modules_to_save", "trainable_token_indices", "use_dora", "target_parameters"):
        if value := getattr(config, key, None):
            unfit.append(f"{key}={value}")
    if method_of(config) != "LORA":
        unfit = [method_of(config)]
    if getattr(config, "bias", "none") != "none":
        unfit.append(f"bias='{config.bias}'")
    if unfit:
        why = f"it has {', '.join(unfit)}, and only ΔW of plain LoRA can be summed"
        raise ValueError(explain(f"combining adapter '{name}'", why, "Leave it out"))


def _factors(layer: object, weights: Mapping[str, float], how: str, density: float, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r] with r ≤ ``rank``, whose product is the combined change of the layer."""
    here = names_in(weights, layer.lora_A)
    with torch.no_grad():
        if how == "sum" and _sum_of_ranks(layer, weights) <= rank:
            # Σ sᵢ·Bᵢ·Aᵢ is [B₁ B₂ …] · [s₁A₁; s₂A₂; …]. The scale goes into A alone: a negative one has no square root.
            a = torch.cat([layer.lora_A[one].weight * (weights[one] * layer.scaling[one]) for one in here])
            return a, torch.cat([layer.lora_B[one].weight for one in here], dim=1)
        changes = [_change(layer, one) for one in here]
        shares = torch.tensor([float(weights[one]) for one in here], device=changes[0].device)
        if how == "ties":
            from peft.utils.merge_utils import ties

            whole = ties(changes, shares, density)
        else:
            whole = torch.einsum("n, n o i -> o i", shares, torch.stack(changes))
        # Truncated to ``rank`` singular values it is the nearest matrix of that rank.
        u, values, v = torch.linalg.svd(whole, full_matrices=False)
        return v[:rank], u[:, :rank] * values[:rank]


def _sum_of_ranks(layer: object, names: Iterable[str]) -> int:
    return sum(layer.r.get(one, 0) for one in names)


def _change(layer: object, name: str) -> Tensor:
    """Return ΔW [out, in] of one adapter, in float32."""
    a, b = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
    return layer.scaling[name] * (b @ a)
