"""A run of global batches that is saved on one number of ranks resumes on another: all pairs of 1, 2 and 3."""

import pytest
import torch

from tests.strategy.other_ranks import GLOBAL, MOST, SAMPLES, SAVED_AT, saved_by
from tests.support.nets import largest_difference
from tests.support.ranks import Ranks

KINDS = ("ddp", "fsdp2", "zero")
EPOCH = -(-SAMPLES // GLOBAL)  # steps
PAIRS = [(kind, saved, world) for kind in KINDS for world in MOST for saved in saved_by(kind, world)]
each_pair = pytest.mark.parametrize(("kind", "saved", "resumed"), PAIRS)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Map world sizes to the results of their processes, which run at the same time."""
    folder, launches = tmp_path_factory.mktemp("worlds"), []
    for world in MOST:
        count = None if world == 1 else world
        launches.append(Ranks("tests.strategy.other_ranks", folder, *KINDS, log=folder / f"{world}.log", count=count))
    try:
        for launch in launches:
            launch.wait(timeout_s=150)
    finally:
        for launch in launches:
            launch.stop()
    return {world: torch.load(folder / f"{world}.pt", weights_only=True) for world in MOST}


@each_kind
@pytest.mark.parametrize("world", MOST)
def test_a_global_batch_is_the_same_step_on_any_number_of_ranks(found, world, kind):
    """The last step of an epoch has one sample, so most ranks have none; batches hold unequal numbers of targets."""
    alone, here = found[1]["adam" if kind == "zero" else "ddp"], found[world][kind]
    assert largest_difference(alone["weights"], here["weights"]) < 2e-6
    assert here["steps"] == 2 * EPOCH


@each_pair
def test_a_run_resumes_on_another_number_of_ranks(found, kind, saved, resumed):
    whole, rest = found[saved][kind], found[resumed][f"{kind} from {saved}"]
    assert largest_difference(whole["weights"], rest["weights"]) < 2e-6
    assert rest["steps"] == whole["steps"]
    assert rest["lr"] == whole["lr"] == pytest.approx((0.01 if kind == "zero" else 0.5) / (1 + 2 * EPOCH))


@each_pair
def test_no_sample_is_read_twice_or_left_out(found, kind, saved, resumed):
    whole, rest = found[saved][kind], found[resumed][f"{kind} from {saved}"]
    assert whole["samples"] == [(epoch, index) for epoch in range(2) for index in range(SAMPLES)]
    first = (SAVED_AT - EPOCH) * GLOBAL  # of the second epoch
    assert len(rest["samples"]) == SAMPLES - first
    assert set(rest["samples"]) < set(whole["samples"])


@each_pair
def test_sums_that_were_logged_before_are_continued(found, kind, saved, resumed):
    """The batch of a rank without samples logs, too."""
    steps = SAMPLES - SAMPLES % GLOBAL
    assert found[resumed][f"{kind} from {saved}"]["logged"] == [steps + resumed]


def test_negative_control_a_step_less_differs(found):
    """The tolerance would notice the step with one sample."""
    alone = found[1]["ddp"]
    assert max(float(value.abs().max()) for value in alone["weights"].values()) > 1e-2
