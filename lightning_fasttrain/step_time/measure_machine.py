"""Measure the machine at hand: products, attention, element-wise kernels, the host, and links between its ranks."""

import functools
import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.device import hardware, time_ms
from lightning_fasttrain.core.host.deepspeed import enter_deepspeed, import_deepspeed, without_needless_ops
from lightning_fasttrain.core.messages import describe_error, note_once
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.step_time.accelerators import ACCELERATORS
from lightning_fasttrain.step_time.machine import TF32, USUAL, Link, Machine, collective_seconds, machine_of
from lightning_fasttrain.step_time.record_step import RecordedStep, StepRecorder
from lightning_fasttrain.step_time.simulate_step import Timeline

_SECONDS_EACH = 0.4  # of one measurement, about
_BYTES = {"cpu": 2**26, "cuda": 2**29}  # of the tensors that element-wise kernels read
_CACHED_BYTES = tuple(2**power for power in (18, 20, 22, 24))  # of those that may be in a CPU's cache
_LENGTHS = {"cpu": (64, 128, 256), "cuda": (512, 1024, 2048)}  # of attention
_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
_SHARDED_RUNS = 24
_UNKNOWN_LINK = Link(1, 100, 1.0)  # gloo on one machine is of this order


@check_arguments
def measure_machine(device: str | None = None) -> Machine:
    """Measure what a device reaches, in about 25 seconds; where torchrun started several ranks, their link too.

    Products are measured by size and attention with its backward, in each precision; bandwidth as a mean of
    element-wise kernels, which of a CPU are measured by size, too; and the host by a step of a small network, whose
    kernels are counted. Run it on an idle machine.

    Args:
        device: ``"cpu"`` or ``"cuda"``; by default a GPU where there is one.

    Returns:
        The machine, for ``machine=`` of :func:`~lightning_fasttrain.predict_time`; all ranks return the same.

    Raises:
        ValueError: there is no such device.

    Example:
        >>> machine = measure_machine("cpu")  # doctest: +SKIP
        >>> machine.save("here.json")  # doctest: +SKIP

    Source:
        Ours.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in _BYTES or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: expected 'cpu', or 'cuda' where there is a GPU. Leave it out.")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    with _ranks(kind), isolate_rng(include_cuda=kind == "cuda"):
        machine = _measure(place)
        if dist.is_initialized():
            everywhere: list[Machine | None] = [machine]
            dist.broadcast_object_list(everywhere, src=0)
            assert everywhere[0] is not None
            machine = everywhere[0]
    return machine


@contextmanager
def _ranks(kind: str) -> Iterator[None]:
    """Join the other ranks, if torchrun has started some and they are not joined yet."""
    joins = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield
    finally:
        if joins:
            dist.destroy_process_group()


def _measure(device: torch.device) -> Machine:
    on_cuda = device.type == "cuda"
    name = str(hardware()["gpu"] if on_cuda else hardware()["cpu"])
    peaks, by_dtype = _measure_precisions(device)
    values = by_dtype.pop("bfloat16" if on_cuda else "float32")
    copied = _measure_bandwidth(device)
    reached = _measure_elementwise(device, _BYTES[device.type])
    # A GPU computes while it moves; its caches are not measured.
    bounds = {} if on_cuda else {**_measure_cache(device, reached), **_measure_elements(device)}
    memory = hardware()["gpu_memory_gib"] if on_cuda else hardware()["ram_gib"]
    link, source = _measure_link(device), f"measured here: {name}, torch {torch.__version__}"
    if link is None:
        source = f"{source}; links are not measured, which needs ranks: torchrun --nproc-per-node N"
    # Not measured: on a GPU what is usual.
    taken = {name: USUAL[name] * on_cuda for name in ("kernel_us", "overlap")}
    inside = between = _UNKNOWN_LINK
    for accelerator in ACCELERATORS.values():
        if on_cuda and accelerator.name.split("-")[0] in name:
            sheet = machine_of(accelerator)
            inside, between = sheet.inside, sheet.between
            break
    machine = Machine(
        name=name,
        peak_flops=peaks,
        product_share=dict.fromkeys(peaks, 1.0),
        **values,
        gb_per_s=copied,
        bandwidth_share=min(reached / copied, 1.0),
        host_us=0.0,
        inside=link or inside,
        between=between,
        devices_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count() or 8)),
        memory_gib=memory or 1.0,
        source=source,
        runs_ahead=on_cuda,
        by_dtype=by_dtype,
        **taken,
        **bounds,
    )
    machine = replace(machine, **_measure_host(device, machine), sharding_us=_measure_sharding(device, machine))
    fetching_us = _measure_fetching(device, machine)
    return replace(machine, convolution_us=_measure_convolutions(device, machine), fetching_us=fetching_us)


def _measure_precisions(device: torch.device) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the FLOP/s of products by dtype, and what else depends on it, as in ``by_dtype`` of :class:`Machine`."""
    on_cuda = device.type == "cuda"
    peaks: dict[str, float] = {}
    by_dtype: dict[str, dict[str, float]] = {}
    for word, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        peaks[word], half = _measure_products(device, dtype)
        by_dtype[word] = {"product_half_size": half}
        if word == "bfloat16" or not on_cuda:
            by_dtype[word] |= _measure_attention(device, dtype, peaks[word])
    if on_cuda:
        peaks["float16"] = _measure_products(device, torch.float16)[0]
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        peaks[TF32] = _measure_products(device, torch.float32)[0]
        torch.set_float32_matmul_precision(before)
    return peaks, by_dtype


