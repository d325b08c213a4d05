"""Sharding in one process: what is sharded, what stays whole, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.materialize import send_from_rank_zero_, whole_on_rank_zero
from lightning_fasttrain.strategy.fsdp2.shard_blocks import (
    check_sharded,
    precision_policy,
    reshard_,
    shard_blocks_,
    without_gradient_reduction,
)
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from tests.nets import Block, TinyLM, gradients, largest_difference, lm_batches, weights

BATCH = lm_batches(1)[0]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def full(tensors):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def test_blocks_and_root_are_sharded_and_the_gradient_is_the_same(mesh):
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
def test_blocks_that_share_weights_are_left_to_the_root(mesh, blocks):
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


def test_quantised_weights_stay_whole_and_adapters_are_sharded(mesh):
    model = TinyLM()
    ft.apply(model, [ft.QLoRA(rank=2, kind="int8")])
    shard_blocks_(model, mesh)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable
    assert all(isinstance(p, DTensor) for p in trainable)
    assert type(model.blocks[0].up.base_layer.weight).__name__ == "Int8Params"
    check_sharded(model)


def test_precisions_become_policies():
    mixed, whole, low = precision_policy("bf16-mixed"), precision_policy(), precision_policy("bf16-true", "bfloat16")
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (whole.param_dtype, whole.reduce_dtype) == (None, torch.float32)
    assert (low.param_dtype, low.reduce_dtype) == (None, torch.bfloat16)
    assert not mixed.cast_forward_inputs


@pytest.mark.parametrize("precision", ["16-true", "16-mixed", "64-true", "nonsense"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match=f"precision='{precision}' with FSDP2.*'bf16-mixed'"):
        precision_policy(precision)


def test_reduction_is_left_out_in_nested_contexts_until_the_outermost_ends(mesh):
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


def test_reduction_is_back_after_an_error(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    with pytest.raises(ZeroDivisionError):
        with without_gradient_reduction(model):
            1 / 0  # noqa: B018
    model.loss(BATCH).backward()
    assert gradients(model)


def test_shards_show_again_after_a_forward_without_backward(mesh):
    model = TinyLM()
    shard_blocks_(model, mesh)
    with torch.no_grad():
        model.loss(BATCH)
    assert not isinstance(model.embed.weight, DTensor)
    reshard_(model)
    assert isinstance(model.embed.weight, DTensor)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.factor = nn.Parameter(torch.tensor(1.0))


def with_parameter(tensor, trains):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].extra = nn.Parameter(tensor, requires_grad=trains)
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Scalar(), {}, r"parameter 'factor' of shape \(\): a number without an axis"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), {}, "parameters of several dtypes train"),
        (with_parameter(torch.ones(2, dtype=torch.int8, device="meta"), False), {}, "'0.extra' .* on the meta device"),
        (with_parameter(torch.ones(2, dtype=torch.cfloat), True), {}, "'0.extra' .* is torch.complex64 and trains"),
        (TinyLM(), {"reshard_after_forward": 2}, "reshard_after_forward=2 over 1 shards"),
        (TinyLM(), {"offload": "disk"}, "offload='disk'"),
        (TinyLM(), {"blocks": "layers.*"}, "matches nothing"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_changed(mesh, model, options, message):
    with pytest.raises(ValueError, match=message):
        shard_blocks_(model, mesh, **options)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_a_swapped_layer_and_a_stale_optimizer_are_named(mesh):
    model = TinyLM()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_blocks_(model, mesh)
    check_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="SGD holds 19 of 19 parameters that the model has no more"):
        check_sharded(model, [before])
    model.blocks[2].down = nn.Linear(16, 8)
    with pytest.raises(ValueError, match=r"'blocks\.2\.down\.weight', 'blocks\.2\.down\.bias' of .*TinyLM train"):
        check_sharded(model)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "LBFGS", "AdamW8bit"])
def test_optimizers_that_fail_on_shards_are_refused(mesh, name):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = TinyLM()
    shard_blocks_(model, mesh)
    make = getattr(torch.optim, name, None) or getattr(bitsandbytes.optim, name)
    with pytest.raises(ValueError, match=f"{name} with sharded parameters: .* Use AdamW"):
        check_sharded(model, make(model.parameters(), lr=0.1))


def test_a_model_on_the_meta_device_gets_weights_and_keeps_its_ties(mesh):
    with torch.device("meta"):
        model = TinyLM()
    whole = whole_on_rank_zero(model)
    expected = {name: tensor.clone() for name, tensor in weights(model).items()}
    shard_blocks_(model, mesh)
    send_from_rank_zero_(model, whole, torch.device("cpu"))
    assert largest_difference(expected, full(weights(model))) == 0
    assert model.head.weight is model.embed.weight


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Table(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize(("kind", "why"), [(NoReset, "does not say how"), (Table, "values of its buffer 'table'")])
def test_a_layer_without_weights_that_cannot_be_made_is_refused(kind, why):
    with torch.device("meta"):
        model = nn.Sequential(kind())
    with pytest.raises(ValueError, match=rf"layer '0' \({kind.__name__}\) is on the meta device: .*{why}"):
        whole_on_rank_zero(model)


def test_the_mesh_of_hybrid_sharding():
    assert Sharding(replicas=2).shape(8) == (2, 4)
    assert Sharding().shape(8) == (8,)
    with pytest.raises(ValueError, match=r"replicas=3 over 8 processes.*\[1, 2, 4, 8\]"):
        Sharding(replicas=3).shape(8)
