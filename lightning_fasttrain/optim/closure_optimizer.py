"""Base class of optimizers that update after their closure, and the settings that optimizers share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain


class ClosureOptimizer(Optimizer):
    """Runs a closure with gradients on, as torch's optimizers do, and then :meth:`update_parameters` without them.

    Attributes:
        copied: names of attributes that copies keep; torch's copy only groups and state.
    """

    copied: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.copied}}

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:  # type: ignore[override]
        loss = None
        # It runs forward and backward, which record a graph even where step() is called under no_grad.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_parameters()
        return loss

    def update_parameters(self) -> None:
        """Update the parameters that have a gradient."""
        raise NotImplementedError


Groups = list[dict[str, Any]]


def with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def groups_over(groups: Groups, counterpart: Callable[[Any], object]) -> Groups:
    """Return groups with the same settings over the counterparts of their parameters."""
    return [{**group, "params": list(map(counterpart, group["params"]))} for group in groups]


def take_settings(groups: Groups, others: Groups) -> None:
    """Give ``groups`` the settings of ``others``, as after loading a state; they keep their parameters."""
    for group, other in zip(groups, others, strict=True):
        group.update({**other, "params": group["params"]})


def refuse_out_of_range(settings: Mapping[str, Any]) -> None:
    """Refuse a learning rate, betas, ``eps`` or weight decay out of range.

    Raises:
        ValueError: names the setting.
    """
    for name, fits, allowed in (
        ("lr", settings["lr"] >= 0, "at least 0"),
        ("betas", all(0 <= beta < 1 for beta in settings["betas"]), "from 0 to below 1"),
        ("eps", settings.get("eps", 0) >= 0, "at least 0"),
        ("weight_decay", settings["weight_decay"] >= 0, "at least 0"),
    ):
        if not fits:
            raise ValueError(explain(f"{name}={settings[name]}", f"it must be {allowed}", "Start from the default"))
