"""A machine as data: what its devices and links reach, from a measurement, a fit, or data sheets and usual shares."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    check_arguments,
    one_of,
)
from lightning_fasttrain.core.messages import Report, ReportTable, explain
from lightning_fasttrain.core.safe_load import read_json
from lightning_fasttrain.step_time.accelerators import ACCELERATORS, Accelerator, find_accelerator, find_device

TF32 = "tf32"
BY_DTYPE = (
    "product_half_size",
    "attention_share",
    "attention_backward_share",
    "attention_half_length",
    "attention_backward_half_length",
)


@check_arguments
@dataclass(frozen=True)
class Link:
    """A link between devices.

    Args:
        gb_per_s: what each device can send, in 1e9 bytes/s, in one direction.
        latency_us: time that each further rank adds to a collective, in µs.
        share: the share of ``gb_per_s`` that collectives reach.
        reduce_factor: how many times as long it takes to reduce and scatter as to gather as much.
    """

    gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat
    share: PositiveShare
    reduce_factor: PositiveFloat = 1.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds in which a device sends ``nbytes``, without latency."""
        return nbytes / (self.gb_per_s * 1e9 * self.share)


@check_arguments
@dataclass(frozen=True)
class Machine(Report):
    """The rates that devices and links of a machine reach, as :func:`~lightning_fasttrain.predict_time` uses them.

    Args:
        name: for messages.
        peak_flops: dtype, as ``"bfloat16"``, ``"float32"`` or ``"tf32"`` → FLOP/s of matrix products at best.
        product_share: dtype → the share of that peak which large products reach.
        product_half_size: a product with sizes of geometric mean s reaches ``product_share · s / (s + half_size)``.
        attention_share: the share of the peak that fused attention reaches in the forward.
        attention_backward_share: the same in the backward.
        gb_per_s: memory bandwidth, in 1e9 bytes/s.
        bandwidth_share: the share of it that element-wise kernels reach.
        cache_mib: as much of what an element-wise kernel moves is in a cache, in MiB; 0 where that is not measured.
        cached_gb_per_s: what element-wise kernels reach there, in 1e9 bytes/s.
        by_dtype: dtype → values of ``product_half_size`` and of what begins with ``attention`` that differ in it.
        transcendental_ns: the least time of an element in kernels with an exponential, a logarithm or the like, in ns.
        random_ns: the same in kernels that draw random numbers; 0 where these and those are bound by memory.
        kernel_us: the least time of a kernel on the device, in µs.
        host_us: what the host needs to start a kernel, in µs.
        inside: link between devices of one node.
        between: link of each device to other nodes.
        devices_per_node: devices of a node.
        overlap: how undisturbed computing is beside a collective in a node: at 1 not at all, at 0 both take turns.
            A slower one between nodes disturbs it as much in all, by the data that it moves.
        memory_gib: memory of a device, in GiB.
        source: how these values are known.
        error: mean relative error of predictions, where it is known.
        error_90: the relative error that 90% of predictions stay below, where it is known.
        runs_ahead: whether the host starts kernels before earlier ones are done, as with a GPU.
        update_us: what the host needs for a kernel of the optimizer where it does not run ahead; None: ``host_us``.
        convolution_us: what a convolution takes longer than a product where the host does not run ahead, in µs.
        attention_half_length: attention over s tokens reaches ``attention_share · s / (s + half_length)``.
        attention_backward_half_length: the same in the backward.
        sharding_us: what the host needs for the hooks of FSDP2 around a gather or a reduction, in µs; 0 where that is
            not measured.
        fetching_us: the same for those of ZeRO-3 around a module, in its forward and backward.

    Raises:
        ValueError: ``peak_flops`` and ``product_share`` are empty, or have different keys; an unknown name in
            ``by_dtype``.

    Example:
        >>> machine = read_machine("A100")
        >>> machine.gb_per_s, machine.peak_flops["bfloat16"] / 1e12
        (2039, 312.0)
    """

    name: str
    peak_flops: Mapping[str, PositiveFloat]
    product_share: Mapping[str, PositiveShare]
    product_half_size: NonNegativeFloat
    attention_share: PositiveShare
    attention_backward_share: PositiveShare
    gb_per_s: PositiveFloat
    bandwidth_share: PositiveShare
    kernel_us: NonNegativeFloat
    host_us: NonNegativeFloat
    inside: Link
    between: Link
    devices_per_node: PositiveInt
    overlap: Share
    memory_gib: PositiveFloat
    source: str
    error: NonNegativeFloat | None = None
    error_90: NonNegativeFloat | None = None
    runs_ahead: bool = field(default=True)
    update_us: NonNegativeFloat | None = None
    convolution_us: NonNegativeFloat = 0.0
    attention_half_length: NonNegativeFloat = 0.0
    attention_backward_half_length: NonNegativeFloat = 0.0
    sharding_us: NonNegativeFloat = 0.0
    fetching_us: NonNegativeFloat = 0.0
    cache_mib: NonNegativeFloat = 0.0
    cached_gb_per_s: PositiveFloat = 1.0
    by_dtype: Mapping[str, Mapping[str, NonNegativeFloat]] = field(default_factory=dict)
    transcendental_ns: NonNegativeFloat = 0.0
    random_ns: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if not self.peak_flops or set(self.peak_flops) != set(self.product_share):
            what = f"peak_flops of {_list(self.peak_flops)} and product_share of {_list(self.product_share)}"
            way_out = 'Name the same dtypes in both, as "bfloat16" and "float32"'
            raise ValueError(explain(what, "each precision has a peak and a share of it", way_out))
        for name in (name for values in self.by_dtype.values() for name in values):
            one_of("by_dtype", name, BY_DTYPE)

    def of_dtype(self, dtype: str, name: str) -> float:
        """Return one of the values that may differ in a dtype.

        Example:
            >>> read_machine("A100").of_dtype("float32", "attention_share")
            0.4
        """
        return self.by_dtype.get(dtype, {}).get(name, getattr(self, name))

    def as_table(self) -> ReportTable:
        """Build the table of what is reached."""
        columns = {"": "name", "at best": "number", "reached": "number"}
        table = ReportTable(f"{self.name}: {self.source}", columns)
        for dtype, peak in self.peak_flops.items():
            table.add(f"products in {dtype}, TFLOP/s", f"{peak / 1e12:.4g}", f"{self.product_share[dtype]:.0%}")
        table.add("half of it at a size of", "", f"{self.product_half_size:.0f}")
        table.add("attention, of the peak", "", f"{self.attention_share:.0%}")
        table.add("backward of attention", "", f"{self.attention_backward_share:.0%}")
        table.add("memory, GB/s", f"{self.gb_per_s:.4g}", f"{self.bandwidth_share:.0%}")
        if self.cache_mib:
            share = self.cached_gb_per_s / self.gb_per_s
            table.add(f"of {self.cache_mib:.3g} MiB in a cache", f"{self.gb_per_s:.4g}", f"{share:.0%}")
        table.add("host, µs for a kernel", "", f"{self.host_us:.3g}")
        for where, link in (("in a node", self.inside), ("between nodes", self.between)):
            table.add(f"link {where}, GB/s", f"{link.gb_per_s:.4g}", f"{link.share:.0%}")
        return table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the machine to a JSON file, which :func:`read_machine` reads."""
        return write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "no dtype"


# Where only the data sheet is known: about the medians of the five profiles in examples/results/machines.
USUAL: dict[str, Any] = {
    "product_half_size": 300.0,
    "attention_share": 0.4,
    "attention_backward_share": 0.35,
    "bandwidth_share": 0.55,
    "kernel_us": 2.0,
    "host_us": 38.0,  # of the two that were fitted on ladders, which alone tell it
    "overlap": 0.7,
}
_OF_THE_FASTEST_PRODUCT = 0.9  # what large products of a model reach
_NETWORK = Link(50, 10, 0.7)  # 400 Gbit/s a device, as in NVIDIA's DGX H100
USUAL_ERROR, USUAL_ERROR_90 = 0.12, 0.24  # of the 139 rows whose errors are there
_PROFILE = 'pass machine="profile.json", which `fasttrain machine --out profile.json` writes'


def machine_of(accelerator: Accelerator) -> Machine:
    """Return the profile of an accelerator that is known by its data sheet alone, with the usual shares of its peaks.

    Nodes have eight devices, and 400 Gbit/s for each to other nodes.
    """
    peaks = {accelerator.dtype: accelerator.flops}
    if accelerator.dtype == "bfloat16":
        peaks |= {"float16": accelerator.flops, TF32: accelerator.flops / 2}
    if accelerator.float32_flops is not None:
        peaks["float32"] = accelerator.float32_flops
    return Machine(
        name=accelerator.name,
        peak_flops=peaks,
        product_share=dict.fromkeys(peaks, _OF_THE_FASTEST_PRODUCT * accelerator.fastest_product),
        gb_per_s=accelerator.bandwidth_gb_per_s,
        inside=Link(accelerator.link_gb_per_s, 3, 0.75),
        between=_NETWORK,
        devices_per_node=8,
        memory_gib=accelerator.memory_gib,
        source=f"data sheet × usual shares: {accelerator.source}",
        error=USUAL_ERROR,
        error_90=USUAL_ERROR_90,
        **USUAL,
    )


def machine_of_device(device: torch.device) -> Machine | None:
    """Return the profile of a GPU that is at hand by its data sheet; None if it is not in the table, or no GPU."""
    accelerator = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if accelerator is None else machine_of(accelerator)


@check_arguments
def read_machine(machine: str | os.PathLike[str] | Machine) -> Machine:
    """Return a machine by the name of its accelerator, or from a JSON file.

    Args:
        machine: a name, as ``"H100"``; the path of a file that :meth:`Machine.save` wrote; or a machine.

    Raises:
        ValueError: the accelerator is unknown, or the file is not a profile; the message says what is missing.
        FileNotFoundError: there is no such file.

    Example:
        >>> read_machine("h100 sxm").name
        'H100-SXM'

    Source:
        Data sheets, as of :func:`~lightning_fasttrain.estimate.find_accelerator`.
    """
    if isinstance(machine, Machine):
        return machine
    text = os.fspath(machine)
    if not text.lower().endswith(".json"):
        try:
            return machine_of(find_accelerator(text))
        except ValueError as error:
            known = ", ".join(ACCELERATORS)
            raise ValueError(
                explain(f"gpu={text!r}", "it is not in the table", f"Use {known}, or {_PROFILE}")
            ) from error
    path = Path(text)
    return _parse(read_json(path), path)


def _parse(values: Any, path: Path) -> Machine:
    way_out = "Write it with `fasttrain machine --out FILE`, or with Machine.save"
    if not isinstance(values, dict):
        raise ValueError(explain(f"{path}", f"a machine is an object, got {type(values).__name__}", way_out))
    names = [one.name for one in fields(Machine)]
    missing = [name for name in names[:16] if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        lacks = [f"it lacks {', '.join(missing)}"] if missing else []
        knows = [f"it has {', '.join(unknown)}, which no machine has"] if unknown else []
        raise ValueError(explain(f"{path}", " and ".join([*lacks, *knows]), way_out))
    try:
        links = {name: Link(**values[name]) for name in ("inside", "between")}
        return Machine(**{**values, **links})
    except (TypeError, ValueError) as error:
        raise ValueError(explain(f"{path}", str(error).rstrip("."), way_out)) from error


def collective_seconds(kind: str, nbytes: int, ranks: Sequence[int], machine: Machine, devices_per_node: int) -> float:
    """Return the seconds of a collective in a ring of ``ranks``, which lie ``devices_per_node`` to a node.

    Args:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or ``"broadcast"``.
        nbytes: size of the unsharded tensor.
        ranks: the ranks that take part.
        machine: whose links are used.
        devices_per_node: devices of a node.

    Example:
        >>> machine = read_machine("H100")
        >>> bandwidth = machine.inside.gb_per_s * machine.inside.share * 1e9
        >>> seconds = collective_seconds("all-gather", 8 * 10**9, range(8), machine, 8)
        >>> abs(seconds - 7e9 / bandwidth - 7 * machine.inside.latency_us * 1e-6) < 1e-12
        True

    Source:
        Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH". Between nodes, each device
        sends its part of what its node sends.
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    nodes = len({rank // devices_per_node for rank in ranks})
    inside = math.ceil(count / nodes)
    passes = {"all-reduce": 2.0, "reduce-scatter": machine.inside.reduce_factor}.get(kind, 1.0)
    sent = 0.0
    if inside > 1:
        sent = machine.inside.seconds(nbytes * (count - 1) / count)
    if nodes > 1:
        sent = max(sent, machine.between.seconds(nbytes * (nodes - 1) / nodes / inside))
    steps_between = nodes if nodes > 1 else 0
    latency = (count - 1 - steps_between) * machine.inside.latency_us + steps_between * machine.between.latency_us
    return passes * (sent + max(latency, 0.0) * 1e-6)
