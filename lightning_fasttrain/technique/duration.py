"""Parse lengths within a run: in steps, epochs, samples, tokens, or as a share of the run."""

import math
import re
from dataclasses import dataclass

from lightning_fasttrain.core.checks import NonNegativeFloat, check_arguments, one_of
from lightning_fasttrain.core.messages import explain

_UNITS = {
    "": "steps",
    **dict.fromkeys(("step", "steps"), "steps"),
    **dict.fromkeys(("ep", "epoch", "epochs"), "epochs"),
    **dict.fromkeys(("sample", "samples"), "samples"),
    **dict.fromkeys(("tok", "token", "tokens"), "tokens"),
    "%": "share",
}
_WRITTEN = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*|%)")
LENGTHS = "Use steps as 1000, or '2ep', '50_000 samples', '1e9tok', '5%'"


@check_arguments
@dataclass(frozen=True)
class Length:
    """A length within a run.

    Attributes:
        amount: how much; of a share, from 0 to 1.
        unit: ``"steps"`` (of the optimizer), ``"epochs"``, ``"samples"``, ``"tokens"`` or ``"share"`` (of the whole).

    Raises:
        ValueError: another unit.
    """

    amount: NonNegativeFloat
    unit: str

    def __post_init__(self) -> None:
        one_of("unit", self.unit, ("steps", "epochs", "samples", "tokens", "share"))

    @property
    def clock(self) -> str | None:
        """The unit that has to be counted: steps, samples or tokens; None for a share."""
        if self.unit == "share":
            return None
        return "steps" if self.unit == "epochs" else self.unit

    def __str__(self) -> str:
        return f"{100 * self.amount:.4g}% of the run" if self.unit == "share" else f"{self.amount:,.10g} {self.unit}"


def read_length(name: str, value: int | str | Length) -> Length:
    """Parse a length.

    Args:
        name: of the argument, for the error.
        value: a whole number of optimizer steps; or a string, a number with a unit: ``"2ep"``, ``"0.5 epochs"``,
            ``"50_000 samples"``, ``"1e9tok"``, ``"5%"``; without a unit, steps; or a :class:`Length`.

    Raises:
        ValueError: it is not understood, negative, or a part of a step, sample or token.

    Example:
        >>> read_length("warmup", "1e9tok"), read_length("warmup", "5%")
        (Length(amount=1000000000.0, unit='tokens'), Length(amount=0.05, unit='share'))
    """
    if isinstance(value, Length):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(explain(f"{name}={value!r}", "expected a length", LENGTHS))
    written = _WRITTEN.fullmatch(str(value).strip().lower())
    if written is None or written[2] not in _UNITS:
        raise ValueError(explain(f"{name}={value!r}", "this is not understood as a length", LENGTHS))
    amount, unit = float(written[1].replace("_", "").replace(",", "")), _UNITS[written[2]]
    if unit == "share":
        amount /= 100
        if amount > 1:
            raise ValueError(explain(f"{name}={value!r}", "a share is 100% at most", LENGTHS))
    elif not math.isfinite(amount) or (unit != "epochs" and amount != int(amount)):
        raise ValueError(explain(f"{name}={value!r}", f"{unit} are counted one by one", "Use a whole number"))
    return Length(amount, unit)
