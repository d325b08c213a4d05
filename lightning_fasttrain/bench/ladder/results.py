"""Results of a ladder: a row for each run, and the file that holds them."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self

from lightning_fasttrain.core.files.atomic_write import write_atomic
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
    step_ms_all: list[float] = field(default_factory=list)
    tokens_per_s: float = math.nan
    peak_mib: float = math.nan
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    wall_s: float = math.nan
    disturbed_cores: float | None = None
    compile: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Row(Measured):
    """A rung with its measurements and its verdict.

    ``step_ms`` is the median of ``step_ms_of_runs``; ``exactness`` is that of the whole state, ``own_exactness`` that
    of the rung. ``carried`` is None while it is undecided.
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
    step_ms_of_runs: list[float] = field(default_factory=list)
    max_loss_delta: float | None = None
    trainer_overhead: float | None = None
    alone: "Row | None" = None

    def take(self, measured: Measured) -> None:
        """Copy the measurements of a run."""
        for one in fields(Measured):
            setattr(self, one.name, getattr(measured, one.name))

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Read a row from its JSON."""
        known = {key: value for key, value in values.items() if value is not None}  # null: nothing was measured
        for key in ("exactness", "own_exactness"):
            known[key] = Exactness(known[key])
        if "alone" in known:
            known["alone"] = cls.read(known["alone"])
        return cls(**{"carried": None, **known})  # null there: undecided


@dataclass
class Top:
    """The best rung by some criterion, compared with naive, with the code that makes it."""

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


@dataclass
class Skipped:
    """A rung that cannot be run on this machine, and the reason."""

    name: str
    title: str
    reason: str


@dataclass
class Climbed:
    """A complete ladder: the content of ``ladder.json``."""

    hardware: dict[str, Any]
    versions: dict[str, str]
    command: str
    date: str
    model: dict[str, Any]
    repeats: int
    skipped: list[Skipped]
    noise: dict[str, float | None]
    rungs: list[Row] = field(default_factory=list)
    strong: Row | None = None
    bare_loop: Row | None = None
    tops: dict[str, Top | None] = field(default_factory=lambda: {"fastest": None, "leanest": None})
    interrupted: bool = False

    @property
    def baselines(self) -> list[Row]:
        """Runs that the rungs are compared with besides the naive loop."""
        return [row for row in (self.strong, self.bare_loop) if row is not None]

    def write(self, path: Path) -> None:
        """Write the JSON atomically."""
        write_atomic(path, json.dumps(_to_json(asdict(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ladder from its file.

        Raises:
            OSError: there is no such file.
            ValueError, KeyError, TypeError: it is not what :meth:`write` writes.
        """
        values = json.loads(Path(path).read_text())
        rows = {name: Row.read(values[name]) for name in ("strong", "bare_loop") if values[name] is not None}
        tops = {name: _read_top(top) for name, top in values["tops"].items()}
        skipped = [Skipped(**one) for one in values["skipped"]]
        rungs = [Row.read(row) for row in values["rungs"]]
        return cls(**{**values, **rows, "tops": tops, "skipped": skipped, "rungs": rungs})


def _read_top(values: dict[str, Any] | None) -> Top | None:
    return None if values is None else Top(**{**values, "exactness": Exactness(values["exactness"])})


def _to_json(value: Any) -> Any:
    """Convert ``value`` to JSON's own types, with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.value if isinstance(value, Enum) else value
