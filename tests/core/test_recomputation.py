"""What is recomputed in the backward has values, gradients and random numbers of a plain call, and keeps nothing."""

import gc
import random
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_fasttrain.core.modules.recomputation import recompute_in_backward
from lightning_fasttrain.core.state.surroundings import Surroundings


def recompute(function, *inputs):
    return recompute_in_backward(function, inputs, (nullcontext(), nullcontext()))


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
        self.calls = []

    def forward(self, x):
        self.calls.append("up")
        x = self.up(x).tanh()
        self.calls.append("down")
        x = self.down(x)
        self.calls.append("end")
        return x


def gradients(function, inputs, order=1):
    value = function(*inputs).sum()
    for _ in range(order):
        found = torch.autograd.grad(value, inputs, create_graph=True)
        value = sum(gradient.square().sum() for gradient in found)
    return found


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_of_any_order_are_those_of_a_plain_call(order):
    x, y = leaf(3, 4), leaf(4, 2)

    def function(x, y):
        return (x @ y).sin() * x.exp().sum()

    expected = gradients(function, (x, y), order)
    found = gradients(lambda *inputs: recompute(function, *inputs), (x, y), order)
    assert all(map(torch.equal, found, expected))


def test_only_inputs_are_kept_and_the_graph_is_freed():
    block, kept, inside = Block(), [], []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    def function(x):
        hidden = block(x)
        inside.append(weakref.ref(hidden))
        return hidden.sin()

    x = leaf(3, 4)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = recompute(function, x)
    assert kept == [x.shape]
    assert inside[0]() is None
    output.sum().backward(retain_graph=True)
    assert len(inside) == 2
    assert inside[1]() is None


def test_branches_that_the_graph_drops_are_not_kept_by_the_recomputation():
    kept = []

    def function(x):
        dropped = x.tanh()  # which saves its own output
        kept.append(weakref.ref(dropped))
        return x.sin().cos()

    for _ in range(2):
        recompute(function, leaf(3)).sum().backward()
    gc.collect()
    assert len(kept) == 4
    assert all(one() is None for one in kept)


def test_hooks_around_it_give_the_input_back():
    x = leaf(3, 4)
    expected = torch.autograd.grad(x.sin().cos().sum(), x)[0]
    with saved_tensors_hooks(lambda tensor: tensor.numpy().copy(), torch.from_numpy):
        output = recompute(lambda x: x.sin().cos(), x)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_the_recomputation_ends_once_all_is_there_even_where_exceptions_are_caught():
    block = Block()

    def function(x):
        try:
            return block(x)
        except Exception:
            pytest.fail("the end of the recomputation was caught")

    recompute(function, leaf(3, 4)).sum().backward()
    assert block.calls == ["up", "down", "end", "up", "down"]


def test_two_backwards_through_a_retained_graph_and_parts_of_it():
    x, y = leaf(3), leaf(3)

    def function(x, y):
        return x.sin() * y.exp()

    output, expected = recompute(function, x, y).sum(), function(x, y).sum()
    for inputs in ([x], [y], [x, y]):
        found = torch.autograd.grad(output, inputs, retain_graph=True)
        assert all(map(torch.equal, found, torch.autograd.grad(expected, inputs, retain_graph=True)))


def test_a_backward_inside_the_function():
    x = leaf(3)

    def function(x):
        y = x.sin()
        (slope,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
        return y * slope

    expected = torch.autograd.grad(function(x).sum(), x)[0]
    found = torch.autograd.grad(recompute(function, x).sum(), x)[0]
    assert torch.equal(found, expected)


def test_a_value_stored_by_the_recomputation_can_be_differentiated():
    stored, x = [], leaf(3)

    def function(x):
        stored.append(x.sin().exp())
        return stored[-1].cos()

    recompute(function, x).sum().backward()
    expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(stored[1].sum(), x)[0], expected)


