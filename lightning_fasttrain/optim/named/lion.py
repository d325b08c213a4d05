"""Lion: updates by the sign of a momentum, with one state element per parameter where Adam has two."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import gradients_of
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer, refuse_out_of_range, with_gradient


@check_arguments
class Lion(ClosureOptimizer):
    r"""Lion, whose update is the sign of an average of gradients.

        U = sign(β₁·M + (1 − β₁)·G),   W ← (1 − lr·weight_decay) W − lr·U,   M ← β₂·M + (1 − β₂)·G

    Its state has one element per parameter element, half of AdamW's. Each entry changes by ``lr`` in each step, so the
    learning rate should be 3 to 10 times below AdamW's, and the weight decay higher by the same factor.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: β₁ and β₂.
        weight_decay: decoupled, as in AdamW.

    Raises:
        ValueError: a setting out of range.
        RuntimeError: in ``step``: a sparse gradient.

    Example:
        >>> from torch import nn
        >>> weight = nn.Parameter(torch.zeros(3))
        >>> optimizer = Lion([weight], lr=0.5)
        >>> (weight * torch.tensor([2.0, -7.0, 0.0])).sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [-0.5, 0.5, 0.0]

    Source:
        Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        refuse_out_of_range(settings)
        super().__init__(params, settings)

    def update_parameters(self) -> None:
        for group in self.param_groups:
            parameters = with_gradient(group["params"])
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = gradients_of(parameters)
        if any(gradient.is_sparse for gradient in gradients):
            why = "Lion's momentum is dense"
            raise RuntimeError(explain("a sparse gradient", why, "Use nn.Embedding(sparse=False)"))
        means = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            means.append(state["exp_avg"])
        first, second = group["betas"]
        # lerp(M, G, 1 − β) = β·M + (1 − β)·G; with β₁ for the update, and then with β₂ for the new state.
        updates = torch._foreach_lerp(means, gradients, 1 - first)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
        torch._foreach_lerp_(means, gradients, 1 - second)
