"""Mark a checkpoint with its run and progress, and read the mark without the tensors."""

import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fasttrain.core.files.checkpoint_folder import MANIFEST, read_manifest
from lightning_fasttrain.core.files.safe_load import CorruptCheckpoint, ForeignObjects, read_archive

KEY = "lightning_fasttrain.run"


class RunMark:
    """Return the name of a run, drawn once, and taken over from the checkpoint that a later process resumes from.

    Example:
        >>> first, second = RunMark(), RunMark()
        >>> second.continue_from(first.facts(step=3))
        >>> second.run == first.run
        True
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)

    def facts(self, step: object) -> dict[str, Any]:
        """The mark of a checkpoint: plain values, for its manifest or beside its state."""
        return {"run": self.run, "step": step if type(step) is int else None, "saved_at": time.time()}

    def continue_from(self, facts: object) -> None:
        """Be the run that ``facts`` are of; without a run in them, stay another."""
        run = facts.get("run") if isinstance(facts, dict) else None
        self.run = run if isinstance(run, str) else self.run


def mark_of(owner: object) -> RunMark:
    """The mark of the run that ``owner``, a strategy, writes the checkpoints of; drawn when it is asked for first."""
    return vars(owner).setdefault("_run_mark", RunMark())


@dataclass(frozen=True)
class Facts:
    """Return what a checkpoint states without being read completely; None where it does not say.

    Args:
        run: drawn when the run began.
        step: optimizer steps done.
        saved_at: seconds since 1970, by the clock of the process that saved.
    """

    run: str | None = None
    step: int | None = None
    saved_at: float | None = None


def step_in(checkpoint: object) -> int | None:
    """Lightning's ``global_step``, or the ``step`` of a loop."""
    if not isinstance(checkpoint, dict):
        return None
    found = [checkpoint.get(key) for key in ("global_step", "step")]
    return next((step for step in found if type(step) is int), None)


def facts_of(path: Path) -> Facts:
    """Read the mark of the checkpoint at ``path``: in a folder's manifest, or beside the tensors of a file.

    It may be damaged all the same. A file of Lightning's own has a step and no run; one that cannot be read safely,
    nothing.
    """
    try:
        if path.is_dir():
            about = read_manifest(path).get("about", {}) if (path / MANIFEST).is_file() else {}
            return _facts(about, step_in(about))
        checkpoint = read_archive(path, mmap=True)  # its tensors stay in the file
    except (CorruptCheckpoint, ForeignObjects, OSError):
        return Facts()
    about = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    return _facts(about if isinstance(about, dict) else {}, step_in(checkpoint))


def _facts(about: dict[str, Any], step: int | None) -> Facts:
    run, saved_at = about.get("run"), about.get("saved_at")
    if not isinstance(saved_at, int | float) or not math.isfinite(saved_at):
        saved_at = None
    return Facts(run if isinstance(run, str) else None, step, saved_at)
