"""How long compilation keeps you waiting: seconds of the first step, blocks compiled against the whole model.

    python examples/gpu/cold_start.py [--size gpt2-small] [--layers 12,24] [--out RESULTS.json]

Each start is a process of its own: a cold one whose compiler has an empty cache, then a warm one with what the cold
one has left there. The second step, which finds all compiled, stands beside the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import lightning_fasttrain as ft
from lightning_fasttrain._files import write_atomic
from lightning_fasttrain.bench.gpt import GPTModule
from lightning_fasttrain.bench.sizes import size_named

WAYS = ("plain", "blocks", "whole")


def first_steps(way, size, layers, batch):
    """Seconds of the first and of the second step, forward and backward, in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(size_named(size).model, layers=layers)
    torch.manual_seed(0)
    module = GPTModule(config).to(device)
    tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)
    if way == "blocks":
        ft.compile_blocks_(module)
    if way == "whole":
        module.gpt.compile()
    return [step_seconds(module, tokens, device) for _ in range(2)]


def step_seconds(module, tokens, device):
    started = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = module.loss((tokens, tokens))
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def start(way, layers, options, cache):
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--ways", way, "--layers", str(layers), "--size", options.size]
    command += ["--batch", str(options.batch), "--here"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if run.returncode:
        return {"error": f"ended with exit code {run.returncode}"}
    first, second = json.loads(run.stdout.splitlines()[-1])
    return {"first_step_s": first, "second_step_s": second}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="gpt2-small", help="a size of the ladder, but for its layers")
    parser.add_argument("--layers", default="12,24")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(first_steps(options.ways, options.size, int(options.layers), options.batch)))
        return
    rows = []
    for layers in map(int, options.layers.split(",")):
        for way in options.ways.split(","):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    rows.append({"way": way, "layers": layers, "start": kind, **start(way, layers, options, cache)})
                    print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                    if options.out is not None:
                        write_atomic(options.out, json.dumps({"size": options.size, "rows": rows}))


if __name__ == "__main__":
    main()
