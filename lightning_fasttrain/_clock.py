"""Floor: the time, as of what a device has done."""

import time

import torch


def device_clock(device: torch.device) -> float:
    """Seconds, once ``device`` has done what it was given; only differences mean something. On CUDA this waits.

    Example:
        >>> began = device_clock(torch.device("cpu"))
        >>> device_clock(torch.device("cpu")) >= began
        True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
