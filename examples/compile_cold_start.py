"""The first step of compiled code: blocks beside the whole model, cold, and a second start with the compiler's folder.

    python examples/compile_cold_start.py [--blocks 1,4,12,24] [--size gpt2-small] [--out RESULTS.json]

Seconds of the first forward and backward of a GPT, each in a fresh process with empty caches, temporary files of the
compiler included; importing torch is not counted. The second start finds the folder that ``TORCHINDUCTOR_CACHE_DIR``
names as the first has left it. CPU-seconds are those of the process and of the compilers that it started: on a busy
machine they are what to compare. The second step finds all compiled. Rows are kept as they come.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule, size_named
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.model import compile_blocks_

KINDS = ("blocks", "whole")
SMALL = GPTConfig(context=64, heads=4, width=64)  # its kernels take as long to compile as a large model's


def first_steps(kind, blocks, options):
    """What one process measures: to the end of the first backward, and of the second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(SMALL if options.size is None else size_named(options.size).model, layers=blocks)
    torch.manual_seed(0)
    module = GPTModule(config).to(device)
    tokens = torch.randint(config.vocabulary, (options.batch, config.context), device=device)
    started, cpu = time.perf_counter(), sum(os.times()[:4])
    if kind == "blocks":
        compile_blocks_(module)
    else:
        module.gpt.compile()
    take_step(module, tokens)
    first = {"s": time.perf_counter() - started, "cpu_s": sum(os.times()[:4]) - cpu}
    started = time.perf_counter()
    take_step(module, tokens)
    return first | {"second_step_s": time.perf_counter() - started}


def take_step(module, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss = module.loss((tokens, tokens))
    loss.backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()


def in_fresh_process(kind, blocks, folder):
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", "TRITON_CACHE_DIR": f"{folder}/triton"}
    command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--blocks", str(blocks)]
    environment = {**os.environ, **caches, "TMPDIR": folder}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(options):
    """A row for each number of blocks and each way to compile them."""
    for blocks in map(int, options.blocks.split(",")):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                cold, again = (in_fresh_process(kind, blocks, folder) for _ in range(2))
            yield {"kind": kind, "blocks": blocks, "cold": cold, "again": again}


def as_line(row):
    cold, again = row["cold"], row["again"]
    times = f"{cold['s']:8.1f} {cold['cpu_s']:8.1f} {again['s']:8.1f} {again['cpu_s']:8.1f}"
    return f"{row['blocks']:>6} {row['kind']:<8}{times}"


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="1,4,12,24", help="numbers of blocks; default: 1,4,12,24")
    parser.add_argument("--size", help="a size of the ladder's, but for its blocks; default: a small one")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--out", type=Path, metavar="JSON")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)  # one process's share
    return parser.parse_args()


def main():
    options = parse_options()
    if options.kind:
        print(json.dumps(first_steps(options.kind, int(options.blocks), options)))
        return
    print("blocks compiled  cold s    CPU s  again s    CPU s")
    result = {
        "command": without_paths(shlex.join(["python", "examples/compile_cold_start.py", *sys.argv[1:]])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "size": options.size,
        "rows": [],
    }
    for row in compare(options):
        print(as_line(row), flush=True)
        result["rows"].append(row)
        if options.out is not None:
            write_atomic(options.out, json.dumps(result, indent=1) + "\n")
    blocks, whole = (row["cold"]["cpu_s"] for row in result["rows"][-2:])
    print(f"{row['blocks']} blocks: compiled as blocks in {blocks / whole:.2f} of the CPU time of the whole model")


if __name__ == "__main__":
    main()
