import copy
import math

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import reference_gpt as gpt
from lightning_fasttrain.optim.named.optimizer_state import groups_of, state_bytes
from lightning_fasttrain.strategy.zero.zero_states import STAGES, ZeROSizes, predict_model_states, refuse_unshardable
from tests.support.nets import LazyLM, TinyLM

NO_BUFFERS = ZeROSizes(reduce_bucket=0, prefetch=0, persistence=0, reuse=0)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def states(stage, net, world_size, optimizer=adamw, sizes=NO_BUFFERS, **more):
    return predict_model_states(net, optimizer, world_size=world_size, stages=[stage], sizes=sizes, **more)[0]


def up(numbers, ranks):
    return math.ceil(numbers / ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_adamw_in_float32_equals_a_manual_computation(world_size):
    """35 weights and 5 biases; float32 moments; a step count of 4 bytes for each tensor in the optimizer."""
    net, n = nn.Linear(7, 5), world_size
    whole, flat, pieces = 40 * 4, up(40, 2 * n) * 2 * 4, (up(35, n) + up(5, n)) * 4

    zero = states("0", net, n)
    assert (zero.parameters, zero.gradients, zero.optimizer) == (whole, whole, 2 * whole + 8)
    first = states("1", net, n)
    assert (first.parameters, first.gradients, first.optimizer) == (flat * n, whole, 3 * flat + 4)
    third = states("3", net, n)
    assert (third.parameters, third.gradients, third.optimizer) == (pieces, pieces, 3 * pieces + 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_adamw_in_bfloat16_equals_a_manual_computation(world_size, precision):
    net, n = nn.Linear(7, 5), world_size
    flat, pieces = up(40, 2 * n) * 2, up(35, n) + up(5, n)

    zero = states("0", net, n, precision=precision)
    assert (zero.parameters, zero.gradients, zero.optimizer) == (80, 80, 40 * 12 + 8)
    second = states("2", net, n, precision=precision)
    assert (second.parameters, second.optimizer) == (2 * flat * n, 12 * flat + 4)
    third = states("3", net, n, precision=precision)
    assert (third.parameters, third.gradients, third.optimizer) == (2 * pieces, 2 * pieces, 12 * pieces + 4)


def test_stage_2_keeps_gradients_of_all_parameters_that_a_rank_has_a_part_of():
    """Partitions of 8: of 12 + 3 + 9 elements in this order, the partitions touch 12, 12 + 3 + 9 and 9 of them."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (12, 3, 9)])
    assert states("2", net, 3).gradients == 24 * 4
    assert states("2", net, 1).gradients == 24 * 4
    alone = nn.ParameterList([nn.Parameter(torch.zeros(8)) for _ in range(3)])
    assert states("2", alone, 3).gradients == 8 * 4


def test_buffers_equal_a_manual_computation():
    net = nn.Sequential(nn.Linear(10, 30, bias=False), nn.Linear(30, 20, bias=False))  # 300 and 600
    sizes = ZeROSizes(reduce_bucket=50, prefetch=100, persistence=300, reuse=0)
    assert states("0", net, 2).buffers == 900 * 4  # one bucket takes all
    assert states("0", net, 1).buffers == 0
    assert states("2", net, 2, sizes=sizes).buffers == 450 * 4  # the step's copy; more than two buckets of 50
    assert states("2", net, 2, sizes=sizes, precision="bf16-true").buffers == 450 * (4 + 2)
    third = states("3", net, 2, sizes=sizes)
    assert third.parameters == 450 * 4 + 300 * 4  # its shard, and the small parameter unsharded
    assert third.buffers == 50 * 4 + 600 * 4  # a bucket, and the large parameter gathered


def test_gathered_parameters_stay_until_backward_within_the_reuse_distance():
    net = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(8)])
    near = states("3", net, 4, sizes=ZeROSizes(0, prefetch=0, persistence=0, reuse=10_000))
    far = states("3", net, 4, sizes=ZeROSizes(0, prefetch=0, persistence=0, reuse=600))
    assert near.buffers == 800 * 4
    assert far.buffers == 300 * 4


def test_buckets_are_not_larger_than_what_trains():
    net = nn.Linear(100, 100, bias=False)
    (third,) = predict_model_states(net, adamw, world_size=1, stages=["3"])
    assert third.buffers == 10_000 * 4 + 10_000 * 4  # the bucket, and the step's copy


def test_offload_keeps_on_the_device_what_forward_and_backward_need():
    net = nn.Linear(7, 5)
    second, third = (states(f"{stage}+offload", net, 2) for stage in "23")
    assert (second.parameters, second.gradients, second.optimizer) == (160, 0, 0)
    # float32 copy, its gradient, two moments, a copy to send back; a buffer for the largest gradient
    assert second.host == 20 * 4 * 5 + 4 + 35 * 4
    assert (third.parameters, third.gradients, third.optimizer) == (0, 0, 0)
    assert third.host == (18 + 3) * 4 * 6 + 4


def test_disk_holds_the_updated_states():
    disk = states("3+nvme", nn.Linear(7, 5), 2)
    assert disk.nvme == (18 + 3) * 4 * 5 + 4
    assert disk.device == states("3+offload", nn.Linear(7, 5), 2).device


def test_frozen_parameters_have_no_state_and_are_sharded_in_stage_3():
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False))
    net[0].requires_grad_(False)
    zero, third = states("0", net, 2), states("3", net, 2)
    assert (zero.parameters, zero.gradients, zero.optimizer) == (60 * 4, 24 * 4, 48 * 4 + 4)
    assert (third.parameters, third.gradients) == (30 * 4, 12 * 4)


def test_tied_parameters_count_once():
    net = TinyLM()
    numel = sum(p.numel() for p in net.parameters())
    assert states("0", net, 2).parameters == 4 * numel
    assert len(groups_of(net.configure_optimizers())[0].shapes) == len(list(net.parameters()))


def test_buffers_of_modules_are_on_every_rank():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    assert states("3", net, 4).parameters == 4 * 4 + 2 * 4 * 4 + 8  # a part; mean and variance; an int64 count
    assert states("3", net, 4, precision="bf16-true").parameters == 4 * 2 + 2 * 4 * 2 + 8


@pytest.mark.parametrize(
    ("kind", "moments"), [("SGD", 0), ("momentum", 1), ("AdamW", 2), ("Adagrad", 1), ("RMSprop", 1)]
)
def test_the_given_optimizer_determines_the_state(kind, moments):
    net = nn.Linear(8, 8, bias=False)
    make = {"momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}.get(
        kind, lambda p: getattr(torch.optim, kind)(p, lr=0.1)
    )
    counts = 4 if kind in ("AdamW", "Adagrad", "RMSprop") else 0
    assert states("0", net, 2, make).optimizer == moments * 64 * 4 + counts
    assert states("2", net, 2, make).optimizer == (1 + moments) * 32 * 4 + counts


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(("kind", "moments"), [("AdamW8bit", 2), ("Lion8bit", 1), ("PagedAdamW8bit", 2)])
def test_eight_bit_optimizers_are_measured(kind, moments):
    """One byte per parameter, a float32 per 256 of them, and a table of 256 float32 for each moment of a group."""
    bnb = pytest.importorskip("bitsandbytes")
    net = nn.Linear(256, 256, bias=False)
    found = states("1", net, 4, lambda p: getattr(bnb.optim, kind)(p, lr=0.1))
    part = 256 * 256 // 4
    assert found.optimizer == part * 4 + moments * (part + part // 256 * 4 + 1024)


def test_factored_state_counts_in_shape_on_one_device():
    net = nn.Linear(64, 128, bias=False)
    found = states("0", net, 1, lambda p: torch.optim.Adafactor(p, lr=0.1))
    assert found.optimizer == (64 + 128) * 4 + 4


def test_groups_are_partitioned_separately():
    net = nn.Linear(7, 5)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}]
    found = states("1", net, 2, torch.optim.AdamW(groups))
    assert found.parameters == (36 + 8) * 4  # each padded to a multiple of four
    assert found.optimizer == (18 + 4) * 12 + 8


@pytest.mark.parametrize("world_size", [1, 4])
def test_quantised_weights_count_as_they_are_stored(world_size):
    pytest.importorskip("bitsandbytes")
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    ft.finetune.quantize_base_(net, "nf4", skip=["1"])
    found = states("0", net, world_size)
    weight, absmax, tables = 64 * 64 // 2, 64, 64 + 4 + 1024 + 4
    assert found.parameters == weight + absmax + tables + 64 * 64 * 4
    assert found.gradients == 64 * 64 * 4
    cut = states("3", net, world_size)
    assert cut.parameters == weight // world_size + absmax + tables + 64 * 64 * 4 // world_size


def test_stage_2_agrees_with_deepspeeds_estimate():
    """DeepSpeed's 18 bytes per parameter do not include the flat bfloat16 copy."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as estimate

    n, numel = 8, 64 * 64 * 8
    net = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(8)])
    _, device = estimate(numel, num_gpus_per_node=n, cpu_offload=False)
    found = states("2", net, n, precision="bf16-true")
    assert found.device - 4 == device + 2 * numel // n
    host, device = estimate(numel, num_gpus_per_node=1, cpu_offload=True, additional_buffer_factor=1)
    found = states("2+offload", net, 1, precision="bf16-true")
    assert found.parameters == device
    assert found.host - 4 - 64 * 64 * 2 == host + 2 * numel  # the parameters that go back are staged in bfloat16


