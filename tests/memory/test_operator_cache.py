"""Results from the cache are those of the operators: shapes, strides, dtypes, offsets, storages, errors."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.core.modules import fake_mode
from lightning_fasttrain.core.modules.fake_mode import CallKey, FakeMode
from lightning_fasttrain.memory import allocation_trace
from lightning_fasttrain.memory.one_rank import fake_ranks
from tests.support.nets import TinyLM, lm_batches


class Cached(TorchDispatchMode):
    """Runs every operator through the cache and counts those that run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return fake_mode.run_cached(func, args, kwargs or {})[0]


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch):
    monkeypatch.setattr(fake_mode, "_cache", {})


CALLS = {
    "new": lambda x: x + 1,
    "broadcast": lambda x: x[:, :1] * x[:1],
    "product": lambda x: x @ x.T,
    "view": lambda x: x.view(-1)[3::2],
    "expanded": lambda x: x.expand(2, 4, 6).transpose(0, 1),
    "strided": lambda x: x.as_strided((2, 2), (1, 3), 2),
    "unsafe view": lambda x: F.linear(x.view(2, 2, 6), x),
    "views": lambda x: [part + 1 for part in (*x.chunk(2), *x.unbind(1))],
    "in place": lambda x: x.add_(1),
    "in place on a view": lambda x: x[1:].mul_(x[0]),
    "transposed in place": lambda x: x.clone().t_(),
    "resized in place": lambda x: x.detach().clone().resize_(50),
    "set to another storage": lambda x: torch.empty(0).set_(x),
    "lists": lambda x: torch._foreach_addcmul(list(x), list(x), list(x), 0.5),
    "lists with repeated tensors": lambda x: torch._foreach_mul([x, x[1:], x], [x, x[0], x]),
    "the second of equal arguments": lambda x: x[1:].clamp_(x[0], x[0]),
    "lists in place": lambda x: torch._foreach_mul_([x * 1, x[0] * 1], 0.5),
    "several": lambda x: (*x.topk(2), *torch.native_layer_norm(x, (6,), None, None, 1e-5)),
    "convolution": lambda x: F.conv2d(
        x.view(1, 2, 3, 4).to(memory_format=torch.channels_last), x.new_empty(2, 2, 1, 1)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 6)] * 3),
    "dtype": lambda x: (x.half(), x.sum(0, dtype=torch.float64), x > 0, x.long() + 1, x.long() + 1.0, x.long() + True),
    "scalars": lambda x: (x.sum(0, keepdim=True), x.sum(0, keepdim=False), x.sum(1), x * 2, x * 2.5, x**2),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag + 1,
    "sparse": lambda x: x.to_sparse() * 2,
    "known values": lambda x: x + torch.tensor([3.0]).add_(1).item(),
}


def describe(result, given):
    described = []
    for tensor in tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            shared = storage._cdata == given.untyped_storage()._cdata
            layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
            described.append(
                (*layout, storage.nbytes(), shared, tensor is given, tensor.requires_grad, tensor._is_view())
            )
        else:
            described.append(tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor)
    return described


