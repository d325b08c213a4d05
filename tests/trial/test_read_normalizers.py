"""Terms, coefficients and normalizers are read from a loss's graph without computing anything.

Axes: 4 samples, 3 classes. Names in the rows: z logits (4, 3), y labels (4,), e losses (4, 3), m a mask, s a parameter.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel.distributed import _DDPSink
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lightning_fasttrain as ft
from lightning_fasttrain.micro_batching import read_normalizers

KEPT = 2  # entries of the mask in the first row of a batch; one in all others


@dataclass
class Fields:
    """Inputs of losses; ``z`` stands for the output of a model."""

    z: Tensor
    y: Tensor
    m: Tensor
    s: Tensor

    @property
    def e(self) -> Tensor:
        return (self.z - 1).square()


def fields(size: int = 4, device: str = "cpu") -> Fields:
    g = torch.Generator().manual_seed(3)
    inputs, weight = torch.randn(size, 5, generator=g), torch.randn(5, 3, generator=g)
    labels = torch.arange(size) % 3
    labels[-1] = -100
    mask = torch.zeros(size, 3)
    mask[:, 0], mask[0, 1] = 1.0, 1.0
    z = inputs.to(device) @ weight.to(device).requires_grad_()
    s = torch.nn.Parameter(torch.tensor(0.5, device=device))
    return Fields(z, labels.to(device), mask.to(device), s)


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
# The labels are 0, 1, 2 and -100, so 3 targets count, of weights 0.5 + 1 + 4; the mask keeps 2 + 1 + 1 + 1 entries.
LOSSES: dict[str, tuple[Callable[[Fields], Tensor], list[tuple[str, float, float]]]] = {
    "cross_entropy": (lambda f: F.cross_entropy(f.z, f.y), [("mean", 1, 3)]),
    "cross_entropy, sum": (lambda f: F.cross_entropy(f.z, f.y, reduction="sum"), [("sum", 1, 1)]),
    "class weights": (lambda f: F.cross_entropy(f.z, f.y, CLASS_WEIGHTS.to(f.z)), [("mean", 1, 5.5)]),
    "other ignored label": (lambda f: F.cross_entropy(f.z, f.y.clamp(min=0), ignore_index=0), [("mean", 1, 2)]),
    "label smoothing": (
        lambda f: F.cross_entropy(f.z, f.y, label_smoothing=0.1),
        [("mean", 0.9, 3), ("quotient", 0.1 / 3, 3)],
    ),
    "per pixel": (
        lambda f: F.cross_entropy(f.z.view(2, 3, 2, 1), f.y.clamp(min=0).view(2, 2, 1), ignore_index=1),
        [("mean", 1, 3)],
    ),
    "mean": (lambda f: f.e.mean(), [("mean", 1, 12)]),
    "mean over all axes by name": (lambda f: f.e.mean((0, -1)), [("mean", 1, 12)]),
    "sum": (lambda f: f.e.sum(), [("sum", 1, 1)]),
    "mse": (lambda f: F.mse_loss(f.z, f.m), [("mean", 1, 12)]),
    "l1": (lambda f: F.l1_loss(f.z, f.m), [("mean", 1, 12)]),
    "huber, sum": (lambda f: F.huber_loss(f.z, f.m, reduction="sum"), [("sum", 1, 1)]),
    "bce_with_logits": (lambda f: F.binary_cross_entropy_with_logits(f.z, f.m), [("mean", 1, 12)]),
    "kl_div, batchmean": (
        lambda f: F.kl_div(f.z.log_softmax(-1), f.m, reduction="batchmean"),
        [("quotient", 1, 4)],
    ),
    "masked sum / sum of the mask": (lambda f: (f.e * f.m).sum() / f.m.sum(), [("quotient", 1, 5)]),
    "picked by a mask": (lambda f: f.e[f.m > 0].mean(), [("mean", 1, 5)]),
    "sum / len(z)": (lambda f: f.e.sum() / len(f.z), [("quotient", 1, 4)]),
    "sum * (1 / n)": (lambda f: f.e.sum() * (1 / 8), [("sum", 0.125, 1)]),
    "mean of means": (lambda f: f.e.mean(1).mean(), [("mean", 1, 4)]),
    "coefficients": (
        lambda f: 2 * F.cross_entropy(f.z, f.y) - f.e.mean() / 4,
        [("mean", 2, 3), ("mean", -1, 48)],
    ),
    "three in a stack, mean": (
        lambda f: torch.stack([f.e.sum(), f.e.mean(), -f.e.sum()]).mean(),
        [("quotient", 1, 3), ("mean", 1, 36), ("quotient", -1, 3)],
    ),
    "alpha": (lambda f: torch.sub(f.e.mean(), f.e.sum(), alpha=3), [("mean", 1, 12), ("sum", -3, 1)]),
    "minuend is a number": (lambda f: 1 - f.e.mean(), [("mean", -1, 12)]),
    "added with its weight": (
        lambda f: torch.add(f.e.mean(), f.e.sum(), alpha=0.25),
        [("mean", 1, 12), ("sum", 0.25, 1)],
    ),
    "weight penalty": (lambda f: f.e.mean() + 0.1 * f.s.square(), [("mean", 1, 12), ("parameter", 0.1, 1)]),
    "learned factor": (
        lambda f: torch.exp(-f.s) * f.e.mean() + f.s,
        [("mean", 0.60653066, 12), ("parameter", 1, 1)],
    ),
    "root of a mean": (lambda f: f.e.mean().sqrt(), [("nonlinear", 1, 1)]),
    "product of two means": (lambda f: f.e.mean() * f.z.mean(), [("nonlinear", 1, 1)]),
    "quotient of two sums": (lambda f: f.e.sum() / f.z.sum(), [("nonlinear", 1, 1)]),
    "largest": (lambda f: f.e.max(), [("nonlinear", 1, 1)]),
    "weighted sum as a product of vectors": (lambda f: f.e[:, 0] @ f.m[:, 0] / 4, [("quotient", 1, 4)]),
    "in another precision": (lambda f: f.e.half().float().mean().double() / 2, [("mean", 1, 24)]),
    "shape (1,)": (lambda f: f.e.mean().view(1) / 2, [("mean", 1, 24)]),
    "without NaN": (lambda f: f.e.mean().nan_to_num(), [("mean", 1, 12)]),
    "linear_cross_entropy": (
        lambda f: ft.linear_cross_entropy(f.z, torch.eye(3, device=f.z.device), f.y),
        [("mean", 1, 3)],
    ),
    "linear_cross_entropy, class weights": (
        lambda f: ft.linear_cross_entropy(
            f.z, torch.eye(3, device=f.z.device), f.y, class_weights=torch.full((3,), 0.5, device=f.z.device)
        ),
        [("mean", 1, 1.5)],
    ),
    "linear_cross_entropy, sum / 8": (
        lambda f: ft.linear_cross_entropy(f.z, torch.eye(3, device=f.z.device), f.y, reduction="sum") / 8,
        [("quotient", 1, 8)],
    ),
    "linear_kl_divergence": (lambda f: divergence(f), [("mean", 1, 4)]),
    "linear_kl_divergence, masked": (lambda f: divergence(f, mask=f.m[:, 1] > 0), [("mean", 1, 1)]),
    "no graph": (lambda f: f.e.detach().mean(), []),
}


def divergence(f: Fields, **settings: Any) -> Tensor:
    eye = torch.eye(3, device=f.z.device)
    return ft.loss.linear_kl_divergence(f.z, eye, f.m, eye, **settings)


@pytest.mark.parametrize("name", LOSSES)
def test_terms_coefficients_and_normalizers(name):
    make, expected = LOSSES[name]
    terms = read_normalizers(make(fields())).terms
    assert [term.kind for term in terms] == [kind for kind, _, _ in expected]
    numbers = [(float(term.coefficient), float(term.normalizer)) for term in terms]
    assert numbers == [pytest.approx(row[1:]) for row in expected]


@pytest.mark.parametrize("name", LOSSES)
def test_the_structure_does_not_depend_on_the_number_of_samples(name):
    if name == "per pixel":
        pytest.skip("it is reshaped to two images")
    make, _ = LOSSES[name]
    structures = {read_normalizers(make(fields(size))).structure for size in (2, 4, 7)}
    assert len(structures) == 1


@pytest.mark.parametrize("name", ["mean", "mse", "masked sum / sum of the mask", "class weights", "picked by a mask"])
def test_a_single_sample_has_the_same_structure_and_its_own_normalizer(name):
    """A mean over a vector of one sample is a mean rather than a scalar."""

    def make(size: int) -> Any:
        f = fields(size)
        f.y[-1] = 0
        return read_normalizers(LOSSES[name][0](f))

    one, many = make(1), make(4)
    assert one.structure == many.structure
    assert float(one.terms[0].normalizer) < float(many.terms[0].normalizer)


def test_a_mean_over_a_vector_of_one_sample_is_a_mean():
    f = fields(1)
    (term,) = read_normalizers(f.e[:, 0].mean()).terms
    assert (term.kind, term.normalizer) == ("mean", 1)


# Losses that are computed by the same operations on scalars; all others differ from each other.
EQUIVALENT = [
    {"cross_entropy", "class weights", "other ignored label"},
    {"mean", "mean over all axes by name", "l1", "picked by a mask", "mean of means", "without NaN"},
    {"kl_div, batchmean", "masked sum / sum of the mask", "sum / len(z)"},
    {"in another precision", "shape (1,)"},
    {
        "linear_cross_entropy",
        "linear_cross_entropy, class weights",
        "linear_kl_divergence",
        "linear_kl_divergence, masked",
    },
]


def test_other_losses_have_other_structures():
    found: dict[tuple[str, ...], set[str]] = {}
    for name, (make, _) in LOSSES.items():
        found.setdefault(read_normalizers(make(fields())).structure, set()).add(name)
    assert [names for names in found.values() if len(names) > 1] == EQUIVALENT


def test_normalizers_print_as_a_table():
    shown = str(read_normalizers(LOSSES["coefficients"][0](fields())))
    rows = [line.split() for line in shown.splitlines() if line.strip(" ─")]
    assert rows == [
        ["term", "coefficient", "normalizer", "reduction"],
        ["mean", "2", "3", "NllLoss"],
        ["mean", "-1", "48", "Mean"],
    ]


def test_reordered_sums_have_the_same_terms():
    f = fields()
    one, other = f.e.mean() + f.z.sum() / 4, f.z.sum() / 4 + f.e.mean()
    terms = [[(t.kind, float(t.normalizer)) for t in read_normalizers(loss).terms] for loss in (one, other)]
    assert terms[0] == terms[1][::-1]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.square() / x.numel()


def test_wrappers_of_ddp_around_outputs_are_skipped():
    """Each output is tested separately, since the others are not terms of its loss."""

    class Replica:
        _ddp_sink_clone = True

    replica, x = Replica(), torch.ones(3, 2, requires_grad=True)
    mean, quotient = _DDPSink.apply(weakref.ref(replica), x.mean(), x.sum() / 7)
    assert [(term.kind, term.normalizer) for term in read_normalizers(mean).terms] == [("mean", 6)]
    assert [(term.kind, term.normalizer) for term in read_normalizers(quotient).terms] == [("quotient", 7)]


def test_a_custom_autograd_function_is_opaque():
    own, mean = read_normalizers(Cubed.apply(fields().z) / 2 + fields().e.mean()).terms
    assert (own.kind, own.name, mean.kind) == ("opaque", "Cubed", "mean")


def test_a_compiled_loss_is_opaque():
    torch._dynamo.reset()
    f = fields()
    compiled = torch.compile(lambda z: z.square().mean(), backend="aot_eager")
    (term,) = read_normalizers(compiled(f.z)).terms
    assert term.kind == "opaque"


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.seen.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", LOSSES)
def test_reading_computes_nothing(name):
    loss = LOSSES[name][0](fields())
    with Operations() as operations:
        read_normalizers(loss)
    assert set(operations.seen) <= {"aten.detach.default"}


def test_reading_works_inside_a_dispatch_mode():
    """Examples are ``FlopCounterMode`` and memory trackers, which reject Python numbers in a graph."""
    net, batch = torch.nn.Linear(5, 3), (torch.randn(6, 5), torch.tensor([0, 1, -100, 2, 0, 1]))
    with FlopCounterMode(display=False):
        loss = ft.accumulate_gradients(lambda b: 2 * F.cross_entropy(net(b[0]), b[1]), batch, 3)
    assert float(loss) == pytest.approx(2 * F.cross_entropy(net(batch[0]), batch[1]).item())


def test_reading_does_not_wait_for_a_device():
    """Tensors on `meta` have no values, so reading one raises an error."""
    f = fields(device="meta")
    for name in ("cross_entropy", "class weights", "masked sum / sum of the mask", "learned factor", "weight penalty"):
        terms = read_normalizers(LOSSES[name][0](f)).terms
        assert [term.kind for term in terms] == [kind for kind, _, _ in LOSSES[name][1]]
        assert all(isinstance(term.normalizer, Tensor | float | int) for term in terms)


def test_a_normalizer_stays_on_its_device():
    (term,) = read_normalizers(LOSSES["cross_entropy"][0](fields(device="meta"))).terms
    assert isinstance(term.normalizer, Tensor)
    assert term.normalizer.device.type == "meta"
    assert term.normalizer.shape == ()


def test_an_exponentially_large_graph_is_opaque():
    loss = fields().e.mean()
    for _ in range(40):
        loss = loss + loss
    terms = read_normalizers(loss).terms
    assert len(terms) < 200
    assert terms[-1].kind == "opaque"


def test_reading_does_not_change_the_graph():
    f = fields()
    loss = LOSSES["coefficients"][0](f)
    read_normalizers(loss)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        read_normalizers(loss)
