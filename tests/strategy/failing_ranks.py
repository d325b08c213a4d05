"""Pairs of real processes of which one cannot save, or exits while it saves; see test_failing_ranks.py.

One process forks all pairs at the same time, since they mostly wait.
"""

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.checkpoint_folder import verify_checkpoint
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.zero.zero_strategy import ZeROStrategy
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer
from tests.support.ranks import end_as_a_script, run_ranks

LIMIT_S = 200
FULL_AT_BYTES = 1_000  # maximum size of a file; smaller than any shard of a checkpoint


def rank():
    return int(os.environ["RANK"])


def fit(strategy, module, **settings):
    t = trainer(devices=2, strategy=strategy, **settings)
    t.fit(module, as_loader(lm_batches(2)))
    return t


def error_of(action):
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


def has_full_disk(folder):
    """The disk is full on both ranks, then on one; with free space again the save succeeds and training continues."""
    found = {}
    strategies = {"zero 2": lambda: ZeROStrategy(stage=2), "zero 3": lambda: ZeROStrategy(stage=3)}
    for name, make in {**strategies, "fsdp2": FSDP2Strategy}.items():
        module, path = TinyLM(), folder / f"{name}.ckpt"
        t = fit(make(), module)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for which, ranks in (("both", (0, 1)), ("rank 0", (0,)), ("rank 1", (1,))):
            if rank() in ranks:
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, before[1]))
            found[f"{name}, {which}"] = error_of(lambda t=t, path=path: t.save_checkpoint(path))
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found[f"{name}, left"] = [p.name for p in folder.glob("*.ckpt") if p == path]
        t.save_checkpoint(path)
        verify_checkpoint(path)
        t.fit_loop.max_epochs = 2
        t.fit(module, as_loader(lm_batches(2)))
        found[f"{name}, steps"] = t.global_step
    (folder / f"found{rank()}").write_text(json.dumps(found))


class Keeps(L.Callback):
    """A callback whose state could not be loaded from a checkpoint."""

    def state_dict(self):
        return {"data": Path("data")}


class SavesOnce(L.Callback):
    def __init__(self, path, full_on=()):
        self.path, self.full_on = path, full_on

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank() in self.full_on:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, before[1]))
        try:
            trainer.save_checkpoint(self.path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cannot_save(folder):
    """An unusable folder, and state that cannot be saved; under DDP a full disk too."""
    (folder / "file").write_text("")
    found, atomic = {}, ft.AtomicCheckpoints
    ddp = functools.partial(DDPStrategy, process_group_backend="gloo")
    makers = {"zero 2": lambda: ZeROStrategy(stage=2), "zero 3": lambda: ZeROStrategy(stage=3), "fsdp2": FSDP2Strategy}
    for name, make in {**makers, "ddp": ddp}.items():
        extra = [atomic()] if name == "ddp" else []

        def attempt(*callbacks, make=make):
            callbacks = list(callbacks)
            return error_of(lambda: fit(make(), TinyLM(), callbacks=callbacks, enable_checkpointing=True))

        found[f"{name}, folder"] = attempt(*extra, ModelCheckpoint(folder / "file" / "checkpoints"))
        quiet = ModelCheckpoint(folder / name, save_top_k=0)
        found[f"{name}, state"] = attempt(*extra, quiet, Keeps(), SavesOnce(folder / "state.ckpt"))
    full = SavesOnce(folder / "full.ckpt", full_on=(0,))
    found["ddp, full disk"] = attempt(atomic(), quiet, full)
    found["ddp, warned"] = attempt(atomic(on_failed_save="warn"), quiet, full)
    (folder / f"found{rank()}").write_text(json.dumps(found))


def saves_after_fit(folder):
    """The program exits while the last checkpoint is being written to a slow disk."""
    t = fit(FSDP2Strategy(async_checkpoints=True), TinyLM())
    background = t.strategy._background
    write = background.write

    def slowly(*states):
        time.sleep(1.5)
        write(*states)

    background.write = slowly
    t.save_checkpoint(folder / "final.ckpt")
    (folder / f"found{rank()}").write_text(json.dumps({"in flight": background.in_flight}))


SCENARIOS = (
    has_full_disk,
    cannot_save,
    saves_after_fit,
)


TO_THE_LAST = (saves_after_fit,)  # process groups end with their modules


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork(scenario, folder, number, port):
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", NODE_RANK="0")
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
    os.environ.update(TORCHELASTIC_RUN_ID="1")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    with open(folder / f"err{number}", "wb") as file:  # through a process whose disk is not full
        said = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    os.dup2(said.stdin.fileno(), 2)
    said.stdin.close()
    (folder / f"pid{number}").write_text(str(os.getpid()))
    code = 0
    try:
        scenario(folder)
    except Exception:
        traceback.print_exc()
        code = 1
    end_as_a_script(code, empty_modules=scenario in TO_THE_LAST)


def serve(folder, names):
    pairs = {}
    for name in names:
        (folder / name).mkdir()
        port = free_port()
        pairs[name] = [fork(globals()[name], folder / name, number, port) for number in (0, 1)]
    codes = {pid: None for pids in pairs.values() for pid in pids}
    end = time.monotonic() + LIMIT_S
    while None in codes.values() and time.monotonic() < end:
        for pid in [pid for pid, code in codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.05)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # until all output is in its file
    result = {name: [codes[pid] for pid in pids] for name, pids in pairs.items()}
    (folder / "codes.json").write_text(json.dumps(result))


def run_scenarios(folder):
    """For the tests: name → exit codes (None if still running), output and results of each rank."""
    names = [scenario.__name__ for scenario in SCENARIOS]
    log = folder / "log"
    run_ranks("tests.strategy.failing_ranks", folder, *names, log=log, count=None, timeout_s=LIMIT_S + 100)
    codes, seen = json.loads((folder / "codes.json").read_text()), {}
    for name in names:
        said = [(folder / name / f"err{i}").read_text() for i in (0, 1)]
        found = [json.loads(p.read_text()) if (p := folder / name / f"found{i}").exists() else {} for i in (0, 1)]
        seen[name] = {"codes": codes[name], "err": said, "found": found, "folder": folder / name}
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), sys.argv[2:])
