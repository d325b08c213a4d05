"""The streams of a step, against closed forms and against a simulation of one event after the other."""

import random
from dataclasses import replace

import pytest

from lightning_fasttrain.step_time.machine import Link, collective_seconds, read_machine
from lightning_fasttrain.step_time.record_step import Collective, Kernel, RecordedStep
from lightning_fasttrain.step_time.simulate_step import Timeline, lay_out, simulate_step

A100 = read_machine("A100")
# 1 byte takes 1 s, and nothing else takes time: a kernel of b bytes takes b seconds.
SLOW = replace(A100, gb_per_s=1e-9, bandwidth_share=1.0, kernel_us=0.0, host_us=0.0, overlap=1.0)
SLOW = replace(SLOW, inside=Link(1e-9, 0, 1.0))


def kernel(nbytes, waits=(), phase="forward", **settings):
    return Kernel("x", "element-wise", phase, "", "float32", 0, nbytes, 0, waits=waits, **settings)


def gather(nbytes, **settings):
    """A gather over two ranks, which sends half of it."""
    return Collective("all-gather", 2 * nbytes, (0, 1), "gathers", **settings)


def time_of(events, machine=SLOW):
    return Timeline(events, 8).simulate(machine)


def test_a_gather_is_hidden_behind_what_does_not_need_it():
    exposed = time_of([gather(5), kernel(3), kernel(4, waits=(0,))])
    assert (exposed.seconds, exposed.by_kind["exposed communication"], exposed.hidden) == (9, 2, 3)
    hidden = time_of([gather(2), kernel(3), kernel(4, waits=(0,))])
    assert (hidden.seconds, hidden.by_kind["exposed communication"], hidden.hidden) == (7, 0, 2)


def test_what_overlaps_disturbs_computing():
    disturbed = time_of([gather(2), kernel(3), kernel(4, waits=(0,))], replace(SLOW, overlap=0.25))
    assert disturbed.seconds == pytest.approx(7 + 0.75 * 2)


def test_a_slow_network_disturbs_by_what_it_moves():
    # The gather takes 24 s in one node, and 56 times as long between four.
    machine = replace(SLOW, overlap=0.25, inside=Link(1e-9, 0, 1.0), between=Link(1e-9 / 56, 0, 1.0))
    events = [Collective("all-gather", 32, tuple(range(0, 32, 8)), "gathers", -1), kernel(9999), kernel(4, waits=(0,))]
    assert collective_seconds("all-gather", 32, range(0, 32, 8), machine, 8) == pytest.approx(56 * 24)
    assert time_of(events, machine).seconds == pytest.approx(9999 + 4 + 0.75 * 24)


def test_no_more_than_two_gathers_are_ahead():
    events = [gather(1), gather(1), gather(1), kernel(10), kernel(1, waits=(0,)), kernel(1, waits=(1,))]
    # The third begins when the first is taken over, at 10, and nothing waits for it.
    assert time_of([*events, kernel(1, waits=(2,))]).seconds == 13
    assert time_of([*events[:3], kernel(10, waits=(2,))]).seconds == 13


def test_a_step_of_small_kernels_takes_what_the_host_needs():
    machine = replace(SLOW, host_us=1e6)
    simulated = time_of([kernel(0)] * 10, machine)
    assert simulated.seconds == 9  # the first starts at once
    assert simulated.by_kind["launches"] == 9
    assert time_of([kernel(20), *[kernel(0)] * 10], machine).seconds == 20


@pytest.mark.parametrize("captured", [False, True])
def test_entering_a_compiled_graph_keeps_the_host_busy(captured):
    machine = replace(SLOW, host_us=1e6)
    graph = [kernel(0, enters=True, captured=captured), kernel(0, captured=captured)]
    simulated = time_of([kernel(0), *graph, *graph], machine)
    # 14 times as long as a launch for each, beside the launches: of a captured graph there is one.
    assert simulated.seconds == 2 * 14 + (2 if captured else 4)
    waits_for_the_host = replace(machine, runs_ahead=False)
    assert time_of([kernel(0), *graph], waits_for_the_host).seconds == 14 + 3


def test_convolutions_take_longer_where_the_host_computes():
    machine = replace(SLOW, convolution_us=5e6)
    events = [kernel(1), *(replace(kernel(1), op=op) for op in ("convolution (transposed)", "convolution_backward"))]
    assert time_of(events, machine).seconds == 3
    beside = time_of(events, replace(machine, runs_ahead=False, host_us=0.0))
    assert beside.seconds == 3 + 5 + 2 * 5


def test_hooks_of_sharding_keep_the_host_busy():
    machine = replace(SLOW, sharding_us=2e6)
    events = [gather(1, hooked=True), kernel(1), gather(1, hooked=True), kernel(1)]
    # The host starts the first kernel at 2 s, and the second at 4 s.
    ahead = time_of(events, machine)
    assert (ahead.seconds, ahead.by_kind["launches"]) == (5, 3)
    assert time_of([kernel(9), *events], machine).seconds == 11
    assert time_of([replace(event, hooked=False) for event in events if event != kernel(1)], machine).seconds == 2
    # Where the host computes, it does so after each of the two.
    beside = time_of(events, replace(machine, runs_ahead=False))
    assert (beside.seconds, beside.by_kind["launches"]) == (6, 4)


