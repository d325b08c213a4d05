"""Results of a verification, for users and for programs."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_fasttrain.core.messages import Report, ReportTable
from lightning_fasttrain.proof.verification.compare_records import Distance
from lightning_fasttrain.proof.verification.first_difference import FirstDifference
from lightning_fasttrain.technique import Exactness

QUANTITIES = ("loss", "gradients", "updates", "buffers", "evaluation", "validation")


@dataclass(frozen=True)
class Verified:
    """Some techniques together, in one precision, compared with the step without them.

    Attributes:
        techniques: the techniques as they were constructed.
        precision: precision of both sides.
        exactness: their combined promise: ``"exact"``, ``"tolerance"`` or ``"changes_training"``.
        distances: one for each quantity that could be compared.
        failure: error that the steps raised; "" if none.
        problems: side effects, or missing effects, beyond the values of a step; a sentence each.
        did_nothing: whether none of them had any effect, so that equality means nothing.
    """

    techniques: tuple[str, ...]
    precision: str
    exactness: str
    distances: tuple[Distance, ...] = ()
    failure: str = ""
    problems: tuple[str, ...] = ()
    did_nothing: bool = False

    @property
    def ok(self) -> bool:
        """Whether the techniques keep their promise."""
        return not (self.failure or self.problems or self.did_nothing or self.is_another_training)

    @property
    def is_another_training(self) -> bool:
        """Whether a value of the steps is farther off than allowed."""
        return not all(distance.is_within for distance in self.distances)

    @property
    def bitwise(self) -> bool:
        """Whether all compared quantities are bitwise equal."""
        return bool(self.distances) and all(distance.bitwise for distance in self.distances)

    @property
    def verdict(self) -> str:
        if self.failure:
            return self.failure
        if self.did_nothing:
            return "did nothing"
        if self.is_another_training:
            return "different training"
        if self.problems:
            return "the same steps, other side effects"
        if self.exactness == Exactness.EXACT.value:
            return "the same"
        if self.exactness == Exactness.TOLERANCE.value:
            return "within its bound"
        return "changes training, as declared"


_IN_DOUBLE_PRECISION = (
    "Verify with precision='64-true' too: what is the same there differs by rounding, which BatchNorm over few samples "
    "makes larger than that of the plain step."
)


@dataclass(frozen=True)
class Verification(Report):
    """Whether a model's training with techniques is the same as without them; print it for a table.

    Attributes:
        model: class of the model.
        rows: all techniques together first; then each alone, if together they are not the same.
        problems: reasons why the result is wrong or meaningless; a sentence each.
        notes: assumptions, omissions and observations.
        begins: the first module or weight that differs by more than the model's own rounding.
    """

    model: str
    rows: tuple[Verified, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    begins: FirstDifference | None = None

    @property
    def ok(self) -> bool:
        """Whether every technique keeps its promise, and the comparison is meaningful."""
        return not self.problems and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        """Return :attr:`ok`, so that ``assert ft.verify(...)`` works as expected."""
        return self.ok

    @property
    def guilty(self) -> tuple[str, ...]:
        """The techniques that do not keep their promise when they act alone."""
        alone = [row.techniques[0] for row in self.rows if len(row.techniques) == 1 and not row.ok]
        # Each is listed once, although it was run in several precisions.
        return tuple(dict.fromkeys(alone))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        # asdict includes only fields, and these are properties.
        rows = [{**asdict(row), "verdict": row.verdict, "ok": row.ok, "bitwise": row.bitwise} for row in self.rows]
        return {**asdict(self), "rows": rows, "guilty": self.guilty, "ok": self.ok}

    def as_table(self) -> ReportTable:
        """Build the table with the relative error of each quantity and its limit."""
        wrong = filter(None, (self.begins, *self.problems))
        said = [*(f"✗ {one}" for one in wrong), *self.notes]
        differ = {row.precision for row in self.rows if row.is_another_training}
        if "32-true" in differ and not any(row.precision == "64-true" for row in self.rows):
            said.append(_IN_DOUBLE_PRECISION)
        measured = {distance.what for row in self.rows for distance in row.distances}
        shown = [what for what in QUANTITIES if what in measured]
        columns = {**dict.fromkeys(("techniques", "precision", *shown), "name"), "verdict": "prose"}
        table = ReportTable(f"{self.model}: {'verified' if self.ok else 'not verified'}", columns, said)
        for row in self.rows:
            found = {distance.what: _describe(distance, row.exactness) for distance in row.distances}
            cells = [found.get(what, "") for what in shown]
            table.add("\n".join(row.techniques) or "none", row.precision, *cells, row.verdict)
        return table


def _describe(distance: Distance, exactness: str) -> str:
    words = "bitwise"
    if not distance.bitwise:
        words = f"{distance.error:.0e}"
        if exactness != Exactness.CHANGES_TRAINING.value:
            words += f" of {distance.allowed:.0e}"
    if distance.where and not distance.is_within:
        words += f"\n{distance.where}"
    return words
