"""Mark the checkpoints of a run, find the one to resume from, load only complete ones, and clean up after kills."""

import math
import os
import pickle
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_fasttrain.checkpoint.checkpoint_folder import (
    MANIFEST,
    OLD,
    is_at_work,
    is_ours,
    read_manifest,
    settle,
    verify_checkpoint,
)
from lightning_fasttrain.checkpoint.remote_checkpoint import fetched
from lightning_fasttrain.core.atomic_write import TEMPORARY, is_being_written, is_temporary_file, lock
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, first_line, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.safe_load import (
    CorruptCheckpoint,
    ForeignObjects,
    existing_path,
    is_object_storage,
    local_path,
    read_archive,
)

KEY = "lightning_fasttrain.run"


class RunMark:
    """Random name of a run, which a later process takes over from the checkpoint that it resumes from.

    Example:
        >>> first, second = RunMark(), RunMark()
        >>> second.continue_from(first.facts(step=3))
        >>> second.run == first.run
        True
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)

    def facts(self, step: object) -> dict[str, Any]:
        """Return the mark of a checkpoint: plain values, for its manifest or beside its state."""
        if type(step) is not int:
            step = None
        return {"run": self.run, "step": step, "saved_at": time.time()}

    def continue_from(self, facts: object) -> None:
        """Take over the name of the run in ``facts``, if there is one."""
        if isinstance(facts, dict) and isinstance(facts.get("run"), str):
            self.run = facts["run"]


def mark_of(owner: object) -> RunMark:
    """Return the mark of the run whose checkpoints ``owner``, a strategy, writes; drawn at the first call."""
    return vars(owner).setdefault("_run_mark", RunMark())


@dataclass(frozen=True)
class Facts:
    """Facts that a checkpoint records, known without its tensors; None for what it does not record.

    Args:
        run: drawn when the run began.
        step: optimizer steps done.
        saved_at: seconds since 1970, by the clock of the process that saved.
    """

    run: str | None = None
    step: int | None = None
    saved_at: float | None = None


def step_in(checkpoint: object) -> int | None:
    """Return Lightning's ``global_step``, or the ``step`` of a loop; None if there is neither."""
    if not isinstance(checkpoint, dict):
        return None
    for key in ("global_step", "step"):
        step = checkpoint.get(key)
        if type(step) is int:
            return step
    return None


def facts_of(path: Path) -> Facts:
    """Read the mark of the checkpoint at ``path``: in a folder's manifest, or beside the tensors of a file.

    The checkpoint may be damaged nevertheless. Lightning's own files record a step but not a run; of a file that
    cannot be read safely, nothing is known.
    """
    try:
        if path.is_dir():
            if not (path / MANIFEST).is_file():
                return Facts()
            about = read_manifest(path).get("about", {})
            return _facts(about, step_in(about))
        checkpoint = read_archive(path, mmap=True)  # its tensors stay in the file
    except (CorruptCheckpoint, ForeignObjects, OSError):
        return Facts()
    about = {}
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get(KEY), dict):
        about = checkpoint[KEY]
    return _facts(about, step_in(checkpoint))


def _facts(about: Mapping[str, object], step: int | None) -> Facts:
    run, saved_at = about.get("run"), about.get("saved_at")
    if not isinstance(saved_at, int | float) or not math.isfinite(saved_at):
        saved_at = None
    if not isinstance(run, str):
        run = None
    return Facts(run, step, saved_at)


def whole_or_older(path: str | os.PathLike[str], *, substitute: bool) -> Path:
    """Return ``path`` if it is complete, else an older complete checkpoint of the same run, with a warning.

    Args:
        path: a file or a folder of this machine.
        substitute: whether another may be taken. Not where the weights themselves are asked for, as in validation.

    Raises:
        CorruptCheckpoint: it is damaged, and there is no other, or none may be taken.
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is an address instead of a path.
    """
    path = local_path(path)
    if not path.exists():
        # A save that was killed when it was complete takes its name only now.
        sweep(path.parent)
    try:
        verify_checkpoint(path)
        return path
    except CorruptCheckpoint as error:
        if not substitute or (other := _older_of_its_run(path)) is None:
            raise
        warn(f"{error} Instead {other} is loaded, an older one of the same run.")
        return other


