"""Train one rung in a process of its own, report progress, and write the result to a file."""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.recorder import Recorder
from lightning_fasttrain.bench.ladder.training_loops import run_in_a_bare_loop, run_in_trainer
from lightning_fasttrain.bench.text import batches
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.machine import Neighbours
from lightning_fasttrain.core.messages import FastTrainWarning
from lightning_fasttrain.model import CompileBlocks

_QUIET_CORES = 0.3


def work(spec: dict[str, Any], result_file: Path, stderr_file: Path, teller: "Connection[Any, Any]") -> None:
    """Run :func:`run_rung` in this process, with a failure as ``{"error": ...}`` in the result.

    Args:
        spec: what :func:`run_rung` takes.
        result_file: JSON, written whole or not at all.
        stderr_file: gets what libraries print, for the reader of a crash.
        teller: where progress is sent.
    """
    with stderr_file.open("wb") as stream:
        for printed in (sys.stdout, sys.stderr):
            os.dup2(stream.fileno(), printed.fileno())  # of the descriptor: what C++ prints goes there too
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        result = run_rung(spec, teller.send)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        result = {"error": f"{type(error).__name__}: {first_line}".removesuffix(": ")}
    write_atomic(result_file, json.dumps(result))


def run_rung(spec: dict[str, Any], tell: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Train the reference model as ``spec`` says, and measure.

    Args:
        spec: plain JSON. ``model``: arguments of GPTConfig; ``state``: see :mod:`.rungs`; ``tokens``: path of an
            ``.npy`` file; ``batch``, ``seed``, ``lr``, ``warmup``, ``timed``, ``memory``: numbers; ``device``:
            ``"cpu"`` or ``"cuda"``; ``host``: ``"trainer"`` or ``"bare"``; ``folder``: for temporary files.
        tell: called with each message of the recorder.

    Returns:
        Plain JSON: what :meth:`.Recorder.result` gives, ``wall_s``, ``disturbed_cores`` (None for a quiet machine),
        ``compile`` and ``notes``.
    """
    started, neighbours = time.perf_counter(), Neighbours()
    state, device = spec["state"], torch.device(spec["device"])
    config = GPTConfig(**spec["model"])
    recorder = Recorder(
        device, spec["warmup"], spec["timed"], spec["memory"], tell, state["loop"].get("print_loss", False)
    )
    torch.manual_seed(spec["seed"])  # the same initial weights on every rung
    module = GPTModule(config, lr=spec["lr"], **state["optimizer"])
    loader = batches(
        np.load(spec["tokens"], mmap_mode="r", allow_pickle=False),
        config.context,
        spec["batch"],
        recorder.steps,
        spec["seed"],
        pin_memory=device.type == "cuda" and state["loop"].get("pin_memory", False),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FastTrainWarning)
        if spec["host"] == "bare":
            callbacks = run_in_a_bare_loop(module, loader, state, recorder)
        else:
            callbacks = run_in_trainer(module, loader, state, recorder, spec["folder"])
    reports = [asdict(callback.report) for callback in callbacks if isinstance(callback, CompileBlocks)]
    notes = {str(w.message) for w in caught if issubclass(w.category, FastTrainWarning)}
    return {
        **recorder.result(tokens_per_step=spec["batch"] * config.context),
        "wall_s": time.perf_counter() - started,
        "disturbed_cores": _disturbance(neighbours.cores()),
        "compile": reports[0] if reports and spec["host"] == "trainer" else None,
        "notes": sorted(notes),
    }


def _disturbance(cores: float | None) -> float | None:
    return None if cores is None or cores < _QUIET_CORES else round(cores, 2)
