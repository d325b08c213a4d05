"""Describe which techniques act on a training run, and how large the run is, in at most twelve lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import lightning as L
import torch
from torch import nn

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.batch.padding_share import PaddingShare
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.core.messages import align, format_bytes, number_of
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.technique.declarations import Capability, Exactness, Surgery

_ROWS = 4  # for single techniques; the others share one, so that there are twelve lines at most
_WEAKEST_FIRST = ("changes_training", "tolerance", "exact")


class Reporting(Protocol):
    """The part of a technique that explanations and summaries ask, which stand below it."""

    surgery: ClassVar[Surgery | None]

    def took_hold(self, model: nn.Module) -> str: ...

    def does(self, capability: Capability) -> bool: ...

    def exactness_on(self, model: nn.Module) -> Exactness: ...

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None: ...

    def outcome(self, model: nn.Module) -> str: ...

    def measurements(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Acting:
    """A technique that acts on a run.

    Args:
        name: name of its class.
        made: the call that makes it.
        holds: what it acts on, in half a sentence; empty where ``made`` says enough.
        exactness: ``"exact"``, ``"tolerance"`` or ``"changes_training"``.
    """

    name: str
    made: str
    holds: str
    exactness: str


@dataclass(frozen=True)
class Explanation:
    """The techniques that act on a run, and its size; ``print`` shows at most twelve lines.

    Args:
        techniques: those that change the model, in the order in which they do, then the others as listed.
        trained: number of parameters that train.
        parameters: number of all parameters.
        precision: the Trainer's precision.
        strategy: name of the strategy's class.
        device: type of the device.
        ranks: number of ranks that train on different batches.
        samples: samples in the batch of one rank; 0 if unknown.
        tokens: tokens in the batch of one rank; 0 if unknown.
        accumulation: batches of a rank whose gradients are summed in a step.
        free_bytes: free memory of this rank's device.
        predicted_bytes: predicted peak of a step on one rank.
        why_unpredicted: why a prediction failed, in half a sentence; empty if none was tried.
        padding: a sentence on the padding of the batch; empty if there is little, or if a technique cuts it off.
    """

    techniques: tuple[Acting, ...]
    trained: int
    parameters: int
    precision: str
    strategy: str
    device: str
    ranks: int = 1
    samples: int = 0
    tokens: int = 0
    accumulation: int = 1
    free_bytes: int | None = None
    predicted_bytes: int | None = None
    why_unpredicted: str = ""
    padding: str = ""

    @property
    def exactness(self) -> str:
        """The weakest class of exactness among the techniques."""
        found = {one.exactness for one in self.techniques}
        return next((kind for kind in _WEAKEST_FIRST if kind in found), "exact")

    @property
    def samples_per_step(self) -> int:
        """Samples in the global batch: ranks × batch × accumulation."""
        return self.ranks * self.samples * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the global batch; 0 if unknown."""
        return self.ranks * self.tokens * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        derived = {name: getattr(self, name) for name in ("exactness", "samples_per_step", "tokens_per_step")}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        share = self.trained / max(self.parameters, 1)
        rows = [
            *self._rows_of_techniques(),
            ("Parameters", f"{self.trained:,} of {self.parameters:,} train ({share:.2%})"),
            ("Runs on", f"{self.device}, {self.strategy}, precision {self.precision}"),
            ("Global batch", self._describe_batch()),
            ("Padding", self.padding.rstrip(".")),
            ("Memory", self._describe_memory()),
            ("Exactness", self._describe_exactness()),
        ]
        title = number_of(len(self.techniques), "technique")
        return align(title, [row for row in rows if row[1]])

    def _rows_of_techniques(self) -> list[tuple[str, str]]:
        described = [(one.name, one.holds) for one in self.techniques if one.holds]
        others = [one.made for one in self.techniques if not one.holds]
        rest = [*[f"{name}: {holds}" for name, holds in described[_ROWS:]], *others]
        return [*described[:_ROWS], ("Also", "; ".join(rest))]

    def _describe_batch(self) -> str:
        if not self.samples:
            return ""
        tokens = f" ({self.tokens_per_step:,} tokens)" if self.tokens else ""
        factors = (
            number_of(self.ranks, "rank"),
            number_of(self.samples, "sample"),
            number_of(self.accumulation, "accumulated batch", "accumulated batches"),
        )
        return f"{number_of(self.samples_per_step, 'sample')}{tokens} = {' × '.join(factors)}"

    def _describe_memory(self) -> str:
        facts: list[str] = []
        if self.predicted_bytes is not None:
            facts.append(f"a step is predicted to take {format_bytes(self.predicted_bytes)}")
        if self.why_unpredicted:
            facts.append(f"not predicted, since {self.why_unpredicted}")
        if self.free_bytes is not None:
            facts.append(f"{format_bytes(self.free_bytes)} free")
        return "; ".join(facts)

    def _describe_exactness(self) -> str:
        kinds: list[str] = []
        for kind in _WEAKEST_FIRST[:-1]:
            names = [one.name for one in self.techniques if one.exactness == kind]
            if names:
                kinds.append(f"{kind.replace('_', ' ')} ({', '.join(names)})")
        return ", ".join(kinds) or "exact: the same training as without techniques"


