"""The most that a device computes in a second."""

from math import inf

import torch

from lightning_fasttrain.core.device import device_clock


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product: what a step could reach here at best.

    Measured, in some hundredths of a second, rather than looked up: what a data sheet promises for a device depends on
    its clock, its power limit and torch's settings for float32.

    Args:
        device: with room for three matrices of 4096 × 4096; on a CPU of 1024 × 1024.
        dtype: of the matrices.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.float32) > 1e8
        True

    Source:
        Ours.
    """
    # Large enough to keep a device busy, small enough for some hundredths of a second.
    side, rounds = (4096, 10) if device.type == "cuda" else (1024, 5)
    # Any numbers but equal ones, of which products take less power; drawn without moving the run's own generator on.
    one = torch.randn(side, side, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    fastest = inf
    for _ in range(rounds):
        began = device_clock(device)
        torch.mm(one, one)
        fastest = min(fastest, device_clock(device) - began)  # the first round also pays for loading kernels
    return 2 * side**3 / fastest  # [n, n] @ [n, n]: n³ products and as many sums


def dtype_of(precision: object) -> torch.dtype:
    """In which a Trainer of that precision multiplies.

    Example:
        >>> dtype_of("bf16-mixed"), dtype_of("16-true"), dtype_of("32-true")
        (torch.bfloat16, torch.float16, torch.float32)
    """
    name = str(precision)
    if name.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if name.startswith("16") else torch.float32
