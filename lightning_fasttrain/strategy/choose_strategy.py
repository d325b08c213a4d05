"""Choice among DDP, FSDP2 and the stages of ZeRO: the strategy that fits and moves the fewest bytes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import Report, explain, titled_table
from lightning_fasttrain.strategy._sharded_groups import ddp_states, fsdp2_states
from lightning_fasttrain.strategy.choose._limits import Fit, Limits, check_headroom, find_nearest, gib, name_leaner_ways
from lightning_fasttrain.strategy.choose._model_sizes import Held, ZeROSizes, held_by, predict_activations
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer, unfit_family
from lightning_fasttrain.strategy.choose.model_states import ModelStates, states_of, usual_sizes
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.traffic import Moved, Traffic
from lightning_fasttrain.strategy.zero.zero_strategy import ZeROStrategy

# The simplest strategy first, which decides between those that move about as many bytes. Stage 0 of ZeRO is DDP.
CANDIDATES = ("ddp", "fsdp2", "zero-1", "zero-2", "zero-3", "fsdp2+offload", "zero-2+offload", "zero-3+offload")
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

    @property
    def name(self) -> str:
        return self.traffic.strategy


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
        activation_bytes: bytes of activations on each device; None if unknown.
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
    activation_bytes: int | None
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
        made.setup_environment = functools.partial(_meet, made, self.name, self.devices)
        return made

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, in bytes, for JSON."""
        told = asdict(self)
        told["chosen"] = told.pop("name")
        for candidate, entry in zip(self.candidates, told["candidates"], strict=True):
            entry.update(name=candidate.name, fits=candidate.fits)
        return told

    def as_table(self) -> Table:
        """Return a ``rich`` table of each candidate's memory on one rank and traffic per step, in GiB."""
        activations = self.activation_bytes or 0
        where = f"{self.devices} devices"
        if self.nodes > 1:
            where = f"{where} in {self.nodes} nodes"
        usable = f"On each device {gib(self.usable_bytes)} GiB are usable; activations take {gib(activations)} GiB."
        title = f"{where}, {self.precision}: GiB on one rank, and GiB that it moves in a step"
        table = titled_table(title, [self.why, usable, *self.notes])
        table.add_column("strategy")
        headings = ("params", "grads", "optimizer", "buffers", "device", "host", "to ranks")
        for heading in (*headings, "to host"):
            table.add_column(heading, justify="right")
        table.add_column("fits")
        for row in self.candidates:
            states, moved = row.states, row.traffic
            figures = (states.parameters, states.gradients, states.optimizer, states.buffers)
            figures = (*figures, states.device + activations, states.host, moved.ranks, moved.host)
            verdict = "yes"
            if row.short:
                verdict = f"no, {gib(row.short)} over"
            elif not row.fits:
                verdict = f"no, {gib(row.short_of_host)} over in host"
            name, style = row.name, None
            if row.name == self.name:
                name, style = f"{row.name} ←", "bold"
            table.add_row(name, *map(gib, figures), verdict, style=style)
        return table


