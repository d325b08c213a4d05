"""What this device can do at most: bf16 products in TFLOPS, copies in GB/s. The rest is measured against it.

    python examples/gpu/ceilings.py [--sizes 4096,8192,16384] [--mib 1024] [--out RESULTS.json]

A product of n × n matrices counts 2·n³ operations. A copy within the device reads and writes, so its bytes count twice;
copies from and to the host are of pinned memory and count once. On a CPU products are in float32, to try the script.
"""

import argparse
import json
from pathlib import Path

import torch

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import time_ms

MIB = 2**20


def seconds_each(work, device, repeats=20):
    """Seconds that ``work`` takes in a row of them, with the device waited for at both ends."""
    for _ in range(3):
        work()
    ms = time_ms(torch.device(device), lambda: [work() for _ in range(repeats)])
    return ms / 1e3 / repeats


def matmul_tflops(size, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / seconds_each(lambda: torch.mm(left, right, out=out), device) / 1e12


def copy_gb_per_s(mib, device):
    count = mib * MIB
    here, there = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    found = {"device": 2 * count / seconds_each(lambda: there.copy_(here), device) / 1e9}
    if device == "cuda":
        host = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        found["host to device"] = count / seconds_each(lambda: here.copy_(host, non_blocking=True), device) / 1e9
        found["device to host"] = count / seconds_each(lambda: host.copy_(here, non_blocking=True), device) / 1e9
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4096,8192,16384", help="widths of the matrices")
    parser.add_argument("--mib", type=int, default=1024, help="size of what is copied")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tflops = {}
    for size in map(int, options.sizes.split(",")):
        tflops[size] = matmul_tflops(size, device)
        print(f"product of {size:>6} × {size:<6} {tflops[size]:8.1f} TFLOPS", flush=True)
    copies = copy_gb_per_s(options.mib, device)
    for way, speed in copies.items():
        print(f"copy, {way:<15} {speed:10.1f} GB/s")
    if options.out is not None:
        found = {"device": device, "tflops": max(tflops.values()), "tflops_by_size": tflops, "gb_per_s": copies}
        write_atomic(options.out, json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
