"""The placement is optimal, as verified by brute force."""

import itertools
import random

import pytest

from lightning_fasttrain.model.memory_budget import checkpoint_plan
from lightning_fasttrain.model.memory_budget.checkpoint_plan import place


def best_by_trying_all(options, capacity):
    best = None
    for choice in itertools.product(*[range(len(o)) for o in options]):
        taken, fits = 0, True
        for block, index in enumerate(choice):
            taken += options[block][index][0]
            fits = fits and taken <= capacity[block]
        cost = sum(options[block][index][1] for block, index in enumerate(choice))
        if fits and (best is None or cost < best):
            best = cost
    return best


def cost_of(options, choice):
    return sum(o[index][1] for o, index in zip(options, choice, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_the_cost_equals_brute_force(seed):
    draw = random.Random(seed)
    blocks = draw.randint(1, 7)
    options = [
        [(draw.randint(50, 400), 0.0), (draw.randint(10, 50), draw.uniform(0.1, 2)), (0, draw.uniform(2, 9))]
        for _ in range(blocks)
    ]
    capacity = [draw.randint(0, 250 * blocks) for _ in range(blocks)]
    choice = place(options, capacity)
    assert cost_of(options, choice) == pytest.approx(best_by_trying_all(options, capacity))
    taken = list(itertools.accumulate(o[index][0] for o, index in zip(options, choice, strict=True)))
    assert all(t <= r for t, r in zip(taken, capacity, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_sums_that_are_equal_in_bytes_or_cost_equal_brute_force(seed):
    draw = random.Random(seed)
    options = []
    for _ in range(draw.randint(1, 7)):
        options.append([(draw.randint(0, 4), 0.0), (draw.randint(0, 2), 1.0), (0, float(draw.randint(1, 2)))])
    capacity = [draw.randint(0, 12) for _ in options]
    assert cost_of(options, place(options, capacity)) == best_by_trying_all(options, capacity)


@pytest.mark.parametrize("seed", range(10))
def test_many_blocks_of_all_sizes_are_placed_nearly_optimally_within_the_limit(seed, monkeypatch):
    draw = random.Random(seed)
    gib = 2**30
    options = [[(draw.randint(gib // 2, gib), 0.0), (0, draw.uniform(1, 2))] for _ in range(14)]
    capacity = [6 * gib] * 14
    exact = cost_of(options, place(options, capacity))
    assert exact == pytest.approx(best_by_trying_all(options, capacity))
    monkeypatch.setattr(checkpoint_plan, "MOST", 256)
    choice = place(options, capacity)
    assert sum(o[index][0] for o, index in zip(options, choice, strict=True)) <= 6 * gib
    assert exact <= cost_of(options, choice) <= 1.05 * exact


def test_an_exact_fit_of_a_hundred_blocks_is_found():
    options = [[(13_817_600, 0.0), (9_000_001, 1.0 + i / 1000), (0, 5.0)] for i in range(100)]
    choice = place(options, [40 * 13_817_600 + 20 * 9_000_001] * 100)
    taken = sum(o[index][0] for o, index in zip(options, choice, strict=True))
    assert taken <= 40 * 13_817_600 + 20 * 9_000_001
    assert cost_of(options, choice) <= cost_of(options, [0] * 40 + [1] * 20 + [2] * 40)


def test_the_limits_of_early_blocks_are_respected():
    keep_or_not = [(10, 0.0), (0, 1.0)]
    assert place([keep_or_not] * 3, [0, 10, 20]) == [1, 0, 0]
    assert place([keep_or_not] * 3, [30, 30, 10]).count(0) == 1


def test_unlimited_zero_and_unreachable_limits():
    assert place([[(5, 0.0), (0, 1.0)]] * 2, [10, 10]) == [0, 0]
    assert place([[(5, 0.0), (0, 1.0)]] * 2, [0, 0]) == [1, 1]
    assert place([[(5, 0.0)]], [4]) is None
    assert place([[(0, 0.0)]], [-1]) is None
    assert place([], []) == []