def test_stage_3_agrees_with_deepspeeds_estimate():
    """18 bytes per parameter do not include a rank's shard of the parameters, and the flat copy; one more layer."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate

    n, numel, layer = 8, 64 * 64 * 8, 64 * 64
    net = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(8)])
    _, device, largest = estimate(numel, layer, num_gpus_per_node=n, cpu_offload=False)
    found = states("3", net, n, precision="bf16-true")
    assert found.device - 4 == device - largest + (2 + 2) * numel // n
    host, *_ = estimate(numel, layer, num_gpus_per_node=1, additional_buffer_factor=1)
    assert states("3+offload", net, 1, precision="bf16-true").host - 4 == host + 2 * numel  # gradients in bfloat16


@pytest.mark.parametrize("stage", STAGES)
def test_meta_fake_lazy_and_real_models_give_equal_results(stage):
    net = TinyLM()
    real = states(stage, net, 3, adamw(net.parameters()))
    with torch.device("meta"):
        meta = TinyLM()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = TinyLM()
    assert real == states(stage, meta, 3) == states(stage, fake, 3) == states(stage, TinyLM, 3)
    assert real == states(stage, LazyLM(), 3) == states(stage, TinyLM(), 3)


def test_existing_optimizer_is_not_changed():
    net = TinyLM()
    optimizer = adamw(net.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(optimizer.state_dict())
    predict_model_states(net, optimizer, world_size=2)
    assert optimizer.state_dict() == before
    assert calls == []
    assert all(p.grad is None for p in net.parameters())


def test_optimizer_with_a_schedule_takes_no_step():
    """Schedulers replace the step of the optimizer by one of their own."""
    net = nn.Linear(7, 5)
    optimizer = adamw(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert states("0", net, 1, optimizer).optimizer == 2 * 160 + 8
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert not getattr(optimizer, "_opt_called", False)


def test_bitsandbytes_tables_stay_real_tensors():
    bnb = pytest.importorskip("bitsandbytes")
    net = nn.Linear(128, 128)
    optimizer = bnb.optim.AdamW8bit(net.parameters())
    predict_model_states(net, optimizer, world_size=2)
    net(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    assert torch.isfinite(net.weight).all()


def test_lightning_module_provides_its_own_optimizer():
    """1.5 billion parameters, none of which is ever allocated."""
    with torch.device("meta"):
        net = gpt("gpt2-xl").module()
    (states,) = predict_model_states(net, world_size=8, stages=["3"], sizes=NO_BUFFERS)
    numel = sum(p.numel() for p in net.parameters())
    assert states.optimizer == pytest.approx(12 * numel / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=0.1), "depends on the shape"),
        (lambda p: torch.optim.Muon(p, lr=0.1), "must be a 2D matrix"),
        (lambda p: torch.optim.LBFGS(p), "closure"),
        (lambda p: torch.optim.SparseAdam(p), "does not support dense gradients"),
        (lambda p: ft.optim.GaLoreAdamW([{"params": list(p), "rank": 4}]), "GaLoreAdamW with ZeRO"),
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused(make, says):
    net = nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match=says):
        predict_model_states(net, make, world_size=2, stages=["1"])


def test_a_step_that_needs_a_closure_is_refused_in_stage_0_too():
    with pytest.raises(ValueError, match="LBFGS: its step fails"):
        states("0", nn.Linear(4, 4), 1, lambda p: torch.optim.LBFGS(p))


def test_a_norm_by_layer_cannot_be_sharded():
    bnb = pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="scales each layer's update"):
        refuse_unshardable(bnb.optim.LAMB8bit(nn.Linear(64, 64).parameters()))


def test_deepspeeds_compiled_optimizers_are_recognised_by_name():
    """Creating one compiles it; for FusedAdam only its class matters."""
    kind = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    optimizer = kind(nn.Linear(8, 8).parameters())
    (group,) = groups_of(optimizer)
    assert state_bytes(optimizer, group, [(100,)], torch.float32) == 800


class Two(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def configure_optimizers(self):
        return [adamw(self.a.parameters()), adamw(self.b.parameters())]


@pytest.mark.parametrize(
    ("net", "optimizer", "more", "error", "says"),
    [
        (nn.Linear(2, 2), adamw, {"world_size": 0}, ValueError, "world_size=0"),
        (nn.Linear(2, 2), adamw, {"world_size": 2.0}, TypeError, "world_size=2.0"),
        (nn.Linear(2, 2), adamw, {"precision": "16-mixed"}, ValueError, "precision='16-mixed'"),
        (nn.Linear(2, 2), adamw, {"stages": ["4"]}, ValueError, "stage='4'"),
        (nn.Linear(2, 2), None, {}, TypeError, "without optimizer"),
        (nn.Linear(2, 2), lambda p: "adam", {}, TypeError, "gives str"),
        (nn.Linear(2, 2).requires_grad_(False), adamw, {}, ValueError, "without trainable parameters"),
        (Two(), None, {}, ValueError, "2 optimizers"),
        (3, adamw, {}, TypeError, "expected a Module or a function without arguments, got a whole number"),
    ],
)
def test_invalid_arguments_are_refused(net, optimizer, more, error, says):
    with pytest.raises(error, match=says):
        predict_model_states(net, optimizer, **{"world_size": 2, **more})


def test_a_schedule_on_the_optimizer_changes_nothing():
    """Schedulers wrap ``optimizer.step`` on the instance."""
    net = nn.Linear(8, 4)
    plain, scheduled = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(net.parameters())
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.5)
    expected = predict_model_states(net, plain, world_size=2)
    assert expected[0].optimizer > 2 * 4 * 36
    assert predict_model_states(net, scheduled, world_size=2) == expected
    assert not scheduled.state
