"""A plan for a cluster: layouts with their predicted steps, the chosen one, and what other numbers of devices gain."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import Report, ReportTable, number_of
from lightning_fasttrain.loss import FusedLossHead
from lightning_fasttrain.model.activation_checkpointing import ActivationCheckpointing, SelectiveOps
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.zero.zero_states import ZeROStage
from lightning_fasttrain.technique import Technique

RECOMPUTED = ("", "cheap", "all")
"""What blocks recompute: nothing, what is cheap, everything; each takes less memory and more time."""


@dataclass(frozen=True)
class Layout:
    """A layout of a model over devices, with the micro-batches and the techniques of each.

    Args:
        strategy: ``"one"`` for a single device, ``"ddp"``, ``"zero-1"``, ``"zero-2"``, ``"zero-3"`` or ``"fsdp2"``.
        devices, nodes: of the run.
        replicas: of the model in hybrid sharding.
        tensor_parallel: ranks that share the layers for one batch.
        context_parallel: ranks that share the tokens of one batch.
        recompute: what blocks recompute in the backward, of ``RECOMPUTED``.
        fused_head: whether the loss is computed without storing logits.
        micro_batch: samples that run at a time, on each group of ranks with a batch of its own.
        accumulate: micro-batches of an optimizer step.
        reduce_once: whether FSDP2 sums the gradients of micro-batches unsharded, and reduces them once.
    """

    strategy: str
    devices: int = 1
    nodes: int = 1
    replicas: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    recompute: str = ""
    fused_head: bool = False
    micro_batch: int = 1
    accumulate: int = 1
    reduce_once: bool = True

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that compute one batch together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the strategy that differ from its defaults."""
        names = ("replicas", "tensor_parallel", "context_parallel")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) > 1}
        return given if self.reduce_once else {**given, "reduce_once": False}

    @property
    def family(self) -> str:
        """The strategy with its arguments, in words."""
        name = {"one": "one device", "ddp": "DDP", "fsdp2": "FSDP2"}.get(self.strategy, self.strategy)
        name = name.replace("zero-", "ZeRO ")
        given = [(option, number) for option, number in self.options.items() if option != "reduce_once"]
        return ", ".join([name, *(f"{option.replace('_', ' ')} {number}" for option, number in given)])

    def __str__(self) -> str:
        recomputed = {"cheap": "recompute all but products", "all": "recompute blocks"}.get(self.recompute, "")
        head = "fused head" if self.fused_head else ""
        split = f"{number_of(self.accumulate, 'batch', 'batches')} of {self.micro_batch:,}"
        if not self.reduce_once:
            split += " reduced each"
        return ", ".join(filter(None, [self.family, split, recomputed, head]))

    def make_strategy(self) -> object:
        """Return what :func:`~lightning_fasttrain.predict_time` takes as its strategy."""
        if self.strategy == "one":
            return None
        if self.strategy == "fsdp2":
            return FSDP2Strategy(**self.options)
        return "ddp" if self.strategy == "ddp" else ZeROStage(self.strategy.removeprefix("zero-"))

    def techniques(self) -> list[Technique]:
        """Return new techniques of the layout."""
        made: list[Technique] = []
        if self.recompute:
            made.append(ActivationCheckpointing(SelectiveOps() if self.recompute == "cheap" else None))
        if self.fused_head:
            made.append(FusedLossHead())
        return made

    def code(self, precision: str) -> str:
        """Return the Python code of the Trainer, and the batch size of its loader."""
        settings = {"devices": f"{self.devices // self.nodes}", "num_nodes": f"{self.nodes}"}
        settings["precision"] = repr(precision)
        if self.strategy == "fsdp2":
            given = ", ".join(f"{name}={number}" for name, number in self.options.items())
            settings["strategy"] = f"ft.FSDP2Strategy({given})"
        elif self.strategy != "one":
            stage = self.strategy.removeprefix("zero-")
            settings["strategy"] = "'ddp'" if stage == "ddp" else f"ft.ZeROStrategy(stage={stage!r})"
        settings["accumulate_grad_batches"] = f"{self.accumulate}"
        callbacks = []
        if self.recompute:
            policy = "ft.model.SelectiveOps()" if self.recompute == "cheap" else ""
            callbacks.append(f"ft.ActivationCheckpointing({policy})")
        if self.fused_head:
            callbacks.append("ft.FusedLossHead()")
        settings["callbacks"] = f"[{', '.join(callbacks)}]"
        lines = [f"    {name}={value}," for name, value in settings.items()]
        head = ["import lightning as L", "import lightning_fasttrain as ft", "", "trainer = L.Trainer("]
        return "\n".join([*head, *lines, ")", f"# with DataLoader(..., batch_size={self.micro_batch})"])


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its predicted step.

    Args:
        layout: the layout.
        seconds: of an optimizer step, with the whole global batch.
        low, high: bounds of this prediction, as of :class:`~lightning_fasttrain.step_time.TimeReport`.
        tokens_per_second: of each device; samples for batches without token ids.
        mfu: the share of the peak that the model's FLOPs reach, without recomputation.
        peak_bytes: the peak memory of a device.
        hours: of the training; None where its length is not given.
        rounds: whether gradients are reduced in bfloat16, where they are float32 in other layouts.
    """

    layout: Layout
    seconds: float
    low: float
    high: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    hours: float | None = None
    rounds: bool = False

    @property
    def total_per_second(self) -> float:
        """Tokens, or samples, per second of all devices together."""
        return self.tokens_per_second * self.layout.devices


@dataclass(frozen=True)
class ClusterPlan(Report):
    """Layouts that fit on devices which need not be at hand, by predicted time; print it for a table.

    Attributes:
        rows: the best layouts; the first is chosen.
        curve: a strategy with its arguments → its best layout on each number of devices, with the same global batch.
        machine: name of the device.
        precision: of the training.
        unit: ``"tokens"``, or ``"samples"`` of batches without token ids.
        global_batch: of an optimizer step, in that unit.
        usable_bytes: memory of a device without what is left free.
        notes: assumptions, and what was left out.
    """

    rows: tuple[PlannedLayout, ...]
    curve: Mapping[str, tuple[PlannedLayout, ...]]
    machine: str
    precision: str
    unit: str
    global_batch: int
    usable_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> PlannedLayout:
        """The layout that is chosen."""
        return self.rows[0]

    def code(self) -> str:
        """Return the Python code of the chosen layout."""
        return self.chosen.layout.code(self.precision)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the code; sizes are in bytes."""
        return {**asdict(self), "code": self.code()}

    def as_table(self) -> ReportTable:
        """Build the table of layouts, and below it what fewer and more devices gain."""
        layout = self.chosen.layout
        where = f"{layout.devices:,} × {self.machine}"
        if layout.nodes > 1:
            where = f"{where} in {layout.nodes} nodes"
        title = f"{where}, {self.precision}, {self.global_batch:,} {self.unit} a step: {layout}"
        headings = ("s/step", "between", f"{self.unit}/s", "MFU", "GiB", "hours")
        usable = f"Of each device are {self.unit}/s and GiB, of which {self.usable_bytes / GIB:.1f} are usable."
        notes = [usable, *self._describe_other_sizes(), *self.notes]
        table = ReportTable(title, {"layout": "name", **dict.fromkeys(headings, "number")}, notes)
        for row in self.rows:
            hours = "" if row.hours is None else f"{row.hours:,.4g}"
            name, style = str(row.layout), ""
            if row is self.chosen:
                name, style = f"{name} ←", "bold"
            times = [f"{row.seconds:,.3g}", f"{row.low:,.2g}–{row.high:,.2g}"]
            speed = [f"{row.tokens_per_second:,.0f}", f"{row.mfu:.0%}"]
            table.add(name, *times, *speed, f"{row.peak_bytes / GIB:.1f}", hours, style=style)
        return table

    def _describe_other_sizes(self) -> list[str]:
        """Say what fewer and more devices would gain, each with its best layout."""
        best: dict[int, PlannedLayout] = {}
        for points in self.curve.values():
            for point in points:
                other = best.get(point.layout.devices)
                if other is None or point.seconds < other.seconds:
                    best[point.layout.devices] = point
        here, said = self.chosen, []
        for devices, point in sorted(best.items()):
            if devices == here.layout.devices:
                continue
            gain = here.seconds / point.seconds
            share = gain * here.layout.devices / devices
            hours = "" if point.hours is None else f", {point.hours:,.4g} hours"
            said.append(
                f"With {number_of(devices, 'device')}: {gain:.2f} times the {self.unit}/s, {share:.0%} of each "
                f"device's{hours}, as {point.layout}."
            )
        return said

    def save_picture(self, path: str | Path) -> Path:
        """Draw tokens per second against devices: a line for each strategy, and the chosen layout.

        Args:
            path: of a ``.png``, ``.svg`` or ``.pdf`` file.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        require("matplotlib", extra="plots")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(self.curve.items()):
            colour, marker, dashes = _LOOKS[number % len(_LOOKS)]
            devices = [point.layout.devices for point in points]
            speeds = [point.total_per_second for point in points]
            axes.plot(devices, speeds, color=colour, marker=marker, linestyle=dashes, linewidth=2, label=name)
        chosen, place = self.chosen, (self.chosen.layout.devices, self.chosen.total_per_second)
        axes.scatter(*place, s=260, facecolors="none", edgecolors="black", linewidths=2, zorder=4, label="chosen")
        # What the chosen layout would reach if each further device added as much.
        everywhere = sorted({point.layout.devices for points in self.curve.values() for point in points})
        linear = [chosen.tokens_per_second * devices for devices in everywhere]
        axes.plot(everywhere, linear, color="0.6", linestyle=":", linewidth=1.5, label="in proportion", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.set_xticks(everywhere, [f"{devices:,}" for devices in everywhere])
        axes.set_xlabel(f"{self.machine} devices", fontsize=13)
        axes.set_ylabel(f"{self.unit}/s, predicted", fontsize=13)
        axes.set_title(f"{self.global_batch:,} {self.unit} a step, {self.precision}", fontsize=13)
        axes.tick_params(labelsize=12)
        axes.grid(color="#eeeeee")
        axes.legend(fontsize=12)
        return write_atomic(path, partial(figure.savefig, format=Path(path).suffix[1:] or "png", dpi=100))


# Okabe and Ito's colours, which can be told apart without seeing red or green; shapes and dashes differ too.
_LOOKS = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", (0, (5, 1))),
    ("#000000", "v", (0, (3, 1, 1, 1))),
)
