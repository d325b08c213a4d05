"""Plan the fastest training of a model within a memory limit, at the same global batch, by measuring it."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_fasttrain.core.batch import batch_of
from lightning_fasttrain.core.batch.padding_share import BATCHES, measure_padding
from lightning_fasttrain.core.checks import Batch, PositiveFloat, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.device import GIB, fast_mixed_precision, free_bytes
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import explain, format_bytes
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.memory.fake_step import fake_module
from lightning_fasttrain.memory.predict_memory import DEVICES, PREDICTED_PRECISIONS
from lightning_fasttrain.optim import build_optimizer, optimizer_state_bytes
from lightning_fasttrain.planner.candidates import Choice, Predictions, code_of, find_axes, switch_of
from lightning_fasttrain.planner.plan import Plan, Tried
from lightning_fasttrain.planner.search import Search
from lightning_fasttrain.planner.timing import Costs, Stopwatch, assume_costs
from lightning_fasttrain.proof.rehearsal.context import combine, reading_ahead
from lightning_fasttrain.proof.verification.short_run import copy_module, quietly
from lightning_fasttrain.proof.verification.verify import as_lightning_module
from lightning_fasttrain.step_time.machine import Machine, machine_of_device, read_machine
from lightning_fasttrain.strategy.choose_strategy import (
    Candidate,
    Compared,
    StrategyChoice,
    compare_strategies,
    pick_best,
)
from lightning_fasttrain.strategy.memory_limits import Limits, gib
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import Facts, describe_clipping, facts_of_machine

_SHARE, _MOST_SECONDS = 0.02, 30.0  # of a run's time that measuring may take by default
_ROOM = 0.95  # of the limit on a GPU: fragmentation and libraries are not predicted


def _ignore(what: str) -> None:
    pass


@check_arguments
def make_plan(
    module: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    memory_gib: PositiveFloat | Literal["fit"] = "fit",
    devices: PositiveInt = 1,
    *,
    nodes: PositiveInt = 1,
    keep: str = "tolerance",
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str | None = None,
    device: str | None = None,
    steps: PositiveInt = 1000,
    seconds: PositiveFloat | None = None,
    loader: Any = None,
    machine: str | os.PathLike[str] | Machine | None = None,
    tell: Callable[[str], None] = _ignore,
    **settings: Any,
) -> Plan:
    """Choose the fastest combination of techniques that fits, for the same global batch, by measuring this model.

    The memory of each choice is predicted without running it. Time is measured: a few plain steps, in more
    micro-batches, and with one technique at a time; from these the times of all combinations are estimated, fastest
    first, until no other can be faster. The best few that fit are run in turn, and the peak of the fastest is measured.
    Among equally fast choices the simplest is taken. The model is not changed.

    Args:
        module: the model, which is not changed, or a function that builds it, which allocates nothing for a device that
            this machine does not have.
        batch: one batch of the loader, or the loader.
        memory_gib: limit for a step's peak memory on each device in GiB; ``"fit"``: the free memory of this device.
        devices: number of devices, each with a batch like this; for several a strategy is chosen too, see
            :func:`~lightning_fasttrain.choose_strategy`. Communication is counted in bytes, not in time.
        nodes: number of machines.
        keep: ``"exact"``, ``"tolerance"`` (also bf16-mixed and compiled blocks) or ``"changes_training"`` (also LoRA
            and QLoRA; and what an optimizer in 8 bits would save is in the notes, since the optimizer is yours).
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: the precision to keep; None: "32-true", or the mixed one in which the device multiplies faster, if
            ``keep`` allows it.
        device: ``"cuda"`` or ``"cpu"``; by default that of this machine. For a device that this machine does not have,
            nothing is measured: times are predicted for ``machine``, or assumed.
        steps: number of steps of the coming run, which share the time of compilation.
        seconds: time limit for measurements; None: 2% of the time that ``steps`` steps take at least, 30 s at most.
            Where that is too little to measure anything, times are predicted for ``machine``, or assumed.
        loader: the loader of the batches: a few of them are timed, and the notes say how many workers hide that time,
            and how much of them seems to be padding.
        machine: the device as :func:`~lightning_fasttrain.predict_time` knows it: its name, as ``"H100"``, or what
            ``fasttrain machine --out FILE`` has written. The gain of each technique is predicted on it; those that
            cannot be fast are not measured, and the rest are measured in the order of their gain. By default a GPU that
            is here is known by its data sheet, and a CPU is not.
        tell: called with a line on the current progress.
        settings: Trainer settings for the measured steps, such as ``gradient_clip_val=1.0``.

    Returns:
        The plan: ``plan.trainer(...)``, ``plan.callbacks``, ``plan.code()``, ``plan.yaml()``; print it for a table.

    Raises:
        TypeError: no model, no loss or no optimizer, or a model that cannot be copied.
        ValueError: nothing fits, with the shortfall; an unknown word or machine; a limit that is not positive.
        Exception: whatever the plain step raises.

    Example:
        >>> import lightning_fasttrain as ft
        >>> def loss(net, batch):
        ...     return nn.functional.mse_loss(net(batch[0]), batch[1])
        >>> plan = ft.make_plan(
        ...     nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)], nn.Linear(64, 1)),
        ...     (torch.randn(512, 64), torch.randn(512, 1)),
        ...     0.0005,
        ...     keep="exact",
        ...     loss=loss,
        ...     optimizer=torch.optim.AdamW,
        ...     device="cpu",
        ...     seconds=1,
        ... )
        >>> plan.chosen.peak_bytes <= 0.0005 * 2**30 < plan.plain.predicted_bytes
        True

    Source:
        Ours: bound and prune over measured single effects and predicted memory.
    """
    began = time.monotonic()
    keep_class = Exactness(one_of("keep", keep, tuple(each.value for each in Exactness)))
    if precision is not None:
        one_of("precision", precision, PREDICTED_PRECISIONS)
    here = device_here()
    device = here if device is None else one_of("device", device, DEVICES)
    profile = _find_machine(machine, device, here)
    limit_gib = _limit(memory_gib, device, here)
    if loader is None and isinstance(batch, DataLoader):
        loader = batch
    batch = batch_of(batch)
    if device != here and not isinstance(module, nn.Module):
        module = fake_module(module, FakeMode())
    plain = as_lightning_module(module, loss, optimizer)
    facts = _facts(device, devices, settings)
    mixed = fast_mixed_precision(torch.device(device))
    tell("looking at the model")
    usable = limit_gib * GIB * (_ROOM if device == "cuda" else 1.0)
    # On several devices, the memory left for activations depends on the strategy.
    budget_gib = usable / GIB if devices == 1 else None
    axes = find_axes(plain, batch, facts, keep_class, precision, mixed, budget_gib)
    watch = measure = None
    if device == here:
        watch = Stopwatch(plain, batch, {"accelerator": device, **settings})
        measure = watch.measure_peak
    predictions = Predictions(plain, batch, device, axes.parts, usable, measure, profile)
    costs, allowed_s = _allow(watch, precision, steps, seconds)
    if allowed_s == 0:
        watch = None
    # Strategies shard the states of a model, so whether a choice fits depends on them.
    several = SeveralDevices(plain, batch, devices, nodes, usable, device) if devices > 1 else None
    if several is not None:
        axes.drop("adapter", "states of adapters on several devices are not predicted: plan on one device first")
    search = Search(
        axes,
        predictions,
        lambda choice, needed: needed <= usable if several is None else several.fits(choice),
        limit_gib,
        watch,
        costs=costs,
        steps=steps,
        seconds=allowed_s,
        tell=tell,
    )
    chosen = search.run()
    if watch is None:
        search.notes.append(_explain_unmeasured(device, here, steps, costs, profile))
    elif loader is not None:
        search.notes += filter(None, [suggest_workers(loader, chosen.ms)])
    search.notes += filter(None, [_describe_padding(chosen, search, batch, loader)])
    search.notes += _describe_model(plain, predictions, keep_class)
    strategy = None
    if several is not None:
        strategy = several.choose(chosen.choice)
    # The chosen one alone has no reason why not, so it comes first.
    tried = sorted(search.tried.values(), key=lambda t: (bool(t.why_not), t.ms))
    return Plan(
        chosen,
        search.describe_plain(),
        tuple(tried),
        tuple(_explain(chosen, search)),
        axes.left_out,
        limit_gib,
        device,
        watch is not None,
        strategy,
        time.monotonic() - began,
        tuple(search.notes),
    )


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
        self.known: dict[Choice, Compared] = {}

    def fits(self, choice: Choice) -> bool:
        """Return whether a choice of techniques and precision fits under any strategy."""
        return bool(self._fitting(choice))

    def choose(self, choice: Choice) -> StrategyChoice:
        """Return the strategy that fits and moves the fewest bytes in a step."""
        compared, usable = self._compare(choice), int(self.usable)
        best = pick_best(self._fitting(choice))
        assert best is not None  # as the search has asked whether it fits
        why = f"{best.name} fits with {gib(best.device_bytes)} GiB of {gib(usable)} GiB and moves the fewest bytes."
        shape = (self.devices, self.nodes, choice.precision, usable)
        return StrategyChoice(best.name, compared.candidates, why, *shape, compared.sizes, compared.left_out)

    def _fitting(self, choice: Choice) -> list[Candidate]:
        fitting = []
        for one in self._compare(choice).candidates:
            # ZeRO counts micro-batches by itself.
            joins = choice.parts == 1 or not one.name.startswith("zero")
            if joins and one.fits and not one.rounds:
                fitting.append(one)
        return fitting

    def _compare(self, choice: Choice) -> Compared:
        # Compiled blocks count as eager ones, which take more.
        choice = replace(choice, compile="")
        if choice not in self.known:
            step = {"techniques": choice.techniques(), "precision": choice.precision, "device": self.device}
            limits = Limits(int(self.usable), None)
            with quietly():
                self.known[choice] = compare_strategies(self.module, self.batch, self.devices, limits, **step)
        return self.known[choice]


def device_here() -> str:
    """Return the type of this machine's device: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _find_machine(machine: str | os.PathLike[str] | Machine | None, device: str, here: str) -> Machine | None:
    if machine is not None:
        return read_machine(machine)
    return machine_of_device(torch.device(device)) if device == here == "cuda" else None


