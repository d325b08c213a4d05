"""One rung in its own process: ``python -m lightning_fasttrain.bench.worker SPEC.json RESULT.json``.

Progress goes to stdout, one JSON object a line; the result is written whole or not at all. A failure becomes
``{"error": ...}`` in the result and exit code 1.
"""

import json
import logging
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._messages import FastTrainWarning
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.hosts import run_in_a_bare_loop, run_in_trainer
from lightning_fasttrain.bench.recorder import Recorder
from lightning_fasttrain.bench.text import batches
from lightning_fasttrain.model import CompileBlocks


def run_rung(spec: dict[str, Any]) -> dict[str, Any]:
    """Train the reference model as ``spec`` says, and measure.

    Args:
        spec: plain JSON. ``model``: arguments of GPTConfig; ``state``: see :mod:`.rungs`; ``tokens``: path of an
            ``.npy`` file; ``batch``, ``seed``, ``lr``, ``warmup``, ``timed``, ``memory``: numbers; ``device``:
            ``"cpu"`` or ``"cuda"``; ``host``: ``"trainer"`` or ``"bare"``; ``folder``: for files nobody keeps.

    Returns:
        Plain JSON: what :meth:`.Recorder.result` gives, ``wall_s``, ``compile`` and ``notes``.
    """
    started = time.perf_counter()
    state, device = spec["state"], torch.device(spec["device"])
    config = GPTConfig(**spec["model"])
    recorder = Recorder(
        device, spec["warmup"], spec["timed"], spec["memory"], print_loss=state["loop"].get("print_loss", False)
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
    return {
        **recorder.result(tokens_per_step=spec["batch"] * config.context),
        "wall_s": time.perf_counter() - started,
        "compile": reports[0] if reports and spec["host"] == "trainer" else None,
        "notes": sorted({str(w.message) for w in caught if issubclass(w.category, FastTrainWarning)}),
    }


def main(arguments: list[str]) -> int:
    spec_file, result_file = map(Path, arguments)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        result = run_rung(json.loads(spec_file.read_text()))
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        result = {"error": f"{type(error).__name__}: {first_line}".removesuffix(": ")}
    write_atomic(result_file, json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
