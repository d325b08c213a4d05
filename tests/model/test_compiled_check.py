"""A compiled block is used if it equals the eager one, but not with compiler faults or planted errors."""

import copy
import gc
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_fasttrain as ft
from lightning_fasttrain import compile_blocks_
from lightning_fasttrain.model.compile import compiled_forward as compiled_code
from lightning_fasttrain.model.compile.compiled_forward import FAULTS, list_faults
from tests.support import families
from tests.support.nets import heard


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, rate=0.0, dim=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, make=Block, **settings):
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([make(**settings) for _ in range(3)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def wrong(forward=1.0, backward=1.0):
    """Return a compiler that multiplies floating-point outputs by a factor."""

    def times(factor):
        def compile_graph(graph, inputs):
            def run(*args):
                found = graph(*args)
                return [_times(one, factor) for one in found]

            return make_boxed_func(run)

        return compile_graph

    return aot_autograd(fw_compiler=times(forward), bw_compiler=times(backward))


def _times(value, factor):
    return value * factor if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def verdict_of(net, x, **settings):
    compiled = compile_blocks_(net, blocks=type(net.blocks[0]), **settings)
    net(x).square().sum().backward()
    return next(iter(compiled.values())).entry.verdict


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
BACKEND = "aot_eager_decomp_partition"  # partitioned as for inductor, with its decompositions, and run eagerly


@pytest.mark.parametrize(
    ("rate", "dtype"), [(0.0, torch.float32), (0.2, torch.float32), (0.0, torch.float64), (0.2, torch.bfloat16)]
)
def test_correct_compiled_code_is_trusted(rate, dtype):
    verdict = verdict_of(Net(rate=rate).to(dtype), X.to(dtype), backend=BACKEND)
    assert (verdict.failure, verdict.unchecked) == ("", "")
    assert verdict.apart < {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize(
    ("error", "precision"),
    [
        ({"forward": 1.2}, torch.bfloat16),
        ({"backward": 1.2}, torch.float32),
        ({"backward": 1.2}, torch.bfloat16),
        ({"backward": float("nan")}, torch.float32),
    ],
)
def test_a_wrongly_compiled_block_runs_eagerly_and_is_named(error, precision):
    net = Net()
    plain = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        with pytest.warns(
            ft.FastTrainWarning,
            match=r"block 'blocks.0' \(Block\) gives different results.* is off by",
        ):
            verdict = verdict_of(net, X, backend=wrong(**error))
        plain(X).square().sum().backward()
    assert verdict.failure
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        net(X)


def test_a_small_error_in_float32_is_found():
    with pytest.warns(ft.FastTrainWarning, match="is off by"):
        assert verdict_of(Net(), X, backend=wrong(backward=1.005)).failure


def test_without_the_check_wrong_code_is_used():
    net, plain = Net(), Net()
    verdict = verdict_of(net, X, backend=wrong(backward=1.2), check=False)
    plain(X).square().sum().backward()
    assert verdict.unchecked == "check=False"
    assert not torch.allclose(net.stem.weight.grad, plain.stem.weight.grad, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # raised by an import of torch
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_torch_fault_with_different_backward_masks_is_found(precision):
    """Torch issue 190758: a partitioner that may save nothing recomputes dropout with other random numbers."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        with config.patch(activation_memory_budget=0.0), pytest.warns(ft.FastTrainWarning, match="190758"):
            verdict = verdict_of(Net(rate=0.1), X, backend=BACKEND)
        assert "dropout has different masks in the backward" in verdict.failure
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=0.0):
            assert verdict_of(Net(rate=0.0), X, backend=BACKEND).failure == ""


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_masks_are_compared_in_the_next_block_after_a_frozen_embedding():
    net = Net(rate=0.2)
    net.stem.requires_grad_(False)  # as an embedding is in fine-tuning
    with config.patch(activation_memory_budget=0.0), pytest.warns(ft.FastTrainWarning, match=r"'blocks\.1'.*190758"):
        verdict = verdict_of(net, X, backend=BACKEND)
    assert verdict.of_masks
    torch._dynamo.reset()
    net = Net(rate=0.2)
    net.stem.requires_grad_(False)
    entry = next(iter(compile_blocks_(net, blocks=Block, backend=BACKEND).values())).entry
    net(X).sum().backward()
    assert entry.is_judged
    assert not entry.verdict.without_masks


@pytest.mark.slow
def test_inductor_code_is_compared():
    verdict = verdict_of(Net(rate=0.1), X)
    assert (verdict.failure, verdict.unchecked) == ("", "")
    assert 0 < verdict.apart < 1e-5


class Remembers(nn.Module):
    """Has all side effects that a forward may have."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.seen, self.table, self.last = [], {}, None

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.linear(x))
        self.largest = torch.maximum(self.largest, x.detach().max() + self.largest)  # replaced by another tensor
        self.last = x.detach().mean()
        self.seen.append(self.last)
        self.table[len(self.table)] = self.last
        return x.mul_(2) + 0.1 * torch.rand_like(x)


def test_the_comparison_has_no_side_effects():
    ends = []
    for check in (True, False):
        torch._dynamo.reset()
        net = Net(Remembers)
        compile_blocks_(net, blocks=Remembers, backend="eager", check=check)
        torch.manual_seed(3)
        net(X).square().sum().backward()
        left = [block.calls for block in net.blocks] + [parameter.grad for parameter in net.parameters()]
        ends.append([*left, *net.buffers(), torch.get_rng_state()])
        assert [(len(block.seen), len(block.table)) for block in net.blocks] == [(1, 1)] * 3
        assert all(torch.equal(block.seen[0], block.last) for block in net.blocks)
    for checked, plain in zip(*ends, strict=True):
        assert torch.equal(checked, plain)


def test_the_comparison_adds_nothing_to_what_a_model_collects():
    """Router logits of the comparison would be part of the loss, whose graph the comparison has walked already."""
    found = []
    for techniques in ([], [ft.CompileBlocks(backend="aot_eager")]):
        torch._dynamo.reset()
        net = families.mixture_of_experts(layers=2)
        with ft.apply(net, techniques):
            number, values = families.run_experts(net)
        assert number == 2
        found.append(values)
    for plain, ours in zip(*found, strict=True):
        assert torch.allclose(plain, ours, rtol=1e-5, atol=1e-7)


class SavingItsOutput(Block):
    def forward(self, x):
        return self.dropout(self.down(self.up(x).tanh())).tanh()


def test_the_comparison_leaves_nothing_in_memory():
    net, x = Net(SavingItsOutput, rate=0.2), torch.randn(48, 16)  # no weight has as many rows

    def count_activations():
        gc.collect()
        return sum(type(one) is torch.Tensor and one.shape[:1] == x.shape[:1] for one in gc.get_objects())

    before = count_activations()
    verdict = verdict_of(net, x, backend=BACKEND)
    assert (verdict.failure, verdict.unchecked, verdict.without_masks) == ("", "", False)  # masks were compared as well
    assert count_activations() == before


def test_wrong_code_is_found_where_a_memory_budget_first_measures_the_blocks():
    net = Net()
    techniques = [ft.ActivationCheckpointing(ft.MemoryBudget(1.0)), ft.CompileBlocks(backend=wrong(backward=1.2))]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ft.apply(net, techniques), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ft.FastTrainWarning)
        told = []
        for _ in range(3):
            net(X).square().sum().backward()
            optimizer.step()
            told.append(sum("gives different results" in str(one.message) for one in caught))
    assert told == [0, 0, 1]  # two steps are measured, in which nothing is compiled


def test_the_comparison_works_inside_of_recomputed_blocks():
    net, plain = Net(), Net()
    compiled = compile_blocks_(net, blocks=Block, backend="aot_eager")
    checkpoint(net, X, use_reentrant=False).square().sum().backward()
    plain(X).square().sum().backward()
    assert next(iter(compiled.values())).entry.verdict.unchecked == ""
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Cache:
    def __init__(self):
        self.calls = 0


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, cache):
        cache.calls += 1
        return self.linear(x)


def test_blocks_with_mutable_inputs_are_not_compared_with_a_note():
    net, cache = nn.ModuleList([Cached(), Cached()]), Cache()
    compiled = compile_blocks_(net, blocks=Cached, backend="eager")
    with heard() as said:
        for block in net:
            block(X, cache=cache).sum().backward()
    assert cache.calls == 2
    assert "it receives a Cache" in compiled["0"].entry.verdict.unchecked
    assert any("'0' was not compared with the eager block: it receives a Cache" in line for line in said)


def test_evaluation_alone_makes_no_comparison():
    net = Net().eval()
    compiled = compile_blocks_(net, blocks=Block, backend=wrong(forward=1.2))
    with torch.no_grad():
        net(X)
        net.train()(X)
    assert compiled["blocks.0"].entry.verdict is None
    with pytest.warns(ft.FastTrainWarning, match="is off by"):  # a frozen submodule has gradients in eval mode
        net.eval()(X)


def test_known_faults_depend_on_version_device_and_block():
    assert [fault.issue for fault in list_faults(Block(0.1), "2.9.1")] == [190758]
    assert [fault.issue for fault in list_faults(Block(0.1), "2.13.0+cpu")] == [193061, 190758]
    assert [fault.issue for fault in list_faults(Block(0.0), "2.13.1")] == [193061]
    assert list_faults(Block(0.1), "2.16.0") == []
    assert {fault.issue: dict(fault.options) for fault in FAULTS if fault.options} == {
        198333: {"fallback_random": True}  # the others are found by the comparison
    }


@pytest.mark.slow
def test_a_fault_that_cannot_be_detected_is_avoided(monkeypatch):
    """A fault on CUDA; its options are used here on the CPU, where they change only the generator."""
    fault = next(fault for fault in FAULTS if fault.options)
    monkeypatch.setattr(compiled_code, "list_faults", lambda block: [fault])
    net, plain = Net(rate=0.3), Net(rate=0.3)
    with heard() as said:
        compiled = compile_blocks_(net, "max-autotune-no-cudagraphs", blocks=Block)
    assert compiled["blocks.0"].entry.options["options"]["fallback_random"]
    assert compiled["blocks.0"].entry.options["options"]["max_autotune"]
    assert any("wrong masks of dropout (torch issue 198333)" in line for line in said)
    for one in (net, plain):
        torch.manual_seed(5)
        one(X).square().sum().backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):  # the same masks as without a compiler
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
