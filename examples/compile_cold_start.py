"""The first step of compiled code: blocks beside the whole model, cold, and a second start with the saved cache.

    python examples/compile_cold_start.py [--blocks 1,4,12,24] [--width 64] [--out RESULTS.json]

Seconds of the first forward and backward of a small GPT, each in a fresh process with empty caches, temporary files of
the compiler included; importing torch is not counted. The second start has the file of ``save_compile_cache`` and, of
the first start, nothing but the precompiled headers, which torch keeps for the machine. CPU-seconds are those of the
process and of the C++ compilers that it started: on a busy machine they are what to compare.
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
from pathlib import Path

import torch

from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.bench.machine import hardware, versions
from lightning_fasttrain.model import compile_blocks_, load_compile_cache, save_compile_cache

KINDS = ("blocks", "whole")


def first_step(kind, depth, width, cache, starts_again):
    """What one process measures: from the saved cache, if there is one, to the end of the first backward."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=64, layers=depth, heads=4, width=width))
    tokens = torch.randint(0, 256, (2, 64))
    started, cpu = time.perf_counter(), sum(os.times()[:4])
    if starts_again and not load_compile_cache(cache):
        raise SystemExit(f"there is no cache {cache}")
    if kind == "blocks":
        compile_blocks_(model)
    else:
        model.compile()
    model(tokens).float().pow(2).mean().backward()
    seconds = {"s": time.perf_counter() - started, "cpu_s": sum(os.times()[:4]) - cpu}
    return seconds | {"cache_bytes": Path(cache).stat().st_size if starts_again else save_compile_cache(cache)}


def in_fresh_process(kind, depth, width, cache, starts_again, temporary, compiled):
    arguments = ["--child", json.dumps([kind, depth, width, str(cache), starts_again])]
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(depths, width):
    rows = []
    for depth in depths:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                temporary, cache = Path(folder, "tmp"), Path(folder, "cache.bin")
                temporary.mkdir()
                what = kind, depth, width, cache
                cold = in_fresh_process(*what, False, temporary, Path(folder, "first"))
                again = in_fresh_process(*what, True, temporary, Path(folder, "second"))
            rows.append({"kind": kind, "blocks": depth, "cold": cold, "again": again})
            print(as_line(rows[-1]), flush=True)
    return rows


def as_line(row):
    cold, again = row["cold"], row["again"]
    times = f"{cold['s']:8.1f} {cold['cpu_s']:8.1f} {again['s']:8.1f} {again['cpu_s']:8.1f}"
    return f"{row['blocks']:>6} {row['kind']:<8}{times} {cold['cache_bytes'] / 2**10:10.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="1,4,12,24", help="numbers of blocks; default: 1,4,12,24")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, metavar="JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_step(*json.loads(options.child))))
        return
    print("blocks compiled  cold s    CPU s  again s    CPU s  cache KiB")
    result = {
        "command": f"python {shlex.join(sys.argv)}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "width": options.width,
        "rows": compare([int(depth) for depth in options.blocks.split(",")], options.width),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    last = [row for row in result["rows"] if row["blocks"] == result["rows"][-1]["blocks"]]
    blocks, whole = (row["cold"]["cpu_s"] for row in last)
    print(f"{last[0]['blocks']} blocks: compiled as blocks in {blocks / whole:.2f} of the CPU time of the whole model")


if __name__ == "__main__":
    main()
