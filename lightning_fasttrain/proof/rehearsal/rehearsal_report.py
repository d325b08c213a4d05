"""Results of a rehearsal, for users and for programs, and its error."""

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_fasttrain.core.messages import say


class RehearsalError(RuntimeError):
    """The run would have failed later, or would train differently: what, why, and the cheapest way out."""


@dataclass
class RehearsalReport:
    """Five lines, and the values in them.

    Attributes:
        lines: stage → its line: ``verify``, ``step``, ``checkpoint``, ``resume``, ``largest batch``.
        notes: what was left out, and why.
        verified: whether training with the techniques is the same; None if it was not checked.
        predicted_bytes: the peak of a step on this rank; None if it could not be predicted.
        step_s: seconds of an optimizer step, with all batches of its window.
        save_s: seconds of a save.
        checkpoint_bytes: size of one checkpoint on disk.
        kept: maximum number of checkpoints that the run will keep; None if it is unknown.
        resumed_exactly: whether the step after a load was the uninterrupted run's; None if none was compared.
        batches_seen: number of batches that were read to find the largest.
        seconds: total duration.
    """

    lines: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verified: bool | None = None
    predicted_bytes: int | None = None
    step_s: float | None = None
    save_s: float | None = None
    checkpoint_bytes: int | None = None
    kept: int | None = None
    resumed_exactly: bool | None = None
    batches_seen: int = 0
    seconds: float = 0.0

    def tell(self, stage: str, sentence: str) -> None:
        """Store the line of a stage, and log it at once, since a rehearsal may take a minute."""
        self.lines[stage] = sentence
        say("rehearsal, %s: %s", stage, sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{stage}: {sentence}" for stage, sentence in self.lines.items())
