"""A technique of your own: an exponential moving average of the weights, which often tests better than the last ones.

    python examples/your_own_technique.py

A class says what it is, and does its work in Lightning's hooks or in ``apply`` and ``attach``. The suite does the rest:
the order, the checks, the table, the undoing. Add a row to ``tests/cases.py``, as this one has, and every promise is
held for it: the same training in Trainer, mixin, Fabric and a bare loop, beside every other technique, across a resume.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import lightning_fasttrain as ft


class WeightAverage(ft.Technique):
    """Keep θ̄ ← decay · θ̄ + (1 − decay) · θ, after each optimizer step; the training itself stays as it is.

    Args:
        decay: the share of what was; 0.999 averages over about a thousand steps.

    Attributes:
        average: name → averaged parameter, once a step was taken.

    Example:
        >>> average = WeightAverage(0.99)

    Source:
        Polyak & Juditsky 1992; the averaging is ``torch.optim.swa_utils``'s.
    """

    effect: ClassVar[str] = "an exponential moving average of the weights, to test with"
    when: ClassVar[str] = "the last steps are noisy; not for a few steps of fine-tuning"
    in_a_loop: ClassVar[str] = "average.update(model) after each optimizer.step()"
    predicted: ClassVar[bool] = True

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay}: it is the share that stays at each step. Use 0.999.")
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._steps = 0

    def predict(self, step: Any) -> None:
        step.leave_out(self, "it is one more copy of what trains, so this is a lower bound")

    def update(self, model: nn.Module) -> None:
        """A step was taken: move the average towards what trains in the model."""
        now = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.average:
            self.average = {name: value.clone() for name, value in now.items()}
            return
        get_ema_multi_avg_fn(self.decay)([self.average[name] for name in now], list(now.values()), 1)

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights, in a ``with``; afterwards it has its own again."""
        parameters = dict(model.named_parameters())
        own = {name: parameters[name].detach().clone() for name in self.average}
        try:
            _fill(parameters, self.average)
            yield
        finally:
            _fill(parameters, own)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.global_step
        self.average = {name: value.to(pl_module.device) for name, value in self.average.items()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != self._steps:  # else the batch was one of several that are summed
            self._steps = trainer.global_step
            self.update(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


@torch.no_grad()
def _fill(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


class Line(L.LightningModule):
    """A line through noisy points: its last weights jitter, their average does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 1)
    points = torch.utils.data.TensorDataset(x, 2 * x + 1 + torch.randn_like(x))
    average, module = WeightAverage(0.99), Line()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[average], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(points, batch_size=8))
    last = error_of(module, x)
    with average.in_use(module):
        print(f"squared error against the true line: last weights {last:.4f}, their average {error_of(module, x):.4f}")


@torch.no_grad()
def error_of(module: Line, x: Tensor) -> float:
    return nn.functional.mse_loss(module.layer(x), 2 * x + 1).item()


if __name__ == "__main__":
    main()
