"""An optimizer whose state and step are in host memory, while the weights train on the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.messages import explain


class HostOptimizer(Optimizer):
    """Keeps an optimizer, and a copy of the weights that it updates, in host memory: the device holds no state.

    A step copies the gradients to the host, updates there, and copies the weights back, so it takes as long as the
    link and the host's cores need: for few tokens a step that is the most of it, with accumulation it matters little.
    The numbers are those of the optimizer inside, stepping on the host. Its state is never in ``optimizer.state``, so
    Lightning does not move it; ``state_dict`` is that of the plain optimizer, and loads into one, and back.

    Weights that something else has changed in place since the last step (a checkpoint, an average) are read again.

    Args:
        params: parameters on any device, or groups of them.
        make: groups of parameters in host memory → the optimizer.

    Raises:
        ValueError: parameters that are sharded.

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

    def __init__(self, params: ParamsT, make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        super().__init__(params, {})  # the defaults are those of the one inside, which is not there yet
        self._hosted: dict[Tensor, nn.Parameter] = {}
        self._versions: dict[Tensor, int] = {}
        self.inner = make(self._host_groups())
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**inner, "params": group["params"]})
        self.defaults = self.inner.defaults

    def __getstate__(self) -> dict[str, Any]:  # for copies: that of torch knows groups and state alone
        return {**super().__getstate__(), "inner": self.inner, "_hosted": self._hosted, "_versions": self._versions}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._host_groups()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in moved:
            hosted = self._hosted[parameter]
            # Each write in place raises it, and ours below is noted.
            if self._versions[parameter] != parameter._version:
                hosted.copy_(parameter, non_blocking=True)
            hosted.grad = _host_copy(parameter.grad)
        _wait_for_copies(moved)
        self.inner.param_groups = groups
        self.inner.step()
        for parameter in moved:
            self._hosted[parameter].grad = None  # pinned memory goes back to torch's cache, for the next step
            parameter.copy_(self._hosted[parameter], non_blocking=True)
            self._versions[parameter] = parameter._version
        return loss

    def on_host(self) -> Optimizer:
        """The optimizer inside, with the groups' settings as they are now."""
        self.inner.param_groups = self._host_groups()
        return self.inner

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.on_host().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.on_host().load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**loaded, "params": group["params"]})

    def _host_groups(self) -> list[dict[str, Any]]:
        """The groups as they are now, which schedulers have changed, over the parameters in host memory."""
        groups = []
        for group in self.param_groups:
            groups.append({**group, "params": [self._host(parameter) for parameter in group["params"]]})
        return groups

    def _host(self, parameter: Tensor) -> nn.Parameter:
        if parameter not in self._hosted:
            if isinstance(parameter, DTensor):
                why = "pieces of tensors belong to their devices"
                way_out = "Use FSDP2Strategy(offload='cpu')"
                raise ValueError(explain("offload='cpu' with parameters that FSDP2 has sharded", why, way_out))
            self._hosted[parameter] = nn.Parameter(_host_copy(parameter), parameter.requires_grad)
            self._versions[parameter] = parameter._version
        return self._hosted[parameter]


def _host_copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _wait_for_copies(parameters: list[Tensor]) -> None:
    """The host cannot compute with what has not arrived: the one place where it waits for the device."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
