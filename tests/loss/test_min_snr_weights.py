"""Min-SNR weights are those of the paper, in every parametrization and at both ends of a schedule."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fasttrain.loss import min_snr_weights

STEPS = 50
BETAS = torch.linspace(1e-4, 0.2, STEPS, dtype=torch.float64)
ALPHAS = torch.cumprod(1 - BETAS, 0)
KINDS = ["epsilon", "sample", "v_prediction"]


def slowly(alpha, gamma, kind):
    """The paper's formula for one timestep."""
    snr = alpha / (1 - alpha)
    return min(snr, gamma) / {"epsilon": snr, "sample": 1.0, "v_prediction": snr + 1}[kind]


def zero_terminal(alphas):
    """The schedule of Lin et al. 2024, whose last timestep is noise alone."""
    roots = alphas.sqrt()
    return ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])).square()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
def test_the_weights_are_those_of_the_paper(kind, gamma):
    expected = [slowly(alpha, gamma, kind) for alpha in ALPHAS.tolist()]
    seen = min_snr_weights(ALPHAS, torch.arange(STEPS), gamma, kind)
    torch.testing.assert_close(seen, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert len(set(expected)) > 5


@pytest.mark.parametrize(("kind", "last"), [("epsilon", 1.0), ("sample", 0.0), ("v_prediction", 0.0)])
def test_at_zero_terminal_snr_the_weight_is_the_limit(kind, last):
    alphas = zero_terminal(ALPHAS)
    assert alphas[-1] == 0
    seen = min_snr_weights(alphas, torch.arange(STEPS), prediction=kind)
    assert seen[-1] == last
    assert math.isclose(slowly(1e-12, 5.0, kind), last, abs_tol=1e-9)
    assert seen.isfinite().all()


@pytest.mark.parametrize(("kind", "weight"), [("epsilon", 0.0), ("sample", 5.0), ("v_prediction", 0.0)])
def test_without_noise_the_weight_is_the_limit(kind, weight):
    assert min_snr_weights(torch.tensor([1.0, 0.5]), torch.tensor([0]), prediction=kind) == weight


def test_the_error_of_the_image_has_the_same_weight_in_all_parametrizations():
    g = torch.Generator().manual_seed(0)
    image, noise, off = torch.randn(3, STEPS, generator=g, dtype=torch.float64)
    alpha, sigma = ALPHAS.sqrt(), (1 - ALPHAS).sqrt()
    noisy = alpha * image + sigma * noise
    guess = image + off  # of the image; each model states it in its own terms
    errors: dict[Any, torch.Tensor] = {
        "sample": guess - image,
        "epsilon": (noisy - alpha * guess) / sigma - noise,
        "v_prediction": (alpha * noisy - guess) / sigma - (alpha * noise - sigma * image),
    }
    weighted = []
    for kind, error in errors.items():
        weighted.append(error.square() * min_snr_weights(ALPHAS, torch.arange(STEPS), prediction=kind))
    torch.testing.assert_close(weighted[1], weighted[0])
    torch.testing.assert_close(weighted[2], weighted[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_says_what_the_model_predicts(kind):
    scheduler = SimpleNamespace(alphas_cumprod=ALPHAS, config=SimpleNamespace(prediction_type=kind))
    steps = torch.tensor([[3, 40], [0, 7]], dtype=torch.int32)
    assert torch.equal(min_snr_weights(scheduler, steps), min_snr_weights(ALPHAS, steps, prediction=kind))


def test_shape_and_dtype_follow_timesteps_and_schedule():
    steps = torch.tensor([[3, 40], [0, 7]])
    assert min_snr_weights(ALPHAS.half(), steps).dtype is torch.float32
    assert min_snr_weights(ALPHAS.float(), steps).shape == (2, 2)
    assert min_snr_weights(ALPHAS.to("meta"), steps.to("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"schedule": object()}, TypeError, "schedule of type object: expected a tensor"),
        ({"schedule": torch.ones(2, 2)}, ValueError, r"schedule \(2, 2\).*one number per timestep"),
        ({"timesteps": torch.ones(2)}, TypeError, r"timesteps of torch.float32.*\.long\(\)"),
        ({"gamma": 0.0}, ValueError, "gamma=0.0"),
        ({"prediction": "noise"}, ValueError, "prediction='noise'.*'epsilon'"),
        (
            {"schedule": SimpleNamespace(alphas_cumprod=ALPHAS, config=SimpleNamespace(prediction_type="flow"))},
            ValueError,
            "prediction_type='flow'.*Pass prediction=",
        ),
    ],
)
def test_wrong_schedules_and_timesteps_are_refused(change, kind, message):
    with pytest.raises(kind, match=message):
        min_snr_weights(**{"schedule": ALPHAS, "timesteps": torch.tensor([1]), **change})
