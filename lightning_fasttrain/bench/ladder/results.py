"""Results of a ladder: a row for each run, and the file that holds them."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.safe_load import local_path, read_json
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.planner.timing import Ratio
from lightning_fasttrain.technique import Exactness

# How a run is made, in plain JSON, so that a fresh process can make it:
#   callbacks: name of a callback of this package → its keyword arguments, of which {"EveryBlock": {"k": 2}} stands for
#              EveryBlock(k=2); or None, to take it away
#   trainer:   keyword arguments of L.Trainer
#   optimizer: keyword arguments of GPTModule that say which optimizer it has
#   loop:      how the loop around it behaves
State = dict[str, dict[str, Any]]


@dataclass
class Measured:
    """Measurements of one run; of a failed run, the error, and NaN for the values."""

    error: str | None = None
    step_ms: float = math.nan
    tokens_per_s: float = math.nan
    peak_mib: float = math.nan
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    disturbed_cores: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Row(Measured):
    """A rung with its measurements and its verdict.

    Times are those of the ladder's clock: of the processors on a CPU, of events on a GPU. Only ratios of two states
    that were run in turn are measured, so ``step_ms`` is that of the row it was ``compared`` with, times their ratio.
    ``plus_minus`` is the half-width of the interval that contains ``step_ms`` / naive's with a confidence of 95%,
    relative to it.

    Attributes:
        exactness: of the whole state.
        own_exactness: of the rung alone.
        carried: None while it is undecided.
        compared: name of the row that it was run in turn with.
        ratio: its time as a factor of that row's: lower end of the interval, estimate, upper end.
        turns_ms: ms per step of that row and of this one, in each turn; of naive, of naive alone.
        wall_ms: ms per step by the wall clock, the median of all turns.
    """

    name: str = ""
    title: str = ""
    exactness: Exactness = Exactness.EXACT
    own_exactness: Exactness = Exactness.EXACT
    host: str = "trainer"
    warmup: int = 1
    carried: bool | None = False
    verdict: str = ""
    state: State = field(default_factory=dict)
    compared: str = ""
    ratio: list[float] = field(default_factory=list)
    plus_minus: float = 0.0
    turns_ms: list[list[float]] = field(default_factory=list)
    wall_ms: float = math.nan
    max_loss_delta: float | None = None
    trainer_overhead: float | None = None
    alone: "Row | None" = None

    def set_ratio(self, ratio: Ratio, base: "Row") -> None:
        """Derive the time from that of another row, with which this one was run in turn."""
        self.ratio = [ratio.low, ratio.value, ratio.high]
        self.step_ms = base.step_ms * ratio.value
        self.plus_minus = math.hypot(base.plus_minus, ratio.plus_minus)

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """Read a row from its JSON, also from that of an earlier version."""
        # null: nothing was measured
        known = {key: value for key, value in _known_of(cls, values).items() if value is not None}
        for key in ("exactness", "own_exactness"):
            known[key] = Exactness(known[key])
        if "alone" in known:
            known["alone"] = cls.read(known["alone"])
        return cls(**{"carried": None, **known})  # null there: undecided


@dataclass
class Top:
    """The best rung by some criterion, compared with naive, with the code that makes it.

    ``plus_minus`` is that of ``speedup``, relative to it; ``again`` says that both are from turns with naive alone, at
    the end of the ladder, instead of from the product of the rungs' ratios.
    """

    name: str
    title: str
    exactness: Exactness
    max_loss_delta: float | None
    state: State
    step_ms: float
    peak_mib: float
    speedup: float
    memory_ratio: float
    code: str
    plus_minus: float = 0.0
    again: bool = False


@dataclass
class Skipped:
    """A rung that cannot be run on this machine, and the reason."""

    name: str
    title: str
    reason: str


@dataclass
class Climbed:
    """A complete ladder: the content of ``ladder.json``.

    Attributes:
        noise: ``time``: the median of the half-widths of the rungs' ratios; ``memory``: what is ignored.
        turns: the most turns of a comparison.
        clock: ``"processor"``, ``"device"``, or ``"wall"`` in the files of earlier versions.
        padded: two runs on texts of different lengths, the second with the padding cut off.
    """

    hardware: dict[str, Any]
    versions: dict[str, str]
    command: str
    date: str
    model: dict[str, Any]
    skipped: list[Skipped]
    noise: dict[str, float | None]
    turns: int = 0
    clock: str = "wall"
    rungs: list[Row] = field(default_factory=list)
    strong: Row | None = None
    bare_loop: Row | None = None
    padded: list[Row] = field(default_factory=list)
    tops: dict[str, Top | None] = field(default_factory=lambda: {"fastest": None, "leanest": None})
    interrupted: bool = False

    @property
    def baselines(self) -> list[Row]:
        """Runs that the rungs are compared with besides the naive loop."""
        return list(filter(None, (self.strong, self.bare_loop)))

    def write(self, path: Path) -> None:
        """Write the JSON atomically."""
        write_atomic(path, json.dumps(_to_json(asdict(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ladder from its file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not what :meth:`write` writes.
        """
        values = read_json(local_path(path))
        try:
            return cls._from_json(values)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"it does not hold the results of a ladder ({type(error).__name__}: {first_line(error)})"
            raise ValueError(explain(f"{path} cannot be read", why, "Run fasttrain ladder again")) from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> Self:
        rows = {name: Row.read(values[name]) for name in ("strong", "bare_loop") if values[name] is not None}
        tops = {name: _read_top(top) for name, top in values["tops"].items()}
        skipped = [Skipped(**one) for one in values["skipped"]]
        runs = {"rungs": list(map(Row.read, values["rungs"])), "padded": list(map(Row.read, values.get("padded", [])))}
        read = {**rows, **runs, "tops": tops, "skipped": skipped}
        return cls(**{**_known_of(cls, values), **read})


def _known_of(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of the dataclass ``kind``; files of earlier versions have others too."""
    names = set(map(attrgetter("name"), fields(kind)))
    return {name: value for name, value in values.items() if name in names}


def _read_top(values: Mapping[str, object] | None) -> Top | None:
    if values is None:
        return None
    return Top(**{**values, "exactness": Exactness(values["exactness"])})


def _to_json(value: object) -> Any:
    """Convert ``value`` to JSON's own types, with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.value if isinstance(value, Enum) else value
