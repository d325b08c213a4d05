"""A learning rate schedule over a run that counts the optimizer's updates by itself."""

import functools
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import sum_over_ranks
from lightning_fasttrain.core.host.lightning import (
    plain_optimizer,
    see_training_batches,
    trainer_of,
    when_loaders_are_made,
)
from lightning_fasttrain.core.host.optimizer_steps import was_skipped_on_device
from lightning_fasttrain.core.messages import explain, note_once, say
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.optim.schedule_shapes import RatePlan, RateRequest, read_request
from lightning_fasttrain.technique.duration import LENGTHS, Length
from lightning_fasttrain.technique.run_length import is_length_known, steps_of_epochs, total_steps


@check_arguments(
    **{"warmup": LENGTHS, "total": LENGTHS, "at": LENGTHS, "decay": LENGTHS},
    **{"num_warmup_steps": "Use warmup=", "warmup_steps": "Use warmup=", "warmup_ratio": "Use warmup='5%'"},
    **{
        "num_training_steps": "Use total=",
        "T_max": "Use total=",
        "eta_min": "Use final=, a share of the learning rate",
    },
)
def build_schedule(
    optimizer: Optimizer,
    shape: str = "cosine",
    *,
    warmup: int | str | Length = 0,
    total: int | str | Length | None = None,
    module: L.LightningModule | None = None,
    final: float = 0.0,
    at: Iterable[int | str | Length] = (),
    by: float = 0.1,
    decay: int | str | Length = "20%",
) -> "Schedule":
    """Schedule the learning rates of ``optimizer`` over the run, with one value for each update.

    Each group keeps its own learning rate, multiplied by a common factor. The formulas are in
    :mod:`~lightning_fasttrain.optim.schedule_shapes`. In a LightningModule::

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
            return ft.build_schedule(optimizer, "cosine", warmup="5%", module=self).to_lightning()

    In a loop, this is all that is needed: ``build_schedule(optimizer, "cosine", warmup="5%", total=10_000)``.

    Lengths are integers (optimizer steps), or ``"2ep"``, ``"50_000 samples"``, ``"1e9tok"``, ``"5%"`` of the total.
    Epochs are converted to steps. Lengths in samples or tokens are counted batch by batch over all ranks (tokens by the
    size of their tensor, including padding); in a loop report each batch to :meth:`Schedule.count`.

    Args:
        optimizer: its groups' current learning rates, or those before an earlier schedule, correspond to a factor of 1.
        shape: ``"cosine"``, ``"linear"``, ``"constant"``, ``"inverse-sqrt"``, ``"exponential"``, ``"step"``,
            ``"one-cycle"`` or ``"wsd"`` (constant, with a decay at the end).
        warmup: duration of the linear rise from 0; 30% by default for ``one-cycle``.
        total: the length of the run. By default the Trainer's: ``max_steps``, or ``max_epochs`` of its loaders'
            batches, which are not read, with or without (scheduled) accumulation.
        module: a LightningModule that a Trainer fits, to determine ``total`` or the length of an epoch.
        final: the factor at the end, from 0 to 1.
        at: for ``step``: when the learning rate falls.
        by: for ``step``: the factor of each fall.
        decay: for ``wsd``: duration of the decay at the end.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: a length that cannot be parsed, two kinds of clocks, an unknown total, or an argument that does not
            apply to the shape; in ``fit``: the Trainer does not know the length of the run.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> schedule = build_schedule(optimizer, "linear", warmup=2, total=6)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates += schedule.get_last_lr()
        ...     optimizer.step()
        >>> rates
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

    Source:
        Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983 (cosine); Vaswani et al. 2017,
        https://arxiv.org/abs/1706.03762 (inverse square root); Smith & Topin 2018, https://arxiv.org/abs/1708.07120
        (one cycle, here without that of momentum); Hu et al. 2024, https://arxiv.org/abs/2404.06395 (wsd). Equal to
        torch's own schedulers where these exist, joined by ``SequentialLR`` for the warmup.
    """
    optimizer = plain_optimizer(optimizer)
    request = read_request(shape, warmup, total, final, at, by, decay)
    if request.needs_run and module is None:
        why = "the length of the run is unknown"
        raise ValueError(explain(f"{shape!r} with total={total}", why, "Give total=10_000, or module=self"))
    return Schedule(optimizer, request, module)


