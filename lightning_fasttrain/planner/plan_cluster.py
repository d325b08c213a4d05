"""Plan a training on devices that are not at hand: layouts by predicted time, within memory, at one global batch."""

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import batch_of, count_batch
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.memory.fake_step import fake_module
from lightning_fasttrain.memory.predict_memory import PREDICTED_PRECISIONS, Loss
from lightning_fasttrain.planner.cluster_plan import ClusterPlan, Layout, PlannedLayout
from lightning_fasttrain.planner.predict_layout import DEPTHS, LayoutPredictor, PredictedLayout
from lightning_fasttrain.step_time.accelerators import ACCELERATORS
from lightning_fasttrain.step_time.machine import Link, Machine, read_machine
from lightning_fasttrain.strategy.choose_strategy import unfit_family
from lightning_fasttrain.strategy.memory_limits import check_headroom, gib
from lightning_fasttrain.strategy.zero.zero_states import make_optimizer
from lightning_fasttrain.technique import Technique

_MOST_RANKS_PER_BATCH = 16
_MOST_TOKENS = 2**15  # of a micro-batch: larger ones compute hardly faster
_CURVE, _MOST_LINES = (0.5, 1, 2), 3  # times the devices; strategies
_LEFT_OUT = (
    "Not predicted, and left out: pipeline parallelism, offload, and tensor or context parallel ranks together with "
    "replicas or with each other."
)


def _ignore(what: str) -> None:
    pass