def _usual_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the mean seconds of ``run``, repeated for a while after a first time that warms up.

    The least and the median would be too good: the time of a step is the sum of its kernels, with those that are late.
    Ranks measure at the same time, as they train, since they share the cores and the memory of a host.
    """
    run()
    if dist.is_initialized():
        dist.barrier(device_ids=None if device.index is None else [device.index])
    taken, until = [time_ms(device, run)], time.perf_counter() + _SECONDS_EACH
    while time.perf_counter() < until:
        taken.append(time_ms(device, run))
    return statistics.fmean(taken) / 1e3


def _draw(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    # Distinct values, since products of equal values take less power; the run's generator is not advanced.
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, dtype=dtype, generator=generator)


def _draw_many(device: torch.device, *shape: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Return tensors in turn, of which no cache holds all: most of what a step reads was not read just before."""
    count = max(4, _BYTES[device.type] // (math.prod(shape) * dtype.itemsize))
    return itertools.cycle(_draw(device, count, *shape, dtype=dtype))


def _measure_products(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of large products, and the size of those that reach half of it."""
    sides, per_flop = [], []
    for side in _SIDES[device.type]:
        matrices = _draw_many(device, side, side, dtype=dtype)
        seconds = _usual_seconds(device, lambda matrices=matrices: torch.mm(next(matrices), next(matrices)))
        sides.append(side)
        per_flop.append(seconds / (2 * side**3))
    return _fit_half(sides, [1 / seconds for seconds in per_flop])


def _fit_half(sizes: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """Return what is reached at large sizes, and the size that reaches half of it.

    Seconds of a FLOP are (1 + half / size) / peak; all sizes decide both, by the squares of logarithms.
    """
    logs, at = numpy.log(numpy.array(rates)), numpy.array(sizes)
    halves = numpy.linspace(0, 4 * at[1], 257)
    peaks = logs + numpy.log(1 + halves[:, None] / at)  # by each size
    best = int(numpy.argmin(peaks.var(1)))
    return float(numpy.exp(peaks[best].mean())), float(halves[best])


def _measure_attention(device: torch.device, dtype: torch.dtype, peak: float) -> dict[str, float]:
    """Return the share of ``peak`` that attention over many tokens reaches, and over how many it reaches half of it."""
    lengths = _LENGTHS[device.type]
    forward, backward = zip(*(_time_attention(device, dtype, length) for length in lengths), strict=True)
    found = {}
    for name, rates in (("attention", forward), ("attention_backward", backward)):
        most, half = _fit_half(lengths, rates)
        found |= {f"{name}_share": min(most / peak, 1.0), f"{name}_half_length": half}
    return found


def _time_attention(device: torch.device, dtype: torch.dtype, length: int) -> tuple[float, float]:
    """Return the FLOP/s of attention in the forward and in the backward, on a GPU of causal attention."""
    on_cuda = device.type == "cuda"
    heads, width, tokens = (16, 64, 2**14) if on_cuda else (8, 64, 2**10)
    shape = (tokens // length, heads, length, width)
    inputs = query, key, value = [_draw(device, *shape, dtype=dtype).requires_grad_() for _ in range(3)]
    flops = 4 * tokens * heads * length * width / (1 + on_cuda)
    attend = functools.partial(F.scaled_dot_product_attention, query, key, value, is_causal=on_cuda)
    forward, attended = _usual_seconds(device, attend), attend()
    gradient = torch.ones_like(attended)
    backward = _usual_seconds(device, lambda: torch.autograd.grad(attended, inputs, gradient, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


def _measure_bandwidth(device: torch.device) -> float:
    """Return the 1e9 bytes/s of a copy."""
    values = torch.ones(_BYTES[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(values)
    return 2 * values.nbytes / _usual_seconds(device, lambda: into.copy_(values)) / 1e9


def _measure_elementwise(device: torch.device, nbytes: int) -> float:
    """Return the mean 1e9 bytes/s of element-wise kernels that read so many bytes."""
    values, moved = _draw_many(device, nbytes // 4096, 1024, dtype=torch.float32), 2 * nbytes
    kernels: list[tuple[int, Callable[[], object]]] = [
        (moved, lambda: torch.add(next(values), 1)),
        (moved, lambda: F.relu(next(values))),
        (moved, lambda: F.layer_norm(next(values), (1024,))),
        (moved * 3 // 4, lambda: next(values).to(torch.bfloat16)),
    ]
    seconds = sum(_usual_seconds(device, kernel) for _, kernel in kernels)
    return sum(size for size, _ in kernels) / seconds / 1e9


def _measure_cache(device: torch.device, reached: float) -> dict[str, float]:
    """Return the MiB that kernels have in a cache, and what they reach there, by kernels of several sizes."""
    moved = numpy.array([2.0 * nbytes for nbytes in _CACHED_BYTES])
    rates = numpy.array([_measure_elementwise(device, nbytes) for nbytes in _CACHED_BYTES])
    cached, seconds = float(rates.max()), moved / rates
    sizes = numpy.geomspace(moved[0] / 2, moved[-1], 49)
    inside = numpy.minimum(moved, sizes[:, None])
    misses = numpy.log((inside / cached + (moved - inside) / reached) / seconds)
    best = int(numpy.argmin((misses**2).sum(1)))
    return {"cache_mib": float(sizes[best]) / 2**20, "cached_gb_per_s": cached} if cached > reached else {}


def _measure_elements(device: torch.device) -> dict[str, float]:
    """Return the ns that an element takes in kernels with an exponential, as a mean, and in those of random numbers."""
    values = _draw(device, 1024, 1024, dtype=torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    kernels: list[Callable[[], object]] = [
        lambda: torch.tanh(values),
        lambda: F.gelu(values),
        lambda: F.log_softmax(values, dim=1),
    ]
    computed = sum(_usual_seconds(device, kernel) for kernel in kernels) / len(kernels)
    drawn = _usual_seconds(device, lambda: torch.empty_like(values).bernoulli_(0.9, generator=generator))
    return {"transcendental_ns": computed / values.numel() * 1e9, "random_ns": drawn / values.numel() * 1e9}


class _SmallBlock(nn.Module):
    """A block of a transformer, with the views that one has, and hardly any work."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(16), nn.LayerNorm(16)
        self.into_heads, self.out_of_heads = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.into_heads(self.norm_attention(hidden)).unflatten(-1, (3, 2, 8))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out_of_heads(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norm_mlp(hidden))


_SMALL_BLOCKS = 8


def _build_small() -> nn.Sequential:
    return nn.Sequential(*[_SmallBlock() for _ in range(_SMALL_BLOCKS)])


def _mean_of(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).mean()


def _record(build: Callable[[], nn.Module], batch: Tensor) -> RecordedStep:
    """Return the step of a network, as it is predicted."""
    recorder = StepRecorder()
    settings = {"loss": _mean_of, "optimizer": torch.optim.AdamW, "device": batch.device.type, "recorder": recorder}
    predict_strategies(build, batch, [None], **settings)
    return recorder.steps[-1]


def _measure_host(device: torch.device, machine: Machine) -> dict[str, float]:
    """Return the µs that the host needs for a kernel, by a step of a network whose kernels have hardly any work.

    Where it does not run ahead, it needs less for those of the optimizer, which have no graph.
    """
    batch = torch.ones(2, 4, 16, device=device)
    recorded, net = _record(_build_small, batch), _build_small().to(device)
    optimizer = torch.optim.AdamW(net.parameters())

    def backward() -> None:
        _mean_of(net, batch).backward()

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    events, update = recorded.events, recorded.update
    if machine.runs_ahead:
        return {"host_us": _usual_seconds(device, step) / len(events) * 1e6}
    found = {}
    for name, part, run in (("host_us", events[:update], backward), ("update_us", events[update:], optimizer.step)):
        seconds = _usual_seconds(device, run) - Timeline(part, 1).simulate(machine).seconds
        found[name] = max(seconds, 0.0) / len(part) * 1e6
    return found


def _measure_convolutions(device: torch.device, machine: Machine) -> float:
    """Return the µs that small convolutions take longer than their FLOPs as products; 0 where the host runs ahead."""
    if machine.runs_ahead:
        return 0.0

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)])

    batch, net = torch.ones(8, 32, 4, 4, device=device), build().to(device)
    recorded = _record(build, batch)
    events = recorded.events[: recorded.update]
    seconds = _usual_seconds(device, lambda: _mean_of(net, batch).backward())
    longer = seconds - Timeline(events, 1).simulate(machine).seconds
    return max(longer, 0.0) / sum(kernel.convolutions for kernel in recorded.kernels) * 1e6


