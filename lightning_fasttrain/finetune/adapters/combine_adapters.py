"""Several adapters as one, and one fewer."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.heads import is_a
from lightning_fasttrain.finetune.adapters.add_adapter import (
    adapted_modules,
    adapter_names,
    add_adapter_,
    refuse_merged,
    refuse_unknown,
    use_adapter_,
)
from lightning_fasttrain.finetune.selection._adapter_switches import switches
from lightning_fasttrain.finetune.selection.targets import require_peft


def combine_adapters_(
    model: nn.Module,
    weights: Mapping[str, float],
    *,
    name: str = "combined",
    how: str = "sum",
    density: float = 0.2,
    rank: int | None = None,
) -> int:
    """Make one LoRA out of several, in place, and use it: Σ weight · ΔW in each layer.

    The others stay; :func:`remove_adapter_` takes them away. The sum is exact: its rank is the sum of their ranks, or
    ``rank``, to which it is then cut, layer by layer, by a singular value decomposition.

    Args:
        model: with LoRA adapters, on linear layers.
        weights: name of an adapter → its weight, which may be negative: to forget a task.
        name: of the new one.
        how: ``"sum"``; or ``"ties"``: of each ΔW only the largest numbers are kept, and of these those whose sign
            prevails, so that tasks disturb one another less.
        density: for ``"ties"``, the share of numbers to keep.
        rank: of the new adapter; by default the sum of theirs.

    Returns:
        Its rank.

    Raises:
        ValueError: an unknown adapter, ``name`` is taken, ``density`` outside (0, 1], one is merged or is no plain
            LoRA, or trains whole modules or biases besides, which cannot be added up.

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
        raise ValueError(explain(f"density={density}", "it is the share of numbers to keep", "Use 0.2, say"))
    refuse_merged(model, "combine_adapters_")
    there = adapter_names(model)
    refuse_unknown(weights, there)
    if not weights or name in there:
        what = f"name='{name}'" if weights else "weights={}"
        why = "there is one of this name" if weights else "there is nothing to add up"
        raise ValueError(explain(what, why, f"Combine some of {', '.join(there)} under another name"))
    (prefix, root), *others = adapted_modules(model).items()
    if others:
        why = "adapters are in several modules of it"
        raise ValueError(explain(f"combining in {type(model).__name__}", why, "Combine them in one after the other"))
    configs: list[Any] = [vars(root)["peft_config"][one] for one in weights]
    for one, config in zip(weights, configs, strict=True):
        _refuse_unfit(one, config)
    inside = f"{prefix}." if prefix else ""
    layers = {f"{inside}{place}": layer for place, layer in _layers(root, weights).items()}
    ranks = [_sum_of_ranks(layer, weights) for layer in layers.values()]
    rank = max(ranks) if rank is None else positive_int("rank", rank)
    factors = {place: _factors(layer, weights, how, density, rank) for place, layer in layers.items()}
    exactly = re.compile("|".join(map(re.escape, layers)))  # a name by itself also means all layers whose names end so
    # With alpha = rank the scale is 1: the factors hold all of the weights.
    add_adapter_(model, require_peft().LoraConfig(r=rank, lora_alpha=rank), exactly, name=name)
    with torch.no_grad():
        for place, (a, b) in factors.items():
            layer: Any = model.get_submodule(place)
            # A layer with a smaller sum of ranks is filled up with zeros.
            layer.lora_A[name].weight.zero_()[: len(a)] = a
            layer.lora_B[name].weight.zero_()[:, : len(a)] = b
    use_adapter_(model, name)
    return rank


def remove_adapter_(model: nn.Module, name: str) -> None:
    """Take one of several adapters out of the model, in place; the first of the others is used if that one was.

    Raises:
        ValueError: there is none of that name, or no other, or one is merged.

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
        why = "it is the last one"
        raise ValueError(explain(f"remove_adapter_(model, '{name}')", why, "Use unload_adapters_(model, merge=False)"))
    # Before it is deleted: PEFT would choose for each layer by itself, the first in the alphabet.
    if any(name in layer.active_adapters for layer in switches(model)):
        use_adapter_(model, next(one for one in there if one != name))
    for layer in switches(model):
        layer.delete_adapter(name)
    for module in model.modules():
        (vars(module).get("peft_config") or {}).pop(name, None)


def _layers(root: nn.Module, weights: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, layer in root.named_modules():
        if is_a(layer, "BaseTunerLayer") and set(weights) & set(layer.r):  # type: ignore[arg-type]
            found[place] = layer
    # PEFT has those of embeddings in ``lora_embedding_A``.
    embeddings = [place for place, layer in found.items() if not set(weights) & set(layer.lora_A)]
    if embeddings:
        why = "adapters on embeddings are not added up here"
        raise ValueError(explain(f"combining in '{embeddings[0]}'", why, "Use PEFT's add_weighted_adapter"))
    return found


def _refuse_unfit(name: str, config: Any) -> None:
    beside = {key: getattr(config, key, None) for key in ("modules_to_save", "trainable_token_indices", "use_dora")}
    beside["target_parameters"] = getattr(config, "target_parameters", None)
    told = [f"{key}={value}" for key, value in beside.items() if value]
    if config.peft_type.value != "LORA":
        told = [config.peft_type.value]
    if getattr(config, "bias", "none") != "none":
        told.append(f"bias='{config.bias}'")
    if told:
        why = f"it has {', '.join(told)}, and only ΔW of plain LoRA can be added up"
        raise ValueError(explain(f"combining adapter '{name}'", why, "Leave it out"))


def _factors(layer: Any, weights: Mapping[str, float], how: str, density: float, rank: int) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] with r ≤ ``rank``, whose product is the combined change of the layer."""
    here = [one for one in weights if one in layer.lora_A]
    with torch.no_grad():
        if how == "sum" and _sum_of_ranks(layer, weights) <= rank:
            # Σ sᵢ·Bᵢ·Aᵢ is [B₁ B₂ …] · [s₁A₁; s₂A₂; …]. The scale is all in A: a negative one has no root.
            scales = [weights[one] * layer.scaling[one] for one in here]
            pairs = zip(here, scales, strict=True)
            a = torch.cat([layer.lora_A[one].weight * scale for one, scale in pairs])
            return a, torch.cat([layer.lora_B[one].weight for one in here], dim=1)
        changes = [_change(layer, one) for one in here]
        shares = torch.tensor([float(weights[one]) for one in here], device=changes[0].device)
        if how == "ties":
            from peft.utils.merge_utils import ties

            whole = ties(changes, shares, density)
        else:
            whole = torch.einsum("n, n o i -> o i", shares, torch.stack(changes))
        # Cut to ``rank`` singular values it is the nearest matrix of that rank.
        u, values, v = torch.linalg.svd(whole, full_matrices=False)
        return v[:rank], u[:, :rank] * values[:rank]


def _sum_of_ranks(layer: Any, names: Iterable[str]) -> int:
    return sum(layer.r.get(one, 0) for one in names)


def _change(layer: Any, name: str) -> Tensor:
    """ΔW [out, in] of one adapter, in float32."""
    a, b = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
    return layer.scaling[name] * (b @ a)
