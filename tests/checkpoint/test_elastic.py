"""Workers are killed, hang and come back, 2 → 1 → 2 → 4: the run ends as the uninterrupted one."""

import os
import signal
import time
from collections import defaultdict

import pytest

from tests.support.ranks import Ranks

SAMPLES, STEPS = 12, 24
ARGUMENTS = ("--steps", STEPS, "--save-every", 3, "--hang-after", 4, "--folder")


class Launch:
    """A number of workers that start from the newest checkpoint."""

    def __init__(self, name, workers, folder, checkpoints, pause_s=0.1):
        self.name, self.folder, self.checkpoints = name, folder, checkpoints
        arguments = (name, folder, pause_s, *ARGUMENTS, checkpoints)
        log, count = folder / f"{name}.log", None if workers == 1 else workers
        self.ranks = Ranks("tests.checkpoint.elastic_scenarios", *arguments, log=log, count=count)

    def signal_after(self, step, number, worker):
        """Send a signal to a worker that has begun, once a checkpoint of the step is there."""
        until = time.monotonic() + 60
        begun = self.folder / f"{self.name}-{worker}.pid"
        while not (begun.exists() and (self.checkpoints / f"step={step}.ckpt").exists()):
            assert time.monotonic() < until, self.ranks.end(0)
            time.sleep(0.02)
        os.kill(int(begun.read_text()), number)

    def last_line(self):
        return self.ranks.wait(timeout_s=100).strip().splitlines()[-1].split()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The last lines of both runs, and what is left of the launches that were ended."""
    folder = tmp_path_factory.mktemp("elastic")
    ended = {}
    alone = Launch("alone", 1, folder, folder / "uninterrupted", pause_s=0)
    launches = [("two", 2, 6, signal.SIGKILL), ("one", 1, 12, signal.SIGKILL), ("hung", 2, 18, signal.SIGSTOP)]
    try:
        for name, workers, step, number in launches:
            launch = Launch(name, workers, folder, folder / "elastic")
            launch.signal_after(step, number, worker=workers - 1)
            ended[name] = launch.ranks.end(timeout_s=60)
        last = Launch("four", 4, folder, folder / "elastic").last_line()
        return {"folder": folder, "alone": alone.last_line(), "elastic": last, "ended": ended}
    finally:
        alone.ranks.stop()


def samples_of(folder, launches):
    """Map each step to (epoch, samples) of the launch that trained it last, which is the one whose weights stayed."""
    steps = {}
    for name in launches:
        found = defaultdict(list)
        for file in folder.glob(f"{name}-*.samples"):
            for line in file.read_text().splitlines():
                _, step, epoch, sample = line.split()
                found[int(step)].append((int(epoch), int(sample)))
        steps |= {step: sorted(samples) for step, samples in found.items()}
    return steps


def test_the_losses_are_those_of_the_uninterrupted_run(found):
    assert found["alone"][2:5] == found["elastic"][2:5] == ["after", f"{STEPS}", "steps,"]
    assert found["elastic"][-2:] == ["4", "workers"]
    assert float(found["elastic"][1]) == pytest.approx(float(found["alone"][1]), abs=2e-5)


def test_no_sample_is_seen_twice_or_left_out(found):
    whole = samples_of(found["folder"], ["alone"])
    seen = samples_of(found["folder"], ["two", "one", "hung", "four"])
    assert seen == whole
    first_epoch = [sample for samples in whole.values() for epoch, sample in samples if epoch == 0]
    assert len(first_epoch) == len(set(first_epoch)) == SAMPLES * STEPS * 2 // 3 + 1


def test_a_hung_worker_is_named_and_ends_the_others(found):
    codes, _, errors = found["ended"]["hung"]
    assert codes[0] not in (0, None)
    assert "rank 1" in errors


def test_a_lost_worker_ends_the_others(found):
    assert found["ended"]["two"][0][1] == -signal.SIGKILL
    assert found["ended"]["one"][0] == [-signal.SIGKILL]
