"""Training in pure bfloat16, against a float32 copy of the weights kept by hand."""

import io
import math

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.optim import LowPrecisionUpdates, optimizer_state_bytes
from tests.support.nets import TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights

BATCHES = lm_batches(5)
HOW = ("kahan", "stochastic")
MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-4),
    "lion": lambda p: ft.optim.Lion(p, lr=1e-4),
}


def gradients(count, *shape):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator).bfloat16() for _ in range(count)]


def run(parameter, optimizer, steps):
    for gradient in steps:
        parameter.grad = gradient.to(parameter.dtype, copy=True)
        optimizer.step()
    return parameter


def whole(parameter, optimizer):
    """Return the float32 value whose rounding the parameter is."""
    bits = parameter.detach().view(torch.int16).int() << 16
    return (bits + optimizer.state[parameter]["low_bits"].int()).view(torch.float32)


@pytest.mark.parametrize("name", MAKE)
def test_kahan_is_the_optimizer_on_a_float32_copy_bit_for_bit(name):
    start = torch.randn(9, 7).bfloat16()
    low, copy = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours = LowPrecisionUpdates(MAKE[name]([low]), "kahan")
    run(low, ours, gradients(20, 9, 7))
    run(copy, MAKE[name]([copy]), gradients(20, 9, 7))
    assert torch.equal(whole(low, ours), copy.detach())
    largest = copy.detach().abs().max()
    assert (low.detach().float() - copy.detach()).abs().max() <= largest / 256


@pytest.mark.parametrize("value", [1.0, -1.0, 1.00390625, -0.0, 3e38, 1e-39, float("inf"), float("nan")])
def test_every_value_survives_conversion_and_restoration(value):
    parameter = nn.Parameter(torch.tensor([value]).bfloat16())
    before = parameter.detach().clone()
    optimizer = LowPrecisionUpdates(torch.optim.SGD([parameter], lr=0.0), "kahan")
    run(parameter, optimizer, [torch.ones(1)])
    assert torch.equal(parameter.detach().view(torch.int16), before.view(torch.int16))


def drift(optimizer_of, steps=600):
    """Train a weight of one by -1e-4 per step, which bfloat16 rounds away near one."""
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    run(parameter, optimizer_of(parameter), [torch.ones(4096)] * steps)
    return parameter.float().mean().item()


def test_plain_bfloat16_stalls_and_ours_follows_float32():
    sgd = lambda p: torch.optim.SGD([p], lr=1e-4)  # noqa: E731
    assert drift(sgd) == 1.0
    for how in HOW:
        assert drift(lambda p, how=how: LowPrecisionUpdates(sgd(p), how)) == pytest.approx(0.94, abs=2e-3)


def test_stochastic_rounding_is_unbiased():
    """An update by a quarter of the last place changes a quarter of the weights."""
    parameter = nn.Parameter(torch.ones(40_000, dtype=torch.bfloat16))
    optimizer = LowPrecisionUpdates(torch.optim.SGD([parameter], lr=2.0**-9), "stochastic")
    run(parameter, optimizer, [-torch.ones(40_000)])  # the last place of one is 2⁻⁷
    moved = (parameter > 1).float().mean().item()
    assert moved == pytest.approx(0.25, abs=0.01)
    assert set(parameter.float().unique().tolist()) == {1.0, 1.0 + 2**-7}


@pytest.mark.parametrize("how", HOW)
def test_non_finite_values_stay_non_finite(how):
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32)

    class Sets(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].copy_(patterns.view(torch.float32))

    parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    LowPrecisionUpdates(Sets([parameter], lr=1.0), how).step()
    assert parameter.isnan().tolist() == [True] * 4 + [False] * 2
    assert parameter.tolist()[4:] == [math.inf, -math.inf]


def test_rounding_noise_is_independent_and_keeps_the_random_state():
    two = [nn.Parameter(torch.ones(500, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = LowPrecisionUpdates(torch.optim.SGD(two, lr=2.0**-9), "stochastic")
    before, seen = torch.get_rng_state(), []
    for _ in range(2):
        for parameter in two:
            parameter.data.fill_(1.0)
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        seen += [parameter.detach().clone() for parameter in two]
    assert torch.equal(before, torch.get_rng_state())
    assert len({tuple(values.tolist()) for values in seen}) == 4


class InLow(TinyLM):
    """The tiny language model, with an optimizer for pure bfloat16."""

    def __init__(self, name="adamw", updates="kahan", **more):
        super().__init__()
        self.recipe = ft.optim.NamedOptimizer(name, lr=0.01, updates=updates, **more)

    def configure_optimizers(self):
        return self.recipe(self)


@pytest.mark.parametrize("updates", HOW)
@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
def test_in_the_trainer_it_resumes_bit_for_bit(name, updates, tmp_path):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    settings = {"max_epochs": 2, "precision": "bf16-true"}
    whole = fit(InLow(name, updates), BATCHES, [Save()], **settings)
    resumed = InLow(name, updates)
    trainer(**settings).fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert whole.embed.weight.dtype is torch.bfloat16
    assert largest_difference(weights(whole), weights(resumed)) == 0
    plain = fit(InLow(name, None), BATCHES, **settings)
    assert largest_difference(weights(whole), weights(plain)) > 0


def test_optimizing_in_backward_and_offloading_give_the_same_result():
    settings = {"precision": "bf16-true"}
    plain = fit(InLow(), BATCHES, **settings)
    in_backward = fit(InLow(), BATCHES, [ft.OptimizerInBackward()], **settings)
    assert largest_difference(weights(plain), weights(in_backward)) == 0
    offloaded = fit(InLow(offload="cpu"), BATCHES, **settings)
    assert largest_difference(weights(plain), weights(offloaded)) == 0


@pytest.mark.parametrize("updates", HOW)
def test_its_state_is_as_large_as_predicted(updates):
    parameter = nn.Parameter(torch.ones(10, 10, dtype=torch.bfloat16))
    optimizer = LowPrecisionUpdates(MAKE["adamw"]([parameter]), updates)
    predicted = optimizer_state_bytes(optimizer)
    run(parameter, optimizer, gradients(1, 10, 10))
    held = sum(v.nbytes for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))
    assert held == predicted == 100 * (8 + 2 * (updates == "kahan")) + 4


def test_states_load_from_and_into_the_plain_optimizer():
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    plain = MAKE["adamw"]([parameter])
    run(parameter, plain, gradients(2, 5))
    ours = LowPrecisionUpdates(MAKE["adamw"]([parameter]), "kahan")
    ours.load_state_dict(plain.state_dict())
    run(parameter, ours, gradients(1, 5))
    assert ours.state[parameter]["step"] == 3
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    ours.load_state_dict(saved)
    assert ours.state[parameter]["exp_avg"].dtype is torch.float32
    assert ours.state[parameter]["low_bits"].dtype is torch.int16
    plain.load_state_dict(saved)
    run(parameter, plain, gradients(1, 5))
    assert plain.state[parameter]["step"] == 4


def test_unsupported_uses_are_refused():
    with pytest.raises(ValueError, match="updates='kahan' with parameters of torch.float32"):
        LowPrecisionUpdates(MAKE["sgd"]([nn.Parameter(torch.ones(1))]), "kahan")

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + 1

    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="Counts changed its group's seen in a step"):
        run(parameter, LowPrecisionUpdates(Counts([parameter]), "kahan"), gradients(1, 1))