@check_arguments
def plan_cluster(
    module: nn.Module | Callable[[], nn.Module],
    batch: object,
    *,
    gpu: str = "H100-SXM",
    devices: PositiveInt = 1,
    nodes: PositiveInt = 1,
    network: PositiveFloat | None = None,
    batch_tokens: PositiveInt | None = None,
    tokens: PositiveFloat | None = None,
    precision: str | None = None,
    techniques: Sequence[Technique] = (),
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    machine: str | os.PathLike[str] | Machine | None = None,
    headroom: float = 0.1,
    top: PositiveInt = 5,
    tell: Callable[[str], object] = _ignore,
) -> ClusterPlan:
    """Choose the layout of a training on accelerators that need not be at hand, by predicted time within their memory.

    The layouts are DDP, FSDP2, FSDP2 with a replica on each node, FSDP2 with tensor or context parallel ranks inside of
    a node, and ZeRO; each with micro-batches as large as fit, and with blocks that recompute nothing, what is cheap, or
    everything, and a fused loss head or not. All have the same global batch. The model is not allocated: each layout
    is predicted by :func:`~lightning_fasttrain.predict_time`. Layouts of deep models with equal blocks are compared on
    two shallow ones, whose difference is continued: of the time, and of the memory and the launches at each moment of
    the step, since the peak of a deep model may be at another moment. The first of the report is predicted on the whole
    model.

    Layouts are taken by the time that they would need if their memory did not matter. One that fits is a result; of one
    that does not, the largest smaller micro-batch that may fit is next, and the same with more recomputation. ZeRO
    under "bf16-mixed" reduces gradients in bfloat16, and comes after all others.

    Args:
        module: the model, which is not changed, or a function that builds it.
        batch: one batch, or the loader; its samples are repeated as needed.
        gpu: an accelerator by name, whose data sheet is used with the usual shares of its peaks.
        devices: of all nodes together.
        nodes: of ``devices / nodes`` devices each.
        network: of each device to other nodes, in Gbit/s; by default that of the machine, which is 400.
        batch_tokens: tokens of an optimizer step; by default a batch like ``batch`` on each device.
        tokens: of the training, for its hours; samples for batches without token ids.
        precision: of the training, as for :func:`~lightning_fasttrain.predict_time`; by default "bf16-mixed" where the
            device multiplies faster in it, else "32-true".
        techniques: further techniques of every layout.
        loss: (module, batch) → loss, instead of ``training_step``.
        optimizer: parameters → optimizer, instead of ``configure_optimizers``.
        machine: instead of ``gpu`` a profile that was measured or fitted: a :class:`Machine`, or the path of its JSON.
        headroom: fraction of each device's memory that is left for what is not predicted.
        top: how many layouts the report has.
        tell: called with the progress, in words.

    Returns:
        The plan; print it for a table. ``plan.code()`` is the Trainer of the first layout, ``plan.save_picture(path)``
        draws the curve of tokens per second against devices.

    Raises:
        ValueError: nothing fits, with the shortfall and the cheapest way out; nodes that do not divide the devices, a
            global batch that no layout divides, an unknown ``gpu``, or what the step itself raises.
        TypeError: no model, no loss or no optimizer.

    Example:
        >>> import torch
        >>> net = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)])
        >>> plan = plan_cluster(net, torch.zeros(8, 64), gpu="A100", devices=2, top=1,
        ...                     loss=lambda net, batch: net(batch).sum(), optimizer=torch.optim.AdamW)
        >>> print(plan.chosen.layout)
        DDP, 1 batch of 8

    Source:
        Ours: best first over predicted times and memory, where memory grows convexly with the micro-batch.
    """
    profile = read_machine(gpu if machine is None else machine)
    if network is not None:
        profile = replace(profile, between=Link(network / 8, profile.between.latency_us, profile.between.share))
    check_headroom(headroom)
    if precision is not None:
        one_of("precision", precision, PREDICTED_PRECISIONS)
    else:
        precision = _choose_precision(profile)
    batch = batch_of(batch)
    size = batch_size(batch)
    tokens_of_batch = count_batch(batch)[1]
    each, unit = tokens_of_batch // size or 1, "samples"
    if tokens_of_batch:
        unit = "tokens"
    samples = size * devices
    if batch_tokens is not None:
        samples = _count_samples(batch_tokens, each, tokens_of_batch > 0)
    tell("looking at the model")
    net = fake_module(module, FakeMode())
    given = {"loss": loss, "optimizer": optimizer, "precision": precision, "machine": profile}
    predictor = LayoutPredictor(net, batch, list(techniques), given, tell)
    cluster = _Cluster(devices, nodes, samples)
    usable = int(profile.memory_gib * GIB * (1 - headroom))
    search = _Search(predictor, usable, precision, max(1, _MOST_TOKENS // each), tokens and tokens / each)
    families = _list_families(net, optimizer, cluster, search.left_out)
    if not any(cluster.divides(family) for family in families):
        what = f"a global batch of {samples:,} sequences on {devices:,} devices"
        way_out = _name_multiples(samples * each, devices * each, "Use batch_tokens=")
        raise ValueError(explain(what, "no layout gives each rank equally many of them", way_out))
    rows: list[PlannedLayout] = []
    for rounds in (False, True):
        if len(rows) < top:
            considered = [family for family in families if search.rounds(family) is rounds]
            rows += search.run(search.list_starts(cluster, considered), top - len(rows), exact=not rows)
    if not rows:
        raise search.explain_nothing(cluster, families, profile)
    curve = {name: _in_unit(points, each) for name, points in search.draw_curve(cluster, rows).items()}
    return ClusterPlan(
        _in_unit(rows, each),
        curve,
        profile.name,
        precision,
        unit,
        samples * each,
        search.usable,
        tuple(search.list_notes(profile, rows)),
    )


def _in_unit(rows: Sequence[PlannedLayout], each: int) -> tuple[PlannedLayout, ...]:
    """Return the rows with tokens in place of samples per second."""
    return tuple(replace(row, tokens_per_second=row.tokens_per_second * each) for row in rows)


def _choose_precision(machine: Machine) -> str:
    """Return mixed bfloat16 where it multiplies faster, else float32; a lower one would change the training."""
    reached = {name: peak * machine.product_share[name] for name, peak in machine.peak_flops.items()}
    return "bf16-mixed" if reached.get("bfloat16", 0.0) > reached.get("float32", 0.0) else "32-true"


def _count_samples(batch_tokens: int, each: int, has_tokens: bool) -> int:
    """Return the samples of an optimizer step."""
    if not has_tokens:
        way_out = "Leave it out: the global batch is then the batch that you give, on each device"
        raise ValueError(explain(f"batch_tokens={batch_tokens:,}", "the batch holds no token ids", way_out))
    if batch_tokens % each:
        why = f"a sequence of the batch has {each:,} tokens"
        raise ValueError(explain(f"batch_tokens={batch_tokens:,}", why, _name_multiples(batch_tokens, each, "Use ")))
    return batch_tokens // each


@dataclass(frozen=True)
class _Cluster:
    """Devices in nodes, and the samples of their global batch."""

    devices: int
    nodes: int
    samples: int

    def divides(self, family: Layout) -> bool:
        """Whether each group of ranks gets equally many samples."""
        return self.samples % (self.devices // family.ranks_per_batch) == 0

    def scale(self, factor: float) -> "_Cluster | None":
        """Return a cluster of ``factor`` times the devices, in nodes of as many devices; None if there is none."""
        devices, nodes = self.devices * factor, max(1.0, self.nodes * factor)
        if devices != int(devices) or nodes != int(nodes) or devices < 1:
            return None
        return _Cluster(int(devices), int(nodes), self.samples)

    def place(self, family: Layout) -> Layout:
        """Return the layout of a family here, with all samples of a rank at a time."""
        placed = replace(family, devices=self.devices, nodes=self.nodes, accumulate=1)
        if self.devices == 1:
            placed = replace(placed, strategy="one")
        if family.replicas > 1:
            placed = replace(placed, replicas=self.nodes)
        return replace(placed, micro_batch=self.samples * family.ranks_per_batch // self.devices)


def _list_families(
    net: nn.Module, optimizer: Callable[[Any], Optimizer] | None, cluster: _Cluster, left_out: dict[str, str]
) -> list[Layout]:
    """Return the strategies to consider, the simplest first, and note why others are left out."""
    if cluster.devices == 1:
        return [Layout("one")]
    unfit, why = unfit_family(make_optimizer(net, optimizer))
    left_out |= {unfit: why.partition(": ")[2]} if unfit else {}
    families = [Layout("ddp"), Layout("fsdp2")]
    inside = cluster.devices // cluster.nodes
    if cluster.nodes > 1 and inside > 1:
        families.append(Layout("fsdp2", replicas=cluster.nodes))
    for count in range(2, min(inside, _MOST_RANKS_PER_BATCH) + 1):
        if inside % count == 0:
            families += [Layout("fsdp2", tensor_parallel=count), Layout("fsdp2", context_parallel=count)]
    families += [Layout(f"zero-{stage}") for stage in (1, 2, 3)]
    return [family for family in families if not unfit or not family.strategy.startswith(unfit)]


def _name_multiples(number: int, divisor: int, words: str) -> str:
    """Name the nearest multiples of ``divisor``."""
    multiples = [count * divisor for count in (number // divisor, -(-number // divisor))]
    return words + " or ".join(f"{multiple:,}" for multiple in multiples if multiple)


class _Search:
    """Finds the fastest layouts that fit."""

    def __init__(
        self, predictor: LayoutPredictor, usable: int, precision: str, most: int, samples: float | None
    ) -> None:
        self.predictor, self.usable, self.precision, self.most = predictor, usable, precision, most
        self.samples = samples
        self.heads: tuple[bool, ...] = (False, True) if predictor.can_fuse else (False,)
        self.left_out: dict[str, str] = {}
        self.error: Exception | None = None
        self.has_compared = False

    def run(self, starts: Sequence[Layout], top: int, exact: bool, most: int | None = None) -> list[PlannedLayout]:
        """Return the best layouts that fit, from the fastest ones to consider.

        Args:
            starts: each with the largest micro-batches, and the least recomputation.
            top: how many to return.
            exact: whether the first of them is predicted on the whole model.
            most: samples of the largest micro-batches; by default the usual ones.
        """
        queue: list[tuple[float, int, Layout, PredictedLayout]] = []
        seen: set[tuple[Layout, bool]] = set()

        def push(layout: Layout, exact: bool = False) -> None:
            if self._holds_too_large_sums(layout):
                layout = replace(layout, reduce_once=False)
            if (layout, exact) in seen:
                return
            seen.add((layout, exact))
            point = self._predict(layout, exact)
            if point is not None:
                heapq.heappush(queue, (point.seconds, len(seen), layout, point))

        for start in starts:
            push(start)
        found: list[PlannedLayout] = []
        while queue and len(found) < top:
            *_, layout, point = heapq.heappop(queue)
            if point.peak_bytes > self.usable:
                for leaner in self._list_leaner(layout, point, most or self.most):
                    push(leaner)
            elif exact and not found and not point.exact:
                push(layout, exact=True)
            else:
                found.append(self._row(layout, point))
        return found

    def list_starts(self, cluster: _Cluster, families: Sequence[Layout]) -> list[Layout]:
        """Return the fastest layout to consider of each family, and note which cannot divide the batch."""
        starts = []
        for family in families:
            if cluster.divides(family):
                layout = _split(cluster.place(family), self.most)
                self._choose_heads(layout)
                starts.append(replace(layout, fused_head=False not in self.heads))
            else:
                ranks = cluster.devices // family.ranks_per_batch
                self.left_out.setdefault(family.family, f"{ranks} ranks do not divide {cluster.samples:,} samples")
        return starts

    def _choose_heads(self, layout: Layout) -> None:
        """Leave out the plain head if the fused one, which never takes more memory, takes no more time either."""
        if self.heads != (False, True) or self.has_compared:
            return
        plain, fused = self._predict(layout), self._predict(replace(layout, fused_head=True))
        self.has_compared = plain is not None
        if plain is not None and fused is None:
            self.heads = (False,)
        elif plain is not None and fused is not None and fused.seconds <= plain.seconds:
            self.heads = (True,) if fused.peak_bytes <= plain.peak_bytes else self.heads

    def rounds(self, layout: Layout) -> bool:
        """Return whether gradients are reduced in bfloat16, where other strategies reduce them in float32."""
        return layout.strategy.startswith("zero") and self.precision == "bf16-mixed"

    def _predict(self, layout: Layout, exact: bool = False) -> PredictedLayout | None:
        """Return the prediction; None where the step cannot run so, which is noted."""
        try:
            return self.predictor.predict(layout, exact)
        except Exception as error:
            # What the plain step raises, without sharding and micro-batches, is the user's own error.
            saves_memory = layout.recompute or layout.fused_head or layout.accumulate > 1
            if layout.strategy in ("one", "ddp") and not saves_memory:
                raise
            self.error = error
            beside = ", fused head" if layout.fused_head else ""
            self.left_out.setdefault(f"{layout.family}{beside}", first_line(error).rstrip("."))
            return None

    def _holds_too_large_sums(self, layout: Layout) -> bool:
        """Return whether gradients that are summed over micro-batches, unsharded, do not fit by themselves."""
        if layout.strategy != "fsdp2" or layout.accumulate == 1:
            return False
        return self.predictor.gradient_bytes > self.usable * layout.tensor_parallel

    def _list_leaner(self, layout: Layout, point: PredictedLayout, largest: int) -> Iterator[Layout]:
        """Yield what may fit where this does not: sharded gradients, smaller micro-batches, more recomputation."""
        if layout.strategy == "fsdp2" and layout.accumulate > 1 and layout.reduce_once:
            yield replace(layout, reduce_once=False)
        if point.states > self.usable:
            return
        # At the time of this peak, what does not grow with the micro-batch is at least the states.
        most = int(layout.micro_batch * (self.usable - point.states) / (point.peak_bytes - point.states))
        count = layout.micro_batch * layout.accumulate
        if most > 0 and layout.micro_batch > 1:
            yield _split(layout, min(most, layout.micro_batch - 1))
        if layout.micro_batch < _largest_divisor(count, largest):
            return
        if self.heads == (False, True) and not layout.fused_head and not layout.recompute:
            yield replace(layout, fused_head=True)
        further = self.predictor.recomputed.index(layout.recompute) + 1
        if further < len(self.predictor.recomputed):
            yield replace(layout, recompute=self.predictor.recomputed[further])

    def _row(self, layout: Layout, point: PredictedLayout) -> PlannedLayout:
        samples = layout.micro_batch * layout.accumulate * layout.devices // layout.ranks_per_batch
        hours = self.samples and self.samples / samples * point.seconds / 3600
        return PlannedLayout(
            layout,
            point.seconds,
            point.low,
            point.high,
            samples / layout.devices / point.seconds,
            point.ideal_seconds / point.seconds,
            int(point.peak_bytes),
            hours,
            self.rounds(layout),
        )

    def draw_curve(self, cluster: _Cluster, rows: Sequence[PlannedLayout]) -> dict[str, list[PlannedLayout]]:
        """Return the best layout of each strategy among ``rows`` on fewer and more devices."""
        best: dict[Layout, PlannedLayout] = {}
        for row in rows:
            best.setdefault(_family_of(row.layout), row)
        if cluster.devices == 1:
            best = {Layout("ddp"): rows[0], Layout("fsdp2"): rows[0]}
        curve: dict[str, list[PlannedLayout]] = {}
        for family, row in list(best.items())[:_MOST_LINES]:
            points = []
            for factor in _CURVE:
                other = cluster.scale(factor)
                if factor == 1:
                    points.append(row)
                elif other is not None and _exists(family, other):
                    most, same = row.layout.micro_batch, row.layout
                    start = _split(other.place(family), most)
                    start = replace(start, recompute=same.recompute, fused_head=same.fused_head)
                    points += self.run([start], 1, exact=False, most=most)
            name = family.family if family.replicas == 1 else "FSDP2, a replica on each node"
            curve[name] = points
        return curve

    def explain_nothing(self, cluster: _Cluster, families: Sequence[Layout], machine: Machine) -> Exception:
        """Return the error of a plan in which nothing fits: what the leanest layout lacks, and the cheapest way out."""
        leanest = []
        for family in filter(cluster.divides, families):
            layout = _split(cluster.place(family), 1)
            layout = replace(layout, reduce_once=layout.strategy != "fsdp2" or layout.accumulate == 1)
            layout = replace(layout, fused_head=self.heads[-1], recompute=self.predictor.recomputed[-1])
            point = self._predict(layout)
            if point is not None:
                leanest.append((point.peak_bytes, len(leanest), layout))
        if not leanest:
            assert self.error is not None
            return self.error
        peak, _, nearest = min(leanest)
        lacks = f"{gib(int(peak) - self.usable)} GiB on each device"
        what = f"Nothing fits, the nearest is {nearest}, and lacks {lacks}"
        why = f"it takes {gib(int(peak))} GiB of {gib(self.usable)} GiB usable"
        return ValueError(explain(what, why, self._name_way_out(cluster, nearest, peak, machine)))

    def _name_way_out(self, cluster: _Cluster, nearest: Layout, peak: float, machine: Machine) -> str:
        ways = []
        for factor in (2, 4, 8, 16):
            more = cluster.scale(factor)
            assert more is not None
            if nearest.strategy in ("one", "ddp"):
                nearest = replace(nearest, strategy="fsdp2")
            wider = replace(more.place(nearest), micro_batch=1, accumulate=1, reduce_once=True)
            point = self._predict(wider)
            if point is not None and point.peak_bytes <= self.usable:
                ways.append(f"{more.devices:,} devices under {wider.family}")
                break
        share = self.usable / (machine.memory_gib * GIB)
        larger = [one for one in ACCELERATORS.values() if one.memory_gib * GIB * share >= peak]
        if larger:
            smallest = min(larger, key=lambda one: one.memory_gib)
            ways.append(f"devices of {smallest.memory_gib:g} GiB such as {smallest.name}")
        ways.append("shorter samples, or train adapters only (QLoRA)")
        return f"Use {', '.join(ways)}"

    def list_notes(self, machine: Machine, rows: Sequence[PlannedLayout]) -> Iterator[str]:
        """Yield what the plan assumes, and what it left out."""
        if self.predictor.shallow:
            shallow, deep = " and ".join(map(str, DEPTHS)), self.predictor.depth
            yield (
                "The first row is predicted on the whole model, the others, and other numbers of devices, on "
                f"{shallow} of its {deep} blocks."
            )
        if any(row.rounds for row in rows):
            yield "ZeRO reduces gradients in bfloat16 here, and comes after the others."
        for name, why in self.left_out.items():
            yield f"Left out: {name}: {why}."
        yield _LEFT_OUT
        if machine.error is not None and machine.error_90 is not None:
            yield f"Such predictions were off by {machine.error:.1%} on average, 90% of them by {machine.error_90:.1%}."
        yield f"Machine: {machine.source}."


def _largest_divisor(count: int, most: int) -> int:
    return next(number for number in range(min(count, most), 0, -1) if count % number == 0)


def _split(layout: Layout, most: int) -> Layout:
    """Return the layout with micro-batches of at most so many samples, as large as divide its samples."""
    count = layout.micro_batch * layout.accumulate
    micro_batch = _largest_divisor(count, most)
    return replace(layout, micro_batch=micro_batch, accumulate=count // micro_batch)


def _family_of(layout: Layout) -> Layout:
    """Return the strategy with its arguments alone."""
    names = ("strategy", "replicas", "tensor_parallel", "context_parallel")
    return Layout(**{name: getattr(layout, name) for name in names})


def _exists(family: Layout, cluster: _Cluster) -> bool:
    """Return whether a family differs from others on a cluster, and divides its batch."""
    inside = cluster.devices // cluster.nodes
    if family.replicas > 1 and (cluster.nodes == 1 or inside == 1):
        return False
    if inside % family.ranks_per_batch or cluster.samples * family.ranks_per_batch < cluster.devices:
        return False
    return cluster.divides(family) and (cluster.devices > 1 or family.ranks_per_batch == 1)
