"""One global batch per optimizer step, whatever the number of ranks, also in a run that resumes on another number."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader, iterate_again, replace_training_loaders
from lightning_fasttrain.core.messages import explain, number_of, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.core.state.rng import SeededSamples, seeded
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count
from lightning_fasttrain.micro_batching.token_weighted_accumulation import TokenWeightedAccumulation
from lightning_fasttrain.technique import Capability, Conflict
from lightning_fasttrain.technique.declarations import Facts, PredictedStep
from lightning_fasttrain.trial.read_normalizers import Number


@dataclass(frozen=True)
class BatchShares:
    """The division of an epoch's samples into steps, and of those of a step over ranks and accumulated batches.

    Args:
        samples: number of samples in an epoch.
        per_step: the global batch.
        ranks: number of ranks.
        most: the most samples in one forward of a rank.

    Example:
        >>> shares = BatchShares(samples=20, per_step=12, ranks=2, most=3)
        >>> shares.window, shares.batches
        (2, 4)
        >>> [shares.places(batch, rank=1) for batch in range(4)]
        [range(6, 9), range(9, 12), range(16, 18), range(18, 20)]
    """

    samples: int
    per_step: int
    ranks: int
    most: int

    @property
    def window(self) -> int:
        """Number of batches of a rank per optimizer step; the last step of an epoch may have fewer."""
        return self._window_of(self.per_step)

    @property
    def batches(self) -> int:
        """Number of batches of a rank per epoch."""
        steps, rest = divmod(self.samples, self.per_step)
        return steps * self.window + self._window_of(rest)

    def step_of(self, batch: int) -> int:
        """Return the index of the optimizer step that a batch of the epoch belongs to, or that follows the last one."""
        if batch >= self.batches:  # the last step may have fewer batches
            return math.ceil(self.samples / self.per_step)
        return batch // self.window

    def first_batch(self, step: int) -> int:
        """Return the index of the first batch of a step."""
        return min(step * self.window, self.batches)

    def places(self, batch: int, rank: int) -> range:
        """Return the places in the epoch's order that a batch of a rank has; none if there are fewer than ranks."""
        step, within = divmod(batch, self.window)
        first = step * self.per_step
        here = min(self.per_step, self.samples - first)
        window = self._window_of(here)
        shares, share = self.ranks * window, rank * window + within
        return range(first + here * share // shares, first + here * (share + 1) // shares)

    def _window_of(self, samples: int) -> int:
        return math.ceil(samples / (self.ranks * self.most))


@check_arguments
def global_batches(
    loader: DataLoader[object], samples: PositiveInt, seed: int = 0, seed_samples: bool = True
) -> "GlobalBatchLoader":
    """Return a loader of this rank's share of global batches, which are the same on any number of ranks.

    A step takes the next ``samples`` samples in an order that depends on ``seed`` and the epoch alone: that of the
    loader's own sampler, whose random numbers are seeded by them. Each rank reads its share in batches of at most the
    loader's ``batch_size`` samples, which is what fits in memory; so the number of batches per step follows from the
    number of ranks. The position is the number of steps in the epoch, so a state resumes on any number of ranks.

    Args:
        loader: a ``DataLoader`` of a map-style dataset, with any sampler that is not divided over ranks yet; it is not
            changed. With ``batch_size=None`` its samples are batches themselves, read one at a time.
        samples: the global batch: number of samples of a step, over all ranks and accumulated batches.
        seed: of the order, and of the samples.
        seed_samples: seed torch, Python and NumPy for each sample by ``seed``, the epoch and the sample's index, so
            that random augmentations depend neither on the rank nor on the worker. Persistent workers are then
            restarted for each epoch. A dataset that reads several samples at once (``__getitems__``) is seeded for each
            batch.

    Returns:
        The loader. ``windows()`` yields the batches of each step, for
        :func:`~lightning_fasttrain.accumulate_window`; each pass is the next epoch, with another order of a shuffled
        loader, and ``set_epoch(epoch)`` chooses one; ``state_dict()`` is the position, the same on every rank.

    Raises:
        TypeError: not a ``DataLoader`` of a map-style dataset.
        ValueError: the loader has a ``DistributedSampler`` or a ``batch_sampler`` of its own, or ``drop_last`` and
            fewer samples than one step needs; on loading: a state of another global batch, seed or dataset.

    Example:
        >>> import torch
        >>> loader = global_batches(DataLoader(torch.arange(8), batch_size=2), samples=4)
        >>> [[batch.tolist() for batch in window] for window in loader.windows()]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

    Source:
        Ours. ``torch.utils.data.DistributedSampler`` seeds the order in the same way, but a global batch is as large as
        there are ranks, and incomplete shares are filled up with repeated samples.
    """
    return GlobalBatchLoader(loader, samples, seed, seed_samples)


_NEXT_EPOCH = -1  # in the place of the batch that the next pass begins with


class GlobalBatchLoader(WrappedLoader):
    """The loader that :func:`global_batches` returns."""

    def __init__(self, loader: DataLoader[Any], samples: int, seed: int = 0, seed_samples: bool = True) -> None:
        _refuse_other_loaders(loader)
        super().__init__(copy.copy(loader))
        own: Any = loader.sampler
        length = len(own) - len(own) % samples if loader.drop_last else len(own)
        if length == 0:
            what = f"a global batch of {samples:,} samples with drop_last=True"
            why = f"the loader has {len(own):,} samples, which are not enough for one step"
            raise ValueError(explain(what, why, "Use a smaller global batch, or drop_last=False"))
        self._shares = BatchShares(length, samples, rank_count(), loader.batch_size or 1)
        self._rank, self._seed, self._seeds_samples = rank_here(), seed, seed_samples
        self._own_sampler, self._own_data = own, loader.dataset
        self._epoch = self._next = 0  # the epoch, and the batch that the next pass begins with
        self._given = 0  # number of batches given in this epoch
        self._is_over = False  # whether more than these were asked for
        place = vars(self.inner)
        # torch forbids setting these, hence vars(); an iterator reads them when it is created.
        place["batch_sampler" if loader.batch_sampler is not None else "sampler"] = self._indices = _Indices()
        if seed_samples:
            place["persistent_workers"] = False  # workers keep the dataset, and its seed, that they started with

    @property
    def shares(self) -> BatchShares:
        """The division of samples over steps, ranks and batches."""
        return self._shares

    @property
    def sampler(self) -> "GlobalBatchLoader":
        """This object, on which Lightning calls ``set_epoch``."""
        return self

    def __len__(self) -> int:
        return self._shares.batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; a position that was loaded for this very epoch is kept."""
        if epoch != self._epoch or self._next == _NEXT_EPOCH:
            self._epoch, self._next, self._given, self._is_over = epoch, 0, 0, False

    def has_samples(self, batch: int) -> bool:
        """Whether this rank has samples in a batch of the epoch; otherwise it reads one that another rank counts."""
        return len(self._shares.places(batch, self._rank)) > 0

    def __iter__(self) -> Iterator[Any]:
        if self._next == _NEXT_EPOCH:
            self.set_epoch(self._epoch + 1)
        first = self._next
        with seeded(f"{self._seed} {self._epoch} {self._rank}"):  # also for the seed that is drawn for workers
            self._indices.batches = self._list_indices(first)
            if self._seeds_samples:
                vars(self.inner)["dataset"] = SeededSamples(self._own_data, f"{self._seed} {self._epoch}")
            batches = iter(self.inner)
        return self._count(batches, first)

    def _count(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first + 1):
            # Until a batch is given, a further pass begins at the same place.
            self._given, self._next = number, 0
            if number == len(self):
                self._next = _NEXT_EPOCH
            yield batch
        self._next, self._is_over = _NEXT_EPOCH, True

    def windows(self) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step, from the position on.

        Raises:
            ValueError: a rank has no samples in a step.
        """
        window: list[Any] = []
        for batch in self:
            place = self._given - 1
            if not self.has_samples(place):
                why = f"it has {self._shares.samples:,} samples, and its last step has fewer than there are ranks"
                way_out = "Use drop_last=True, or GlobalBatch with the Trainer, which gives such a batch no weight"
                raise ValueError(explain("this rank has no samples in a step of the epoch", why, way_out))
            window.append(batch)
            if self._given == len(self) or self._shares.step_of(self._given) != self._shares.step_of(place):
                yield window
                window = []

    def _list_indices(self, first: int) -> Iterator[Any]:
        order = self._draw_order()
        whole_batches = self.inner.batch_sampler is None
        for batch in range(first, len(self)):
            places = self._shares.places(batch, self._rank)
            # A rank without samples must run a batch nevertheless, since ranks wait for one another.
            chosen = order[places.start : places.stop] or order[places.start - 1 :][:1]
            yield chosen[0] if whole_batches else chosen

    def _draw_order(self) -> list[Any]:
        """Return the indices of an epoch in the order of the loader's own sampler."""
        sampler: Any = self._own_sampler
        own = getattr(sampler, "generator", None)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(self._epoch)
        with seeded(f"{self._seed} {self._epoch}"):
            if not isinstance(own, torch.Generator):
                return list(sampler)
            before = own.get_state()
            own.manual_seed(int(torch.randint(2**62, ())))
            try:
                return list(sampler)
            finally:
                own.set_state(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch given, or the beginning of the next epoch after the end of a pass.

        It is the same on every rank.
        """
        if self._is_over:
            return {**self.position(0), "epoch": self._epoch + 1}
        return self.position(self._given)

    def position(self, batch: int) -> dict[str, Any]:
        """Return the state after ``batch`` batches of the epoch."""
        return {**self._identity(), "epoch": self._epoch, "batch": batch, "step": self._shares.step_of(batch)}

    def _identity(self) -> dict[str, Any]:
        shares = self._shares
        whole = {"global batch": shares.per_step, "seed": self._seed, "samples of an epoch": shares.samples}
        return {**whole, "ranks": shares.ranks, "samples in one forward": shares.most}

    def find_batch(self, state: dict[str, Any]) -> int:
        """Return the batch that continues after ``state``: with other ranks or batches, the first one of its step.

        Raises:
            ValueError: the state is of other global batches.
        """
        mine = self._identity()
        for name in itertools.islice(mine, 3):
            if state[name] != mine[name]:
                what = f"the checkpoint has {name} = {state[name]:,}, this run has {mine[name]:,}"
                why = "its position does not exist in this run's order of samples"
                raise ValueError(explain(what, why, "Use the saved value, or resume from the weights alone"))
        if self.keeps_division(state):
            return state["batch"]
        return self._shares.first_batch(state["step"])

    def keeps_division(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is of as many ranks, and batches as large, as this loader's."""
        return all(state[name] == value for name, value in self._identity().items())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass at the position of ``state``, which may be of another number of ranks."""
        self._epoch, self._next = state["epoch"], self.find_batch(state)
        self._given, self._is_over = self._next, False


class _Indices:
    """A sampler that returns the iterator it is given, so that torch takes what was drawn for this pass."""

    batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def _refuse_other_loaders(loader: object) -> None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        of = f" of {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
        why = "only a DataLoader of a map-style dataset reads samples by their indices"
        way_out = "Pass such a loader, not wrapped and not set up by Fabric, or use EvenEpochs for streams"
        raise TypeError(explain(f"global batches of a {type(loader).__name__}{of}", why, way_out))
    if not hasattr(loader.sampler, "__len__"):
        what = f"a loader whose {type(loader.sampler).__name__} has no length"
        why = "the number of steps in an epoch follows from the number of samples"
        raise TypeError(explain(what, why, "Give the sampler a __len__"))
    if isinstance(loader.sampler, DistributedSampler):
        why = "its order depends on the number of ranks"
        raise ValueError(explain("a loader with a DistributedSampler", why, "Leave the sampler out; use shuffle=True"))
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        what = f"a loader with batch_sampler={type(loader.batch_sampler).__name__}"
        why = "it decides which samples form a batch, so the number of ranks would change the global batch"
        raise ValueError(explain(what, why, "Use batch_size with a sampler that yields single indices"))


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
    names_elsewhere: ClassVar[Mapping[str, str]] = {"batch_size": "samples=", "global_batch_size": "samples="}

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

    def describe_effect(self, model: nn.Module) -> str:
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
        if batch == len(loader):  # Lightning begins the next epoch without another pass
            loader.set_epoch(position["epoch"] + 1)
        iterate_again(trainer)


def shift_batches(trainer: L.Trainer, batches: int) -> None:
    """Add to the number of batches of the current epoch that Lightning has counted."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + batches)
