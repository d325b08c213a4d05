"""Time, device hours and energy of a training, from its FLOPs."""

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, PositiveShare, check_arguments
from lightning_fasttrain.estimate.scaling_laws import PF_DAY


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
