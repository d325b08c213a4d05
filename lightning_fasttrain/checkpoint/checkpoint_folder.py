"""Checkpoints that are a folder, written by many processes: whole and checksummed, or not there."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning_fasttrain.core.atomic_write import (
    TEMPORARY,
    free_disk_bytes,
    is_being_written,
    is_temporary_file,
    lock,
    make_folder,
    sync_folder,
    temporary_path,
    write_atomic,
)
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.distributed import ControlGroup
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.safe_load import (
    CorruptCheckpoint,
    damage_of_archive,
    existing_path,
    local_path,
    parse_json,
)

MANIFEST = "MANIFEST.json"
OLD = ".fasttrain-old-"
_WAS = "was"  # in a folder of ours, what had the name before
_LOCK = ".writing"
_MARK = b"A folder that lightning_fasttrain has made and will remove. Do not put anything in it.\n"
_LARGEST_MANIFEST = 100 * 2**20


@contextmanager
def checkpoint_folder(
    target: str | os.PathLike[str],
    *,
    ranks: ControlGroup | None = None,
    about: Mapping[str, object] | None = None,
) -> Iterator[Path]:
    """Yield a folder to write a checkpoint into, which takes the name ``target`` once it is complete.

    All ranks enter, with a target that all of them can reach. The folder lies beside the target. On leaving, every
    rank syncs and hashes its share of the files; rank zero writes the manifest last and renames. Whoever is killed
    meanwhile, a reader finds the old folder or the new one, and :func:`newest_checkpoint` removes what was left.

    Args:
        target: the checkpoint's name; a folder of that name is replaced.
        ranks: the ranks that enter; by default this process alone.
        about: plain values for the manifest, such as the step.

    Yields:
        The folder to write into.

    Raises:
        OSError: this rank, or another, could not write. The older folder is as it was.

    Example:
        >>> target = getfixture("tmp_path") / "step-1"
        >>> with checkpoint_folder(target, about={"step": 1}) as folder:
        ...     _ = (folder / "weights").write_bytes(b"1234")
        >>> verify_checkpoint(target)["files"]["weights"]["bytes"]
        4
    """
    target, ranks = local_path(target), ranks or ControlGroup()
    staging = staging_of(target)
    # The mark stays locked until the folder has its name, or is removed.
    with ExitStack() as held:
        # Outside of the `try` below: a folder that is not ours has the name then, and must not be removed.
        with all_or_none(target, ranks):
            if ranks.rank == 0:
                make_folder(target.parent)
                _refuse_to_replace(target)
                # newest_checkpoint of another process sweeps under the same lock.
                with lock(target.parent):
                    settle(target)
                    _refuse_foreign(staging)
                    staging.mkdir()
                    held.enter_context(mark_folder(staging))
        try:
            # Each of the three ends with all ranks waiting for each other: no rank hashes what another still writes.
            with all_or_none(target, ranks):
                yield staging
            with all_or_none(target, ranks):
                sums = _sums(staging, ranks.rank, ranks.count)
            manifest = join_manifest(sums, ranks, about)
            with all_or_none(target, ranks):
                if ranks.rank == 0:
                    _publish(staging, target, manifest)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def all_or_none(target: Path | str, ranks: ControlGroup) -> Iterator[None]:
    """Raise on all ranks if writing a part of checkpoint ``target`` fails on one of them; each waits for all.

    Raises:
        OSError: another rank has failed.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(target, Path):
            free = f"{free_disk_bytes(target) / GIB:.2f} GiB are free there"
            error.add_note(f"While writing checkpoint {target} ({free}). An older one is untouched.")
        # On an interrupt too, or the other ranks would wait forever.
        ranks.agree(False)
        raise
    if not ranks.agree(True):
        why = "another rank failed, see its error; an older checkpoint of this name is untouched"
        raise OSError(explain(f"checkpoint {target} could not be written", why, "Look at the other ranks' output"))


