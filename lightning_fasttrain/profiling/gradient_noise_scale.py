"""Measure the gradient noise scale of a training run, which estimates its critical batch size."""

from typing import Any, ClassVar

import lightning as L
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import PositiveInt, Share
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.host.lightning import accumulation_continues, is_time_to_log, log_to_all, replicates
from lightning_fasttrain.core.messages import explain, number_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.profiling.noise_scale import NoiseScale, divide_noise
from lightning_fasttrain.technique import Capability, Conflict, Technique

_ONE_GRADIENT = "each step has the gradient of one batch on one rank, and noise shows between several of them"


class GradientNoiseScale(Technique):
    """Measures the gradient noise scale, which estimates the critical batch size of the run at its current loss.

    Up to about this batch size, twice the batch trains in nearly half the steps; above, it mostly costs computation:
    see :func:`~lightning_fasttrain.estimate.cost_of_batch_size`. It grows during training. The parts of a step that are
    compared are its micro-batches, accumulated batches and ranks; without any of these nothing is measured, nor where
    only the backbone of a model runs in micro-batches. It is logged as ``gradient_noise_scale/samples`` and
    ``gradient_noise_scale/tokens``. The loss must be a mean. See :class:`~lightning_fasttrain.profiling.NoiseScale`.

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
        self._in_step = False
        self._samples = 0

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None before anything was measured."""
        state = self.state_dict()
        if not state.get("measured"):
            return None
        return divide_noise(state["signal"], state["noise"])

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None where nothing was measured, or batches hold no token ids."""
        per_sample = self.state_dict().get("tokens_per_sample")
        if not self.samples or not per_sample:
            return None
        return self.samples * per_sample

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_settings(trainer, pl_module)
        self._noise, self._logged, self._in_step = NoiseScale(pl_module, self.decay), None, False
        if self._state:
            self._noise.load_state_dict(self._state)

        def undo() -> None:
            self._state = self.state_dict()
            self._leave(pl_module)
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
            vars(pl_module)["training_step"] = _WatchedStep(self._noise, pl_module)
        self._in_step = True
        self._samples += max(count_batch(batch)[0], 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the gradient of the step is complete, and not yet clipped."""
        if isinstance(vars(pl_module).get("training_step"), _WatchedStep):
            assert self._noise is not None
            self._noise.finish(self._samples)
            self._leave(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped, or the step continues with another batch."""
        if accumulation_continues(trainer):
            return
        self._in_step = False
        self._leave(pl_module)
        if trainer.loggers and is_time_to_log(trainer):
            self._log(trainer)

    def _log(self, trainer: L.Trainer) -> None:
        """Log what was read since the last time, and begin to read again."""
        assert self._noise is not None
        reading, self._logged = self._logged, None
        if self._noise.measured:
            self._logged = self._noise.averages()
        # On the CPU values are there at once.
        if self._logged is not None and self._logged.is_done:
            reading = self._logged
        if reading is not None:
            samples = divide_noise(*reading.wait())
            found = {"gradient_noise_scale/samples": samples}
            if self._noise.tokens_per_sample:
                found["gradient_noise_scale/tokens"] = samples * self._noise.tokens_per_sample
            log_to_all(trainer, found)

    def _leave(self, module: L.LightningModule) -> None:
        """End a measured step, also one that failed."""
        if self._noise is not None:
            self._noise.stop()
        step = vars(module).get("training_step")
        if isinstance(step, _WatchedStep):
            step.remove()

    def outcome(self, model: nn.Module) -> str:
        if self.samples is None:
            return f"nothing was measured: {_ONE_GRADIENT}"
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        measured = number_of(self.state_dict()["measured"], "step")
        return f"critical batch size about {self.samples:,.0f} samples{tokens} (from {measured})"

    def state_dict(self) -> dict[str, Any]:
        if self._noise is None:
            return dict(self._state or {})
        return self._noise.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)
        if self._noise is not None and self._state:
            self._noise.load_state_dict(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_noise": None, "_logged": None, "_state": self.state_dict()}


class _WatchedStep:
    """Replaces ``training_step`` on a module for a measured step."""

    def __init__(self, noise: NoiseScale, module: L.LightningModule) -> None:
        self.module, self.previous = module, vars(module).get("training_step")
        # Lightning reads the signature of the function underneath.
        self.__wrapped__ = module.training_step
        self._watched = noise.watch(module.training_step)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._watched(*args, **kwargs)

    def remove(self) -> None:
        """Restore what was there before, unless another technique has removed it already."""
        if self.previous is None:
            del self.module.training_step
        else:
            self.module.training_step = self.previous  # type: ignore[method-assign]


def _refuse_settings(trainer: L.Trainer, module: L.LightningModule) -> None:
    unfit = [
        (
            not module.automatic_optimization,
            "automatic_optimization=False",
            "the module runs its backwards itself, and there may be several losses",
            "Use `with profiling.NoiseScale(self).measure()` around the backwards of a step",
        ),
        (
            not replicates(trainer.strategy),
            type(trainer.strategy).__name__,
            "parameters are sharded, so that no rank has the gradient of its own samples",
            "Measure under DDP or on one device",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(f"GradientNoiseScale with {what}", why, way_out))
