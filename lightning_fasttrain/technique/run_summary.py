"""Print which techniques act on a run and how large it is at its start, and what they did and cost at its end."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, ClassVar, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.batch.padding_share import BATCHES, PaddingShare
from lightning_fasttrain.core.device import free_bytes, peak_host_bytes, synchronize
from lightning_fasttrain.core.host.late_parameters import refuse_late_optimizers
from lightning_fasttrain.core.messages import align, explain, format_bytes, number_of, say, warn
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique.declarations import Capability, Exactness, Surgery

_ROWS = 4  # for single techniques; the others share one, so that there are twelve lines at most
_WEAKEST_FIRST = ("changes_training", "tolerance", "exact")


class Reporting(Protocol):
    """The part of a technique that explanations and summaries ask, which stand below it."""

    surgery: ClassVar[Surgery | None]

    def describe_effect(self, model: nn.Module) -> str: ...

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
        batch = f"{number_of(self.samples_per_step, 'sample')}{tokens}"
        factors = [number_of(self.samples, "sample")]
        if self.ranks > 1:
            factors.insert(0, number_of(self.ranks, "rank"))
        if self.accumulation > 1:
            factors.append(number_of(self.accumulation, "accumulated batch", "accumulated batches"))
        return batch if len(factors) == 1 else f"{batch} = {' × '.join(factors)}"

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
        acting.append(Acting(type(one).__name__, repr(one), one.describe_effect(model), one.exactness_on(model).value))
    return tuple(acting)


def _ranks(trainer: L.Trainer) -> int:
    """Return the number of ranks that train on different batches; those that share a layer do not."""
    shares: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return shares["num_replicas"] if shares else trainer.world_size


KEY = "fasttrain/techniques"
_SUMMARY_ROWS = 11  # of the report at the end, below its title


class RunSummary:
    """Reports on a run from the hooks of one of its callbacks.

    The summary comes with the first batch, whose size it states; warnings after the first batch that had a loss; the
    outcome at the end. In between, no hook of it is left. It is silent where Lightning's model summary is, with
    ``Trainer(enable_model_summary=False)`` or ``Trainer(barebones=True)``, and where the level of the logger
    ``"lightning_fasttrain"`` is above INFO. The hyperparameter follows ``Trainer(enable_autolog_hparams=...)``.

    Args:
        holder: the callback.
        techniques: all that act.
        divides: whether Lightning divides the losses of an accumulation window.
    """

    def __init__(self, holder: L.Callback, techniques: Sequence[Reporting], divides: bool) -> None:
        self.holder, self.techniques = holder, techniques
        self._own_start: Callable[..., Any] | None = None
        self._own_end: Callable[..., Any] | None = None
        self._awaits_loss, self._awaits_missing_loss = True, divides
        self._explanation: Explanation | None = None
        self._padding: PaddingShare | None = None  # of the first batches, where the run is summed up
        self._idle: list[tuple[str, str]] = []
        self._begun = self._timed = (0.0, 0, 0)  # in the first batch, and after it

    def install(self) -> Undo:
        """Patch the hooks, and return a function that restores them."""
        undo, holder = ExitStack(), self.holder
        self._own_start = None if is_empty_hook(holder, "on_train_batch_start") else holder.on_train_batch_start
        self._own_end = None if is_empty_hook(holder, "on_train_batch_end") else holder.on_train_batch_end
        # Not on_train_start: the size of a step is that of its first batch.
        undo.callback(patch(holder, "on_train_batch_start", self._report_start))
        undo.callback(patch(holder, "on_train_batch_end", self._check_batch))
        undo.callback(patch(holder, "on_train_end", _in_turn(holder.on_train_end, self._report_end)))
        return undo.close

    def _report_start(self, trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int) -> None:
        self.holder.on_train_batch_start = self._own_start  # type: ignore[method-assign]  # None is never called
        refuse_late_optimizers(module, trainer.optimizers)
        self._begun = _progress(trainer)
        if trainer.is_global_zero and trainer.enable_autolog_hparams:
            # After Lightning's call with the user's own, since TensorBoard shows only the first call.
            for logger in trainer.loggers:
                logger.log_hyperparams({KEY: ", ".join(map(repr, self.techniques))})
        if trainer.is_global_zero and not _is_quiet(trainer):
            self._explanation = explain_run(trainer, module, self.techniques, batch)
            say("%s", self._explanation)
            self._padding = padding_of(self.techniques)
            if self._padding is not None:
                return self._count_padding(trainer, module, batch, batch_idx)
        if self._own_start is not None:
            self._own_start(trainer, module, batch, batch_idx)

    def _count_padding(self, trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int) -> None:
        """Count the padding of the first few batches, and then suggest cutting it off where there is much."""
        assert self._padding is not None
        self.holder.on_train_batch_start = self._count_padding
        self._padding.add(batch)
        if self._padding.batches == BATCHES:
            self.holder.on_train_batch_start = self._own_start  # type: ignore[method-assign]  # None is never called
            if text := str(self._padding):
                say("%s", text)
        if self._own_start is not None:
            self._own_start(trainer, module, batch, batch_idx)

    def _check_batch(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._own_end is not None:
            self._own_end(trainer, module, outputs, batch, batch_idx)
        # With manual optimization a step may return nothing and train all the same.
        if self._awaits_loss and (outputs or not module.automatic_optimization):
            self._awaits_loss = False
            self._warn_of_idle(module)
        if self._awaits_missing_loss and not outputs:
            self._awaits_missing_loss = False
            _warn_of_missing_loss(batch_idx, trainer.accumulate_grad_batches)
        if not self._awaits_loss and not self._awaits_missing_loss:
            self.holder.on_train_batch_end = self._own_end  # type: ignore[method-assign]  # None is never called

    def _warn_of_idle(self, module: L.LightningModule) -> None:
        """Warn of techniques that did nothing in the first batch."""
        # Time counts from the second batch on, since the first one compiles and warms up.
        self._timed = _progress(module.trainer)
        for technique in self.techniques:
            reason = technique.why_idle(module)
            if reason is not None:
                name, (why, way_out) = type(technique).__name__, reason
                self._idle.append((name, f"did nothing: {why}"))
                warn(explain(f"{name} did nothing in the first batch", why, way_out))

    def _report_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._explanation is None:
            return
        device = trainer.strategy.root_device
        synchronize(device)  # work that is still queued takes time, too
        outcomes = [(type(one).__name__, text) for one in self.techniques if (text := one.outcome(module))]
        steps = number_of(trainer.global_step - self._begun[2], "step")
        rows = [*self._figures(trainer), *self._idle, *outcomes]
        say("%s", align(steps, rows[:_SUMMARY_ROWS]))

    def _figures(self, trainer: L.Trainer) -> Iterator[tuple[str, str]]:
        assert self._explanation is not None
        measured: dict[str, float] = {}
        for technique in self.techniques:
            measured.update(technique.measurements())
        if self._begun[2]:
            yield "Resumed", f"at step {self._begun[2]:,}" + (f" from {trainer.ckpt_path}" if trainer.ckpt_path else "")
        now = _progress(trainer)
        steps = now[2] - self._begun[2]
        step_s = measured.get("step_ms", 0.0) / 1e3
        if step_s:
            yield "Time", f"{step_s * 1e3:,.4g} ms/step (median)"
        elif steps and now[1] > self._timed[1] > 0:
            # Lightning counts a batch before its hook, hence + 1.
            batches_a_step = (now[1] - self._begun[1] + 1) / steps
            step_s = (now[0] - self._timed[0]) / (now[1] - self._timed[1]) * batches_a_step
            yield "Time", f"{step_s * 1e3:,.4g} ms/step, including data loading and callbacks"
        tokens_per_s = measured.get("tokens_per_s", 0.0)
        if tokens_per_s:
            yield "Throughput", f"{tokens_per_s:,.0f} tokens/s on each rank"
        elif step_s and self._explanation.tokens:
            about = self._explanation.tokens_per_step / step_s
            yield "Throughput", f"about {about:,.0f} tokens/s, assuming batches like the first"
        if "mfu" in measured:
            yield "MFU", f"{measured['mfu']:.0%} of what a matrix product reaches on this device"
        yield from _peak(trainer.strategy.root_device, measured)


def _warn_of_missing_loss(batch_idx: int, factor: int) -> None:
    what = f"training_step returned None for batch {batch_idx}, with accumulate_grad_batches={factor}"
    why = f"Lightning still divides by {factor}, so the gradient of this step is too small"
    warn(explain(what, why, f"Use TokenWeightedAccumulation({factor}) instead of accumulate_grad_batches"))


def _peak(device: torch.device, measured: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if "peak_bytes" in measured:
        yield "Peak memory", format_bytes(measured["peak_bytes"])
    elif device.type == "cuda":
        yield "Peak memory", f"{format_bytes(torch.cuda.max_memory_allocated(device))} in this process so far"
    elif (nbytes := peak_host_bytes()) is not None:
        yield "Peak memory", f"{format_bytes(nbytes)} of this process, with Python and its libraries"


def _is_quiet(trainer: L.Trainer) -> bool:
    return not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)


def _progress(trainer: L.Trainer) -> tuple[float, int, int]:
    """Return the clock in seconds, the number of batches that have begun, and the number of optimizer steps."""
    return perf_counter(), trainer.fit_loop.epoch_loop.batch_progress.total.ready, trainer.global_step


def _in_turn(own: Callable[..., object], then: Callable[[Any, Any], None]) -> Callable[..., None]:
    def call_both(trainer: L.Trainer, module: L.LightningModule) -> None:
        own(trainer, module)
        then(trainer, module)

    return call_both


def is_empty_hook(callback: L.Callback, hook: str) -> bool:
    """Whether a callback does nothing in a hook."""
    return getattr(type(callback), hook) is getattr(L.Callback, hook) and hook not in vars(callback)


_HOOKS_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def leave_out_empty_hooks(callback: L.Callback, undo: ExitStack) -> None:
    """Hide the hooks of a step that do nothing: Lightning calls each, which costs more than most of them do."""
    for hook in _HOOKS_OF_A_STEP:
        if is_empty_hook(callback, hook):
            undo.callback(patch(callback, hook, None))
