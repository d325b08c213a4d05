"""Snapshots in the memory of peers beside checkpoint files: how long training stalls for one, and a restart loads.

torchrun --nproc-per-node=2 examples/cluster/peer_memory.py --folder checkpoints/peer_memory
torchrun --nnodes=2 --nproc-per-node=gpu ... examples/cluster/peer_memory.py --folder /shared/peer_memory

Run it where the training runs: files on a shared file system take other times than those on a local disk. A restart is
measured with all parts in place, and with one rank that has lost its host's memory and gets its part from its peer.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig
from lightning_fasttrain.core.machine import hardware, versions

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--folder", default="checkpoints/peer_memory", help="where checkpoints go, seen by all nodes")
parser.add_argument("--memory", default="/dev/shm", help="a folder in each node's memory")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--times", type=int, default=5)
parser.add_argument("--out", help="JSON file for the results")


def main():
    options = parser.parse_args()
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

    def lose_memory():
        if fabric.global_rank == fabric.world_size - 1:
            shutil.rmtree(here)

    measured = {
        ("save", "files"): lambda: fabric.save(file, state),
        ("save", "peers"): lambda: peers.save(1, state),
        ("load", "files"): lambda: fabric.load(file, state),
        ("load", "peers"): lambda: peers.load(state),
        ("load of a lost rank", "peers"): lambda: peers.load(state),
    }
    seconds = {key: [] for key in measured}
    # By turns, since other programs may slow down either.
    for _ in range(options.times):
        for (what, side), act in measured.items():
            if what == "load of a lost rank":
                lose_memory()
            seconds[what, side].append(time_of(fabric, act))
    seconds["load of a lost rank", "files"] = seconds["load", "files"]
    peers.clear()
    fabric.barrier()
    shutil.rmtree(here, ignore_errors=True)
    # Float32 weights and two moments.
    found = {"state_mib": sum(p.numel() for p in model.parameters()) * 12 / 2**20, "ranks": fabric.world_size}
    found["rows"] = [
        as_row(what, seconds[what, "files"], seconds[what, "peers"]) for what in ("save", "load", "load of a lost rank")
    ]
    if options.out and fabric.global_rank == 0:
        about = {"hardware": hardware(), "versions": versions(), "times": options.times}
        about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        Path(options.out).write_text(json.dumps({**about, **found}, indent=1) + "\n")
    fabric.print(f"{found['state_mib']:,.0f} MiB on {found['ranks']} ranks")
    fabric.print("\n".join(as_lines(found["rows"])))


def as_row(what, files, peers):
    """Return a row of the results: medians and ranges of seconds, and the ratio of the medians."""
    ratio = statistics.median(files) / statistics.median(peers)
    return {"what": what, "files_s": summary(files), "peers_s": summary(peers), "ratio": ratio}


def summary(seconds):
    return [statistics.median(seconds), min(seconds), max(seconds)]


def as_lines(rows):
    """Return the table of the results."""
    lines = ["| | files | memory of peers | times as fast |", "| --- | --- | --- | --- |"]
    for row in rows:
        files, peers = ("{:.3f} s ({:.3f}–{:.3f})".format(*row[side]) for side in ("files_s", "peers_s"))
        lines.append(f"| {row['what']} | {files} | {peers} | {row['ratio']:.1f} |")
    return lines


def time_of(fabric, act):
    """Return the seconds until all ranks have done it."""
    fabric.barrier()
    began = time.perf_counter()
    act()
    fabric.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