def others(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


@pytest.mark.parametrize("outer", [recompute, others])
@pytest.mark.parametrize("inner", [recompute, others])
def test_it_nests_with_itself_and_with_pytorchs_checkpoint(outer, inner):
    first, second, x = Block(), Block(), leaf(3, 4)

    def function(x):
        return inner(second, inner(first, x).sin()).cos()

    expected = torch.autograd.grad(second(first(x).sin()).cos().sum(), [x, first.up.weight])
    first.calls.clear()
    found = torch.autograd.grad(outer(function, x).sum(), [x, first.up.weight])
    assert all(map(torch.equal, found, expected))
    assert first.calls.count("up") == 3  # forward, for the second block's input, and for its own tensors


# --- what differs is reported ----------------------------------------------------------------------------------------


def test_an_input_written_to_is_reported():
    x = leaf(3).sin()
    output = recompute(torch.exp, x)
    x += 1
    with pytest.raises(RuntimeError, match=r"an input of shape \(3,\) was written to after the forward"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (lambda x: x.sin().cos(), lambda x: x.sin(), "saved 1 tensors instead of 2"),
        (lambda x: x.sin(), lambda x: x[:2].sin(), r"shape \(2,\) in torch.float64 on cpu instead of \(3,\) in"),
        (lambda x: x.sin(), lambda x: x.float().sin(), "in torch.float32 on cpu instead of"),
    ],
)
def test_other_operations_in_the_recomputation_are_reported(first, then, message):
    functions = [first, then]
    output = recompute(lambda x: functions.pop(0)(x), leaf(3))
    with pytest.raises(RuntimeError, match=f"the recomputation of a forward .*{message}"):
        output.sum().backward()


# --- generators, autocast, default dtype and device -------------------------------------------------------------------


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("before", [0, 1])
def test_random_numbers_are_drawn_again_and_only_once(generator, before):
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(3))
    try:
        seen = []

        def function(x):
            seen.append(draws())
            return x.sin()

        for _ in range(before):  # the second one of a pair of normal numbers is next
            draws()
        output = recompute(function, leaf(3))
        after = draws()
        here = draws()
        output.sum().backward()
        there = draws()
        assert seen[0] == seen[1]
        assert seen[0] != after != here != there
        # What was drawn in between by the caller is not drawn again.
        restored = Surroundings([])
        first = draws()
        with restored.restored():
            assert draws() == first
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn])
@pytest.mark.parametrize("before", [0, 1, 623, 624])
def test_a_draw_is_noticed_wherever_the_generator_stands(draw, before):
    random.seed(before)
    np.random.seed(before)
    for _ in range(before):
        draw()
    seen = []
    output = recompute(lambda x: x.sin() if seen.append(draw()) else x.cos(), leaf(1))
    following = draw()
    output.sum().backward()
    assert seen[0] == seen[1] != following


def test_the_backward_leaves_generators_as_they_are():
    output = recompute(lambda x: x.sin() * random.random() * np.random.rand() * torch.rand(()), leaf(3))
    expected = draws()
    around = Surroundings([])
    output.sum().backward()
    found = draws()
    with around.restored():
        assert draws() == found != expected


def test_autocast_and_default_dtype_and_device_are_as_in_the_forward():
    layer, seen = nn.Linear(4, 4), []

    def function(x):
        y = layer(x)
        fresh = torch.empty(1)
        seen.append((y.dtype, fresh.dtype, fresh.device.type))
        return y.sin()

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            output = recompute(function, torch.randn(2, 4, device="cpu", dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    thread = threading.Thread(target=output.float().sum().backward)
    thread.start()
    thread.join()
    assert seen == [(torch.bfloat16, torch.float64, "meta")] * 2
    assert torch.empty(1).dtype == torch.float32
    assert layer.weight.grad is not None


def test_a_forward_under_no_autocast_is_recomputed_without_it():
    layer, seen = nn.Linear(4, 4), []

    def function(x):
        y = layer(x)
        seen.append(y.dtype)
        return y.sin()

    output = recompute(function, torch.randn(2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        output.sum().backward()
    assert seen == [torch.float32] * 2


def test_nothing_is_left_after_a_failing_forward():
    def fail(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recompute(fail, leaf(3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    block = Block()
    outputs = [recompute(block, leaf(3, 4)) for _ in range(3)]
    places = len([one for one in gc.get_objects() if type(one).__name__ == "_Place"])
    outputs.clear()
    assert len([one for one in gc.get_objects() if type(one).__name__ == "_Place"]) < places


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_draws_are_repeated_and_leave_the_generator_as_it_is():
    x, seen = torch.randn(64, device="cuda", requires_grad=True), []

    def function(x):
        seen.append(torch.rand(8, device="cuda"))
        return nn.functional.dropout(x, 0.5).sin()

    torch.cuda.manual_seed(1)
    output = recompute(function, x)
    state = torch.cuda.get_rng_state()
    output.sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(x.grad == 0, output == 0)
