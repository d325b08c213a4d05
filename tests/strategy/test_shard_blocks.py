"""Sharding in one process: what is sharded, what stays unsharded, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.finetune import dequantized_weight
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized, pack
from lightning_fasttrain.strategy.fsdp2 import shard_blocks
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import send_from_rank_zero_, tensors_on_rank_zero
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.shard_blocks import (
    check_sharded,
    is_reducing,
    precision_policy,
    reshard_,
    shard_blocks_,
    without_gradient_reduction,
)
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import load_full_
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from tests.support.nets import Block, TinyLM, WideLM, gradients, largest_difference, lm_batches, weights

BATCH = lm_batches(1)[0]
CASTS_BYTES = TorchVersion(torch.__version__) < "2.12"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def full(tensors):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def test_blocks_and_root_are_sharded_and_gradients_are_unchanged(mesh):
    plain, model = TinyLM(), TinyLM()
    assert shard_blocks_(model, mesh) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [isinstance(m, FSDPModule) for m in (model, model.blocks[0], model.blocks[0].up)] == [True, True, False]
    plain.loss(BATCH).backward()
    model.loss(BATCH).backward()
    assert largest_difference(gradients(plain), full(gradients(model))) < 1e-6
    assert list(model.state_dict()) == list(plain.state_dict())


def test_sharding_again_does_nothing(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    parameters = list(model.parameters())
    assert shard_blocks_(model, mesh) == []
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("reduce_once", [True, False])
def test_a_window_in_fabric_sums_gradients_unreduced_unless_asked_otherwise(mesh, reduce_once):
    model = TinyLM()
    shard_blocks_(model, mesh)
    control = FabricFSDP2Strategy(reduce_once=reduce_once)._backward_sync_control
    with control.no_backward_sync(model, enabled=True):
        assert is_reducing(model) is not reduce_once
    assert is_reducing(model)


def test_weights_tied_within_the_root_stay_tied(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    assert model.head.weight is model.embed.weight


class TiedBlocks(nn.Module):
    """Two of three blocks share a weight with one another, and with the root."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(8, 16)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.last.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return self.last(x)