class Schedule(LRScheduler):
    """Sets the learning rates of an optimizer before each of its updates; see :func:`build_schedule`.

    It counts by a hook of the optimizer, after each update. So accumulation counts windows; a step that a loss scaler
    skips does not count; and calls of ``step`` have no effect, so Lightning's ``interval`` and ``frequency``, which by
    default would step it once an epoch, do not matter. Samples and tokens of a skipped step were seen, so they count. A
    fused optimizer under a loss scaler skips on the device, which is then synchronized once a step, as the scaler does
    for all others.

    Args:
        optimizer, request, module: see :func:`build_schedule`.

    Attributes:
        plan: the schedule in numbers; None until the length of the run is known.
        updates: number of updates that the optimizer has made.
        seen: samples or tokens before the coming update, where these are the clock.
        coming: samples or tokens of the coming update.
    """

    def __init__(self, optimizer: Optimizer, request: RateRequest, module: L.LightningModule | None) -> None:
        # torch's own would replace optimizer.step, to warn about an order of calls that does not matter here
        self.optimizer, self.request, self.module = optimizer, request, module
        self.plan: RatePlan | None = None
        self.updates = self.seen = self.coming = 0
        self.engine_reports = False  # whether an engine reports updates
        self._loaded_plan: dict[str, Any] | None = None
        # An earlier schedule has changed the learning rates, and has left those from before it under this name.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _copy(group["lr"]))
        # Before each step, too: a loaded state or an added group has other learning rates.
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        trainer = self._find_trainer()
        if trainer is not None and request.clock != "steps":
            see_training_batches(trainer, functools.partial(self._see, trainer))
        if not request.needs_run or (trainer is not None and is_length_known(trainer)):
            self._settle()
        elif trainer is not None:
            when_loaders_are_made(trainer, self._settle_for_run)

    def to_lightning(self) -> dict[str, Any]:
        """Return the value for ``configure_optimizers``."""
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self, "interval": "step"}}

    @property
    def factor(self) -> float:
        """The factor of the learning rates in the coming update."""
        if self.plan is None:
            return 1.0
        if self.plan.clock == "steps":
            return self.plan.factor(self.updates, self.updates + 1)
        return self.plan.factor(self.seen, self.seen + self.coming)

    def count(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Count a batch of all ranks before its update, in a loop whose lengths are in samples or tokens."""
        self.coming += samples if self.request.clock == "samples" else tokens
        self._set_rates()

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the optimizer's updates are counted."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups in the coming update."""
        return [_copy(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        plan = None if self.plan is None else self.plan.as_dict()
        return {"updates": self.updates, "seen": self.seen, "coming": self.coming, "plan": plan}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the updates of a state. The lengths stay those of the code; differences are logged."""
        self.updates, self.seen = state_dict["updates"], state_dict["seen"]
        self.coming, self._loaded_plan = state_dict["coming"], state_dict["plan"]
        self._say_what_differs()
        self._set_rates()

    def _find_trainer(self) -> L.Trainer | None:
        if self.module is None:
            return None
        return trainer_of(self.module)

    def _is_in_charge(self) -> bool:
        """Whether the Trainer uses this schedule, rather than one of a learning rate finder."""
        trainer = self._find_trainer()
        if trainer is None:
            return True
        if isinstance(trainer.strategy, DeepSpeedStrategy) and not self.engine_reports:
            what = f"a schedule under {type(trainer.strategy).__name__} whose engine does not report updates"
            why = "DeepSpeed steps an optimizer shard by shard, and each would be counted as an update"
            raise RuntimeError(explain(what, why, "Use ft.ZeROStrategy, and create it in configure_optimizers"))
        if not trainer.lr_scheduler_configs:
            what = "a schedule that configure_optimizers did not return"
            why = "checkpoints would not contain its progress"
            raise RuntimeError(explain(what, why, "End with: return ft.build_schedule(...).to_lightning()"))
        in_charge = any(config.scheduler is self for config in trainer.lr_scheduler_configs)
        if not in_charge:
            note_once("a schedule has no effect while the Trainer uses another one, as in a learning rate finder")
        return in_charge

    def _settle_for_run(self) -> bool:
        """Fix the plan once the loaders exist, but not for the shorter run of a learning rate finder."""
        if self._is_in_charge():
            self._settle()
        return self.plan is not None

    def _settle(self) -> None:
        """Fix the plan, now that the length of the run is known."""
        trainer = self._find_trainer()
        if trainer is None or not self.request.needs_run:
            self.plan = self.request.plan()
        else:
            total = total_steps(trainer) if self.request.total is None else 0
            self.plan = self.request.plan(total, functools.partial(steps_of_epochs, trainer))
        self._say_what_differs()
        self._set_rates()

    def _say_what_differs(self) -> None:
        now, before = self.plan, self._loaded_plan
        if now is None or before is None:
            return
        self._loaded_plan = None
        for name, value in now.as_dict().items():
            if before.get(name) != value:
                say("the schedule's %s is now %s, but was %s in the checkpoint", name, value, before.get(name))

    def _set_rates(self) -> None:
        factor = self.factor
        for group in self.optimizer.param_groups:
            rate = group.setdefault("initial_lr", _copy(group["lr"])) * factor  # for groups added later
            if isinstance(group["lr"], Tensor):
                # In place, since compiled and captured steps read this tensor.
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_in_charge():
            return
        if self.plan is not None:
            self._set_rates()
        elif not _is_predicted(optimizer):  # a prediction needs no learning rate
            why = "no Trainer fits the module, so the length of the run is unknown"
            raise RuntimeError(explain("a schedule with module= in a loop", why, "Give total=10_000 instead"))

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not was_skipped_on_device(optimizer) and not self.engine_reports and self._is_in_charge():
            self.end_update()

    def end_update(self) -> None:
        """Record an update, and set the learning rates of the next one."""
        self.updates += 1
        self.seen, self.coming = self.seen + self.coming, 0
        self._set_rates()

    def _see(self, trainer: L.Trainer, batch: object) -> None:
        samples, tokens = sum_over_ranks([*count_batch(batch)], trainer.world_size)
        self.count(samples=samples, tokens=tokens)


def count_by_engine(optimizer: Optimizer) -> list[Schedule]:
    """Return the schedules of an optimizer that an engine steps shard by shard; from now on updates must be reported.

    The engine reports each update by :meth:`Schedule.end_update`.
    """
    # Hooks are bound methods of their schedules.
    schedules = []
    for hook in optimizer._optimizer_step_post_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Schedule):
            owner.engine_reports = True
            schedules.append(owner)
    return schedules


def _copy(rate: float | Tensor) -> float | Tensor:
    if isinstance(rate, Tensor):
        return rate.clone()
    return rate


def _is_predicted(optimizer: Optimizer) -> bool:
    return any(isinstance(parameter, FakeTensor) for parameter in parameters_of(optimizer))
