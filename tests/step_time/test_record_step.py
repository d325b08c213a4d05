"""What a traced step computes and sends, against closed forms, torch's own count and the formulas of traffic."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.fake_mode import CallKey
from lightning_fasttrain.memory import allocation_trace
from lightning_fasttrain.memory.predict_memory import count_flops, predict_strategies
from lightning_fasttrain.step_time import record_step
from lightning_fasttrain.step_time.add_collectives import add_collectives
from lightning_fasttrain.step_time.record_step import ELEMENTWISE, PRODUCT, Collective, Kernel, StepRecorder
from lightning_fasttrain.strategy.traffic import gather_bytes, predict_traffic


class CausalBlock(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def blocks(count=3):
    return lambda: nn.Sequential(*[CausalBlock() for _ in range(count)])


def mean(net, batch):
    return net(batch).float().mean()


X = torch.zeros(2, 32, 64)
UNKNOWN = CallKey(None, [])


def recorded(module, batch=X, strategy=None, world=1, fuses=False, **settings):
    recorder = StepRecorder(fuses)
    settings = {"loss": mean, "optimizer": torch.optim.AdamW, "precision": "bf16-mixed", **settings}
    predict_strategies(module, batch, [strategy], world=world, recorder=recorder, **settings)
    (step,) = recorder.steps
    return add_collectives(step, recorder.rank)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flops_are_those_that_torch_counts_with_attention_written_out(device):
    step = recorded(blocks(), device=device)
    assert step.model_flops() == count_flops(blocks(), X, loss=mean)


def test_causal_attention_is_half_and_recomputation_is_no_flops_of_the_model():
    plain, recomputed = recorded(blocks()), recorded(blocks(), techniques=[ft.ActivationCheckpointing()])
    assert recomputed.model_flops() == plain.model_flops()
    forward = [kernel for kernel in plain.kernels if kernel.op == "_scaled_dot_product_flash_attention (causal)"]
    assert [kernel.flops for kernel in forward] == 3 * [4 * 2 * 32 * 32 * 64 // 2]
    again = [kernel for kernel in recomputed.kernels if kernel.phase == "recomputation"]
    assert sum(kernel.flops for kernel in again) >= sum(kernel.flops for kernel in forward)


@pytest.mark.parametrize(
    ("layer", "groups"), [(nn.Conv1d(8, 8, 3, groups=8), 8), (nn.ConvTranspose1d(8, 4, 3), 1), (nn.Conv1d(8, 4, 3), 1)]
)
def test_the_size_of_a_convolution_knows_its_groups(layer, groups):
    step = recorded(lambda: layer, torch.zeros(2, 8, 16), device="cpu")
    (forward,) = [
        kernel for kernel in step.kernels if kernel.op.startswith("convolution") and kernel.phase == "forward"
    ]
    products = forward.flops / 2
    rows = products / 8 / 3
    alone = 3 / (1 / rows + 1 / 1 + 1 / 3)  # of each group: rows × 1 channel × a window of 3
    assert forward.size == pytest.approx(alone if groups == 8 else products ** (1 / 3))


def test_a_convolution_in_groups_of_which_only_the_bias_trains_takes_no_time_to_multiply():
    def build():
        net = nn.Conv1d(8, 8, 3, groups=8)
        net.weight.requires_grad_(False)
        return net

    step = recorded(build, torch.zeros(2, 8, 16), device="cpu")
    (backward,) = [kernel for kernel in step.kernels if kernel.op == "convolution_backward"]
    assert (backward.flops, backward.size) == (0, 0)


def test_a_cpu_computes_all_of_a_short_causal_square():
    """Its kernels take 512 keys at a time, and leave out only such blocks."""
    step = recorded(blocks(), device="cpu")
    forward = [kernel.flops for kernel in step.kernels if kernel.op == "_scaled_dot_product_flash_attention_for_cpu"]
    assert forward == 3 * [4 * 2 * 32 * 32 * 64]


def test_products_of_experts_are_as_small_as_one_of_them():
    def net():
        return nn.ParameterList([torch.zeros(4, 32, 16)])

    def route(net, x):
        ends = torch.arange(16, 80, 16, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, net[0], offs=ends).float().mean()

    step = recorded(net, torch.zeros(64, 32, dtype=torch.bfloat16), loss=route, precision="bf16-true")
    sizes = [kernel.size for kernel in step.kernels if kernel.op == "_grouped_mm"]
    assert sizes == pytest.approx([(16 * 32 * 16) ** (1 / 3)] * 2)  # the batch needs no gradient


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_size_of_an_attention_is_the_mean_of_its_lengths(device):
    def net():
        return nn.Linear(16, 16)

    def attend(net, x):
        query, key = net(x)[:, :8], net(x)
        return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None]).mean()

    step = recorded(net, torch.zeros(2, 32, 16), loss=attend, device=device)
    sizes = {kernel.kind: kernel.size for kernel in step.kernels if "attention" in kernel.kind}
    assert sizes == {"attention": 16, "attention backward": 16}


def test_bytes_in_closed_form_and_views_cost_nothing():
    def net():
        return nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(256, 256, bias=False))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    square = 256 * 256 * 4
    settings = {"loss": lambda net, x: net(x).sum(), "precision": "32-true", "optimizer": sgd, "device": "cpu"}
    step = recorded(net, torch.zeros(256, 256), **settings)
    kernels = [kernel for kernel in step.kernels if kernel.written >= square]
    products = [kernel for kernel in kernels if kernel.kind == PRODUCT]
    # The gradient of a sum is one value, expanded.
    read = {2 * square, square + 4}
    assert {kernel.read for kernel in products} == read
    assert {(kernel.written, kernel.flops) for kernel in products} == {(square, 2 * 256**3)}
    # Two in the forward; in the backward two of the weights, and one of the input of the last layer.
    assert len(products) == 5
    others = [(kernel.op, kernel.read, kernel.written) for kernel in kernels if kernel.kind != PRODUCT]
    assert others[:2] == [("tanh", square, square), ("tanh_backward", 2 * square, square)]
    assert {op for op, _, _ in others[2:]} == {"add_"}  # the update of each weight
    assert products[0].size == pytest.approx(256)


@pytest.mark.parametrize(
    ("strategy", "name", "precision"),
    [
        (ft.FSDP2Strategy(), "fsdp2", "bf16-mixed"),
        ("ddp", "ddp", "32-true"),
        (ft.ZeROStrategy(1), "zero-1", "bf16-mixed"),
        (ft.ZeROStrategy(2), "zero-2", "bf16-mixed"),
        (ft.ZeROStrategy(3), "zero-3", "bf16-mixed"),
    ],
)
def test_collectives_move_what_the_formulas_of_traffic_say(strategy, name, precision):
    step = recorded(blocks(), strategy=strategy, world=4, precision=precision, accumulate=2)
    sent = 0
    for event in step.events:
        if isinstance(event, Collective):
            assert event.ranks == (0, 1, 2, 3)
            sent += gather_bytes(event.nbytes, 4) * (2 if event.kind == "all-reduce" else 1)
    settings = {"world_size": 4, "precision": precision, "strategies": (name,), "micro_batches": 2}
    (traffic,) = predict_traffic(blocks()(), torch.optim.AdamW, **settings)
    assert sent == pytest.approx(traffic.ranks, rel=0.002)


def test_gradients_are_reduced_by_the_buckets_of_the_users_ddp():
    def reductions(**settings):
        step = recorded(blocks(), strategy=DDPStrategy(**settings), world=4)
        return [event.nbytes for event in step.events if isinstance(event, Collective)]

    parameters = [4 * parameter.numel() for parameter in blocks()().parameters()]
    assert reductions() == reductions(bucket_cap_mb=25) == [sum(parameters)]
    each = reductions(bucket_cap_mb=1e-6)
    assert sorted(each) == sorted(parameters)


@pytest.mark.parametrize("stage", [2, 3])
def test_each_micro_batch_runs_the_hooks_of_all_modules_under_zero_3(stage):
    step = recorded(blocks(), strategy=ft.ZeROStrategy(stage), world=4, accumulate=2)
    modules = sum(1 for _ in blocks()().modules())
    hooks = [kernel.hooks for kernel in step.kernels]
    assert sum(hooks) == pytest.approx(2 * modules if stage == 3 else 0)
    updated = [kernel.hooks for kernel in step.events[step.update :] if isinstance(kernel, Kernel)]
    assert updated
    assert not any(updated)
    gathers = [event for event in step.events[step.update :] if isinstance(event, Collective)]
    # All parameters are small: at stage 3 each rank keeps them whole, and gathers one after the other.
    assert len(gathers) == (1 if stage == 2 else sum(1 for _ in blocks()().parameters()))


@pytest.mark.parametrize("strategy", [None, "fsdp2"])
def test_a_step_whose_kernels_are_known_is_recorded_like_one_whose_kernels_are_not(strategy, monkeypatch):
    def record():
        sharding = {"strategy": ft.FSDP2Strategy(), "world": 4} if strategy else {}
        return recorded(blocks(), techniques=[ft.ActivationCheckpointing()], device="cuda", **sharding)

    record()
    known = record()
    monkeypatch.setattr(record_step, "_kernels", {})
    monkeypatch.setattr(allocation_trace, "run_cached", lambda func, args, kwargs: (func(*args, **kwargs), UNKNOWN))
    described = record()
    assert record_step._kernels == {}
    assert (described.events, described.gradients) == (known.events, known.gradients)


def test_a_kernel_reads_the_elements_of_a_view_that_are_in_memory():
    def loss(net, batch):
        rows = net(batch)  # [2, 32, 64]
        expanded = rows[:, 0, :8].unsqueeze(1).expand(2, 100, 8)
        windows = rows.flatten().unfold(0, 64, 1)
        return expanded.exp().sum() + windows.exp().sum()

    step = recorded(lambda: nn.Linear(64, 64), loss=loss, precision="32-true", device="cuda")
    first, second = [kernel for kernel in step.kernels if kernel.op == "exp"]
    assert (first.read, first.written) == (2 * 8 * 4, 2 * 100 * 8 * 4)
    assert (second.read, second.written) == (2 * 32 * 64 * 4, (2 * 32 * 64 - 63) * 64 * 4)


def test_each_event_waits_for_earlier_collectives_alone_and_the_update_for_all_reductions():
    for strategy in (ft.FSDP2Strategy(), ft.ZeROStrategy(3)):
        step = recorded(blocks(), strategy=strategy, world=4)
        waited = set()
        for place, event in enumerate(step.events):
            assert all(wait < place and isinstance(step.events[wait], Collective) for wait in event.waits)
            waited.update(event.waits if isinstance(event, Kernel) else ())
        reductions = {p for p, e in enumerate(step.events) if isinstance(e, Collective) and e.stream == "reductions"}
        assert reductions
        assert reductions <= waited


def test_compiled_blocks_move_fewer_bytes_for_the_same_flops():
    batch = torch.zeros(64, 32, 64)
    plain, fused = recorded(blocks(), batch), recorded(blocks(), batch, fuses=True)
    assert fused.model_flops() == plain.model_flops()
    moved = [
        sum(kernel.read + kernel.written for kernel in step.kernels if kernel.kind == ELEMENTWISE and kernel.module)
        for step in (plain, fused)
    ]
    assert moved[1] < 0.9 * moved[0]


def test_each_pass_through_a_compiled_block_enters_a_graph():
    recomputed = {"techniques": [ft.ActivationCheckpointing()]}
    entered = Counter(kernel.phase for kernel in recorded(blocks(), fuses=True, **recomputed).kernels if kernel.enters)
    assert entered == {"forward": 3, "recomputation": 3, "backward": 3}
    assert not any(kernel.enters for kernel in recorded(blocks()).kernels)


def test_kernels_after_a_recomputation_are_in_no_module_of_it():
    """It ends with an exception inside of a module, before the hooks that follow its forward."""
    plain = recorded(blocks(), fuses=True)
    again = recorded(blocks(), fuses=True, techniques=[ft.ActivationCheckpointing()])
    update = [[kernel for kernel in step.kernels if kernel.phase == "optimizer step"] for step in (plain, again)]
    assert update[0] == update[1]
    modules = [{kernel.module for kernel in step.kernels if kernel.phase == "backward"} for step in (plain, again)]
    assert modules[0] == modules[1]


def test_what_a_fused_group_frees_is_not_written():
    class Chain(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return x.detach().sin().cos().tan()

    net = lambda: nn.Sequential(*[nn.Sequential(Chain(), nn.Linear(64, 64)) for _ in range(2)])  # noqa: E731
    step = recorded(net, torch.zeros(16, 64), fuses=True, precision="32-true", device="cpu")
    chains = [kernel for kernel in step.kernels if kernel.op == "fused" and kernel.phase == "forward"]
    tensor = 16 * 64 * 4
    assert [(kernel.read, kernel.written) for kernel in chains] == 2 * [(tensor, tensor)]


def test_replicas_gather_within_and_sum_over_them():
    step = recorded(blocks(), strategy=ft.FSDP2Strategy(replicas=2), world=8)
    found = {(event.kind, event.ranks) for event in step.events if isinstance(event, Collective)}
    assert found == {
        ("all-gather", (0, 1, 2, 3)),
        ("reduce-scatter", (0, 1, 2, 3)),
        ("all-reduce", (0, 4)),
    }


def test_lengths_that_depend_on_values_give_a_range():
    def loss(net, batch):
        return net(batch[batch.sum(-1) > 0]).float().sum()

    report = ft.predict_time(
        lambda: nn.Sequential(nn.Linear(4096, 4096)), torch.zeros(8192, 4096), loss=loss, optimizer=torch.optim.AdamW
    )
    assert report.low < 0.5 * report.seconds
