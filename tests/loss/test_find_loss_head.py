"""The head of a model is found from the first training loss, and a wrong one is never fused."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.wrapped_forward import replaced_forward
from lightning_fasttrain.loss import FusedLossHead, fuse_loss_head_
from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.fused_loss_head import FusedHead
from tests.support.nets import (
    VOCAB,
    Block,
    HeadFirst,
    as_loader,
    gradients,
    heard,
    largest_difference,
    trainer,
    weights,
)

DIM = 8


class Decoder(HeadFirst):
    """A model like litgpt's, with its own loss: rows in chunks, whose losses are summed."""

    def loss(self, ids):
        logits = self(ids)[..., :-1, :]
        logits = torch.tanh(logits / 5) * 5
        rows, targets = logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1)
        losses = [
            F.cross_entropy(some, target, ignore_index=0, reduction="none")
            for some, target in zip(rows.split(7), targets.split(7), strict=True)
        ]
        return torch.cat(losses).sum() / (targets != 0).sum()


class Tied(Decoder):
    def __init__(self):
        super().__init__(tied=True)


class Autoregressive(nn.Module):
    """A wrapper like x-transformers': einops puts the classes second; linear layers before and after the blocks."""

    def __init__(self):
        super().__init__()
        self.token_emb, self.project_emb = nn.Embedding(VOCAB, 4), nn.Linear(4, DIM)
        self.attn_layers = nn.ModuleList([Block(DIM) for _ in range(2)])
        self.to_logits = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.project_emb(self.token_emb(ids))
        for block in self.attn_layers:
            x, _ = block(x)
        return self.to_logits(x)

    def loss(self, ids):
        from einops import rearrange

        return F.cross_entropy(rearrange(self(ids[:, :-1]), "b n c -> b c n"), ids[:, 1:], ignore_index=0)


class Transposed(Autoregressive):
    def loss(self, ids):
        log_p = F.log_softmax(0.5 * self(ids[:, :-1]).transpose(1, 2).float(), dim=1)
        return F.nll_loss(log_p, ids[:, 1:])


