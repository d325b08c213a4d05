"""Predict the time of a training step on devices that need not be at hand, without allocating the model."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import batch_of, count_batch
from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.messages import Report, ReportTable, explain, format_bytes
from lightning_fasttrain.memory.fake_step import Factory
from lightning_fasttrain.memory.memory_report import MemoryReport, Moment
from lightning_fasttrain.memory.one_rank import OneRank, ShardsFakeModel
from lightning_fasttrain.memory.predict_memory import PREDICTED_PRECISIONS, Loss, predict_strategies
from lightning_fasttrain.model import ActivationOffload, MatmulPrecision
from lightning_fasttrain.model.compile.compiled_forward import WITHOUT_GRAPHS
from lightning_fasttrain.step_time.add_collectives import add_collectives
from lightning_fasttrain.step_time.machine import TF32, Machine, read_machine
from lightning_fasttrain.step_time.record_step import PRODUCT, RecordedStep, StepRecorder
from lightning_fasttrain.step_time.simulate_step import KINDS, SimulatedStep, Timeline, lay_out, simulate_step
from lightning_fasttrain.technique import Technique, check_together
from lightning_fasttrain.technique.declarations import Capability


@dataclass(frozen=True)
class TimeReport(Report):
    """The predicted time of an optimizer step; print it for a table.

    Args:
        seconds: of the step.
        low, high: the bounds that 90% of the rows of the machine's source keep.
        tokens_per_second: of each device; 0 for a batch without token ids.
        samples_per_second: of each device.
        mfu: the share of the peak of the precision that the model's FLOPs reach, without recomputation.
        by_kind: products, attention, element-wise, optimizer, exposed communication, launches and waiting → seconds.
        hidden_seconds: communication beside computing.
        flops: of the model in a step on each device.
        peak_bytes: the peak memory of a device, as :func:`~lightning_fasttrain.predict_memory` predicts it.
        memory: that prediction.
        memory_gib: the memory of a device, in GiB.
        machine: its name.
        source: how the machine's values are known.
        devices, nodes: of the run.
        precision: as given.
        notes: assumptions and omissions.
    """

    seconds: float
    low: float
    high: float
    tokens_per_second: float
    samples_per_second: float
    mfu: float
    by_kind: dict[str, float]
    hidden_seconds: float
    flops: int
    peak_bytes: int
    memory: MemoryReport
    memory_gib: float
    machine: str
    source: str
    devices: int
    nodes: int
    precision: str
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the peak memory is below that of the device."""
        return self.peak_bytes <= self.memory_gib * 2**30

    def as_table(self) -> ReportTable:
        """Build the table: the step by kind of time, throughput and memory."""
        where = f"{self.devices} × {self.machine}"
        if self.nodes > 1:
            where = f"{where} in {self.nodes} nodes"
        title = f"A step takes {_format(self.seconds)} on {where}, {self.precision}"
        table = ReportTable(title, {"": "name", "time": "number", "share": "number"}, self.notes)
        for kind in KINDS:
            seconds = self.by_kind[kind]
            if seconds > 0:
                table.add(kind, _format(seconds), f"{seconds / self.seconds:.1%}")
        if self.hidden_seconds > 0:
            table.add("communication beside computing", _format(self.hidden_seconds), "")
        table.add_section()
        if self.low < self.high:
            table.add("between", f"{_format(self.low)} and {_format(self.high)}", "")
        if self.tokens_per_second:
            table.add("tokens/s and device", f"{self.tokens_per_second:,.4g}", "")
        table.add("samples/s and device", f"{self.samples_per_second:,.4g}", "")
        table.add("MFU", f"{self.mfu:.1%}", "")
        share = f"{self.peak_bytes / self.memory_gib / 2**30:.0%}"
        table.add(f"peak memory, of {self.memory_gib:g} GiB", format_bytes(self.peak_bytes), share)
        return table


