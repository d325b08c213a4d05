"""What is asked of a limit of memory, and what is said where nothing fits into it."""

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import explain


def check_limits(headroom: float, **memory_gib: float | None) -> None:
    """Refuse a limit that nothing fits into.

    Raises:
        ValueError: a memory that is not positive; a head-room that is no share below 1.
    """
    for name, value in memory_gib.items():
        if value is not None and not value > 0:
            raise ValueError(explain(f"{name}={value}", "nothing fits into that", "Give GiB above 0"))
    if not 0 <= headroom < 1:
        why = "it is the part of the memory that stays free"
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
    """The refusal where nothing fits.

    Args:
        nearest: what was looked at, and which of it comes nearest.
        states, activations, usable: bytes on a device.
        short: bytes that are missing on the device, and in the host's memory.
        host: whose memory that is.
        way_out: where activations are not the largest part.
    """
    lacks = [f"{gib(short[0])} GiB on each device"] if short[0] else []
    lacks += [f"{gib(short[1])} GiB of host memory {host}"] if short[1] else []
    takes = f"states {gib(states)} GiB and activations {gib(activations)} GiB of {gib(usable)} GiB usable"
    if activations > usable // 2:
        way_out = "Recompute activations (ActivationCheckpointing) or split the batch (MicroBatching)"
    return explain(f"{nearest} and lacks {' and '.join(lacks)}", takes, way_out)


def name_leaner_ways(leaner: list[str], precision: str, devices: int) -> str:
    """What takes less memory for states: the ``leaner``, a lower precision, more devices, fewer trained weights."""
    lower = ["precision='bf16-mixed'"] if precision == "32-true" else []
    return f"Use {', '.join([*leaner, *lower, f'more than {devices} devices'])}, or train adapters only (QLoRA)"


def gib(nbytes: int) -> str:
    """``nbytes`` in GiB, for people."""
    if not nbytes:
        return "0"
    size = nbytes / GIB
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"  # two digits of what is small, or it would be 0.00
