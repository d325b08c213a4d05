"""Gradients summed in float32 over many micro-batches are as accurate as those of the whole batch."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fasttrain.micro_batching import step_gradients
from lightning_fasttrain.micro_batching.step_gradients import (
    Float32GradientSums,
    sum_gradients_in_float32,
    takes_float32_gradients,
)
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.optim.named.lion import Lion
from lightning_fasttrain.optim.named.low_precision_updates import LowPrecisionUpdates

LOW = [torch.bfloat16, torch.float16]
PARTS, ROWS = 64, 256


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(dtype)


def data(dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 32, generator=generator).to(dtype), torch.randint(10, (ROWS,), generator=generator)


def backward(net, parts, windows=1):
    """Return the gradients of ``windows`` times the batch, in as many micro-batches."""
    x, y = data(next(net.parameters()).dtype)
    for _ in range(windows):
        for some, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(net(some).float(), target, reduction="sum") / len(x)).backward()


def error(net, exact):
    ours, theirs = (torch.cat([p.grad.flatten().double() for p in one.parameters()]) for one in (net, exact))
    return float((ours - theirs).norm() / theirs.norm())


def errors(dtype):
    """Return the errors of the whole batch, and of micro-batches summed in float32 and in the parameters' dtype."""
    exact, whole, summed, rounded = build(dtype).float(), build(dtype), build(dtype), build(dtype)
    backward(exact, 1)
    backward(whole, 1)
    backward(rounded, PARTS)
    with sum_gradients_in_float32(summed.parameters()):
        backward(summed, PARTS)
    return error(whole, exact), error(summed, exact), error(rounded, exact)


@pytest.mark.parametrize("dtype", LOW)
def test_float32_sums_are_as_accurate_as_the_whole_batch(dtype):
    whole, summed, rounded = errors(dtype)
    assert summed <= 1.15 * whole
    assert rounded > 1.5 * whole  # the plain sum has a notable error


def test_negative_control_low_precision_sums_are_less_accurate(monkeypatch):
    monkeypatch.setattr(step_gradients, "_can_be_switched", lambda parameter: False)
    whole, summed, rounded = errors(torch.bfloat16)
    assert summed == rounded > 1.15 * whole


@pytest.mark.parametrize("dtype", LOW)
def test_earlier_gradients_are_a_term_of_the_sum(dtype):
    exact, whole, net = build(dtype).float(), build(dtype), build(dtype)
    backward(exact, 1, windows=2)
    backward(whole, 1, windows=2)
    backward(net, 1)
    with sum_gradients_in_float32(net.parameters()):
        backward(net, PARTS)
    assert error(net, exact) <= 1.15 * error(whole, exact)


def test_kept_gradients_enter_the_next_sum_unrounded():
    exact, net, sums = build(torch.bfloat16).float(), build(torch.bfloat16), Float32GradientSums()
    backward(exact, PARTS, windows=4)
    for _ in range(4):
        sums.begin(net.parameters())
        backward(net, PARTS)
    kept = copy.deepcopy([p.grad for p in net.parameters()])
    assert all(gradient.dtype is torch.float32 for gradient in kept)
    sums.finish()
    for parameter, gradient in zip(net.parameters(), kept, strict=True):
        assert torch.equal(parameter.grad, gradient.bfloat16())  # one rounding
    once = build(torch.bfloat16)
    backward(once, PARTS, windows=4)
    assert error(net, exact) < 0.7 * error(once, exact)


@pytest.mark.parametrize("dtype", LOW)
def test_one_micro_batch_is_bitwise_the_plain_gradient(dtype):
    plain, net = build(dtype), build(dtype)
    backward(plain, 1)
    with sum_gradients_in_float32(net.parameters()):
        backward(net, 1)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def assert_unchanged(net, dtype):
    for parameter in net.parameters():
        assert parameter.grad_dtype is dtype
        assert parameter.grad is None or parameter.grad.dtype is dtype


@pytest.mark.parametrize("dtype", LOW)
def test_parameters_are_restored_afterwards(dtype):
    net = build(dtype)
    assert_unchanged(net, dtype)
    with sum_gradients_in_float32(net.parameters()) as sums:
        backward(net, PARTS)
        net[0].weight.grad = None  # like a parameter that this step does not use
        assert net[2].weight.grad.dtype is torch.float32
        sums.finish()  # as before the last backward under DDP
        assert_unchanged(net, dtype)
        backward(net, 1)
    sums.finish()
    assert_unchanged(net, dtype)


