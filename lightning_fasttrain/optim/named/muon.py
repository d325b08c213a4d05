"""Muon for the matrices of blocks and AdamW for all other parameters, in one optimizer."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import AdamW, Muon
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import local_part
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer

# Elements of a batch: 128 MiB in bfloat16, of which an iteration takes a few copies.
_LARGEST_BATCH = 2**26
_SHARDS = (Shard, _StridedShard)


class NewtonSchulz(NamedTuple):
    """Settings of the iteration, as those of ``torch.optim.Muon``."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float

    def __call__(self, matrices: Tensor) -> Tensor:
        """Orthogonalize matrices [count, rows, columns] in bfloat16, each as ``torch.optim.Muon`` does."""
        a, b, c = self.coefficients
        tall = matrices.size(1) > matrices.size(2)
        x = matrices.bfloat16()
        if tall:
            x = x.mT
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        if tall:
            return x.mT
        return x


def orthogonalize(matrices: Sequence[Tensor], settings: Sequence[NewtonSchulz]) -> list[Tensor]:
    """Return the matrices orthogonalized in bfloat16; those of one shape and setting in batches.

    Example:
        >>> usual = NewtonSchulz((3.4445, -4.775, 2.0315), 5, 1e-7)
        >>> (result,) = orthogonalize([torch.diag(torch.tensor([1.0, 4.0]))], [usual])
        >>> [round(value, 1) for value in result.diagonal().tolist()]
        [0.7, 0.7]
    """
    results: list[Tensor] = list(matrices)
    equal: defaultdict[tuple[torch.Size, NewtonSchulz], list[int]] = defaultdict(list)
    for number, (matrix, how) in enumerate(zip(matrices, settings, strict=True)):
        equal[matrix.shape, how].append(number)
    for (shape, how), numbers in equal.items():
        count = max(1, _LARGEST_BATCH // max(1, shape.numel()))
        for first in range(0, len(numbers), count):
            batch = numbers[first : first + count]
            done = how(torch.stack(_at(batch, matrices)))
            for number, result in zip(batch, done.unbind(), strict=True):
                results[number] = result
    return results


def assign_owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Return for each matrix the rank that orthogonalizes it, so that ranks have about the same number of products.

    Example:
        >>> assign_owners([torch.Size([8, 8]), torch.Size([4, 4]), torch.Size([4, 4])], 2)
        [0, 1, 1]
    """
    loads = [0] * ranks
    owners = [0] * len(shapes)
    costs = [min(shape) * shape.numel() for shape in shapes]
    # The largest first, each to the rank with the least so far.
    for number in sorted(range(len(shapes)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class Layout:
    """Layout of matrices over ranks: shards along one axis, each of them on several replicas, or split once more.

    Attributes:
        shards, replicas: the ranks that hold the other shards, and those that hold the same one; None for one rank.
        axis: axis of the matrices that is sharded.
        is_split: whether the ranks of ``replicas`` hold equal parts of a shard along the other axis, as in a tensor
            group. The rows or columns of several parts may take turns: to orthogonalize them in another order gives
            the same matrix in that order.
    """

    shards: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    axis: int = 0
    is_split: bool = False

    @classmethod
    def of(cls, matrix: Tensor, replicas: dist.ProcessGroup | None) -> "Layout | None":
        """Return the layout of a matrix; None for others than shards, replicas and the parts of a tensor group.

        Args:
            matrix: a DTensor, or a tensor that all ranks of ``replicas`` hold.
            replicas: None if a plain tensor is on this rank alone.
        """
        if not isinstance(matrix, DTensor):
            return cls(replicas=replicas)
        mesh = matrix.device_mesh
        found = [(mesh.get_group(number), placement) for number, placement in enumerate(matrix.placements)]
        shards = [(group, placement.dim) for group, placement in found if isinstance(placement, _SHARDS)]
        copies = [group for group, placement in found if isinstance(placement, Replicate)]
        if len(shards) + len(copies) < len(found) or len(copies) > 1:
            return None
        if len(shards) == 2 and shards[0][1] != shards[1][1] and matrix.shape[shards[1][1]] % shards[1][0].size() == 0:
            # Replicas of a tensor group, as of hybrid sharding, each do the same.
            return cls(shards[0][0], shards[1][0], shards[0][1], is_split=True)
        if len(shards) > 1 or any(isinstance(placement, _StridedShard) for placement in matrix.placements):
            return None
        group, axis = next(iter(shards), (None, 0))
        return cls(group, next(iter(copies), None), axis)

    def part_of(self, shape: torch.Size, rank: int) -> torch.Size:
        """Return the shape of the shard that a rank of ``shards`` holds of a matrix of this shape."""
        rows = -(-shape[self.axis] // _size(self.shards))  # as torch chunks
        start = min(rank * rows, shape[self.axis])
        sizes = list(shape)
        sizes[self.axis] = min(start + rows, shape[self.axis]) - start
        return torch.Size(sizes)


def orthogonalize_together(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], settings: Sequence[NewtonSchulz], layout: Layout
) -> list[Tensor]:
    """Orthogonalize matrices of which each rank holds a part, each of them on one rank; a collective.

    A rank gathers the parts of its own matrices in bfloat16, and sends parts of the results: two exchanges among the
    shards and one among the replicas, whatever the number of matrices. A tensor group, whose ranks gather each other's
    parts before, has one more.

    Args:
        parts: this rank's part of each matrix.
        shapes: shapes of the unsharded matrices.
        settings: of each matrix.
        layout: of all matrices.

    Returns:
        This rank's part of each result, in bfloat16.
    """
    shards, here, device = _size(layout.shards), _rank(layout.shards), parts[0].device
    owners = assign_owners(shapes, shards * _size(layout.replicas))
    # A replica has all parts of the matrices that its ranks own.
    of_replica: list[list[int]] = _empty_lists(_size(layout.replicas))
    of_rank: list[list[int]] = _empty_lists(shards)
    for number, owner in enumerate(owners):
        of_replica[owner // shards].append(number)
        if owner // shards == _rank(layout.replicas):
            of_rank[owner % shards].append(number)

    def parts_on(rank: int, numbers: list[int]) -> list[torch.Size]:
        return [layout.part_of(shapes[number], rank) for number in numbers]

    parts_here = functools.partial(parts_on, here)
    rounded = list(map(Tensor.bfloat16, parts))
    if layout.is_split:
        everyone = _share(rounded, [[part.shape for part in parts]] * _size(layout.replicas), layout.replicas, device)
        rounded = [torch.cat(pieces, 1 - layout.axis) for pieces in zip(*everyone, strict=True)]
    outgoing = [_at(numbers, rounded) for numbers in of_rank]
    expected = [parts_on(rank, of_rank[here]) for rank in range(shards)]
    gathered = _exchange(outgoing, expected, layout.shards, device)
    matrices = [torch.cat(pieces, layout.axis) for pieces in zip(*gathered, strict=True)]
    done = orthogonalize(matrices, _at(of_rank[here], settings))
    # Back the same way: to each rank its parts of these matrices.
    pieces: list[list[Tensor]] = _empty_lists(shards)
    for matrix, places in zip(done, zip(*expected, strict=True), strict=True):
        lengths = [place[layout.axis] for place in places]
        for rank, piece in enumerate(matrix.split(lengths, layout.axis)):
            pieces[rank].append(piece)
    returned = _exchange(pieces, list(map(parts_here, of_rank)), layout.shards, device)
    mine = dict(zip(itertools.chain(*of_rank), itertools.chain(*returned), strict=True))
    sent = of_replica[_rank(layout.replicas)]
    everyone = _share(_at(sent, mine), list(map(parts_here, of_replica)), layout.replicas, device)
    mine = dict(zip(itertools.chain(*of_replica), itertools.chain(*everyone), strict=True))
    results = _at(range(len(parts)), mine)
    if layout.is_split:
        return [whole.chunk(_size(layout.replicas), 1 - layout.axis)[_rank(layout.replicas)] for whole in results]
    return results


def _at(numbers: Iterable[int], values: Any) -> list[Any]:
    return [values[number] for number in numbers]


def _empty_lists(count: int) -> list[list[Any]]:
    return [[] for _ in range(count)]


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[torch.Size]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[Tensor]]:
    """Send the list of tensors number i to rank i; return those of each rank, whose shapes are known."""
    if group is None or _size(group) == 1:
        return sent
    counts = list(map(_count, shapes))
    outgoing = [_flatten(tensors, device) for tensors in sent]
    buffer = torch.cat(outgoing)
    received = buffer.new_empty(sum(counts))
    # As bytes, which every backend exchanges.
    sizes = [2 * count for count in counts]
    sent_sizes = [tensor.nbytes for tensor in outgoing]
    dist.all_to_all_single(received.view(torch.uint8), buffer.view(torch.uint8), sizes, sent_sizes, group=group)
    return list(map(_unflatten, received.split(counts), shapes))


def _share(
    mine: list[Tensor], shapes: list[list[torch.Size]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[Tensor]]:
    """Return the lists of tensors of all ranks, whose shapes are known."""
    if group is None or _size(group) == 1:
        return [mine]
    counts = list(map(_count, shapes))
    flat = _flatten(mine, device)
    # To one size, as the collective needs it.
    padded = torch.nn.functional.pad(flat, (0, max(counts) - flat.numel()))
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded, group=group)
    return [_unflatten(held[:count], some) for held, count, some in zip(everyone, counts, shapes, strict=True)]


def _count(shapes: Iterable[torch.Size]) -> int:
    return sum(map(torch.Size.numel, shapes))


def _flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.bfloat16, device=device), *map(torch.flatten, tensors)])


def _unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = flat.split(list(map(torch.Size.numel, shapes)))
    return list(map(Tensor.view, pieces, shapes))


def _size(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 1
    return dist.get_world_size(group)


def _rank(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 0
    return dist.get_rank(group)


def adjust_learning_rate(rate: float, how: str | None, shape: torch.Size) -> float:
    """Return the learning rate of a matrix, as ``torch.optim.Muon`` adjusts it to the shape.

    Example:
        >>> adjust_learning_rate(0.5, "match_rms_adamw", torch.Size([25, 4]))
        0.5
    """
    rows, columns = shape
    if how == "match_rms_adamw":
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1, rows / columns))


@check_arguments
class MuonAdamW(ClosureOptimizer):
    """PyTorch's Muon over groups that have ``"muon": True``, and its AdamW over the others.

    Each of the two computes the same updates as on its own; on the CPU bit for bit, though matrices of one shape are
    orthogonalized in one batch. Together they are one ``Optimizer`` with one list of groups and one state, so that
    schedulers, clipping, loss scalers, accumulation and checkpoints need no changes. Muon's updates are scaled to the
    size of AdamW's, so that one learning rate and one weight decay serve both.

    Under FSDP2 the ranks divide the matrices among themselves: each gathers its own in bfloat16, which rounds nothing
    that Muon would not round, orthogonalizes them, and sends the shards of the updates back, in two exchanges per step.
    Momentum stays sharded. Replicas, also those of hybrid sharding, and tensor groups divide the work further; beside
    a tensor group, the replicas of hybrid sharding do not.

    Args:
        params: groups. Those with ``"muon": True`` hold matrices only.
        lr: learning rate of all groups without their own.
        weight_decay: decoupled, in both optimizers.
        momentum: Muon's momentum.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_steps: number of Muon's Newton-Schulz iterations.
        adjust_lr_fn: ``"match_rms_adamw"``, or ``"original"`` for Muon's own size of updates, which needs a separate
            learning rate: give its group an ``"lr"``.
        betas: AdamW's betas.
        eps: AdamW's eps.
        fused: AdamW's fused.
        divide: whether all ranks hold the same parameters and gradients, as under DDP, and each orthogonalizes its
            share of the matrices, in one exchange per step. All ranks must take each step.
            :func:`build_optimizer` sets it for a module that a Trainer runs under DDP.

    Raises:
        ValueError: no group is Muon's, or such a group contains anything but matrices.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> groups = [{"params": [net[0].weight], "muon": True}, {"params": [net[0].bias, *net[1].parameters()]}]
        >>> optimizer = MuonAdamW(groups, lr=1e-3)
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> [list(state) for state in optimizer.state.values()][:2]
        [['momentum_buffer'], ['step', 'exp_avg', 'exp_avg_sq']]

    Source:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/, and for the size of the updates Liu et al. 2025, "Muon
        is Scalable for LLM Training", https://arxiv.org/abs/2502.16982; computed by ``torch.optim``.
    """

    copied: ClassVar[tuple[str, ...]] = ("_muon", "_adamw", "divide")
    divide: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: NonNegativeFloat = 1e-3,
        weight_decay: NonNegativeFloat = 0.01,
        *,
        momentum: NonNegativeFloat = 0.95,
        nesterov: bool = True,
        ns_steps: PositiveInt = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-8,
        fused: bool | None = None,
        divide: bool = False,
    ) -> None:
        self.divide = divide
        # Both need a parameter when they are created; their groups are set before each step.
        spare = [nn.Parameter(torch.zeros(1, 1))]
        self._muon = Muon(spare, lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        self._adamw = AdamW(spare, lr, betas, eps, weight_decay, fused=fused)
        super().__init__(params, {**self._muon.defaults, **self._adamw.defaults, "muon": False})
        if not any(group["muon"] for group in self.param_groups):
            way_out = "Use build_optimizer(model, 'muon'), or torch.optim.AdamW"
            raise ValueError(explain("MuonAdamW without a group for Muon", "this would be plain AdamW", way_out))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("muon"):
            # Muon and AdamW both have an eps, with different defaults.
            param_group.setdefault("eps", self._muon.defaults["eps"])
            _refuse_others_than_matrices(param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = [group.get("muon") for group in state_dict["param_groups"]]
        if saved != [group["muon"] for group in self.param_groups]:
            why = "it was saved by another optimizer, or with other matrices in Muon's groups"
            way_out = "Load the weights alone, and start with a fresh optimizer"
            raise ValueError(explain("a state for MuonAdamW", why, way_out))
        super().load_state_dict(state_dict)

    def update_parameters(self) -> None:
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        replicas = dist.group.WORLD if self.divide and rank_count() > 1 else None
        together: defaultdict[Layout, list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
        for group in self.param_groups:
            left = []
            for parameter in group["params"]:
                layout = Layout.of(parameter, replicas) if group["muon"] else None
                if layout is None:
                    left.append(parameter)
                elif parameter.grad is not None:
                    together[layout].append((parameter, group))
            groups[group["muon"]].append({**group, "params": left})
        for layout, matrices in together.items():
            self._update_together(layout, matrices)
        for optimizer, is_muon in ((self._muon, True), (self._adamw, False)):
            optimizer.param_groups, optimizer.state = groups[is_muon], self.state
            optimizer.step()
            # Otherwise they would keep a state that loading has replaced.
            optimizer.param_groups, optimizer.state = [], defaultdict(dict)

    def _update_together(self, layout: Layout, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update matrices of one layout over the ranks by Muon, as ``torch.optim.Muon`` does."""
        directions, shapes, settings = [], [], []
        for parameter, group in matrices:
            assert parameter.grad is not None
            _refuse_unless_matrix(parameter)  # an engine may have flattened it
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
            gradient, buffer = local_part(parameter.grad), local_part(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - group["momentum"])
            direction = buffer
            if group["nesterov"]:
                direction = gradient.lerp(buffer, group["momentum"])
            directions.append(direction.bfloat16())
            shapes.append(parameter.shape)
            settings.append(NewtonSchulz(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]))
        updates = orthogonalize_together(directions, shapes, settings, layout)
        for (parameter, group), update in zip(matrices, updates, strict=True):
            rate = float(group["lr"])
            adjusted = adjust_learning_rate(rate, group["adjust_lr_fn"], parameter.shape)
            local_part(parameter).mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-adjusted)


def _refuse_others_than_matrices(group: dict[str, Any]) -> None:
    # It may be a generator, which can be read only once.
    group["params"] = list(group["params"])
    for parameter in group["params"]:
        _refuse_unless_matrix(parameter)


def _refuse_unless_matrix(parameter: Tensor) -> None:
    if parameter.ndim != 2:
        what = f"a parameter of shape {tuple(parameter.shape)} in a group for Muon"
        way_out = "Put it in a group without 'muon', or use build_optimizer(model, 'muon')"
        raise ValueError(explain(what, "only a matrix can be orthogonalized", way_out))
