"""Keep an exponential moving average of the weights, evaluate with it, and save it; sharded where the weights are."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_fasttrain.core.checks import NonNegativeInt, PositiveInt, PositiveShare, check_arguments
from lightning_fasttrain.core.host.lightning import FabricModule
from lightning_fasttrain.core.host.optimizer_steps import TakenSteps
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import local_part, names_of_parameters
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.values import BY_PARAMETER
from lightning_fasttrain.technique import Capability, Conflict, Technique
from lightning_fasttrain.technique.declarations import PredictedStep

_WHOLE = "each rank holds a shard of them without their shape"
_IN_SHARDS = "its checkpoints cannot hold an average in shards"


class WeightEMA(Technique):
    """Keep θ̄ ← decay · θ̄ + (1 − decay) · θ after each optimizer step, and evaluate with θ̄; training is unchanged.

    Validation within a fit runs with the average, and the weights are restored bit for bit. So do ``trainer.validate``,
    ``test`` and ``predict``: after a fit with its average, and with ``ckpt_path`` with that of the checkpoint. In
    checkpoints, also those that a callback saves during an evaluation, the model has its trained weights and the
    average is beside it, so that a run resumes bit for bit; :func:`averaged_state_dict` returns the averaged weights of
    a checkpoint. Buffers, such as BatchNorm's running statistics, are those of the training.

    Only trained parameters are averaged: a copy of these in memory, and in an evaluation another one. Averages of
    parameters in 16 bits are float32. Under :class:`~lightning_fasttrain.FSDP2Strategy`, also with tensor parallelism,
    each rank averages its shards, without communication; checkpoints hold them under the parameters' names, and load on
    any number of ranks and without sharding.

    Updates act in ``on_train_batch_end``, the first hook after the step, unless a guard or a loss scaler has skipped
    it. In a Fabric or bare loop call :meth:`update`
    and :meth:`in_use`, and save the object as an entry of the state: ``fabric.save(path, {"model": net, "ema": ema})``.

    Args:
        decay: share of the old average that stays at each update; 0.999 averages over about a thousand updates.
        start_step: number of optimizer steps before the first update. Until then evaluations use the current weights.
        every_n_steps: optimizer steps from one update to the next.

    Attributes:
        average: name of a parameter → its average, sharded like the parameter; empty before the first update.

    Raises:
        TypeError, ValueError: an argument is out of range; in ``fit``: the strategy shards parameters in a way that
            cannot be averaged or saved. Names it.

    Example:
        >>> net, ema = nn.Linear(1, 1, bias=False), WeightEMA(decay=0.5)
        >>> for value in (1.0, 3.0):
        ...     _ = nn.init.constant_(net.weight, value)
        ...     ema.update(net)
        >>> with ema.in_use(net):
        ...     net.weight.item()
        2.0
        >>> net.weight.item()
        3.0

    Source:
        Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". Updates are those of
        ``torch.optim.swa_utils.get_ema_multi_avg_fn``, and the first one copies the weights, as in Lightning's
        ``EMAWeightAveraging``.
    """

    bitwise: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.EVALUATES_AVERAGES})
    effect: ClassVar[str] = "an exponential moving average of the weights, with which the model is evaluated"
    when: ClassVar[str] = "the last steps are noisy; not for a few steps of fine-tuning"
    in_a_loop: ClassVar[str] = "ema.update(model) after each optimizer.step(), and `with ema.in_use(model):`"
    predicted: ClassVar[bool] = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"beta": "decay=", "update_every": "every_n_steps=", "update_every_n_steps": "every_n_steps="},
        **{"update_after_step": "start_step=", "update_starting_at_step": "start_step="},
    }

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        way_out = "Use FSDP2Strategy, or ZeRO with stage=2 or less"
        twice = "both swap the weights for an average in each validation, and the second would evaluate neither"
        return (
            Conflict(WeightAveraging, twice, "Remove one of them"),
            Conflict(DeepSpeedStrategy, _WHOLE, way_out, lambda _, zero: zero.zero_stage_3),
            Conflict(FSDPStrategy, _WHOLE, way_out),
            # This package's own strategies have that method.
            Conflict(ModelParallelStrategy, _IN_SHARDS, way_out, lambda _, s: not hasattr(s, "names_to_load")),
        )

    def __init__(
        self, decay: PositiveShare = 0.999, start_step: NonNegativeInt = 0, every_n_steps: PositiveInt = 1
    ) -> None:
        self.decay, self.start_step, self.every_n_steps = decay, start_step, every_n_steps
        self.average: dict[str, Tensor] = {}
        self._ties: dict[str, str] = {}
        self._steps = 0
        self._evaluation = ExitStack()
        self._swapped: tuple[list[Tensor], list[Tensor], list[Tensor]] | None = None  # own weights, averages, weights
        self._taken: TakenSteps | None = None
        self._of: weakref.ref[nn.Module] | None = None

    @check_arguments
    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average after an optimizer step, which this counts.

        Args:
            model: the model, set up for training; the same one each time.

        Raises:
            ValueError: DeepSpeed's stage 3 holds the parameters, or the average was loaded in another layout.
        """
        self._steps += 1
        since_start = self._steps - self.start_step - 1
        if since_start < 0 or since_start % self.every_n_steps:
            return
        now = _trained(model)
        moving = [name for name in self.average if name in now]
        new = [name for name in now if name not in self.average]  # in the order of the model, on all ranks
        for name in new:
            # In 16 bits, a change of a thousandth would be rounded away.
            dtype = torch.promote_types(now[name].dtype, torch.float32)
            self.average[name] = now[name].detach().to(dtype, copy=True)
        if new:
            self._ties = _names_of_ties(model)
        averages, values = self._shards_beside(now, moving)
        if moving:
            weights = [value.to(old.dtype) for old, value in zip(averages, values, strict=True)]
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """Context in which ``model`` has the averaged weights; afterwards it has its own again, bit for bit."""
        parameters = _trained(model, frozen_too=True)
        names = [name for name in self.average if name in parameters]
        averages, weights = self._shards_beside(parameters, names)
        own = list(map(torch.clone, weights))
        try:
            self._put(model, averages, weights)
            self._swapped = own, averages, weights
            yield
        finally:
            self._swapped = None
            self._put(model, own, weights)

    @contextmanager
    def _out_of_use(self, model: nn.Module) -> Iterator[None]:
        """Context in which ``model`` has its own weights for a while, though the average is in use."""
        if self._swapped is None:
            yield
            return
        own, averages, weights = self._swapped
        self._put(model, own, weights)
        try:
            yield
        finally:
            self._put(model, averages, weights)

    @staticmethod
    def _put(model: nn.Module, values: list[Tensor], weights: list[Tensor]) -> None:
        # A forward without backward leaves parameters gathered, with the values of before.
        _reshard(model)
        _copy_all(values, weights)

    def _shards_beside(self, parameters: Mapping[str, Tensor], names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's part of the averages and of the parameters of these names."""
        averages, values = [], []
        for name in names:
            value = _local(parameters[name])
            # Evaluations run in inference mode, whose tensors could not be updated afterwards.
            with torch.inference_mode(False):
                average = self.average[name] = self.average[name].to(value.device)
            if _local(average).shape != value.shape:
                what = f"the average of '{name}' has shape {tuple(_local(average).shape)} on this rank"
                why = f"the parameter has {tuple(value.shape)} here: they are sharded differently"
                raise ValueError(explain(what, why, "Load checkpoints after the model is set up, with its strategy"))
            averages.append(_local(average))
            values.append(value)
        return averages, values

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "the average is another copy of what trains, so this is a lower bound")

    def outcome(self, model: nn.Module) -> str:
        if self.average:
            return ""
        return f"nothing was averaged in {self._steps} steps, as start_step={self.start_step}"

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn == "fit":
            self.load_state_dict({})
            self._of = weakref.ref(pl_module)
            return self._end
        # Lightning restores callbacks in a fit alone, but hands every checkpoint to the module.
        load = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            load(checkpoint)
            self._of = weakref.ref(pl_module)
            self.load_state_dict(checkpoint.get("callbacks", {}).get(self.state_key, {}))

        undo = patch(pl_module, "on_load_checkpoint", on_load_checkpoint)

        def detach() -> None:
            self._evaluation.close()
            undo()

        return detach

    def _end(self) -> None:
        self._evaluation.close()
        if self._taken is not None:
            self._taken.close()
            self._taken = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: a checkpoint is loaded, if there is one."""
        self._taken = TakenSteps(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: called after the optimizer's step, or between the batches whose gradients are summed."""
        assert self._taken is not None
        if self._taken.has_new():
            self.update(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called before the first batch."""
        # Another model than the one that was trained has weights of its own.
        if self._of is None or self._of() is not pl_module:
            return
        self._evaluation.enter_context(self.in_use(pl_module))
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._out_of_use(pl_module):  # whoever saves, and whenever
                save(*args, **kwargs)

        self._evaluation.callback(patch(trainer, "save_checkpoint", save_checkpoint))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called before ModelCheckpoint's, which comes last."""
        self._evaluation.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def state_dict(self) -> dict[str, Any]:
        return {BY_PARAMETER: dict(self.average), "ties": dict(self._ties), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = dict(state_dict.get(BY_PARAMETER, {}))
        self._ties, self._steps = dict(state_dict.get("ties", {})), int(state_dict.get("steps", 0))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_evaluation": ExitStack(), "_of": None, "_swapped": None, "_taken": None}


@check_arguments
def averaged_state_dict(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``state_dict`` of a checkpoint with the averages of a :class:`WeightEMA` in place of the weights.

    Args:
        checkpoint: the Trainer's checkpoint, as ``torch.load`` returns it, or
            :func:`~lightning_fasttrain.strategy.full_checkpoint` for one of FSDP2.

    Returns:
        Name → tensor, in the dtypes of the weights. Parameters that did not train, and buffers, are those of the model.

    Raises:
        ValueError: the checkpoint holds no average.

    Example:
        >>> averages = {"by_parameter": {"weight": torch.ones(2)}, "steps": 9}
        >>> averaged_state_dict({"state_dict": {"weight": torch.zeros(2)}, "callbacks": {"WeightEMA": averages}})
        {'weight': tensor([1., 1.])}

    Source:
        See :class:`WeightEMA`.
    """
    for key, state in checkpoint.get("callbacks", {}).items():
        averages = state.get(BY_PARAMETER) if WeightEMA.__name__ in str(key) else None
        if averages:
            break
    else:
        why = "it was saved without WeightEMA, or before the first average"
        raise ValueError(explain("a checkpoint without averages", why, "Use its state_dict"))
    weights, ties = dict(checkpoint["state_dict"]), state.get("ties", {})
    for name, value in weights.items():
        # Tied weights are averaged under the first of their names.
        average = averages.get(ties.get(name, name))
        if average is not None:
            weights[name] = average.to(value.dtype)
    return weights


def _names_of_ties(model: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to their first."""
    model = _unwrap(model)
    first = names_of_parameters(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in named if first[parameter] != name}


def _trained(model: nn.Module, *, frozen_too: bool = False) -> dict[str, nn.Parameter]:
    """Return the trained parameters, as shards where they are sharded, by their names in the user's own model."""
    model = _unwrap(model)
    _reshard(model)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad or frozen_too}
    if any(hasattr(parameter, "ds_id") for parameter in found.values()):
        way_out = "Use FSDP2, or stage=2 or less"
        raise ValueError(explain("WeightEMA under DeepSpeed's stage 3", _WHOLE, way_out))
    return found


def _unwrap(model: nn.Module) -> nn.Module:
    while isinstance(model, FabricModule | DistributedDataParallel):
        model = model.module
    return model


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return local_part(tensor.detach())


@torch.no_grad()
def _copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