def padding_of(techniques: Sequence[Reporting]) -> PaddingShare | None:
    """Return a counter of the padding of batches; None if a technique looks for it already."""
    trims = any(technique.does(Capability.TRIMS_PADDING) for technique in techniques)
    return None if trims else PaddingShare()


@runtime_checkable
class PredictsPeak(Protocol):
    """A callback that may know the peak memory of a step on its rank, in bytes, before the first batch."""

    @property
    def predicted_bytes(self) -> int | None: ...


def explain_run(trainer: L.Trainer, module: nn.Module, techniques: Sequence[Reporting], batch: object) -> Explanation:
    """Explain a run in progress from its model, without waiting for the device.

    A peak is stated where a callback has predicted it. Nothing is predicted here, since that would run the user's own
    ``training_step`` once more, with everything it prints, counts and sends elsewhere.
    """
    known = [callback.predicted_bytes for callback in trainer.callbacks if isinstance(callback, PredictsPeak)]
    # Another package's attribute of this name may mean something else.
    peaks = [nbytes for nbytes in known if isinstance(nbytes, int)]
    return explain_model(
        module,
        techniques,
        batch,
        trainer.strategy.root_device,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        ranks=_ranks(trainer),
        accumulation=trainer.accumulate_grad_batches,
        predicted_bytes=max(peaks, default=None),
    )


def explain_model(
    model: nn.Module, techniques: Sequence[Reporting], batch: object, device: torch.device, **settings: Any
) -> Explanation:
    """Explain what techniques act on in a model.

    Args:
        model: on which they operate already.
        techniques: all that act.
        batch: of one rank; None if it is unknown.
        device: on which the model trains.
        settings: the other fields of the :class:`Explanation`, which the Trainer decides.
    """
    samples, tokens = count_batch(batch)
    trained, parameters = count_parameters(model)
    return Explanation(
        techniques=describe_acting(techniques, model),
        trained=trained,
        parameters=parameters,
        device=device.type,
        samples=samples,
        tokens=tokens,
        free_bytes=free_bytes(device),
        **settings,
    )


def describe_acting(techniques: Sequence[Reporting], model: nn.Module) -> tuple[Acting, ...]:
    """Describe each technique on ``model``: in the order of surgery, then those that act in the loop alone."""
    # Sorting is stable, so those without surgery stay as they were listed.
    in_order = sorted(techniques, key=lambda technique: technique.surgery or math.inf)
    acting: list[Acting] = []
    for one in in_order:
        acting.append(Acting(type(one).__name__, repr(one), one.took_hold(model), one.exactness_on(model).value))
    return tuple(acting)


def _ranks(trainer: L.Trainer) -> int:
    """Return the number of ranks that train on different batches; those that share a layer do not."""
    shares: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return shares["num_replicas"] if shares else trainer.world_size
