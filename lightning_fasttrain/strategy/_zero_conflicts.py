"""Which callbacks cannot be used under ZeRO, and why."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_fasttrain._messages import explain


@dataclass(frozen=True)
class Unfit:
    """A callback, by class name, that ZeRO refuses: from a stage on, or only where gradients are offloaded."""

    name: str
    why: str
    way_out: str
    from_stage: int = 0
    offloaded: bool = False


_UNFREEZING = "parameters that thaw later are not in DeepSpeed's partitions, so they would never be updated"
_AVERAGING = "it reads whole parameters, and each rank holds a piece of them"

UNFIT: tuple[Unfit, ...] = (
    Unfit(
        "OptimizerInBackward",
        "gradients are reduced over ranks after they arrive, so there is nothing right to step with in backward",
        "Leave it out: ZeRO frees gradients itself",
    ),
    Unfit(
        "Distillation",
        "it reads the weight of the student's head outside of the head, where each rank holds a piece of it",
        "Use stage=2 or less",
        from_stage=3,
    ),
    Unfit(
        "EagerGradientRelease",
        "DeepSpeed keeps buffers for the gradients in host memory, and needs them in the next step",
        "Leave it out: the device holds no gradients then",
        offloaded=True,
    ),
    Unfit("GradualUnfreezing", _UNFREEZING, "Use DDP, or choose what trains before the run, with train="),
    Unfit("BackboneFinetuning", _UNFREEZING, "Use DDP, or choose what trains before the run"),
    Unfit("WeightAveraging", _AVERAGING, "Use stage=2 or less", from_stage=3),
    Unfit("EMAWeightAveraging", _AVERAGING, "Use stage=2 or less", from_stage=3),
)


def refuse_conflicts(callbacks: Iterable[Any], stage: int, offloaded: bool) -> None:
    """Refuse what is in :data:`UNFIT`.

    Raises:
        ValueError: what conflicts · why · the cheapest way out.
    """
    for callback in callbacks:
        for unfit in UNFIT:
            concerns = stage >= unfit.from_stage and offloaded >= unfit.offloaded
            if type(callback).__name__ == unfit.name and concerns:
                raise ValueError(explain(f"{unfit.name} under ZeRO stage {stage}", unfit.why, unfit.way_out))
