"""Compare the gradients of an optimizer from one update to the next."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.doctor.observation.source_lines import SourceLine


@dataclass
class UpdateRecord:
    """Facts about one optimizer.

    Attributes:
        optimizer: the optimizer.
        line: line of the user's code at which it stepped first.
        with_gradient: ids of its parameters that ever had a gradient when it stepped.
        updates: number of updates.
        compared: number of updates for which that is known:
        kept_gradients: number of updates whose gradients still contained those of the previous update.
    """

    optimizer: Optimizer
    line: SourceLine | None = None
    with_gradient: set[int] = field(default_factory=set)
    updates: int = 0
    compared: int = 0
    kept_gradients: int = 0
    _was_cleared: bool = True
    _probe: Tensor | None = None

    def before_backward(self) -> None:
        """Note whether the gradients of the previous update are gone."""
        self._was_cleared = self._was_cleared or not _has_values(self._probe)

    def note_gradients(self) -> None:
        """Note which parameters have a gradient: before an update, and after it, since a closure may make them."""
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))

    def after_update(self) -> None:
        """Count the update."""
        self.note_gradients()
        self.updates += 1

    def compare_gradients(self) -> None:
        """Note after an update whether its gradients contained those of the one before."""
        self.compared += 1
        self.kept_gradients += not self._was_cleared
        if not _has_values(self._probe):
            # The smallest one, since all of its gradient is read in each step.
            candidates = [one for one in parameters_of(self.optimizer) if _has_values(one)]
            self._probe = min(candidates, key=lambda one: one.numel(), default=None)
        self._was_cleared = self._probe is None


def _has_values(parameter: Tensor | None) -> bool:
    if parameter is None or parameter.grad is None:
        return False
    # A host sync on CUDA, in the few steps that are watched.
    return bool(parameter.grad.any())
