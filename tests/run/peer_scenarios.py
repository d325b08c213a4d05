"""Run by two processes (see test_peer_memory.py): a run that loses a rank, and continues from its peer's memory."""

import os
import shutil
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.run.checkpoint.peer_memory import PeerMemory
from lightning_fasttrain.strategy.fsdp2.fsdp2_fabric import FabricFSDP2Strategy
from tests.support.end_of_rank import write_findings
from tests.support.nets import ShallowLM, lm_batches

RANK = int(os.environ.get("RANK", 0))
STEPS, EVERY, LOST_IN = 6, 2, 4  # snapshots of steps 2, 4 and 6


def train(fabric, folder, lost=False):
    """Each rank has a folder of its own, as on a host of its own; return the state, and the step it began at."""
    batches = lm_batches(STEPS, size=5 + RANK, seed=3 + RANK)
    module = ShallowLM()
    model = fabric.setup_module(module)
    model.mark_forward_method("loss")
    optimizer, ema = fabric.setup_optimizers(module.configure_optimizers()), ft.optim.WeightEMA(0.5)
    state = {"model": model, "optimizer": optimizer, "ema": ema, "step": 0}
    peers = PeerMemory(folder / f"host{RANK}")
    began = peers.load(state)
    for step in range(state["step"], STEPS):
        optimizer.zero_grad()
        fabric.backward(model.loss(batches[step]))
        optimizer.step()
        ema.update(model)
        state["step"] = step + 1
        if lost and step == LOST_IN and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state["step"] % EVERY == 0:
            peers.save(state["step"], state)
    return state, began


def flat(state):
    tensors = [*state["model"].state_dict().values(), *state["ema"].average.values()]
    tensors += [value for values in state["optimizer"].optimizer.state.values() for value in values.values()]
    whole = [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]
    return torch.cat([tensor.double().flatten() for tensor in whole])


def loads_again(fabric, folder):
    return train(fabric, folder)[1]


def damaged_and_incomplete(fabric, folder):
    """Flip a byte of rank one's own part of step 6; then remove both parts of rank one at step 6."""
    path = folder / f"host{RANK}" / "step-6.rank-1-of-2.pt"
    if RANK == 1:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    found = [loads_again(fabric, folder)]
    dist.barrier()
    path.unlink()
    dist.barrier()
    found.append(loads_again(fabric, folder))
    shutil.rmtree(folder / f"host{RANK}")
    dist.barrier()
    return [*found, loads_again(fabric, folder)]


def main(path, folder, lost=""):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy())
    fabric.launch()
    state, began = train(fabric, Path(folder), bool(lost))
    resumed = flat(state)
    whole = flat(train(fabric, Path(path).parent / "uninterrupted")[0])
    kept = sorted(file.name for file in (Path(folder) / f"host{RANK}").iterdir())
    found = {"began": began, "gap": (resumed - whole).abs().max().item(), "kept": kept}
    found["then"] = damaged_and_incomplete(fabric, Path(folder))
    write_findings(path, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
