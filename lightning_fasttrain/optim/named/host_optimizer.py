"""An optimizer whose state and step are in host memory, while the weights stay on the device."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.device import has_streams
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.optim.closure_optimizer import ClosureOptimizer, groups_over, take_settings, with_gradient

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


@check_arguments
class HostOptimizer(ClosureOptimizer):
    """Keeps an optimizer, and a copy of the weights that it updates, in host memory: the device holds no state.

    A step copies the gradients to the host, updates there, and copies the weights back, so its duration depends on the
    interconnect and the host's cores: with few tokens per step it dominates, with accumulation it matters little. The
    result is that of the inner optimizer, stepping on the host. Its state is never in ``optimizer.state``, so Lightning
    does not move it; ``state_dict`` has the plain optimizer's format, and can be loaded in both directions.

    Weights that were changed since the last step (by a checkpoint, an average, or a write to ``.data``) are read again:
    a sum over the bits of each weight, computed on its device, shows it.

    Args:
        params: parameters on any device, or groups of them.
        make: maps groups of parameters in host memory to the optimizer.

    Raises:
        ValueError: parameters are sharded.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> optimizer = HostOptimizer(net.parameters(), lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> len(optimizer.state), len(optimizer.state_dict()["state"])
        (0, 2)

    Source:
        Ren et al. 2021, "ZeRO-Offload", https://arxiv.org/abs/2101.06840, without its overlap of copies and updates.
    """

    copied: ClassVar[tuple[str, ...]] = ("inner", "_hosted", "_sums")

    def __init__(self, params: ParamsT, make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        # The defaults are those of the inner optimizer, which is created below.
        super().__init__(params, {})
        self._hosted: dict[Tensor, nn.Parameter] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self.inner = make(self._host_groups())
        take_settings(self.param_groups, self.inner.param_groups)
        self.defaults = self.inner.defaults

    def update_parameters(self) -> None:
        groups = self._host_groups()
        moved = with_gradient(parameters_of(self))
        # All copies are started before any is waited for, so that they follow each other without gaps.
        has_changed: list[Tensor] = []
        for parameter in moved:
            has_changed.append(_host_copy(_sum_bits(parameter) != self._sums[parameter]))
            self._hosted[parameter].grad = _host_copy(parameter.grad)
        _wait_for_copies(moved)
        changed = list(itertools.compress(moved, has_changed))
        for parameter in changed:
            self._hosted[parameter].copy_(parameter, non_blocking=has_streams(parameter.device))
        _wait_for_copies(changed)
        self.inner.param_groups = groups
        self.inner.step()
        for parameter in moved:
            # Returns the pinned memory to torch's cache, for the next step.
            self._hosted[parameter].grad = None
            parameter.copy_(self._hosted[parameter], non_blocking=has_streams(parameter.device))
            self._sums[parameter] = _sum_bits(parameter)

    def on_host(self) -> Optimizer:
        """The inner optimizer, with the current settings of the groups."""
        self.inner.param_groups = self._host_groups()
        return self.inner

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.on_host().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.on_host().load_state_dict(state_dict)
        take_settings(self.param_groups, self.inner.param_groups)

    def _host_groups(self) -> list[dict[str, Any]]:
        """Return the current groups, which schedulers may have changed, over the parameters in host memory."""
        return groups_over(self.param_groups, self._host)

    def _host(self, parameter: Tensor) -> nn.Parameter:
        if parameter not in self._hosted:
            if isinstance(parameter, DTensor):
                why = "shards of tensors belong to their devices"
                way_out = "Use FSDP2Strategy(offload='cpu')"
                raise ValueError(explain("offload='cpu' with parameters that FSDP2 has sharded", why, way_out))
            self._hosted[parameter] = nn.Parameter(_host_copy(parameter), parameter.requires_grad)
            self._sums[parameter] = _sum_bits(parameter)
        return self._hosted[parameter]


def _host_copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=has_streams(tensor.device), requires_grad=False)
    return copy.copy_(tensor.detach(), non_blocking=has_streams(tensor.device))


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's values read as integers, on its device; a write that keeps it is very unlikely."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _wait_for_copies(parameters: Sequence[Tensor]) -> None:
    """Wait until the copies to the host have arrived: the only synchronization with the device."""
    for device in {parameter.device for parameter in parameters if has_streams(parameter.device)}:
        torch.accelerator.current_stream(device).synchronize()
