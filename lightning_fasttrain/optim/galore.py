"""GaLore: project gradients to low rank before AdamW, and divide the parameters into its groups."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.checks import check_arguments, one_of, positive_int
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.parameters import gradients_of, parameters_of_kinds
from lightning_fasttrain.core.state.values import to_float64
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer, refuse_out_of_range, with_gradient

SUBSPACES = ("exact", "sketched")


@check_arguments
class GaLoreAdamW(ClosureOptimizer):
    r"""AdamW that keeps the two moments of a matrix in a subspace of ``rank`` dimensions; all weights are trained.

    For a matrix with m ≤ n (a tall one is transposed) and its gradient G, with P the m × r leading left singular
    vectors of a gradient that is at most ``update_every`` steps old:

        R = PᵀG (r × n),   U = Adam's update of R,   W ← (1 − lr·weight_decay) W + scale · P U

    So the state has r·(m + 2n) elements, where AdamW has 2·m·n. When P is refreshed the moments stay unchanged, in
    coordinates of the old P, as in the reference; they decay within some steps. Each column of the new P gets the sign
    with which it correlates with the previous one, since the sign of a singular vector is arbitrary.

    Groups with a ``rank`` are projected, and all others are updated as by ``torch.optim.AdamW``, bit for bit;
    :func:`~lightning_fasttrain.optim.galore_groups` creates both. Otherwise it is a plain optimizer for schedulers,
    clipping, accumulation, loss scalers and :func:`~lightning_fasttrain.optim.optimize_in_backward_`. Its state
    consists of tensors only, in the parameters' dtype, of a size known beforehand
    (:func:`~lightning_fasttrain.optim.galore_state_bytes`), and resumes exactly. Under DDP each process computes the
    same P, from the common gradient.

    Args:
        params: groups. Those to be projected hold matrices only, and have ``rank``, and optionally ``update_every``
            (default 200, in steps), ``scale`` (default 0.25) and ``subspace`` (``"exact"``, or ``"sketched"``: a random
            sketch of the gradient finds nearly the same P, much faster if the rank is far below the matrix's size).
        lr: learning rate of all groups without their own.
        betas: decay of the two moments per step.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        foreach: update many tensors at once; None: on CUDA only. False needs the least memory during the step.

    Raises:
        ValueError: no group has a rank; a group with one contains anything but real, unsharded matrices, a rank above
            the smaller side, or a setting out of range. On loading: a state of another optimizer.
        RuntimeError: in ``step``: a gradient is sparse, is no longer a matrix, or has no singular vectors.

    Example:
        >>> from torch import nn
        >>> from lightning_fasttrain.optim import galore_groups
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256) for _ in range(2)])
        >>> optimizer = GaLoreAdamW(galore_groups(net, rank=8), lr=1e-3)
        >>> net(torch.ones(3, 1, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> {name: tuple(value.shape) for name, value in optimizer.state[net[0].linear1.weight].items()}
        {'step': (), 'projection': (64, 8), 'exp_avg': (256, 8), 'exp_avg_sq': (256, 8)}

    Source:
        Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
        https://arxiv.org/abs/2403.03507, and its reference ``galore_torch``. Here Adam is PyTorch's own (the reference
        adds ``eps`` before the bias correction, and decays weights after the update). The singular vectors are the
        eigenvectors of G·Gᵀ, found in float64. The sketch is that of Halko et al. 2011, https://arxiv.org/abs/0909.4061.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        foreach: bool | None = None,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, {**adam, "rank": None, "update_every": 200, "scale": 0.25, "subspace": "exact"})
        if all(group["rank"] is None for group in self.param_groups):
            what = f"GaLoreAdamW with {len(self.param_groups)} groups of which none has a rank"
            way_out = "Use GaLoreAdamW(galore_groups(model, rank=128)), or torch.optim.AdamW"
            raise ValueError(explain(what, "no gradient would be projected, as in plain AdamW", way_out))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            # A rejected group must not stay, as the optimizer may be in use.
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any("rank" not in group for group in state_dict["param_groups"]):
            why = "it was saved by another optimizer, whose moments are not in a subspace"
            way_out = "Load the weights alone, and start with a fresh optimizer"
            raise ValueError(explain("a state without ranks for GaLoreAdamW", why, way_out))
        super().load_state_dict(state_dict)

    def update_parameters(self) -> None:
        for group in self.param_groups:
            parameters = with_gradient(group["params"])
            if not parameters:
                continue
            _refuse_gradients(parameters, group)
            parts = [parameters]
            # One by one, so that only one projected gradient is in memory.
            if not _in_lists(parameters, group):
                parts = [[parameter] for parameter in parameters]
            # A step may be called inside autocast, which would round the projections' products to its dtype.
            with torch.autocast(parameters[0].device.type, enabled=False):
                update = self._step_plain if group["rank"] is None else self._step_projected
                for part in parts:
                    update(part, group)

    def _step_plain(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        self._adam(parameters, parameters, gradients_of(parameters), group, group["weight_decay"])

    def _step_projected(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        small = []
        for parameter, gradient in zip(parameters, gradients_of(parameters), strict=True):
            state = self.state[parameter]
            # The count is on the CPU, so reading it does not synchronize the device.
            step = int(state.get("step", 0))
            if step % group["update_every"] == 0:
                state.setdefault("step", _make_zero())
                found = _leading_subspace(gradient, group["rank"], group["subspace"], step)
                if step:
                    found = _with_signs_of(state["projection"], found)
                state["projection"] = found
            small.append(_project(gradient, state["projection"]))
        # Adam on zero parameters leaves exactly its update in them.
        updates = list(map(torch.zeros_like, small))
        self._adam(parameters, updates, small, group, weight_decay=0.0)
        for parameter, update in zip(parameters, updates, strict=True):
            if group["weight_decay"] != 0:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            projection = self.state[parameter]["projection"]
            factors = (update, projection.T) if _is_tall(parameter) else (projection, update)
            parameter.addmm_(*factors, alpha=group["scale"])

    def _adam(
        self,
        parameters: list[Tensor],
        updated: list[Tensor],
        gradients: list[Tensor],
        group: dict[str, Any],
        weight_decay: float,
    ) -> None:
        """Run PyTorch's AdamW on ``updated``, with the state of ``parameters``."""
        means, squares, steps = [], [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "exp_avg" not in state:
                state.setdefault("step", _make_zero())
                state["exp_avg"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
        adamw(
            updated,
            gradients,
            means,
            squares,
            [],
            steps,
            foreach=_in_lists(parameters, group),
            fused=False,
            has_complex=any(map(torch.is_complex, gradients)),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )


def _make_zero() -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def _in_lists(parameters: list[Tensor], group: dict[str, Any]) -> bool:
    if group["foreach"] is None:
        return parameters[0].is_cuda
    return group["foreach"]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] >= matrix.shape[1]


def _project(gradient: Tensor, projection: Tensor) -> Tensor:
    if _is_tall(gradient):
        return gradient @ projection
    return projection.T @ gradient


def _leading_subspace(gradient: Tensor, rank: int, how: str, seed: int) -> Tensor:
    """Return orthonormal columns that span most of ``gradient`` along its shorter side, the strongest first."""
    wide = gradient.T if _is_tall(gradient) else gradient
    # Oversampled by 8, as Halko et al. advise 5 to 10.
    sketched = how == "sketched" and rank + 8 < wide.shape[0]
    # In float64, since the product below squares the ratios of singular values, beyond the precision of float32.
    wide = wide.to(torch.promote_types(wide.dtype, torch.float32)) if sketched else to_float64(wide)
    largest = torch.linalg.vector_norm(wide, float("inf"))
    # Otherwise squares of small values vanish.
    wide = wide / largest.clamp_min(torch.finfo(wide.dtype).tiny)
    try:
        basis = None
        if sketched:
            # The seed makes it identical on all processes, and after resuming.
            generator = torch.Generator(wide.device).manual_seed(seed)
            noise = torch.randn(wide.shape[1], rank + 8, generator=generator, device=wide.device, dtype=wide.dtype)
            basis = torch.linalg.qr(wide @ noise).Q
            # Two power iterations, which amplify the leading vectors where singular values decay slowly.
            for _ in range(2):
                basis = torch.linalg.qr(wide @ (wide.T @ basis)).Q
            # Small enough for float64, with [rank + 8, n] values.
            wide = to_float64(basis.T @ wide)
        vectors = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:].flip(1)
    except torch.linalg.LinAlgError as error:
        what = f"the gradient of a parameter of shape {tuple(gradient.shape)} has no singular vectors"
        why = "it is not finite, or badly conditioned"
        raise RuntimeError(explain(what, why, "Check the loss for NaN, and clip the gradients")) from error
    if basis is not None:
        vectors = basis @ vectors.to(basis)
    return vectors.to(gradient).contiguous()


def _with_signs_of(previous: Tensor, found: Tensor) -> Tensor:
    """Align the arbitrary signs of singular vectors with the previous ones, as the first moment keeps its sign."""
    agree = (previous * found).sum(0) >= 0
    return torch.where(agree, found, -found)


def check_settings(group: dict[str, Any]) -> None:
    """Refuse settings of a projected group that are out of range; raises ``ValueError`` or ``TypeError``."""
    positive_int("rank", group["rank"])
    positive_int("update_every", group["update_every"])
    one_of("subspace", group["subspace"], SUBSPACES)
    if not group["scale"] > 0:
        raise ValueError(explain(f"scale={group['scale']}", "projected weights would not be updated", "Try 0.25"))


def _check_group(group: dict[str, Any]) -> None:
    refuse_out_of_range(group)
    if group["rank"] is None:
        return
    check_settings(group)
    unfit = (
        (lambda p: p.ndim != 2, "only a matrix has a low-rank subspace", "Put it in a group without rank"),
        (torch.is_complex, "only real matrices are supported", "Put it in a group without rank"),
        (
            is_traceable_wrapper_subclass,
            "it is quantized or sharded, so its singular vectors cannot be computed locally",
            "Use torch.optim.AdamW with FSDP or tensor parallelism, or train with DDP",
        ),
        (
            lambda p: group["rank"] > min(p.shape),
            f"rank={group['rank']} is above its smaller side",
            "Use a smaller rank, or galore_groups(model, rank), which excludes such matrices",
        ),
    )
    names = group.get("param_names", range(len(group["params"])))
    for name, parameter in zip(names, group["params"], strict=True):
        what = f"parameter {name} of a group with a rank"
        for is_unfit, why, way_out in unfit:
            if is_unfit(parameter):
                described = f"{what}, a {type(parameter).__name__} of shape {tuple(parameter.shape)}"
                raise ValueError(explain(described, why, way_out))


def _refuse_gradients(parameters: list[Tensor], group: Mapping[str, object]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            why = "AdamW's moments are dense"
            way_out = "Use nn.Embedding(sparse=False), or torch.optim.SparseAdam for this parameter"
            raise RuntimeError(explain(f"a sparse gradient of shape {tuple(parameter.shape)}", why, way_out))
        if group["rank"] is not None and parameter.ndim != 2:
            what = f"a matrix to be projected now has the shape {tuple(parameter.shape)}"
            why = "the strategy has flattened it, so it has no rows and columns"
            way_out = "Use a strategy that keeps parameters unsharded, such as DDP, or torch.optim.AdamW"
            raise RuntimeError(explain(what, why, way_out))


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
