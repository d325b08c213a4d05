"""Measure the peak throughput of a device in FLOP/s."""

from math import inf

import torch

from lightning_fasttrain.core.device import device_clock


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product: the best that a step could reach on this device.

    Measured, in a few hundredths of a second, rather than looked up: the specified peak depends on the clock, the power
    limit and torch's settings for float32.

    Args:
        device: a device with free memory for three matrices of 4096 × 4096; on a CPU of 1024 × 1024.
        dtype: dtype of the matrices.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.float32) > 1e8
        True

    Source:
        Ours.
    """
    # Large enough to keep a device busy, small enough to take a few hundredths of a second.
    side, rounds = (4096, 10) if device.type == "cuda" else (1024, 5)
    # Distinct values, since products of equal values take less power; drawn without advancing the run's generator.
    one = torch.randn(side, side, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    fastest = inf
    for _ in range(rounds):
        began = device_clock(device)
        torch.mm(one, one)
        fastest = min(fastest, device_clock(device) - began)  # the first round also pays for loading kernels
    return 2 * side**3 / fastest  # [n, n] @ [n, n]: n³ products and as many sums


def dtype_of(precision: object) -> torch.dtype:
    """Return the dtype in which a Trainer of that precision multiplies matrices.

    Example:
        >>> dtype_of("bf16-mixed"), dtype_of("16-true"), dtype_of("32-true")
        (torch.bfloat16, torch.float16, torch.float32)
    """
    name = str(precision)
    if name.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if name.startswith("16") else torch.float32
