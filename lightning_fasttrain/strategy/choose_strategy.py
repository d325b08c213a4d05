"""Choice among DDP, FSDP2 and the stages of ZeRO: the strategy that fits and moves the fewest bytes."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch import nn
from torch.optim import Muon, Optimizer

from lightning_fasttrain.core.checks import Batch, PositiveFloat, PositiveInt, check_arguments, one_of, require
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import Report, ReportTable, explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.memory.fake_step import fake_model
from lightning_fasttrain.optim.named.build_optimizer import NamedOptimizer, is_known
from lightning_fasttrain.optim.named.muon import MuonAdamW
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.shard_blocks import has_own_kernels
from lightning_fasttrain.strategy.memory_limits import (
    Fit,
    Limits,
    check_headroom,
    find_nearest,
    fits_table,
    gib,
    name_leaner_ways,
    predict_fits,
)
from lightning_fasttrain.strategy.traffic import Moved, Traffic
from lightning_fasttrain.strategy.zero.zero_states import (
    Held,
    MakeOptimizer,
    ZeROSizes,
    ZeROStage,
    held_by,
    make_optimizer,
    refuse_unshardable,
    usual_sizes,
)
from lightning_fasttrain.strategy.zero.zero_strategy import ZeROStrategy
from lightning_fasttrain.technique import Surgery, Technique
from lightning_fasttrain.technique.declarations import PredictedStep

# The simplest strategy first, which decides between those that move about as many bytes. Stage 0 of ZeRO is DDP.
CANDIDATES = ("ddp", "fsdp2", "zero-1", "zero-2", "zero-3", "fsdp2+offload", "zero-2+offload", "zero-3+offload")
"""Names of the strategies among which :func:`choose_strategy` chooses."""
_ABOUT = 1.1  # traffic within this factor counts as equal


@dataclass(frozen=True)
class Candidate(Fit):
    """A strategy with its predicted memory and traffic, and the memory that it lacks; host memory is on each node.

    Args:
        traffic: bytes that a rank moves in a step.
        rounds: whether gradients are reduced in lower precision than under the other strategies.
    """

    traffic: Traffic
    rounds: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, in bytes, for JSON."""
        return {
            "name": self.name,
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "host_bytes": self.memory.host_bytes,
            "at_peak": self.memory.at_peak,
            "phase": self.memory.phase,
            "short": self.short,
            "short_of_host": self.short_of_host,
            "traffic": asdict(self.traffic),
            "rounds": self.rounds,
        }


