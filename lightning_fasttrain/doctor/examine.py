"""Examine a Fabric or bare training loop: a context manager around it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.doctor.diagnose import diagnose
from lightning_fasttrain.doctor.diagnosis import Diagnosis
from lightning_fasttrain.doctor.doctor import show
from lightning_fasttrain.doctor.observation.watch import MANY_STEPS, StepCount, Watch
from lightning_fasttrain.doctor.observation.watched_calls import LoopPatches
from lightning_fasttrain.doctor.page import save_diagnosis
from lightning_fasttrain.step_time.machine import Machine, read_machine


class Examination:
    """A context around a training loop; see :func:`examine`.

    Attributes:
        diagnosis: the result; None until all steps were watched, or the context ended, and if nothing was trained.
        watch: what was seen, which stays.
    """

    def __init__(self, watch: Watch, report: Callable[[Diagnosis], None], machine: Machine | None = None) -> None:
        self.diagnosis: Diagnosis | None = None
        self._report, self._machine = report, machine
        self.watch, self._watch = watch, watch
        self._patches = LoopPatches(watch, self._finish)

    def __enter__(self) -> Self:
        # Other ranks are not watched, and none of them waits for the first one.
        if self._watch is not None and not getattr(rank_zero_only, "rank", None):
            self._watch.sampler.start()
            self._patches.install()
        else:
            self._watch = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A script may end with sys.exit().
        has_ended = kind is None or issubclass(kind, SystemExit)
        if has_ended and self._watch is not None and self._watch.updates:
            self._finish()
        else:
            self.cancel()

    def cancel(self) -> None:
        """Stop watching, and report nothing."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._patches.close()
            watch.close()

    def _finish(self) -> None:
        watch = self._watch
        if watch is not None:
            self.cancel()
            self.diagnosis = diagnose(watch, self._machine)
            self._report(self.diagnosis)


@check_arguments(steps=MANY_STEPS)
def examine(
    steps: StepCount = 20,
    warmup: PositiveInt = 3,
    device: torch.device | str | None = None,
    out: str | os.PathLike[str] | None = None,
    report: Callable[[Diagnosis], None] = show,
    machine: str | os.PathLike[str] | Machine | None = None,
) -> Examination:
    """Watch some steps of the training loop in a ``with`` block, and report what costs time or memory in them.

    The loop is not changed. A step lasts from one batch of a ``DataLoader`` to the next that is requested after an
    update; without a ``DataLoader``, from one update to the next. After ``steps`` steps the block continues unwatched.

    Args:
        steps: number of optimizer steps to watch, at least 6; three of them are looked at in detail.
        warmup: number of steps before them.
        device: device of the model; by default CUDA where there is one.
        out: folder for ``doctor.html`` and ``doctor.json``; with it, the memory of one step is recorded.
        report: called with the diagnosis; prints it by default.
        machine: the device whose rates the step is compared with, as of :class:`Doctor`.

    Returns:
        The context manager, whose ``diagnosis`` is set when the steps are done.

    Raises:
        TypeError, ValueError: a number of steps is invalid, or the machine is unknown.
        FileNotFoundError: there is no such file of a machine.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with examine(steps=6, warmup=1, device="cpu", report=lambda diagnosis: None) as examination:
        ...     for _ in range(8):
        ...         loss = net(torch.ones(2, 8)).sum()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> examination.diagnosis.steps
        3

    Source:
        Ours.
    """
    known = None if machine is None else read_machine(machine)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    watch = Watch(torch.device(device), steps, warmup, records_memory=out is not None)

    def save_and_report(diagnosis: Diagnosis) -> None:
        if out is not None:
            save_diagnosis(diagnosis, Path(out))
        report(diagnosis)

    return Examination(watch, save_and_report, known)
