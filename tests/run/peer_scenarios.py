"""Run under torchrun (see test_peer_memory.py): runs that lose a rank with its host's memory, and continue.

Each start of the workers finishes the run whose rank was lost in the one before, and loses a rank in the next.
"""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.run import PeerMemory, PeerSnapshots
from tests.support.end_of_rank import run_rank
from tests.support.guard_scenarios import ForkedRank
from tests.support.nets import ShallowLM, as_loader, lm_batches, trainer

RANK = int(os.environ.get("RANK", 0))
STEPS, EVERY, LOST_IN = 6, 2, 5  # snapshots after steps 2, 4 and 6; the rank is lost after step 5


class Net(ShallowLM):
    """Draws in each step, so that a run which continues is not right by chance."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


def lose_rank_one(folder):
    """Kill rank one together with the memory of its host."""
    if RANK == 1:
        shutil.rmtree(folder / "host1")
        os.kill(os.getpid(), signal.SIGKILL)


class LosesARank(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == LOST_IN:
            lose_rank_one(self.folder)


def fit(strategy, folder, lost):
    """Each rank has a folder of its own, as on a host of its own; return weights, average, and the step it began at."""
    L.seed_everything(5 + RANK, verbose=False)
    net, ema, began = Net(), ft.optim.WeightEMA(0.5), []
    probe = LambdaCallback(on_train_start=lambda trainer, _: began.append(trainer.global_step))
    snapshots = PeerSnapshots(folder / f"host{RANK}", EVERY)
    callbacks = [snapshots, ft.ExactResume(), ema, probe, *[LosesARank(folder)] * lost]
    loop = trainer(callbacks, devices=2, strategy=strategy, max_steps=STEPS, max_epochs=2)
    loop.fit(net, as_loader(lm_batches(4)))  # so that an epoch ends between two snapshots
    return joined([*net.state_dict().values(), *ema.average.values()]), began[0]


def train_with_fabric(folder, lost):
    """The same in a loop of Fabric, where ranks have different batches."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=ft.FabricFSDP2Strategy())
    fabric.launch()
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
        if lost and state["step"] == LOST_IN:
            lose_rank_one(folder)
        if state["step"] % EVERY == 0:
            peers.save(state["step"], state)
    moments = [values for state in optimizer.optimizer.state.values() for values in state.values()]
    return joined([*model.state_dict().values(), *ema.average.values(), *moments]), began


RUNS = {
    "DDP": lambda folder, lost: fit(DDPStrategy(), folder, lost),
    "FSDP2": lambda folder, lost: fit(ft.FSDP2Strategy(), folder, lost),
    "Fabric": train_with_fabric,
}


def joined(tensors):
    whole = [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]
    return torch.cat([tensor.double().flatten() for tensor in whole])


def damaged_and_incomplete(folder):
    """Flip a byte of rank one's own part of step 6; then remove both parts of rank one at step 6."""
    path = folder / f"host{RANK}" / "step-6.rank-1-of-2.pt"
    if RANK == 1:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    found = [train_with_fabric(folder, False)[1]]
    dist.barrier()
    path.unlink()
    dist.barrier()
    found.append(train_with_fabric(folder, False)[1])
    shutil.rmtree(folder / f"host{RANK}")
    dist.barrier()
    return [*found, train_with_fabric(folder, False)[1]]


def full_on_rank_one(folder):
    """Rank one can write only small files, and then any."""
    peers, state = PeerMemory(folder), {"model": torch.nn.Linear(100, 100)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself sets it
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        peers.save(7, state)
        said = "nothing"
    except OSError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    peers.clear()
    peers.save(8, state)
    return said, sorted(file.name for file in folder.iterdir())


def continue_and_compare(name, folder):
    resumed, began = RUNS[name](folder / name, False)
    uninterrupted, _ = RUNS[name](folder / "uninterrupted" / name, False)
    kept = sorted(file.name for file in (folder / name / f"host{RANK}").iterdir())
    found = {"began": began, "gap": (resumed - uninterrupted).abs().max().item(), "kept": kept}
    if name == "Fabric":
        found["then"] = damaged_and_incomplete(folder / name)
        found["full"], found["after"] = full_on_rank_one(folder / name / f"host{RANK}")
    (folder / f"{name}-{RANK}.json").write_text(json.dumps(found))


def main(folder):
    folder, start, names = Path(folder), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), list(RUNS)
    if start > 0:
        continue_and_compare(names[start - 1], folder)
    if start < len(names):
        RUNS[names[start]](folder / names[start], True)
    dist.barrier()
    os._exit(0)  # gloo's destructor can hang


class Worker(ForkedRank):
    def act(self, args):
        globals()["RANK"] = int(os.environ["RANK"])
        run_rank(main, args[-1])


if __name__ == "__main__":
    subprocess_handler.Popen = Worker
    # Otherwise torch 2.13 uses one store for all starts, and gloo finds the addresses of ranks that have ended.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    restarts = f"--max-restarts={len(RUNS)}"
    torchrun.main(
        ["--standalone", "--nproc-per-node=2", restarts, "-m", "tests.run.peer_scenarios", "rank", sys.argv[1]]
    )
