"""Logits under a fused head serve whatever a training step does with them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fasttrain.loss.deferred_logits import DeferredLogits, NeedsValuesError
from lightning_fasttrain.loss.fused_loss_head import fuse_loss_head_

VOCAB, DIM = 11, 6
TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1)
PER_CLASS = torch.linspace(-1, 1, VOCAB)
MASK = TOKENS > 4


class Net(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


def ce(logits, targets=TARGETS):
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def beside(use):
    """The cross-entropy, and something else of the logits."""
    return lambda z: ce(z) + 0.1 * use(z)


def without_gradient(use):
    def loss(z):
        with torch.no_grad():
            found = use(z)
        return ce(z) * (1 + found.float().mean().item())

    return loss


def changed(change):
    """The cross-entropy of logits that were changed in place, by way of another name."""

    def loss(z):
        change(z)
        return ce(z)

    return loss


def operator(expression):
    return lambda z: eval(expression, {"z": z, "torch": torch, "F": F, "b": PER_CLASS, "np": np}).float().mean()


def in_place(statement):
    def change(z):
        names = {"z": z, "b": PER_CLASS, "torch": torch, "F": F, "mask": MASK, "V": VOCAB}
        exec(statement, names)

    return change


def label_smoother(z):  # as that of Hugging Face's Trainer
    scores = -F.log_softmax(z, dim=-1)
    nll = scores.gather(dim=-1, index=TARGETS.unsqueeze(-1))
    return 0.9 * nll.mean() + 0.1 * scores.sum(dim=-1, keepdim=True).mean() / VOCAB


def preference(z):  # as DPO: the log-probabilities of pairs of sequences
    chosen, rejected = z.chunk(2)
    scores = [
        torch.gather(part.log_softmax(-1), 2, targets.unsqueeze(2)).squeeze(2).sum(-1)
        for part, targets in zip((chosen, rejected), TARGETS.chunk(2), strict=True)
    ]
    return -F.logsigmoid(0.1 * (scores[0] - scores[1])).mean()


def by_einsum(z):
    return torch.einsum("btv,v->bt", z, PER_CLASS).mean()


def with_a_hook(z):
    z.register_hook(lambda gradient: gradient * 2)
    return ce(z)


def by_numpy(z):
    return ce(z) * float(np.mean(z.detach().numpy() > 0))


def penalty(z):
    return ce(z) + 0.1 * torch.autograd.grad(z.square().mean(), z, create_graph=True)[0].square().sum()


EXPRESSIONS = (
    *("-z", "+z", "abs(z)", "z + 1", "1 + z", "z + z", "z + b", "z - 1", "2 - z", "z - b", "b - z", "z * 2", "2 * z"),
    *(
        "z * b",
        "b * z",
        "z * z",
        "z / 2",
        "2 / (z * z + 1)",
        "z / (1 + b * b)",
        "z.detach() // 0.5",
        "z % 0.5",
        "z ** 2",
    ),
    *("2 ** z", "z @ b", "b @ z.mT", "z == z", "z != 0", "z < b", "z <= 0", "z > z.mean()", "z >= b", "z.T", "z.mT"),
    *("(z > 0) & (z < 1)", "~(z > 0)", "z[..., 1:]", "z[:, :, 0]", "z[:, -1]", "z[0]", "z[z > 0]", "z[..., None]"),
    *("z.abs()", "z.exp()", "z.sigmoid()", "z.softmax(-1)", "z.logsumexp(-1) ** 2", "z.max(-1).values", "z.std(-1)"),
    *("z.neg()", "z.square()", "z.mean((0, 1))", "z.sum(-1)", "z.clamp(-1, 1)", "z.topk(2).values", "z.double()"),
    *(
        "z.view(-1)",
        "z.mT.flatten()",
        "z.mT.mT.permute(2, 0, 1)",
        "z.mT[0]",
        "z.split(2, -1)[1]",
        "z.unsqueeze(0)",
        "z.squeeze()",
        "z.unbind(1)[2]",
        "z.clone()",
    ),
    *("torch.cat([z, z])", "torch.stack([z, z * 2])", "torch.where(z > 0, z, 0 * z)", "torch.logsumexp(z, -1)"),
    *("torch.softmax(z, -1)", "F.softplus(z)", "F.gelu(z)", "F.dropout(z, 0.0)", "F.normalize(z, dim=-1)"),
    *("F.mse_loss(z, z.detach() + 1)", "F.log_softmax(z, 1)", "F.log_softmax(z, -1)", "F.softmax(z / 2, dim=-1)"),
    *("F.kl_div(F.log_softmax(z / 2, -1), torch.softmax(z.detach() + b, -1))", "30 * torch.tanh(z / 30)"),
    *("torch.tanh(torch.tanh(z))", "z.to(torch.float64)", "z.div(2, rounding_mode='floor')", "z.add(b, alpha=2)"),
    *("z.mul(b)", "sum(z)", "sum(row.mean() for row in z)", "torch.zeros_like(z)", "z.new_ones(2)", "z.movedim(-1, 0)"),
)
STATEMENTS = (
    *(
        "z *= 3",
        "z /= 3",
        "z += b",
        "z -= b",
        "z **= 2",
        "z.mul_(3)",
        "z.div_(2)",
        "z.add_(b)",
        "z.sub_(1)",
        "z.tanh_()",
    ),
    *("v = z.view(-1, V); v *= 3", "v = z[:, 1:]; v += b", "v = z[0]; v.mul_(2)", "z.mT.mul_(2)", "z[0, 0] *= 5"),
    *("z[..., 0] = -9.0", "z[mask] = 0.5", "z[:, 0] -= 1", "z.masked_fill_(mask[..., None], 0)", "z.clone().mul_(9)"),
    *("torch.relu_(z)", "F.relu(z, inplace=True)", "z.detach().mul_(2)"),
    *("z.data.mul_(2)", "z.data[0] = 0", "v = z * 2; v *= 5", "v = z * 2; z *= 5; v += 1", "v = z.float(); v *= 2"),
    *("z.flatten(0, 1)[3] = 0", "z.contiguous().mul_(2)", "z.to(torch.float64).mul_(2)"),
    *("a = z.argmax(-1); z *= 2", "v = z.view(-1, V); z *= 2; v /= 4", "z.clamp_(-0.5, 0.5)", "z[1].zero_()"),
)
USES = {
    **{expression: beside(operator(expression)) for expression in EXPRESSIONS},
    **{statement: changed(in_place(statement)) for statement in STATEMENTS},
    "accuracy": without_gradient(lambda z: z.argmax(-1) == TARGETS),
    "top 3": without_gradient(lambda z: (z.topk(3).indices == TARGETS[..., None]).any(-1)),
    "perplexity": without_gradient(lambda z: z.softmax(-1).log().neg()),
    "detached accuracy": lambda z: ce(z) * (1 + (z.detach().argmax(-1) == TARGETS).float().mean()),
    "z-loss": lambda z: ce(z) + 1e-2 * z.logsumexp(-1).square().mean(),
    "entropy": lambda z: ce(z) - 0.1 * torch.distributions.Categorical(logits=z).entropy().mean(),
    "label smoother": label_smoother,
    "preference": preference,
    "einsum": by_einsum,
    "hook": with_a_hook,
    "NumPy": by_numpy,
    "gradient penalty": penalty,
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), torch.softmax(z.detach().flatten(0, 1) * 2, -1)),
    "old options": lambda z: F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), size_average=False),
    "keyword": lambda z: F.cross_entropy(input=z.flatten(0, 1), target=TARGETS.flatten()),
    "BCE": lambda z: F.binary_cross_entropy_with_logits(z, F.one_hot(TARGETS, VOCAB).float()),
    "multi margin": lambda z: F.multi_margin_loss(z.flatten(0, 1), TARGETS.flatten()),
    "focal": lambda z: (ce_of_tokens(z) * (1 - torch.exp(-ce_of_tokens(z))) ** 2).mean(),
    "first token": lambda z: ce(z[:, :1], TARGETS[:, :1]) + z[..., 0].mean(),
    "second dimension": lambda z: F.cross_entropy(z.mT, TARGETS) + z.mT[:, 0].mean(),
    "nothing else": ce,
}


def ce_of_tokens(z):
    return F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), reduction="none")


def losses_and_weights(loss, tied, fuse=None):
    net = Net(tied)
    if fuse is not None:
        fuse(net)
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.3), []
    for _ in range(2):  # an unnamed head is found by the first
        value = loss(net(TOKENS))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *(weight.detach() for weight in net.parameters())]


@pytest.mark.filterwarnings("ignore:FusedLossHead did nothing", "ignore:reduction:UserWarning", "ignore:size_average")
@pytest.mark.filterwarnings("ignore:The use of `x.T`", "ignore:Using a target size")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_training_is_that_of_plain_logits(use, tied):
    expected = losses_and_weights(USES[use], tied)
    assert not torch.equal(expected[0], expected[1])  # it trains
    for head in ("head", None):
        found = losses_and_weights(USES[use], tied, lambda net, head=head: fuse_loss_head_(net, head))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6, msg=lambda text, head=head: f"{head}: {text}")


def test_a_loss_beside_an_accuracy_is_still_computed_without_logits_of_its_own():
    def loss_of(hidden, *_, **__):
        return hidden.sum()

    hidden = torch.ones(2, 3, DIM)
    logits = DeferredLogits(hidden, VOCAB, torch.float32, loss_of, values_of=nn.Linear(DIM, VOCAB))
    logits.argmax(-1)
    assert ce(logits, TARGETS[:2, :3]) == hidden.sum()
    logits.mul_(2)
    assert ce(logits, TARGETS[:2, :3]) != hidden.sum()


class OwnCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits.softmax(-1), targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx, gradient):
        shares, targets = ctx.saved_tensors
        return gradient * (shares - F.one_hot(targets, VOCAB)) / len(targets), None


def test_a_custom_function_would_lose_the_gradient_and_is_refused():
    net = Net(tied=False)
    fuse_loss_head_(net, "head")
    logits = net(TOKENS).flatten(0, 1)
    with pytest.raises(NeedsValuesError, match="custom Function|no gradient by arguments"):
        OwnCrossEntropy.apply(logits, TARGETS.flatten())
    OwnCrossEntropy.apply(logits.compute(), TARGETS.flatten()).backward()
    assert net.head.weight.grad.any()


def test_a_loss_that_adds_more_than_cross_entropy_is_not_replaced():
    net = Net(tied=False)
    fuse_loss_head_(net, "head", z_loss=0.1)
    logits = net(TOKENS)
    logits.argmax(-1)
    ce(logits).backward()
    logits[0] = 0
    with pytest.raises(NeedsValuesError, match="z_loss="):
        ce(logits)


def test_values_have_the_autocast_of_the_heads_call():
    net = Net(tied=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net(TOKENS)
        fuse_loss_head_(net, "head")
        logits = net(TOKENS)
    assert logits.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(logits.compute(), expected)


def test_facts_and_tensors_alike_take_no_values():
    def values_of(hidden):
        raise AssertionError("values were computed")

    logits = DeferredLogits(torch.ones(2, 3, DIM), VOCAB, torch.bfloat16, ce, values_of=values_of)
    assert (len(logits), logits.numel(), logits.is_floating_point(), logits.is_cuda) == (2, 6 * VOCAB, True, False)
    assert torch.zeros_like(logits).shape == torch.full_like(logits, 2).shape == logits.shape
    assert logits.new_zeros(2).dtype == torch.bfloat16
    assert hasattr(logits, "detach")
    assert not hasattr(logits, "config")
