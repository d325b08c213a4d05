"""The chunked divergence is torch's own of both logits, in value and in every gradient."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from lightning_fasttrain.loss import kl_divergence, linear_kl_divergence
from lightning_fasttrain.profiling import PeakMemory

TOKENS, DIM, THEIR_DIM, CLASSES = 37, 12, 20, 53


def product(hidden, weight, bias, softcap):
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain_of_logits(logits, theirs, *, temperature=1.0, mask=None, reduction="mean"):
    """Compute the divergence by torch's ``kl_div``, on all tokens at once."""
    q, p = F.log_softmax(logits / temperature, -1), F.softmax(theirs.detach() / temperature, -1)
    loss = temperature**2 * F.kl_div(q, p, reduction="none").sum(-1)
    mask = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask
    loss = torch.where(mask, loss, 0)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / mask.sum()}[reduction]


def plain(
    hidden, weight, theirs, their_weight, *, bias=None, teacher_bias=None, softcap=None, teacher_softcap=None, **options
):
    student = product(hidden, weight, bias, softcap)
    return plain_of_logits(student, product(theirs, their_weight, teacher_bias, teacher_softcap), **options)


def inputs(dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(3)
    shapes = [(TOKENS, DIM), (CLASSES, DIM), (CLASSES,), (TOKENS, THEIR_DIM), (CLASSES, THEIR_DIM), (CLASSES,)]
    made = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    hidden, weight, offset, theirs, their_weight, their_offset = made
    offsets = {"bias": offset, "teacher_bias": their_offset} if bias else {}
    return (hidden, weight, theirs, their_weight), offsets


MASK = torch.arange(TOKENS) % 5 != 0


def value_and_gradients(function, tensors, offsets, **options):
    loss = function(*tensors, **offsets, **options)
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    wanted = [*tensors[:2], *([offsets["bias"]] if offsets else [])]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream)]


@pytest.mark.parametrize(
    ("reduction", "temperature", "softcap", "masked", "bias"),
    list(itertools.product(["mean", "sum", "none"], [1.0, 2.5], [None, 3.0], [True, False], [True, False])),
)
@pytest.mark.parametrize("chunk", [1, 8, None])
def test_value_and_gradients_in_float64(reduction, temperature, softcap, masked, bias, chunk):
    tensors, offsets = inputs(torch.float64, bias)
    options = {"reduction": reduction, "temperature": temperature, "mask": MASK if masked else None}
    options |= {"softcap": softcap, "teacher_softcap": None if softcap is None else 5.0}
    expected = value_and_gradients(plain, tensors, offsets, **options)
    seen = value_and_gradients(linear_kl_divergence, tensors, offsets, **options, chunk=chunk)
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_value_and_gradients_in_float32(reduction):
    tensors, offsets = inputs()
    expected = value_and_gradients(plain, tensors, offsets, reduction=reduction, temperature=2.0)
    seen = value_and_gradients(linear_kl_divergence, tensors, offsets, reduction=reduction, temperature=2.0, chunk=8)
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [5, None])
def test_value_and_gradients_of_existing_logits(reduction, chunk):
    logits, theirs = torch.randn(2, 3, 7, 11, dtype=torch.float64).requires_grad_().unbind()
    options = {"reduction": reduction, "temperature": 3.0, "mask": torch.rand(3, 7) > 0.3}
    a, b = plain_of_logits(logits, theirs, **options), kl_divergence(logits, theirs, **options, chunk=chunk)
    torch.testing.assert_close(b, a)
    upstream = torch.rand_like(a)
    for expected, seen in zip(*(torch.autograd.grad(x, logits, upstream) for x in (a, b)), strict=True):
        torch.testing.assert_close(seen, expected)
    before = logits.detach().clone()
    kl_divergence(logits.detach(), theirs.detach())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction):
    (hidden, weight, theirs, their_weight), offsets = inputs(torch.float64)

    def of_student(hidden, weight, bias):
        options = {"temperature": 1.5, "mask": MASK[:6], "softcap": 2.0, "chunk": 4, "reduction": reduction}
        return linear_kl_divergence(hidden, weight, theirs[:6], their_weight, bias=bias, **options)

    student = [x.detach().requires_grad_() for x in (hidden[:6], weight, offsets["bias"])]
    assert torch.autograd.gradcheck(of_student, student, fast_mode=True)


