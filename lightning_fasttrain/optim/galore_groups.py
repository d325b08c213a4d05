"""Parameter groups for GaLore, and the size of their state."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.parameters import parameters_of_kinds
from lightning_fasttrain.optim.galore import check_settings

STEP_BYTES = 4  # one float32 per parameter


@check_arguments
def galore_groups(
    model: nn.Module,
    rank: int = 128,
    *,
    update_every: int = 200,
    scale: float = 0.25,
    blocks: Blocks | None = None,
    subspace: str = "exact",
    frozen: bool = True,
) -> list[dict[str, Any]]:
    """Return two groups for GaLore: the matrices of the model's blocks, which are projected, and all other parameters.

    They are for :class:`~lightning_fasttrain.optim.GaLoreAdamW`. As in the paper, embeddings, the head, norms and
    biases are not projected. Neither are matrices for which ``rank`` is too high to save memory, which is logged. A
    parameter that several modules share is listed once.

    Args:
        model: any module, also one on the meta device, for :func:`galore_state_bytes`.
        rank: rank of the subspaces.
        update_every: number of steps between refreshes of the subspaces.
        scale: factor of the projected updates.
        blocks: modules whose matrices are projected: a class, a class name, a pattern of names, or several
            (:func:`~lightning_fasttrain.model.find_blocks`); by default the repeated blocks of the model.
        subspace: ``"exact"`` or ``"sketched"``, see :class:`~lightning_fasttrain.optim.GaLoreAdamW`.
        frozen: also list parameters that are frozen now. They need no memory until they are unfrozen.

    Returns:
        The groups ``"galore"`` and, if other parameters exist, ``"plain"``.

    Raises:
        ValueError: there is nothing to project, or a setting is out of range.

    Example:
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256) for _ in range(2)])
        >>> [(group["name"], len(group["params"])) for group in galore_groups(net, rank=8)]
        [('galore', 8), ('plain', 16)]

    Source:
        See :class:`~lightning_fasttrain.optim.GaLoreAdamW`.
    """
    settings = {"rank": rank, "update_every": update_every, "scale": scale, "subspace": subspace}
    check_settings(settings)
    matrices = block_matrices(model, blocks)
    projected, rest, too_small = [], [], {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not (frozen or parameter.requires_grad):
            continue
        is_matrix = name in matrices
        # AdamW keeps 2·m·n elements for it.
        saves = is_matrix and rank < min(parameter.shape) and _numbers(parameter, rank) < 2 * parameter.numel()
        (projected if saves else rest).append(parameter)
        if is_matrix and not saves:
            too_small[name] = tuple(parameter.shape)
    examples = ", ".join(f"{name} {shape[0]} × {shape[1]}" for name, shape in list(too_small.items())[:3])
    if not projected:
        why = f"none of its {len(find_blocks(model, blocks))} blocks has a matrix to project"
        way_out = "Use blocks= to name the modules whose matrices are to be projected"
        if too_small:
            why = f"it would save no memory for any of its {len(too_small)} matrices in blocks ({examples})"
            way_out = "Use a smaller rank"
        raise ValueError(explain(f"galore_groups(rank={rank}) on {type(model).__name__}", why, way_out))
    if too_small:
        say("galore_groups: rank=%s saves nothing for %s of the matrices: %s", rank, len(too_small), examples)
    groups: list[dict[str, Any]] = [{"params": projected, "name": "galore", **settings}]
    if rest:
        groups.append({"params": rest, "name": "plain"})
    return groups


def block_matrices(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Parameter]:
    """Return the matrices of a model's blocks, by name, without embeddings, the head and tensors listed elsewhere
    first.

    Args:
        model: any module.
        blocks: as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        ValueError: the model has no blocks.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 8), *[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
        >>> list(block_matrices(net))[:2]
        ['1.self_attn.in_proj_weight', '1.self_attn.out_proj.weight']
    """
    inside = tuple(f"{name}.".removeprefix(".") for name in find_blocks(model, blocks))
    embedded = parameters_of_kinds(model, nn.Embedding, nn.EmbeddingBag)
    matrices = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and parameter not in embedded and name.startswith(inside):
            matrices[name] = parameter
    return matrices


@check_arguments
def galore_state_bytes(groups: Iterable[dict[str, Any]]) -> int:
    """Return the bytes of state that GaLore will have for these groups, once each parameter has had a gradient.

    The result is exact for :class:`~lightning_fasttrain.optim.GaLoreAdamW`. A group without a rank counts like AdamW's,
    so that ``galore_state_bytes([{"params": parameters}])`` is AdamW's state. Frozen parameters count as zero. A step
    temporarily needs a little more: copies of the projected gradients and of their updates, and in a refreshing step
    one gradient in float32 with its subspace's equations.

    Args:
        groups: the groups of :func:`galore_groups`, or ``optimizer.param_groups``; meta tensors are supported.

    Returns:
        The number of bytes, including four for each parameter's step.

    Example:
        >>> import torch
        >>> matrix = nn.Parameter(torch.zeros(64, 256))
        >>> galore_state_bytes([{"params": [matrix]}])  # 4 · 2·64·256 + 4
        131076
        >>> galore_state_bytes([{"params": [matrix], "rank": 8}])  # 4 · 8·(64 + 2·256) + 4
        18436

    Source:
        Table 1 of the paper, see :class:`~lightning_fasttrain.optim.GaLoreAdamW`.
    """
    nbytes = 0
    for group in groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                nbytes += parameter.element_size() * _numbers(parameter, group.get("rank")) + STEP_BYTES
    return nbytes


def _numbers(parameter: Tensor, rank: int | None) -> int:
    if rank is None:
        return 2 * parameter.numel()
    return rank * (min(parameter.shape) + 2 * max(parameter.shape))  # P [m, r] and two moments [r, n]
