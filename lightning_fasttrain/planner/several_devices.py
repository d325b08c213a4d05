"""Predict the memory of choices on each of several devices, and choose the strategy."""

from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.strategy.choose_strategy import (
    Candidate,
    Compared,
    StrategyChoice,
    compare_strategies,
    pick_best,
)
from lightning_fasttrain.strategy.memory_limits import Limits, gib


class SeveralDevices:
    """Predicts the memory of choices under each strategy.

    Args:
        module: the model.
        batch: the batch of one device.
        devices: total number of devices.
        nodes: number of machines.
        usable: usable bytes of each device.
        device: type of the devices.
    """

    def __init__(
        self, module: L.LightningModule, batch: object, devices: int, nodes: int, usable: float, device: str
    ) -> None:
        self.module, self.batch, self.device = module, batch, device
        self.devices, self.nodes, self.usable = devices, nodes, usable
        self.known: dict[Choice, Compared] = {}

    def fits(self, choice: Choice) -> bool:
        """Return whether a choice of techniques and precision fits under any strategy."""
        return bool(self._fitting(choice))

    def choose(self, choice: Choice) -> StrategyChoice:
        """Return the strategy that fits and moves the fewest bytes in a step."""
        compared, usable = self._compare(choice), int(self.usable)
        best = pick_best(self._fitting(choice))
        assert best is not None  # as the search has asked whether it fits
        why = f"{best.name} fits with {gib(best.device_bytes)} GiB of {gib(usable)} GiB and moves the fewest bytes."
        shape = (self.devices, self.nodes, choice.precision, usable)
        return StrategyChoice(best.name, compared.candidates, why, *shape, compared.sizes, compared.left_out)

    def _fitting(self, choice: Choice) -> list[Candidate]:
        fitting = []
        for one in self._compare(choice).candidates:
            # ZeRO counts micro-batches by itself.
            joins = choice.parts == 1 or not one.name.startswith("zero")
            if joins and one.fits and not one.rounds:
                fitting.append(one)
        return fitting

    def _compare(self, choice: Choice) -> Compared:
        # Compiled blocks count as eager ones, which take more.
        choice = replace(choice, compile="")
        if choice not in self.known:
            step = {"techniques": choice.techniques(), "precision": choice.precision, "device": self.device}
            limits = Limits(int(self.usable), None)
            with quietly():
                self.known[choice] = compare_strategies(self.module, self.batch, self.devices, limits, **step)
        return self.known[choice]


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
