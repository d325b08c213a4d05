"""Find where a run's checkpoints are written and how many it keeps, and check that the disk has space for them."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fasttrain.checkpoint.atomic_checkpoints import check_folders, why_too_full
from lightning_fasttrain.checkpoint.checkpoint_folder import scratch_folder
from lightning_fasttrain.core.atomic_write import find_existing, free_disk_bytes
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.host.lightning import saves_every
from lightning_fasttrain.core.safe_load import is_remote


@dataclass(frozen=True)
class Place:
    """Folder of one ModelCheckpoint of a run.

    Attributes:
        folder: folder of its files; None if it is not a local folder.
        kept: maximum number of checkpoints at the same time; infinite if it is unknown.
        there: number of these that exist already, because the run was resumed.
        all_kept: whether no checkpoint is ever removed.
    """

    folder: Path | None
    kept: float
    there: int = 0
    all_kept: bool = False


def writers_of(trainer: L.Trainer) -> list[ModelCheckpoint]:
    """Return the ModelCheckpoints that write checkpoints."""
    writers: list[ModelCheckpoint] = []
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and (callback.save_top_k != 0 or callback.save_last):
            writers.append(callback)
    return writers


def saves_within_epochs(writers: list[ModelCheckpoint]) -> bool:
    """Whether checkpoints are also saved after batches, not only at the ends of epochs and validations."""
    return any(steps > 0 or time is not None for steps, time in map(saves_every, writers))


def refuse_bad_folders(trainer: L.Trainer) -> None:
    """Check, before anything is written, that the folders are writable and have space for two checkpoints.

    Raises:
        OSError: on all ranks, if a folder fails.
    """
    reason = check_folders(trainer, trainer.optimizers)
    if reason is not None:
        raise OSError(reason)


def find_places(trainer: L.Trainer) -> list[Place]:
    """Return one place for each ModelCheckpoint."""
    places: list[Place] = []
    for writer in writers_of(trainer):
        folder = None
        if writer.dirpath is not None and not is_remote(writer.dirpath):
            folder = Path(str(writer.dirpath))
        held = [path for path in (*writer.best_k_models, writer.last_model_path) if path and os.path.exists(path)]
        places.append(Place(folder, count_kept(trainer, writer), len(set(held)), writer.save_top_k == -1))
    return places


def count_kept(trainer: L.Trainer, writer: ModelCheckpoint) -> float:
    """Return an upper bound on the number of checkpoints that exist at once."""
    # save_last="link" creates a link, which takes no space.
    last = int(writer.save_last is True)
    if writer.save_top_k == -1:
        return _count_saves(trainer, writer) + last
    return min(writer.save_top_k, _count_saves(trainer, writer)) + last


def _count_saves(trainer: L.Trainer, writer: ModelCheckpoint) -> float:
    steps = float(trainer.estimated_stepping_batches)  # infinite for an unlimited run
    every, time = saves_every(writer)
    if every > 0:
        return steps // every
    if time is not None:
        return math.inf
    epochs = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = float(trainer.max_epochs)
    if math.isfinite(steps):
        steps_an_epoch = max(1.0, trainer.num_training_batches // trainer.accumulate_grad_batches)
        epochs = min(epochs, math.ceil(steps / steps_an_epoch))
    return epochs // (writer.every_n_epochs or 1) * _validations_an_epoch(trainer)


def _validations_an_epoch(trainer: L.Trainer) -> int:
    every = trainer.val_check_batch
    if every is None or not math.isfinite(every) or not math.isfinite(trainer.num_training_batches):
        return 1
    return max(1, math.ceil(trainer.num_training_batches / max(1, every)))


def describe_free_space(places: list[Place], nbytes: int) -> str:
    """Describe how many checkpoints will be kept, and how many fit.

    Raises:
        OSError: they do not fit; the message says how much space is missing.
    """
    words: list[str] = []
    for folder, together in _by_disk(places).items():
        free = free_disk_bytes(folder)
        to_come = sum(place.kept - place.there for place in together)
        fit = free // max(1, nbytes)
        if math.isinf(to_come):
            words.append(f"all are kept, their number is unknown; {fit} fit into {free / GIB:.2f} GiB free")
            continue
        kept = int(sum(place.kept for place in together))
        # A checkpoint is written before another one is removed.
        way_out = "Free some space, or give ModelCheckpoint another dirpath"
        if fit > 1:
            way_out = f"Keep fewer: ModelCheckpoint(save_top_k={fit - 1}), or free some space"
        because = f", and the run will keep {kept} of them and write one more"
        reason = why_too_full(folder, nbytes, int(to_come) + 1, because, way_out)
        if to_come > 0 and reason is not None:
            raise OSError(reason)
        said = f"at most {kept} are kept, {kept * nbytes / GIB:.2f} of {free / GIB:.2f} GiB free"
        if any(place.all_kept for place in together):
            said = f"all, {said}"
        words.append(said)
    return "; ".join(words)


def _by_disk(places: list[Place]) -> dict[Path, list[Place]]:
    """Map an existing folder of each disk to the places on it."""
    disks: dict[int, tuple[Path, list[Place]]] = {}
    for place in places:
        if place.folder is not None:
            there = find_existing(place.folder)
            disks.setdefault(there.stat().st_dev, (there, []))[1].append(place)
    return dict(disks.values())


@contextmanager
def temporary_folder(trainer: L.Trainer, places: list[Place]) -> Iterator[Path]:
    """Create a folder on the disk of the checkpoints, the same on all ranks, which is always removed at the end.

    It is marked like the leftovers of a killed save, so that a killed rehearsal is cleaned up in the same way.
    """
    with ExitStack() as stack:
        name: str | None = None
        try:
            if trainer.is_global_zero:
                name = str(_make_folder(places, stack))
        finally:  # the other ranks wait for it
            name = trainer.strategy.broadcast(name)
        if name is None:
            raise OSError("rank 0 could not create a folder for the rehearsal's checkpoint. See its error")
        yield Path(name)


def _make_folder(places: list[Place], stack: ExitStack) -> Path:
    folders = filter(None, map(attrgetter("folder"), places))
    beside = find_existing(next(folders, Path(tempfile.gettempdir())))
    return stack.enter_context(scratch_folder(beside, "rehearsal"))


def bytes_on_disk(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
