"""Accelerators by name: peak FLOP/s, memory, bandwidth and power, from their makers' data sheets."""

import re
from dataclasses import dataclass

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.messages import explain


@check_arguments
@dataclass(frozen=True)
class Accelerator:
    """Peak values of an accelerator. What a training reaches is a fraction of them.

    Args:
        name: for messages.
        flops: dense FLOP/s of matrix products in 16 bits with sums in float32; data sheets that state them with
            sparsity state twice as much.
        memory_gib: memory in GiB, which data sheets write as GB.
        bandwidth_gb_per_s: memory bandwidth in 1e9 bytes/s.
        watts: the most power that it takes; None where its maker does not state it.
        source: where these values are stated.
        dtype: of the products, ``"bfloat16"`` or ``"float16"``.

    Example:
        >>> mine = Accelerator("Mine", 1e14, 24, 900, 300, "its data sheet")
        >>> mine.dtype
        'bfloat16'
    """

    name: str
    flops: PositiveFloat
    memory_gib: PositiveFloat
    bandwidth_gb_per_s: PositiveFloat
    watts: PositiveFloat | None
    source: str
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("bfloat16", "float16"))


_SITE = "https://www.nvidia.com/en-us/data-center"
_H100 = f"NVIDIA H100 data sheet and architecture white paper, {_SITE}/h100/"
_A100 = f"NVIDIA A100 data sheet, {_SITE}/a100/"
_A10G = "AWS G5, https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
_V100 = f"NVIDIA V100 data sheet, SXM2, FP16, {_SITE}/tesla-v100/"
_T4 = f"NVIDIA T4 product brief, FP16, {_SITE}/tesla-t4/"
_MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"

_TABLE = (
    Accelerator(
        "B200", 2250e12, 180, 8000, 1000, f"NVIDIA DGX B200 data sheet, an eighth of it, dense, {_SITE}/dgx-b200/"
    ),
    Accelerator("H200", 989.4e12, 141, 4800, 700, f"NVIDIA H200 data sheet, SXM, dense, {_SITE}/h200/"),
    Accelerator("H100-SXM", 989.4e12, 80, 3350, 700, _H100),
    Accelerator("H100-PCIe", 756e12, 80, 2000, 350, _H100),
    Accelerator("A100-80GB-SXM", 312e12, 80, 2039, 400, _A100),
    Accelerator("A100-80GB-PCIe", 312e12, 80, 1935, 300, _A100),
    Accelerator("A100-40GB-SXM", 312e12, 40, 1555, 400, _A100),
    Accelerator("A100-40GB-PCIe", 312e12, 40, 1555, 250, _A100),
    Accelerator("L40S", 362.05e12, 48, 864, 350, f"NVIDIA L40S data sheet, {_SITE}/l40s/"),
    Accelerator("L40", 181.05e12, 48, 864, 300, f"NVIDIA L40 data sheet, {_SITE}/l40/"),
    Accelerator("L4", 121e12, 24, 300, 72, f"NVIDIA L4 data sheet, dense, {_SITE}/l4/"),
    Accelerator("A40", 149.7e12, 48, 696, 300, f"NVIDIA A40 data sheet, {_SITE}/a40/"),
    Accelerator("A10G", 70e12, 24, 600, None, _A10G),
    Accelerator("V100", 125e12, 32, 900, 300, _V100, "float16"),
    Accelerator("T4", 65e12, 16, 320, 70, _T4, "float16"),
    Accelerator("RTX4090", 165.2e12, 24, 1008, 450, "NVIDIA Ada GPU architecture white paper, sums in FP32"),
    Accelerator("RTX3090", 71e12, 24, 936, 350, "NVIDIA Ampere GA102 GPU architecture white paper, sums in FP32"),
    Accelerator("MI300X", 1307.4e12, 192, 5300, 750, _MI300X),
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in _TABLE}
"""Accelerators by name; each names the data sheet of its values."""
_SHORT = {"H100": "H100-SXM", "A100": "A100-80GB-SXM", "A100-80GB": "A100-80GB-SXM", "A100-40GB": "A100-40GB-SXM"}


@check_arguments
def find_accelerator(name: str) -> Accelerator:
    """Look up an accelerator; case, spaces, dashes and underscores do not matter. "H100" and "A100" are SXM modules.

    Raises:
        ValueError: it is not in the table; the message lists it.

    Example:
        >>> find_accelerator("h100 sxm").flops, find_accelerator("A100").memory_gib
        (989400000000000.0, 80)

    Source:
        Each one names its own.
    """
    known = {_plain(one): one for one in [*ACCELERATORS, *_SHORT]}
    found = known.get(_plain(name))
    if found is None:
        way_out = f"Use {', '.join(ACCELERATORS)}, or make an Accelerator of its data sheet"
        raise ValueError(explain(f"accelerator {name!r}", "it is not in the table", way_out))
    return ACCELERATORS[_SHORT.get(found, found)]


@check_arguments
def read_devices(text: str) -> tuple[Accelerator, PositiveInt]:
    """Parse an accelerator and a number of them.

    Raises:
        ValueError: the accelerator is not in the table, or the number is not a whole number of at least 1.

    Example:
        >>> accelerator, count = read_devices("H100:8")
        >>> accelerator.name, count
        ('H100-SXM', 8)

    Source:
        Ours.
    """
    name, _, number = text.partition(":")
    if number and not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(explain(f"{text!r}", f"{number!r} is not a number of devices", f"Write {name}:8"))
    return find_accelerator(name), int(number or 1)


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()
