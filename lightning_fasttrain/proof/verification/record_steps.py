"""Run a few steps of a copy of a model, and record the results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import patch, without_dropout
from lightning_fasttrain.core.state.rng import random_state
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.finetune.account_bytes import account_bytes
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.adapters.base_model import base_model
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.proof.verification.digest import Digest, take_digest
from lightning_fasttrain.proof.verification.short_run import Steps, copy_batch, run_steps, say_nothing, seed_step
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.trial.runs import loss_of

Digests = dict[str, Digest]


@dataclass
class StepRecord:
    """Results of a few steps, by the names of parameters and buffers.

    Attributes:
        losses: loss of each batch; empty if several batches make a step.
        gradients: of each optimizer step, before clipping; those of later steps under ``"name, step 2"``.
        reached: the sampled entries of each weight that ever had a nonzero gradient.
        before, after: the trainable weights, at the start and at the end.
        unmoved: names of the weights that do not train.
        frozen: those of them that changed nevertheless, at the end.
        buffers: buffers at the end.
        validated: results that validation returned and logged, and that ``predict_step`` returned.
        evaluation: the first batch's loss in evaluation, at the start and at the end; None if it is not known.
        training: its loss in training without dropout, at the end.
        base: its loss in evaluation with the adapters disabled, at the end; None if there are none.
        trains: names of the parameters that require a gradient.
        unheld: those of them that no optimizer holds.
        modes: whether each module is in training mode, in the last step and in validation.
        state: shapes and dtypes of the entries of ``state_dict``.
        numbers: fingerprints of the random states after each step.
        left_behind: modules that have hooks or a replaced ``forward`` when the fit is over.
        quantized: whether the model has quantized layers.
        draws: whether the first step drew random numbers.
        idle: name of a technique that did nothing → the reason.
        warnings: warnings of the suite.
        left: sentences on large frozen weights that techniques left unchanged, unlike others.
    """

    losses: list[float] = field(default_factory=list)
    gradients: Digests = field(default_factory=dict)
    reached: dict[str, Tensor] = field(default_factory=dict)
    before: Digests = field(default_factory=dict)
    after: Digests = field(default_factory=dict)
    unmoved: list[str] = field(default_factory=list)
    frozen: Digests = field(default_factory=dict)
    buffers: Digests = field(default_factory=dict)
    validated: Digests = field(default_factory=dict)
    evaluation: list[float | None] = field(default_factory=list)
    training: float | None = None
    base: float | None = None
    trains: list[str] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)
    modes: dict[str, dict[str, bool]] = field(default_factory=dict)
    state: dict[str, tuple[object, ...]] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    left_behind: dict[str, tuple[object, ...]] = field(default_factory=dict)
    quantized: bool = False
    draws: bool = False
    idle: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def updates(self) -> Iterator[tuple[str, Digest]]:
        """Yield the optimizer's total change of each weight."""
        for name, before in self.before.items():
            yield name, self.after[name] - before

    def gradients_of(self, name: str) -> list[Digest]:
        """Return the gradients of one weight in each step in which it has one."""
        return [digest for key, digest in self.gradients.items() if key.partition(", step ")[0] == name]


_LARGE_SHARE = 0.05  # of a model's bytes: larger weights are reported


def record_steps(
    of: Steps,
    techniques: Sequence[Technique] = (),
    *,
    window: int = 1,
    change: Callable[[nn.Module], object] | None = None,
    evaluates: bool = True,
    from_start: bool = False,
    store: Path | None = None,
) -> StepRecord:
    """Run a step for each batch, or for each ``window`` of batches, on a copy, and record the results.

    Args:
        of: the steps to run. Random states are restored; each step starts with the same ones in every record.
        techniques: techniques of which copies act.
        window: number of batches per step.
        change: applied to the copy right before its first step.
        evaluates: whether everything needed to compare two runs is recorded; False for a run that measures rounding.
        from_start: whether the first batch is also evaluated before the first step.
        store: a folder for the entries of all tensors, which are otherwise sampled.

    Raises:
        TypeError: the module cannot be copied.
        Exception: any error of the module or a technique.
    """
    recorder = _Recorder(of, window, change, evaluates, from_start, store)
    recorder.record.warnings = run_steps(of, techniques, recorder)
    return recorder.record


