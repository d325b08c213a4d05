"""What a snapshot in the memory of peers takes beside a checkpoint in files: seconds to save and to load, and ratios.

torchrun --nproc-per-node=2 examples/cluster/peer_memory.py --folder checkpoints/peer_memory
torchrun --nnodes=2 --nproc-per-node=gpu ... examples/cluster/peer_memory.py --folder /shared/peer_memory

Run it where the training runs: files on a shared file system take other times than those on a local disk.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import lightning as L
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--folder", default="checkpoints/peer_memory", help="where checkpoints go, seen by all nodes")
parser.add_argument("--memory", default="/dev/shm", help="a folder in each node's memory")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--times", type=int, default=5)
parser.add_argument("--out", help="JSON file for the results")
options = parser.parse_args()


def main():
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = L.Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=nodes, strategy=ft.FabricFSDP2Strategy())
    fabric.launch()
    config = GPTConfig(vocabulary=4096, context=64, layers=options.layers, heads=4, width=options.width)
    model = fabric.setup_module(GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    fabric.backward(model(torch.zeros(1, 64, dtype=torch.int64, device=fabric.device)).square().mean())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    here = Path(options.memory) / f"fasttrain-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{fabric.global_rank}"
    peers, file = ft.run.PeerMemory(here), Path(options.folder) / "step=1.ckpt"
    found = {
        "state_mib": sum(p.numel() for p in model.parameters()) * 12 / 2**20,  # float32 weights and two moments
        "ranks": fabric.world_size,
        "files": {
            "save_s": measure(fabric, lambda: fabric.save(file, state)),
            "load_s": measure(fabric, lambda: fabric.load(file, state)),
        },
        "peers": {
            "save_s": measure(fabric, lambda: peers.save(1, state)),
            "load_s": measure(fabric, lambda: peers.load(state)),
        },
    }
    peers.clear()
    fabric.barrier()
    shutil.rmtree(here, ignore_errors=True)
    for what in ("save_s", "load_s"):
        found[f"{what[:4]} ratio"] = found["files"][what] / found["peers"][what]
    if options.out and fabric.global_rank == 0:
        Path(options.out).write_text(json.dumps(found, indent=1))
    fabric.print(
        f"{found['state_mib']:,.0f} MiB on {found['ranks']} ranks: files {found['files']['save_s']:.3f} s to save, "
        f"{found['files']['load_s']:.3f} s to load; memory of peers {found['peers']['save_s']:.3f} s and "
        f"{found['peers']['load_s']:.3f} s: {found['save ratio']:.1f} and {found['load ratio']:.1f} times as fast"
    )


def measure(fabric, act):
    """Return the median seconds that all ranks take."""
    seconds = []
    for _ in range(options.times):
        fabric.barrier()
        began = time.perf_counter()
        act()
        fabric.barrier()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