def join_manifest(sums: Mapping[str, object], ranks: ControlGroup, about: Mapping[str, object] | None) -> str:
    """Return the manifest of a checkpoint: JSON with the size and the checksum of each file, from all ranks.

    Args:
        sums: those of this rank's files.
        ranks: the ranks that have written; each waits for all.
        about: plain values, such as the step.
    """
    files: dict[str, Any] = {}
    for others in ranks.gather(sums):
        files |= others
    return json.dumps({"version": 1, "world_size": ranks.count, "about": about or {}, "files": files}, indent=1)


def sums_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and the checksum of each file in ``folder``, by its path in it."""
    return {name: _sum(folder / name) for name in _files(folder)}


def _sums(folder: Path, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: _sum(folder / name, sync=True) for name in _files(folder)[rank::world_size]}


def _sum(path: Path, *, sync: bool = False) -> dict[str, Any]:
    if sync:
        # The whole file, whoever wrote it, is synced through any descriptor; Windows needs one that writes.
        with open(path, "r+b") as written:
            os.fsync(written.fileno())
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _files(folder: Path) -> list[str]:
    """List the checkpoint's files by their path inside ``folder``; links are refused, since they can point anywhere."""
    names, folders = [], [folder]
    while folders:
        # Every rank lists the files of all ranks: the kind of an entry comes with its name, without a request for each.
        with os.scandir(folders.pop()) as entries:
            listed = list(entries)
        for entry in listed:
            if entry.is_symlink():
                why = "it is a link, which may lead out of the folder"
                raise CorruptCheckpoint(explain(entry.path, why, "Remove it"))
            name = Path(entry.path).relative_to(folder).as_posix()
            if entry.is_dir():
                folders.append(Path(entry.path))
            elif entry.is_file() and name not in (MANIFEST, _LOCK) and not name.startswith(TEMPORARY):
                names.append(name)
    return sorted(names)


def _publish(staging: Path, target: Path, manifest: str) -> None:
    # The manifest is written when all that it lists would outlast a power failure.
    for folder in filter(Path.is_dir, staging.rglob("*")):
        sync_folder(folder)
    write_atomic(staging / MANIFEST, manifest)
    _replace(staging, target)


def _replace(staging: Path, target: Path) -> None:
    old = old_of(target)
    # A folder cannot be renamed onto another: between the two renames both are complete.
    if os.path.lexists(target):
        _refuse_foreign(old)
        old.mkdir()
        write_atomic(old / _LOCK, _MARK)
        target.rename(old / _WAS)
    staging.rename(target)
    sync_folder(target.parent)
    # Not before: while it is held, no other process takes the folder for a leftover.
    (target / _LOCK).unlink(missing_ok=True)
    if is_ours(old):
        shutil.rmtree(old)


def staging_of(target: Path) -> Path:
    """Return the temporary path of what will become ``target``."""
    return target.parent / f"{TEMPORARY}{target.name}"


def old_of(target: Path) -> Path:
    """Return the temporary path in which the former ``target`` waits until the new one has its name."""
    return target.parent / f"{OLD}{target.name}"


@contextmanager
def mark_folder(folder: Path) -> Iterator[None]:
    """Mark ``folder`` as made by this package, and lock the mark until this process leaves the context or ends."""
    write_atomic(folder / _LOCK, _MARK)
    with lock(folder / _LOCK):
        yield


@contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """Yield a new, marked folder in ``parent``, and remove it afterwards; ``purpose`` becomes a part of its name."""
    folder = temporary_path(parent, purpose)
    with ExitStack() as held:
        # Others sweep under the same lock, and would take an unmarked folder for what a killed process left.
        with lock(parent):
            folder.mkdir()
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            # Entered last, so that its lock is released before the folder is removed.
            held.enter_context(mark_folder(folder))
        yield folder


