"""Predict the peak memory of choices, each once; those that differ in micro-batches alone are interpolated."""

import math
from dataclasses import replace

import lightning as L

from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.dry_run.verification.short_run import quietly
from lightning_fasttrain.planner.candidates.configuration import Choice
from lightning_fasttrain.predict import predict_memory


class PredictedMemory:
    """Predicts peak memory in bytes.

    From two micro-batches on, a step's peak is a constant plus a multiple of the size of one, as two predictions show.

    Args:
        module: the model.
        batch: one batch.
        device: type of the device whose memory is predicted.
        parts: the possible numbers of micro-batches.
        budget_bytes: the limit of choices with a :class:`~lightning_fasttrain.planner.candidates.configuration.Budget`.
    """

    def __init__(
        self, module: L.LightningModule, batch: object, device: str, parts: list[int], budget_bytes: float = 0.0
    ) -> None:
        self.budget_bytes = budget_bytes
        self.module, self.batch, self.device = module, batch, device
        # From two parts on: in one part a step has another order, and its peak is not on the line.
        self.ends = [parts[1], parts[-1]] if len(parts) > 1 else []
        self.known: dict[Choice, float] = {}

    def predict(self, choice: Choice, *, exactly: bool = False) -> float:
        """Return the peak memory in bytes. Compiled blocks count as eager ones, which take more.

        Args:
            choice: the techniques and the precision.
            exactly: whether it is predicted by itself rather than interpolated.

        Raises:
            ValueError, TypeError: it cannot be predicted.
        """
        if choice.has_budget:
            low = self.predict(replace(choice, recompute="all"), exactly=exactly)
            return self._within_budget(low, self.predict(replace(choice, recompute=""), exactly=exactly))
        key = replace(choice, compile="")
        is_between = self._is_between(key)
        if key not in self.known or (exactly and is_between):
            guesses = is_between and not exactly
            self.known[key] = self._interpolate(key) if guesses else float(self._predict(key))
        return self.known[key]

    def _within_budget(self, low: float, high: float) -> float:
        """Return the peak with as many stored blocks as the budget allows, if all blocks are equal."""
        blocks = len(find_blocks(self.module))
        kept = math.floor(blocks * (self.budget_bytes - low) / max(high - low, 1.0))
        return low + (high - low) * min(max(kept, 0), blocks) / blocks

    def least_recomputed(self, choice: Choice) -> float:
        """Return the peak memory with nothing recomputed."""
        return self.predict(replace(choice, recompute=""))

    def most_recomputed(self, choice: Choice) -> float:
        """Return the peak memory with every block recomputed."""
        return self.predict(replace(choice, recompute="all"))

    def _is_between(self, choice: Choice) -> bool:
        return bool(self.ends) and self.ends[0] < choice.parts < self.ends[1]

    def _interpolate(self, choice: Choice) -> float:
        few, many = (self.predict(replace(choice, parts=parts)) for parts in self.ends)
        first, last, here = 1 / self.ends[0], 1 / self.ends[1], 1 / choice.parts  # peak = a + b / parts
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
