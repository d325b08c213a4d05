"""The forward of a block that is kept or recomputed as a plan says, and measured until there is one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lightning_fasttrain.model.activation_checkpointing import SelectiveOps
from lightning_fasttrain.model.checkpointed_forward import Again, CheckpointedForward
from lightning_fasttrain.model.memory_budget.checkpoint_plan import KEPT, SELECTIVE

EXPENSIVE = SelectiveOps()


class Watch(Protocol):
    """Interface of what a planned forward reports to while the training is measured."""

    measuring: bool

    def enter(
        self, name: str, forward: CheckpointedForward, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None: ...

    def leave(self, name: str) -> None: ...

    def watch_recomputation(self, name: str, again: AbstractContextManager[object]) -> AbstractContextManager[None]: ...


class PlannedForward(CheckpointedForward):
    """A block's forward that is kept, partly kept or recomputed by the plan; recomputed while there is no plan."""

    measures: ClassVar[bool] = True

    def __init__(self, module: nn.Module, name: str, watch: Watch) -> None:
        super().__init__(module)
        self.name, self.watch = name, watch
        self.kept = False

    @property
    def is_measuring(self) -> bool:
        return self.watch.measuring

    def follow(self, action: str) -> None:
        self.kept = action == KEPT
        self.keeps = EXPENSIVE.keeps if action == SELECTIVE else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if self.watch.measuring:
            return self._call_measured(*args, **kwargs)
        if self.kept:
            return self.inner(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    @torch._dynamo.disable
    def _call_measured(self, *args: object, **kwargs: object) -> Any:
        self.watch.enter(self.name, self, args, kwargs)
        out = super().__call__(*args, **kwargs)
        self.watch.leave(self.name)
        return out

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, again = super()._contexts()
        return forward, Again(lambda: self.watch.watch_recomputation(self.name, again))
