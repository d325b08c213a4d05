"""Files, collectives and requests to the store of start-up, a step, a checkpoint and a resume, at 2 to 16 ranks.

    python examples/scale_counts.py [--ranks 2,4,8,16] [--out RESULTS.json]

The ranks are processes on this machine with gloo, and FSDP2 shards a tiny GPT. Each count is the sum over all ranks; a
straight line and a parabola are fitted to it, and the parabola is given where it is needed: then the count grows with
the square of the number of ranks.
"""

import argparse
import collections
import gc
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lightning as L
import numpy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.core.distributed import gather, pack

REQUESTS = ("set", "get", "add", "wait", "check", "delete_key", "compare_set", "append", "multi_get", "multi_set")


class CountingStore(dist.Store):
    """A store that passes requests on to another one, and counts them."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.counts = inner, collections.Counter()

    @property
    def timeout(self):
        return self.inner.timeout

    def set_timeout(self, timeout):
        self.inner.set_timeout(timeout)

    def has_extended_api(self):
        return self.inner.has_extended_api()

    def clone(self):
        return self


def _forward(name):
    def request(self, *args):
        self.counts[name] += 1
        return getattr(self.inner, name)(*args)

    return request


for _name in REQUESTS:
    setattr(CountingStore, _name, _forward(_name))


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes that they leave on this rank."""

    def __init__(self):
        super().__init__()
        self.calls = self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._schema.name:
            self.calls += 1
            self.nbytes += sum(t.nbytes for t in torch.utils._pytree.tree_iter(args[0]) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def work(rank, world, folder):
    """Train, save and resume on one rank; write the counts of each phase to ``folder``."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "scale"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    server = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0, timedelta(seconds=300), wait_for_workers=False
    )
    store, found = CountingStore(server), {}

    def count(phase, act):
        gc.collect()
        before, start = store.counts.copy(), time.perf_counter()
        with Collectives() as collectives:
            result = act()
        found[phase] = {
            "store requests": sum((store.counts - before).values()),
            "collectives": collectives.calls,
            "bytes of collectives": collectives.nbytes,
            "seconds": time.perf_counter() - start,
        }
        return result

    def launch():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        fabric = L.Fabric(accelerator="cpu", devices=world, strategy=ft.strategy.FabricFSDP2Strategy())
        fabric.launch()
        return fabric

    fabric = count("process groups", launch)

    def build():
        module = GPTModule(GPTConfig(vocabulary=64, context=16, layers=2, heads=2, width=32))
        fabric.setup_module(module)
        register_fsdp_forward_method(module, "loss")
        return module, fabric.setup_optimizers(module.configure_optimizers())

    module, optimizer = count("sharding", build)

    def step():
        loss = module.loss((torch.zeros(2, 16, dtype=torch.long),) * 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    count("a step", step)

    def share_states():
        gather(pack({"random": torch.get_rng_state()}), torch.device("cpu"), everywhere=False)

    checkpoint, state = Path(folder, "checkpoint"), {"model": module, "optimizer": optimizer, "step": 1}
    count("a checkpoint", lambda: fabric.save(checkpoint, state))
    count("states of ExactResume", share_states)
    count("a resume", lambda: fabric.load(checkpoint, state))
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    found["a checkpoint"]["files"] = len(files) if rank == 0 else 0
    found["a checkpoint"]["bytes of files"] = sum(path.stat().st_size for path in files) if rank == 0 else 0
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    time.sleep(1)
    os._exit(0)  # gloo's destructor can hang


def count_on(world):
    """Return phase → what → the sum over ``world`` ranks; seconds are those of the slowest."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000 + world)}
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, world, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(found) < world:
        raise SystemExit(f"{world - len(found)} of {world} ranks failed")
    totals = {}
    for phase, counts in found[0].items():
        totals[phase] = {what: sum(rank[phase][what] for rank in found) for what in counts}
        totals[phase]["seconds"] = round(max(rank[phase]["seconds"] for rank in found), 3)
    return totals


def fit(worlds, counts):
    """Return how a count grows with the number of ranks n: the name, and the coefficients from n⁰ on."""
    for degree in (1, 2, 3):
        coefficients = numpy.polynomial.polynomial.polyfit(worlds, counts, degree)
        fitted = numpy.polynomial.polynomial.polyval(worlds, coefficients)
        if numpy.allclose(fitted, counts, rtol=0.02, atol=1):
            break
    return {
        "growth": ("linear", "quadratic", "cubic")[degree - 1],
        "coefficients": [round(float(c), 3) for c in coefficients],
    }


def as_lines(rows):
    """Return the table of the documentation."""
    counted = [row for row in rows if row["what"] != "seconds" and any(row["counts"].values())]
    worlds = list(counted[0]["counts"])
    lines = [
        f"| | {' | '.join(f'{world} ranks' for world in worlds)} | growth |",
        "| --- |" + " --- |" * (len(worlds) + 1),
    ]
    for row in counted:
        counts = " | ".join(f"{count:,}" for count in row["counts"].values())
        terms = []
        for power, coefficient in reversed(list(enumerate(row["coefficients"]))):
            if abs(coefficient) * int(worlds[-1]) ** power > 0.005 * max(row["counts"].values()):
                terms.append(f"{coefficient:,.3g}" + ("", " n", " n²", " n³")[power])
        lines.append(f"| {row['phase']}: {row['what']} | {counts} | {' + '.join(terms).replace('+ -', '− ')} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    worlds = [int(world) for world in options.ranks.split(",")]
    found = {world: count_on(world) for world in worlds}
    rows = []
    for phase, counts in found[worlds[0]].items():
        for what in counts:
            row = {"phase": phase, "what": what, "counts": {str(w): found[w][phase][what] for w in worlds}}
            if what != "seconds":
                row |= fit(worlds, list(row["counts"].values()))
            rows.append(row)
            print(row, flush=True)
    if options.out is not None:
        about = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/scale_counts.py", *sys.argv[1:]])),
        }
        write_atomic(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