def _describe_model(plain: L.LightningModule, predictions: Predictions, keep: Exactness) -> Iterator[str]:
    if predictions.why_measured:
        yield f"Memory was measured, since it cannot be predicted: {predictions.why_measured}."
    if keep is Exactness.CHANGES_TRAINING:
        yield from filter(None, [suggest_leaner_optimizer(plain)])


def _facts(device: str, devices: int, settings: Mapping[str, Any]) -> Facts:
    """Collect the facts of this machine and of the Trainer that the plan is for."""
    return replace(
        facts_of_machine(),
        device=device,
        devices=devices,
        accumulates=settings.get("accumulate_grad_batches", 1),
        clips=describe_clipping(settings.get("gradient_clip_val"), settings.get("gradient_clip_algorithm")),
    )


def _allow(watch: Stopwatch | None, precision: str | None, steps: int, seconds: float | None) -> tuple[Costs, float]:
    """Return assumed costs, and the seconds that measuring may take: 0 if they are too few for any use."""
    if watch is None or seconds is not None:
        return Costs(), _MOST_SECONDS if seconds is None else seconds
    costs = assume_costs(watch.module, watch.batch, watch.settings["accelerator"], precision)
    allowed_s = min(_MOST_SECONDS, _SHARE * steps * costs.whole / 1e3)
    if allowed_s < costs.least_to_measure_s():
        allowed_s = 0.0
    return costs, allowed_s


