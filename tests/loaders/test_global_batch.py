"""A global batch gives the same step for any split over processes and micro-batches: 1 × 8 = 2 × 4 = 4 × 2."""

import pytest
import torch

from tests.support.nets import largest_difference
from tests.support.ranks import Ranks

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Map world sizes to the results of their processes, which run at the same time."""
    folder = tmp_path_factory.mktemp("worlds")
    launches = []
    for world in WORLDS:
        count = None if world == 1 else world
        path, log = folder / f"{world}.pt", folder / f"{world}.log"
        launches.append(Ranks("tests.loaders.global_batch", path, log=log, count=count))
    try:
        for launch in launches:
            launch.wait(timeout_s=100)
    finally:
        for launch in launches:
            launch.stop()
    return {world: torch.load(folder / f"{world}.pt", weights_only=True) for world in WORLDS}


@pytest.mark.parametrize("how", ["parts", "window", "equal"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_global_batch_gives_the_same_step_on_any_number_of_processes(found, world, how):
    """``parts``: one batch; ``window``: several; ``equal``: plain means, correct for equal numbers of targets."""
    expected, *schedule = found[1][how]
    seen, *same_schedule = found[world][how]
    assert largest_difference(expected, seen) < 2e-6
    assert same_schedule == schedule == [6, pytest.approx(0.01 / 7)]


def test_a_window_of_batches_equals_one_batch_in_micro_batches(found):
    assert largest_difference(found[1]["parts"][0], found[4]["window"][0]) < 2e-6


def test_negative_control_means_over_ranks_differ_with_unequal_targets(found):
    assert largest_difference(found[1]["unweighted"][0], found[4]["unweighted"][0]) > 1e-4
