"""What a rehearsal found out, for people and for programs; and the one error that it may end in."""

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_fasttrain.core.messages import say


class RehearsalError(RuntimeError):
    """The run would have failed later, or would not be what it seems: what, why, and the cheapest way out."""


@dataclass
class RehearsalReport:
    """Five lines, and the numbers in them.

    Attributes:
        lines: stage → what is said of it: ``verify``, ``step``, ``checkpoint``, ``resume``, ``largest batch``.
        notes: what was left out, and why.
        verified: whether techniques are the same training; None where it was not asked.
        predicted_bytes: the peak of a step on this rank; None where it could not be predicted.
        step_s: seconds of an optimizer step, all batches of its window.
        save_s: seconds of a save.
        checkpoint_bytes: of one checkpoint on disk.
        kept: how many checkpoints the run will keep at most; None if nobody can say.
        resumed_exactly: whether the step after a load was the uninterrupted run's; None where none was compared.
        batches_seen: how many were looked at for the largest.
        seconds: that all this took.
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
        """Keep the line of a stage, and say it now: a rehearsal may take a minute."""
        self.lines[stage] = sentence
        say("rehearsal, %s: %s", stage, sentence)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{stage}: {sentence}" for stage, sentence in self.lines.items())