def _explain_unmeasured(device: str, here: str, steps: int, costs: Costs, profile: Machine | None) -> str:
    how = "assumed" if profile is None else f"predicted for {profile.name}"
    if device != here:
        return f"There is no {device} here: times are {how}, and nothing was measured."
    run_s = steps * costs.whole / 1e3
    return (
        f"Nothing was measured, and times are {how}: {steps:,} steps take about {run_s:,.1f} s, and {_SHARE:.0%} of "
        "that is too little to measure. Give seconds=60 to measure anyway."
    )


def _limit(memory_gib: PositiveFloat | Literal["fit"], device: str, here: str) -> float:
    if memory_gib != "fit":
        return float(memory_gib)
    if device != here:
        why = f"there is no {device} here to be asked"
        raise ValueError(explain("memory_gib='fit'", why, "Give the memory of one device: memory_gib=24"))
    free = free_bytes(torch.device(device))
    if free is None:
        why = "this system does not report its free memory"
        raise ValueError(explain("memory_gib='fit'", why, "Give a limit: memory_gib=16"))
    return free / GIB


def _explain(chosen: Tried, search: Search) -> list[str]:
    """Explain each technique of the choice by what a step without it would take."""
    choice, reasons = chosen.choice, []
    for other, name, switched in _one_less(choice, search.axes.precision):
        needed = search.predictions.predict(other)
        ms = search.estimate(other)
        now = search.estimate(choice)
        if not search.fits(other, needed):
            reasons.append(f"{name}: without it {needed / GIB:.3f} GiB would not fit.")
        elif ms > now:
            guess = search.costs.describe_source(switched)
            reasons.append(f"{name}: without it a step takes about {ms / now:.2f} times as long{guess}.")
        else:
            saved = (needed - chosen.predicted_bytes) / GIB
            reasons.append(f"{name}: it costs nothing that could be measured, and saves {max(0.0, saved):.3f} GiB.")
    return reasons


def _describe_padding(chosen: Tried, search: Search, batch: Any, loader: Any) -> str:
    """Describe how much padding the choice cuts off, why none can be, or how much there seems to be."""
    left = search.costs.share_of(chosen.choice.parts)
    if left < 1:
        return f"Padding: the micro-batches cut off {1 - left:.0%} of the tokens of the batch."
    if search.why_padded:
        return f"Padding: micro-batches would keep it, since {search.why_padded}."
    # Where micro-batches without padding were measured, the table says how long they take.
    return "" if search.costs.left or chosen.choice.parts > 1 else suggest_trimming(batch, loader)


