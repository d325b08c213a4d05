"""Predict the memory of choices on each of several devices, and choose the strategy."""

import math
from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.strategy.choose_strategy import Candidate, StrategyChoice, choose_strategy

_ANYTHING = 1e9  # GiB: all strategies fit


class SeveralDevices:
    """Predicts the memory of choices under each strategy.

    Args:
        module: the model.
        devices: total number of devices.
        nodes: number of machines.
        usable: usable bytes of each device.
    """

    def __init__(self, module: L.LightningModule, devices: int, nodes: int, usable: float) -> None:
        self.module, self.devices, self.nodes, self.usable = module, devices, nodes, usable
        self.known: dict[str, StrategyChoice] = {}

    def fits(self, choice: Choice, needed: float) -> bool:
        """Whether a choice fits under any strategy.

        Args:
            choice: the techniques and the precision.
            needed: peak memory in bytes on a single device.
        """
        return self._find_least(choice, needed) <= self.usable

    def choose(self, choice: Choice, needed: float) -> StrategyChoice:
        """Return the strategy that fits and moves the fewest bytes in a step."""
        activations = self._activations(choice, needed)
        fitting = [one for one in self._candidates(choice) if one.states.device + activations <= self.usable]
        best = min(fitting, key=lambda candidate: candidate.traffic.total)
        compared = self._compare(choice.precision)
        return replace(compared, name=best.name, activation_bytes=int(activations), usable_bytes=int(self.usable))

    def _find_least(self, choice: Choice, needed: float) -> float:
        sizes = [one.states.device for one in self._candidates(choice)]
        return min(sizes, default=math.inf) + self._activations(choice, needed)

    def _candidates(self, choice: Choice) -> list[Candidate]:
        candidates = self._compare(choice.precision).candidates
        return [one for one in candidates if self._goes_with(choice, one.name) and not one.rounds]

    def _activations(self, choice: Choice, needed: float) -> float:
        """Return the memory of a step on one device without the model states, which DDP replicates."""
        whole = next(c for c in self._compare(choice.precision).candidates if c.name == "ddp")
        return max(0.0, needed - whole.states.device)

    def _goes_with(self, choice: Choice, strategy: str) -> bool:
        return choice.parts == 1 or not strategy.startswith("zero")  # ZeRO counts micro-batches by itself

    def _compare(self, precision: str) -> StrategyChoice:
        if precision not in self.known:
            self.known[precision] = choose_strategy(
                self.module,
                None,
                self.devices,
                memory_gib=_ANYTHING,
                nodes=self.nodes,
                precision=precision,
                activation_gib=0.0,
                headroom=0.0,
            )
        return self.known[precision]


def strategy_code(name: str) -> tuple[str, Any]:
    """Return the Python code and the LightningCLI configuration of a strategy that ``choose_strategy`` names.

    Example:
        >>> strategy_code("fsdp2+offload")[0]
        "ft.FSDP2Strategy(offload='cpu')"
    """
    kind, _, stage = name.partition("-")
    if kind == "ddp":
        return "'ddp'", "ddp"
    if kind == "zero":
        config = {"class_path": "lightning_fasttrain.ZeROStrategy", "init_args": {"stage": stage}}
        return f"ft.ZeROStrategy(stage={stage!r})", config
    config = {"class_path": "lightning_fasttrain.FSDP2Strategy"}
    if not kind.endswith("offload"):
        return "ft.FSDP2Strategy()", config
    return "ft.FSDP2Strategy(offload='cpu')", {**config, "init_args": {"offload": "cpu"}}
