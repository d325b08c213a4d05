"""What techniques change about a predicted step: what the loop does, and what is not counted."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fasttrain._messages import explain
from lightning_fasttrain._technique import Technique
from lightning_fasttrain.data import DevicePrefetch, MicroBatching, TokenWeightedAccumulation
from lightning_fasttrain.finetune import IA3, GradualUnfreezing, LoRA, PrefixTuning, PromptTuning, QLoRA, QuantizedBase
from lightning_fasttrain.loss import Distillation, FusedLossHead
from lightning_fasttrain.model import ActivationCheckpointing, ActivationOffload, CompileBlocks
from lightning_fasttrain.optim import EagerGradientRelease, FusedClipping, OptimizerInBackward, optimize_in_backward_
from lightning_fasttrain.plan.allocation_trace import AllocationTrace
from lightning_fasttrain.plan.memory_budget import MemoryBudget
from lightning_fasttrain.run import (
    AtomicCheckpoints,
    ExactResume,
    HangWatch,
    MatmulPrecision,
    MemoryMeter,
    MemoryTimeline,
    Preemption,
    StepMeter,
)

# Techniques that operate on the model in a way that cannot be predicted: which bound that leaves, and why.
LEFT_OUT: dict[type[Technique], str] = {
    CompileBlocks: "compiled code fuses operations, so this is an upper bound",
    ActivationOffload: "what waits in host memory is counted as if it stayed, so this is an upper bound",
    Distillation: "the teacher and its loss are not counted, so this is a lower bound",
    GradualUnfreezing: "everything trains, as it does in the end, so this is an upper bound",
}
NOT_APPLIED = tuple(LEFT_OUT)
# Those that take no memory of a step, that act on the model alone, or that are seen in `find_habits`. Of a stranger's
# class, only what its apply() does to the model is seen.
_KNOWN = (
    *(
        ActivationCheckpointing,
        FusedLossHead,
        FusedClipping,
        QuantizedBase,
        QLoRA,
        LoRA,
        IA3,
        PromptTuning,
        PrefixTuning,
    ),
    *(MicroBatching, TokenWeightedAccumulation, EagerGradientRelease, OptimizerInBackward, DevicePrefetch),
    *(MatmulPrecision, MemoryMeter, MemoryTimeline, StepMeter, HangWatch),
    *(AtomicCheckpoints, ExactResume, Preemption),
)


@dataclass
class Habits:
    """What techniques that act in the loop change about a step's memory."""

    parts: Callable[[Any], Sequence[Any]] | None = None
    window: int = 1
    releases: bool = False
    prefetches: bool = False


def find_habits(techniques: Sequence[Technique], optimizer: Optimizer) -> Habits:
    habits = Habits()
    for technique in techniques:
        match technique:
            case MicroBatching():
                habits.parts = lambda batch, t=technique: t.split(batch, t.n) if t.n > 1 else [batch]
            case TokenWeightedAccumulation():
                habits.window = max(technique.schedule.values())
            case EagerGradientRelease():
                habits.releases = True
            case DevicePrefetch():
                habits.prefetches = True
            case OptimizerInBackward():
                optimize_in_backward_(optimizer, clip_norm=technique.clip_norm)
    return habits


def as_trained(technique: Technique, precision: str, on_cuda: bool) -> Technique:
    """A technique that asks the Trainer for its precision is told, since there is none."""
    base = technique.base if isinstance(technique, QLoRA) else technique
    if isinstance(base, QuantizedBase) and base.compute_dtype == "auto" and base.kind != "int8":
        technique = copy.deepcopy(technique)
        base = technique.base if isinstance(technique, QLoRA) else technique
        base.compute_dtype = torch.bfloat16 if on_cuda or precision.startswith("bf16") else "auto"
    return technique


def refuse_measured(techniques: Sequence[Technique]) -> None:
    for technique in techniques:
        if isinstance(technique, ActivationCheckpointing) and isinstance(technique.policy, MemoryBudget):
            raise ValueError(
                explain(
                    f"ActivationCheckpointing({technique.policy})",
                    "it measures the first steps to choose what to recompute, and keeps to its budget in any case",
                    "Predict with EveryBlock() or SelectiveOps()",
                )
            )


def notes_on(techniques: Sequence[Technique], trace: AllocationTrace) -> tuple[str, ...]:
    notes = []
    for technique in techniques:
        name = type(technique).__name__
        reasons = [why for kind, why in LEFT_OUT.items() if isinstance(technique, kind)]
        notes += [f"{name} is left out: {why}." for why in reasons]
        if not reasons and type(technique) not in _KNOWN:
            notes.append(f"{name} is not known here: what its hooks keep or free is not counted.")
    if any(isinstance(technique, MicroBatching) and technique.adaptive for technique in techniques):
        notes.append("MicroBatching('auto') is taken with the number of parts it begins with.")
    if trace.assumed:
        notes.append("The code reads numbers out of tensors (.item()): 1 was assumed for each.")
    return tuple(notes)