def test_hooks_of_modules_keep_the_host_busy():
    machine = replace(SLOW, fetching_us=2e6)
    events = [kernel(1, hooks=1.0), kernel(1), gather(1), kernel(1, hooks=0.5)]
    # The host starts the first kernel at 2 s, and the last at 3 s.
    ahead = time_of(events, machine)
    assert (ahead.seconds, ahead.by_kind["launches"]) == (5, 2)
    assert time_of([kernel(9), *events], machine).seconds == 12
    beside = time_of(events, replace(machine, runs_ahead=False))
    assert (beside.seconds, beside.by_kind["launches"]) == (6, 3)


def test_what_is_in_the_cache_moves_at_its_rate():
    two_bytes_are_cached = replace(SLOW, cache_mib=2 / 2**20, cached_gb_per_s=4e-9)
    assert time_of([kernel(2)], two_bytes_are_cached).seconds == pytest.approx(0.5)
    assert time_of([kernel(7)], two_bytes_are_cached).seconds == pytest.approx(0.5 + 5)


def test_elements_that_take_long_to_compute_take_the_longer_of_both():
    machine = replace(SLOW, transcendental_ns=1e9, random_ns=5e9)  # a second each
    for op, seconds in (("relu", 8), ("tanh", 8), ("bernoulli_", 10)):
        of_two = Kernel(op, "element-wise", "forward", "", "float32", 0, 0, 8)
        assert time_of([of_two], machine).seconds == pytest.approx(seconds)
    of_four = Kernel("tanh", "element-wise", "forward", "", "bfloat16", 0, 0, 8)
    assert time_of([of_four], replace(machine, gb_per_s=1.0)).seconds == pytest.approx(4)


def test_a_value_may_differ_in_a_dtype():
    peaks, shares = {"float32": 1.0, "bfloat16": 2.0}, {"float32": 1.0, "bfloat16": 1.0}
    machine = replace(SLOW, peak_flops=peaks, product_share=shares, product_half_size=0.0, attention_share=0.5)
    machine = replace(machine, by_dtype={"bfloat16": {"product_half_size": 2.0, "attention_share": 0.25}})
    for dtype, product, attention in (("float32", 16, 32), ("bfloat16", 8 * (1 + 2 / 2), 32)):
        cube = Kernel("mm", "products", "forward", "", dtype, 16, 0, 0)  # 2 × 2 × 2
        assert time_of([cube], machine).seconds == pytest.approx(product)
        assert time_of([replace(cube, op="x", kind="attention")], machine).seconds == pytest.approx(attention)
    shapes = ((1, 1, 4, 8), (1, 1, 16, 8), (1, 1, 16, 8))  # of mean length 8
    attention = Kernel("_scaled_dot_product_x", "attention", "forward", "", "float32", 16, 0, 0, shapes)
    backward = replace(attention, kind="attention backward", shapes=(shapes[0], *shapes))
    machine = replace(machine, attention_half_length=4.0, by_dtype={"float32": {"attention_backward_half_length": 8.0}})
    assert time_of([attention], machine).seconds == pytest.approx(32 * 1.5)
    assert time_of([backward], replace(machine, attention_backward_share=0.5)).seconds == pytest.approx(32 * 2)
    with pytest.raises(ValueError, match="by_dtype='half': not a known choice. Use one of 'product_half_size'"):
        replace(machine, by_dtype={"bfloat16": {"half": 1.0}})


def test_where_the_host_does_not_run_ahead_kernels_of_the_optimizer_have_their_own_time():
    events = [kernel(1), kernel(1), kernel(1, phase="optimizer step")]
    machine = replace(SLOW, runs_ahead=False, host_us=10e6)
    assert time_of(events, machine).seconds == pytest.approx(33)
    assert time_of(events, replace(machine, update_us=2e6)).seconds == pytest.approx(25)


def test_the_size_of_a_convolution_in_groups_is_the_harmonic_mean():
    shapes, rows = ((2, 8, 16, 16), (8, 1, 3, 3)), 2 * 14 * 14
    each = Kernel("convolution", "products", "forward", "", "float32", 2 * rows * 8 * 9, 0, 0, shapes)
    assert each.size == pytest.approx(3 / (1 / rows + 1 / 1 + 1 / 9))
    whole = replace(each, flops=2 * rows * 8 * 72, shapes=((2, 8, 16, 16), (8, 8, 3, 3)))
    assert whole.size == pytest.approx((rows * 8 * 72) ** (1 / 3))
    backward = replace(each, op="convolution_backward", shapes=((2, 8, 14, 14), *shapes))
    assert backward.size == each.size


def test_the_size_of_a_recurrent_product_is_that_of_one_place():
    whole = Kernel("mkldnn_rnn_layer", "products", "forward", "", "float32", 2 * 5 * 64, 0, 0, ((5, 4, 4), (4, 4)))
    assert whole.size == pytest.approx(4)


