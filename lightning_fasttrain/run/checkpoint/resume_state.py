"""State of a checkpoint that a run resumes from, restored at two moments: loaders are made, and training continues."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning as L

from lightning_fasttrain.core.host.lightning import is_last_batch_taken, validation_loaders
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.state.rng import set_random_state
from lightning_fasttrain.run.checkpoint.gathered_states import unpack
from lightning_fasttrain.run.checkpoint.loaders.loader_rng import generators_of, set_generator_state
from lightning_fasttrain.run.checkpoint.loaders.resumable_loader import ResumableLoader
from lightning_fasttrain.run.checkpoint.loop_progress import SavePoint, end_epoch_of_plateau_schedules
from lightning_fasttrain.run.checkpoint.other_ranks import divide_states
from lightning_fasttrain.run.checkpoint.run_fingerprint import (
    describe_loader,
    keeps_global_batch,
    list_disagreements,
)
from lightning_fasttrain.run.checkpoint.unsaved_state import add_logged, add_metrics, restore_forgotten, restore_metrics


class ResumeState:
    """State that a checkpoint holds for this process.

    Args:
        saved: what :class:`~lightning_fasttrain.run.ExactResume` wrote.
        loops: Lightning's state of the fit loop.
        trainer: the resuming one.
        strict: whether other settings are an error.

    Attributes:
        point: the part of an iteration that was finished.
        settings: those of the saved run.
        mine: state of this process; None if the checkpoint has another number of processes, whose positions and random
            states do not fit. With a technique that keeps the global batch, positions do, and the rest is divided.
        positioned: whether the training loaders have their positions.
        is_divided: whether the checkpoint has another number of processes.
        unlogged: sums behind ``self.log`` that wait for this run to log the same values.
    """

    def __init__(self, saved: dict[str, Any], loops: dict[str, Any], trainer: L.Trainer, strict: bool) -> None:
        self.saved, self.strict = saved, strict
        self.point, self.settings = SavePoint(saved["point"]), saved["settings"]
        self.mine: dict[str, Any] | None = None
        self.is_divided = len(saved["ranks"]) != trainer.world_size
        self.unlogged: list[dict[str, Any]] = []
        self._others: list[dict[str, Any]] = []  # of ranks that this run does not have
        if not self.is_divided:
            self.mine = unpack(saved["ranks"][trainer.global_rank])
        elif keeps_global_batch(trainer):
            self.mine, self._others = divide_states(saved["ranks"], trainer.global_rank, trainer.world_size)
        epochs = loops["epoch_progress"]["current"]
        # Until `completed` is counted, Lightning has not stepped the plateau schedules of the epoch.
        self._plateaus_are_due = self.point is SavePoint.EPOCH and epochs["completed"] < epochs["processed"]
        self._batches = loops["epoch_loop.batch_progress"]["current"]["processed"]
        self.positioned = False
        self._between_passes: list[tuple[ResumableLoader, dict[str, Any]]] = []
        self._said: set[str] = set()

    def check(self, now: dict[str, Any], then: dict[str, Any] | None = None) -> None:
        """Refuse other settings than the saved ones, or warn of each once if not ``strict``."""
        for message in list_disagreements(self.settings if then is None else then, now):
            if message in self._said:
                continue
            self._said.add(message)
            if self.strict:
                raise ValueError(message)
            warn(message)

    def check_loader(self, loader: object, i: int) -> None:
        """Refuse another training loader than the one that was saved at this place."""
        saved = self.settings["loaders"]
        self.check(describe_loader(loader), next(iter(saved[i:]), None) or {})

    def set_position(self, held: ResumableLoader | None, i: int) -> None:
        """First moment: a training loader is made, and resumes at its position."""
        if held is None or self.mine is None:
            return
        state = next(iter(self.mine["loaders"][i:]), None)
        if not state:
            return
        _load(held, state)
        if state["start"] is None:
            self._between_passes.append((held, state))
        else:
            held.count_from(self._batches)

    def _restore_metrics(self, trainer: L.Trainer, module: L.LightningModule, mine: dict[str, Any]) -> None:
        logged = [state["logged"] for state in (mine, *self._others)]
        if self.is_divided and not is_last_batch_taken(trainer):
            # self.log refuses a value that was restored with another sync, which depends on the number of ranks; so
            # these sums are added to those of the next batch.
            self.unlogged, mine = logged, {**mine, "logged": {}}
        restore_metrics(trainer, module, mine)
        for other in self._others:
            add_metrics(module, other)
            add_logged(trainer, other["logged"])

    def restore(self, trainer: L.Trainer, module: L.LightningModule) -> list[list[Any]]:
        """Second moment: training continues right after this, with the saved random states.

        Returns:
            The generator states of validation loaders that are not made yet.
        """
        restore_forgotten(trainer, self.saved["forgotten"])
        mine = self.mine
        if mine is None:
            return []
        parameters = dict(module.named_parameters())
        if "gradients" in self.saved:
            for name, grad in self.saved["gradients"][trainer.global_rank].items():
                parameters[name].grad = grad.to(parameters[name])
        self._restore_metrics(trainer, module, mine)
        if self._plateaus_are_due:
            end_epoch_of_plateau_schedules(trainer)
        for held, state in self._between_passes:
            _load(held, state)  # again: Lightning may have prefetched a batch
        loaders = validation_loaders(trainer)
        for loader, states in zip(loaders, mine["validation"], strict=False):
            set_generators(loader, states)
        # Last, since everything above may draw random numbers.
        set_random_state(mine["random"])
        if loaders:
            return []
        return list(mine["validation"])


class _HeldLoader(ResumableLoader):
    """A loader whose position is saved by the callback, for every process, instead of by Lightning for rank 0."""

    # Lightning regards a loader with a state_dict as resumable, and does not warn.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        assert not state


# The method of the base class, since a held loader returns an empty state to Lightning.
_load = ResumableLoader.load_state_dict


def keeps_its_state(loader: object) -> bool:
    """Whether Lightning saves and restores this loader; the condition is Lightning's own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def hold_loader(loader: Iterable[object], seed_samples: bool) -> ResumableLoader | None:
    """Wrap a training loader so that its position is known; return None if it is not ours to save."""
    if keeps_its_state(loader):
        return None
    if isinstance(loader, Iterator):
        what = f"ExactResume with a {type(loader).__name__} as a training loader"
        why = "an iterator cannot be read again from its beginning, so its position is not saved"
        warn(explain(what, why, "Use a DataLoader, or an object whose __iter__ starts over"))
        return None
    return _HeldLoader(loader, seed_samples)


def set_generators(loader: object, states: list[Any]) -> None:
    """Restore the generators of a loader, as far as there are states for them."""
    for generator, state in zip(generators_of(loader), states, strict=False):
        set_generator_state(generator, state)
