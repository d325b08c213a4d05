"""Memory limits, what fits into them, and the error message for when nothing does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.choose.model_states import ModelStates


def check_headroom(headroom: float) -> None:
    """Refuse a headroom outside [0, 1)."""
    if not 0 <= headroom < 1:
        why = "it is the fraction of the memory that stays free"
        raise ValueError(explain(f"headroom={headroom}", why, "Use a number from 0 to below 1, such as 0.1"))


@dataclass(frozen=True)
class Fit:
    """Model states, and the memory that they lack.

    Args:
        states: bytes on one rank.
        short: bytes that are missing on the device.
        short_of_host: bytes of host memory that are missing, for each rank or on each node, as the limit is given.
    """

    states: ModelStates
    short: int
    short_of_host: int

    @property
    def fits(self) -> bool:
        return not (self.short or self.short_of_host)

    @property
    def over(self) -> str:
        """Missing memory in words; the device's first."""
        if self.short:
            return f"{gib(self.short)} GiB over"
        return f"{gib(self.short_of_host)} GiB over in host memory"


AnyFit = TypeVar("AnyFit", bound=Fit)


def find_nearest(fits: Sequence[AnyFit]) -> AnyFit:
    """Return what lacks least; if it lacks host memory only, whatever the others lack."""
    return min(fits, key=lambda fit: (fit.short > 0, fit.short + fit.short_of_host))


@dataclass(frozen=True)
class Limits:
    """Memory that training may use.

    Args:
        usable: bytes on each device, without headroom.
        activations: bytes of them that activations take.
        host: bytes of host memory; None means enough.
        ranks: number of ranks that share this host memory.
    """

    usable: int
    activations: int
    host: int | None
    ranks: int = 1

    def check(self, states: ModelStates) -> Fit:
        """Compare model states with the limits."""
        beyond_host = 0
        if self.host is not None:
            beyond_host = states.host * self.ranks - self.host
        return Fit(states, max(0, states.device + self.activations - self.usable), max(0, beyond_host))

    def describe(self, states: ModelStates) -> str:
        """Return how much of the device ``states`` and activations take, in words."""
        return f"{gib(states.device + self.activations)} GiB of {gib(self.usable)} GiB on each device"

    def explain_shortage(self, what: str, nearest: Fit, host: str, way_out: str) -> str:
        """Return the error message for when no candidate fits.

        Args:
            what: start of the sentence, with the candidate that is nearest to fitting.
            nearest: this candidate's shortage.
            host: whether host memory is per rank or per node, in words.
            way_out: advice for when activations are not the largest part.
        """
        lacks = []
        if nearest.short:
            lacks.append(f"{gib(nearest.short)} GiB on each device")
        if nearest.short_of_host:
            lacks.append(f"{gib(nearest.short_of_host)} GiB of host memory {host}")
        takes = f"states {gib(nearest.states.device)} GiB and activations {gib(self.activations)} GiB"
        if self.activations > self.usable // 2:
            way_out = "Recompute activations (ActivationCheckpointing) or split the batch (MicroBatching)"
        return explain(f"{what} and lacks {' and '.join(lacks)}", f"{takes} of {gib(self.usable)} GiB usable", way_out)


def name_leaner_ways(leaner: list[str], precision: str, devices: int) -> str:
    """Return advice on saving memory: ``leaner`` options, lower precision, more devices, or adapters only."""
    ways = list(leaner)
    if precision == "32-true":
        ways.append("precision='bf16-mixed'")
    return f"Use {', '.join([*ways, f'more than {devices} devices'])}, or train adapters only (QLoRA)"


def gib(nbytes: int) -> str:
    """Format ``nbytes`` as GiB."""
    if not nbytes:
        return "0"
    size = nbytes / GIB
    # Two significant digits for small values, which would otherwise read 0.00.
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