@pytest.mark.parametrize("blocks", [None, "blocks.*"])
def test_blocks_that_share_weights_are_gathered_with_the_root(mesh, blocks):
    torch.manual_seed(0)
    model = TiedBlocks()
    torch.manual_seed(0)
    plain = TiedBlocks()
    assert shard_blocks_(model, mesh, blocks=blocks) == ["blocks.2"]
    assert model.last.weight is model.blocks[0].up.weight is model.blocks[1].up.weight
    x = torch.randn(2, 8)
    plain(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    assert largest_difference(gradients(plain), full(gradients(model))) < 1e-6


def test_a_block_used_twice_is_one_block(mesh):
    shared = Block()
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": shared, "b": shared, "c": Block()}))
    assert shard_blocks_(model, mesh, blocks=Block) == ["1.a", "1.c"]


def test_weights_in_8_bits_stay_unsharded_and_adapters_are_sharded(mesh):
    model = TinyLM()
    ft.apply(model, [ft.QLoRA(rank=2, kind="int8")])
    shard_blocks_(model, mesh)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable
    assert all(isinstance(p, DTensor) for p in trainable)
    assert type(model.blocks[0].up.base_layer.weight).__name__ == "Int8Params"
    check_sharded(model)


def in_4_bits(storage=torch.uint8):
    """Return a model of bitsandbytes' own layers, as Hugging Face creates them, stored in a given dtype."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layers = [bnb.nn.Linear4bit(64, 64, quant_type="nf4", quant_storage=storage) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, 64), *layers).to("cpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_weights_in_4_bits_are_sharded_unless_they_would_be_cast(mesh, storage, precision):
    plain, model = in_4_bits(storage), in_4_bits(storage)
    shard_blocks_(model, mesh, policy=precision_policy(precision))
    cast = precision == "bf16-mixed" and (storage is torch.float32 or (storage is torch.uint8 and CASTS_BYTES))
    assert isinstance(model[1].weight, DTensor) != cast
    assert list(model.state_dict()) == list(plain.state_dict())
    packed = full(model[1].state_dict())["weight"]
    assert torch.equal(packed.view(torch.uint8), plain[1].weight.detach().view(torch.uint8))  # as floats some are NaN
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        expected, found = plain(x), model(x)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(expected, found)
    assert largest_difference(gradients(plain[0]), full(gradients(model[0]))) == 0


def test_constants_are_kept_when_a_sharded_model_is_moved(mesh):
    model, keys = in_4_bits(), list(in_4_bits().state_dict())
    shard_blocks_(model, mesh)
    model.to("cpu")
    assert sum(tensor.nbytes for _, tensor in quantized_tensors(model)) > 0
    assert list(model.state_dict()) == keys


def test_sharded_4_bit_weight_loads_quantised_and_plain_weights(mesh, tmp_path):
    model, other, plain = in_4_bits(), in_4_bits(), nn.Linear(64, 64)
    shard_blocks_(model, mesh)
    other[1].weight.data.fill_(0x5A)
    other[1].weight.quant_state.offset += 1
    torch.save({"state_dict": other.state_dict()}, tmp_path / "packed.ckpt")
    load_full_(tmp_path / "packed.ckpt", model, strict=True)
    assert largest_difference(weights(other), full(weights(model))) == 0
    model.load_state_dict({"1.weight": plain.weight}, strict=False)
    packed, constants = pack(plain.weight.detach(), "nf4", True)
    assert torch.equal(model[1].weight.full_tensor(), packed)
    assert torch.equal(model[1].quant_state.absmax, constants.absmax)
    assert torch.equal(model.state_dict()["1.weight.absmax"], constants.absmax)


def test_sharded_4_bit_weight_is_not_partially_dequantised(mesh):
    model = in_4_bits()
    shard_blocks_(model, mesh)
    with pytest.raises(ValueError, match="Linear4bit: the model is sharded"):
        dequantized_weight(model[1])


def test_precisions_map_to_policies():
    mixed, whole, low = precision_policy("bf16-mixed"), precision_policy(), precision_policy("bf16-true", "bfloat16")
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (whole.param_dtype, whole.reduce_dtype) == (None, torch.float32)
    assert (low.param_dtype, low.reduce_dtype) == (None, torch.bfloat16)
    assert not mixed.cast_forward_inputs


@pytest.mark.parametrize("precision", ["16-true", "16-mixed", "64-true", "nonsense"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match=f"precision='{precision}' with FSDP2.*'bf16-mixed'"):
        precision_policy(precision)


def test_nested_contexts_defer_reduction_until_the_outermost_ends(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    with without_gradient_reduction(model):
        with without_gradient_reduction(model):
            model.loss(BATCH).backward()
        model.loss(BATCH).backward()
        assert gradients(model) == {}
    model.loss(BATCH).backward()
    plain = TinyLM()
    (3 * plain.loss(BATCH)).backward()
    assert largest_difference(gradients(plain), full(gradients(model))) < 1e-6


def test_reduction_is_restored_after_an_error(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    with pytest.raises(ZeroDivisionError):
        with without_gradient_reduction(model):
            1 / 0  # noqa: B018
    model.loss(BATCH).backward()
    assert gradients(model)


def test_forward_without_backward_can_be_resharded(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    with torch.no_grad():
        model.loss(BATCH)
    assert not isinstance(model.embed.weight, DTensor)
    reshard_(model)
    assert isinstance(model.embed.weight, DTensor)


def test_parameters_of_any_layout_and_without_a_dimension_train(mesh):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last)
    net.factor = nn.Parameter(torch.tensor(2.0))
    plain, images = copy.deepcopy(net), torch.rand(2, 2, 4, 4)
    shard_blocks_(net, mesh, blocks="*")
    check_sharded(net)
    for each in (net, plain):
        (each(images).sum() * each.factor).backward()
    assert torch.equal(net.factor.grad, plain.factor.grad)
    assert torch.allclose(net[0].weight.grad.full_tensor(), plain[0].weight.grad)


def with_parameter(tensor, trains):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].extra = nn.Parameter(tensor, requires_grad=trains)
    return model


class TiedInDouble(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(9, 9), nn.Linear(2, 2).double(), nn.Linear(2, 2).double())
        self[2].weight = self[1].weight


class MixedNorm(TinyLM):
    def __init__(self):
        super().__init__()
        self.blocks[0].norm.extra = nn.Parameter(torch.ones(2).double())


class InDouble(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2).double())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (with_parameter(torch.ones(2).double(), True), {}, "'0.extra' trains in torch.float64: it belongs directly to"),
        (
            MixedNorm(),
            {},
            r"'blocks.0.norm.extra' trains in torch.float64: its module holds parameters of other dtypes",
        ),
        (TiedInDouble(), {}, "'1.weight' trains in torch.float64: several modules share it"),
        (InDouble(), {}, "'scale' trains in torch.float64: it belongs directly to a group that trains in torch.float3"),
        (with_parameter(torch.ones(2, dtype=torch.int8, device="meta"), False), {}, "'0.extra' .* on the meta device"),
        (with_parameter(torch.ones(2, dtype=torch.cfloat), True), {}, "'0.extra' .* is torch.complex64 and trains"),
        (TinyLM(), {"reshard_after_forward": 2}, "reshard_after_forward=2 over 1 shards"),
        (TinyLM(), {"offload": "disk"}, "offload='disk'"),
        (TinyLM(), {"blocks": "layers.*"}, "matches nothing"),
    ],
)
def test_unshardable_models_are_refused_before_any_change(mesh, model, options, message):
    with pytest.raises(ValueError, match=message):
        shard_blocks_(model, mesh, **options)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_a_block_in_another_dtype_is_a_group_of_that_dtype(mesh):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3))
    plain = copy.deepcopy(net)
    assert shard_blocks_(net, mesh) == ["0", "1", "2"]
    for each in (net, plain):
        each[1](each[0](torch.ones(2, 3)).double()).sum().backward()
    assert torch.equal(net[1].weight.grad.full_tensor(), plain[1].weight.grad)
    assert torch.equal(net[0].weight.grad.full_tensor(), plain[0].weight.grad)


def test_replaced_layers_and_stale_optimizers_are_named(mesh):
    model = TinyLM()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_blocks_(model, mesh)
    check_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="SGD holds 19 of 19 parameters that the model no longer has"):
        check_sharded(model, [before])
    model.blocks[2].down = nn.Linear(16, 8)
    with pytest.raises(ValueError, match=r"'blocks\.2\.down\.weight', 'blocks\.2\.down\.bias' of .*TinyLM train"):
        check_sharded(model)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *(("Adafactor", "torch.optim"), ("Rprop", "torch.optim"), ("LBFGS", "torch.optim")),
        *(("AdamW8bit", "bitsandbytes.optim"), ("Adafactor", "transformers.optimization")),
    ],
)
def test_optimizers_that_fail_on_shards_are_refused(mesh, name, package):
    make = getattr(pytest.importorskip(package), name)
    model = TinyLM()
    shard_blocks_(model, mesh)
    with pytest.raises(ValueError, match=f"{name} with sharded parameters: .* Use AdamW"):
        check_sharded(model, make(model.parameters()))


def test_a_model_on_the_meta_device_gets_weights_and_keeps_its_ties(mesh):
    with torch.device("meta"):
        model = TinyLM()
    whole = tensors_on_rank_zero(model)
    expected = {name: tensor.clone() for name, tensor in weights(model).items()}
    shard_blocks_(model, mesh)
    send_from_rank_zero_(model, whole, torch.device("cpu"))
    assert largest_difference(expected, full(weights(model))) == 0
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_unsharded_quantised_weights_survive_the_broadcast_from_rank_zero(mesh, kind, monkeypatch):
    """A rank has them, and a head without weights: only missing weights are initialized."""
    monkeypatch.setattr(shard_blocks, "_would_be_cast", lambda *_: True)  # as torch 2.11 does with 4 bits
    first, other = WideLM(), WideLM()
    for model in (first, other):
        ft.finetune.quantize_base_(model, kind, skip="head")
    other.head.to("meta")
    whole = tensors_on_rank_zero(first)
    shard_blocks_(other, mesh)
    send_from_rank_zero_(other, whole, torch.device("cpu"))
    assert torch.equal(other.head.weight.full_tensor(), first.head.weight)
    assert list(other.state_dict()) == list(first.state_dict())
    quantised = [(name, layer) for name, layer in first.named_modules() if is_quantized(layer)]
    assert len(quantised) == 4
    for name, layer in quantised:
        assert torch.equal(dequantized_weight(layer), dequantized_weight(other.get_submodule(name))), name


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Table(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize(("kind", "why"), [(NoReset, "no reset_parameters"), (Table, "values of its buffer 'table'")])
def test_meta_layer_without_an_initializer_is_refused(kind, why):
    with torch.device("meta"):
        model = nn.Sequential(kind())
    with pytest.raises(ValueError, match=rf"layer '0' \({kind.__name__}\) is on the meta device: .*{why}"):
        tensors_on_rank_zero(model)


def test_hybrid_sharding_has_a_two_dimensional_mesh():
    assert Sharding(replicas=2).shape(8) == (2, 4)
    assert Sharding().shape(8) == (8,)
    with pytest.raises(ValueError, match=r"replicas=3 over 8 processes.*\[1, 2, 4, 8\]"):
        Sharding(replicas=3).shape(8)
