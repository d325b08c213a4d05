"""Gradients summed over micro-batches equal those of the unsplit batch up to rounding."""

import itertools
from contextlib import contextmanager

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fasttrain import accumulate_gradients, accumulate_window
from lightning_fasttrain.micro_batching import count_targets
from tests.support.nets import TinyLM, concatenate, gradients, largest_difference, lm_batches


def gradient_of_whole(net, batch):
    net.zero_grad()
    loss = net.loss(batch)
    loss.backward()
    result = gradients(net)
    net.zero_grad()
    return result, loss.detach()


def random_batch(seed):
    """Draw rows, lengths and padding; one row in four has no targets."""
    g = torch.Generator().manual_seed(seed)
    size, length = (int(torch.randint(2, 9, (), generator=g)) for _ in range(2))
    (batch,) = lm_batches(1, size, length, seed)
    batch["labels"][torch.rand(size, generator=g) < 0.25] = -100
    batch["labels"][0, 0] = 1  # the whole batch holds at least one
    return batch


@pytest.mark.parametrize(("seed", "n"), list(zip(range(12), itertools.cycle([2, 3, 8]), strict=False)))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 1.6e-2)]
)
def test_accumulated_gradients_equal_the_full_batch(seed, n, dtype, tolerance):
    net, batch = TinyLM().to(dtype), random_batch(seed)
    if dtype is torch.float64:
        net.loss = lambda b: F.cross_entropy(net(b["input_ids"]).flatten(0, 1), b["labels"].flatten())
    expected, expected_loss = gradient_of_whole(net, batch)
    loss = accumulate_gradients(net.loss, batch, n)
    assert largest_difference(expected, gradients(net)) <= tolerance
    assert loss == pytest.approx(expected_loss.item(), rel=tolerance)


def test_negative_control_plain_averaging_gives_another_gradient():
    net, batch = TinyLM(), random_batch(1)
    expected, _ = gradient_of_whole(net, batch)
    accumulate_gradients(net.loss, batch, 2, count=lambda part: 1, check=False)
    assert largest_difference(expected, gradients(net)) > 1e-2


def test_count_may_be_samples_or_a_function():
    x, y = torch.randn(7, 3), torch.randn(7)
    weight = torch.rand(7)
    net = nn.Linear(3, 1)

    def plain(part):
        return (net(part[0]).squeeze(1) - part[1]).pow(2).mean()

    def weighted(part):
        return (part[2] * (net(part[0]).squeeze(1) - part[1]).pow(2)).sum() / part[2].sum()

    for step, count in ((plain, count_targets), (weighted, lambda part: part[2].sum())):
        expected = dict(
            zip(["weight", "bias"], torch.autograd.grad(step((x, y, weight)), list(net.parameters())), strict=True)
        )
        net.zero_grad()
        accumulate_gradients(step, (x, y, weight), 3, count=count)
        assert largest_difference(expected, gradients(net)) < 2e-6


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_counts_may_be_real_weights(as_tensor, size):
    x, weight, net = torch.randn(6, 3), size * torch.rand(6), nn.Linear(3, 1)

    def step(part):
        return (part[1] * net(part[0]).squeeze(1).pow(2)).sum() / part[1].sum()

    whole = torch.autograd.grad(step((x, weight)), list(net.parameters()))
    expected = dict(zip(["weight", "bias"], whole, strict=True))
    total = (lambda part: part[1].sum()) if as_tensor else (lambda part: float(part[1].sum()))
    accumulate_gradients(step, (x, weight), 3, count=total)
    assert largest_difference(expected, gradients(net)) < 2e-6


def test_a_micro_batch_without_targets_adds_neither_gradient_nor_nan():
    batch = lm_batches(1, size=4)[0]
    batch["labels"][2:] = -100
    net = TinyLM()
    expected, _ = gradient_of_whole(net, batch)
    loss = accumulate_gradients(net.loss, batch, 2)
    assert torch.isfinite(loss)
    assert largest_difference(expected, gradients(net)) < 2e-6


def test_a_window_equals_the_concatenated_batch():
    net, batches = TinyLM(), [*lm_batches(2, size=4), *lm_batches(1, size=3, seed=9)]
    expected, expected_loss = gradient_of_whole(net, concatenate(batches))
    for n in (1, 2):
        net.zero_grad()
        loss = accumulate_window(net.loss, batches, n)
        assert largest_difference(expected, gradients(net)) < 2e-6
        assert loss == pytest.approx(expected_loss.item(), rel=1e-6)


def test_gradients_are_synchronized_in_the_last_micro_batch_only():
    entered, calls = [], []

    @contextmanager
    def no_sync():
        entered.append(True)
        yield
        entered.pop()

    net = nn.Linear(2, 1)
    accumulate_gradients(
        lambda x: net(x).mean(), torch.ones(6, 2), 3, no_sync=no_sync,
        backward=lambda loss: calls.append(len(entered)) or loss.backward(),
    )  # fmt: skip
    assert calls == [1, 1, 0]


def test_gradients_are_added_to_existing_ones():
    net = nn.Linear(2, 1, bias=False)
    net.weight.grad = torch.ones(1, 2)
    accumulate_gradients(lambda x: net(x).mean(), torch.ones(4, 2), 2)
    assert torch.allclose(net.weight.grad, torch.full((1, 2), 2.0))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda x: None, TypeError, "the step returned NoneType"),
        (lambda x: {"value": x}, TypeError, "holds no loss tensor"),
        (lambda x: x, ValueError, r"loss of shape \(2,\).*Return loss.mean\(\)"),
    ],
)
def test_outputs_without_a_loss_are_refused(step, error, message):
    with pytest.raises(error, match=message):
        accumulate_gradients(step, torch.ones(4, requires_grad=True), 2)


def test_the_loss_is_found_in_an_output_object():
    from transformers.modeling_outputs import CausalLMOutput

    net = nn.Linear(2, 1)
    loss = accumulate_gradients(lambda x: CausalLMOutput(loss=net(x).mean()), torch.ones(4, 2), 2)
    assert loss.item() == pytest.approx(net(torch.ones(1, 2)).item(), rel=1e-6)


def test_hugging_face_causal_models_shift_labels_exactly():
    import transformers as tf

    from lightning_fasttrain.micro_batching import count_next_tokens

    config = tf.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=17, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    net = tf.GPT2LMHeadModel(config)
    batch = lm_batches(1, size=6, length=7)[0]
    net(**batch).loss.backward()
    expected = gradients(net)
    net.zero_grad()
    accumulate_gradients(lambda part: net(**part), batch, 3, count=count_next_tokens)
    assert largest_difference(expected, gradients(net)) < 2e-6


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_modules_are_tried_in_any_precision(precision):
    """They refuse a backward that is not Fabric's, except in float32."""
    fabric, batch, found = L.Fabric(accelerator="cpu", devices=1, precision=precision), lm_batches(1)[0], []
    fabric.launch()
    for parts in (1, 3):
        torch.manual_seed(0)
        model = fabric.setup_module(TinyLM())

        def step(part, model=model):
            logits = model(part["input_ids"]).float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"].flatten())

        if parts == 1:
            fabric.backward(step(batch))
        else:
            accumulate_gradients(step, batch, n=parts, backward=fabric.backward)
        found.append([parameter.grad.float() for parameter in model.parameters()])
    rounding = 1e-5 if precision == "32-true" else 0.02
    for whole, split in zip(*found, strict=True):
        assert torch.dist(whole, split) <= rounding * whole.norm()
