"""Train in pure bfloat16 without losing small updates, by compensated (Kahan) or stochastic rounding."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer, groups_over, take_settings
from lightning_fasttrain.optim.optimizer_in_backward import refuse_changed_group

UPDATES = ("kahan", "stochastic")
_NAN = 0x7FC00000  # the usual float32 NaN, as bits
_LOW, _DRAW = "low_bits", "draw"  # our keys in a parameter's state
# Distance of the parameters' seeds: a prime, since a CPU's seeds end at 2³².
_APART = 15_485_863


@check_arguments
class LowPrecisionUpdates(ClosureOptimizer):
    """Steps another optimizer over bfloat16 parameters as if they were float32, one parameter at a time.

    A bfloat16 value has 8 significant bits, so an update below 1/512 of a weight is rounded away, and training stalls
    late, where updates are small. Here each parameter is converted to float32 for its own update, and back again:

    - ``"kahan"`` keeps the bits that the conversion cuts off, 16 per element, and restores them before the next update.
      Nothing is lost: the weights are float32 ones rounded to bfloat16, bit for bit as if the optimizer had a float32
      copy, at half of its memory.
    - ``"stochastic"`` keeps nothing, and rounds up or down at random, with probabilities whose mean is the true value.
      It draws from its own generators, which depend on the parameter and on the count of its updates: all processes of
      DDP round identically, and a resumed run continues bit for bit.

    The optimizer's own state is that of float32 parameters, since averages of gradients in bfloat16 stall, too.
    Parameters of other dtypes are stepped unchanged. It is an ``Optimizer`` with the groups of the inner one, so
    schedulers, clipping and :func:`~lightning_fasttrain.optim.optimize_in_backward_` work as usual. It can load a plain
    state, and the plain optimizer can load its state, ignoring the extra bits.

    Args:
        optimizer: any optimizer that treats its parameters independently, over bfloat16 parameters.
        updates: ``"kahan"`` or ``"stochastic"``.

    Raises:
        ValueError: no parameter is bfloat16, or parameters are sharded by FSDP2.
        RuntimeError: in ``step``: the optimizer keeps counters for a whole group of parameters.

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
        Zamirai et al. 2020, "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192. The paper keeps the rest
        of Kahan's sum in bfloat16, rounded; this implementation keeps it exactly, in as many bits.
    """

    float32_gradients_for: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)  # converted to float32 for each update

    copied: ClassVar[tuple[str, ...]] = ("inner", "updates")

    def __init__(self, optimizer: Optimizer, updates: str) -> None:
        self.updates = one_of("updates", updates, UPDATES)
        _refuse_parameters(parameters_of(optimizer), updates)
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def update_parameters(self) -> None:
        # One by one, so that a single parameter and its gradient exist in float32 at a time.
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Mapping[str, object]) -> None:
        state = dict(self.state[parameter])
        # A parameter's first seed: numbered by the order in which states are created, equal in all processes.
        draw = state.pop(_DRAW, len(self.state) * _APART)
        low = state.pop(_LOW, None)
        is_low = parameter.dtype is torch.bfloat16
        whole = parameter
        if is_low:
            whole = nn.Parameter(_join(parameter, low))
            if parameter.grad is not None:
                whole.grad = parameter.grad.float()
        # A copy, so that changes by the step are detected below.
        lent = {**group, "params": [whole]}
        self.inner.param_groups, self.inner.state = [lent], defaultdict(dict, {whole: state})
        self.inner.step()
        self.state[parameter] = self.inner.state[whole]
        # Otherwise the inner optimizer would keep the float32 copies.
        self.inner.param_groups, self.inner.state = [], defaultdict(dict)
        refuse_changed_group(self.inner, group, lent)
        if not is_low:
            return
        bits = whole.detach().view(torch.int32)
        # A NaN may lose its bits and become infinite, or 0 if it is rounded up: CUDA's have all bits set.
        bits.masked_fill_(whole.isnan() & (bits & 0xFFFF != 0), _NAN)
        if self.updates == "kahan":
            # Plus half of the last place, so that the rest fits into 16 bits.
            high = (bits + 0x8000) >> 16
            self.state[parameter][_LOW] = (bits - (high << 16)).to(torch.int16)
        else:
            generator = torch.Generator(bits.device).manual_seed(draw)
            # Noise is added below the last kept place, and cut off: this rounds up with the right probability.
            noise = torch.randint(1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
            high = (bits + noise) >> 16
            self.state[parameter][_DRAW] = draw + 1
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Loaded state gets the dtype of its parameter, so empty float32 parameters stand in meanwhile.
        held: list[Tensor] = [*parameters_of(self)]
        stand_ins = dict(zip(held, map(_stand_in, held), strict=True))
        groups = groups_over(self.param_groups, stand_ins.__getitem__)
        self.inner.param_groups, self.inner.state = groups, defaultdict(dict)
        self.inner.load_state_dict(state_dict)
        take_settings(self.param_groups, self.inner.param_groups)
        self.state.clear()
        for parameter, stand_in in stand_ins.items():
            if stand_in in self.inner.state:
                state = self.state[parameter] = self.inner.state[stand_in]
                if _LOW in state:
                    state[_LOW] = state[_LOW].to(torch.int16)


def _join(parameter: Tensor, low: Tensor | None) -> Tensor:
    """Return the float32 values whose upper halves are in ``parameter``."""
    bits = parameter.detach().view(torch.int16).to(torch.int32) << 16
    if low is not None:
        bits += low  # signed, since the conversion may have rounded up
    return bits.view(torch.float32)


def _stand_in(parameter: Tensor) -> nn.Parameter:
    dtype = parameter.dtype
    if dtype is torch.bfloat16:
        dtype = torch.float32
    return nn.Parameter(torch.empty(0, dtype=dtype, device=parameter.device), dtype.is_floating_point)


def _refuse_parameters(parameters: Sequence[Tensor], updates: str) -> None:
    if not any(parameter.dtype is torch.bfloat16 for parameter in parameters):
        dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in parameters}))
        why = "only bfloat16 weights lose small updates"
        way_out = f"Remove updates={updates!r}, or train with precision='bf16-true'"
        raise ValueError(explain(f"updates={updates!r} with parameters of {dtypes}", why, way_out))
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        why = "they are shards of tensors, whose bits are on several devices"
        way_out = "Keep float32 shards, with precision='bf16-mixed'"
        raise ValueError(explain(f"updates={updates!r} with parameters that FSDP2 has sharded", why, way_out))
