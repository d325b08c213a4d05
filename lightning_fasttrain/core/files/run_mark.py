"""Mark a checkpoint with its run and progress, and read the mark without the tensors."""

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fasttrain.core.files.checkpoint_folder import MANIFEST, read_manifest
from lightning_fasttrain.core.files.safe_load import CorruptCheckpoint, ForeignObjects, read_archive

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