def is_ours(folder: Path) -> bool:
    """Return whether this package made ``folder``, by its content and never by its name alone."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    mark = folder / _LOCK
    if mark.is_file() and not mark.is_symlink():
        with open(mark, "rb") as file:
            return file.read(len(_MARK) + 1) == _MARK
    return all(map(is_temporary_file, folder.iterdir()))  # killed before it could be marked


def is_at_work(target: Path) -> bool:
    """Return whether a living process is writing ``target``."""
    return is_being_written(staging_of(target) / _LOCK)


def settle(target: Path) -> None:
    """Finish or remove what a killed save of ``target`` left; no process may be writing it.

    What takes the name is verified first; what is removed carries our mark. All else stays as it is.
    """
    staging, old = staging_of(target), old_of(target)
    if is_ours(old):
        # Killed between the two renames: the former checkpoint gets its name back before a complete new one takes it.
        if not os.path.lexists(target) and os.path.lexists(old / _WAS):
            (old / _WAS).rename(target)
        shutil.rmtree(old)
    ours = is_ours(staging)
    may_take_the_name = ours or not os.path.lexists(target)
    if may_take_the_name and (staging / MANIFEST).is_file() and _damage(staging) is None:
        _replace(staging, target)  # it was complete
    elif ours:
        shutil.rmtree(staging)


def _refuse_foreign(folder: Path) -> None:
    if os.path.lexists(folder):
        why = "it has a name that saving uses, and was not made by it"
        raise FileExistsError(explain(f"{folder}", why, "Move it elsewhere"))


def _refuse_to_replace(target: Path) -> None:
    """Refuse a folder that is not a checkpoint, since a save would remove its contents."""
    if target.is_symlink() or not target.is_dir():
        return
    there = [path.name for path in target.iterdir()]
    # Ours, torch's distributed checkpoint, DeepSpeed under Lightning (two names), and Lightning's FSDP.
    if there and not {MANIFEST, ".metadata", "checkpoint", "latest", "meta.pt"} & set(there):
        why = f"it is a folder, but not a checkpoint: it holds {sorted(there)[:3]}"
        raise FileExistsError(explain(f"{target}", why, "Use another name"))


@check_arguments
def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a complete checkpoint and compare it with its checksums: sha256 for a folder, the archive's for a file.

    Args:
        path: a folder made by :func:`checkpoint_folder`, or a file made by ``torch.save``.

    Returns:
        The folder's manifest; of a file, its size.

    Raises:
        CorruptCheckpoint: it differs from what was written.
        FileNotFoundError: there is no such checkpoint.
    """
    path = existing_path(path)
    reason = _damage(path)
    if reason is not None:
        way_out = f"Use an older one: newest_checkpoint({str(path.parent)!r})"
        raise CorruptCheckpoint(explain(f"{path} is corrupt", reason, way_out))
    return read_manifest(path) if path.is_dir() else {"bytes": path.stat().st_size}


def _damage(path: Path) -> str | None:
    """Read a complete checkpoint, and return what is wrong with it; None if it is whole."""
    if not path.is_dir():
        return damage_of_archive(path)
    try:
        listed, found = read_manifest(path)["files"], _files(path)
        if not listed:
            return f"its {MANIFEST} lists no files"
        if set(listed) != set(found):
            lost, extra = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
            # The manifest may be anyone's, so what is quoted of it is cut.
            return f"{lost[0][:200]} is missing" if lost else f"{extra[0]} does not belong to it"
        for name, expected in listed.items():
            seen = _sum(path / name)
            if seen["bytes"] != expected["bytes"]:
                return f"{name} has {seen['bytes']} bytes of {expected['bytes']}"
            if seen["sha256"] != expected["sha256"]:
                return f"{name} was changed: its sha256 is another"
    except CorruptCheckpoint as error:
        return str(error)
    except OSError as error:  # unreadable, or it goes away meanwhile
        return f"it cannot be read ({error})"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint's folder, without its other files.

    Raises:
        CorruptCheckpoint: it is missing, too large, or not valid.
    """
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CorruptCheckpoint(f"it has no {MANIFEST}, which is written last")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise CorruptCheckpoint(f"{MANIFEST} is larger than {_LARGEST_MANIFEST} bytes")
    try:
        manifest = parse_json(path.read_bytes(), MANIFEST, _LARGEST_MANIFEST)
        _ = [(entry["bytes"], entry["sha256"]) for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST} cannot be read") from error
    if not isinstance(manifest.get("about", {}), dict) or type(manifest.get("world_size", 1)) is not int:
        raise CorruptCheckpoint(f"{MANIFEST} cannot be read")
    return manifest
