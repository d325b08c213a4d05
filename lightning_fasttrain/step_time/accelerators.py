"""Accelerators by name, from their makers' data sheets; and the time, device hours and energy of a training on them."""

import re
from dataclasses import dataclass
from itertools import pairwise

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, PositiveShare, check_arguments, one_of
from lightning_fasttrain.core.messages import explain

PF_DAY = 1e15 * 86400  # FLOPs


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
        float32_flops: dense FLOP/s in float32, without TF32; None where it is not stated.
        link_gb_per_s: what it can send to its neighbours in a node, in 1e9 bytes/s, in one direction.
        fastest_product: the share of ``flops`` that the fastest product of large matrices has been measured to reach;
            0.8, which is usual, where it was not measured.

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
    float32_flops: PositiveFloat | None = None
    link_gb_per_s: PositiveFloat = 32  # PCIe 4.0 × 16
    fastest_product: PositiveShare = 0.8

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("bfloat16", "float16"))


_SITE = "https://www.nvidia.com/en-us/data-center"
_H100 = f"NVIDIA H100 data sheet and architecture white paper, {_SITE}/h100/"
_A100 = f"NVIDIA A100 data sheet, {_SITE}/a100/"
_A10G = "AWS G5, https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
_V100 = f"NVIDIA V100 data sheet, SXM2, FP16, {_SITE}/tesla-v100/"
_T4 = f"NVIDIA T4 product brief, FP16, {_SITE}/tesla-t4/"
_MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"

_B300 = (
    "Inside NVIDIA Blackwell Ultra, https://developer.nvidia.com/blog/"
    "inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era/; products: an eighth of NVIDIA HGX B300, dense"
)

_H200 = f"NVIDIA H200 data sheet, SXM, dense, {_SITE}/h200/"
_B200 = f"NVIDIA DGX B200 data sheet, an eighth of it, dense, {_SITE}/dgx-b200/"
_L40S = f"NVIDIA L40S data sheet, {_SITE}/l40s/"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, sums in FP32"
_ADA = "NVIDIA Ada GPU architecture white paper, sums in FP32"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper, sums in FP32"
_BF16, _FP16, _PCIE = "bfloat16", "float16", 32

