"""MLPs in tiles of tokens compute what they compute at once, and each parameter gets one gradient."""

import copy
import random
import weakref
from collections import Counter

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5Model

import lightning_fasttrain as ft
from lightning_fasttrain.model import tile_mlps_
from tests.support.nets import TinyLM, fit, gradients, heard, largest_difference, lm_batches

D, F_ = 6, 16


class SwiGLU(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.gate, self.up = nn.Linear(D, F_, bias=False), nn.Linear(D, F_)
        self.down, self.drop = nn.Linear(F_, D), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.down(F.silu(self.gate(x)) * self.up(x)))


def gelu_mlp():
    return nn.Sequential(nn.Linear(D, F_), nn.GELU(), nn.Linear(F_, D))


def tied():
    """The second layer is the first one transposed: a parameter that is registered once, and used twice."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    return Tied()


def with_lora():
    config = peft.LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, SwiGLU())


def partly_frozen():
    net = SwiGLU()
    net.gate.requires_grad_(False)
    return net


KINDS = {"SwiGLU": SwiGLU, "GELU": gelu_mlp, "tied": tied, "LoRA": with_lora, "frozen in part": partly_frozen}


def losses_and_gradients(net, x):
    x = x.clone().requires_grad_()
    loss = net(x).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, **gradients(net)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(23, D), (3, 7, D), (2, 3, 5, D)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 1000])
def test_output_and_gradients_are_those_of_the_whole(kind, shape, tokens):
    plain = KINDS[kind]().double()
    tiled = copy.deepcopy(plain)
    assert list(tile_mlps_(nn.ModuleList([tiled]), tokens, mlps="0")) == ["0"]
    x = torch.randn(shape, dtype=torch.float64)
    expected, found = losses_and_gradients(plain, x), losses_and_gradients(tiled, x)
    assert expected.keys() == found.keys()
    assert largest_difference(expected, found) < 1e-14


def hugging_face(kind):
    small = {"vocab_size": 20, "use_cache": False}
    if kind == "llama":
        config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **small)
        return LlamaForCausalLM(config)
    if kind == "gpt2":
        config = GPT2Config(n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **small)
        return GPT2LMHeadModel(config).eval()
    return T5Model(T5Config(d_model=8, d_ff=12, d_kv=4, num_layers=2, num_heads=2, **small)).eval()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("gpt2", ["transformer.h.0.mlp", "transformer.h.1.mlp"]),
        (
            "t5",
            [
                "encoder.block.0.layer.1",
                "encoder.block.1.layer.1",
                "decoder.block.0.layer.2",
                "decoder.block.1.layer.2",
            ],
        ),
    ],
)
def test_mlps_of_hugging_face_models_are_found_and_nothing_else(kind, names):
    plain = hugging_face(kind)
    tiled = copy.deepcopy(plain)
    assert list(tile_mlps_(tiled, tokens=4)) == names
    ids = torch.randint(20, (2, 9))
    for net in (plain, tiled):
        output = net(input_ids=ids, decoder_input_ids=ids) if kind == "t5" else net(input_ids=ids)
        output[0].square().mean().backward()
    assert largest_difference(gradients(plain), gradients(tiled)) < 1e-5


def test_dropout_in_the_backward_is_that_of_the_forward():
    net = nn.Sequential(nn.Linear(D, D, bias=False), nn.Dropout(0.5)).double()
    tile_mlps_(nn.ModuleList([net]), 3, mlps="0")
    x, g = torch.randn(2, 10, D).double(), torch.randn(2, 10, D).double()
    y = net(x)
    after = torch.get_rng_state()
    y.backward(g)
    assert torch.equal(after, torch.get_rng_state())
    mask = 2.0 * (y != 0)  # read off the output
    assert 0.3 < float((mask > 0).double().mean()) < 0.7
    expected = torch.einsum("btk,btn->kn", mask * g, x)
    torch.testing.assert_close(net[0].weight.grad, expected)


def test_each_hook_of_a_parameter_sees_one_gradient():
    net, calls = SwiGLU(), Counter()
    tile_mlps_(nn.ModuleList([net]), 2, mlps="0")
    kept = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: calls.update([f"tensor {name}"]))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([f"after {name}"]))
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: calls.update([f"node {name}"]))
        kept.append(node)
    net(torch.randn(3, 5, D)).sum().backward()
    assert len(calls) == 3 * len(list(net.parameters()))
    assert set(calls.values()) == {1}


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    net = nn.Linear(D, 4, bias=False).bfloat16()
    tile_mlps_(nn.ModuleList([net]), 1, mlps="0")
    x, g = torch.randn(400, D).bfloat16(), torch.randn(400, 4).bfloat16()
    net(x).backward(g)
    rows = [row_g[:, None] * row_x for row_g, row_x in zip(g, x, strict=True)]  # one tile's gradient, in bfloat16
    in_float32, in_bfloat16 = torch.zeros(4, D), torch.zeros(4, D).bfloat16()
    for row in rows:
        in_float32 += row
        in_bfloat16 += row
    assert torch.equal(net.weight.grad, in_float32.bfloat16())
    assert not torch.equal(net.weight.grad, in_bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_forward_holds_in_the_recomputation(dtype):
    plain = gelu_mlp()
    tiled = copy.deepcopy(plain)
    tile_mlps_(nn.ModuleList([tiled]), 4, mlps="0")
    x, dtypes = torch.randn(4, 8, D), []
    tiled[0].register_forward_hook(lambda *values: dtypes.append(values[2].dtype))
    for net in (plain, tiled):
        with torch.autocast("cpu", dtype):
            output = net(x)
        assert output.dtype is dtype
        output.float().square().sum().backward()  # outside of autocast
    assert dtypes == [dtype] * 16
    assert largest_difference(gradients(plain), gradients(tiled)) < 1e-2


def test_only_the_input_is_kept_and_one_tile_of_hidden_values_lives():
    net = gelu_mlp()
    tile_mlps_(nn.ModuleList([net]), 10, mlps="0")
    living, most, saved = weakref.WeakSet(), [0], []

    def note(layer, inputs, output):
        living.add(output)
        most[0] = max(most[0], sum(hidden.shape[-2] for hidden in living))

    net[0].register_forward_hook(note)
    x = torch.randn(1, 100, D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = net(x)
    own = {parameter.data_ptr() for parameter in net.parameters()}
    assert [tensor.shape for tensor in saved if tensor.data_ptr() not in own] == [x.shape]
    y.sum().backward()
    assert most[0] <= 20  # the last one goes when the next is there


def test_compiled_with_a_block_it_computes_the_same():
    plain = nn.Sequential(gelu_mlp(), gelu_mlp())
    tiled = copy.deepcopy(plain)
    ft.apply(tiled, [ft.model.TiledMLP(4), ft.CompileBlocks(backend="aot_eager", fullgraph=True, fallback=False)])
    x = torch.randn(2, 9, D)
    for net in (plain, tiled):
        net(x).square().sum().backward()
    assert largest_difference(gradients(plain), gradients(tiled)) < 1e-5


@pytest.fixture
def _one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_sharded_or_replicated_block_gets_its_gradients(how):
    plain = nn.Sequential(gelu_mlp(), gelu_mlp())
    tiled = copy.deepcopy(plain)
    tile_mlps_(tiled, 4)
    wrapped = tiled
    if how == "ddp":
        wrapped = DistributedDataParallel(tiled)
    else:
        for block in tiled:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(tiled, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(2, 9, D)
    for net in (plain, wrapped):
        net(x).square().sum().backward()
    found = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients(tiled).items()}
    assert largest_difference(gradients(plain), found) < 1e-5


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = x.reshape(-1, *x.shape[-2:])
        return F.scaled_dot_product_attention(self.q(x), self.q(x), self.v(x), is_causal=True)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(100, D), nn.Linear(D, D)

    def forward(self, x):
        return self.out(x + self.table(torch.arange(x.shape[-2])))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.out(x)


class CountsInPython(nn.Linear):
    def __init__(self):
        super().__init__(D, D)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class StartsWithoutMixing(nn.Module):
    """Neighbouring tokens are convolved, by a kernel that is initialized to zero."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, F_), nn.Linear(F_, D)
        self.near = nn.Conv1d(F_, F_, 3, padding=1, groups=F_)
        self.initialize(self.near.weight)
        nn.init.zeros_(self.near.bias)

    initialize = staticmethod(nn.init.zeros_)

    def forward(self, x):
        h = F.gelu(self.up(x))
        near = self.near(h.reshape(-1, *h.shape[-2:]).mT).mT
        return self.down(h + near.reshape(h.shape))


