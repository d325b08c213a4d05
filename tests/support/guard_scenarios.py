"""Real processes that are told to go, hang, stop, fail or are killed; see the tests of Preemption and HangWatch.

One process forks for each scenario a conductor, which starts the ranks, sends the signals and writes what it saw. All
scenarios run at the same time: most of the time they wait. Lightning's launcher and
torchrun are real, and what they start is a fork of them; in ``test_examples.py`` it is a fresh interpreter.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from lightning_fasttrain.guards.hang_watch import HangWatch, ProgressWatch
from lightning_fasttrain.guards.preemption import Preemption, PreemptionFlag
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer
from tests.support.ranks import end_as_a_script, launch_once, run_ranks

LIMIT_S = 150
TIMEOUT_S = 3.0


# --- what a rank does


def rank():
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


class At(L.Callback):
    """Calls a function on one rank when a batch begins; says to the conductor that it has come so far."""

    def __init__(self, folder, batch, what=lambda: None, on=(0, 1), pause_s=0.0):
        self.folder, self.batch, self.what, self.on, self.pause_s, self.seen = folder, batch, what, on, pause_s, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen += 1
        time.sleep(self.pause_s)
        if self.seen == self.batch:
            (self.folder / f"ready{rank()}").touch()
            if rank() in self.on:
                self.what()


def fit(callbacks, folder, module=None, **settings):
    t = trainer(
        callbacks,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=LIMIT_S)),
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **settings},
    )
    loaders = [as_loader(lm_batches(5)), as_loader(lm_batches(2))]
    t.fit(module or TinyLM(), *loaders)
    return t


def watch(folder):
    return HangWatch(TIMEOUT_S, first_timeout_s=60, folder=folder / "hang")


def told(number=signal.SIGTERM):
    signal.raise_signal(number)


def preempted_many_ways(folder):
    """Each ends with a SystemExit that is caught, so that one launch serves them all."""
    found = {}

    def one(name, *callbacks, **settings):
        seen = Preemption(folder / name)
        try:
            fit([seen, *callbacks], folder, **settings)
        except SystemExit as error:
            found[name] = [error.code, sorted(p.name for p in (folder / name).glob("*"))]
        else:
            found[name] = [0, []]
        found[name].append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)

    one("rank 1", At(folder, 3, told, on=(1,)))
    one("window", At(folder, 1, told, on=(1,)), accumulate_grad_batches=2)
    one("both, at different steps", At(folder, 3, told, on=(0,)), At(folder, 4, told, on=(1,)))
    one("end of epoch", At(folder, 4, told, on=(1,)))
    one("early", early := At(folder, -1), limit_train_batches=3, max_epochs=1)
    assert early.seen == 3
    with PreemptionFlag(every=3) as flag:
        for step in range(1, 50):
            if step == 4 and rank() == 1:
                told()
            if flag.should_stop():
                break
    found["bare loop"] = step
    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    (folder / f"found{rank()}.json").write_text(json.dumps(gathered))
    preempted_from_outside(folder)


def preempted_from_outside(folder):
    """Until somebody sends a signal; more come while the checkpoint is written."""

    class Slow(TinyLM):
        def on_save_checkpoint(self, checkpoint):
            (folder / f"saving{rank()}").touch()
            time.sleep(1)

    try:
        callbacks = [HangWatch(60.0), Preemption(folder / "outside"), At(folder, 3, pause_s=0.05)]
        fit(callbacks, folder, Slow(), max_epochs=1000)
    except SystemExit as error:
        (folder / f"code{rank()}").write_text(str(error.code))
        raise


def sleep_for_ever():
    time.sleep(10_000)


def hold_the_lock(seconds=10_000):
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL keeps Python's lock


def hangs(folder):
    fit([watch(folder), At(folder, 4, sleep_for_ever, on=(1,))], folder)


def holds_the_lock(folder):
    fit([watch(folder), At(folder, 4, hold_the_lock, on=(1,))], folder)


def runs_slowly(folder):
    """For a conductor that stops or kills somebody, in the second epoch: the first time in each phase may be long."""
    fit([watch(folder), At(folder, 7, pause_s=0.05)], folder, max_epochs=1000)


def validates_for_long(folder):
    class Net(TinyLM):
        def validation_step(self, batch, batch_idx):
            if rank() == 0 and self.current_epoch == 1:
                time.sleep(0.7 * TIMEOUT_S)  # two of them are more than the other rank may be quiet in its backward

    fit([watch(folder), At(folder, 9)], folder, Net(), max_epochs=3)


def fails(folder):
    def fail():
        raise ValueError("boom on rank 1")

    fit(
        [watch(folder), At(folder, 4, fail, on=(1,)), OnExceptionCheckpoint(folder)],
        folder,
        enable_checkpointing=True,
    )


def fails_unwatched(folder):
    def fail():
        raise ValueError("boom on rank 1")

    fit([Preemption(folder), At(folder, 4, fail, on=(1,))], folder)


def loops_alone(folder):
    with ProgressWatch(1.0, folder=folder / "hang") as watch:
        for step in range(4):
            watch.begin_step()
            watch.beat("backward")
            if step == 3:
                sleep_for_ever()


def is_suspended(folder):
    with ProgressWatch(2.0, first_timeout_s=2.0) as watch:
        watch.begin_step()
        time.sleep(0.3)
        (folder / "ready0").touch()
        for _ in range(8):
            time.sleep(0.1)


def holds_the_lock_at_once(folder):
    """Before the watching thread has looked once."""
    with ProgressWatch(2.0, 60.0):
        hold_the_lock(4)


def outlives_its_parent(folder):
    """The watching thread alone: no signal from the kernel."""
    if os.fork() == 0:
        (folder / "pid1").write_text(str(os.getpid()))
        with ProgressWatch(2.0, 60.0, parent=os.getppid()):
            (folder / "ready1").touch()
            sleep_for_ever()
    sleep_for_ever()


# --- what a conductor does


def wait_for(*paths):
    until = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, paths
        time.sleep(0.02)


def pid_of(folder, rank):
    wait_for(folder / f"pid{rank}")
    time.sleep(0.05)
    return int((folder / f"pid{rank}").read_text())


def tell_rank_1(folder, main):
    wait_for(folder / "ready0", folder / "ready1")
    os.kill(pid_of(folder, 1), signal.SIGTERM)
    wait_for(folder / "saving0", folder / "saving1")
    for process in (main, pid_of(folder, 1)):
        os.kill(process, signal.SIGTERM)


def tell_the_launcher(folder, main):
    wait_for(folder / "found0.json", folder / "found1.json")
    for i in (0, 1):
        (folder / f"ready{i}").unlink()
    wait_for(folder / "ready0", folder / "ready1")
    os.kill(main, signal.SIGTERM)


def stop_rank_1(folder, main):
    wait_for(folder / "ready0", folder / "ready1")
    os.kill(pid_of(folder, 1), signal.SIGSTOP)


def stop_rank_0(folder, main):
    wait_for(folder / "ready0", folder / "ready1")
    os.kill(main, signal.SIGSTOP)


def kill_rank_0(folder, main):
    wait_for(folder / "ready0", folder / "ready1")
    os.kill(pid_of(folder, 1), signal.SIGSTOP)  # it cannot even see that its parent ends
    os.kill(main, signal.SIGKILL)


def kill_the_parent(folder, main):
    wait_for(folder / "ready1")
    os.kill(main, signal.SIGKILL)


def suspend(folder, main):
    wait_for(folder / "ready0")
    os.kill(main, signal.SIGSTOP)
    time.sleep(4)
    os.kill(main, signal.SIGCONT)


def nothing(folder, main):
    pass


SCENARIOS = {
    "preempted, torchrun": ("torchrun", preempted_many_ways, tell_the_launcher),
    "preempted, Lightning": ("lightning", preempted_from_outside, tell_rank_1),
    "hangs": ("forked", hangs, nothing),
    "holds the lock": ("forked", holds_the_lock, nothing),
    "stopped": ("lightning", runs_slowly, stop_rank_1),
    "main stopped": ("lightning", runs_slowly, stop_rank_0),
    "main killed": ("lightning", runs_slowly, kill_rank_0),
    "validates for long": ("forked", validates_for_long, nothing),
    "fails, Lightning": ("lightning", fails, nothing),
    "fails, torchrun": ("torchrun", fails_unwatched, nothing),
    "alone": ("alone", loops_alone, nothing),
    "suspended": ("alone", is_suspended, suspend),
    "holds the lock at once": ("alone", holds_the_lock_at_once, nothing),
    "orphan": ("alone", outlives_its_parent, kill_the_parent),
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork(run, folder, **env):
    """A process that runs a function of the folder, with stdout and stderr in a file of its own."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(env)
    file = os.open(folder / f"err{env.get('RANK', 'main')}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code, by_itself = 1, False
    try:
        run(folder)
        code = 0
    except SystemExit as error:
        code, by_itself = error.code, True
    except BaseException:
        traceback.print_exc()
    if by_itself:
        end_as_a_script(code)
    sys.stderr.flush()
    os._exit(code)


def be_a_rank(name, folder):
    (folder / f"pid{rank()}").write_text(str(os.getpid()))
    SCENARIOS[name][1](folder)


class ForkedRank(subprocess.Popen):
    """What a launcher starts: a fork of itself, where a fresh interpreter would first import everything."""

    def __init__(self, args, env=None, **settings):
        is_a_rank = "rank" in args
        super().__init__(args, env=env, preexec_fn=(lambda: self.run(args, env)) if is_a_rank else None, **settings)

    def run(self, args, env):
        os.closerange(3, 1024)  # as exec does; the launcher waits for it
        os.environ.clear()
        os.environ.update(env)
        for number in signal.valid_signals() - {signal.SIGINT}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        code = 1
        try:
            self.act(args)
            code = 0
        except SystemExit as error:
            code = error.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        end_as_a_script(code, empty_modules=False)

    def act(self, args):
        be_a_rank(args[-2], Path(args[-1]))


def start(name, folder):
    how, body, _ = SCENARIOS[name]
    again = ["-m", "tests.support.guard_scenarios", "rank", name, str(folder)]
    if how == "torchrun":
        return [fork(lambda folder: torchrun.main(["--standalone", "--nproc-per-node=2", *again]), folder)]
    if how == "forked":
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        common |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": name}
        run = lambda folder: be_a_rank(name, folder)  # noqa: E731
        return [fork(run, folder, **common, RANK=str(i), LOCAL_RANK=str(i)) for i in (0, 1)]
    sys.argv = [sys.argv[0], *again[2:]]  # what Lightning's launcher calls again
    port = {"MASTER_PORT": str(free_port())} if how == "lightning" else {}
    return [fork(lambda folder: be_a_rank(name, folder), folder, **port)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def conduct(name, folder):
    folder.mkdir()
    pids = start(name, folder)
    begin = time.monotonic()
    result = {"folder": str(folder), "codes": [None] * len(pids), "orphans": []}
    try:
        SCENARIOS[name][2](folder, pids[0])
        told_s = time.time()
        until = begin + LIMIT_S
        while None in result["codes"] and time.monotonic() < until:
            for i, pid in enumerate(pids):
                if result["codes"][i] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        result["codes"][i] = os.waitstatus_to_exitcode(status)
                        until = min(until, time.monotonic() + 5)  # as torchrun, which then ends the others
            time.sleep(0.02)
        ended_s = time.time()
        result["seconds"] = ended_s - max([told_s, *(path.stat().st_mtime for path in folder.glob("ready?"))])
        written = [path.read_text() for path in folder.glob("pid?")]
        others = set(map(int, filter(None, written))) - set(pids)  # one that was killed may have written nothing
        until = time.monotonic() + 10
        while (left := [pid for pid in others if is_alive(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        result["orphans"] = left
    finally:
        unended = [pid for pid, code in zip(pids, result["codes"], strict=True) if code is None]
        for pid in {*unended, *result["orphans"]}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    result["err"] = {path.name[3:]: path.read_text() for path in folder.glob("err*")}
    result["files"] = {str(p.relative_to(folder)): p.read_text() for p in folder.glob("hang/*")}
    result["codes of ranks"] = [path.read_text() for path in sorted(folder.glob("code?"))]
    result["saved"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
    (folder / "result.json").write_text(json.dumps(result))


def serve(folder, names):
    conductors = []
    for i, name in enumerate(names):
        pid = os.fork()
        if pid == 0:
            try:
                conduct(name, folder / str(i))
            except Exception:
                (folder / f"error of {name}").write_text(traceback.format_exc())
            os._exit(0)
        conductors.append(pid)
    for pid in conductors:
        os.waitpid(pid, 0)


def run_scenarios(factory):
    """For the tests: name → what the conductor saw, in one launch for the tests of Preemption and of HangWatch."""
    folder = launch_once(factory, "guard", _launch)
    errors = [path.read_text() for path in folder.glob("error of *")]
    assert not errors, "\n".join(errors)
    return {name: json.loads((folder / str(i) / "result.json").read_text()) for i, name in enumerate(SCENARIOS)}


def _launch(folder):
    log, limit_s = folder / "log", LIMIT_S + 60
    run_ranks("tests.support.guard_scenarios", folder, *SCENARIOS, log=log, count=None, timeout_s=limit_s)


if __name__ == "__main__":
    torch.set_num_threads(1)
    subprocess.Popen = subprocess_handler.Popen = ForkedRank
    serve(Path(sys.argv[1]), sys.argv[2:])
