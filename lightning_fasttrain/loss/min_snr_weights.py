"""Weights of the losses of a diffusion model's timesteps, by their signal-to-noise ratio."""

from typing import Literal

import torch
from torch import Tensor

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain

Prediction = Literal["epsilon", "sample", "v_prediction"]


@check_arguments
def min_snr_weights(
    schedule: object, timesteps: Tensor, gamma: PositiveFloat = 5.0, prediction: Prediction | None = None
) -> Tensor:
    r"""Return the Min-SNR-γ weight of each sample's squared error in the training of a diffusion model.

    Timesteps with little noise have conflicting gradients and large weights in the usual losses. With the
    signal-to-noise ratio :math:`\mathrm{SNR} = \bar α / (1 - \bar α)` of a timestep, the weight is
    :math:`\min(\mathrm{SNR}, γ)` where the model predicts the image, :math:`\min(\mathrm{SNR}, γ) / \mathrm{SNR}`
    where it predicts the noise, and :math:`\min(\mathrm{SNR}, γ) / (\mathrm{SNR} + 1)` where it predicts the velocity
    :math:`\sqrt{\bar α} ε - \sqrt{1 - \bar α} x_0`. So the image's error has the same weight in all three. Multiply
    the mean squared error of each sample by it, before the mean over samples.

    A schedule with zero terminal SNR is supported: the last weight is the limit of the formula, which is 1 for the
    noise and 0 for image and velocity. No device is synchronized where the schedule is on that of the timesteps.

    Args:
        schedule: :math:`\bar α` of all timesteps, (T,), values from 0 to 1; or an object that has it as
            ``alphas_cumprod``, such as a scheduler of diffusers, whose ``config.prediction_type`` counts, too.
        timesteps: those of the samples, (N,) or any other shape, integers below T.
        gamma: γ, the SNR above which the weight does not grow.
        prediction: what the model predicts, in the terms of diffusers: ``"epsilon"`` (noise), ``"sample"`` (image) or
            ``"v_prediction"`` (velocity). By default that of the scheduler, and ``"epsilon"`` for a tensor.

    Returns:
        The weights, in the shape and on the device of ``timesteps``; float32, or float64 for a schedule in float64.

    Raises:
        TypeError: a schedule without ``alphas_cumprod``, or timesteps that are not integers.
        ValueError: a schedule that is not a vector of floating-point numbers, or an unknown prediction.

    Example:
        >>> alphas_cumprod = torch.tensor([0.99, 0.9, 0.5, 0.0])
        >>> min_snr_weights(alphas_cumprod, torch.tensor([0, 1, 2, 3]))
        tensor([0.0505, 0.5556, 1.0000, 1.0000])

    Source:
        Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy",
        https://arxiv.org/abs/2303.09556. The weight of 1 at an SNR of 0 is that of diffusers' examples for the noise.
        Checked against the formula, computed timestep by timestep in Python.
    """
    alphas = _read_alphas(schedule)
    if timesteps.is_floating_point() or timesteps.dtype is torch.bool:
        why = "expected integers, the indices of the schedule"
        raise TypeError(explain(f"timesteps of {timesteps.dtype}", why, "Convert them with .long()"))
    kind = prediction or _read_prediction(schedule)
    signal = alphas.to(timesteps.device)[timesteps.long()]
    noise = 1 - signal
    # SNR = signal / noise, and SNR + 1 = 1 / noise. Written so, an SNR of 0 or of infinity needs no case of its own.
    if kind == "epsilon":
        return (gamma * noise / signal).clamp(max=1)
    if kind == "sample":
        return (signal / noise).clamp(max=gamma)
    return torch.minimum(signal, gamma * noise)


def _read_alphas(schedule: object) -> Tensor:
    alphas = getattr(schedule, "alphas_cumprod", schedule)
    if not isinstance(alphas, Tensor):
        why = "expected a tensor, or an object with a tensor alphas_cumprod"
        way_out = "Pass the cumulative products of 1 - beta"
        raise TypeError(explain(f"schedule of type {type(schedule).__name__}", why, way_out))
    if alphas.ndim != 1 or not alphas.is_floating_point():
        what = f"schedule {tuple(alphas.shape)} of {alphas.dtype}"
        raise ValueError(explain(what, "expected one number per timestep, (T,)", "Pass torch.cumprod(1 - betas, 0)"))
    return alphas.to(torch.promote_types(alphas.dtype, torch.float32))


def _read_prediction(schedule: object) -> str:
    found = getattr(getattr(schedule, "config", None), "prediction_type", "epsilon")
    if found not in ("epsilon", "sample", "v_prediction"):
        why = "Min-SNR is defined for epsilon, sample and v_prediction"
        raise ValueError(explain(f"prediction_type={found!r}", why, "Pass prediction="))
    return found