def _meet(strategy: ParallelStrategy, name: str, devices: int) -> None:
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
    optimizer: Optimizer | MakeOptimizer | None = None,
    devices: PositiveInt = 1,
    *,
    memory_gib: PositiveFloat | None = None,
    batch: object = None,
    loss: Callable[[Any, Any], object] | None = None,
    nodes: PositiveInt = 1,
    precision: str = "32-true",
    activation_gib: NonNegativeFloat | None = None,
    host_gib: PositiveFloat | None = None,
    headroom: float = 0.1,
) -> StrategyChoice:
    """Choose a strategy for training on several devices: DDP, FSDP2, or a stage of ZeRO, with or without offload.

    Among the strategies that fit, the one that moves the fewest bytes in a step is chosen; strategies within 10% of
    it count as equal, and the simplest of them is chosen. A strategy that reduces gradients in lower precision is
    chosen only if no other fits: ZeRO under "bf16-mixed" reduces in bfloat16, where DDP and FSDP2 reduce in float32.
    A byte to the host counts like a byte to another rank; the speed of the links is not considered.

    Args:
        module: the model (real, on ``"meta"``, or of fake tensors), or a function that builds it; nothing is
            allocated.
        optimizer: the optimizer in use, or a function of the parameters that makes it; by default the
            LightningModule's.
        devices: total number of devices, over all nodes.
        memory_gib: memory of each device; by default the free memory of the current GPU.
        batch: one rank's batch, as the loader yields it; activations are then predicted from it.
        loss: (module, batch) → loss, instead of ``training_step``.
        nodes: number of machines, with equally many devices in each.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        activation_gib: activations on each device, instead of ``batch``. Without either, activations are not counted.
        host_gib: host memory of a node that training may use; None means enough.
        headroom: fraction of each device's memory that is left for usage that is not predicted.

    Returns:
        The choice. Its ``strategy()`` makes a strategy for the Trainer; its ``as_table()`` shows the comparison.

    Raises:
        ValueError: nothing fits (with the shortfall), ``devices`` is not a multiple of ``nodes``, memory is not
            positive or is missing without a GPU, or the optimizer cannot be sharded.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])
        >>> adam = torch.optim.AdamW(net.parameters())
        >>> choose_strategy(net, adam, 4, memory_gib=1).name
        'ddp'
        >>> choice = choose_strategy(net, adam, 4, memory_gib=0.02)
        >>> choice.name, choice.chosen.states.device < 0.02 * 2**30
        ('fsdp2', True)
        >>> print(choice.why)
        fsdp2 fits with ... GiB of ... GiB on each device and moves ... MiB a step; ddp would ...

    Source:
        Ours; see :func:`~lightning_fasttrain.strategy.predict_model_states` and
        :func:`~lightning_fasttrain.strategy.predict_traffic`.
    """
    _check_devices(devices, nodes)
    check_headroom(headroom)
    _check_activations(activation_gib, batch)
    usable = int(_memory_of(memory_gib) * (1 - headroom))
    activations = _in_bytes(activation_gib)
    if batch is not None:
        activations = predict_activations(module, batch, precision, loss=loss)
    limits = Limits(usable, activations or 0, _in_bytes(host_gib), ranks=devices // nodes)
    held = held_by(module, optimizer, devices, precision)
    left_out, note = unfit_family(held.optimizer)
    sizes = usual_sizes(held)
    names = [name for name in CANDIDATES if not (left_out and name.startswith(left_out))]
    candidates = []
    for states, traffic in _predict(held, names, precision, sizes):
        fit = limits.check(states)
        rounds = precision == "bf16-mixed" and traffic.strategy.startswith("zero") and devices > 1
        candidates.append(Candidate(states, fit.short, fit.short_of_host, traffic, rounds))
    best = _pick_best(candidates)
    if best is None:
        raise ValueError(_nothing_fits(candidates, limits, devices, precision))
    why = _explain_choice(best, candidates, limits)
    notes = []
    if activations is None:
        notes.append("Activations are not counted: give batch= or activation_gib=.")
    if note:
        notes.append(note)
    return StrategyChoice(
        best.name, tuple(candidates), why, devices, nodes, precision, activations, usable, sizes, tuple(notes)
    )


def _check_devices(devices: int, nodes: int) -> None:
    if devices % nodes:
        why = "every node must have the same number of devices"
        raise ValueError(explain(f"devices={devices} in nodes={nodes}", why, f"Use a multiple of {nodes} devices"))


def _check_activations(activation_gib: float | None, batch: object) -> None:
    if batch is not None and activation_gib is not None:
        raise ValueError(explain("batch= and activation_gib=", "both give the memory of activations", "Leave one out"))


def _predict(held: Held, names: list[str], precision: str, sizes: ZeROSizes) -> Iterator[tuple[ModelStates, Traffic]]:
    """Yield each strategy's memory on a device and traffic per step."""
    own = held.as_torch_does(precision)
    moved = Moved(held, own, precision, micro_batches=1, sizes=sizes)
    by_name = {"ddp": ddp_states(own)}
    for offload in (False, True):
        states = fsdp2_states(own, moved.groups, precision, offload=offload)
        by_name[states.stage] = states
    stages = [name.removeprefix("zero-") for name in names if name.startswith("zero")]
    for states in states_of(held, stages, sizes):
        by_name[f"zero-{states.stage}"] = states
    for name in names:
        yield by_name[name], moved.predict(name)


def _memory_of(memory_gib: float | None) -> float:
    if memory_gib is not None:
        return memory_gib * GIB
    if not torch.cuda.is_available():
        why = "there is no GPU whose memory could be read"
        raise ValueError(explain("memory_gib=None", why, "Give the memory of one device: memory_gib=80"))
    return torch.cuda.mem_get_info()[0]


def _pick_best(candidates: list[Candidate]) -> Candidate | None:
    fitting = [candidate for candidate in candidates if candidate.fits]
    fitting = [candidate for candidate in fitting if not candidate.rounds] or fitting
    least = min((candidate.traffic.total for candidate in fitting), default=0)
    return next((candidate for candidate in fitting if candidate.traffic.total <= least * _ABOUT), None)


def _explain_choice(best: Candidate, candidates: list[Candidate], limits: Limits) -> str:
    moves = "moves nothing"
    if best.traffic.total:
        moves = f"moves {_size(best.traffic.total)} a step"
    why = f"{best.name} fits with {limits.describe(best.states)} and {moves}"
    less = [c for c in candidates if c.traffic.total * _ABOUT < best.traffic.total]
    large = [c for c in less if not c.fits]
    if not less:
        return f"{why}, and no simpler strategy moves less."
    if not large:
        return f"{why}; {less[0].name} would move less but reduce gradients in bfloat16."
    least = min(large, key=lambda c: c.traffic.total)
    return f"{why}; {least.name} would move less but is {least.over}."


def _nothing_fits(candidates: list[Candidate], limits: Limits, devices: int, precision: str) -> str:
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
