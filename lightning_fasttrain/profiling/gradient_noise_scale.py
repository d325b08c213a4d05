"""Measure the noise of gradients, and the batch size up to which more samples pay."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import count_batch, loss_in
from lightning_fasttrain.core.checks import PositiveInt, Share, check_arguments
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import accumulation_continues, is_time_to_log, log_to_all, replicates
from lightning_fasttrain.core.messages import explain, number_of
from lightning_fasttrain.core.modules.parameters import trained_parameters, values_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Capability, Conflict, Technique


@check_arguments
def split_gradient_noise(part_norms: Tensor, sizes: Tensor, whole_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the squared norm of the true gradient, and the trace of the covariance of samples, both without bias.

    A batch of B samples is the sum of parts of B_i samples, with the mean gradients g_i and the shares w_i = B_i / B::

        |G|² ≈ (|g|² - Σ w_i² |g_i|²) / (1 - Σ w_i²)        tr(Σ) ≈ B (|g|² - |G|²)

    Args:
        part_norms: squared norms |g_i|² of the parts' mean gradients, of shape (n,).
        sizes: samples B_i of each part, of shape (n,).
        whole_norm: squared norm |g|² of the mean gradient of the batch, a 0-dimensional tensor.

    Returns:
        |G|² and tr(Σ), on the device of the arguments. Either may be negative where noise prevails; their means over
        many steps are right. The simple noise scale is tr(Σ) / |G|², in samples.

    Example:
        >>> signal, noise = split_gradient_noise(torch.tensor([4.0, 4.0]), torch.tensor([8.0, 8.0]), torch.tensor(3.0))
        >>> float(signal), float(noise), float(noise / signal)
        (2.0, 16.0, 8.0)

    Source:
        McCandlish et al. 2018, appendix A.1, https://arxiv.org/abs/1812.06162, there for parts of equal size.
    """
    return _solve(_sums_of(part_norms, sizes), whole_norm)


def _sums_of(part_norms: Tensor, sizes: Tensor) -> Tensor:
    """Return Σ B_i² |g_i|², Σ B_i² and Σ B_i, which add up over ranks."""
    squares = sizes * sizes
    return torch.stack([(squares * part_norms).sum(), squares.sum(), sizes.sum()])


def _solve(sums: Tensor, whole_norm: Tensor) -> tuple[Tensor, Tensor]:
    batch = sums[2]
    shares = sums[:2] / (batch * batch)
    signal = (whole_norm - shares[0]) / (1 - shares[1])
    return signal, batch * (whole_norm - signal)


@dataclass
class _Part:
    """One backward of a step.

    Attributes:
        samples, tokens: of its batch.
        weight: gradient of the step's loss with respect to the loss of this backward.
        norms: index of a parameter → squared norm of what this backward added to its gradient.
    """

    samples: int
    tokens: int
    weight: Tensor
    norms: dict[int, Tensor] = field(default_factory=dict)


