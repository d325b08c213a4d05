"""One way to make a step: how many parts, what is recomputed, in which precision, and what else is switched on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_fasttrain import data, finetune, loss, model, optim
from lightning_fasttrain._technique import Exactness, Technique
from lightning_fasttrain.plan.budget.memory_budget import MemoryBudget


@dataclass(frozen=True)
class Switch:
    """What one word of a :class:`Choice` stands for.

    Attributes:
        make: a fresh technique.
        code: the Python that makes it.
        config: the same for LightningCLI.
        exactness: what it makes of a step.
        cost: by what a step's time is multiplied until it is measured.
    """

    make: Callable[[], Technique]
    code: str
    config: Mapping[str, Any]
    exactness: Exactness = Exactness.EXACT
    cost: float = 1.0


def _config(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_fasttrain.{name}", **({"init_args": arguments} if arguments else {})}


_SELECTIVE, _HALF = _config("SelectiveOps"), _config("EveryBlock", k=2)
_CHANGES = Exactness.CHANGES_TRAINING

# axis → word → what it stands for. The word "" is the plain step.
SWITCHES: dict[str, dict[str, Switch]] = {
    "adapter": {
        "lora": Switch(lambda: finetune.LoRA(rank=16), "ft.LoRA(rank=16)", _config("LoRA", rank=16), _CHANGES, 0.8),
        "qlora": Switch(lambda: finetune.QLoRA(rank=16), "ft.QLoRA(rank=16)", _config("QLoRA", rank=16), _CHANGES, 0.9),
    },
    "head": {
        "fused": Switch(lambda: loss.FusedLossHead(), "ft.FusedLossHead()", _config("FusedLossHead"), cost=1.05),
    },
    "recompute": {
        "selective": Switch(
            lambda: model.ActivationCheckpointing(model.SelectiveOps()),
            "ft.ActivationCheckpointing(ft.SelectiveOps())",
            _config("ActivationCheckpointing", policy=_SELECTIVE),
            cost=1.08,
        ),
        "half": Switch(
            lambda: model.ActivationCheckpointing(model.EveryBlock(2)),
            "ft.ActivationCheckpointing(ft.EveryBlock(2))",
            _config("ActivationCheckpointing", policy=_HALF),
            cost=1.16,
        ),
        "all": Switch(
            lambda: model.ActivationCheckpointing(),
            "ft.ActivationCheckpointing()",
            _config("ActivationCheckpointing"),
            cost=1.32,
        ),
    },
    "compile": {
        "blocks": Switch(
            lambda: model.CompileBlocks(), "ft.CompileBlocks()", _config("CompileBlocks"), Exactness.TOLERANCE, 0.8
        ),
    },
    "offload": {
        "activations": Switch(
            lambda: model.ActivationOffload(), "ft.ActivationOffload()", _config("ActivationOffload"), cost=1.4
        ),
    },
    "gradients": {
        "released": Switch(
            lambda: optim.EagerGradientRelease(), "ft.EagerGradientRelease()", _config("EagerGradientRelease")
        ),
        "in backward": Switch(
            lambda: optim.OptimizerInBackward(), "ft.OptimizerInBackward()", _config("OptimizerInBackward")
        ),
    },
    "loader": {
        "prefetched": Switch(
            lambda: data.DevicePrefetch(), "ft.DevicePrefetch()", _config("DevicePrefetch"), cost=0.98
        ),
    },
}

_TO, _GIB = "to ", " GiB"


def budget_word(gib: float) -> str:
    """The word of the axis ``recompute`` for just as much as keeps a step within a limit.

    Example:
        >>> budget_word(0.12345678)
        'to 0.123456 GiB'
    """
    return f"{_TO}{math.floor(gib * 1e6) / 1e6}{_GIB}"


def is_budget(word: str) -> bool:
    """Whether it is a :func:`budget_word`."""
    return word.startswith(_TO)


def switch_of(axis: str, word: str) -> Switch:
    """What a word of an axis stands for."""
    if not is_budget(word):
        return SWITCHES[axis][word]
    gib = float(word.removeprefix(_TO).removesuffix(_GIB))
    return Switch(
        lambda: model.ActivationCheckpointing(MemoryBudget(budget_gib=gib)),
        f"ft.ActivationCheckpointing(ft.MemoryBudget(budget_gib={gib}))",
        _config("ActivationCheckpointing", policy=_config("MemoryBudget", budget_gib=gib)),
    )


@dataclass(frozen=True)
class Choice:
    """A word for each axis of ``SWITCHES``, "" for the plain step, and two that are not switches.

    Attributes:
        parts: that each batch is run in.
        precision: of the Trainer.
    """

    parts: int = 1
    precision: str = "32-true"
    adapter: str = ""
    head: str = ""
    recompute: str = ""
    compile: str = ""
    offload: str = ""
    gradients: str = ""
    loader: str = ""

    @property
    def words(self) -> list[tuple[str, str]]:
        """(axis, word) wherever it is not the plain step, precision too."""
        found = [(axis, getattr(self, axis)) for axis in SWITCHES if getattr(self, axis)]
        return [*found, ("precision", self.precision)] if self.precision != "32-true" else found

    @property
    def switches(self) -> list[Switch]:
        """What is switched on, in the suite's order."""
        words = {field.name: getattr(self, field.name) for field in fields(self) if field.name in SWITCHES}
        return [switch_of(axis, words[axis]) for axis in SWITCHES if words[axis]]

    def techniques(self) -> list[Technique]:
        """Fresh ones."""
        made = [switch.make() for switch in self.switches]
        return [data.MicroBatching(self.parts), *made] if self.parts > 1 else made

    def code(self) -> list[str]:
        """The Python for each of :meth:`techniques`."""
        made = [switch.code for switch in self.switches]
        return [f"ft.MicroBatching({self.parts})", *made] if self.parts > 1 else made

    def configs(self) -> list[Mapping[str, Any]]:
        """For LightningCLI, each of :meth:`techniques`."""
        made = [switch.config for switch in self.switches]
        return [_config("MicroBatching", n=self.parts), *made] if self.parts > 1 else made

    def __str__(self) -> str:
        words = [getattr(self, axis) and f"{axis} {getattr(self, axis)}" for axis in SWITCHES]
        parts = f"{self.parts} parts" if self.parts > 1 else ""
        return ", ".join(filter(None, [self.precision, parts, *words]))
