"""Routed blocks compute what a slow loop over samples computes, in training and, causally, in evaluation."""

import copy
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from lightning_fasttrain.architecture.mixture_of_depths import take_tokens
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.core.modules.wrapped_forward import replaced_forward
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

IDS = torch.randint(16, (3, 6), generator=torch.Generator().manual_seed(5))
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])
BATCHES = lm_batches(3)


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=16, context=8, layers=4, heads=2, width=8))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes))


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, **sizes, **rates))


class ByHand:
    """A routed block, sample by sample: the plain block on each sample's own tokens and their arguments."""

    def __init__(self, block, capacity):
        self.block, self.capacity, self.plain = block, capacity, type(block).forward

    def __call__(self, x, *args, **kwargs):
        rows = []
        for row in range(len(x)):
            scores = (x[row] @ self.block.token_router.weight.T)[:, 0]
            values = scores.tolist()
            count = math.ceil(self.capacity * len(scores))
            chosen = sorted(sorted(range(len(values)), key=lambda place, values=values: -values[place])[:count])
            cut = lambda value, row=row, chosen=chosen: self.cut(value, row, chosen)  # noqa: E731
            named = {name: cut(value) for name, value in kwargs.items()}
            part = self.plain(self.block, x[row : row + 1, chosen], *map(cut, args), **named)
            out = x[row].clone()
            for order, place in enumerate(chosen):
                out[place] = x[row, place] + scores[place] * (part[0, order] - x[row, place])
            rows.append(out)
        return torch.stack(rows)

    def cut(self, value, row, chosen):
        if isinstance(value, tuple):  # cosine and sine of rotary positions
            return tuple(one.expand(3, -1, -1)[row : row + 1, chosen] for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 4:  # a mask
            return value.expand(3, -1, -1, -1)[row : row + 1, :, chosen][..., chosen]
        return value.expand(3, -1)[row : row + 1, chosen]  # position ids


def loss_of(net, **inputs):
    output = net(IDS, **inputs)
    return getattr(output, "logits", output).float().square().mean()


CASES = [
    (gpt, "blocks", {}),
    (llama, "model.layers", {}),
    (llama, "model.layers", {"attention_mask": MASK}),
    (gpt2, "transformer.h", {"attention_mask": MASK}),
]


@pytest.mark.parametrize(("make", "place", "inputs"), CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_samples(make, place, inputs):
    net = make().train()
    assert ft.architecture.mixture_of_depths_(net, 0.5) == [f"{place}.1", f"{place}.3"]
    for block in (net.get_submodule(f"{place}.{number}") for number in (1, 3)):
        block.token_router.weight.data.mul_(10)  # so that chosen tokens are changed noticeably
    slow = copy.deepcopy(net)
    for number in (1, 3):
        block = slow.get_submodule(f"{place}.{number}")
        block.forward = ByHand(block, 0.5)
    loss_of(net, **inputs).backward()
    loss_of(slow, **inputs).backward()
    assert largest_difference(gradients(slow), gradients(net)) < 1e-5
    assert gradients(net)[f"{place}.1.token_router.weight"].count_nonzero() > 0


def test_a_block_computes_its_share_of_the_tokens():
    net, seen = gpt(), []
    ft.architecture.mixture_of_depths_(net, 0.3, every=1)
    for block in net.blocks:
        block.up.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    net.train()(IDS)
    seen.clear()  # with the trials
    net(IDS)
    assert seen == [2] * 4  # of 6


@pytest.mark.parametrize("sampling", ["predictor", "top_k"])
def test_evaluation_by_predictor_does_not_look_ahead(sampling):
    net = gpt()
    ft.architecture.mixture_of_depths_(net, 0.5, sampling=sampling)
    for block in net.blocks[1::2]:
        block.token_router.weight.data.mul_(50)
    net.eval()
    logits, looked_ahead = net(IDS), False
    for last in range(16):
        other = torch.cat([IDS[:, :-1], torch.full((3, 1), last)], dim=1)
        looked_ahead |= not torch.allclose(net(other)[:, :-1], logits[:, :-1], atol=1e-6)
    assert looked_ahead == (sampling == "top_k")


def test_evaluation_takes_the_tokens_of_the_predictor():
    net, x = nn.ModuleList([Block(), Block()]), torch.randn(3, 6, DIM, generator=torch.Generator().manual_seed(1))
    ft.architecture.mixture_of_depths_(net, 0.5)
    block = net.eval()[1]
    wanted = block.token_predictor(x)[..., 0] > 0
    assert len(set(wanted.sum(dim=1).tolist())) > 1  # rows of different numbers
    update = type(block).forward(block, x)[0] - x  # of a block that mixes no tokens
    expected = x + update * block.token_router(x) * wanted[..., None]
    torch.testing.assert_close(block(x)[0], expected)
    with torch.no_grad():
        block.token_predictor[2].bias.fill_(-1e3)
    assert torch.equal(block(x)[0], x)


def test_the_predictor_learns_without_reaching_the_model():
    net = gpt().train()
    ft.architecture.mixture_of_depths_(net, 0.5)
    seen = {}
    net.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach()))
    loss_of(net).backward()
    alone = gradients(net)
    net.zero_grad()
    loss = loss_of(net)
    joined = ft.architecture.add_auxiliary_gradient(loss, net)
    assert torch.equal(joined, loss)
    (3 * joined).backward()
    found = gradients(net)
    predictor = net.blocks[1].token_predictor
    assert {name for name in found if name not in alone} == {
        f"blocks.{block}.token_predictor.{layer}.{kind}"
        for block in (1, 3)
        for layer in (0, 2)
        for kind in ("weight", "bias")
    }
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], 3 * gradient)
    scores = net.blocks[1].token_router(seen["x"])[..., 0]
    chosen = (scores >= scores.sort(dim=1).values[:, 3:4]).float()
    expected = torch.autograd.grad(
        3 * F.binary_cross_entropy_with_logits(predictor(seen["x"])[..., 0], chosen), list(predictor.parameters())
    )
    for gradient, parameter in zip(expected, predictor.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_losses_that_are_never_taken_are_not_collected():
    net = gpt().train()
    ft.architecture.mixture_of_depths_(net, 0.5)
    for _ in range(5):
        loss_of(net).backward()
    assert len(replaced_forward(net.blocks[1]).pending.losses) == 1
    assert float(ft.architecture.auxiliary_loss(net)) == 0


def test_predictors_learn_what_the_router_chooses():
    net = TinyLM(optimizer=torch.optim.Adam)
    ft.architecture.mixture_of_depths_(net, 0.5, every=1)
    block, x = net.blocks[0], net.embed(BATCHES[0]["input_ids"]).detach()
    optimizer = torch.optim.Adam(block.token_predictor.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        output, _ = block(x)  # the losses live as long as its graph
        (0.0 * output.sum() + ft.architecture.auxiliary_loss(net)).backward()
        optimizer.step()
    index = replaced_forward(block)._choose(block.token_router(x)[..., 0])
    chosen = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, index, True)
    predicted = block.token_predictor(x)[..., 0] > 0
    assert (predicted == chosen).float().mean() > 0.75  # one token is chosen in one row and not in another


def test_it_is_the_same_in_trainer_mixin_and_loop_with_predictors():
    made = lambda: ft.architecture.MixtureOfDepths(0.5, every=1)  # noqa: E731

    class WithMixin(ft.FastTrainMixin, TinyLM):
        def configure_techniques(self):
            return [made()]

    in_trainer, in_mixin = fit(TinyLM(), BATCHES, [made()]), fit(WithMixin(), BATCHES)
    assert same(weights(in_trainer), weights(in_mixin))
    torch.manual_seed(11)
    bare = TinyLM()
    ft.apply(bare, [made()])
    plain = bare.loss
    bare.loss = lambda batch: ft.architecture.add_auxiliary_gradient(plain(batch), bare)
    optimizer = bare.configure_optimizers()
    take_steps(bare, optimizer, batches=BATCHES)
    assert largest_difference(weights(in_trainer), weights(bare)) < 1e-6
    assert "training_step" not in vars(in_trainer)


def test_routers_are_saved_and_loaded():
    first, second = gpt(), gpt()
    before = set(first.state_dict())
    for net in (first, second):
        ft.architecture.mixture_of_depths_(net, 0.5)
    added = set(first.state_dict()) - before
    assert {name.split(".", 2)[2].split(".")[0] for name in added} == {"token_router", "token_predictor"}
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(IDS), second.eval()(IDS))
    assert ft.architecture.mixture_of_depths_(first, 0.9) == ["blocks.1", "blocks.3"]
    assert replaced_forward(first.blocks[1]).capacity == 0.5