class Biased(nn.Module):
    """A custom GPT whose head has a bias and a scale."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(DIM) for _ in range(2)])
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def loss(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x)
        logits = self.out(self.norm(x)) * 0.5
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)


class Classifier(nn.Module):
    """Several linear layers before the one whose output is compared."""

    def __init__(self):
        super().__init__()
        self.embed, self.wide, self.deep = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.classify = nn.Linear(DIM, 5)

    def loss(self, ids):
        x = self.deep(self.wide(self.embed(ids).mean(1)).relu())
        return F.cross_entropy(self.classify(x), ids[:, 0] % 5)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB), nn.Linear(DIM, 3)

    def loss(self, ids):
        x = self.embed(ids)
        return F.cross_entropy(self.first(x).flatten(0, 1), ids.flatten()) + F.cross_entropy(
            self.second(x[:, 0]), ids[:, 1] % 3
        )


HEADS = {
    Decoder: ["lm_head"],
    Tied: ["lm_head"],
    Autoregressive: ["to_logits"],
    Transposed: ["to_logits"],
    Biased: ["out"],
    Classifier: ["classify"],
    TwoHeads: ["first", "second"],
}


def build(kind):
    torch.manual_seed(0)
    return kind()


def batches(count=3):
    return [torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def step(net, ids):
    net.zero_grad()
    loss = net.loss(ids)
    loss.backward()
    return {"loss": loss.detach(), **gradients(net)}


def fused_in(net):
    wrapped = {name: replaced_forward(module) for name, module in net.named_modules()}
    return [name for name, wrapper in wrapped.items() if isinstance(wrapper, FusedHead)]


def test_a_frozen_head_is_found():
    net = build(Biased)
    net.out.requires_grad_(False)
    fuse_loss_head_(net)
    for ids in batches():
        step(net, ids)
    assert fused_in(net) == ["out"]


@pytest.mark.parametrize("apply", [fuse_loss_head_, lambda net: ft.apply(net, [FusedLossHead()])])
@pytest.mark.parametrize("kind", HEADS)
def test_in_a_bare_loop_the_head_is_found_with_equal_gradients(kind, apply):
    plain, net = build(kind), build(kind)
    apply(net)
    for ids in batches():
        expected, seen = step(plain, ids), step(net, ids)
        assert largest_difference(expected, seen) <= 1e-6
    assert fused_in(net) == HEADS[kind]
    assert all(replaced_forward(net.get_submodule(name)).used for name in HEADS[kind])


def test_the_first_step_is_the_plain_one_and_the_second_has_no_logits():
    plain, net = build(Decoder), build(Decoder)
    fuse_loss_head_(net)
    assert torch.equal(net(batches()[0]), plain(batches()[0]))
    assert all(
        torch.equal(*pair)
        for pair in zip(step(net, batches()[0]).values(), step(plain, batches()[0]).values(), strict=True)
    )
    assert isinstance(net(batches()[1]), DeferredLogits)


class Module(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_targets(ids):
    return (ids[:, 1:] != 0).sum()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [Tied, Autoregressive, Biased, Classifier])
def test_in_a_trainer_the_weights_are_those_of_the_plain_run(kind, parts):
    count = count_targets if kind in (Tied, Autoregressive) else len
    ends = []
    for techniques in ([], [FusedLossHead(), ft.MicroBatching(parts, count=count)]):
        module = Module(build(kind))
        with heard() as said:
            trainer(techniques, enable_model_summary=True).fit(module, as_loader(batches()))
        ends.append(weights(module))
    assert largest_difference(*ends) <= 1e-6
    head = f"net.{HEADS[kind][0]}"
    assert f"  found the head from the first loss: {head}" in "\n".join(said)
    assert fused_in(module) == []


@pytest.mark.parametrize("kind", [Decoder, Autoregressive, Biased])
def test_micro_batches_take_the_same_way_whether_the_head_is_named_or_found(kind):
    """The head is found before the loss is tried, whose graph is another one from then on."""
    ends, ways = [], []
    for techniques in (
        [],
        [FusedLossHead(f"net.{HEADS[kind][0]}"), ft.MicroBatching(2)],
        [FusedLossHead(), ft.MicroBatching(2)],
    ):
        module = Module(build(kind))
        with heard() as said:
            trainer(techniques).fit(module, as_loader(batches()))
        ends.append(weights(module))
        ways.append([line for line in said if "micro-batch" in line])
    assert max(largest_difference(ends[0], end) for end in ends[1:]) <= 1e-6
    assert "weighted by" in ways[1][0]
    assert ways[1] == ways[2]


class Bringing(ft.FastTrainMixin, Module):
    techniques = (FusedLossHead(),)


def test_the_head_of_a_module_with_the_mixin_is_found():
    nets = [cls(build(Biased)) for cls in (Module, Bringing)]
    for module in nets:
        trainer().fit(module, as_loader(batches()))
    assert largest_difference(*(weights(module) for module in nets)) <= 1e-6


class Accurate(Biased):
    """Uses the logits again after the loss."""

    def loss(self, ids):
        self.logits = self.out(self.embed(ids)).flatten(0, 1)
        loss = F.cross_entropy(self.logits, ids.flatten())
        with torch.no_grad():
            self.accuracy = (self.logits.argmax(-1) == ids.flatten()).float().mean()
        return loss


class Regression(Biased):
    def loss(self, ids):
        return self.out(self.embed(ids)).square().mean()


class CompiledLoss(Biased):
    def __init__(self):
        super().__init__()
        torch._dynamo.reset()
        self.compare = torch.compile(F.cross_entropy, backend="eager")

    def loss(self, ids):
        return self.compare(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())


NOT_FUSED = {
    Accurate: "the logits of '(net.)?out' are also used for .argmax. Use the logits for cross_entropy alone",
    Regression: "no output of a linear layer outside of the repeated blocks .'(net.)?out', used for .square. reached",
    CompiledLoss: "no output of a linear layer outside of the repeated blocks .'(net.)?out'. reached cross_entropy",
}


@pytest.mark.parametrize("kind", NOT_FUSED)
def test_a_head_that_cannot_be_fused_is_left_unchanged_and_reported_once(kind):
    plain, net = build(kind), build(kind)
    fuse_loss_head_(net)

    def train(one):
        return [step(one, ids) for ids in batches()]

    expected = train(plain)
    with pytest.warns(ft.FastTrainWarning, match=NOT_FUSED[kind]) as told:
        seen = train(net)
    assert max(map(largest_difference, expected, seen)) == 0
    assert len([one for one in told if one.category is ft.FastTrainWarning]) == 1
    assert fused_in(net) == []


@pytest.mark.parametrize("kind", [Accurate, Regression])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_trainer_reports_once_why_no_head_was_fused(kind, parts):
    with pytest.warns(ft.FastTrainWarning, match=NOT_FUSED[kind]) as told:
        trainer([FusedLossHead(), ft.MicroBatching(parts, count=len)]).fit(Module(build(kind)), as_loader(batches()))
    assert (
        len([one for one in told if one.category is ft.FastTrainWarning and "FusedLossHead" in str(one.message)]) == 1
    )


def test_a_forward_without_a_backward_decides_nothing():
    net = build(Decoder)
    fuse_loss_head_(net)
    for _ in range(2):
        net(batches()[0]).argmax(-1)  # with gradients on, as in an evaluation without no_grad
    for ids in batches(2):
        step(net, ids)
    assert isinstance(net(batches()[0]), DeferredLogits)


def test_candidates_are_undone_and_copies_search_for_themselves():
    net = build(Autoregressive)
    undo = ft.apply(net, [FusedLossHead()])
    twin = copy.deepcopy(net)
    step(twin, batches()[0])
    assert isinstance(twin(batches()[0]), DeferredLogits)
    assert not isinstance(net(batches()[0]), DeferredLogits)
    undo.close()
    assert fused_in(net) == []
    assert type(net(batches()[0])) is torch.Tensor


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.permute(0, 2, 1),
        lambda x: torch.permute(x, (0, -1, 1)),
        lambda x: x.movedim(-1, 1),
        lambda x: torch.transpose(x, 1, 2),
        lambda x: x.mT,
        lambda x: x.permute(1, 0, 2).transpose(0, 1).mT.mT.mT,
        lambda x: torch.split(x, 3)[0].mT.contiguous().mul(1.0),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_deferred_logits_support_classes_on_the_second_axis(move, reduction):
    net, ids = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)), batches()[0][:3]
    expected = F.cross_entropy(move(net(ids)), ids, reduction=reduction)
    fuse_loss_head_(net, "1")
    logits = move(net(ids))
    assert logits.shape == (3, VOCAB, 6)
    assert torch.allclose(F.cross_entropy(logits, ids, reduction=reduction), expected)
