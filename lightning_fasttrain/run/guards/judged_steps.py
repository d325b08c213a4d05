"""Count the steps of an optimizer that are judged to be bad, and end the run after several in a row."""

from collections.abc import Callable
from typing import Any, ClassVar

from lightning_fasttrain.core.checks import PositiveInt
from lightning_fasttrain.core.messages import explain, number_of, warn


class JudgedSteps:
    """Counts the steps that a subclass judges to be bad, warns of each, and raises after several in a row.

    Attributes:
        losses: what is known of the losses of the coming step: tensors and plain values.
        skipped: number of skipped steps so far.
        in_a_row: number of skipped steps since the last good one.
        skipped_now: whether a step was skipped since this was last set to False.
        where: describes the place of a bad step for the message; set by whoever knows it.
    """

    failure: ClassVar[type[Exception]]
    persists: ClassVar[str]  # why several bad steps in a row are an error
    way_out: ClassVar[str]

    def __init__(self, stop_after: PositiveInt) -> None:
        self.stop_after = stop_after
        self.losses: list[Any] = []
        self.skipped = self.in_a_row = 0
        self.skipped_now = False
        self.where: Callable[[], str] = lambda: ""

    def count_skip(self, what: str) -> None:
        """Count a bad step.

        Args:
            what: description of the bad step, for the message.
        """
        self.skipped += 1
        self.in_a_row += 1
        self.skipped_now = True
        what = f"a step was skipped{what}"
        if self.in_a_row < self.stop_after:
            warn(f"{what} (skipped so far: {self.skipped}).")
            return
        why = f"that is {number_of(self.in_a_row, 'step')} in a row, so {self.persists}"
        raise self.failure(explain(what, why, self.way_out))

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