@pytest.mark.parametrize("outside", [True, False])
def test_recomputation_chooses_the_same_tokens(outside):
    def run(recomputed):
        net = gpt().train()
        if recomputed and not outside:
            ft.checkpoint_activations_(net)
        ft.architecture.mixture_of_depths_(net, 0.5)
        if recomputed and outside:
            ft.checkpoint_activations_(net)
        ft.architecture.add_auxiliary_gradient(loss_of(net), net).backward()
        assert float(ft.architecture.auxiliary_loss(net)) == 0  # the recomputation has added none
        return gradients(net)

    torch.manual_seed(0)
    expected = run(recomputed=False)
    torch.manual_seed(0)
    assert same(expected, run(recomputed=True))


def test_micro_batches_have_the_gradient_of_the_batch():
    made = lambda: ft.architecture.MixtureOfDepths(0.5, every=1, sampling="top_k")  # noqa: E731
    expected = fit(TinyLM(), BATCHES, [made()])
    split = fit(TinyLM(), BATCHES, [made(), ft.MicroBatching(3, trim_padding=False)])
    assert largest_difference(weights(expected), weights(split)) < 1e-5


def test_what_it_cannot_join_is_refused():
    predicts = ft.architecture.MixtureOfDepths()
    for other, why in (
        (ft.MicroBatching(2, trim_padding=False), "mean over all tokens of a batch"),
        (ft.TokenWeightedAccumulation(2), "mean over all tokens of a batch"),
        (ft.MicroBatching(2), "share of the length"),
        (ft.micro_batching.PaddingFree(), "share of the length"),
    ):
        with pytest.raises(ValueError, match=why):
            ft.technique.check_together([predicts, other])
    ft.technique.check_together([predicts, ft.MicroBatching(2, trim_padding=False, check=False)])