def _measure_sharding(device: torch.device, machine: Machine) -> float:
    """Return the µs of FSDP2's hooks around a collective, by a network with blocks sharded or not; 0 for one rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return 0.0
    ranks = range(dist.get_world_size())
    mesh = init_device_mesh(device.type, (len(ranks),))
    plain, sharded = _build_small().to(device), _build_small().to(device)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    batch = torch.ones(2, 4, 16, device=device)
    seconds = [_sharded_seconds(device, lambda net=net: _mean_of(net, batch).backward()) for net in (plain, sharded)]
    nbytes = sum(parameter.nbytes for parameter in plain[0].parameters())
    kinds = "all-gather", "all-gather", "reduce-scatter"  # in the forward, and in the backward
    sent = sum(collective_seconds(kind, nbytes, ranks, machine, len(ranks)) for kind in kinds)
    return max((seconds[1] - seconds[0]) / _SMALL_BLOCKS - sent, 0.0) / len(kinds) * 1e6


def _sharded_seconds(device: torch.device, run: Callable[[], object]) -> float:
    # As many in each rank, whose collectives belong together.
    return statistics.fmean([time_ms(device, run) for _ in range(_SHARDED_RUNS)][2:]) / 1e3


def _measure_fetching(device: torch.device, machine: Machine) -> float:
    """Return the µs of ZeRO-3's hooks around a module, by a network with them or not; 0 for one rank.

    Its parameters are so small that each rank keeps them whole.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() < 2
    if is_alone or "LOCAL_RANK" not in os.environ:  # of which DeepSpeed asks its launcher, or torchrun
        return 0.0
    try:
        import_deepspeed()
    except Exception as error:  # it is not installed, or does not find what it compiles with
        note_once(f"What ZeRO-3's hooks take is not measured: {describe_error(error)}")
        return 0.0
    plain, batch = _build_small().to(device), torch.ones(2, 4, 16, device=device)
    with _build_engine(_build_small().to(device)) as engine:
        seconds = _sharded_seconds(device, lambda: engine.backward(_mean_of(engine, batch)))
    seconds -= _sharded_seconds(device, lambda: _mean_of(plain, batch).backward())
    nbytes, ranks = sum(parameter.nbytes for parameter in plain.parameters()), range(dist.get_world_size())
    sent = collective_seconds("reduce-scatter", nbytes, ranks, machine, len(ranks))
    return max(seconds - sent, 0.0) / sum(1 for _ in plain.modules()) * 1e6


