"""Break a training again and again, in every way that runs die, and compare its end with that of the unbroken run.

    python examples/kill_campaign.py [--kills 300] [--seed 0] [--strategies single,ddp] [--out RESULTS.json]

Each run has all guards on. Its processes are killed by SIGKILL, signalled by SIGTERM, stopped by a full disk (a small
tmpfs where it can be mounted, otherwise a limit of the file size) or by a batch of NaN, slowed down, or hung; then they
are launched anew, and resume from the newest checkpoint. A run ends after at most ten faults. Its weights, optimizer
states, schedules, loops and callback states must be, on every rank, bitwise those of the run without faults, and no
launch may resume from before the last save but one. All follows from the seed, but for the time of a SIGKILL "at any
time". Processes are forked, so that the imports, which take seconds, are done once.
"""

import argparse
import collections
import datetime
import json
import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from killed_training import KINDS, REPLICATED, STRATEGIES, WINDOW, Fault, differences, train, trained, without

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.core.host.deepspeed import import_deepspeed

FAULTS_OF_A_RUN = 10
DISK = "fasttrain-kills"  # and the id of the campaign's process


def launch(name, folder, faults, exact=True, background=False, patience_s=600):
    """Fork the processes and wait for them; the exit code of each (-9: by SIGKILL), and what they said last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = STRATEGIES[name][0]
    (folder / "said").write_text("")
    started, children, before = time.monotonic(), [], trained(folder)
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "kills"}
            environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            os.environ |= environment if processes > 1 else {}
            os._exit(end_of(lambda: train(name, folder, faults, exact, background, rank), folder / "said"))  # noqa: B023
        children.append(child)
    codes: dict[int, int] = {}
    try:
        return wait_for(children, codes, faults, folder, started + patience_s, before)
    finally:  # the campaign itself may have been told to end
        end_children(children, codes)


def wait_for(children, codes, faults, folder, until, before):
    """Fill in the exit codes of the children as they end, or are killed by a fault, by one another, or by the clock."""
    killed_any_time, seen = next((fault for fault in faults if fault.moment == "any time"), None), None
    while len(codes) < len(children):
        if time.monotonic() > until:
            end_children(children, codes)
            return [codes[child] for child in children], f"hangs after {(folder / 'said').read_text()}"
        if killed_any_time and seen is None and trained(folder) > before:
            seen = time.monotonic()
        if seen is not None and time.monotonic() - seen > killed_any_time.after / 50:
            end_children(children[killed_any_time.rank : killed_any_time.rank + 1], codes)
        for child in children:
            if child not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(status[1])
        if any(code not in (0, 143) for code in codes.values()):  # a launcher ends all when one has failed
            end_children(children, codes)
        time.sleep(0.01)
    return [codes[child] for child in children], (folder / "said").read_text()


def end_children(children, codes):
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end_of(run, said):
    """The exit code of a process that runs this; its error is written to ``said``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    try:
        run()
        return 0
    except SystemExit as error:
        return error.code
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"{type(error).__name__}: {error}"[:400], file=sys.stderr, flush=True)
        return 1


def as_expected(kind, codes, said):
    """Whether a launch ended as this kind of fault should end it."""
    if said.startswith("hangs"):
        return False
    found = {
        "SIGKILL": -9 in codes,
        "slow rank": -9 in codes,  # which is killed afterwards
        "SIGTERM": set(codes) == {143},
        "full disk": "could not be written" in said or "No space left" in said or "too full" in said,
        "NaN batch": "FloatingPointError" in said,
        "hung rank": 1 in codes and "HangWatch" in said,
    }
    return found[kind]


def plan_faults(kind, draw, processes):
    """The faults of one launch: one of this kind, after which the launch is over."""
    moment, rank = draw.choice(KINDS[kind]), draw.randrange(processes)
    if "rename" in moment or kind == "full disk":
        rank = 0  # which writes the file
    fault = Fault(kind, moment, rank, draw.randrange(4))
    if kind != "slow rank":
        return [fault]
    return [fault, Fault("SIGKILL", "batch", draw.randrange(processes), fault.after + 2)]


def run_with_faults(name, folder, most, seed, kinds, exact=True, small_disk=False):
    """Break a run at most so often, let it end, and return what happened."""
    draw, processes = random.Random(seed), STRATEGIES[name][0]
    background = draw.random() < 0.5 and name in REPLICATED
    history = {"strategy": name, "seed": seed, "background": background, "faults": [], "unexpected": [], "lost": []}
    (folder / "saved").mkdir(parents=True)
    mounted = small_disk and mount_small_disk(folder / "saved")
    try:
        while len(history["faults"]) < most:
            kind = next(kinds)
            faults = plan_faults(kind, draw, processes)
            codes, said = launch(name, folder, faults, exact, background)
            if not any(codes):
                break  # it got through before the moment came
            history["faults"].append(kind)
            if not as_expected(kind, codes, said):
                history["unexpected"].append([*map(list, faults), codes, said[-600:]])
            (folder / "saved" / "filler").unlink(missing_ok=True)
        codes, said = ([0], "") if (folder / "end-0.pt").exists() else launch(name, folder, [], exact, background)
        if any(codes):
            history["unexpected"].append(["the last launch", codes, said[-600:]])
        history["lost"] = lost_saves(folder, (1 if name in REPLICATED else WINDOW) * (2 if background else 1))
    finally:
        if mounted:
            subprocess.run(["umount", folder / "saved"], check=False)
    return history


