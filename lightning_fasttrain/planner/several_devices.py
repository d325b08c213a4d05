"""Predict the memory of choices on each of several devices, and choose the strategy."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L

from lightning_fasttrain.dry_run.verification.short_run import quietly
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.strategy.choose_strategy import (
    CANDIDATES,
    Candidate,
    Compared,
    StrategyChoice,
    compare_strategies,
    pick_best,
)
from lightning_fasttrain.strategy.memory_limits import Limits, gib

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
        self.known: dict[tuple[Choice, tuple[str, ...]], Compared] = {}

    def fits(self, choice: Choice, needed: float) -> bool:
        """Whether a choice fits under any strategy.

        Args:
            choice: the techniques and the precision.
            needed: peak memory in bytes on a single device.
        """
        # First those that are likely to fit, since a strategy that fits spares the other trace.
        families = (_FSDP2, _OTHERS) if needed > self.usable else (_OTHERS, _FSDP2)
        allows = self._allows(choice)
        return any(any(map(allows, self._compare(choice, family).candidates)) for family in families)

    def choose(self, choice: Choice) -> StrategyChoice:
        """Return the strategy that fits and moves the fewest bytes in a step."""
        compared = [self._compare(choice, family) for family in (_OTHERS, _FSDP2)]
        candidates = sorted(
            itertools.chain.from_iterable(one.candidates for one in compared),
            key=lambda candidate: CANDIDATES.index(candidate.name),
        )
        best = pick_best(filter(self._allows(choice), candidates))
        assert best is not None  # as the search has asked whether it fits
        takes = f"{gib(best.device_bytes)} GiB of {gib(int(self.usable))} GiB on each device"
        notes = tuple(note for one in compared for note in one.left_out)
        why = f"{best.name} fits with {takes} and moves the fewest bytes."
        shape = (self.devices, self.nodes, choice.precision, int(self.usable))
        return StrategyChoice(best.name, tuple(candidates), why, *shape, compared[0].sizes, notes)

    def _allows(self, choice: Choice) -> Callable[[Candidate], bool]:
        """Return whether a candidate goes with a choice, as a function."""
        # ZeRO counts micro-batches by itself.
        parts = choice.parts
        return lambda one: one.fits and not one.rounds and (parts == 1 or not one.name.startswith("zero"))

    def _compare(self, choice: Choice, names: tuple[str, ...]) -> Compared:
        # Compiled blocks count as eager ones, which take more.
        key = replace(choice, compile=""), names
        if key not in self.known:
            limits = Limits(int(self.usable), None)
            step = {"techniques": key[0].techniques(), "precision": choice.precision, "device": self.device}
            with quietly():
                self.known[key] = compare_strategies(self.module, self.batch, self.devices, limits, names, **step)
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
