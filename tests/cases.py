"""One row for each technique. The promises of ``test_contracts.py`` are held over all rows."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import peft
import torch

import lightning_fasttrain as ft
from lightning_fasttrain import Technique
from lightning_fasttrain._technique import check_together
from tests import by_hand
from tests.nets import TinyLM, concatenate, lm_loss

FOLDER = tempfile.mkdtemp()  # of this process: several may run tests at once
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@dataclass(frozen=True)
class Case:
    """How a technique is made for the tests, and what it is compared with.

    Attributes:
        make: a fresh technique.
        tolerance: for the weights after training, relative; 0.0 means bitwise.
        settings: Trainer settings that it needs to show itself.
        optimizer: settings of the optimizer, likewise.
        regroup: batches of the plain run that it must equal, where it changes which batches make a step.
        by_hand: where it changes training, a plain callback by which the plain run does the same, written out.
    """

    make: Callable[[], Technique]
    tolerance: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    regroup: Callable[[Sequence[Any]], list[Any]] = list
    by_hand: Callable[[], L.Callback] | None = None

    @property
    def name(self) -> str:
        return type(self.make()).__name__


def pairs_of(batches: Sequence[Any]) -> list[Any]:
    return [concatenate(batches[i : i + 2]) for i in range(0, len(batches), 2)]


CASES = [
    # data
    Case(lambda: ft.MicroBatching(3), tolerance=1e-5),
    Case(lambda: ft.TokenWeightedAccumulation(2), tolerance=1e-5, regroup=pairs_of),
    Case(lambda: ft.DevicePrefetch()),
    # model
    Case(lambda: ft.ActivationCheckpointing()),
    Case(lambda: ft.ActivationOffload(min_mib=0, folder=FOLDER)),
    Case(lambda: ft.CompileBlocks(backend="aot_eager"), tolerance=1e-5),
    # finetune
    Case(lambda: ft.QuantizedBase("int8"), by_hand=by_hand.QuantizedBase),
    Case(lambda: ft.LoRA(rank=2), by_hand=by_hand.LoRA),
    Case(lambda: ft.QLoRA(rank=2, kind="int8"), by_hand=by_hand.QLoRA),
    Case(lambda: ft.IA3("up"), by_hand=by_hand.IA3),
    Case(lambda: ft.Adapter(peft.RoadConfig(group_size=4), "blocks.*.down"), by_hand=by_hand.RoAd),
    Case(lambda: ft.GradualUnfreezing(groups=["*"])),  # one group of everything is plain training
    # loss
    Case(lambda: ft.FusedLossHead("head"), tolerance=1e-5),
    Case(lambda: ft.Distillation(TinyLM(depth=2), alpha=0.0, head="head")),  # with α = 0 the plain training
    # optim
    Case(lambda: ft.EagerGradientRelease()),
    Case(
        lambda: ft.FusedClipping(),
        tolerance=1e-5,
        settings={"gradient_clip_val": 0.5, "precision": "bf16-mixed"},
        optimizer={"fused": True},
    ),
    Case(lambda: ft.OptimizerInBackward(), settings={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    # run
    Case(lambda: ft.MatmulPrecision("tf32")),  # on a CPU it changes nothing, and says so
    Case(lambda: ft.StepMeter()),
    Case(lambda: ft.MemoryMeter()),
    # The steps before the one that MemoryMeter measures, as torch runs one profiler at a time.
    Case(lambda: ft.MemoryTimeline(f"{FOLDER}/memory", first_step=0)),
    Case(lambda: ft.AtomicCheckpoints()),
    Case(lambda: ft.ExactResume()),
    Case(lambda: ft.Preemption()),
    Case(lambda: ft.HangWatch()),
]
BY_NAME = {case.name: case for case in CASES}


def refused(cases: Iterable[Case]) -> str:
    """What ``CONFLICTS`` has against these techniques together; empty if nothing."""
    try:
        check_together([case.make() for case in cases])
    except ValueError as error:
        return str(error)
    return ""


TOGETHER: list[Case] = []  # all that can be used at once: who is refused beside an earlier one is left out
for case in CASES:
    if not refused([*TOGETHER, case]):
        TOGETHER.append(case)


def by_hand_of(cases: Iterable[Case]) -> list[L.Callback]:
    """What a plain run needs in order to do the same as these techniques, in the order of surgery."""
    by_hand = [case for case in cases if case.by_hand is not None]
    return [case.by_hand() for case in sorted(by_hand, key=lambda case: case.make().surgery or 0)]


def in_a_loop(
    model: TinyLM, batches: Sequence[Any], techniques: Sequence[Technique], *, epochs: int = 1, fabric: Any = None
) -> TinyLM:
    """The same training by hand: what a user of Fabric, or of nothing at all, writes with our functions."""
    has = {type(technique).__name__: technique for technique in techniques}
    n = has["MicroBatching"].n if "MicroBatching" in has else 1
    window = has["TokenWeightedAccumulation"].factor_at(0) if "TokenWeightedAccumulation" in has else 1
    with ExitStack() as stack:
        on_model = [t for name, t in has.items() if t.surgery is not None or name == "MatmulPrecision"]
        stack.enter_context(ft.apply(model, on_model))
        step, optimizer = model.loss, model.configure_optimizers()
        backward, no_sync, clip = torch.Tensor.backward, ExitStack, None
        if fabric is not None:
            wrapped = fabric.setup_module(model)
            optimizer = fabric.setup_optimizers(optimizer)
            step, backward = (lambda batch: lm_loss(wrapped(batch["input_ids"]), batch)), fabric.backward
            no_sync = lambda: fabric.no_backward_sync(wrapped)  # noqa: E731
        if "FusedClipping" in has:
            clip = lambda: (  # noqa: E731
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if fabric is None
                else fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            )
            if fabric is None:
                step = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)(step)
        if "OptimizerInBackward" in has:
            stack.callback(ft.optimize_in_backward_(optimizer, clip_value=0.02))
        if "Distillation" in has:
            step = has["Distillation"].distil(step)
        timer = ft.StepTimer("cpu") if "StepMeter" in has else None
        for _ in range(epochs):
            loader = ft.prefetch_to_device(batches, "cpu") if "DevicePrefetch" in has else batches
            held: list[Any] = []
            for i, batch in enumerate(loader):
                held.append(batch)
                if len(held) < window and i < len(batches) - 1:
                    continue
                meter: Any = ft.PeakMemory("cpu", model, optimizer) if "MemoryMeter" in has else ExitStack()
                if "MemoryTimeline" in has and "MemoryMeter" not in has:  # torch runs one profiler at a time
                    meter = ft.MemoryRecording(model, optimizer, held)
                optimizer.zero_grad()
                with meter:
                    if window > 1:
                        ft.accumulate_window(step, held, n, backward=backward, no_sync=no_sync)
                    elif n > 1:
                        ft.accumulate_gradients(step, batch, n, backward=backward, no_sync=no_sync)
                    else:
                        backward(step(batch))
                if clip is not None:
                    clip()
                optimizer.step()
                if "EagerGradientRelease" in has:
                    ft.release_gradients_(model.parameters())
                if timer is not None:
                    timer.end_step(samples=len(batch["labels"]))
                held = []
    return model