def mount_small_disk(folder):
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", f"{DISK}-{os.getpid()}", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def unmount_left_disks():
    """Unmount what a campaign has left that was killed with SIGKILL, and has no process any more."""
    for line in Path("/proc/mounts").read_text().splitlines():
        device, place = line.split()[:2]
        if device.startswith(f"{DISK}-") and not Path(f"/proc/{device.removeprefix(f'{DISK}-')}").exists():
            subprocess.run(["umount", "--lazy", place], check=False)


def lost_saves(folder, saved_every):
    """Launches that resumed from before the last save but one: batches trained before, and those that were resumed."""
    lines = (folder / "resumed").read_text().splitlines()
    pairs = [[int(number) for number in line.split()] for line in lines[1:]]
    return [pair for pair in pairs if not pair[0] - saved_every <= pair[1] <= pair[0]]


def read_ends(name, folder):
    """How each rank ended, without the folder's name."""
    paths = [folder / f"end-{rank}.pt" for rank in range(STRATEGIES[name][0])]
    ends = [torch.load(path, weights_only=True) if path.exists() else {} for path in paths]
    return [without(end, str(folder)) for end in ends]


def kinds_in_turn(name, seed):
    """Every kind of fault, in another order each time."""
    draw = random.Random(f"{seed} {name}")
    while True:
        yield from draw.sample(list(KINDS), len(KINDS))


def summarize(runs):
    """A row for each strategy."""
    rows = []
    for name in dict.fromkeys(run["strategy"] for run in runs):
        own = [run for run in runs if run["strategy"] == name]
        counts = collections.Counter(kind for run in own for kind in run["faults"])
        rows.append(
            {
                "strategy": name,
                "processes": STRATEGIES[name][0],
                "runs": len(own),
                "kills": counts.total(),
                "kinds": dict(sorted(counts.items())),
                "runs_that_end_otherwise": sum(bool(run["differs"]) for run in own),
                "lost_checkpoints": sum(len(run["lost"]) for run in own),
                "unexpected_endings": sum(len(run["unexpected"]) for run in own),
            }
        )
    return rows


def end_as_by_control_c(number, frame):
    """Let ``finally`` blocks unmount and the temporary folder be removed when the campaign itself is told to end."""
    raise KeyboardInterrupt


def campaign(options, folder):
    """Run after run, the strategies in turn, until there are enough faults; the results are written after each."""
    names = options.strategies.split(",")
    if any(name.startswith("zero") for name in names):
        import_deepspeed()
    whole, runs = {}, []
    kinds = {name: kinds_in_turn(name, options.seed) for name in names}
    left = {
        name: options.kills // len(names) + (place < options.kills % len(names)) for place, name in enumerate(names)
    }
    while any(left.values()):
        for name in [name for name in names if left[name]]:
            if name not in whole:
                (folder / name / "whole" / "saved").mkdir(parents=True)
                codes, said = launch(name, folder / name / "whole", [])
                assert not any(codes), said
                whole[name] = read_ends(name, folder / name / "whole")
            place = folder / name / f"{len(runs)}"
            most, seed = min(left[name], FAULTS_OF_A_RUN), f"{options.seed} {name} {len(runs)}"
            run = run_with_faults(name, place, most, seed, kinds[name], not options.careless, not options.file_limit)
            run["differs"] = sorted(text[:100] for text in differences(whole[name], read_ends(name, place)))
            runs.append(run)
            left[name] -= len(run["faults"])
            print(f"{name}: {', '.join(run['faults'])}; differs in {len(run['differs'])}", flush=True)
            if options.out is not None:
                write_report(options, runs)
    return runs


def write_report(options, runs):
    troubled = [run for run in runs if run["differs"] or run["lost"] or run["unexpected"]]
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kills": sum(len(run["faults"]) for run in runs),
        "rows": summarize(runs),
        "troubled_runs": troubled,
    }
    write_atomic(options.out, json.dumps(report, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of these")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--file-limit", action="store_true", help="never mount a tmpfs for a full disk")
    parser.add_argument("--careless", action="store_true", help="the control: runs without ExactResume")
    options = parser.parse_args()
    unmount_left_disks()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_as_by_control_c)
    with tempfile.TemporaryDirectory() as folder:
        runs = campaign(options, Path(folder))
    for row in summarize(runs):
        print(json.dumps(row))
    return int(any(run["differs"] or run["lost"] or run["unexpected"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