def test_the_teachers_tensors_get_no_gradient():
    tensors, offsets = inputs()
    linear_kl_divergence(*tensors, **offsets).backward()
    assert all(x.grad is not None for x in (*tensors[:2], offsets["bias"]))
    assert all(x.grad is None for x in (*tensors[2:], offsets["teacher_bias"]))


def test_it_is_zero_for_equal_logits_and_their_distance_at_high_temperature():
    logits, theirs = torch.randn(2, 6, 9, dtype=torch.float64)
    assert kl_divergence(logits, logits) == 0
    # T² KL converges to the variance over classes of the difference of logits, halved
    limit = 0.5 * (logits - theirs).var(-1, correction=0).mean()
    hot = kl_divergence(logits, theirs, temperature=1e4)
    torch.testing.assert_close(hot, limit, rtol=1e-3, atol=0)
    assert abs(kl_divergence(logits, theirs) - limit) > 1e-2


def test_two_classes_match_the_value_by_hand():
    logits, theirs = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.0]]).log()
    by_hand = 0.75 * torch.tensor(0.75 / 0.5).log() + 0.25 * torch.tensor(0.25 / 0.5).log()
    torch.testing.assert_close(kl_divergence(logits, theirs), by_hand)


def test_classes_with_logits_of_minus_infinity_are_supported():
    logits, theirs = torch.randn(2, 5, 9).requires_grad_().unbind()
    padded, theirs_padded = (F.pad(x, (0, 3), value=-torch.inf) for x in (logits, theirs))
    loss = kl_divergence(padded, theirs_padded)
    torch.testing.assert_close(loss, kl_divergence(logits, theirs))
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_masked_tokens_may_hold_any_value():
    logits, theirs = torch.randn(2, 4, 9)
    mask, broken = torch.tensor([True, False, True, False]), logits.clone()
    broken[~mask] = torch.nan
    broken.requires_grad_()
    loss = kl_divergence(broken, theirs, mask=mask)
    torch.testing.assert_close(loss.detach(), plain_of_logits(logits[mask], theirs[mask]))
    assert torch.autograd.grad(loss, broken)[0][~mask].abs().sum() == 0


def test_the_mean_of_no_tokens_is_nan_with_a_gradient_of_0():
    tensors, offsets = inputs()
    loss = linear_kl_divergence(*tensors, **offsets, mask=torch.zeros(TOKENS, dtype=torch.bool))
    assert loss.isnan()
    torch.where(torch.tensor(False), loss, 0).backward()  # like a micro-batch without targets, which is left out
    assert tensors[0].grad.abs().sum() == tensors[1].grad.abs().sum() == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bfloat16_is_as_accurate_as_the_plain_path(reduction):
    low, offsets = inputs(torch.bfloat16)
    high = [x.detach().double().requires_grad_() for x in low]
    high_offsets = {key: x.detach().double().requires_grad_() for key, x in offsets.items()}
    truth = value_and_gradients(plain, high, high_offsets, reduction=reduction)
    theirs = value_and_gradients(plain, low, offsets, reduction=reduction)
    ours = value_and_gradients(linear_kl_divergence, low, offsets, reduction=reduction, chunk=8)
    assert ours[0].dtype == torch.float32
    for t, a, b in zip(truth, theirs, ours, strict=True):
        assert (b.double() - t).norm() <= 1.2 * (a.double() - t).norm() + 1e-6  # both round at random


def test_under_autocast_it_rounds_like_the_linear_layer():
    tensors, offsets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = value_and_gradients(plain, tensors, offsets)
        seen = value_and_gradients(linear_kl_divergence, tensors, offsets, chunk=8)
    assert [x.dtype for x in seen] == [torch.float32] * 4
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-3)


