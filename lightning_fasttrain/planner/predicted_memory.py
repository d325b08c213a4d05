"""The peak memory of choices, each predicted once; what differs in the size of a part alone, by a straight line."""

from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.plan import predict_memory
from lightning_fasttrain.plan.proof.step_record import quietly
from lightning_fasttrain.planner.choice import Choice


class PredictedMemory:
    """Predicts peaks in bytes.

    From two parts on, a step's peak is a constant and a multiple of what one part holds: two predictions tell both.

    Args:
        module: the model.
        batch: one batch.
        device: whose memory.
        parts: the numbers of parts that may be asked for.
    """

    def __init__(self, module: L.LightningModule, batch: Any, device: str, parts: list[int]) -> None:
        self.module, self.batch, self.device = module, batch, device
        self.ends = [parts[1], parts[-1]] if len(parts) > 1 else []
        self.known: dict[Choice, float] = {}

    def of(self, choice: Choice) -> float:
        """Peak bytes. What is compiled counts as it is eagerly, which is more.

        Raises:
            ValueError, TypeError: it cannot be predicted.
        """
        key = replace(choice, compile="")
        if key not in self.known:
            self.known[key] = self._interpolate(key) if self._is_between(key) else float(self._predict(key))
        return self.known[key]

    def exactly(self, choice: Choice) -> float:
        """As :meth:`of`, without the line."""
        key = replace(choice, compile="")
        if self._is_between(key) or key not in self.known:
            self.known[key] = float(self._predict(key))
        return self.known[key]

    def _is_between(self, choice: Choice) -> bool:
        return bool(self.ends) and self.ends[0] < choice.parts < self.ends[1]

    def _interpolate(self, choice: Choice) -> float:
        few, many = (self.of(replace(choice, parts=parts)) for parts in self.ends)
        first, last, here = 1 / self.ends[0], 1 / self.ends[1], 1 / choice.parts
        return many + (few - many) * (here - last) / (first - last)

    def _predict(self, choice: Choice) -> int:
        with quietly():
            report = predict_memory(
                self.module,
                self.batch,
                techniques=choice.techniques(),
                precision=choice.precision,
                device=self.device,
            )
        return report.peak_bytes