class NoiseScale:
    """Measures the gradient noise scale from the backwards that add up to a step, in any training loop.

    Each backward is one part of the step: of a micro-batch, of an accumulated batch, and of each rank under DDP. The
    squared norm of what it adds to a gradient is computed as it arrives, so no gradient is stored, and the training is
    bitwise the same. The weight of its loss is divided out. Moving averages of |G|² and tr(Σ) stay on the device.

    Args:
        model: the model; parameters must not be sharded.
        decay: of the moving averages.

    Attributes:
        measured: number of steps that were measured.

    Raises:
        RuntimeError: in ``measure``: a backward of another loss than that of a watched step.

    Example:
        >>> net, data = nn.Linear(3, 1), torch.randn(8, 3)
        >>> noise = NoiseScale(net)
        >>> step = noise.watch(lambda batch: (net(batch) - 1).square().mean())
        >>> with noise.measure():  # one step, until its gradient is complete and not yet clipped
        ...     for part in data.split(2):
        ...         (step(part) / 4).backward()
        >>> noise.measured, noise.samples is not None
        (1, True)

    Source:
        McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, the simple noise scale tr(Σ) / |G|² of section 2.2.
        The estimators are those of appendix A.1. Checked against a regression whose noise scale is known.
    """

    @check_arguments
    def __init__(self, model: nn.Module, decay: Share = 0.95) -> None:
        self.model, self.decay = model, decay
        self.measured = 0
        self.tokens_per_sample = 0.0
        self._averages: Tensor | None = None  # of |G|² and tr(Σ); both begin at 0, which cancels in their ratio
        self._parts: list[_Part] | None = None  # None outside of a measured step
        self._parameters: list[nn.Parameter] = []
        self._is_divided = False  # whether a backward reached a parameter twice, as with reentrant checkpoints
        self._unknown = False
        self._hooks: list[Any] = []

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; infinity while noise hides the gradient, None before anything was measured."""
        return _read_samples(self.state_dict())

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens, for the tokens of a sample in the last measured step; None without tokens."""
        return _read_tokens(self.state_dict())

    def averages(self) -> AsyncReading:
        """Begin to read the moving averages of |G|² and tr(Σ), without waiting for the device."""
        return AsyncReading(torch.zeros(2) if self._averages is None else self._averages)

    def watch(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step, a function of a batch that returns its mean loss, so that the weight of its loss is known."""

        @functools.wraps(step)
        def watched(*args: object, **kwargs: object) -> Any:
            output = step(*args, **kwargs)
            if self._parts is not None and output is not None:
                loss = loss_in(output, "its gradient is measured")
                if loss.requires_grad:
                    samples, tokens = count_batch([*args, *kwargs.values()][0])
                    loss.register_hook(functools.partial(self._begin_part, max(samples, 1), tokens))
            return output

        return watched

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the step whose backwards run inside; on leaving, gradients are complete and not yet clipped."""
        self.begin()
        try:
            yield
        except BaseException:
            self.stop()
            raise
        self.finish()

    def begin(self) -> None:
        """Start to measure; the backwards that follow belong to one step."""
        self.stop()
        self._parts, self._unknown, self._is_divided = [], False, False
        self._parameters = trained_parameters(self.model)
        for index, parameter in enumerate(self._parameters):
            # Not a hook of the tensor, which torch.autograd.grad would call too.
            accumulate = get_gradient_edge(parameter).node
            hook = accumulate.register_prehook(functools.partial(self._note, index))
            self._hooks.append((hook, accumulate))  # autograd itself holds the node weakly

    def stop(self) -> None:
        """Stop measuring, without a result."""
        for hook, _ in self._hooks:
            hook.remove()
        self._hooks, self._parts, self._parameters = [], None, []

    def finish(self, samples: int | None = None) -> None:
        """Add the measured step to the averages; all ranks must call it. The host does not wait for the device.

        Args:
            samples: samples of the step on this rank; a step whose parts have another number is left out.
        """
        parts = [part for part in self._parts or [] if part.norms]
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self.stop()
        if self._unknown:
            why = "its loss is not that of a watched step, so its weight in the step is unknown"
            raise RuntimeError(explain("a backward in measure()", why, "Use step = noise.watch(step)"))
        # The conditions are the same on all ranks, since each takes part in the sum below.
        if not gradients or (rank_count() == 1 and len(parts) < 2):
            return
        device = gradients[0].device
        sums = self._sum_parts(parts, device, samples)
        if rank_count() > 1:
            dist.all_reduce(sums)
        if self._is_divided:  # the norm of a sum is unknown from those of its terms
            return
        whole = torch.stack([_squared_norm(gradient).to(device) for gradient in gradients]).sum()
        self._add(torch.stack(_solve(sums, whole.to(sums))))

    def _sum_parts(self, parts: list[_Part], device: torch.device, samples: int | None) -> Tensor:
        counted = sum(part.samples for part in parts)
        if not counted and not samples:
            return torch.zeros(3, device=device)
        if samples is not None and counted != samples:
            # NaN leaves the step out, on all ranks.
            return torch.full((3,), math.nan, device=device)
        self.tokens_per_sample = sum(part.tokens for part in parts) / counted
        norms: list[Tensor] = []
        for part in parts:
            total = torch.stack(list(part.norms.values())).sum()
            # A micro-batch without targets has the weight 0, and no gradient.
            norms.append(torch.where(part.weight == 0, 0.0, total / part.weight.to(total) ** 2))
        # Filled in by kernels: a copy from the host would wait for the device.
        sizes = [torch.full_like(norms[0], part.samples) for part in parts]
        return _sums_of(torch.stack(norms), torch.stack(sizes))

    def _add(self, found: Tensor) -> None:
        averages = torch.zeros_like(found) if self._averages is None else self._averages.to(found)
        # A step with overflow is skipped by its optimizer, too.
        self._averages = torch.where(found.isfinite().all(), torch.lerp(found, averages, self.decay), averages)
        self.measured += 1

    def _begin_part(self, samples: int, tokens: int, weight: Tensor) -> None:
        """Begin a part; called by the backward when it arrives at the loss of a watched step."""
        if self._parts is not None:
            self._parts.append(_Part(samples, tokens, weight.detach().float()))

    def _note(self, index: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Note a contribution; called by the backward before it is added to the gradient of a parameter."""
        if gradients[0] is None or self._parts is None:
            return
        if not self._parts:
            self._unknown = True
            return
        norms = self._parts[-1].norms
        if index in norms:
            self._is_divided = True
        norms[index] = _squared_norm(gradients[0])

    def state_dict(self) -> dict[str, Any]:
        signal, noise = self.averages().wait()
        return {
            "signal": signal,
            "noise": noise,
            "measured": self.measured,
            "tokens_per_sample": self.tokens_per_sample,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measured, self.tokens_per_sample = state["measured"], state["tokens_per_sample"]
        self._averages = torch.tensor([state["signal"], state["noise"]], dtype=torch.float64)


def _divide_noise(signal: float, noise: float) -> float | None:
    """Return tr(Σ) / |G|²; infinity while noise hides the gradient, None before a step with finite gradients."""
    if signal == noise == 0:
        return None
    return noise / signal if signal > 0 else math.inf


def _read_samples(state: Mapping[str, Any]) -> float | None:
    return _divide_noise(state.get("signal", 0.0), state.get("noise", 0.0))


def _read_tokens(state: Mapping[str, Any]) -> float | None:
    samples = _read_samples(state)
    if not samples or not state["tokens_per_sample"]:
        return None
    return samples * state["tokens_per_sample"]


def _squared_norm(tensor: Tensor) -> Tensor:
    """Return the squared norm, in at least float32: differences of norms need more digits than bfloat16 has."""
    values = values_of(tensor.detach())
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)) ** 2


class GradientNoiseScale(Technique):
    """Measures the gradient noise scale, which estimates the critical batch size of the run at its current loss.

    Up to about this batch size, twice the batch trains in nearly half the steps; above, it mostly costs computation:
    see :func:`~lightning_fasttrain.estimate.cost_of_batch_size`. It grows during training. The parts of a step that
    are compared are its micro-batches, accumulated batches and ranks; without any of these nothing is measured, nor
    where only the backbone of a model runs in micro-batches, nor in a step that a checkpoint cuts, where it is
    resumed. It is logged as ``gradient_noise_scale/samples`` and ``gradient_noise_scale/tokens``. The loss must be a
    mean. See :class:`~lightning_fasttrain.profiling.NoiseScale`.

    Acts between ``on_train_batch_start`` of a step's first batch and ``on_before_optimizer_step``, before gradients are
    clipped. Nothing waits for the device, and training is bitwise unchanged.

    Args:
        every_n_steps: optimizer steps from one measured step to the next; a measured step computes the norm of each
            part of the gradient.
        decay: of the moving averages, for each measured step.

    Raises:
        TypeError, ValueError: an argument is invalid; in ``fit``: manual optimization, or sharded parameters.

    Example:
        >>> noise = GradientNoiseScale()
        >>> noise.samples  # after `Trainer(callbacks=[noise, ft.MicroBatching(4)]).fit(model)`

    Source:
        See :class:`~lightning_fasttrain.profiling.NoiseScale`.
    """

    bitwise: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ACTS_IN_BACKWARD})
    effect: ClassVar[str] = "the critical batch size, from the noise between the gradients of a step's parts"
    when: ClassVar[str] = "you want to know how much a larger batch would still speed up training"
    in_a_loop: ClassVar[str] = "profiling.NoiseScale(model)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "weights are updated during the backward, and their gradients freed, before the step is complete"
        return (Conflict(Capability.UPDATES_IN_BACKWARD, why, "Use only one of them"),)

    def __init__(self, every_n_steps: PositiveInt = 10, decay: Share = 0.95) -> None:
        self.every_n_steps, self.decay = every_n_steps, decay
        self._state: dict[str, Any] | None = None
        self._noise: NoiseScale | None = None
        self._logged: AsyncReading | None = None
        self._unwatch: Undo | None = None  # while a step is measured
        self._in_step = False
        self._samples = 0

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None before anything was measured."""
        return _read_samples(self.state_dict())

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None where nothing was measured, or batches hold no token ids."""
        return _read_tokens(self.state_dict())

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_settings(trainer, pl_module)
        self._noise, self._logged, self._in_step = NoiseScale(pl_module, self.decay), None, False
        if self._state:
            self._noise.load_state_dict(self._state)

        def undo() -> None:
            self._state = self.state_dict()
            self._leave()
            self._noise = None

        return undo

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is complete, and its forward comes next."""
        assert self._noise is not None
        if not self._in_step and trainer.global_step % self.every_n_steps == 0:
            self._samples = 0
            self._noise.begin()
            # Only in measured steps, and around what other techniques have made of it.
            self._unwatch = patch(pl_module, "training_step", self._noise.watch(pl_module.training_step))
        self._in_step = True
        self._samples += max(count_batch(batch)[0], 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the gradient of the step is complete, and not yet clipped."""
        if self._unwatch is not None:
            assert self._noise is not None
            self._noise.finish(self._samples)
            self._leave()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped, or the step continues with another batch."""
        if accumulation_continues(trainer):
            return
        self._in_step = False
        self._leave()
        assert self._noise is not None
        if self._noise.measured and trainer.loggers and is_time_to_log(trainer):
            self._log(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: a step that this checkpoint cuts is not measured where it is resumed: some of its parts are lost."""
        if trainer.state.fn == "fit" and accumulation_continues(trainer):
            checkpoint[type(self).__name__] = {"in_step": True}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: whether the first batch continues a step."""
        self._in_step = checkpoint.get(type(self).__name__, {}).get("in_step", False)

    def _log(self, trainer: L.Trainer) -> None:
        """Log what was read since the last time, and begin to read again."""
        assert self._noise is not None
        reading, self._logged = self._logged, self._noise.averages()
        if self._logged.is_done:  # on the CPU values are there at once
            reading = self._logged
        if reading is None:
            return
        samples = _divide_noise(*reading.wait())
        if samples is None:
            return
        found = {"gradient_noise_scale/samples": samples}
        if self._noise.tokens_per_sample:
            found["gradient_noise_scale/tokens"] = samples * self._noise.tokens_per_sample
        log_to_all(trainer, found)

    def _leave(self) -> None:
        """End a measured step, including one that failed."""
        if self._noise is not None:
            self._noise.stop()
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def outcome(self, model: nn.Module) -> str:
        measured = self.state_dict().get("measured", 0)
        if not measured:
            why = "each step has the gradient of one batch on one rank, and noise shows between several of them"
            return f"nothing was measured: {why}"
        if self.samples is None:
            return f"nothing was measured: {number_of(measured, 'step')} had no finite gradients"
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        return f"critical batch size about {self.samples:,.0f} samples{tokens} (from {number_of(measured, 'step')})"

    def state_dict(self) -> dict[str, Any]:
        if self._noise is None:
            return dict(self._state or {})
        return self._noise.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)
        if self._noise is not None and self._state:
            self._noise.load_state_dict(self._state)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_noise": None, "_logged": None, "_unwatch": None, "_state": self.state_dict()}
        return {**super().__getstate__(), **own}


def _refuse_settings(trainer: L.Trainer, module: L.LightningModule) -> None:
    if not module.automatic_optimization:
        why = "the module runs its backwards itself, and there may be several losses"
        way_out = "Use `with profiling.NoiseScale(self).measure()` around the backwards of a step"
        raise ValueError(explain("GradientNoiseScale with automatic_optimization=False", why, way_out))
    if not replicates(trainer.strategy):
        why = "parameters are sharded, so that no rank has the gradient of its own samples"
        what = f"GradientNoiseScale with {type(trainer.strategy).__name__}"
        raise ValueError(explain(what, why, "Measure under DDP or on one device"))