def test_a_second_backward_over_a_retained_graph_works():
    tensors, offsets = inputs()
    loss = linear_kl_divergence(*tensors, **offsets)
    first = torch.autograd.grad(loss, tensors[1], retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, tensors[1])[0], first)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_and_forward_mode_derivatives_are_refused(reduction):
    (hidden, weight, theirs, their_weight), _ = inputs(bias=False)
    loss = linear_kl_divergence(hidden, weight, theirs, their_weight, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivative would be wrong.*F\.kl_div"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    logits, their_logits = hidden @ weight.T, theirs @ their_weight.T
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivative would be wrong.*F\.kl_div"):
        torch.autograd.grad(kl_divergence(logits, their_logits), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"under torch\.func's transforms.*F\.kl_div"):
        torch.func.vmap(kl_divergence)(logits.detach()[None], their_logits.detach()[None])


def test_the_head_or_the_body_may_be_frozen():
    (hidden, weight, theirs, their_weight), _ = inputs()
    for wanted, others in ((hidden, (hidden, weight.detach())), (weight, (hidden.detach(), weight))):
        a, b = (torch.autograd.grad(f(*others, theirs, their_weight), wanted)[0] for f in (plain, linear_kl_divergence))
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_works_inside_torch_compile(reduction):
    torch._dynamo.reset()
    tensors, offsets = inputs()
    options = {"reduction": reduction, "mask": MASK, "temperature": 2.0}
    expected = value_and_gradients(plain, tensors, offsets, **options)
    compiled = torch.compile(linear_kl_divergence, backend="aot_eager")
    seen = value_and_gradients(compiled, tensors, offsets, **options, chunk=16)
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


LOGITS = 4096 * 4096 * 4


def added(function, reduction="mean"):
    """Return the peak bytes of a step, in addition to the inputs and their gradients."""
    hidden, theirs = (torch.randn(4096, dim, requires_grad=True) for dim in (32, 48))
    weight, their_weight = (torch.randn(4096, dim, requires_grad=True) for dim in (32, 48))
    with PeakMemory("cpu", hidden, weight, theirs, their_weight) as peak:
        function(hidden, weight, theirs.detach(), their_weight.detach(), reduction=reduction).sum().backward()
    return peak.added_bytes - weight.nbytes - hidden.nbytes


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peak_memory_does_not_grow_with_vocabulary_times_tokens(reduction):
    assert added(plain) > 4 * LOGITS
    # The remaining memory is a few chunks of 128 tokens, and sums as large as the weight and the hidden states.
    assert added(linear_kl_divergence, reduction) < 0.2 * LOGITS


def test_for_existing_logits_only_the_gradient_is_allocated():
    logits, theirs = torch.randn(2, 4096, 4096)
    logits.requires_grad_()
    with PeakMemory("cpu", logits, theirs) as peak:
        kl_divergence(logits, theirs).backward()
    assert LOGITS <= peak.added_bytes < 1.4 * LOGITS


def test_without_gradients_none_are_computed():
    hidden, weight = torch.randn(512, 64), torch.randn(1024, 64, requires_grad=True)
    with torch.no_grad(), PeakMemory("cpu", hidden, weight) as peak:
        linear_kl_divergence(hidden, weight, hidden, weight, chunk=1)
    assert peak.added_bytes < weight.nbytes / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"weight": torch.zeros(DIM, CLASSES)}, "student: hidden .* one of them is transposed"),
        ({"teacher_weight": torch.zeros(CLASSES, 3)}, "teacher: hidden .* one of them is transposed"),
        ({"teacher_weight": torch.zeros(7, THEIR_DIM)}, "student has 53 classes, the teacher 7.*the same vocabulary"),
        ({"teacher_hidden": torch.zeros(3, THEIR_DIM)}, "37,.* tokens of the student, .3,. of the teacher"),
        ({"teacher_bias": torch.zeros(3)}, "teacher: bias .3,.: expected one value per class"),
        ({"softcap": -1.0}, "student: softcap=-1.0"),
        ({"softcap": float("nan")}, r"softcap=nan\): it must be a finite number"),
        ({"mask": torch.ones(TOKENS)}, "mask .* of torch.float32.*labels != -100"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "expected one boolean per token"),
        ({"reduction": "batchmean"}, "reduction='batchmean'"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_mismatched_arguments_are_refused(change, message):
    (hidden, weight, theirs, their_weight), _ = inputs()
    arguments = {"hidden": hidden, "weight": weight, "teacher_hidden": theirs, "teacher_weight": their_weight, **change}
    with pytest.raises(ValueError, match=message):
        linear_kl_divergence(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_works_on_cuda(dtype):
    tensors, _ = inputs(dtype, bias=False)
    tensors = [x.detach().cuda().requires_grad_() for x in tensors]
    expected = value_and_gradients(plain, tensors, {}, mask=MASK.cuda())
    seen = value_and_gradients(linear_kl_divergence, tensors, {}, mask=MASK.cuda(), chunk=8)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