def test_reading_a_value_makes_the_host_wait():
    machine = replace(SLOW, host_us=1e6)
    events = [kernel(20), kernel(0, reads_value=True), kernel(0), kernel(0)]
    simulated = time_of(events, machine)
    assert simulated.seconds == 22
    assert simulated.by_kind["waiting"] + simulated.by_kind["launches"] == 2
    assert simulated.by_kind["waiting"] > 0


def slow_reference(events, machine):
    """Simulate one event after the other, as the documentation describes the streams."""
    compute, late, free, ends, gathers, taken = 0.0, 0.0, {}, {}, [], {}
    host_s = machine.host_us * 1e-6
    for place, event in enumerate(events):
        issued = place * host_s + late
        if isinstance(event, Collective):
            seconds = collective_seconds(event.kind, event.nbytes, event.ranks, machine, 8)
            start = max(issued, free.get(event.stream, 0.0), compute if event.after >= 0 else 0.0)
            if event.stream == "gathers":
                if len(gathers) > 1:
                    start = max(start, taken.get(gathers[-2], 0.0))
                gathers.append(place)
            ends[place] = free[event.stream] = start + seconds
            continue
        for wait in event.waits:
            if wait not in taken:
                nbytes = events[wait].nbytes
                seconds = collective_seconds(events[wait].kind, nbytes, events[wait].ranks, machine, 8)
                hidden = max(0.0, seconds - max(0.0, ends[wait] - compute))
                taken[wait] = compute = max(compute + (1 - machine.overlap) * hidden, ends[wait])
        compute = max(compute, issued) + max(event.read / (machine.gb_per_s * 1e9), machine.kernel_us * 1e-6)
        if event.reads_value:
            late = max(late, compute - place * host_s)
    return max([compute, *free.values()])


@pytest.mark.parametrize("seed", range(20))
def test_as_one_event_after_the_other(seed):
    draw = random.Random(seed)
    events = []
    for place in range(60):
        earlier = [p for p, event in enumerate(events) if isinstance(event, Collective)]
        if draw.random() < 0.2:
            stream = draw.choice(["gathers", "reductions"])
            after = place - 1 if events and draw.random() < 0.5 else -1
            events.append(Collective("all-gather", draw.randrange(9), (0, 1), stream, after))
        else:
            waits = tuple(earlier[-1:]) if draw.random() < 0.3 else ()
            events.append(kernel(draw.randrange(5), waits, reads_value=draw.random() < 0.05))
    machine = replace(SLOW, host_us=draw.choice([0.0, 1e6, 3e6]), overlap=0.6)
    simulated = time_of(events, machine)
    assert simulated.seconds == pytest.approx(slow_reference(events, machine))
    assert sum(simulated.by_kind.values()) == pytest.approx(simulated.seconds)


def accumulated(reduces_each):
    def micro_batch(reduces):
        reduction = [Collective("all-reduce", 3, (0, 1), "reductions", after=0)]
        return [kernel(2), *(reduction if reduces else []), kernel(5, phase="backward")]

    events = [*micro_batch(reduces_each), *micro_batch(True), kernel(4, phase="optimizer step")]
    return events, len(micro_batch(reduces_each))


@pytest.mark.parametrize("reduces_each", [False, True])
def test_micro_batches_in_the_middle_reduce_as_the_first_does(reduces_each):
    events, second = accumulated(reduces_each)
    step = RecordedStep(events, [0, second], len(events) - 1, micro_batches=4)
    reductions = [event for event in lay_out(step, 4) if isinstance(event, Collective)]
    assert len(reductions) == (4 if reduces_each else 1)
    assert simulate_step(step, SLOW, 8).seconds == 4 * 7 + 4
    assert simulate_step(replace(step, micro_batches=100), SLOW, 8).seconds == pytest.approx(100 * 7 + 4)


def test_collectives_in_closed_form():
    machine = replace(A100, inside=Link(10, 0, 0.5), between=Link(2, 100, 1.0))
    gb = 10**9
    assert collective_seconds("all-gather", 8 * gb, range(8), machine, 8) == pytest.approx(7 / 5)
    assert collective_seconds("all-reduce", 8 * gb, range(8), machine, 8) == pytest.approx(14 / 5)
    slow_reduction = replace(machine, inside=replace(machine.inside, reduce_factor=3))
    assert collective_seconds("reduce-scatter", 8 * gb, range(8), machine, 8) == pytest.approx(7 / 5)
    assert collective_seconds("reduce-scatter", 8 * gb, range(8), slow_reduction, 8) == pytest.approx(21 / 5)
    # Four nodes: each receives three quarters, through eight network cards.
    between = 8 * 3 / 4 / 8 / 2
    assert collective_seconds("all-gather", 8 * gb, range(32), machine, 8) == pytest.approx(
        max(8 * 31 / 32 / 5, between) + 4e-4
    )
    # One rank of each node, as in a replica group: its card alone.
    assert collective_seconds("all-gather", 8 * gb, range(0, 32, 8), machine, 8) == pytest.approx(3 + 4e-4)
    assert collective_seconds("all-gather", gb, [3], machine, 8) == 0
