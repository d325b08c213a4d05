"""What acts on a training run, and how large the run is, in at most ten lines."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import lightning as L
from torch import nn

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.core.messages import format_bytes, number_of
from lightning_fasttrain.core.modules.parameters import count_parameters

_LINES = 4  # for single techniques; the rest share one, so that all of it are ten at most
_WEAKEST_FIRST = ("changes_training", "tolerance", "exact")


class SaysWhatItHolds(Protocol):
    """What is asked of a technique here."""

    surgery: ClassVar[Any]

    def took_hold(self, model: nn.Module) -> str: ...

    def exactness_on(self, model: nn.Module) -> Any: ...


@dataclass(frozen=True)
class Acting:
    """One technique.

    Args:
        name: of its class.
        made: the call that makes it.
        holds: half a sentence on what it took hold of; "" where it has nothing to add to how it was made.
        exactness: ``"exact"``, ``"tolerance"`` or ``"changes_training"``.
    """

    name: str
    made: str
    holds: str
    exactness: str


@dataclass(frozen=True)
class Explanation:
    """What acts on a run, and how large it is; print it for at most ten lines.

    Args:
        techniques: those that operate on the model in the order in which they do, then the others as listed.
        trained: numbers that train.
        parameters: all numbers of the model.
        precision: as Lightning means it.
        strategy: its class.
        device: the kind of it.
        ranks: that train on different batches.
        samples: in one rank's batch; 0: not known. So are the following.
        tokens: in one rank's batch.
        accumulation: batches of a rank whose gradients are summed in a step.
        free_bytes: of this rank's device, beside what is in use.
        predicted_bytes: the peak of a step on one rank.
        why_unpredicted: half a sentence, if a prediction was tried.
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

    @property
    def exactness(self) -> str:
        """That of the whole run: the weakest of all."""
        found = {one.exactness for one in self.techniques}
        return next((kind for kind in _WEAKEST_FIRST if kind in found), "exact")

    @property
    def samples_per_step(self) -> int:
        """The global batch: ranks × batch × accumulation."""
        return self.ranks * self.samples * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """The same in tokens; 0 where batches hold none, or it is not known."""
        return self.ranks * self.tokens * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        derived = {name: getattr(self, name) for name in ("exactness", "samples_per_step", "tokens_per_step")}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        lines = [number_of(len(self.techniques), "technique"), *self._lines_of_techniques()]
        share = self.trained / max(self.parameters, 1)
        lines.append(
            f"{self.trained:,} of {self.parameters:,} parameters train ({share:.2%}), in {self.precision}, on "
            f"{self.device}, {self.strategy}"
        )
        lines += [self._batch_line(), self._memory_line(), self._exactness_line()]
        return "\n  ".join(line for line in lines if line)

    def _lines_of_techniques(self) -> list[str]:
        told = [f"{one.name}: {one.holds}" for one in self.techniques if one.holds]
        others = [one.made for one in self.techniques if not one.holds]
        rest = [*told[_LINES:], *others]
        return [*told[:_LINES], f"also {'; '.join(rest)}"] if rest else told

    def _batch_line(self) -> str:
        if not self.samples:
            return ""
        tokens = f", {self.tokens_per_step:,} tokens" if self.tokens else ""
        factors = (
            number_of(self.ranks, "rank"),
            number_of(self.samples, "sample"),
            number_of(self.accumulation, "batch", "batches"),
        )
        return f"a step is {number_of(self.samples_per_step, 'sample')}{tokens}: {' × '.join(factors)}"

    def _memory_line(self) -> str:
        parts: list[str] = []
        if self.predicted_bytes is not None:
            parts.append(f"a step is predicted to take {format_bytes(self.predicted_bytes)}")
        if self.why_unpredicted:
            parts.append(f"no prediction, since {self.why_unpredicted}")
        if self.free_bytes is not None:
            parts.append(f"{format_bytes(self.free_bytes)} are free")
        return f"memory: {'; '.join(parts)}" if parts else ""

    def _exactness_line(self) -> str:
        kinds: list[str] = []
        for kind in _WEAKEST_FIRST[:-1]:  # nobody is told which ones are exact
            names = [one.name for one in self.techniques if one.exactness == kind]
            if names:
                kinds.append(f"{kind.replace('_', ' ')} ({', '.join(names)})")
        return f"exactness: {', '.join(kinds) or 'exact, the same training as without them'}"


@runtime_checkable
class PredictsPeak(Protocol):
    """A callback that knows, before the first batch, the bytes that a step will take on its rank; or None."""

    @property
    def predicted_bytes(self) -> int | None: ...


def explain_run(
    trainer: L.Trainer, module: nn.Module, techniques: Sequence[SaysWhatItHolds], batch: Any
) -> Explanation:
    """What acts on a run that is going on, read from its model; nothing waits for the device.

    A peak is told where a callback has predicted it. It is never predicted unasked: that runs the user's own
    ``training_step`` once more, with all that it prints, counts and sends elsewhere.
    """
    known = [callback.predicted_bytes for callback in trainer.callbacks if isinstance(callback, PredictsPeak)]
    peaks = [nbytes for nbytes in known if isinstance(nbytes, int)]  # a stranger may mean something else
    samples, tokens = count_batch(batch)
    trained, parameters = count_parameters(module)
    device = trainer.strategy.root_device
    return Explanation(
        techniques=describe_acting(techniques, module),
        trained=trained,
        parameters=parameters,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        device=device.type,
        ranks=_ranks(trainer),
        samples=samples,
        tokens=tokens,
        accumulation=trainer.accumulate_grad_batches,
        free_bytes=free_bytes(device),
        predicted_bytes=max(peaks, default=None),
    )


def describe_acting(techniques: Sequence[SaysWhatItHolds], model: nn.Module) -> tuple[Acting, ...]:
    """Each of ``techniques`` on ``model``: in the order of surgery, then those that only act in the loop."""
    # Sorting is stable, so those without surgery stay as they were listed.
    in_order = sorted(techniques, key=lambda technique: technique.surgery or math.inf)
    acting: list[Acting] = []
    for one in in_order:
        acting.append(Acting(type(one).__name__, repr(one), one.took_hold(model), one.exactness_on(model).value))
    return tuple(acting)


def _ranks(trainer: L.Trainer) -> int:
    """Ranks that train on different batches, which those that share a layer do not."""
    shares: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return shares["num_replicas"] if shares else trainer.world_size