class _Recorder(L.Callback):
    """Fills a record. It runs after the techniques, when they have acted."""

    def __init__(
        self,
        of: Steps,
        window: int,
        change: Callable[[nn.Module], object] | None,
        evaluates: bool,
        from_start: bool,
        store: Path | None,
    ) -> None:
        self.record = StepRecord()
        self.of, self.window, self.change, self.evaluates = of, window, change, evaluates
        self.from_start, self.store, self.stored = from_start, store, 0
        self.first: Any = None
        self.arrived: Digests = {}
        self.unmoved: Digests = {}
        self.logged: set[str] = set()
        self.step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record = self.record
        if self.change is not None:
            self.change(pl_module)
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                record.trains.append(name)
                record.before[name] = self._keep(parameter)
                # Autograd calls this hook before the gradient is added to `grad`.
                parameter.register_hook(self._arrive(name))
            elif self.evaluates:
                self.unmoved[name] = take_digest(parameter)
        if not record.trains:
            why = "no parameter requires a gradient, so there is no training to compare"
            raise ValueError(explain(type(pl_module).__name__, why, "Unfreeze the parameters to train"))
        record.unheld = _find_unheld(trainer, pl_module)
        record.left = _left_in_floats(pl_module)
        record.unmoved = list(self.unmoved)
        record.quantized = any(map(is_quantized, pl_module.modules()))

    def _keep(self, tensor: Tensor) -> Digest:
        if self.store is None:
            return take_digest(tensor)
        self.stored += 1
        return take_digest(tensor, self.store / f"{self.stored}.safetensors")

    def _arrive(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that sums the digests of incoming gradients, since an optimizer may consume them at once."""

        def arrive(gradient: Tensor) -> None:
            found = take_digest(gradient)
            reached = self.record.reached
            reached[name] = reached.get(name, torch.tensor(False)) | (found.entries != 0)
            if name in self.arrived:
                found = self.arrived[name] + found
            self.arrived[name] = found

        return arrive

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx >= len(self.of.batches):
            return
        if batch_idx == 0:
            self.first = copy_batch(batch)
            self.record.evaluation.append(self._evaluate(trainer, pl_module) if self.from_start else None)
            # Predictions come before the steps, which would add their rounding.
            self._predict(trainer, pl_module)
        # After the evaluation, which may draw: the step must start with the same random state in every record.
        if batch_idx % self.window == 0:
            seed_step(batch_idx // self.window)
        if batch_idx == 0:
            self.drawn = _fingerprint(random_state())
        self.record.modes["training"] = _modes(pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            key = self._key(name)
            if parameter.requires_grad and parameter.grad is not None and key not in self.record.gradients:
                self.record.gradients[key] = self._keep(parameter.grad)

    def _key(self, name: str) -> str:
        return name if self.step == 0 else f"{name}, step {self.step + 1}"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        record = self.record
        if outputs and self.window == 1:
            record.losses.append(float(loss_of(outputs)))
        if (batch_idx + 1) % self.window == 0:
            self._end_step()
        if batch_idx == 0:
            record.draws = _fingerprint(random_state()) != self.drawn
            for technique in trainer.callbacks:
                if isinstance(technique, Technique) and (idle := technique.why_idle(pl_module)):
                    record.idle[str(technique)] = idle[0]
        if batch_idx + 1 == len(self.of.batches):
            self._end(trainer, pl_module)

    def _end_step(self) -> None:
        for name, digest in self.arrived.items():
            # Gradients that an optimizer consumed before its hook, or without one, are known from here.
            self.record.gradients.setdefault(self._key(name), digest)
        self.arrived = {}
        self.record.numbers.append(_fingerprint(random_state()))
        self.step += 1

    def _end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        record, parameters = self.record, dict(module.named_parameters())
        record.after = {name: self._keep(parameters[name]) for name in record.before}
        for name, before in self.unmoved.items():
            if name in parameters:
                now = take_digest(parameters[name])
                if not now.is_same(before):
                    record.frozen[name] = now
        record.buffers = {name: self._keep(buffer) for name, buffer in module.named_buffers()}
        if self.evaluates:
            for name, value in module.state_dict().items():
                record.state[name] = (type(value),)
                if isinstance(value, Tensor):
                    record.state[name] = (value.shape, value.dtype)
            record.training = self._evaluate(trainer, module, training=True)
            record.base = self._evaluate_base(trainer, module)
        if self.evaluates or self.of.validation is not None:
            record.evaluation.append(self._evaluate(trainer, module))
        self.logged = set(trainer.callback_metrics)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, *args: object
    ) -> None:
        self.record.modes["validation"] = _modes(pl_module)
        self._keep_output("validation", outputs)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in trainer.callback_metrics.items():
            if name not in self.logged:
                self.record.validated[name] = take_digest(value)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # This hook of the techniques has run already, so what is left is left for good.
        self.record.left_behind = dict(_hooks(pl_module))

    def _keep_output(self, what: str, output: object) -> None:
        kept = self.record.validated

        def keep(tensor: Tensor) -> Tensor:
            kept[f"{what}, output {len(kept)}"] = take_digest(tensor)
            return tensor

        apply_to_collection(output, Tensor, keep)

    def _predict(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.of.validation is not None and is_overridden("predict_step", module):
            batch = trainer.strategy.batch_to_device(copy_batch(self.of.validation))
            self._keep_output("predict_step", _run_aside(module, lambda: trainer.strategy.predict_step(batch, 0)))

    def _evaluate_base(self, trainer: L.Trainer, module: L.LightningModule) -> float | None:
        if not adapter_parameters(module) or any(map(is_quantized, module.modules())):
            return None
        try:
            with base_model(module):
                return self._evaluate(trainer, module)
        except ValueError:  # these adapters change their base weights, with their own warning
            return None

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule, training: bool = False) -> float | None:
        """Return the first batch's loss in evaluation, or in training without dropout; None on error."""
        # The first batch is only a micro-batch here, whose loss differs.
        if self.window > 1:
            return None
        arguments = [copy_batch(self.first), 0]
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            arguments.pop()
        # The strategy's method rather than the module's: it casts to the given precision.
        return _run_aside(module, lambda: float(loss_of(trainer.strategy.training_step(*arguments))), training)


def _run_aside(module: L.LightningModule, run: Callable[[], object], training: bool = False) -> Any:
    """Return the result of ``run`` in evaluation or training, without dropout and side effects; None on error."""
    stay = not is_sharded(module)
    state = StepState([module], parameters=stay)
    if stay:
        state.copy_all()  # training_step may write a teacher
    restore_log = patch(module, "log", say_nothing)
    restore_dropout = without_dropout(module)
    try:
        module.train(training)
        with torch.no_grad():
            seed_step(0)  # so that a step that draws, such as noise, has the same loss in every record
            return run()
    except (RuntimeError, TypeError, ValueError, AttributeError):  # many modules have no evaluation step
        return None
    finally:
        restore_dropout()
        restore_log()
        state.restore()


def _modes(module: nn.Module) -> dict[str, bool]:
    return {name: each.training for name, each in module.named_modules()}


def _hooks(module: nn.Module) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the hooks and forwards that could still act after training, by module name."""
    for name, each in module.named_modules():
        counts = [len(hooks) for key, hooks in vars(each).items() if key.endswith("_hooks")]
        yield name, (*counts, "forward" in vars(each), type(each).__name__)


def _find_unheld(trainer: L.Trainer, module: L.LightningModule) -> list[str]:
    """Return the names of trainable parameters that no optimizer holds."""
    held = set[int]()
    for optimizer in trainer.optimizers:
        held.update(map(id, parameters_of(optimizer)))
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def _left_in_floats(module: L.LightningModule) -> list[str]:
    """Explain, one sentence per reason, which large weights of a quantized model are not quantized."""
    account = account_bytes(module)
    reasons: dict[str, list[str]] = {}
    for name, reason in account.left.items():
        if account.nbytes.get(name, 0) > _LARGE_SHARE * account.total:
            reasons.setdefault(reason, []).append(name)
    return [f"Not quantized: {list_some(names)}: {reason}." for reason, names in reasons.items()]


def _fingerprint(state: object) -> str:
    """Return a short fingerprint of a random state."""
    words = blake2b(digest_size=8)
    words.update(repr(apply_to_collection(state, Tensor, lambda tensor: tensor.cpu().numpy().tobytes())).encode())
    return words.hexdigest()
