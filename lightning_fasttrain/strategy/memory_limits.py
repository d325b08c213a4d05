"""Predicted memory of a rank under several strategies, compared with the memory that there is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import ReportTable, explain
from lightning_fasttrain.memory.memory_report import MemoryReport
from lightning_fasttrain.memory.predict_memory import predict_strategies

_STATES = ("parameters", "gradients", "optimizer state")


def check_headroom(headroom: float) -> None:
    """Refuse a headroom outside [0, 1)."""
    if not 0 <= headroom < 1:
        why = "it is the fraction of the memory that stays free"
        raise ValueError(explain(f"headroom={headroom}", why, "Use a number from 0 to below 1, such as 0.1"))


@dataclass(frozen=True)
class Fit:
    """The predicted memory of one rank under a strategy, and the memory that it lacks.

    Args:
        name: the strategy.
        memory: the prediction for the rank that holds most.
        device_bytes: its peak, with activations that were given rather than predicted.
        short: bytes that are missing on the device.
        short_of_host: bytes of host memory that are missing, for each rank or on each node, as the limit is given.
    """

    name: str
    memory: MemoryReport
    device_bytes: int
    short: int
    short_of_host: int

    @property
    def fits(self) -> bool:
        return not (self.short or self.short_of_host)

    @property
    def over(self) -> str:
        """The missing memory in words; that of the device first."""
        if self.short:
            return f"{gib(self.short)} GiB over"
        return f"{gib(self.short_of_host)} GiB over in host memory"

    @property
    def states(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and optimizer state at the peak."""
        return tuple(self.memory.at_peak[category] for category in _STATES)

    @property
    def other_bytes(self) -> int:
        """Bytes of activations, the batch and temporaries at the peak."""
        return self.device_bytes - sum(self.states)


AnyFit = TypeVar("AnyFit", bound=Fit)


@dataclass(frozen=True)
class Limits:
    """Memory that training may use.

    Args:
        usable: bytes on each device, without headroom.
        host: bytes of host memory; None means enough.
        ranks: number of ranks that share this host memory.
        activations: bytes of activations that a prediction without a batch lacks.
    """

    usable: int
    host: int | None
    ranks: int = 1
    activations: int = 0

    def check(self, name: str, memory: MemoryReport) -> Fit:
        """Compare the prediction for a strategy with the limits."""
        device = memory.peak_bytes + self.activations
        beyond_host = 0
        if self.host is not None:
            beyond_host = memory.host_bytes * self.ranks - self.host
        return Fit(name, memory, device, max(0, device - self.usable), max(0, beyond_host))

    def describe(self, fit: Fit) -> str:
        """Return how much of the device a strategy takes, in words."""
        return f"{gib(fit.device_bytes)} GiB of {gib(self.usable)} GiB on each device"

    def explain_shortage(self, what: str, nearest: Fit, host: str, way_out: str) -> str:
        """Return the error message for when no candidate fits.

        Args:
            what: start of the sentence, with the candidate that is nearest to fitting.
            nearest: this candidate's shortage.
            host: whether host memory is per rank or per node, in words.
            way_out: advice for when activations are not the largest part.
        """
        lacks = []
        if nearest.short:
            lacks.append(f"{gib(nearest.short)} GiB on each device")
        if nearest.short_of_host:
            lacks.append(f"{gib(nearest.short_of_host)} GiB of host memory {host}")
        states = sum(nearest.states)
        takes = f"states take {gib(states)} GiB and activations and buffers {gib(nearest.other_bytes)} GiB"
        at_peak = nearest.memory.at_peak
        if at_peak["activations"] + self.activations > self.usable // 2:
            way_out = "Recompute activations (ActivationCheckpointing) or split the batch (MicroBatching)"
        return explain(f"{what} and lacks {' and '.join(lacks)}", f"{takes} of {gib(self.usable)} GiB usable", way_out)


def predict_fits(
    strategies: Mapping[str, object], limits: Limits, module: Any, batch: object = None, **settings: Any
) -> list[Fit]:
    """Predict a step under each strategy, and compare its memory with the limits.

    Args:
        strategies: name → strategy, as for :func:`~lightning_fasttrain.predict_memory`.
        limits: the memory that there is.
        module: the model.
        batch: one rank's batch; None predicts parameters, gradients and optimizer state alone, for strategies whose
            buffers are known by formulas.
        settings: further arguments of ``predict_strategies``.
    """
    if batch is None:
        batch, settings["loss"] = torch.zeros(()), _sum_parameters
    reports = predict_strategies(module, batch, list(strategies.values()), **settings)
    return [limits.check(name, memory) for name, memory in zip(strategies, reports, strict=True)]


def _sum_parameters(module: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss that gives each trained parameter a gradient without activations."""
    total = batch
    for parameter in module.parameters():
        if parameter.requires_grad:
            total = total + parameter.sum()
    return total


def find_nearest(fits: Sequence[AnyFit]) -> AnyFit:
    """Return what lacks least; if it lacks host memory only, whatever the others lack."""
    return min(fits, key=lambda fit: (fit.short > 0, fit.short + fit.short_of_host))


def name_leaner_ways(leaner: list[str], precision: str, devices: int) -> str:
    """Return advice on saving memory: ``leaner`` options, lower precision, more devices, or adapters only."""
    ways = list(leaner)
    if precision == "32-true":
        ways.append("precision='bf16-mixed'")
    return f"Use {', '.join([*ways, f'more than {devices} devices'])}, or train adapters only (QLoRA)"


def fits_table(
    title: str,
    notes: Sequence[str],
    fits: Sequence[Fit],
    chosen: str,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> ReportTable:
    """Return the table of the memory of each strategy, in GiB on one rank.

    Args:
        title: the title.
        notes: sentences below the table.
        fits: a row each.
        chosen: the name of the strategy that is marked.
        columns: heading → further cells, one for each row.
    """
    columns = columns or {}
    headings = ["params", "grads", "optimizer", "other", "device", "host"]
    if any(fit.memory.nvme_bytes for fit in fits):
        headings.append("disk")
    table = ReportTable(title, {"strategy": "name", **dict.fromkeys((*headings, *columns), "number")}, notes)
    for number, fit in enumerate(fits):
        memory = fit.memory
        figures = (*fit.states, fit.other_bytes, fit.device_bytes, memory.host_bytes, memory.nvme_bytes)
        name, style = fit.name, ""
        if fit.name == chosen:
            name, style = f"{fit.name} ←", "bold"
        more = [cells[number] for cells in columns.values()]
        table.add(name, *map(gib, figures[: len(headings)]), *more, style=style)
    return table


def gib(nbytes: int) -> str:
    """Format ``nbytes`` as GiB."""
    if not nbytes:
        return "0"
    size = nbytes / GIB
    # Two significant digits for small values, which would otherwise read 0.00.
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