class Manual(TinyLM):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused_with_predictors():
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*add_auxiliary_gradient"):
        fit(Manual(), BATCHES, [ft.architecture.MixtureOfDepths()])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"every": 5}, "no block would be routed"),
        ({"capacity": 0.0}, "above 0 and at most 1"),
        ({"blocks": nn.ModuleList}, "is a ModuleList"),
    ],
)
def test_settings_that_route_nothing_are_refused(arguments, why):
    with pytest.raises(ValueError, match=why):
        ft.architecture.mixture_of_depths_(gpt(), **{"every": 1, **arguments})


def test_a_mask_without_a_batch_axis_and_a_cache_are_refused():
    index = torch.tensor([[0, 2], [1, 2]])
    block = nn.TransformerEncoderLayer(4, 2)
    with pytest.raises(ValueError, match=r"src_mask of shape \(6, 6\): it has no batch axis"):
        take_tokens(block, (), {"src_mask": torch.zeros(6, 6)}, index, 6)
    with pytest.raises(ValueError, match="use_cache=False"):
        llama_net = llama().eval()
        ft.architecture.mixture_of_depths_(llama_net, 0.5)
        llama_net(IDS, use_cache=True)
    generated = llama_net.generate(IDS[:, :3], max_new_tokens=2, do_sample=False, use_cache=False, pad_token_id=0)
    assert generated.shape == (3, 5)


def test_hidden_states_of_another_shape_are_refused():
    net = nn.ModuleList([Block(), Block()])
    ft.architecture.mixture_of_depths_(net, 0.5)
    with pytest.raises(ValueError, match=r"hidden states of shape \(3, 8\): expected \(batch, tokens, 8\)"):
        net[1](torch.rand(3, DIM))


class Biased(nn.Module):
    """A residual block that adds a table for all positions to its input."""

    def __init__(self):
        super().__init__()
        self.positions, self.up = nn.Parameter(torch.zeros(6, DIM)), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.up(x + self.positions)


def test_a_block_with_a_table_for_all_positions_is_refused():
    net = nn.Sequential(*[Biased() for _ in range(4)])
    ft.architecture.mixture_of_depths_(net, 0.5)
    with pytest.raises(ValueError, match="block .1.: it fails on a part of the tokens: RuntimeError: The size of"):
        net(torch.randn(2, 6, DIM))


def test_a_block_that_is_not_residual_is_refused():
    net = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2)])
    ft.architecture.mixture_of_depths_(net, 0.5)
    with pytest.raises(ValueError, match="block '1' .* is not residual"):
        net(torch.rand(2, 3, 4))


class LongGPT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GPT(GPTConfig(vocabulary=16, context=64, layers=4, heads=2, width=32))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_memory_of_routed_blocks_is_predicted():
    peaks = []
    for techniques in ([], [ft.architecture.MixtureOfDepths(0.125)]):
        batch = torch.zeros(8, 64, dtype=torch.long)
        report = ft.predict_memory(LongGPT(), batch, techniques=techniques, device="cpu")
        peaks.append(report.peak_bytes)
        assert report.notes == ()
    assert peaks[1] < 0.75 * peaks[0]
