"""A plan: the chosen techniques, the other candidates, and the code that uses them."""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import Report, ReportTable
from lightning_fasttrain.planner.candidates import Choice, strategy_code
from lightning_fasttrain.planner.timing import Ratio, compare_times
from lightning_fasttrain.strategy.choose_strategy import StrategyChoice
from lightning_fasttrain.technique import Technique

TELLS = 0.05  # of a step: a difference below that is noise


@dataclass(frozen=True)
class Tried:
    """A candidate, with its prediction, its estimate, and its measurements.

    Attributes:
        choice: the techniques and the precision.
        predicted_bytes: predicted peak memory of a step.
        estimated_ms: estimated time of a step, from steps with one technique each.
        step_ms: the fastest step of each measured run; empty if none was measured.
        peak_bytes: measured peak memory of a step; 0 if it was not measured.
        why_not: why it was not chosen; "" for the chosen one.
    """

    choice: Choice
    predicted_bytes: float
    estimated_ms: float
    step_ms: tuple[float, ...] = ()
    peak_bytes: int = 0
    why_not: str = ""

    @property
    def ms(self) -> float:
        """The fastest measured step, since other work of the machine only adds time; or else the estimate."""
        return min(self.step_ms, default=self.estimated_ms)


@dataclass(frozen=True)
class Plan(Report):
    """The fastest combination of techniques that fits; print it for a table.

    Attributes:
        chosen: the chosen candidate.
        plain: the plain step, without techniques.
        tried: all candidates that were considered, the chosen one included, fastest first.
        reasons: a sentence for each technique that is used.
        left_out: name of a technique that could not be chosen → the reason.
        limit_gib: limit of the memory of each device.
        device: type of the device.
        measured: whether steps were measured on that device; otherwise everything is predicted.
        strategy: the strategy for several devices; None for one.
        seconds: duration of the planning.
        notes: assumptions.
    """

    chosen: Tried
    plain: Tried
    tried: tuple[Tried, ...]
    reasons: tuple[str, ...]
    left_out: Mapping[str, str]
    limit_gib: float
    device: str
    measured: bool
    strategy: StrategyChoice | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def callbacks(self) -> list[Technique]:
        """New techniques, for the Trainer or :func:`~lightning_fasttrain.apply`."""
        return self.chosen.choice.techniques()

    @property
    def settings(self) -> dict[str, Any]:
        """Further arguments of the Trainer: precision, and for several devices the strategy and their number."""
        return self._settings_with(None if self.strategy is None else self.strategy.strategy())

    def _settings_with(self, strategy: object) -> dict[str, Any]:
        settings: dict[str, Any] = {"precision": self.chosen.choice.precision}
        if self.strategy is not None:
            nodes = self.strategy.nodes
            # Lightning counts devices on each node.
            settings |= {"strategy": strategy, "devices": self.strategy.devices // nodes, "num_nodes": nodes}
        return settings

    def trainer(self, **settings: Any) -> L.Trainer:
        """Return a Trainer that follows the plan.

        Args:
            settings: further arguments of the Trainer, which override the plan's; ``callbacks`` are added to its own.
        """
        callbacks = [*settings.pop("callbacks", []), *self.callbacks]
        return L.Trainer(**{**self.settings, **settings}, callbacks=callbacks)  # what the caller gives wins

    def code(self) -> str:
        """Return the Python code that makes this Trainer."""
        lines = ["import lightning as L", "import lightning_fasttrain as ft", "", "trainer = L.Trainer("]
        for name, value in self._settings_with(None).items():
            written = repr(value)
            if name == "strategy" and self.strategy is not None:
                written = strategy_code(self.strategy.name)[0]
            lines.append(f"    {name}={written},")
        made = ", ".join(self.chosen.choice.code())
        return "\n".join([*lines, f"    callbacks=[{made}],", ")"])

    def yaml(self) -> str:
        """Return the configuration for LightningCLI."""
        trainer = self._settings_with(None if self.strategy is None else strategy_code(self.strategy.name)[1])
        trainer["callbacks"] = [dict(config) for config in self.chosen.choice.configs()]
        return yaml.safe_dump({"trainer": trainer}, sort_keys=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the code."""
        strategy = self.strategy and self.strategy.as_dict()
        return {**asdict(replace(self, strategy=None)), "strategy": strategy, "code": self.code()}

    def save(self, path: str | Path) -> Path:
        """Write :meth:`as_dict` as JSON: to a temporary file first."""
        return write_atomic(path, json.dumps(self.as_dict(), indent=2))

    def as_table(self) -> ReportTable:
        """Build the table of the candidates: predicted and measured memory, time, and why not."""
        how = "measured" if self.measured else "predicted alone"
        if self.strategy is not None:
            how += f", {self.strategy.devices} devices with {self.strategy.name}"
        said = [*self.reasons, *(f"{name}: {why}" for name, why in self.left_out.items()), *self.notes]
        title = f"Plan for {self.limit_gib:.4g} GiB on {self.device}, {how}: {self.chosen.choice}"
        numbers = dict.fromkeys(("predicted GiB", "measured GiB", "ms/step"), "number")
        table = ReportTable(title, {"choice": "name", **numbers, "why not": "prose"}, said)
        for tried in self.tried:
            peak, about = "", "≈"
            if tried.peak_bytes:
                peak = f"{tried.peak_bytes / GIB:.3f}"
            if tried.step_ms:
                about = ""
            cells = [f"{tried.predicted_bytes / GIB:.3f}", peak, f"{about}{tried.ms:,.1f}", tried.why_not or "chosen"]
            table.add(str(tried.choice), *cells)
        return table

    def save_picture(self, path: str | Path) -> Path:
        """Draw time against memory: all candidates, the frontier, the limit and the choice.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        require("matplotlib", extra="plots")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.scatter(*_places(self.tried), color="0.7", label="tried")
        axes.plot(*_places(sorted(_frontier(self.tried), key=_gib)), label="frontier")
        axes.scatter(*_places([self.chosen]), marker="*", s=180, label="chosen")
        axes.axvline(self.limit_gib, linestyle="--", color="0.4", label="limit")
        axes.set(xlabel="peak memory, GiB", ylabel="ms a step", title=str(self.chosen.choice))
        axes.legend()
        return write_atomic(path, partial(figure.savefig, format=Path(path).suffix[1:] or "png", dpi=120))


def _gib(tried: Tried) -> float:
    return (tried.peak_bytes or tried.predicted_bytes) / GIB


def _places(tried: Sequence[Tried]) -> tuple[list[float], list[float]]:
    """Return the coordinates of candidates: peak memory in GiB, and ms per step."""
    return list(map(_gib, tried)), list(map(operator.attrgetter("ms"), tried))


def _frontier(tried: tuple[Tried, ...]) -> list[Tried]:
    """Keep the candidates that no other beats in both time and memory."""
    kept = []
    for one in tried:
        if not any(other.ms < one.ms and _gib(other) <= _gib(one) for other in tried):
            kept.append(one)
    return kept


def simplest_of_equals_first(ranked: list[Tried]) -> list[Tried]:
    """Sort the candidates that are not clearly slower than the first, the fastest, by their number of techniques."""
    equal = [tried for tried in ranked if not is_slower(tried.step_ms, ranked[0].step_ms)]
    simplest = sorted(equal, key=lambda tried: (len(tried.choice.words), tried.choice.parts))
    return [*simplest, *(tried for tried in ranked if tried not in equal)]


def best_two_thirds(racing: Sequence[Tried]) -> list[Tried]:
    """Return which candidates run further, two at least: the fastest, then its equals, simpler ones first, then others.

    From the second turn on, those that are clearly slower than the fastest are left out as well.

    Source:
        Karnin, Koren and Somekh 2013, "Almost Optimal Exploration in Multi-Armed Bandits" (sequential halving).
    """
    ranked = sorted(racing, key=lambda tried: tried.ms)
    ordered = ranked[:1] + [tried for tried in simplest_of_equals_first(ranked) if tried is not ranked[0]]
    kept = ordered[: max(2, math.ceil(len(ordered) * 2 / 3))]
    return [tried for tried in kept if len(tried.step_ms) < 2 or not is_slower(tried.step_ms, ranked[0].step_ms)]


def is_slower(step_ms: Sequence[float], fastest_ms: Sequence[float]) -> bool:
    """Return whether the first takes longer, by times that were measured in turn.

    It does if the interval of their ratio is above 1; or, as far as the interval leaves it open, if the ratio is above
    what noise is likely to make of equal times.

    Example:
        >>> is_slower([108, 107, 109], [100, 101, 100]), is_slower([102, 99, 103], [100, 101, 100])
        (True, False)
    """
    if not step_ms or not fastest_ms:
        return False
    ratio = compare_turns(fastest_ms, step_ms)
    return ratio.value > 1 + TELLS and (ratio.low > 1 or ratio.value > 1 + 2 * TELLS)


def compare_turns(base_ms: Sequence[float], other_ms: Sequence[float]) -> Ratio:
    """Compare the times of the turns in which both were run: what is clearly slower is not run to the end."""
    turns = min(len(base_ms), len(other_ms))
    return compare_times(base_ms[:turns], other_ms[:turns])


def is_decided(times_ms: Sequence[Sequence[float]]) -> bool:
    """Return whether each of several programs, measured in turn, is as fast as the fastest or clearly slower."""
    fastest = min(times_ms, key=min)
    ratios = [compare_times(fastest, other) for other in times_ms if other is not fastest]
    return all(ratio.low > 1 or ratio.high < 1 + TELLS for ratio in ratios)


def why_slower(tried: Tried, chosen: Tried) -> str:
    """Explain why ``chosen`` was preferred to ``tried``."""
    ratio = compare_turns(chosen.step_ms, tried.step_ms)
    slower = f"{ratio.value - 1:+.0%}"
    if ratio.value > 1 + TELLS and (ratio.low > 1 or len(tried.step_ms) == 1):
        return slower
    if len(tried.step_ms) == 1:
        return f"{slower} in one run, and no simpler"
    return f"{slower}, from {ratio.low - 1:+.0%} to {ratio.high - 1:+.0%}, and no simpler"
