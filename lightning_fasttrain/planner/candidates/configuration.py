"""A choice of techniques: number of micro-batches, precision, and one word for each further decision."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_fasttrain import data, model
from lightning_fasttrain.model.memory_budget.memory_budget import MemoryBudget
from lightning_fasttrain.planner.catalogue import code_of, config_of, known_techniques
from lightning_fasttrain.technique import Setting, Technique


@dataclass(frozen=True)
class Switch:
    """Meaning of one word of a :class:`Choice`.

    Attributes:
        technique: class of the technique.
        setting: its arguments and its assumed cost.
    """

    technique: type[Technique]
    setting: Setting

    def make(self) -> Technique:
        """Return a new technique."""
        # Arguments are copied, since a policy may keep what it has measured on a model.
        return self.technique(**copy.deepcopy(dict(self.setting.arguments)))


@dataclass(frozen=True)
class Budget:
    """A value of the axis ``recompute``: just as much as keeps a step within a limit.

    Attributes:
        gib: the limit.
    """

    gib: float

    @classmethod
    def within(cls, gib: float) -> "Budget":
        """Return a budget with few digits, which is never above ``gib``.

        Example:
            >>> print(Budget.within(0.12345678))
            to 0.123456 GiB
        """
        return cls(math.floor(gib * 1e6) / 1e6)

    def __str__(self) -> str:
        return f"to {self.gib} GiB"


@dataclass(frozen=True)
class Choice:
    """A word for each axis, "" for the plain step, beside the number of micro-batches and the precision.

    Attributes:
        parts: number of micro-batches of each batch.
        precision: precision of the Trainer.
    """

    parts: int = 1
    precision: str = "32-true"
    adapter: str = ""
    head: str = ""
    recompute: str | Budget = ""
    compile: str = ""
    offload: str = ""
    gradients: str = ""
    loader: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Choice":
        """Return the choice whose fields were written as JSON."""
        recompute = values["recompute"]
        if not isinstance(recompute, str):
            recompute = Budget(**recompute)
        return cls(**{**values, "recompute": recompute})

    @property
    def has_budget(self) -> bool:
        """Whether blocks are recomputed within a budget, which measures the first steps."""
        return isinstance(self.recompute, Budget)

    @property
    def words(self) -> list[tuple[str, str | Budget]]:
        """(axis, word) of everything that differs from the plain step, precision included."""
        found = self._switched()
        if self.precision != "32-true":
            found.append(("precision", self.precision))
        return found

    def _switched(self) -> list[tuple[str, str | Budget]]:
        return [(axis, getattr(self, axis)) for axis in SWITCHES if getattr(self, axis)]

    def techniques(self) -> list[Technique]:
        """Return new techniques, micro-batching first."""
        made = [switch_of(*switched).make() for switched in self._switched()]
        if self.parts > 1:
            made.insert(0, data.MicroBatching(self.parts))
        return made

    def code(self) -> list[str]:
        """Return the Python code that makes each of :meth:`techniques`."""
        return list(map(code_of, self.techniques()))

    def configs(self) -> list[Mapping[str, Any]]:
        """Return the LightningCLI configuration of each of :meth:`techniques`."""
        return list(map(config_of, self.techniques()))

    def __str__(self) -> str:
        said = [self.precision]
        if self.parts > 1:
            said.append(f"{self.parts} parts")
        return ", ".join([*said, *(f"{axis} {word}" for axis, word in self._switched())])


def _find_switches() -> dict[str, dict[str, Switch]]:
    """Collect axis → word → its meaning, as declared by the techniques. The word "" is the plain step."""
    # Without parts and precision, which come first in Choice and are no switches.
    found: dict[str, dict[str, Switch]] = {one.name: {} for one in fields(Choice)[2:]}
    for technique in known_techniques():
        # An inherited setting would give its word to the subclass.
        for setting in vars(technique).get("worth_trying", ()):
            found[setting.axis][setting.word] = Switch(technique, setting)
    return found


SWITCHES = _find_switches()


def switch_of(axis: str, word: str | Budget) -> Switch:
    """Return the meaning of a word of an axis."""
    if isinstance(word, str):
        return SWITCHES[axis][word]
    setting = Setting(axis, str(word), {"policy": MemoryBudget(budget_gib=word.gib)})
    return Switch(model.ActivationCheckpointing, setting)
