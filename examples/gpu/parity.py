"""Whether fast training learns the same: the losses of many steps, naive in float32 or as the top of a ladder.

    python examples/gpu/parity.py naive|top [--ladder ladder.json] [--steps 1000] [--out RESULT.json]

Both begin with the same weights and see the same batches in the same order, with AdamW at the same rate. The top is
the fast stack of the ladder given with --ladder; else what is stated here as DEFAULT_TOP.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lightning_fasttrain.bench.gpt import size_named
from lightning_fasttrain.bench.ladder.rungs import NAIVE
from lightning_fasttrain.bench.ladder.worker import run_rung
from lightning_fasttrain.bench.text import encode_text, read_text
from lightning_fasttrain.core.atomic_write import write_atomic

LEARNING_RATE = 3e-4
DEFAULT_TOP = {
    "callbacks": {
        "EagerGradientRelease": {},
        "DevicePrefetch": {},
        "FusedLossHead": {"head": "gpt.head"},
        "CompileBlocks": {},
    },
    "trainer": {"precision": "bf16-mixed"},
    "optimizer": {"fused": True},
    "loop": {"print_loss": False, "pin_memory": True},
}


def top_of(ladder_file):
    """The state of the ladder's top, and where it is from."""
    top = None
    if ladder_file is not None and ladder_file.exists():
        top = json.loads(ladder_file.read_text())["tops"].get("fast")
    if top is None:
        return DEFAULT_TOP, "the default: no ladder was given, or it has no fast stack"
    return top["state"], f"the ladder's rung {top['name']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("naive", "top"))
    parser.add_argument("--ladder", type=Path, help="a ladder.json, whose top is taken")
    parser.add_argument("--size", default="gpt2-small", help="a size of the ladder")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--tokens", type=Path, help="token numbers, an .npy file; default: bytes of Python's own source"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the losses")
    options = parser.parse_args()
    state, source = (NAIVE, "naive") if options.way == "naive" else top_of(options.ladder)
    with tempfile.TemporaryDirectory() as folder:
        tokens = options.tokens
        if tokens is None:
            tokens = Path(folder) / "tokens.npy"
            np.save(tokens, encode_text(read_text(), "bytes", 256))
        spec = {
            "model": asdict(size_named(options.size).model),
            "state": state,
            "tokens": str(tokens),
            "batch": options.batch,
            "seed": 0,
            "lr": LEARNING_RATE,
            "warmup": 5,
            "timed": options.steps - 6,
            "memory": 1,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "host": "trainer",
            "folder": folder,
        }
        found = run_rung(spec)
    del found["step_ms_all"]
    about = {"way": options.way, "source": source, "state": state, "batch": options.batch}
    if options.out is not None:
        write_atomic(options.out, json.dumps({**about, **found}))
    print(f"{source}: {len(found['losses'])} steps, loss {found['losses'][0]:.4f} → {found['loss']:.4f}")


if __name__ == "__main__":
    main()
