"""Predict the memory of choices on each of several devices, and choose the strategy."""

from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.dry_run.verification.short_run import quietly
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.strategy.choose_strategy import (
    CANDIDATES,
    Candidate,
    StrategyChoice,
    choose_strategy,
    pick_best,
)

_ANYTHING = 1e9  # GiB: all strategies fit
_FSDP2 = tuple(name for name in CANDIDATES if name.startswith("fsdp2"))
_OTHERS = tuple(name for name in CANDIDATES if not name.startswith("fsdp2"))  # they share a trace


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
        self.known: dict[tuple[Choice, tuple[str, ...]], StrategyChoice] = {}

    def fits(self, choice: Choice, needed: float) -> bool:
        """Whether a choice fits under any strategy.

        Args:
            choice: the techniques and the precision.
            needed: peak memory in bytes on a single device.
        """
        # First those that are likely to fit, since a strategy that fits spares the other trace.
        families = (_FSDP2, _OTHERS) if needed > self.usable else (_OTHERS, _FSDP2)
        return any(self._fitting(choice, family) for family in families)

    def choose(self, choice: Choice) -> StrategyChoice:
        """Return the strategy that fits and moves the fewest bytes in a step."""
        best = pick_best(self._fitting(choice, CANDIDATES))
        compared = self._compare(choice, CANDIDATES)
        assert best is not None
        return replace(compared, name=best.name, usable_bytes=int(self.usable))

    def _fitting(self, choice: Choice, names: tuple[str, ...]) -> list[Candidate]:
        fitting = []
        for one in self._compare(choice, names).candidates:
            # ZeRO counts micro-batches by itself.
            joins = choice.parts == 1 or not one.name.startswith("zero")
            if joins and not one.rounds and one.device_bytes <= self.usable:
                fitting.append(one)
        return fitting

    def _compare(self, choice: Choice, names: tuple[str, ...]) -> StrategyChoice:
        # Compiled blocks count as eager ones, which take more.
        key = replace(choice, compile=""), names
        if key not in self.known:
            with quietly():
                self.known[key] = choose_strategy(
                    self.module,
                    self.batch,
                    self.devices,
                    memory_gib=_ANYTHING,
                    techniques=key[0].techniques(),
                    nodes=self.nodes,
                    precision=choice.precision,
                    device=self.device,
                    strategies=names,
                    headroom=0.0,
                )
        return self.known[key]


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