@dataclass(frozen=True)
class StrategyChoice(Report):
    """The chosen strategy, and the predicted memory and traffic of every candidate.

    Args:
        name: ``"ddp"``, ``"fsdp2"``, ``"fsdp2+offload"`` or ``"zero-…"`` with its stage.
        candidates: all strategies that were considered.
        why: the reason, in one sentence.
        devices: total number of devices.
        nodes: number of machines.
        precision: Lightning's name of the precision.
        usable_bytes: usable bytes of each device, without ``headroom``.
        sizes: DeepSpeed's bucket sizes, as assumed in the prediction.
        notes: assumptions, and strategies that were left out.
    """

    name: str
    candidates: tuple[Candidate, ...]
    why: str
    devices: int
    nodes: int
    precision: str
    usable_bytes: int
    sizes: ZeROSizes
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate:
        """Candidate that was chosen."""
        return next(candidate for candidate in self.candidates if candidate.name == self.name)

    def strategy(self, **settings: Any) -> Strategy | str:
        """Return a new strategy for ``L.Trainer(strategy=…)``; for DDP on one device, ``"auto"``.

        The Trainer's ``devices=`` is the number of devices of one node. The prediction holds for the planned number of
        processes only: with another number the strategy raises ``ValueError`` before the process group is set up.

        Args:
            settings: further arguments of the strategy's class.
        """
        kind, _, stage = self.name.partition("-")
        if kind == "ddp":
            if self.devices == 1:
                return "auto"
            made: DDPStrategy | FSDP2Strategy | ZeROStrategy = DDPStrategy(**settings)
        elif kind.startswith("fsdp2"):
            made = FSDP2Strategy(**{"offload": "cpu" if kind.endswith("offload") else None, **settings})
        else:
            made = ZeROStrategy(stage=stage, **{"reduce_bucket_size": self.sizes.reduce_bucket, **settings})
        # Set on the instance, so that it is called first: setup_environment joins the process group.
        made.setup_environment = functools.partial(_refuse_other_devices, made, self.name, self.devices)
        return made

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, in bytes, for JSON."""
        return {
            "chosen": self.name,
            "why": self.why,
            "devices": self.devices,
            "nodes": self.nodes,
            "precision": self.precision,
            "usable_bytes": self.usable_bytes,
            "sizes": asdict(self.sizes),
            "notes": list(self.notes),
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }

    def as_table(self) -> ReportTable:
        """Build the table of each candidate's memory on one rank and traffic per step, in GiB."""
        where = f"{self.devices} devices"
        if self.nodes > 1:
            where = f"{where} in {self.nodes} nodes"
        usable = f"On each device {gib(self.usable_bytes)} GiB are usable."
        title = f"{where}, {self.precision}: GiB at the peak of one rank, and GiB that it moves in a step"
        verdicts, to_ranks, to_host = [], [], []
        for row in self.candidates:
            to_ranks.append(gib(row.traffic.ranks))
            to_host.append(gib(row.traffic.host))
            verdict = "yes"
            if row.short:
                verdict = f"no, {gib(row.short)} over"
            elif not row.fits:
                verdict = f"no, {gib(row.short_of_host)} over in host"
            verdicts.append(verdict)
        columns = {"to ranks": to_ranks, "to host": to_host, "fits": verdicts}
        return fits_table(title, [self.why, usable, *self.notes], self.candidates, self.name, columns)


def _refuse_other_devices(strategy: ParallelStrategy, name: str, devices: int) -> None:
    """Refuse another number of processes than planned, then run the class's own ``setup_environment``."""
    processes = strategy.num_nodes * strategy.num_processes
    if processes != devices:
        what = f"{name} was chosen for {devices} devices, and the Trainer has {processes}"
        why = "the memory of each rank depends on the number of devices"
        raise ValueError(explain(what, why, f"Choose again with devices={processes}, or give the Trainer {devices}"))
    # The class's method is called, since this function replaces the instance's.
    type(strategy).setup_environment(strategy)


