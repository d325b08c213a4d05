"""Muon for the matrices of blocks and AdamW for all other parameters, in one optimizer."""

from collections import defaultdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import local_part
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer
from lightning_fasttrain.optim.named.orthogonalize import (
    Layout,
    NewtonSchulz,
    adjust_learning_rate,
    orthogonalize_together,
)


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