def _format(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms" if seconds < 10 else f"{seconds:,.4g} s"


@check_arguments
def predict_time(
    module: nn.Module | Factory,
    batch: object,
    *,
    gpu: str = "H100-SXM",
    devices: PositiveInt = 1,
    nodes: PositiveInt = 1,
    strategy: object = None,
    techniques: Sequence[Technique] = (),
    precision: str = "bf16-mixed",
    accumulate: PositiveInt = 1,
    loss: Loss | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    machine: str | os.PathLike[str] | Machine | None = None,
) -> TimeReport:
    """Predict the time of an optimizer step on accelerators that need not be at hand, and where it goes.

    The step runs once on tensors without memory, as for :func:`~lightning_fasttrain.predict_memory`: with its
    techniques, its strategy, and collectives that move nothing. Each kernel takes the longer of its FLOPs and its bytes
    on the machine, each collective what the links take; then the streams of host, computing, gathers and reductions are
    simulated. So 70 billion parameters on 512 devices take less than half a minute, and less than 4 GiB.

    Views cost nothing, causal attention half of the square. In compiled blocks, kernels between two products are one
    that reads what enters and writes what leaves. Collectives of FSDP2, tensor and context parallelism are those that
    they start; those of DDP and ZeRO are their buckets. Not counted are loading data and logging.

    Args:
        module: a function that builds the model, or an existing model, which is not changed.
        batch: one batch of one device, or its loader; with ``accumulate``, one of those that are summed.
        gpu: an accelerator by name, whose data sheet is used with the usual shares of its peaks.
        devices: of all nodes together.
        nodes: of ``devices / nodes`` devices each.
        strategy: as for the Trainer: ``"ddp"``, an :class:`~lightning_fasttrain.FSDP2Strategy` or a
            :class:`~lightning_fasttrain.ZeROStrategy`; several devices need one.
        techniques: the techniques, as for the Trainer.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"`` or ``"16-true"``, as in Lightning.
        accumulate: batches whose gradients are summed in a step, as ``accumulate_grad_batches`` of the Trainer.
        loss, optimizer: as for :func:`~lightning_fasttrain.predict_memory`.
        machine: instead of ``gpu`` a profile that was measured or fitted: a :class:`Machine`, or the path of its JSON.

    Returns:
        A report; print it for a table.

    Raises:
        ValueError: an unknown ``gpu`` or precision, nodes that do not divide the devices, a precision without a peak,
            a strategy or technique that offloads, or as for :func:`~lightning_fasttrain.predict_memory`.
        TypeError: as there.

    Example:
        >>> from lightning_fasttrain.step_time import predict_time
        >>> net = lambda: nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False))
        >>> report = predict_time(net, torch.zeros(8192, 4096), gpu="A100", precision="bf16-true",
        ...                       loss=lambda net, batch: net(batch).sum(), optimizer=torch.optim.SGD)
        >>> report.flops == 2 * 8192 * 4096**2 * 5  # two products in the forward, three in the backward
        True
        >>> 0.6 < report.mfu < 0.8, abs(sum(report.by_kind.values()) - report.seconds) < 1e-9
        (True, True)

    Source:
        Ours. Kernels by the roofline of Williams et al. 2009; how far predictions are from measured steps is in the
        documentation, with the command that prints it.
    """
    one_of("precision", precision, PREDICTED_PRECISIONS)
    return predict_on(
        module,
        batch,
        machine=read_machine(gpu if machine is None else machine),
        devices=devices,
        nodes=nodes,
        strategy=strategy,
        techniques=techniques,
        precision=precision,
        accumulate=accumulate,
        loss=loss,
        optimizer=optimizer,
    )


def predict_on(
    module: nn.Module | Factory,
    batch: object,
    *,
    machine: Machine,
    devices: int,
    nodes: int,
    strategy: object,
    techniques: Sequence[Technique],
    precision: str,
    accumulate: int,
    loss: Loss | None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    warms_up: bool = True,
    recorder: StepRecorder | None = None,
) -> TimeReport:
    """Predict as :func:`predict_time` does, on a machine that has been read; all other arguments are like there.

    Args:
        warms_up: as of :func:`~lightning_fasttrain.memory.predict_memory.predict_strategies`.
        recorder: of :func:`recorder_for` these techniques, for what else it keeps of the step.

    Raises:
        ValueError: a strategy or technique that offloads, and as for :func:`predict_time`.
    """
    _refuse_uneven(devices, nodes)
    if strategy is None and devices > 1:
        why = "the strategy decides what each device computes and sends"
        raise ValueError(
            explain(f"devices={devices} without strategy=", why, "Pass strategy=FSDP2Strategy(), or 'ddp'")
        )
    offloading = [technique for technique in techniques if isinstance(technique, ActivationOffload)]
    if isinstance(strategy, ShardsFakeModel) and strategy.offloads:
        offloading = [strategy, *offloading]
    if offloading:
        _refuse_offload(offloading[0])
    techniques, batch = check_together(techniques), batch_of(batch)
    recorder = recorder or recorder_for(techniques)
    (memory,) = predict_strategies(
        module,
        batch,
        [strategy],
        loss=loss,
        optimizer=optimizer,
        techniques=techniques,
        precision=precision,
        device="cuda" if machine.runs_ahead else "cpu",
        world=devices,
        accumulate=accumulate,
        recorder=recorder,
        warms_up=warms_up,
    )
    states = recorder.rank.states
    if states is not None and states.host:
        _refuse_offload(strategy)
    tf32 = uses_tf32(techniques)
    # Where values that the code reads decide shapes, the longest step.
    (longest, step), *others = simulate_recorded(recorder, machine, tf32, devices // nodes)
    shortest = min([longest.seconds, *(one.seconds for one, _ in others)])
    return _report(longest, shortest, step, memory, machine, recorder, batch, nodes, precision, tf32)


def simulate_recorded(
    recorder: StepRecorder, machine: Machine, tf32: bool, devices_per_node: int = 1
) -> list[tuple[SimulatedStep, RecordedStep]]:
    """Return the time of each step that was recorded, with the step, the longest first.

    Raises:
        ValueError: the machine has no peak of a dtype.
    """
    simulated = []
    for recorded in recorder.steps:
        step = add_collectives(recorded, recorder.rank)
        refuse_unknown_peaks(step, machine, tf32)
        simulated.append((simulate_step(step, machine, devices_per_node, tf32), step))
    return sorted(simulated, key=lambda pair: -pair[0].seconds)


def find_bounds(
    recorder: StepRecorder, machine: Machine, tf32: bool, devices_per_node: int, micro_batches: int
) -> dict[Moment, Any]:
    """Return the seconds by how late the host is at each moment of a step that was recorded, as of a timeline.

    Args:
        recorder: has recorded it.
        machine: its devices and links.
        tf32: whether products in float32 use TF32.
        devices_per_node: devices of a node.
        micro_batches: how many of the step are laid out.
    """
    bounds: dict[Moment, Any] = {}
    for recorded in recorder.steps:
        events = lay_out(add_collectives(recorded, recorder.rank), micro_batches)
        for moment, bound in Timeline(events, devices_per_node, tf32).find_bounds(machine).items():
            bounds[moment] = max(bound, bounds.get(moment, bound))
    return bounds


def _report(
    simulated: SimulatedStep,
    shortest: float,
    step: RecordedStep,
    memory: MemoryReport,
    profile: Machine,
    recorder: StepRecorder,
    batch: object,
    nodes: int,
    precision: str,
    tf32: bool,
) -> TimeReport:
    samples, tokens = count_batch(batch)
    rank = recorder.rank
    # Ranks of a tensor or context group compute one batch together.
    shared = rank.world // _data_ranks(rank)
    per_s = recorder.batches / shared / simulated.seconds
    within = profile.error_90 or 0.0
    notes = list(memory.notes)
    if profile.error is not None:
        notes.append(
            f"Such predictions were off by {profile.error:.1%} on average, 90% of them by {within:.1%} or less."
        )
    flops = step.model_flops()
    return TimeReport(
        seconds=simulated.seconds,
        low=shortest * (1 - within),
        high=simulated.seconds * (1 + within),
        tokens_per_second=tokens * per_s,
        samples_per_second=samples * per_s,
        mfu=flops / simulated.seconds / _peak(step, profile, tf32),
        by_kind=simulated.by_kind,
        hidden_seconds=simulated.hidden,
        flops=flops,
        peak_bytes=memory.peak_bytes,
        memory=memory,
        memory_gib=profile.memory_gib,
        machine=profile.name,
        source=profile.source,
        devices=rank.world,
        nodes=nodes,
        precision=precision,
        notes=(*notes, f"Machine: {profile.source}."),
    )


def _refuse_uneven(devices: int, nodes: int) -> None:
    if devices % nodes:
        fewer, more = devices // nodes * nodes, math.ceil(devices / nodes) * nodes
        nearest = f"devices={more}" if fewer == 0 else f"devices={fewer} or {more}"
        why = "each node has the same number of devices"
        raise ValueError(explain(f"devices={devices} in nodes={nodes}", why, f"Use {nearest}"))


def _refuse_offload(offloading: object) -> None:
    why = "the time of copies to host memory is not predicted"
    raise ValueError(explain(f"{type(offloading).__name__} with offload", why, "Predict it without offload"))


def refuse_unknown_peaks(step: RecordedStep, machine: Machine, tf32: bool) -> None:
    """Raises: ValueError: a machine has no peak of the dtype of a matrix product or an attention."""
    for kernel in step.kernels:
        dtype = TF32 if tf32 and kernel.kind == PRODUCT and kernel.dtype == "float32" else kernel.dtype
        if kernel.flops and dtype not in machine.peak_flops:
            what = f"{kernel.op} in {dtype} on {machine.name}"
            why = f"its profile has peaks of {', '.join(machine.peak_flops)} alone"
            way_out = "Pass precision='bf16-mixed', or a machine= whose peak_flops and product_share have this dtype"
            raise ValueError(explain(what, why, way_out))


def recorder_for(techniques: Sequence[Technique]) -> StepRecorder:
    """Return a recorder of a step with these techniques."""
    compilers = [technique for technique in techniques if technique.does(Capability.COMPILES_BLOCKS)]
    captures = any(getattr(technique, "mode", None) in WITHOUT_GRAPHS for technique in compilers)
    return StepRecorder(bool(compilers), captures)


def uses_tf32(techniques: Sequence[Technique]) -> bool:
    """Return whether products in float32 use TF32."""
    chosen = [technique.precision == "tf32" for technique in techniques if isinstance(technique, MatmulPrecision)]
    return chosen[-1] if chosen else torch.backends.cuda.matmul.fp32_precision == "tf32"


def _data_ranks(rank: OneRank) -> int:
    sharding: Any = rank.strategy.sharding_on_device if isinstance(rank.strategy, ShardsFakeModel) else None
    return rank.world if sharding is None else rank.world // sharding.ranks_per_batch


def _peak(step: RecordedStep, machine: Machine, tf32: bool) -> float:
    """Return the peak of the dtype in which most FLOPs are computed."""
    flops: dict[str, int] = {}
    for kernel in step.kernels:
        if kernel.flops:
            dtype = TF32 if tf32 and kernel.kind == PRODUCT and kernel.dtype == "float32" else kernel.dtype
            flops[dtype] = flops.get(dtype, 0) + kernel.flops
    return machine.peak_flops[max(flops, key=lambda dtype: flops[dtype])] if flops else math.inf
