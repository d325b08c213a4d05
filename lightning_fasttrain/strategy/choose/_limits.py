"""Checks of memory limits, and the error message for when nothing fits into them."""

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import explain


def check_limits(headroom: float, **memory_gib: float | None) -> None:
    """Refuse a memory limit that nothing can fit into.

    Raises:
        ValueError: a memory limit is not positive, or ``headroom`` is outside [0, 1).
    """
    for name, value in memory_gib.items():
        if value is not None and not value > 0:
            raise ValueError(explain(f"{name}={value}", "nothing fits into that", "Give a value above 0, in GiB"))
    if not 0 <= headroom < 1:
        why = "it is the fraction of the memory that stays free"
        raise ValueError(explain(f"headroom={headroom}", why, "Use a number from 0 to below 1, such as 0.1"))


def explain_shortage(
    nearest: str,
    states: int,
    short: tuple[int, int],
    host: str,
    activations: int,
    usable: int,
    way_out: str,
) -> str:
    """Return the error message for when no candidate fits.

    Args:
        nearest: start of the sentence, with the candidate that is nearest to fitting.
        states, activations, usable: bytes on a device.
        short: bytes that are missing on the device, and in host memory.
        host: whether host memory is per rank or per node, in words.
        way_out: advice for when activations are not the largest part.
    """
    lacks = [f"{gib(short[0])} GiB on each device"] if short[0] else []
    lacks += [f"{gib(short[1])} GiB of host memory {host}"] if short[1] else []
    takes = f"states {gib(states)} GiB and activations {gib(activations)} GiB of {gib(usable)} GiB usable"
    if activations > usable // 2:
        way_out = "Recompute activations (ActivationCheckpointing) or split the batch (MicroBatching)"
    return explain(f"{nearest} and lacks {' and '.join(lacks)}", takes, way_out)


def name_leaner_ways(leaner: list[str], precision: str, devices: int) -> str:
    """Return advice on saving memory: ``leaner`` options, lower precision, more devices, or adapters only."""
    lower = ["precision='bf16-mixed'"] if precision == "32-true" else []
    return f"Use {', '.join([*leaner, *lower, f'more than {devices} devices'])}, or train adapters only (QLoRA)"


def gib(nbytes: int) -> str:
    """Format ``nbytes`` as GiB."""
    if not nbytes:
        return "0"
    size = nbytes / GIB
    # Two significant digits for small values, which would otherwise read 0.00.
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
