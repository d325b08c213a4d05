"""Linear layers of several experts, and the router that they share."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fasttrain.architecture.auxiliary_loss import ModuleWithLoss
from lightning_fasttrain.core.messages import explain

_uncompiled: Any = torch.compiler.disable  # type checkers do not know the arguments of what it returns
Role = Literal["first", "inner", "last"]
_ALIGNED = 16  # bytes of a row that a grouped product needs


@dataclass(frozen=True)
class Routing:
    """The assignment of tokens to experts. Rows are pairs of a token and one of its experts, sorted by expert.

    Args:
        source: the hidden states that were routed.
        tokens: index of each row's token (N · k,).
        experts: each row's expert (N · k,).
        ends: number of rows of all experts up to each one (E,).
        places: the row of each token's experts (N, k).
        weights: the share of each token's experts in its output (N, k); they sum to 1.
    """

    source: Tensor
    tokens: Tensor
    experts: Tensor
    ends: Tensor
    places: Tensor
    weights: Tensor


class ExpertRouter(ModuleWithLoss):
    """Choose the experts of each token: the ``top_k`` most probable ones, weighted by their normalized probabilities.

    Args:
        width: features of the hidden states.
        experts: number of experts E.
        top_k: experts of a token.
        balance: weight of the load-balancing loss E · Σ f_i · P_i, in which f_i is the number of rows of expert i
            divided by that of tokens, and P_i its mean probability.
        z_loss: weight of the mean of logsumexp(logits)².
    """

    def __init__(self, width: int, experts: int, top_k: int, balance: float, z_loss: float, **made: Any) -> None:
        super().__init__()
        self.top_k, self.balance, self.z_loss = top_k, balance, z_loss
        self.weight = nn.Parameter(torch.empty(experts, width, **made))
        nn.init.normal_(self.weight, std=0.02)
        self.current: Routing | None = None
        self.first_rows: Tensor | None = None  # what the first layer returned, until the rows are known to be separate
        self.rows_are_separate = False

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} features, {self.top_k} of {self.weight.shape[0]} experts"

    def forward(self, x: Tensor) -> Tensor:
        """Route hidden states (..., D), and return their logits (N, E) in float32."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.float(), self.weight.float())
            probabilities = logits.softmax(dim=-1)
            best, chosen = probabilities.topk(self.top_k, dim=-1)
            # Of a single expert the weight is 1, and its gradient that of the probability, relative to it.
            weights = best / (best.sum(dim=-1, keepdim=True) if self.top_k > 1 else best.detach())
        experts, order = chosen.flatten().sort(stable=True)
        kinds = torch.arange(len(self.weight), device=x.device)
        counts = (experts[:, None] == kinds).sum(dim=0)
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        self.current = Routing(
            source=x,
            tokens=order.div(self.top_k, rounding_mode="floor"),
            experts=experts,
            ends=counts.cumsum(0).to(torch.int32),
            places=places.view(-1, self.top_k),
            weights=weights,
        )
        return logits

    def route(self, x: Tensor) -> tuple[Routing, Tensor | None]:
        """Return the routing of hidden states, and the router's own loss where they are routed for the first time."""
        if self.current is not None and self.current.source is x:
            return self.current, None
        logits = self(x)
        assert self.current is not None
        if not (self.training and torch.is_grad_enabled() and (self.balance or self.z_loss)):
            return self.current, None
        shares = self.current.ends.diff(prepend=self.current.ends.new_zeros(1)) / len(logits)
        balance = len(self.weight) * (shares * logits.softmax(dim=-1).mean(dim=0)).sum()
        spread = logits.logsumexp(dim=-1).square().mean()
        return self.current, self.balance * balance + self.z_loss * spread

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "current": None, "first_rows": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertRouter":
        width = self.weight.shape[1]
        with torch.random.fork_rng([]):  # its first weights are drawn for nothing
            copied = ExpertRouter(width, len(self.weight), self.top_k, self.balance, self.z_loss)
        memo[id(self)] = copied
        copied.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=self.weight.requires_grad)
        return copied.train(self.training)