# name, FLOP/s, GiB, 1e9 bytes/s, watts, source, dtype, FLOP/s in float32, 1e9 bytes/s to neighbours, fastest product
# The last in bf16, from https://github.com/stas00/ml-engineering, compute/accelerator (MAMF), torch 2.5 to 2.9.
_TABLE = (
    Accelerator("B300", 2250e12, 288, 8000, 1400, _B300, _BF16, None, 900, 0.786),
    Accelerator("B200", 2250e12, 180, 8000, 1000, _B200, _BF16, None, 900, 0.776),
    Accelerator("H200", 989.4e12, 141, 4800, 700, _H200, _BF16, 67e12, 450, 0.803),
    Accelerator("H100-SXM", 989.4e12, 80, 3350, 700, _H100, _BF16, 67e12, 450, 0.803),
    Accelerator("H100-PCIe", 756e12, 80, 2000, 350, _H100, _BF16, 51e12, 64),
    Accelerator("A100-80GB-SXM", 312e12, 80, 2039, 400, _A100, _BF16, 19.5e12, 300, 0.869),
    Accelerator("A100-80GB-PCIe", 312e12, 80, 1935, 300, _A100, _BF16, 19.5e12, _PCIE, 0.811),
    Accelerator("A100-40GB-SXM", 312e12, 40, 1555, 400, _A100, _BF16, 19.5e12, 300, 0.869),
    Accelerator("A100-40GB-PCIe", 312e12, 40, 1555, 250, _A100, _BF16, 19.5e12, _PCIE, 0.811),
    Accelerator("L40S", 362.05e12, 48, 864, 350, _L40S, _BF16, 91.6e12, _PCIE),
    Accelerator("L40", 181.05e12, 48, 864, 300, f"NVIDIA L40 data sheet, {_SITE}/l40/", _BF16, 90.5e12, _PCIE),
    Accelerator("L4", 121e12, 24, 300, 72, f"NVIDIA L4 data sheet, dense, {_SITE}/l4/", _BF16, 30.3e12, _PCIE),
    Accelerator("A40", 149.7e12, 48, 696, 300, f"NVIDIA A40 data sheet, {_SITE}/a40/", _BF16, 37.4e12, _PCIE),
    Accelerator("A10G", 70e12, 24, 600, None, _A10G),
    Accelerator("V100", 125e12, 32, 900, 300, _V100, _FP16, 15.7e12, 150),
    Accelerator("T4", 65e12, 16, 320, 70, _T4, _FP16, 8.1e12, 16),
    Accelerator("RTX5090", 209.5e12, 32, 1792, 575, _BLACKWELL, _BF16, 104.8e12, 64),
    Accelerator("RTX4090", 165.2e12, 24, 1008, 450, _ADA, _BF16, 82.6e12, _PCIE),
    Accelerator("RTX3090", 71e12, 24, 936, 350, _AMPERE, _BF16, 35.6e12, _PCIE),
    Accelerator("MI300X", 1307.4e12, 192, 5300, 750, _MI300X, _BF16, 163.4e12, 448, 0.514),
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


_VARIANTS = {"NVL", "MIG", "LAPTOP", "TI", "SUPER", "D"}  # of a GPU in the table, or parts of one, with other rates


def find_device(name: str) -> Accelerator | None:
    """Return the accelerator that torch calls so; None if it is not in the table.

    Example:
        >>> find_device("NVIDIA A100-SXM4-40GB").name, find_device("NVIDIA H100 PCIe").name, find_device("GTX 1080")
        ('A100-40GB-SXM', 'H100-PCIe', None)
    """
    words = re.split(r"[\s-]+", name.upper())
    words += [first + second for first, second in pairwise(words)]  # "RTX 4090"
    if _VARIANTS.intersection(words):
        return None
    if "PCIE" not in words:
        words.append("SXM")
    return next((one for one in _TABLE if set(one.name.upper().split("-")).issubset(words)), None)


@check_arguments
def read_devices(text: str) -> tuple[Accelerator, PositiveInt]:
    """Parse an accelerator and a number of them.

    Raises:
        ValueError: the accelerator is not in the table, or the number is not a whole number of at least 1.

    Example:
        >>> accelerator, count = read_devices("H100:8")
        >>> accelerator.name, count, read_devices("h100 x8")[1]
        ('H100-SXM', 8, 8)

    Source:
        Ours.
    """
    several = re.fullmatch(r"(.+)[x×*]\s*(\d+)", text)  # as people write it: H100x8
    name, _, number = text.partition(":") if several is None else (several[1], "", several[2])
    if number and not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(explain(f"{text!r}", f"{number!r} is not a number of devices", f"Write {name}:8"))
    return find_accelerator(name), int(number or 1)


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


@check_arguments
def pf_days(flops: PositiveFloat) -> float:
    """Return FLOPs in petaflop/s-days: 1e15 FLOP/s for a day, 8.64e19 FLOPs.

    Example:
        >>> round(pf_days(3.14e23))  # GPT-3
        3634

    Source:
        Brown et al. 2020 (GPT-3), appendix D, https://arxiv.org/abs/2005.14165.
    """
    return flops / PF_DAY


@check_arguments
def model_flops_utilization(
    tokens_per_s: PositiveFloat, flops_per_token: PositiveFloat, peak_flops: PositiveFloat, devices: PositiveInt = 1
) -> float:
    """Return the MFU: observed tokens per second over those that the peak of all devices would allow.

    Args:
        tokens_per_s: of all devices together.
        flops_per_token: model FLOPs, without recomputation, as of
            :func:`~lightning_fasttrain.estimate.palm_flops_per_token`.
        peak_flops: FLOP/s of one device, as of :func:`~lightning_fasttrain.estimate.find_accelerator`.
        devices: how many.

    Example:
        >>> from lightning_fasttrain.estimate import palm_flops_per_token
        >>> palm = palm_flops_per_token(540.35e9, layers=118, heads=48, head_width=256, context=2048)
        >>> f"{model_flops_utilization(238.3e3, palm, peak_flops=275e12, devices=6144):.1%}"
        '46.2%'

    Source:
        Chowdhery et al. 2022 (PaLM), section 4.1 and appendix B, https://arxiv.org/abs/2204.02311.
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices)


@check_arguments
def training_hours(
    flops: PositiveFloat, peak_flops: PositiveFloat, devices: PositiveInt = 1, mfu: PositiveShare = 0.4
) -> float:
    """Return the hours that a training takes, FLOPs / (peak FLOP/s · devices · MFU) / 3600.

    Args:
        flops: model FLOPs of the whole training.
        peak_flops: FLOP/s of one device.
        devices: how many.
        mfu: the fraction of the peak that is reached. Published for large language models: 21% (GPT-3) to 46%
            (PaLM) in table 3 of PaLM, 42% to 56% in table 5 of Korthikanti et al. 2022.

    Example:
        >>> hours = training_hours(5.76e23, peak_flops=989.4e12, devices=1024, mfu=0.4)
        >>> f"{hours / 24:.0f} days"
        '16 days'

    Source:
        Chowdhery et al. 2022 (PaLM), https://arxiv.org/abs/2204.02311, whose definition of MFU is solved for the time.
    """
    return flops / (peak_flops * devices * mfu) / 3600


@check_arguments
def energy_kwh(
    device_hours: PositiveFloat, watts: PositiveFloat, load: PositiveShare = 1.0, overhead: PositiveFloat = 1.0
) -> float:
    """Return the energy of the devices in kWh; an upper bound by default, as if they took their full power all along.

    Hosts, network and, unless ``overhead`` is given, cooling come on top.

    Args:
        device_hours: hours times devices.
        watts: the most power of one device.
        load: mean share of that power.
        overhead: power usage effectiveness (PUE) of the data center, of which hyperscale ones state about 1.1.

    Example:
        >>> energy_kwh(1000, watts=700, load=0.5)
        350.0

    Source:
        Patterson et al. 2021, section 2, https://arxiv.org/abs/2104.10350: hours · devices · mean power · PUE.
    """
    return device_hours * watts / 1000 * load * overhead
