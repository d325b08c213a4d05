"""Experts start with the output of the dense model, and compute what a loop over tokens computes."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import lightning_fasttrain as ft
from lightning_fasttrain.architecture import expert_layers
from lightning_fasttrain.architecture.residual_blocks import find_mlps
from tests.architecture.test_mixture_of_depths import IDS, Manual, gpt, gpt2, llama, loss_of
from tests.support.nets import (
    DIM,
    Block,
    TinyLM,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    same,
    take_steps,
    weights,
)

BATCHES = lm_batches(3)


def encoder():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(16, 8), *layers)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=16, **sizes), add_pooling_layer=False)


def tokens_of(net):
    output = net(IDS)
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return output


def perturb(net):
    """Make the experts, and the choice between them, different."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, expert_layers.ExpertRouter):
                module.weight.normal_(std=1.0)
            elif isinstance(module, expert_layers.ExpertLinear):
                module.weight.add_(0.1 * torch.randn_like(module.weight))


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("make", [gpt, llama, gpt2, encoder, bert], ids=lambda make: make.__name__)
def test_the_output_starts_as_that_of_the_dense_model(make, top_k):
    net = make().eval()
    expected = tokens_of(net)
    ft.architecture.upcycle_(net, 4, top_k=top_k, every=1)
    torch.testing.assert_close(tokens_of(net), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # torch's own encoder layers have another path without gradients
        torch.testing.assert_close(tokens_of(net), expected, rtol=1e-5, atol=1e-6)


def by_tokens(block, x, top_k):
    """The MLP of one of TinyLM's blocks, token by token."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = (token @ block.up.router.weight.T).softmax(dim=0)
        best = sorted(range(len(probabilities)), key=lambda expert, p=probabilities: -p[expert].item())[:top_k]
        total = sum(probabilities[expert] for expert in best)
        row = 0
        for expert in best:
            hidden = F.gelu(block.up.weight[expert] @ token + block.up.bias[expert])
            output = block.down.weight[expert] @ hidden + block.down.bias[expert]
            row = row + output * probabilities[expert] / (total if top_k > 1 else total.detach())
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("top_k", [1, 2])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(top_k):
    torch.manual_seed(0)
    net = nn.ModuleList([Block(), Block()])
    ft.architecture.upcycle_(net, 5, top_k=top_k, every=1, balance=0.0)
    perturb(net)
    block, x = net[0], torch.randn(3, 4, DIM)
    found = block.down(F.gelu(block.up(x)))
    found.square().sum().backward()
    by_module = gradients(net)
    net.zero_grad()
    expected = by_tokens(block, x, top_k)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    assert largest_difference(gradients(net), by_module) < 1e-5
    assert by_module["0.up.router.weight"].count_nonzero() > 0


def test_a_gate_and_its_layer_share_the_choice():
    net = llama().eval()
    ft.architecture.upcycle_(net, 4, every=1)
    perturb(net)
    mlp, x = net.model.layers[0].mlp, torch.randn(2, 3, 16)
    best, chosen = (x @ mlp.gate_proj.router.weight.T).softmax(dim=-1).topk(2)
    expected = torch.zeros_like(x)
    for slot in range(2):
        gate, up, down = (layer.weight[chosen[..., slot]] for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        hidden = F.silu((gate @ x[..., None])[..., 0]) * (up @ x[..., None])[..., 0]
        share = best[..., slot : slot + 1] / best.sum(dim=-1, keepdim=True)
        expected = expected + share * (down @ hidden[..., None])[..., 0]
    torch.testing.assert_close(mlp(x), expected)


def test_the_balance_loss_is_mixtrals_and_the_z_loss_its_formula():
    torch.manual_seed(0)
    net = nn.ModuleList([Block(), Block()])
    ft.architecture.upcycle_(net, 4, every=2, balance=0.3, z_loss=0.7)
    perturb(net)
    x, router = torch.randn(3, 4, DIM), net[1].up.router
    output = net[1](x)[0]
    logits = F.linear(net[1].norm(x).flatten(0, 1), router.weight)
    expected = 0.3 * load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    expected = expected + 0.7 * logits.exp().sum(dim=1).log().square().mean()
    torch.testing.assert_close(ft.architecture.auxiliary_loss(net), expected)
    output = net[1](x)[0]
    loss = ft.architecture.add_auxiliary_gradient(output.sum(), net)
    (gradient,) = torch.autograd.grad(loss, router.weight, retain_graph=True)
    (of_output,) = torch.autograd.grad(output.sum(), router.weight)
    (of_losses,) = torch.autograd.grad(expected, router.weight)
    torch.testing.assert_close(gradient, of_output + of_losses)


def test_the_balance_loss_spreads_the_tokens():
    torch.manual_seed(0)
    net = nn.ModuleList([Block(), Block()])
    ft.architecture.upcycle_(net, 4, top_k=1, balance=1.0)
    router, x = net[1].up.router, torch.randn(4, 64, DIM) + 0.5
    with torch.no_grad():
        router.weight[0] += 0.5  # nearly all tokens choose it

    def busiest():
        router(x)
        return float(router.current.experts.bincount(minlength=4).max() / 256)

    assert busiest() > 0.9
    optimizer = torch.optim.SGD([router.weight], lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        router.current = None
        output = net[1].up(x)
        (0.0 * output.sum() + ft.architecture.auxiliary_loss(net)).backward()
        optimizer.step()
    assert busiest() < 0.5


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    net = nn.ModuleList([Block(), Block()])
    ft.architecture.upcycle_(net, 3, top_k=1, every=1)
    with torch.no_grad():
        net[0].up.router.weight.zero_()[1] = 1.0
    x = torch.rand(2, 3, DIM)
    net[0].down(net[0].up(x)).sum().backward()
    assert [bool(gradient.count_nonzero()) for gradient in net[0].up.weight.grad] == [False, True, False]


def test_weights_of_the_dense_model_are_loaded_afterwards():
    source, before, after = gpt(), gpt(), gpt()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.1)
    before.load_state_dict(source.state_dict())
    for net in (before, after):
        torch.manual_seed(3)
        ft.architecture.upcycle_(net, 3)
    ft.architecture.load_dense_(after, source.state_dict())
    assert same(weights(before), weights(after))
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.up.weight"):
        ft.architecture.load_dense_(after, {})
    with pytest.raises(ValueError, match="has no experts"):
        ft.architecture.load_dense_(source, {})


def test_it_is_the_same_in_trainer_mixin_and_loop_with_its_losses():
    made = lambda: ft.architecture.Upcycling(3, every=1, balance=0.5, z_loss=0.1)  # noqa: E731

    class WithMixin(ft.FastTrainMixin, TinyLM):
        def configure_techniques(self):
            return [made()]

    in_trainer, in_mixin = fit(TinyLM(), BATCHES, [made()]), fit(WithMixin(), BATCHES)
    assert same(weights(in_trainer), weights(in_mixin))
    torch.manual_seed(11)
    bare = TinyLM()
    ft.apply(bare, [made()])
    plain = bare.loss
    bare.loss = lambda batch: plain(batch) + ft.architecture.auxiliary_loss(bare)
    take_steps(bare, bare.configure_optimizers(), batches=BATCHES)
    assert largest_difference(weights(in_trainer), weights(bare)) < 1e-5
    without = fit(TinyLM(), BATCHES, [ft.architecture.Upcycling(3, every=1, balance=0.0)])
    assert largest_difference(weights(in_trainer), weights(without)) > 1e-4


def test_accumulated_batches_divide_its_losses_too():
    pairs = [BATCHES[0], BATCHES[0]]
    made = lambda: ft.architecture.Upcycling(3, every=1, balance=0.5)  # noqa: E731
    once = fit(TinyLM(), pairs[:1], [made()])
    twice = fit(TinyLM(), pairs, [made()], accumulate_grad_batches=2)
    assert largest_difference(weights(once), weights(twice)) < 1e-5


@pytest.mark.parametrize("outside", [True, False])
def test_recomputation_computes_the_same_experts(outside):
    def run(recomputed):
        net = gpt().train()
        torch.manual_seed(1)
        if recomputed and not outside:
            ft.checkpoint_activations_(net)
        ft.architecture.upcycle_(net, 3, balance=0.5)
        if recomputed and outside:
            ft.checkpoint_activations_(net)
        ft.architecture.add_auxiliary_gradient(loss_of(net), net).backward()
        assert float(ft.architecture.auxiliary_loss(net)) == 0
        return gradients(net)

    assert largest_difference(run(recomputed=False), run(recomputed=True)) < 1e-6


def test_compiled_blocks_with_experts_have_the_same_gradients():
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        net = gpt().train()
        torch.manual_seed(1)
        ft.architecture.upcycle_(net, 3, balance=0.5)
        if compiled:
            ft.compile_blocks_(net, backend="aot_eager")
        ft.architecture.add_auxiliary_gradient(loss_of(net), net).backward()
        found.append(gradients(net))
    assert largest_difference(*found) < 1e-5


def test_micro_batches_have_the_gradient_of_the_batch():
    made = lambda: ft.architecture.Upcycling(3, every=1, balance=0.0)  # noqa: E731
    # Equal experts give the router a gradient of zero up to rounding, which AdamW would divide by itself.
    expected = fit(TinyLM(eps=1e-3), BATCHES, [made()])
    split = fit(TinyLM(eps=1e-3), BATCHES, [made(), ft.MicroBatching(3)])
    assert largest_difference(weights(expected), weights(split)) < 1e-5
    with pytest.raises(ValueError, match="mean over all tokens of a batch"):
        ft.technique.check_together([ft.architecture.Upcycling(), ft.MicroBatching(3)])


def test_a_copy_has_experts_and_a_router_of_its_own():
    net = gpt().train()
    ft.architecture.upcycle_(net, 3)
    kept = loss_of(net)  # with a graph
    copied = copy.deepcopy(net)
    assert same(weights(net), weights(copied))
    perturb(copied)
    torch.testing.assert_close(loss_of(net), kept)
    assert copied.blocks[1].down._shared[0] is copied.blocks[1].up.router


def test_under_autocast_products_are_rounded_and_the_router_is_not():
    net = gpt().eval()
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(IDS)
        ft.architecture.upcycle_(net, 3, every=1)
        found = net(IDS)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert net.blocks[0].up.router(torch.rand(2, 8)).dtype == torch.float32


# 16 bytes in a row, 12, and a dtype without grouped products
@pytest.mark.parametrize(("width", "dtype"), [(4, torch.float32), (3, torch.float32), (4, torch.float64)])
def test_grouped_products_are_those_of_each_group(width, dtype):
    made = {"requires_grad": True, "dtype": dtype}
    rows, matrices = torch.randn(6, width, **made), torch.randn(3, width, 8, **made)
    ends = torch.tensor([4, 4, 6], dtype=torch.int32)
    found = expert_layers.multiply_groups(rows, matrices, ends)
    expected = torch.cat([rows[:4] @ matrices[0], rows[4:] @ matrices[2]])
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sum(), [rows, matrices]),
        torch.autograd.grad(expected.sum(), [rows, matrices]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_layers_of_attention_are_no_mlp():
    found = [(mlp.first, mlp.last) for mlp in find_mlps(llama().model.layers[0])]
    assert found == [(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")]
    assert [mlp.last for mlp in find_mlps(bert().encoder.layer[0])] == ["output.dense"]


class Pools(Block):
    def forward(self, x, **kwargs):
        return x + self.down(self.up(x).mean(dim=1, keepdim=True)), None


@pytest.mark.parametrize(
    ("net", "arguments", "error", "why"),
    [
        (gpt, {"top_k": 9}, ValueError, "cannot have more experts than there are"),
        (gpt, {"every": 5}, ValueError, "no linear layer that widens"),
        (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), {}, ValueError, "no linear layer that widens"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(net, arguments, error, why):
    with pytest.raises(error, match=why):
        ft.architecture.upcycle_(net(), **arguments)


def test_shared_and_adapted_layers_are_refused():
    shared, adapted = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
    shared[0].up.weight = shared[1].up.weight
    with pytest.raises(ValueError, match=r"'1.up': it shares its weight with '0.up'"):
        ft.architecture.upcycle_(shared)
    for block in adapted:
        block.up = nn.utils.parametrizations.weight_norm(block.up)
    with pytest.raises(TypeError, match="'1.up' is a Parametrized"):
        ft.architecture.upcycle_(adapted)
    beside = nn.ModuleList([Block(), Block()])
    for block in beside:
        block.up = nn.Sequential(block.up)
        block.up.register_parameter("lora_A", nn.Parameter(torch.zeros(1, DIM)))  # as in LitGPT
    with pytest.raises(TypeError, match=r"'1.up.0': '1.up' .Sequential. combines its output with .* .lora_A."):
        ft.architecture.upcycle_(beside)
    with pytest.raises(ValueError, match="all of them train"):
        ft.technique.check_together([ft.architecture.Upcycling(), ft.LoRA()])


def test_a_function_of_several_tokens_between_the_layers_is_refused():
    net = nn.ModuleList([Pools(), Pools()])
    ft.architecture.upcycle_(net, 3)
    with pytest.raises(ValueError, match="only functions of single elements"):
        net[1](torch.rand(2, 3, DIM))


class Centres(Block):
    def forward(self, x, **kwargs):
        hidden = self.up(x)
        return x + self.down(hidden - hidden.mean(dim=1, keepdim=True)), None


class Normalizes(Block):
    def forward(self, x, **kwargs):
        hidden = self.up(x)
        return x + self.down(F.layer_norm(hidden, hidden.shape[-1:])), None


@pytest.mark.parametrize(("kind", "top_k"), [(Centres, 1), (Centres, 2), (Normalizes, 2)])
def test_a_function_of_several_rows_that_keeps_the_shape_is_refused(kind, top_k):
    net = nn.ModuleList([kind(), kind()])
    ft.architecture.upcycle_(net, 3, top_k=top_k)
    with pytest.raises(ValueError, match="a function of several tokens or experts lies between"):
        net[1](torch.rand(2, 3, DIM))


def test_a_function_of_one_row_is_allowed_for_one_expert():
    net = nn.ModuleList([Normalizes(), Normalizes()])
    x = torch.rand(2, 3, DIM)
    expected = net[1](x)[0]
    ft.architecture.upcycle_(net, 3, top_k=1)
    torch.testing.assert_close(net[1](x)[0], expected)


def convnext():
    sizes = {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "num_labels": 5}
    return ConvNextV2ForImageClassification(ConvNextV2Config(**sizes))


def segformer():
    sizes = {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "num_attention_heads": [1, 2, 4, 8]}
    return SegformerForImageClassification(SegformerConfig(**sizes, num_labels=5))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("make", "kind"), [(convnext, "ConvNextV2GRN"), (segformer, "SegformerDepthWiseConv")])
def test_a_module_that_mixes_tokens_between_the_layers_is_refused_by_name(make, kind, top_k):
    net = make()
    ft.architecture.upcycle_(net, 3, top_k=top_k)
    with pytest.raises(ValueError, match=rf"1.* \({kind}\) lies between the layers"):
        net(torch.randn(2, 3, 64, 64))


def test_manual_optimization_is_refused_with_losses():
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*add_auxiliary_gradient"):
        fit(Manual(), BATCHES, [ft.architecture.Upcycling()])
    assert isinstance(fit(TinyLM(), BATCHES, [ft.architecture.Upcycling(2)]), L.LightningModule)