class ExpertLinear(nn.Module):
    """A linear layer of several experts: each row is multiplied by the weight of its own one.

    Args:
        dense: the layer that each expert starts as a copy of.
        transposed: whether its weight is (in, out), as GPT-2's is.
        router: shared by the layers of an MLP.
        role: ``"first"`` owns the router, ``"inner"`` gets the same input as the first one, ``"last"`` combines the
            experts of each token. Between first and last, hidden states are (..., k · H), with rows sorted by expert.
    """

    def __init__(self, dense: nn.Module, transposed: bool, router: ExpertRouter, role: Role) -> None:
        super().__init__()
        self.transposed, self.role = transposed, role
        self._shared = (router,)  # in a tuple, which registers nothing
        experts = len(router.weight)
        for name, parameter in dense.named_parameters(recurse=False):
            copies = parameter.detach().expand(experts, *parameter.shape).clone()
            self.register_parameter(name, nn.Parameter(copies, requires_grad=parameter.requires_grad))
        if dense._parameters.get("bias") is None:
            self.register_parameter("bias", None)
        if role == "first":
            self.router = router
        self.train(dense.training)
        # A hook has torch's encoder layers leave the path without gradients, which would use the weights by itself.
        self.register_forward_pre_hook(_does_nothing)

    def extra_repr(self) -> str:
        experts, outputs, inputs = self._matrices().transpose(1, 2).shape
        return f"{experts} experts, in_features={inputs}, out_features={outputs}"

    def _matrices(self) -> Tensor:
        """Return the experts' weights (E, in, out)."""
        weight = self.get_parameter("weight")
        return weight if self.transposed else weight.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        router = self._shared[0]
        if self.role == "last":
            return self._combine(x, router)
        return self._spread(x, router)

    def _spread(self, x: Tensor, router: ExpertRouter) -> Tensor:
        routing, loss = router.route(x)
        rows = x.reshape(-1, x.shape[-1])[routing.tokens]
        hidden = self._multiply(rows, routing)
        if self.role == "first" and not router.rows_are_separate and _can_differentiate(hidden):
            router.first_rows = hidden
        hidden = hidden.view(*x.shape[:-1], router.top_k * hidden.shape[-1])
        return hidden if loss is None else router.pending.add(loss, hidden)

    def _combine(self, hidden: Tensor, router: ExpertRouter) -> Tensor:
        routing, router.current = router.current, None
        width = self._matrices().shape[1]
        if (
            routing is None
            or hidden.shape[:-1] != routing.source.shape[:-1]
            or hidden.shape[-1] != width * router.top_k
        ):
            raise ValueError(_explain_between(f"hidden states of shape {tuple(hidden.shape)} lie"))
        separate = hidden.reshape(-1, width)
        if router.first_rows is not None:
            _refuse_mixed_rows(router.first_rows, separate)
            router.first_rows, router.rows_are_separate = None, True
        rows = self._multiply(separate, routing)
        combined = _combine_outputs(rows[routing.places], routing.weights.to(rows.dtype).unsqueeze(-1))
        return combined.view(*hidden.shape[:-1], rows.shape[-1])

    def _multiply(self, rows: Tensor, routing: Routing) -> Tensor:
        weight, bias = self._matrices(), self._parameters["bias"]
        device = rows.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            rows, weight = rows.to(dtype), weight.to(dtype)
        product = multiply_groups(rows, weight, routing.ends)
        return product if bias is None else product + bias[routing.experts].to(product.dtype)


class RefuseBetween:
    """A hook of a module with weights that may lie between the layers of an MLP: refuses hidden states of experts.

    Args:
        name: that of the module.
        last: the layer that combines the experts.
    """

    def __init__(self, name: str, last: ExpertLinear) -> None:
        self.name = name
        self._last = (last,)  # in a tuple, as a layer's router is

    def __call__(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        last = self._last[0]
        router = last._shared[0]
        width = last._matrices().shape[1] * router.top_k
        reads_experts = any(isinstance(value, Tensor) and width in value.shape[1:] for value in inputs)
        if reads_experts and router.current is not None:
            raise ValueError(_explain_between(f"'{self.name}' ({type(module).__name__}) lies"))


def _can_differentiate(hidden: Tensor) -> bool:
    """Whether a gradient can be computed now: not while a recomputed region is recorded, nor while code is traced."""
    if torch.compiler.is_compiling() or type(hidden) is not Tensor:  # such as a predicted one, without values
        return False
    recorded = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return hidden.requires_grad and not recorded


def _refuse_mixed_rows(first: Tensor, last: Tensor) -> None:
    """Refuse a function between the layers in which a row, of one token and expert, depends on other rows."""
    place = len(last) // 2
    weights = torch.linspace(1, 2, last.shape[1], device=last.device, dtype=last.dtype)
    row = (last[place] * weights).sum()
    (gradient,) = torch.autograd.grad(row, first, retain_graph=True, allow_unused=True)
    if gradient is not None and (gradient[:place].any() or gradient[place + 1 :].any()):
        raise ValueError(_explain_between("a function of several tokens or experts lies"))


def _explain_between(what: str) -> str:
    why = "only functions of single elements may lie there, as an activation, a gate or dropout"
    return explain(f"{what} between the layers of an MLP with experts", why, "Leave this block out with skip=")


def _does_nothing(layer: nn.Module, inputs: tuple[object, ...]) -> None:
    pass


def _combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w_i y_i of outputs (N, k, D) and weights (N, k, 1) that sum to 1.

    As y_0 + Σ w_i (y_i - y_0), so that equal experts have exactly their common output, and the router then a gradient
    of exactly zero: rounding in its place would be a direction for an adaptive optimizer.
    """
    if outputs.shape[1] == 1:
        return outputs[:, 0] * weights[:, 0]
    first, others = outputs[:, :1], outputs[:, 1:]
    return first[:, 0] + ((others - first) * weights[:, 1:]).sum(dim=1)


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply consecutive groups of rows (R, in) by a matrix of (E, in, out) each; group i ends before ``ends[i]``.

    One grouped product computes them all where rows of 16 bytes and the dtype allow it, and otherwise one product each.

    Example:
        >>> rows, matrices = torch.ones(3, 2), torch.stack([torch.eye(2), 5 * torch.eye(2)])
        >>> multiply_groups(rows, matrices, torch.tensor([1, 3], dtype=torch.int32))[:, 0]
        tensor([1., 5., 5.])
    """
    element = rows.element_size()
    is_aligned = rows.shape[1] * element % _ALIGNED == 0 and matrices.shape[2] * element % _ALIGNED == 0
    if not is_aligned or rows.dtype == torch.float64:  # for which torch has no grouped product
        return _multiply_one_by_one(rows, matrices, ends)
    if rows.dtype == torch.bfloat16:
        return _multiply_grouped(rows, matrices, ends)
    return _uncompiled(_multiply_grouped)(rows, matrices, ends)  # the compiler knows bfloat16 only


def _multiply_grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    product: Any = _DenseGradient.apply(F.grouped_mm(rows.contiguous(), matrices, offs=ends))
    return product


@_uncompiled
def _multiply_one_by_one(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    products = map(torch.matmul, rows.split(counts), matrices)
    return torch.cat(list(products))


class _DenseGradient(torch.autograd.Function):
    """The identity, which makes an expanded gradient, such as that of a sum, contiguous for a grouped product."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()