@check_arguments
def choose_strategy(
    module: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    devices: PositiveInt = 1,
    *,
    memory_gib: PositiveFloat | None = None,
    loss: Callable[[Any, Any], object] | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    techniques: Sequence[Technique] = (),
    nodes: PositiveInt = 1,
    precision: str = "32-true",
    device: str = "cuda",
    strategies: Sequence[str] = CANDIDATES,
    host_gib: PositiveFloat | None = None,
    headroom: float = 0.1,
    tell: Callable[[str], object] | None = None,
) -> StrategyChoice:
    """Choose a strategy for training on several devices: DDP, FSDP2, or a stage of ZeRO, with or without offload.

    Among the strategies that fit, the one that moves the fewest bytes in a step is chosen; strategies within 10% of
    it count as equal, and the simplest of them is chosen. A strategy that reduces gradients in lower precision is
    chosen only if no other fits: ZeRO under "bf16-mixed" reduces in bfloat16, where DDP and FSDP2 reduce in float32.
    A byte to the host counts like a byte to another rank; the speed of the links is not considered. The memory of each
    is that of :func:`~lightning_fasttrain.predict_memory` with ``strategy=`` and ``world=devices``.

    Args:
        module: the model (real, on ``"meta"``, or of fake tensors), or a function that builds it; nothing is
            allocated.
        batch: one rank's batch, as the loader yields it; only shapes and dtypes matter.
        devices: total number of devices, over all nodes.
        memory_gib: memory of each device; by default the free memory of the current GPU.
        loss: (module, batch) → loss, instead of ``training_step``.
        optimizer: the optimizer in use, or a function of the parameters that makes it; by default the
            LightningModule's.
        techniques: the techniques, as for the Trainer.
        nodes: number of machines, with equally many devices in each.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        device: the device whose allocator and kernels are assumed, ``"cuda"`` or ``"cpu"``; neither is used.
        strategies: the names to choose among, the simplest first.
        host_gib: host memory of a node that training may use; None means enough.
        headroom: fraction of each device's memory that is left for usage that is not predicted.
        tell: called with the progress, in words; traces of large models take seconds.

    Returns:
        The choice. Its ``strategy()`` makes a strategy for the Trainer; its ``as_table()`` shows the comparison.

    Raises:
        ValueError: nothing fits (with the shortfall), a strategy is unknown, ``devices`` is not a multiple of
            ``nodes``, memory is not positive or is missing without a GPU, or the optimizer cannot be sharded.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])
        >>> adam = torch.optim.AdamW(net.parameters())
        >>> batch, loss = torch.zeros(2, 512), lambda net, batch: net(batch).sum()
        >>> choice = choose_strategy(net, batch, 4, memory_gib=0.025, loss=loss, optimizer=adam, device="cpu")
        >>> choice.name, choice.chosen.device_bytes < 0.025 * 2**30
        ('fsdp2', True)
        >>> print(choice.why)
        fsdp2 fits with ... GiB of ... GiB on each device and moves ... MiB a step; ddp would ...

    Source:
        Ours; see :func:`~lightning_fasttrain.predict_memory` and
        :func:`~lightning_fasttrain.strategy.predict_traffic`.
    """
    _check_devices(devices, nodes)
    check_headroom(headroom)
    for name in strategies:
        one_of("strategies", name, CANDIDATES)
    usable = int(_memory_of(memory_gib) * (1 - headroom))
    limits = Limits(usable, _in_bytes(host_gib), devices // nodes)
    compared = compare_strategies(
        module,
        batch,
        devices,
        limits,
        strategies,
        loss=loss,
        optimizer=optimizer,
        techniques=techniques,
        precision=precision,
        device=device,
        tell=tell,
    )
    candidates = compared.candidates
    best = pick_best(candidates)
    if best is None:
        raise ValueError(_nothing_fits(candidates, limits, devices, precision))
    why = _explain_choice(best, candidates, limits)
    return StrategyChoice(
        best.name, candidates, why, devices, nodes, precision, usable, compared.sizes, compared.left_out
    )


@dataclass(frozen=True)
class Compared:
    """The candidates of a comparison, DeepSpeed's sizes, and why strategies were left out."""

    candidates: tuple[Candidate, ...]
    sizes: ZeROSizes
    left_out: tuple[str, ...]


def compare_strategies(
    module: nn.Module | Callable[[], nn.Module],
    batch: object,
    devices: int,
    limits: Limits,
    strategies: Sequence[str] = CANDIDATES,
    *,
    loss: Callable[[Any, Any], object] | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    techniques: Sequence[Technique] = (),
    precision: str = "32-true",
    device: str = "cuda",
    tell: Callable[[str], object] | None = None,
) -> Compared:
    """Predict memory and traffic of each strategy, as for :func:`choose_strategy`, without choosing.

    Raises:
        ValueError: none of ``strategies`` supports the optimizer and the model; what the step raises, without FSDP2.
    """
    with _measure(module, optimizer, devices, precision, techniques) as held:
        family, why = unfit_family(held.optimizer)
        left_out = {family: why} if family else {}
        if next(quantized_tensors(held.net), None) is not None:
            left_out["fsdp2"] = "FSDP2 is left out: its memory with quantised weights cannot be predicted."
        sizes = usual_sizes(held)
        own = held.as_torch_does(precision)
        moved = Moved(held, own, precision, _count_micro_batches(techniques, batch), sizes)
        traffic = {}
        for name in strategies:
            if not name.startswith(tuple(left_out)):
                traffic[name] = moved.predict(name)
    settings = {"optimizer": optimizer, "precision": precision, "device": device, "world": devices, "loss": loss}
    step = {"module": module, "batch": batch, "techniques": techniques, **settings}
    fits, unsupported = _predict_families({name: _make(name, sizes) for name in traffic}, limits, step, tell)
    left_out |= unsupported
    if not fits:
        why = " ".join(left_out.values())
        raise ValueError(explain(f"strategies={tuple(strategies)!r}", why, "Use other strategies, such as 'ddp'"))
    candidates = []
    for name in filter(fits.__contains__, strategies):
        rounds = precision == "bf16-mixed" and name.startswith("zero") and devices > 1
        candidates.append(Candidate(**vars(fits[name]), traffic=traffic[name], rounds=rounds))
    return Compared(tuple(candidates), sizes, tuple(left_out.values()))


def _predict_families(
    strategies: Mapping[str, object],
    limits: Limits,
    step: Mapping[str, Any],
    tell: Callable[[str], object] | None,
) -> tuple[dict[str, Fit], dict[str, str]]:
    """Predict the strategies that leave the model as it is, then FSDP2; return the fits, and why it is left out."""
    fits: dict[str, Fit] = {}
    # In this order, since what the step raises without sharding is the user's own error.
    for says, prefix in (("DDP and ZeRO", ("ddp", "zero")), ("FSDP2", ("fsdp2",))):
        named = {name: strategy for name, strategy in strategies.items() if name.startswith(prefix)}
        if not named:
            continue
        if tell is not None:
            tell(f"a step under {says}")
        try:
            fits.update((fit.name, fit) for fit in predict_fits(named, limits, **step))
        except Exception as error:
            if not fits:
                raise
            return fits, {"fsdp2": f"FSDP2 is left out: a step under it cannot be predicted ({error})."}
    return fits, {}


@contextmanager
def _measure(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None,
    devices: int,
    precision: str,
    techniques: Sequence[Technique],
) -> Iterator[Held]:
    """Yield the sizes of the model that is trained: with its adapters, if techniques add some."""
    adding = [technique for technique in techniques if technique.surgery in (Surgery.QUANTIZE, Surgery.ADAPT)]
    if isinstance(optimizer, Optimizer) or not adding:
        yield held_by(module, optimizer, devices, precision)
        return
    with fake_model(module, adding) as net:
        yield Held(net, make_optimizer(net, optimizer), devices, precision != "32-true")


def unfit_family(optimizer: Optimizer) -> tuple[str, str]:
    """Return ``"zero"`` or ``"fsdp2"`` if ``optimizer`` does not work under those strategies, and the reason.

    Raises:
        ValueError: the optimizer works under neither.
    """
    kind = type(optimizer)
    # FSDP2 shards matrices by rows, which the optimizer gathers.
    if issubclass(kind, MuonAdamW | Muon):
        return "zero", f"ZeRO is left out: {kind.__name__} needs whole matrices, and ZeRO gives it flat shards."
    refuse_unshardable(optimizer)
    if has_own_kernels(optimizer):
        return "fsdp2", f"FSDP2 is left out: the kernels of {kind.__name__} do not work on its parameters."
    return "", ""


def _count_micro_batches(techniques: Sequence[Technique], batch: object) -> int:
    """Return how many forward and backward passes an optimizer step has."""
    planned = PredictedStep()
    for technique in techniques:
        technique.predict(planned)
    return len(planned.split(batch)) * planned.window


def _make(name: str, sizes: ZeROSizes) -> object:
    """Return what stands for a strategy in a prediction."""
    kind, _, stage = name.partition("-")
    if kind == "zero":
        return ZeROStage(stage, sizes)
    if kind == "ddp":
        return DDPStrategy()
    return FSDP2Strategy(offload="cpu" if kind.endswith("offload") else None)


def _check_devices(devices: int, nodes: int) -> None:
    if devices % nodes:
        why = "every node must have the same number of devices"
        raise ValueError(explain(f"devices={devices} in nodes={nodes}", why, f"Use a multiple of {nodes} devices"))


def _memory_of(memory_gib: float | None) -> float:
    if memory_gib is not None:
        return memory_gib * GIB
    if not torch.cuda.is_available():
        why = "there is no GPU whose memory could be read"
        raise ValueError(explain("memory_gib=None", why, "Give the memory of one device: memory_gib=80"))
    return torch.cuda.mem_get_info()[0]


def pick_best(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the simplest of those that fit and move the fewest bytes; None if none fits."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    fitting = [candidate for candidate in fitting if not candidate.rounds] or fitting
    least = min((candidate.traffic.total for candidate in fitting), default=0)
    return next((candidate for candidate in fitting if candidate.traffic.total <= least * _ABOUT), None)


def _explain_choice(best: Candidate, candidates: Sequence[Candidate], limits: Limits) -> str:
    moves = "moves nothing"
    if best.traffic.total:
        moves = f"moves {_size(best.traffic.total)} a step"
    why = f"{best.name} fits with {limits.describe(best)} and {moves}"
    less = [c for c in candidates if c.traffic.total * _ABOUT < best.traffic.total]
    large = [c for c in less if not c.fits]
    if not less:
        return f"{why}, and no simpler strategy moves less."
    if not large:
        return f"{why}; {less[0].name} would move less but reduce gradients in bfloat16."
    least = min(large, key=lambda c: c.traffic.total)
    return f"{why}; {least.name} would move less but is {least.over}."


def _nothing_fits(candidates: Sequence[Candidate], limits: Limits, devices: int, precision: str) -> str:
    nearest = find_nearest(candidates)
    what = f"Nothing fits, the nearest is {nearest.name}"
    return limits.explain_shortage(what, nearest, "on each node", name_leaner_ways([], precision, devices))


def _size(nbytes: int) -> str:
    if nbytes < GIB:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{gib(nbytes)} GiB"


def _in_bytes(size_gib: float | None) -> int | None:
    if size_gib is None:
        return None
    return int(size_gib * GIB)


def optimizer_named(name: str) -> MakeOptimizer:
    """Return a function of the parameters that builds the optimizer of that name.

    The name is one that :func:`~lightning_fasttrain.build_optimizer` knows, or a class in torch or bitsandbytes;
    ``"sgd-momentum"`` is SGD with momentum 0.9.

    Raises:
        ValueError: there is no optimizer of that name.

    Example:
        >>> optimizer_named("nadam")([nn.Parameter(torch.zeros(2))]).defaults["betas"]
        (0.9, 0.999)
    """
    if is_known(name):
        return NamedOptimizer(name)
    momentum = {}
    if name.lower() in ("sgd-momentum", "sgd8bit"):
        momentum["momentum"] = 0.9
    wanted = name.lower().removesuffix("-momentum")
    places = [torch.optim]
    if wanted.endswith("bit"):
        places.append(require("bitsandbytes", extra="finetune").optim)
    for place in places:
        for key, kind in vars(place).items():
            if key.lower() == wanted and isinstance(kind, type) and issubclass(kind, Optimizer):
                make: Any = kind
                return lambda parameters: make(parameters, lr=1e-3, **momentum)
    why = "neither torch.optim nor bitsandbytes has an optimizer of this name"
    raise ValueError(explain(f"optimizer={name!r}", why, "Use adamw, sgd, sgd-momentum, lion8bit or adamw8bit"))