class StartsAsIdentity(StartsWithoutMixing):
    """A kernel whose zeros are beside a one."""

    @staticmethod
    def initialize(weight):
        nn.init.zeros_(weight)
        weight.data[:, 0, 1] = 1.0


class StartsUngated(nn.Module):
    """All tokens are added, with a weight of 1 minus a parameter that is 1."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.own = nn.Linear(D, F_), nn.Linear(F_, D), nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = F.gelu(self.up(x))
        return self.down(self.own * h + (1 - self.own) * h.mean(-2, keepdim=True))


class SkipsByPython(nn.Linear):
    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        return x if self.training and random.random() < 0.5 else super().forward(x)


class SkipsByTorch(SkipsByPython):
    def forward(self, x):
        return x if self.training and torch.rand(()).item() < 0.5 else nn.Linear.forward(self, x)


class DropsFeatures(SkipsByPython):
    """One mask for all tokens."""

    def forward(self, x):
        return nn.Linear.forward(self, x) * F.dropout(torch.ones(D), 0.5, self.training)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.out(x).flatten(0, -2)).view(x.shape)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)

    def forward(self, x):
        return self.out(x).mean(-2)


class WritesIntoInput(nn.Linear):
    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        return x.add_(super().forward(x.clone()))


class Remembers(nn.Linear):
    def __init__(self):
        super().__init__(D, D)
        self.last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)
        self.others = [nn.Parameter(torch.ones(D))]  # hidden in a list

    def forward(self, x):
        return self.out(x) * self.others[0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Attends, "depends on other tokens"),
        (Norm, "depends on other tokens"),
        (Positions, "depends on its position"),
        (Counts, "changes 'calls'"),
        (CountsInPython, "changes 'calls'"),
        (Pools, "one row for each token"),
        (WritesIntoInput, "writes into its input in place"),
        (Remembers, "changes 'last'"),
        (StartsWithoutMixing, "depends on other tokens"),
        (StartsAsIdentity, "depends on other tokens"),
        (StartsUngated, "depends on other tokens"),
        (SkipsByPython, "random numbers for all tokens together"),
        (SkipsByTorch, "random numbers for all tokens together"),
        (DropsFeatures, "random numbers for all tokens together"),
        (Closure, "neither its parameter nor its first argument"),
    ],
)
def test_a_module_that_mixes_tokens_is_refused_by_name(kind, why):
    net = nn.ModuleDict({"layer": kind()})
    state = copy.deepcopy(net.state_dict())
    rng = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"'layer' \({kind.__name__}\): .*{why}.*mlps="):
        tile_mlps_(net, mlps="layer")
    assert "forward" not in vars(net["layer"])
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
    assert torch.equal(rng, torch.get_rng_state())
    assert net["layer"].training


def test_what_has_no_values_yet_is_tried_at_its_first_call():
    class Block(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(D), kind()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    class Mixing(SwiGLU):
        def forward(self, x):
            return super().forward(x.cumsum(-2))

    for kind in (SwiGLU, Mixing):
        with torch.device("meta"):
            net = nn.ModuleList([Block(kind), Block(kind)])
        assert list(tile_mlps_(net, 4)) == ["0.mlp", "1.mlp"]
        net.to_empty(device="cpu")
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        if kind is Mixing:
            with pytest.raises(ValueError, match=r"'0\.mlp' \(Mixing\): the output of a token depends on"):
                net[0](torch.randn(1, 9, D))
        else:
            net[0](torch.randn(1, 9, D)).sum().backward()


def test_a_model_without_an_mlp_of_its_own_is_refused():
    with pytest.raises(ValueError, match="no MLPs in the blocks of TinyLM: .*Make the MLP a module of its own"):
        tile_mlps_(TinyLM())


def test_a_further_argument_that_requires_a_gradient_is_refused():
    class Scaled(SwiGLU):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    net = nn.ModuleList([Scaled()])
    tile_mlps_(net, 2, mlps="0")
    net[0](torch.randn(2, 4, D), scale=torch.ones(D)).sum().backward()
    with pytest.raises(ValueError, match="'0' .*an argument beside the first one requires a gradient"):
        net[0](torch.randn(2, 4, D), scale=torch.ones(D, requires_grad=True))


def test_further_arguments_that_hold_values_for_each_token_are_refused():
    class Masked(SwiGLU):
        def forward(self, x, keep=None):
            return super().forward(x) if keep is None else super().forward(x) * keep[..., None]

    net = nn.ModuleList([Masked()])
    tile_mlps_(net, 2, mlps="0")
    net[0](torch.randn(2, 9, D)).sum().backward()
    with pytest.raises(ValueError, match="does not run on other numbers of tokens with the same further arguments"):
        net[0](torch.randn(2, 9, D), torch.ones(2, 9))


def test_an_input_that_is_named_is_cut_as_well():
    net, tokens, x = SwiGLU(), [], torch.randn(2, 9, D)
    expected = net(x)
    tile_mlps_(nn.ModuleList([net]), 5, mlps="0")
    net.up.register_forward_hook(lambda layer, inputs, output: tokens.append(output.shape[1]))
    torch.testing.assert_close(net(x=x), expected)
    assert tokens == [5, 5, 5, 3]


def test_a_second_derivative_is_refused_and_a_graph_can_be_used_twice():
    net = SwiGLU().double()
    tile_mlps_(nn.ModuleList([net]), 2, mlps="0")
    y = net(torch.randn(2, 4, D).double()).square().sum()
    y.backward(retain_graph=True)
    once = gradients(net)
    y.backward()
    assert largest_difference({name: 2 * g for name, g in once.items()}, gradients(net)) < 1e-14
    y = net(torch.randn(2, 4, D).double()).square().sum()
    with pytest.raises(RuntimeError, match="a module in tiles in a backward with create_graph=True"):
        torch.autograd.grad(y, net.gate.weight, create_graph=True)


def test_a_run_whose_batches_are_smaller_than_a_tile_is_warned_of():
    with heard(), pytest.warns(ft.FastTrainWarning, match="no call had more tokens than one tile .at most 30."):
        fit(TinyLM(), lm_batches(2), [ft.model.TiledMLP(mlps="blocks.*")])