def _one_less(choice: Choice, precision: str) -> Iterator[tuple[Choice, str, tuple[Any, ...]]]:
    """Yield the choice without each of its techniques, the name of the technique, and its axis and word."""
    if choice.parts > 1:
        yield replace(choice, parts=1), f"MicroBatching({choice.parts})", ()
    for axis, word in choice.words:
        if axis != "precision":
            name = code_of(switch_of(axis, word).make()).removeprefix("ft.")
            yield replace(choice, **{axis: ""}), name, (axis, word)
        elif word != precision:
            yield replace(choice, precision=precision), str(word), (axis, word)


_LEANER = "adamw8bit"
_BATCHES, _SECONDS = 8, 5.0


def suggest_workers(loader: object, step_ms: float) -> str:
    """Measure the time to load a batch in one process, and suggest how many workers hide it behind the steps.

    The first samples are read and collated without the loader's own sampler, whose state does not change.

    Args:
        loader: the training loader; only a ``DataLoader`` is measured.
        step_ms: time of a step.

    Returns:
        A sentence; "" if there is nothing to change.

    Example:
        >>> suggest_workers(DataLoader(range(100), batch_size=4), step_ms=50.0)
        ''
    """
    if not isinstance(loader, DataLoader):
        return ""
    batch_ms = _measure(loader)
    if batch_ms is None:
        return ""
    needed = 0
    if batch_ms > 0.05 * step_ms:  # a smaller share would not be noticed
        needed = math.ceil(batch_ms / step_ms)
    workers, cores = min(needed, os.cpu_count() or 1), os.cpu_count() or 1
    took = f"A batch takes the loader {batch_ms:,.1f} ms and a step {step_ms:,.1f} ms"
    if workers > loader.num_workers:
        hides = "hides it" if needed <= cores else f"hides a part of it; {needed} would hide all"
        return f"{took}: DataLoader(num_workers={workers}, persistent_workers=True) {hides}."
    if needed > cores:
        return f"{took}: more than {loader.num_workers} workers on {cores} cores can hide. Prepare samples ahead."
    return ""


def suggest_trimming(batch: object, loader: object = None) -> str:
    """Suggest micro-batches without padding if much of a few batches seems to be padding.

    Args:
        batch: one batch of the loader.
        loader: the loader, of which a few batches are read ahead; None to look at the one batch alone.

    Returns:
        A sentence with the share of padding, and of the tokens that would be left; "" if there is little padding.

    Example:
        >>> import torch
        >>> ids = torch.tensor([[5, 6] + [0] * 62, [7] * 64, *[[8] + [0] * 63] * 14])
        >>> batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        >>> print(suggest_trimming(batch, DataLoader([batch] * 9, batch_size=None)))
        92% of the tokens of 4 batches seem to be padding (['attention_mask'] = 0): MicroBatching(8) would run ×0.18 ...
    """
    if loader is not None:
        with suppress(Exception), reading_ahead(combine(loader)) as batches:  # such as a loader that cannot start over
            return str(measure_padding(itertools.islice(batches, BATCHES)))
    return str(measure_padding([batch]))


def suggest_leaner_optimizer(module: L.LightningModule) -> str:
    """Suggest an 8-bit optimizer if it makes the state of Adam or AdamW smaller.

    Args:
        module: the model, of which a copy configures its optimizers.

    Returns:
        A sentence; "" for another optimizer, or if the state would not be smaller.
    """
    copied = copy_module(module)
    with quietly(), isolate_rng():
        optimizers, _ = configured_optimizers(copied)
        if not optimizers or type(optimizers[0]) not in (Adam, AdamW):  # a subclass may keep other state
            return ""
        now = optimizer_state_bytes(optimizers[0])
        try:
            leaner = optimizer_state_bytes(build_optimizer(copied, _LEANER))
        except ModuleNotFoundError:
            return ""
    if leaner > 0.9 * now:
        return ""
    made = f"ft.build_optimizer(self, {_LEANER!r}, ...)"
    name = type(optimizers[0]).__name__
    return f"{name}'s state takes {format_bytes(now)}; {made} keeps it in {format_bytes(leaner)}, and rounds it."


def _measure(loader: DataLoader[object]) -> float | None:
    """Return the milliseconds to load a batch in one process; None if it cannot be measured."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None or not isinstance(loader.dataset, Sized):
        return None
    dataset, count = loader.dataset, len(loader.dataset)
    times: list[float] = []
    with isolate_rng():
        for first in range(0, min(_BATCHES * size, count), size):
            began = time.perf_counter()
            indices = range(first, min(first + size, count))
            loader.collate_fn([dataset[index] for index in indices])
            times.append(1e3 * (time.perf_counter() - began))
            if sum(times) > 1e3 * _SECONDS:
                break
    # The median, since the first sample may open files.
    return sorted(times)[len(times) // 2] if times else None
