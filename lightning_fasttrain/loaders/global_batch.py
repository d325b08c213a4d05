"""One global batch per optimizer step, whatever the number of ranks, also in a run that resumes on another number."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveInt
from lightning_fasttrain.core.host.loader_wrapper import iterate_again, replace_training_loaders
from lightning_fasttrain.core.messages import explain, number_of, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.loaders.global_batches import BatchShares, GlobalBatchLoader
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count
from lightning_fasttrain.micro_batching.token_weighted_accumulation import TokenWeightedAccumulation
from lightning_fasttrain.technique import Capability, Conflict
from lightning_fasttrain.technique.declarations import Facts, PredictedStep
from lightning_fasttrain.trial.read_normalizers import Number


class GlobalBatch(TokenWeightedAccumulation):
    """Take optimizer steps of ``samples`` samples on any number of ranks, and resume on another number.

    The loader's ``batch_size`` is what a rank runs at once. How many batches it accumulates follows from the number of
    ranks, and every target of the step has the same weight, also where ranks have unequal shares: 12 samples are 2 × 3
    × 2 on two ranks, and 3, 3, 2, 2 and 2 on five. A rank without samples in the last step of an epoch runs a batch
    with weight 0. The order of the samples depends on ``seed`` and the epoch alone.

    A checkpoint resumes on another number of ranks, or with another ``batch_size``, at the same sample, step and
    schedule; losses differ by rounding. One that was saved inside a step begins that step again there. With
    :class:`~lightning_fasttrain.ExactResume`, ranks keep their random states, and additional ones get their own; so
    dropout draws other masks on another number of ranks, and on the same number the run resumes bit for bit.

    Acts where Lightning prepares the training loader, instead of its ``DistributedSampler``, and in the closure of the
    step. ``limit_train_batches`` and an integer ``val_check_interval`` count batches of a rank, which depend on the
    number of ranks; ``every_n_train_steps``, ``max_steps`` and schedules count steps, which do not.

    Args:
        samples: the global batch.
        seed, seed_samples: as for :func:`~lightning_fasttrain.loaders.global_batches`.
        count, check: as for :class:`~lightning_fasttrain.TokenWeightedAccumulation`.

    Attributes:
        shares: how the samples are divided, once the loader is made.

    Raises:
        TypeError, ValueError: in ``fit``, as for :func:`~lightning_fasttrain.loaders.global_batches`, and for several
            training loaders; with ``ckpt_path``, a checkpoint of another global batch.

    Example:
        >>> techniques = [GlobalBatch(12)]  # with DataLoader(data, batch_size=3, shuffle=True)

    Source:
        Ours. Megatron-LM derives the number of micro-batches from ``--global-batch-size`` in the same way, where it
        divides; here unequal shares are weighted by their targets.
    """

    capabilities: ClassVar[frozenset[Capability]] = TokenWeightedAccumulation.capabilities | {
        Capability.KEEPS_GLOBAL_BATCH
    }
    effect: ClassVar[str] = "the same global batches on any number of ranks, and resuming on another number"
    when: ClassVar[str] = "the number of ranks may change during a run; not for streams"
    in_a_loop: ClassVar[str] = (
        "accumulate_window(step, window) for window in loaders.global_batches(loader, n).windows()"
    )
    ways_out: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        samples: PositiveInt,
        seed: int = 0,
        seed_samples: bool = True,
        count: Count = "auto",
        check: bool = True,
    ) -> None:
        super().__init__(1, count=count, check=check)
        self.samples, self.seed, self.seed_samples = samples, seed, seed_samples
        self._loader: GlobalBatchLoader | None = None
        self._position: dict[str, Any] | None = None
        self._reference: Any = None  # the real one, while that of a batch without samples is in its place

    @property
    def shares(self) -> BatchShares | None:
        """The division of samples over steps, ranks and batches; None before the loader is made."""
        return None if self._loader is None else self._loader.shares

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why, way_out = "both would decide when to step", "Remove one of them; GlobalBatch weights targets, too"
        return (Conflict(TokenWeightedAccumulation, why, way_out),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.devices == 1:
            return "there is one device, whose batches are the global batches"
        return None

    def took_hold(self, model: nn.Module) -> str:
        return f"every step has {number_of(self.samples, 'sample')} on any number of ranks"

    def predict(self, step: PredictedStep) -> None:
        """Predict a window of two batches, whose memory is that of any longer one."""
        step.window = 2

    def factor_in(self, epoch: int, step: int) -> int:
        """Return the number of batches of a step, which follows from the loader and the number of ranks."""
        if self.shares is None:
            return 1
        return self.shares.window

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        leave = super().attach(trainer, pl_module)
        if leave is None:
            return None
        self._loader = None
        restore = replace_training_loaders(trainer, lambda loader: self._divide(trainer, loader))

        def undo() -> None:
            restore()
            self._loader = None
            leave()

        return undo

    def _divide(self, trainer: L.Trainer, loader: Any) -> GlobalBatchLoader:
        if self._loader is not None and not trainer.reload_dataloaders_every_n_epochs:
            why = "a step of several loaders has no single number of samples"
            raise ValueError(explain("GlobalBatch with several training loaders", why, "Use one loader"))
        self._loader = GlobalBatchLoader(loader, self.samples, self.seed, self.seed_samples)
        trainer.accumulate_grad_batches = self._loader.shares.window  # so that estimated_stepping_batches is right
        return self._loader

    def take_reference(self, trainer: L.Trainer, size: Number) -> None:
        """Set the scale of summed losses; that of a batch without samples is infinite, so that its weight is 0."""
        if self._reference is not None:  # this batch runs again, split in another way
            self.reference, self._reference = self._reference, None
        super().take_reference(trainer, size)
        if self._is_empty(trainer):
            self._reference, self.reference = self.reference, math.inf

    def _is_empty(self, trainer: L.Trainer) -> bool:
        assert self._loader is not None
        return not self._loader.has_samples(trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)

    def add(self, targets: Number, optimizer: Optimizer) -> None:
        """Count a batch after it was run; one without samples has no targets."""
        if self._reference is not None:
            self.reference, self._reference, targets = self._reference, None, 0
        super().add(targets, optimizer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: the position is the number of batches trained on, whatever was fetched ahead."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._loader is not None:
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            checkpoint["GlobalBatch"] = self._loader.position(trained)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Mapping[str, object]
    ) -> None:
        """Hook: the position is restored in ``on_train_start``, when the loader is made with all strategies."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if trainer.state.fn == "fit":
            self._position = checkpoint.get("GlobalBatch")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: Lightning's counters are restored; they become those of this number of ranks."""
        position, self._position = self._position, None
        assert self._loader is not None
        if position is not None:
            self._resume(trainer, position)
        super().on_train_start(trainer, pl_module)
        shares = self._loader.shares
        ranks, batches = number_of(shares.ranks, "rank"), number_of(shares.window, "batch", "batches")
        say("GlobalBatch: %d samples per step = %s × %s of at most %d", self.samples, ranks, batches, shares.most)

    def _resume(self, trainer: L.Trainer, position: dict[str, Any]) -> None:
        loader = self._loader
        assert loader is not None
        batch = loader.find_batch(position)
        shift_batches(trainer, batch - position["batch"])
        if not loader.keeps_division(position):
            self._restored = {**(self._restored or {"reference": None}), "batches": 0, "factor": loader.shares.window}
            self._restored.pop("grads", None)
            say(
                "GlobalBatch: the checkpoint was saved by %s; this run continues at sample %d of epoch %d",
                number_of(position["ranks"], "rank"),
                position["step"] * self.samples,
                position["epoch"],
            )
        loader.load_state_dict(position)
        iterate_again(trainer)


def shift_batches(trainer: L.Trainer, batches: int) -> None:
    """Add to the number of batches of the current epoch that Lightning has counted."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + batches)
