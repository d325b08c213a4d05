"""Watch torch itself while a loop runs: batches of loaders, backwards, updates of optimizers and schedulers."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.doctor.observation.source_lines import find_call
from lightning_fasttrain.doctor.observation.watch import LoaderFacts, Watch
from lightning_fasttrain.profiling.step_timer import TimedPhase


class TorchSeams:
    """Reports to a watch what every training loop does through torch, until :meth:`close`.

    Args:
        watch: what is reported to.
        is_training: whether a batch that is requested now belongs to training.
    """

    def __init__(self, watch: Watch, is_training: Callable[[], bool]) -> None:
        self.watch, self.is_training = watch, is_training
        self._thread = threading.get_ident()
        self._updating: list[TimedPhase] = []
        self._undo = ExitStack()

    def install(self) -> None:
        """Start reporting."""
        undo = self._undo
        undo.callback(patch(_BaseDataLoaderIter, "__next__", self._request(_BaseDataLoaderIter.__next__)))
        undo.callback(patch(DataLoader, "__iter__", self._iterate(DataLoader.__iter__)))
        undo.callback(patch(torch.autograd, "backward", self._go_backward(torch.autograd.backward)))
        for kind in _kinds_of_schedulers():
            undo.callback(patch(kind, "step", self._schedule(vars(kind)["step"])))
        undo.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def close(self) -> None:
        """Restore everything."""
        self._undo.close()

    def on_request(self) -> None:
        """Called before a batch is requested."""

    def on_arrival(self) -> None:
        """Called when a batch has arrived."""

    def on_update(self) -> None:
        """Called after an update."""

    def _concerns(self) -> bool:
        return threading.get_ident() == self._thread and self.is_training()

    def _request(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(loader: object) -> Any:
            if not self._concerns():
                return original(loader)
            self.on_request()
            with self.watch.timer.phase("data_wait"), self.watch.tracer:
                batch = self._next(original, loader)
            _note_loader(self.watch.loader, loader)
            self.on_arrival()
            return batch

        return request

    def _next(self, original: Callable[..., object], loader: object) -> Any:
        try:
            return original(loader)
        except StopIteration:
            # What follows an epoch, such as validation, is not a part of the step.
            self.watch.leave_look()
            raise

    def _iterate(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(loader: object) -> Any:
            if self._concerns():
                self.watch.loader.persistent = bool(loader.persistent_workers)
            return original(loader)

        return iterate

    def _go_backward(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: object, **kwargs: object) -> Any:
            if not self._concerns():
                return original(*args, **kwargs)
            self.watch.before_backward()
            with self.watch.timer.phase("backward"):
                return original(*args, **kwargs)

        return backward

    def _schedule(self, original: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: object, *args: object, **kwargs: object) -> Any:
            caller = sys._getframe(1)
            # A scheduler steps once when it is made.
            if caller.f_code.co_name != "_initial_step":
                self.watch.note_scheduler(scheduler, find_call(caller).line)
            return original(scheduler, *args, **kwargs)

        return step

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._concerns():
            return
        self.watch.before_update(optimizer, find_call(sys._getframe(1)).line)
        phase = self.watch.timer.phase("optimizer")
        phase.__enter__()
        self._updating.append(phase)

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._updating:
            return
        self._updating.pop().__exit__()
        self.watch.after_update(optimizer)
        self.on_update()


class LoopSeams(TorchSeams):
    """Also divides a loop into steps: from one batch to the next that is requested after an update.

    Where no ``DataLoader`` is used, a step lasts from one update of the first optimizer to its next.
    """

    def __init__(self, watch: Watch, when_done: Callable[[], None]) -> None:
        super().__init__(watch, torch.is_grad_enabled)
        self._when_done = when_done
        self._forward: TimedPhase | None = None
        self._has_loader = self._has_stepped = False

    def install(self) -> None:
        super().install()
        self._begin_forward()
        self.watch.begin_step()

    def close(self) -> None:
        self._end_forward()
        super().close()

    def on_request(self) -> None:
        self._end_forward()
        self._has_loader = True
        if self._has_stepped:
            self._end_step()

    def on_arrival(self) -> None:
        self._begin_forward()

    def on_update(self) -> None:
        self._end_forward()
        self._has_stepped = True
        if not self._has_loader and len(self.watch.updates) == 1:
            self._end_step()
            self._begin_forward()

    def _end_step(self) -> None:
        self._has_stepped = False
        if self.watch.has_ended:
            return
        self.watch.end_step()
        self.watch.timer.end_step()
        if self.watch.has_ended:
            self._when_done()
        else:
            self.watch.begin_step()

    def _begin_forward(self) -> None:
        if self._forward is None:
            self._forward = self.watch.timer.phase("forward")
            self._forward.__enter__()

    def _end_forward(self) -> None:
        # An update within a closure ends while phases around it are open.
        if self._forward is not None and self.watch.timer.current == "forward":
            self._forward.__exit__()
            self._forward = None


def _note_loader(facts: LoaderFacts, loader: object) -> None:
    facts.workers, facts.pins_memory = loader._num_workers, loader._pin_memory
    facts.dataset = type(loader._dataset).__name__


def _kinds_of_schedulers() -> Iterable[type]:
    """Yield the classes that define ``step``; those of composite schedulers call the ``step`` of their parts."""
    for kind in (LRScheduler, ReduceLROnPlateau):
        if "step" in vars(kind):
            yield kind