@contextmanager
def _build_engine(net: nn.Module) -> Iterator[Any]:
    """Yield an engine of ZeRO-3, and leave nothing global changed."""
    deepspeed = import_deepspeed()
    leave = enter_deepspeed(next(net.parameters()).device.type)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    settings = {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "config": config}
    try:
        # From torch 2.13 on, collectives that DeepSpeed calls have new names.
        with warnings.catch_warnings(action="ignore", category=FutureWarning), without_needless_ops():
            engine, *_ = deepspeed.initialize(**settings, dist_init_required=False)
            yield engine
            engine.destroy()
    finally:
        leave()


def _measure_link(device: torch.device) -> Link | None:
    """Return the link between the ranks, by collectives of little and of much; None where there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    count = dist.get_world_size()
    gathers, reductions = [], []
    for numel in (256, _BYTES[device.type] // 16):
        shard = torch.ones(numel, device=device)
        whole = torch.ones(numel * count, device=device)
        for seconds, run in (
            (gathers, functools.partial(dist.all_gather_into_tensor, whole, shard)),
            (reductions, functools.partial(dist.reduce_scatter_tensor, shard, whole)),
        ):
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # from 2.13 on they have new names
                seconds.append(statistics.median(time_ms(device, run) for _ in range(8)) / 1e3)
    little, much = gathers
    sent = 4 * (_BYTES[device.type] // 16) * (count - 1)
    rate = sent / max(much - little, 1e-9) / 1e9
    return Link(rate, little / (count - 1) * 1e6, 1.0, reduce_factor=reductions[1] / much)
