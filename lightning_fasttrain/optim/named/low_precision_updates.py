"""Training in bfloat16 alone that loses no small updates: what a weight cannot hold is kept, or rounded by chance."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.messages import explain

UPDATES = ("kahan", "stochastic")
_NAN = 0x7FC00000  # float32's usual one, in bits
_LOW, _DRAW = "low_bits", "draw"  # our keys in a parameter's state
_APART = 15_485_863  # from the draws of one parameter to those of the next: a prime, as seeds count to 2³² on a CPU


class LowPrecisionUpdates(Optimizer):
    """Steps another optimizer over bfloat16 parameters as if they were float32, one parameter at a time.

    A bfloat16 number has 8 bits, so an update below 1/512 of a weight is rounded away, and training stalls where it
    should be finest. Here each parameter is widened to float32 for its own update, and narrowed again:

    - ``"kahan"`` keeps what narrowing cuts off, 16 bits a number, and puts it back before the next update. Nothing is
      lost: the weights are float32 ones rounded to bfloat16, bit for bit as if the optimizer had a float32 copy, at
      half of its price.
    - ``"stochastic"`` keeps nothing, and rounds up or down by chance, with the probabilities at which the mean is the
      true value. It draws from generators of its own, which depend on the parameter and on the count of its updates:
      all processes of DDP round alike, and a resumed run goes on bit for bit.

    The optimizer's own state is what it keeps for float32 parameters, since means of gradients in bfloat16 stall too.
    Parameters of other dtypes are stepped over as they are. It is an ``Optimizer`` with the groups of the one inside,
    so schedulers, clipping and :func:`~lightning_fasttrain.optimize_in_backward_` work as ever. A plain state loads
    into it, and its state into the plain optimizer, which ignores the bits that were cut off.

    Args:
        optimizer: any that treats its parameters one by one, over bfloat16 parameters.
        updates: ``"kahan"`` or ``"stochastic"``.

    Raises:
        ValueError: nothing is in bfloat16, or parameters are sharded by FSDP2.
        RuntimeError: in ``step``: an optimizer that counts for a whole group of parameters.

    Example:
        >>> weights = {kind: nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for kind in ("plain", "kahan")}
        >>> optimizers = [torch.optim.SGD([weight], lr=1e-3) for weight in weights.values()]
        >>> optimizers[1] = LowPrecisionUpdates(optimizers[1], "kahan")
        >>> for weight, optimizer in zip(weights.values(), optimizers):
        ...     for _ in range(500):
        ...         weight.grad = torch.ones_like(weight)
        ...         optimizer.step()
        >>> {kind: weight.item() for kind, weight in weights.items()}
        {'plain': 1.0, 'kahan': 0.5}

    Source:
        Zamirai et al. 2020, "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192. Theirs keeps the rest of
        Kahan's sum in bfloat16, rounded; ours keeps it whole, in as many bits.
    """

    float32_gradients_for: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)  # it widens them for each update

    def __init__(self, optimizer: Optimizer, updates: str) -> None:
        self.updates = one_of("updates", updates, UPDATES)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _refuse_parameters(parameters, updates)
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def __getstate__(self) -> dict[str, Any]:  # for copies: that of torch knows groups and state alone
        return {**super().__getstate__(), "inner": self.inner, "updates": self.updates}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = dict(self.state[parameter])
        # A parameter's first seed: it is numbered by the order in which states are made, equal in all processes.
        draw = state.pop(_DRAW, len(self.state) * _APART)
        low = state.pop(_LOW, None)
        is_low = parameter.dtype is torch.bfloat16
        whole = parameter
        if is_low:
            whole = nn.Parameter(_join(parameter, low))
            whole.grad = None if parameter.grad is None else parameter.grad.float()
        lent = {**group, "params": [whole]}  # a copy: what a step changes in it is seen below
        self.inner.param_groups, self.inner.state = [lent], defaultdict(dict, {whole: state})
        self.inner.step()
        self.state[parameter] = self.inner.state[whole]
        self.inner.param_groups, self.inner.state = [], defaultdict(dict)  # or it would hold what was widened
        _refuse_changes(self.inner, group, lent)
        if not is_low:
            return
        bits = whole.detach().view(torch.int32)
        # A NaN of which bits are cut off may become infinite, or 0 where it is rounded up: CUDA's have all bits set.
        bits.masked_fill_(whole.isnan() & (bits & 0xFFFF != 0), _NAN)
        if self.updates == "kahan":
            high = (bits + 0x8000) >> 16  # half of the last place, so that what is cut off fits into 16 bits
            self.state[parameter][_LOW] = (bits - (high << 16)).to(torch.int16)
        else:
            generator = torch.Generator(bits.device).manual_seed(draw)
            # Added below the last place that stays, and cut off: up with the probability of what is cut off.
            noise = torch.randint(1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
            high = (bits + noise) >> 16
            self.state[parameter][_DRAW] = draw + 1
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # What is loaded gets the dtype of its parameter, so these are empty ones of float32 for as long.
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        stand_ins = {parameter: _stand_in(parameter) for parameter in held}
        groups = []
        for group in self.param_groups:
            groups.append({**group, "params": [stand_ins[parameter] for parameter in group["params"]]})
        self.inner.param_groups, self.inner.state = groups, defaultdict(dict)
        self.inner.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**loaded, "params": group["params"]})
        self.state.clear()
        for parameter, stand_in in stand_ins.items():
            if stand_in in self.inner.state:
                state = self.state[parameter] = self.inner.state[stand_in]
                if _LOW in state:
                    state[_LOW] = state[_LOW].to(torch.int16)


def _join(parameter: Tensor, low: Tensor | None) -> Tensor:
    """The float32 numbers whose upper halves are in ``parameter``."""
    bits = parameter.detach().view(torch.int16).to(torch.int32) << 16
    if low is not None:
        bits += low  # signed: narrowing may have rounded up
    return bits.view(torch.float32)


def _stand_in(parameter: Tensor) -> nn.Parameter:
    dtype = torch.float32 if parameter.dtype is torch.bfloat16 else parameter.dtype
    return nn.Parameter(torch.empty(0, dtype=dtype, device=parameter.device), dtype.is_floating_point)


def _refuse_parameters(parameters: list[Tensor], updates: str) -> None:
    if not any(parameter.dtype is torch.bfloat16 for parameter in parameters):
        dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in parameters}))
        why = "only bfloat16 weights lose small updates"
        way_out = f"Leave updates={updates!r} out, or train with precision='bf16-true'"
        raise ValueError(explain(f"updates={updates!r} with parameters of {dtypes}", why, way_out))
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        why = "they are pieces of tensors, whose bits are on several devices"
        way_out = "Keep float32 shards, with precision='bf16-mixed'"
        raise ValueError(explain(f"updates={updates!r} with parameters that FSDP2 has sharded", why, way_out))


def _refuse_changes(optimizer: Optimizer, group: dict[str, Any], lent: dict[str, Any]) -> None:
    changed = [key for key in lent if key != "params" and lent[key] is not group.get(key)]
    if changed:
        what = f"{type(optimizer).__name__} changed its group's {', '.join(changed)} in a step"
        why = "it would do so once a parameter, where the group's parameters share it"
        raise RuntimeError(explain(what, why, "Use an optimizer that treats its parameters one by one, such as AdamW"))
