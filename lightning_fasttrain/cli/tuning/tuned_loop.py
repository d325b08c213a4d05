"""Tune the step of a loop without a Trainer, where it is marked."""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.cli.rehearsal.rehearsed_script import end_script
from lightning_fasttrain.cli.tuning.advice import Advice
from lightning_fasttrain.cli.tuning.make_advice import Tuning, with_diagnosis
from lightning_fasttrain.core.host.lightning import plain_optimizer
from lightning_fasttrain.core.messages import describe_error
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor import Diagnosis, Examination, examine
from lightning_fasttrain.planner.timing import Stopwatch
from lightning_fasttrain.proof.rehearsal.rehearsal import Rehearsing
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.proof.verification.verify import as_lightning_module, verify
from lightning_fasttrain.technique import Technique

_WARMUP = 2
_UNMARKED = (
    "Nothing marks the step of this loop, so no technique was tried on it. Write "
    "loss = ft.accumulate_gradients(step, batch, n=1) in place of the forward and loss.backward(), where step is a "
    "function that maps a batch to its loss, and run this command again."
)


class TunedLoop:
    """A loop without a Trainer, whose step is tuned if it calls ``accumulate_gradients``.

    Args:
        memory, keep, seconds: as in the environment.
    """

    running: ClassVar[list["TunedLoop"]] = []

    def __init__(self, memory: str, keep: str, seconds: float) -> None:
        self.orders = memory, keep, seconds
        self.examination: Examination = examine(8, _WARMUP, report=self._report)
        self._marked: tuple[Callable[[Any], Any], Any] | None = None
        self._mark()
        TunedLoop.running.append(self)

    def _mark(self) -> None:
        file = importlib.import_module("lightning_fasttrain.micro_batching.accumulate_gradients")
        original = file.accumulate_gradients

        @functools.wraps(original)
        def accumulate_gradients(step: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            self._marked = step, batch
            return original(step, batch, *arguments, **named)

        for module in list(sys.modules.values()):  # packages keep the names that were asked for
            if vars(module).get("accumulate_gradients") is original:
                patch(module, "accumulate_gradients", accumulate_gradients)

    def _report(self, diagnosis: Diagnosis) -> None:
        if self._marked is None or len(self.examination.watch.models) != 1:
            nothing = Advice(0.0, 0.0, (1.0, 1.0, 1.0), 0, 0, [], None, [], [_UNMARKED], "", True, [], "", lines=[])
            end_script(True, {"ok": True, "advice": asdict(with_diagnosis(nothing, diagnosis))})
        try:
            with Rehearsing(), quietly():
                advice = self._advise(*self._marked)
        except Exception as error:
            end_script(True, {"ok": False, "error": f"the marked step fails on a copy: {describe_error(error)}"})
        end_script(True, {"ok": True, "advice": asdict(with_diagnosis(advice, diagnosis))})

    def _advise(self, step: Callable[[Any], Any], batch: Any) -> Advice:
        watch = self.examination.watch
        live = watch.models[0]
        live = getattr(live, "module", live)  # what Fabric has wrapped
        optimizer = plain_optimizer(next(iter(watch.updates.values())).optimizer)

        def loss(net: nn.Module, of: Any) -> Any:
            undo = patch(live, "forward", net.__call__)
            try:
                return step(of)
            finally:
                undo()

        module = as_lightning_module(live, loss, functools.partial(make_optimizer_like, optimizer))
        settings: dict[str, Any] = {"accelerator": watch.device.type}
        tuning = Tuning.ordered(*self.orders)
        advice = tuning.advise(
            Stopwatch(module, batch, settings),
            "32-true",
            10_000,
            None,
            lambda techniques: verify(module, batch, techniques, **settings),
        )
        return replace(advice, lines=describe_loop(advice))


def make_optimizer_like(optimizer: Optimizer, parameters: Any) -> Optimizer:
    """Return a new optimizer of the same kind and with the same settings, for other parameters."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    kind: Any = type(optimizer)
    return kind([{**group, "params": list(parameters)}], lr=optimizer.defaults["lr"])


def describe_loop(advice: Advice) -> list[str]:
    """Return what to write in a loop of its own."""
    from lightning_fasttrain.planner.candidates import class_named

    lines = ["import lightning_fasttrain as ft", ""] if advice.techniques else []
    if advice.precision:
        lines.append(f"Fabric(precision={advice.precision!r}), or torch.autocast around the forward")
    for made in advice.techniques:
        kind = class_named(made.partition("(")[0].rpartition(".")[2])
        assert issubclass(kind, Technique)
        if kind.surgery is not None:
            lines.append(f"ft.apply(model, [{made}])  # before the optimizer is made")
        else:
            lines.append(f"{made}: ft.{kind.in_a_loop}")
    return lines
