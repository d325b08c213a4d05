"""Train one rung in a process of its own, report progress, and write the result to a file."""

import gc
import itertools
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_fasttrain import loaders, micro_batching, optim
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.results import State
from lightning_fasttrain.bench.text import batches
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import DeviceTimer, Moment, Neighbours, ms_between
from lightning_fasttrain.core.messages import FastTrainWarning, explain
from lightning_fasttrain.planner.candidates import class_named
from lightning_fasttrain.proof.verification.short_run import PeakObserver
from lightning_fasttrain.technique import Technique, apply

MIB = 2**20
# Wall clock, and the clock that programs are compared by, in seconds; on a GPU both are the same event.
_Stamp = tuple[Moment, Moment]
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Recorder(PeakObserver):
    """Watches a training loop that calls :meth:`begin` before each step and :meth:`end` after it.

    As a callback it does so itself. List it last, so that the work of every other callback is inside.

    Steps come in three phases: warm-up; memory, as watching every allocation takes time; and timed, from the end of a
    step to the end of the next, so that the loader's and the loop's own time count. With ``ask``, the run pauses
    before each turn of timed steps until it gets word to continue or to stop.

    Two clocks are read. Programs are compared by :meth:`turn`: the processor time of this process, which other
    processes change less than the wall clock, or the events of a GPU. :meth:`result` has the time by the wall clock.

    Args:
        device: where the steps run.
        warmup: steps before the clock counts.
        timed: steps on the clock; with ``ask``, those of one turn.
        memory: steps whose peak memory is taken; at least one.
        tell: called after each step with its number, its phase and perhaps its loss.
        tell_loss: fetch and report the loss of every step, as a naive loop does; the host then waits for the device.
        turns: the most turns that there can be.

    Attributes:
        steps: number of steps of the run; with ``ask``, the most.
        ask: waits, and returns whether there is another turn; None: there are all of them.

    Example:
        >>> recorder = Recorder(torch.device("cpu"), warmup=1, timed=2, tell=print)
        >>> recorder.phase(0), recorder.phase(1), recorder.phase(3), recorder.steps
        ('warm-up', 'memory', 'timed', 4)
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        timed: int,
        memory: int = 1,
        tell: Callable[[dict[str, Any]], None] | None = None,
        tell_loss: bool = False,
        turns: int = 1,
    ) -> None:
        self.device, self.warmup, self.memory, self.timed = device, warmup, memory, timed
        # Memory that a paused run has freed is taken from the driver again in the first step of a turn.
        self.untimed = int(turns > 1 and device.type == "cuda")
        self.steps = warmup + memory + turns * (timed + self.untimed)
        self.tell, self.tell_loss = tell, tell_loss
        self.ask: Callable[[], bool] | None = None
        self.losses: list[Tensor] = []
        self._turns: list[list[_Stamp]] = []
        self._neighbours, self._cores = Neighbours(), None
        self._timer = DeviceTimer(self.device)

    def phase(self, step: int) -> str:
        if step < self.warmup:
            return "warm-up"
        return "memory" if step < self.warmup + self.memory else "timed"

    def begin(self, step: int, *held: object) -> None:
        """Record the beginning of a step; ``held`` is in memory already: module, optimizer, batch."""
        if self.phase(step) == "memory":
            self.begin_measuring(self.device, *held)

    def end(self, step: int, loss: Tensor) -> bool:
        """Record the end of a step, after its optimizer step; return whether another step follows."""
        self.end_measuring()
        # Kept as a tensor: to read its value the host would wait for the device.
        self.losses.append(loss.detach())
        message: dict[str, Any] = {"step": step + 1, "phase": self.phase(step)}
        if self.tell_loss:
            message["loss"] = loss.item()
        if self.tell is not None:
            self.tell(message)
        done = step + 1 - self.warmup - self.memory  # steps of the turns so far
        if done > 0:
            self._turns[-1].append(self._stamp())
        if done < 0 or done % (self.untimed + self.timed):
            return True
        if step + 1 == self.steps or (self.ask is not None and not self._pause()):
            return False
        self._neighbours = Neighbours()
        self._turns.append([self._stamp()])
        return True

    def _pause(self) -> bool:
        """Wait for the next turn, meanwhile leaving a GPU's free memory to other processes."""
        assert self.ask is not None
        # A full collection takes as long as several short steps, and would fall into a turn by chance.
        gc.collect()
        gc.freeze()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self._cores = self._neighbours.cores()
        return self.ask()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: right before the step."""
        self.begin(batch_idx, pl_module, *trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped and the loss of the step is known."""
        # Lightning makes a dict of whatever training_step returns.
        if not self.end(batch_idx, outputs["loss"]):
            trainer.should_stop = True

    def turn(self) -> dict[str, float | None]:
        """Return the time of a step in the last turn: by the clock that programs are compared by, and by the wall.

        Also the number of cores that other processes kept busy meanwhile. Empty before the first turn.
        """
        if not self._turns:
            return {}
        first, last = self._turns[-1][self.untimed], self._turns[-1][-1]
        return {
            "ms": ms_between(first[1], last[1]) / self.timed,
            "wall_ms": ms_between(first[0], last[0]) / self.timed,
            "cores": self._cores,
        }

    def result(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the measurements as plain JSON, after waiting for the device. Times are by the wall clock."""
        times_ms = []
        for turn in self._turns:
            stamps = turn[self.untimed :]
            times_ms += [ms_between(before[0], after[0]) for before, after in itertools.pairwise(stamps)]
        step_ms = statistics.median(times_ms or [math.nan])
        losses = list(map(float, self.losses))
        return {
            "step_ms": step_ms,
            "step_ms_all": times_ms,
            "tokens_per_s": tokens_per_step / step_ms * 1000,
            "peak_mib": self.peak_bytes / MIB,
            "loss": losses[-1],
            "losses": losses,
        }

    def _stamp(self) -> _Stamp:
        now = self._timer.now()
        return now, now if self.device.type == "cuda" else time.process_time()


def callbacks_of(state: State) -> list[L.Callback]:
    """Make the callbacks of a state, whose names are public names of this package.

    Raises:
        ValueError: there is nothing of that name.

    Example:
        >>> [type(callback).__name__ for callback in callbacks_of({"callbacks": {"MicroBatching": {"n": 2}}})]
        ['MicroBatching']
    """
    return [_make(name, arguments) for name, arguments in state["callbacks"].items()]


def _make(name: str, arguments: Mapping[str, object]) -> Any:
    values = {}
    for key, value in arguments.items():
        if isinstance(value, dict):
            value = _make(*next(iter(value.items())))
        values[key] = value
    return class_named(name)(**values)


def run_in_trainer(module: GPTModule, loader: Iterable[object], state: State, recorder: Recorder, folder: str) -> None:
    """Train with ``L.Trainer`` for ``recorder.steps`` steps, or until the recorder stops it."""
    trainer = L.Trainer(
        accelerator="gpu" if recorder.device.type == "cuda" else "cpu",
        devices=1,
        max_steps=recorder.steps,
        callbacks=[*callbacks_of(state), recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **state["trainer"],
    )
    trainer.fit(module, loader)


def run_in_a_bare_loop(module: GPTModule, loader: Iterable[object], state: State, recorder: Recorder) -> None:
    """Train with the same techniques as plain functions, to measure the overhead of the Trainer.

    Raises:
        ValueError: a technique of the state has no function that this loop calls.
    """
    callbacks = callbacks_of(state)
    kinds = set(map(type, callbacks))
    parts = max([callback.n for callback in callbacks if isinstance(callback, micro_batching.MicroBatching)], default=1)
    device = recorder.device
    half = _HALF.get(state["trainer"]["precision"])
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)  # changes nothing if it is not enabled
    with_surgery = [c for c in callbacks if isinstance(c, Technique) and type(c).apply is not Technique.apply]
    in_the_loop = {micro_batching.MicroBatching, loaders.DevicePrefetch}
    known = in_the_loop | {optim.EagerGradientRelease, optim.OptimizerInBackward}
    unknown = sorted(kind.__name__ for kind in kinds - known - set(map(type, with_surgery)))
    if unknown:
        what, way_out = f"{', '.join(unknown)} in a bare loop", "Add it to run_in_a_bare_loop"
        raise ValueError(explain(what, "it has no place in it yet", way_out))
    with apply(module, with_surgery):
        module.to(device)
        optimizer = module.configure_optimizers()
        if optim.OptimizerInBackward in kinds:
            optim.optimize_in_backward_(optimizer)
        batches = loader
        if loaders.DevicePrefetch in kinds:
            batches = loaders.prefetch_to_device(loader, device)

        def loss_of(batch: Any) -> Tensor:
            with torch.autocast(device.type, half, enabled=half is not None, cache_enabled=False):  # as in the Trainer
                return scaler.scale(module.loss(batch))

        for step, batch in enumerate(batches):
            batch = [part.to(device, non_blocking=True) for part in batch]
            recorder.begin(step, module, optimizer, batch)
            loss = micro_batching.accumulate_gradients(loss_of, batch, parts)
            loss = loss / scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if not recorder.end(step, loss):
                break


def multiply_alone(module: GPTModule, batch: int, state: State, recorder: Recorder) -> None:
    """Run the matrix products and the attention of each step alone, in its precision: no training takes less time."""
    device, config = recorder.device, module.gpt.config
    make = partial(torch.randn, device=device, dtype=_HALF.get(state["trainer"]["precision"], torch.float32))
    weights = [make(layer.weight.shape) for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    # One matrix for each width, since a product takes no time by being the first of its kind.
    rows = {width: make(batch * config.context, width) for weight in weights for width in weight.shape}
    by_head = (batch, config.heads, config.context, config.width // config.heads)
    q, k, v = (make(by_head).requires_grad_() for _ in range(3))
    for step in range(recorder.steps):
        recorder.begin(step)
        for weight in weights:
            gradients, inputs = (rows[width] for width in weight.shape)
            for left, right in ((inputs, weight.T), (gradients, weight), (gradients.T, inputs)):
                torch.mm(left, right)
        for _ in range(config.layers):
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(mixed, (q, k, v), mixed.detach())
        if not recorder.end(step, torch.zeros(())):
            break


def work(spec: dict[str, Any], result_file: Path, stderr_file: Path, parent: "Connection[Any, Any]") -> None:
    """Run :func:`run_rung` in this process; an error becomes ``{"error": ...}`` in the result.

    Args:
        spec: what :func:`run_rung` takes.
        result_file: JSON, written whole or not at all.
        stderr_file: gets what libraries print, for the reader of a crash.
        parent: where progress is sent, and turns are received from.
    """
    with stderr_file.open("wb") as stream:
        for printed in (sys.stdout, sys.stderr):
            # The descriptor is replaced, since C++ code does not print through sys.stdout.
            os.dup2(stream.fileno(), printed.fileno())
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        result = run_rung(spec, parent.send, parent.recv)
    except Exception as error:
        lines = str(error).strip().splitlines()
        result = {"error": ": ".join([type(error).__name__, *lines[:1]])}
    write_atomic(result_file, json.dumps(result))


def run_rung(
    spec: dict[str, Any],
    tell: Callable[[dict[str, Any]], None] | None = None,
    wait: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Train the reference model as ``spec`` says, and measure.

    Args:
        spec: plain JSON. ``model``: arguments of GPTConfig; ``state``: see :mod:`.rungs`; ``tokens``: path of an
            ``.npy`` file; ``batch``, ``seed``, ``lr``, ``warmup``, ``timed``, ``memory``: numbers; ``device``:
            ``"cpu"`` or ``"cuda"``; ``host``: ``"trainer"``, ``"bare"``, or ``"products"``, which trains nothing;
            ``folder``: for temporary files; perhaps ``turns``: the most turns of ``timed`` steps, and ``padded``:
            whether texts are of different lengths.
        tell: called with each message of the recorder.
        wait: waits for the next turn, and returns False if there is none; before it is called, ``tell`` is called
            with the result so far and the phase ``"turn"``. Without it there is one turn.

    Returns:
        Plain JSON: what :meth:`.Recorder.result` gives, and ``notes``.
    """
    state, device = spec["state"], torch.device(spec["device"])
    if device.type == "cuda":
        # Inductor's processes keep a core busy for ten seconds, beside the turns; kernels for a few blocks need none.
        torch._inductor.config.compile_threads = 1
    config = GPTConfig(**spec["model"])
    tokens_per_step = spec["batch"] * config.context
    counts = {key: spec[key] for key in ("warmup", "timed", "memory", "turns") if key in spec}
    recorder = Recorder(device, tell=tell, tell_loss=state["loop"].get("print_loss", False), **counts)
    # Every rung starts with the same weights, so that losses can be compared.
    torch.manual_seed(spec["seed"])
    module = GPTModule(config, lr=spec["lr"], **state["optimizer"])
    if "compile" in state["loop"]:
        # With the cross-entropy, where most is gained.
        module.loss = torch.compile(module.loss, **state["loop"]["compile"])
    loader = batches(
        np.load(spec["tokens"], mmap_mode="r", allow_pickle=False),
        config.context,
        spec["batch"],
        recorder.steps,
        spec["seed"],
        pin_memory=device.type == "cuda" and state["loop"].get("pin_memory", False),
        padded=spec.get("padded", False),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FastTrainWarning)
        if tell is not None and wait is not None:
            recorder.ask = partial(_pause, recorder, tell, wait, partial(_result, recorder, tokens_per_step, caught))
        if spec["host"] == "products":
            multiply_alone(module, spec["batch"], state, recorder)
        elif spec["host"] == "bare":
            run_in_a_bare_loop(module, loader, state, recorder)
        else:
            run_in_trainer(module, loader, state, recorder, spec["folder"])
    return _result(recorder, tokens_per_step, caught)


def _pause(
    recorder: Recorder,
    tell: Callable[[dict[str, Any]], None],
    wait: Callable[[], bool],
    result: Callable[[], Mapping[str, object]],
) -> bool:
    """Send the result so far, with the time of the last turn, and wait for the next turn."""
    tell({**result(), **recorder.turn(), "phase": "turn"})
    return wait()


def _result(recorder: Recorder, tokens_per_step: int, caught: list[warnings.WarningMessage]) -> dict[str, Any]:
    notes = {str(w.message) for w in caught if issubclass(w.category, FastTrainWarning)}
    return {**recorder.result(tokens_per_step), "notes": sorted(notes)}
