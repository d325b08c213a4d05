"""Deferred logits support a model's operations like real ones, or refuse them."""

import pytest
import torch
from torch.nn import functional as F

from lightning_fasttrain.loss import linear_cross_entropy
from lightning_fasttrain.loss.deferred_logits import DeferredLogits

CLASSES, DIM = 7, 5
HIDDEN = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(CLASSES, (2, 4), generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(CLASSES, generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[True, False, True, True], [False, True, False, True]])


def deferred(hidden=HIDDEN):
    def loss_of(hidden, targets, factor, cap, **how):
        return linear_cross_entropy(hidden * factor, WEIGHT, targets, softcap=cap, **how)

    return DeferredLogits(hidden, CLASSES, hidden.dtype, loss_of)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGETS.view(-1)),
        lambda z: F.cross_entropy(z.reshape(-1, z.size(-1)), TARGETS.flatten(), reduction="sum"),
        lambda z: F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1, ignore_index=3),
        lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, CLASSES), TARGETS[:, 1:].reshape(-1)),
        lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten(), reduction="none"),
        lambda z: F.cross_entropy(z[:, -1, :], TARGETS[:, -1]),
        lambda z: F.cross_entropy(z[0, 0], TARGETS[0, 0]),
        lambda z: F.cross_entropy(z[MASK], TARGETS[MASK]),
        lambda z: F.cross_entropy(z.flatten(0, 1)[torch.tensor([3, 1])], TARGETS.flatten()[torch.tensor([3, 1])]),
        lambda z: F.cross_entropy((z * 0.25).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.cross_entropy((2 * z / 3).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.cross_entropy((torch.tanh(z / 1.5) * 1.5).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.cross_entropy((F.tanh(z * 0.3 / 2.0) * 2.0).flatten(0, 1).float(), TARGETS.flatten()),
        lambda z: F.cross_entropy((z + BIAS).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.cross_entropy((BIAS[None, None] + 2 * (z + BIAS[None])).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.cross_entropy((torch.tanh((z + BIAS) / 1.5) * 1.5).flatten(0, 1), TARGETS.flatten()),
        lambda z: F.nll_loss(F.log_softmax(z, dim=-1).flatten(0, 1), TARGETS.flatten(), ignore_index=3),
        lambda z: F.nll_loss(z.flatten(0, 1).log_softmax(1), TARGETS.flatten(), reduction="sum"),
        lambda z: torch.nn.NLLLoss()(torch.log_softmax(z + BIAS, -1)[:, 1:].flatten(0, 1), TARGETS[:, 1:].flatten()),
        lambda z: F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), BIAS.abs(), label_smoothing=0.1),
        lambda z: F.nll_loss(F.log_softmax(z, dim=-1).flatten(0, 1), TARGETS.flatten(), BIAS.abs()),
        lambda z: F.cross_entropy(z.log_softmax(-1).flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
        lambda z: torch.nn.CrossEntropyLoss()(z.to(torch.float32).to(z.device).flatten(0, 1), TARGETS.flatten()),
    ],
)
def test_deferred_logits_behave_as_real_logits(loss):
    torch.testing.assert_close(loss(deferred()), loss(HIDDEN @ WEIGHT.T))


def test_shape_dtype_and_device_are_those_of_the_logits():
    z = deferred(HIDDEN.bfloat16())
    assert (z.shape, z.dim(), z.size(-1), z.device) == ((2, 4, CLASSES), 3, CLASSES, HIDDEN.device)
    assert (z.dtype, z.float().dtype, z.to(torch.float64).dtype) == (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda z: z.argmax(-1), ".argmax"),
        (lambda z: z.detach(), ".detach"),
        (lambda z: torch.softmax(z, -1), "softmax"),
        (lambda z: z + torch.zeros(2, 4, CLASSES), "add"),  # a different one per token
        (lambda z: z + 1, "add"),
        (lambda z: torch.tanh(z) + BIAS, "add"),
        (lambda z: F.nll_loss(z[0], TARGETS[0]), "nll_loss"),
        (lambda z: z.log_softmax(1), "log_softmax over dimension 1"),
        (lambda z: z * torch.ones(CLASSES), "* Tensor"),
        (lambda z: z / torch.ones(1), "/ Tensor"),
        (lambda z: z.view(2, -1), ".view(2, -1)"),
        (lambda z: z.flatten(), ".flatten(0, -1)"),
        (lambda z: z[..., :-1], "an index into the classes"),
        (lambda z: z[0, 0, 0], "an index into the classes"),
        (lambda z: z[0][1, 2, ...], "an index into the classes"),
        (lambda z: z[:, :, TARGETS[0]], "an index into the classes"),
        (lambda z: z[0, 0][TARGETS[0, 0]], "an index into the classes"),
        (lambda z: z.__setitem__((..., 0), 0.0), "assignment to an index"),
        (lambda z: torch.tanh(torch.tanh(z)), "tanh of the tanh"),
        (lambda z: z.to("meta"), ".to('meta')"),
        (lambda z: F.cross_entropy(z, TARGETS), "second dimension of (2, 4, 7)"),
        (lambda z: F.cross_entropy(z[0], TARGETS[0], size_average=True), "old options"),
        (lambda z: F.cross_entropy(z[0], torch.ones(4, CLASSES)), "probabilities"),
    ],
)
def test_operations_that_need_values_are_refused_with_a_solution(use, what):
    with pytest.raises((RuntimeError, AttributeError)) as error:
        use(deferred())
    assert what in str(error.value)
    assert "Call the model under torch.no_grad()" in str(error.value)