class Outside(TorchDispatchMode):
    """Runs every operator as it is, so that the cache of the fake mode alone answers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("modes", [(FakeTensorMode, Cached), (FakeMode, Outside)], ids=["above", "in the fake mode"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_operator(name, trains, modes):
    def run():
        given = torch.empty(4, 6, requires_grad=trains) * 1
        return describe(CALLS[name](given), given)

    with FakeTensorMode():
        expected = run()
    fake, above = modes
    for _ in range(3):  # with a fake mode of its own, as in each prediction
        with fake(), above():
            assert run() == expected


def test_marks_of_the_profiler_run_and_are_no_operators_on_tensors():
    assert fake_mode.takes_no_tensor(torch.ops.profiler._record_function_enter_new.default)
    assert fake_mode.takes_no_tensor(torch.ops.aten.promote_types.default)
    assert not fake_mode.takes_no_tensor(torch.ops.aten.empty.memory_format)  # returns one
    assert not fake_mode.takes_no_tensor(torch.ops.aten._local_scalar_dense.default)  # takes one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, FakeMode():
        with torch.profiler.record_function("marked"):
            assert torch.promote_types(torch.bfloat16, torch.float32) is torch.float32
    assert "marked" in {event.name for event in profile.events()}


def test_gradients_are_those_of_the_operators():
    def run():
        net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
        x = torch.empty(4, 6, requires_grad=True)
        (net(x) * x).sum().backward()
        return [describe(parameter.grad, x) for parameter in (x, *net.parameters())]

    with FakeTensorMode():
        expected = run()
    for _ in range(2):
        with FakeTensorMode(), Cached():
            assert run() == expected


def test_errors_are_raised_every_time():
    for _ in range(2):
        with FakeTensorMode(), Cached():
            with pytest.raises(RuntimeError, match="broadcast"):
                torch.empty(4, 6) + torch.empty(5)
            with pytest.raises(RuntimeError):
                torch.empty(4).add_(torch.empty(3, 4))


def test_operators_run_once_for_the_same_shapes(monkeypatch):
    ran = []
    run = FakeTensorMode.dispatch
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda *call: ran.append(call[1]) or run(*call))
    for _ in range(2):
        with FakeTensorMode(), Cached():
            x = torch.empty(4, 6)
            for rate in (0.1, 0.2):
                x = (x @ x.T @ x).addcdiv_(x, x, value=rate)
            x = x + torch.empty(6)
    aten, times = torch.ops.aten, Counter(ran)
    assert (times[aten.mm.default], times[aten.addcdiv_.default], times[aten.add.Tensor]) == (2, 1, 1)


def test_the_cache_does_not_grow_without_limit(monkeypatch):
    monkeypatch.setattr(fake_mode, "_MOST_ENTRIES", 10)
    with FakeTensorMode(), Cached():
        for size in range(40):
            assert (torch.empty(size, 2) + 1).shape == (size, 2)
            assert 1 <= len(fake_mode._cache) <= 10


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_later_predictions_equal_the_first(device):
    def predict(module, batch, **settings):
        return repr(ft.predict_memory(module, batch, device=device, **settings))

    tokens = torch.zeros(2, 32, dtype=torch.long)
    gpt = lambda: GPTModule(GPTConfig(context=32, layers=2))  # noqa: E731
    techniques = [ft.ActivationCheckpointing(), ft.MicroBatching(2)]
    for settings in ({}, {"techniques": techniques, "precision": "bf16-mixed"}):
        first = predict(gpt, (tokens, tokens), **settings)
        predict(TinyLM, lm_batches(1)[0])
        assert predict(gpt, (tokens, tokens), **settings) == first


MODELS = {
    "TinyLM": (TinyLM, lm_batches(1)[0]),
    "GPT": (lambda: GPTModule(GPTConfig(context=32, layers=2)), (torch.zeros(2, 32, dtype=torch.long),) * 2),
    "frozen": (lambda: TinyLM(frozen=True), lm_batches(1)[0]),
    "one list for all": (lambda: TinyLM(depth=6, amsgrad=True, foreach=True), lm_batches(1)[0]),
}


STRATEGIES = {"GPT": {"strategy": ft.FSDP2Strategy(tensor_parallel=2), "world": 4}}
SHARDED = {"strategy": ft.FSDP2Strategy(), "world": 5}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_those_of_operators_that_all_run(name, device, is_sharded, monkeypatch):
    sharding = STRATEGIES.get(name, SHARDED) if is_sharded else {}

    def predict():
        techniques = [ft.ActivationCheckpointing()]
        return repr(ft.predict_memory(*MODELS[name], device=device, techniques=techniques, **sharding))

    predict()
    cached = predict()

    def run_all(func, args, kwargs, mode=None, run=None):
        return (func(*args, **kwargs) if run is None else run(args, kwargs)), CallKey(None, [])

    for module in (allocation_trace, fake_mode):
        monkeypatch.setattr(module, "run_cached", run_all)
    assert predict() == cached


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lists_of_shards_take_the_memory_that_each_operator_takes(name, monkeypatch):
    def predict():
        net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
        loss = lambda net, batch: net(batch).sum()  # noqa: E731
        settings = {"loss": loss, "optimizer": OPTIMIZERS[name], "strategy": ft.FSDP2Strategy(), "world": 5}
        return repr(ft.predict_memory(net, torch.zeros(8, 64), **settings))

    shorter = predict()
    with monkeypatch.context() as patches:
        patches.setattr(allocation_trace, "run_on_shards", lambda *call: NotImplemented)
        find = fake_mode._find_kind
        patches.setattr(fake_mode, "_find_kind", lambda func: find(func)._replace(writes_a_list=False))
        # DTensor propagates each sharding once, with further tensors.
        predict()
        assert predict() == shorter


def test_shards_that_lie_differently_are_left_to_dtensor():
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        rows, columns = (distribute_tensor(torch.zeros(8, 8), mesh, [Shard(axis)]) for axis in (0, 1))
        run, add = allocation_trace.run_on_shards, torch.ops.aten._foreach_add.List

        def call(func, types, args, kwargs):
            return func(*args, **kwargs)

        (total,) = run(add, ([rows], [rows]), {}, call)
        assert (total.shape, total.placements, total.to_local().shape) == ((8, 8), (Shard(0),), (2, 8))
        assert run(add, ([rows], [columns]), {}, call) is NotImplemented
        assert run(torch.ops.aten._foreach_norm.Scalar, ([rows],), {}, call) is NotImplemented
        assert run(torch.ops.aten.add.Tensor, (rows, rows), {}, call) is NotImplemented
        partial = DTensor.from_local(torch.zeros(8, 8), mesh, [Partial()])
        assert run(torch.ops.aten._foreach_abs.default, ([partial],), {}, call) is NotImplemented


def test_a_tensor_with_the_attributes_of_another_is_what_torch_makes():
    mode, other = FakeMode(), FakeMode()
    for like in (torch.empty_strided((2, 3), (1, 2), device="meta"), torch.empty(0, dtype=torch.int8, device="meta")):
        mode.wrap(like)
        made, expected = mode.wrap(like), FakeTensor(other, like, torch.device("cpu"))
        assert {**vars(made), "fake_mode": None} == {**vars(expected), "fake_mode": None}
        assert (made.fake_mode, made.device, made.dtype, made.stride()) == (
            mode,
            expected.device,
            like.dtype,
            like.stride(),
        )
        assert torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(expected)


def test_a_number_is_known_until_it_is_written_to():
    with FakeMode():
        number = torch.tensor(3.0)
        assert number.item() == 3.0
        number.add_(torch.empty(()))
        with pytest.raises(DataDependentOutputException):
            number.item()