def test_parameters_are_restored_after_an_error():
    net = build(torch.bfloat16)

    def fail():
        with sum_gradients_in_float32(net.parameters(), keep=True):
            backward(net, 2)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert_unchanged(net, torch.bfloat16)


def test_keep_leaves_the_sums_for_the_optimizer():
    net = build(torch.bfloat16)
    with sum_gradients_in_float32(net.parameters(), keep=True) as sums:
        backward(net, 2)
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    sums.finish()
    assert_unchanged(net, torch.bfloat16)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "data", p.data.float()),
        lambda p: setattr(p, "ds_id", 0),
        lambda p: setattr(p, "grad_dtype", None),
        lambda p: p.register_post_accumulate_grad_hook(lambda _: None),
    ],
    ids=["frozen", "float32", "DeepSpeed", "the user's own", "consumed"],
)
def test_unsupported_parameters_are_left_unchanged(prepare):
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    prepare(parameter)
    before = parameter.grad_dtype
    with sum_gradients_in_float32([parameter]):
        assert parameter.grad_dtype is before
    assert parameter.grad_dtype is before


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("process_group")
def test_under_ddp_the_sums_are_rounded_before_the_last_backward(views):
    def run(net, model):
        x, y = data(torch.bfloat16)
        sums = Float32GradientSums()
        sums.begin(net.parameters())
        *parts, last = zip(x.chunk(4), y.chunk(4), strict=True)
        with model.no_sync() if model is not net else contextlib.nullcontext():
            for some, target in parts:
                F.cross_entropy(model(some).float(), target).backward()
        sums.finish()
        F.cross_entropy(model(last[0]).float(), last[1]).backward()

    plain, net = build(torch.bfloat16), build(torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=views)
    for _ in range(2):
        run(plain, plain)
        run(net, model)
        if views:  # gradients that are kept go into the buckets when these are rebuilt, once, before the second step
            plain.zero_grad()
            net.zero_grad()
    if views:
        run(plain, plain)
        run(net, model)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_sums_work_in_compiled_code():
    torch._dynamo.reset()
    net, compiled = build(torch.bfloat16), build(torch.bfloat16)
    compiled.compile(backend="aot_eager")
    for one in (net, compiled):
        with sum_gradients_in_float32(one.parameters(), keep=True):
            backward(one, 4)
    assert error(compiled, net) < 1e-6


def low_precision(make):
    return lambda params: LowPrecisionUpdates(make(params), "kahan")


@pytest.mark.parametrize(
    ("make", "takes"),
    [
        (low_precision(torch.optim.SGD), True),
        (low_precision(torch.optim.AdamW), True),
        (low_precision(lambda params: torch.optim.Adagrad(params, foreach=True)), True),
        (low_precision(Lion), True),
        (lambda params: LowPrecisionUpdates(torch.optim.AdamW(params), "stochastic"), True),
        (torch.optim.AdamW, False),
        (torch.optim.SGD, False),
        (Lion, False),
        (lambda params: HostOptimizer(params, torch.optim.AdamW), False),
    ],
)
def test_optimizers_that_support_float32_gradients(make, takes):
    assert takes_float32_gradients(make([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])) is takes


def test_support_depends_on_the_parameters_dtype():
    def optimizer(*dtypes):
        parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, *dtypes)]
        return LowPrecisionUpdates(torch.optim.AdamW(parameters), "kahan")

    assert takes_float32_gradients(optimizer(torch.float32))
    assert not takes_float32_gradients(optimizer(torch.float16))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Lion])
def test_steps_with_float32_gradients_are_those_of_float32_weights(make):
    """Kahan's updates are float32's bit for bit, rounded; so with float32 gradients the weights must be too."""
    torch.manual_seed(0)
    exact = nn.Parameter(torch.randn(16, 16).bfloat16().float())
    low = nn.Parameter(exact.detach().bfloat16())
    optimizers = make([exact], lr=1e-3), LowPrecisionUpdates(make([low], lr=1e-3), "kahan")
    sums = Float32GradientSums()
    for _ in range(10):
        sums.begin([low])
        gradient = torch.randn(16, 16)
        exact.grad, low.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(low, exact.bfloat16())
