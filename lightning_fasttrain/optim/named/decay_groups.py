"""Parameter groups with and without weight decay: norms, biases and embeddings are not decayed."""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of
from lightning_fasttrain.optim.parameter_groups import never_decayed


def decay_groups(
    model: nn.Module,
    weight_decay: float = 0.01,
    *,
    decayed: str | Iterable[str] = (),
    spared: str | Iterable[str] = (),
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """Return two groups for any optimizer: parameters with weight decay, and those without.

    Without weight decay are norms, biases and other one-dimensional parameters (gains of weight norms and attention's
    ``bias_k``, regardless of axes of size one), embeddings (also if the head shares them), bare tensors whose name
    marks them as embeddings (``pos_embed``, ``cls_token``, ``latents``) or logarithms (Mamba's ``A_log``), and those
    that the model itself exempts, by ``_no_weight_decay`` on a parameter or a method ``no_weight_decay()`` that lists
    names. One log line names them. A parameter that several modules share is listed once; quantized weights are
    excluded.

    Args:
        model: any module.
        weight_decay: weight decay of the first group.
        decayed: names of parameters that are decayed in any case, or patterns of names in which ``*`` stands for one
            name and ``**`` for any number (``"**.embed.weight"``).
        spared: the same for parameters that are not decayed; it takes precedence over ``decayed``.
        frozen: also list parameters that are frozen now, for a run that unfreezes them later.

    Returns:
        The groups ``"decay"`` and ``"no_decay"``, without empty ones.

    Raises:
        ValueError: a negative weight decay, a pattern that matches no parameter, or no trainable parameters.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in decay_groups(net, 0.1)]
        [('decay', 1, 0.1), ('no_decay', 4, 0.0)]

    Source:
        Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, for the decay. Norms and biases are spared as in
        BERT's training, and embeddings as in :func:`~lightning_fasttrain.optim.layer_decay_groups`.
    """
    if not weight_decay >= 0:
        raise ValueError(explain(f"{weight_decay=}", "weights would grow", "Use 0 for none"))
    names = {name: p for name, p in model.named_parameters() if p.is_floating_point() and (frozen or p.requires_grad)}
    if not names:
        why = "all its parameters are frozen"
        raise ValueError(explain(f"decay_groups of {type(model).__name__}", why, "Unfreeze some, or use frozen=True"))
    always, never = (_match_names(names, wanted, how) for wanted, how in ((decayed, "decayed"), (spared, "spared")))
    undecayed = never_decayed(model)
    members: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for name, parameter in names.items():
        # Names given by the user take precedence over the search.
        is_spared = name in never or (name not in always and parameter in undecayed)
        members["no_decay" if is_spared else "decay"].append(name)
    if weight_decay > 0:
        matrices = sorted(name for name in members["no_decay"] if names[name].ndim > 1)
        spoken = f", including {list_some(matrices, 6)}" if matrices else ""
        count = number_of(len(members["decay"]), "parameter")
        note_once(f"decay_groups: weight decay {weight_decay} on {count}, none on {len(members['no_decay'])}{spoken}")
    groups: list[dict[str, Any]] = []
    for label, rate in (("decay", weight_decay), ("no_decay", 0.0)):
        if members[label]:
            groups.append({"params": [names[name] for name in members[label]], "name": label, "weight_decay": rate})
    return groups


def _match_names(names: Iterable[str], wanted: str | Iterable[str], argument: str) -> set[str]:
    found: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        expression = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
        matches = {name for name in names if re.fullmatch(expression, name)}
        if not matches:
            way_out = f"The parameters are {list_some(list(names), 6)}"
            raise ValueError(explain(f"{argument}={pattern!r}", "no trainable parameter has this name", way_out))
        found |= matches
    return found