def _older_of_its_run(path: Path) -> Path | None:
    """Return a complete checkpoint of the same run that is not newer, by what both record; None if there is none."""
    asked = facts_of(path)
    # Without both, another run's checkpoint in this folder could be taken for this one's.
    if asked.run is None or asked.step is None:
        return None
    older: dict[Path, int] = {}
    for other in _candidates(path.parent):
        facts = facts_of(other)
        if other != path and facts.run == asked.run and facts.step is not None and facts.step <= asked.step:
            older[other] = facts.step
    # One after the other: to find out whether one is whole, all of it is read.
    return next(filter(_is_whole, sorted(older, key=older.__getitem__, reverse=True)), None)


@check_arguments
def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, for ``trainer.fit(..., ckpt_path=...)``.

    The newest is the one with the most recorded steps, of the run that saved last, so copying a folder has no effect.
    A file that does not record its step (a damaged one, or one with objects of other classes) counts as far as those
    that were written before it, by the clock of the file system.

    Every candidate is read completely and compared with its checksums; a damaged one is passed over with a warning.
    What a killed save has left is finished if it was complete, and removed if no process is writing it. Files, folders
    and links that this package did not make are not changed.

    Args:
        folder: where checkpoints are: files ``*.ckpt``, and folders as ZeRO and FSDP2 write them.

    Returns:
        Its path; None, with a message, if there is no checkpoint.

    Raises:
        CorruptCheckpoint: there are checkpoints, but all of them are damaged.
        ValueError: ``folder`` is the name of a checkpoint; or an address, as of a bucket: for these there is
            :func:`~lightning_fasttrain.checkpoint.newest_remote_checkpoint`.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> newest_checkpoint(folder) is None
        True
        >>> import torch
        >>> torch.save({"step": 1}, folder / "one.ckpt")
        >>> _ = (folder / "two.ckpt").write_bytes(b"cut short")
        >>> import pytest
        >>> with pytest.warns(UserWarning, match="two.ckpt is corrupt"):
        ...     newest_checkpoint(folder).name
        'one.ckpt'
    """
    if is_object_storage(folder):
        why = "it is an address, and this looks into folders of this machine"
        raise ValueError(explain(f"{folder}", why, "Use lightning_fasttrain.checkpoint.newest_remote_checkpoint"))
    folder = local_path(folder)
    if folder.suffix == ".ckpt":
        why = "it is the name of one checkpoint, and this looks into a folder of them"
        raise ValueError(explain(f"{folder}", why, f"Pass the folder, {str(folder.parent)!r}"))
    sweep(folder)
    candidates = _candidates(folder)
    for path in _newest_first(candidates):
        if _is_whole(path):
            return path
    if candidates:
        why = "all of them are corrupt, and a run from the beginning is not what was asked for"
        way_out = "Move them away to begin again"
        raise CorruptCheckpoint(explain(f"{folder} holds {len(candidates)} checkpoints", why, way_out))
    say("no checkpoint in %s: the run starts from the beginning", folder)
    return None


def explain_missing_last(folders: Iterable[object]) -> str:
    """Return the message where ``ckpt_path="last"`` finds nothing in the folders, or addresses, of the run."""
    why = "there is no last checkpoint, so the run would start from the beginning"
    way_out = "Check the folder of ModelCheckpoint(save_last=True); or, to start where there is none, use ckpt_path="
    finds = "newest_checkpoint(folder)"
    if any(map(is_object_storage, folders)):
        why = "Lightning looks for it on this machine only, so the run would start from the beginning"
        way_out, finds = "Use ckpt_path=", "checkpoint.newest_remote_checkpoint(address)"
    return explain("ckpt_path='last'", why, f"{way_out}lightning_fasttrain.{finds}")


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except (CorruptCheckpoint, OSError) as error:
        warn(f"passed over: {error}")
        return False
    return True


def _candidates(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in _entries(folder):
        # A leading dot marks temporary files: ours, and those of other programs, such as rsync.
        if path.name.startswith(".") or path.suffix == ".tmp" or not path.exists():
            continue
        if path.suffix == ".ckpt" or (path / MANIFEST).is_file():
            found.append(path)
    return found


def _newest_first(paths: list[Path]) -> list[Path]:
    known = {path: facts_of(path) for path in paths}
    at: dict[Path, float] = {}
    # The time of each run's last save; files that name no run count as one.
    last: dict[str | None, float] = {}
    for path, facts in known.items():
        at[path] = _saved_at(path, facts)
        if facts.step is not None:
            last[facts.run] = max(at[path], last.get(facts.run, 0.0))
    with_step: dict[Path, tuple[float, int, float]] = {}
    for path, facts in known.items():
        if facts.step is not None:
            with_step[path] = (last[facts.run], facts.step, at[path])
    ranks = dict(with_step)
    # A file without a step counts as far as the farthest of those that were written before it.
    for path in known.keys() - with_step.keys():
        before = [rank for other, rank in with_step.items() if _written_at(other) <= at[path]]
        run_saved_at, step, _ = max(before, default=(0.0, -1, 0.0))
        ranks[path] = (run_saved_at, step, at[path])
    return sorted(paths, key=lambda path: ranks[path], reverse=True)


def _saved_at(path: Path, facts: Facts) -> float:
    if facts.saved_at is None:
        return _written_at(path)
    return facts.saved_at


def _written_at(path: Path) -> float:
    manifest = path / MANIFEST
    # The time of a folder is that of the last change to its list of names, which a stray file in it changes too.
    if manifest.is_file():
        return manifest.stat().st_mtime
    return path.stat().st_mtime


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return list(folder.iterdir())


def sweep(folder: Path) -> None:
    """Finish or remove what killed saves left; several ranks may call it at once, and take turns."""
    # Without the lock at first: mostly nothing is there, and then no process has to wait.
    if not any(path.name.startswith((TEMPORARY, OLD)) for path in _entries(folder)):
        return
    try:
        with lock(folder):
            for path in _entries(folder):
                _sweep_one(path)
    except OSError as error:  # a folder that may only be read
        warn(f"what a killed save left in {folder} stays there: {error}")


def _sweep_one(path: Path) -> None:
    for beginning in (TEMPORARY, OLD):
        name = path.name.removeprefix(beginning)
        if name != path.name and path.is_dir() and not path.is_symlink():
            target = path.parent / name
            if name and not is_at_work(target) and (is_ours(path) or (path / MANIFEST).is_file()):
                settle(target)
            return
    if is_temporary_file(path) and not is_being_written(path):
        path.unlink(missing_ok=True)


def guard_loading(strategy: Strategy) -> Undo:
    """Restrict ``strategy.load_checkpoint`` to complete files and folders; errors name the reason.

    Several techniques may call it: a strategy that is guarded already is not changed.
    """
    if isinstance(vars(strategy).get("load_checkpoint"), _GuardedLoad):
        return lambda: None
    return patch(strategy, "load_checkpoint", _GuardedLoad(strategy))


class _GuardedLoad:
    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.load = strategy, strategy.load_checkpoint

    def __call__(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if is_object_storage(checkpoint_path):
            if getattr(self.strategy, "reads_remote", False):
                return self.load(str(checkpoint_path), *args, **kwargs)
            with fetched(str(checkpoint_path)) as copied:
                return self(copied, *args, **kwargs)
        path = existing_path(checkpoint_path)
        # One of ours reads all of the file anyway and says what is wrong; twice would take twice as long.
        if path.is_file() and not getattr(self.strategy.checkpoint_io, "verifies", False):
            verify_checkpoint(path)
        try:
            checkpoint = self.load(path, *args, **kwargs)
        except IsADirectoryError as error:
            why = "it is a folder, as strategies that shard write them"
            raise ValueError(explain(f"{path}", why, "Use the strategy that saved it, or full_checkpoint")) from error
        except (ValueError, OSError):  # ours, and those that say what they mean
            raise
        except pickle.UnpicklingError as error:
            why = f"it holds what could only be made by running code from it ({first_line(error)})"
            raise ForeignObjects(explain(f"{path}", why, "If you trust it, give weights_only=False")) from error
        except (RuntimeError, EOFError, LookupError, TypeError, AttributeError) as error:
            why = f"it cannot be read ({type(error).__name__}: {first_line(error)})"
            raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one")) from error
        if path.is_file() and not (isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint):
            why = "expected a checkpoint of a Trainer, which holds the progress of its run"
            raise ValueError(explain(f"{path}", why, "Load it with model.load_state_dict, and leave ckpt_path out"))
        return checkpoint
