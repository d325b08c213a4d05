"""Floor: checkpoints that are a folder, written by many processes: whole and checksummed, or not there."""

import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain._files import TEMPORARY, is_being_written, lock, sync_folder, write_atomic
from lightning_fasttrain._messages import explain, say, warn

MANIFEST = "MANIFEST.json"
_OLD = ".fasttrain-old-"
_LOCK = ".writing"
_LARGEST_MANIFEST = 100 * 2**20


class CorruptCheckpoint(ValueError):
    """A checkpoint that is cut short, changed, or not one at all. The message names the file and the reason."""


def agree_on_all_ranks(ok: bool, group: Any = None) -> bool:
    """Whether every process says yes; each waits for all. Alone, it is the caller's own answer."""
    if not (dist.is_available() and dist.is_initialized()):
        return ok
    on_gpu = dist.get_backend(group) == "nccl"
    answer = torch.tensor(int(ok), device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
    return bool(answer)


@contextmanager
def checkpoint_folder(
    target: str | os.PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    agree: Callable[[bool], bool] = bool,
    about: dict[str, Any] | None = None,
) -> Iterator[Path]:
    """Yield a folder to write a checkpoint into, which takes the name ``target`` once it is complete.

    All ranks enter, with a target that all of them can reach. The folder lies beside the target. On leaving, every
    rank syncs and hashes its share of the files; rank zero writes the manifest last and renames. Whoever is killed
    meanwhile, a reader finds the old folder or the new one, and :func:`newest_checkpoint` removes what was left.

    Args:
        target: the checkpoint's name; a folder of that name is replaced.
        rank, world_size: of the caller, among those that enter.
        agree: says whether all ranks were fine, and waits for them: :func:`agree_on_all_ranks`.
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
    target = Path(target)
    staging = target.parent / f"{TEMPORARY}{target.name}"
    with ExitStack() as held:
        with _all_or_none(target, agree):
            if rank == 0:
                target.parent.mkdir(parents=True, exist_ok=True)
                _settle(target)
                staging.mkdir()
                (staging / _LOCK).touch()
                held.enter_context(lock(staging / _LOCK))  # dies with this process, which tells leftovers from work
        try:
            with _all_or_none(target, agree):
                yield staging
            with _all_or_none(target, agree):
                write_atomic(staging / f".sums-{rank}", json.dumps(_sums(staging, rank, world_size)))
            with _all_or_none(target, agree):
                if rank == 0:
                    _publish(staging, target, {"world_size": world_size, "about": about or {}})
        except BaseException:
            if rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def _all_or_none(target: Path, agree: Callable[[bool], bool]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
        error.add_note(
            f"While writing checkpoint {target} ({free / 2**30:.2f} GiB are free there). An older one is untouched."
        )
        agree(False)
        raise
    if not agree(True):
        raise OSError(
            explain(
                f"checkpoint {target} could not be written",
                "another rank failed, see its error; an older checkpoint of this name is untouched",
                "Look at the other ranks' output",
            )
        )


def _sums(folder: Path, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: _sum(folder / name, sync=True) for name in _files(folder)[rank::world_size]}


def _sum(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _files(folder: Path) -> list[str]:
    """All files but our own, by their path inside ``folder``. Links are refused: they can point anywhere."""
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise CorruptCheckpoint(explain(f"{path}", "it is a link, which may lead out of the folder", "Remove it"))
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in (MANIFEST, _LOCK) and not name.startswith((".sums-", TEMPORARY)):
            names.append(name)
    return sorted(names)


def _publish(staging: Path, target: Path, facts: dict[str, Any]) -> None:
    files: dict[str, Any] = {}
    for part in sorted(staging.glob(".sums-*")):
        files |= json.loads(part.read_text())
        part.unlink()
    for folder in (path for path in staging.rglob("*") if path.is_dir()):
        sync_folder(folder)
    write_atomic(staging / MANIFEST, json.dumps({"version": 1, **facts, "files": files}, indent=1))
    _replace(staging, target)


def _replace(staging: Path, target: Path) -> None:
    (staging / _LOCK).unlink(missing_ok=True)
    old = target.parent / f"{_OLD}{target.name}"
    if target.exists():  # a folder cannot be renamed onto another: between the two renames both are complete
        target.rename(old)
    staging.rename(target)
    sync_folder(target.parent)
    _remove(old)


def _settle(target: Path) -> None:
    """Finish or remove what a killed save of ``target`` left. Nobody may be writing it."""
    staging, old = target.parent / f"{TEMPORARY}{target.name}", target.parent / f"{_OLD}{target.name}"
    if (staging / MANIFEST).exists():  # it was complete
        _replace(staging, target)
    _remove(staging)
    if target.exists():
        _remove(old)
    elif old.exists():
        old.rename(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read all of a checkpoint and hold it against its checksums: sha256 for a folder, the archive's for a file.

    Args:
        path: a folder made by :func:`checkpoint_folder`, or a file made by ``torch.save``.

    Returns:
        The folder's manifest; of a file, its size.

    Raises:
        CorruptCheckpoint: it is not as it was written.
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(explain(f"{path}", "there is no such checkpoint", f"Look into {path.parent}"))
    reason = _damage(path)
    if reason is not None:
        raise CorruptCheckpoint(
            explain(f"{path} is corrupt", reason, f"Use an older one: newest_checkpoint({str(path.parent)!r})")
        )
    return read_manifest(path) if path.is_dir() else {"bytes": path.stat().st_size}


def _damage(path: Path) -> str | None:
    if not path.is_dir():
        return _damage_of_file(path)
    try:
        listed, found = read_manifest(path)["files"], _files(path)
    except CorruptCheckpoint as error:
        return str(error)
    if set(listed) != set(found):
        lost, extra = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
        return f"{lost[0]} is missing" if lost else f"{extra[0]} does not belong to it"
    for name, expected in listed.items():
        seen = _sum(path / name)
        if seen["bytes"] != expected["bytes"]:
            return f"{name} has {seen['bytes']} bytes of {expected['bytes']}"
        if seen["sha256"] != expected["sha256"]:
            return f"{name} was changed: its sha256 is another"
    return None


def _damage_of_file(path: Path) -> str | None:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        torch._C.PyTorchFileReader(os.fspath(path)).get_all_records()  # stricter about the archive's own structure
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:  # RuntimeError: encrypted
        return f"its {size} bytes are no archive of torch.save ({error})"
    return f"{broken} in it was changed: its checksum is another" if broken is not None else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint's folder says of itself; its files are not looked at.

    Raises:
        CorruptCheckpoint: it says nothing that can be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CorruptCheckpoint(f"it has no {MANIFEST}, which is written last")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise CorruptCheckpoint(f"{MANIFEST} is larger than {_LARGEST_MANIFEST} bytes")
    try:
        manifest = json.loads(path.read_text())
        _ = [(entry["bytes"], entry["sha256"]) for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST} cannot be read") from error
    return manifest


def whole_or_newest(path: str | os.PathLike[str]) -> Path:
    """``path`` if it is whole, else the newest whole checkpoint beside it, which is said.

    Raises:
        CorruptCheckpoint: it is damaged, and no other is there.
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if not path.exists():
        _sweep(path.parent)  # a save that was killed when it was complete takes its name only now
    try:
        verify_checkpoint(path)
        return path
    except CorruptCheckpoint as error:
        try:
            other = newest_checkpoint(path.parent)
        except CorruptCheckpoint:
            other = None
        if other is None:
            raise error
        warn(f"{error} In its place {other} is loaded.")
        return other


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in ``folder`` that is whole, for ``trainer.fit(..., ckpt_path=...)``.

    Every candidate is read through and held against its checksums; one that is damaged is passed over, and it is
    said. What a killed save has left is finished if it was complete, and removed if nobody is writing it.

    Args:
        folder: where checkpoints are: files ``*.ckpt``, and folders as ZeRO and FSDP2 write them.

    Returns:
        Its path; None if there is no checkpoint at all, which is said too.

    Raises:
        CorruptCheckpoint: there are checkpoints, and none of them is whole.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> newest_checkpoint(folder) is None
        True
        >>> torch.save({"step": 1}, folder / "one.ckpt")
        >>> _ = (folder / "two.ckpt").write_bytes(b"cut short")
        >>> import pytest
        >>> with pytest.warns(UserWarning, match="two.ckpt is corrupt"):
        ...     newest_checkpoint(folder).name
        'one.ckpt'
    """
    folder = Path(folder)
    _sweep(folder)
    candidates = [path for path in _entries(folder) if path.suffix == ".ckpt" or (path / MANIFEST).is_file()]
    candidates = [path for path in candidates if not path.name.startswith((TEMPORARY, _OLD))]
    for path in sorted(candidates, key=_written_at, reverse=True):
        try:
            verify_checkpoint(path)
        except CorruptCheckpoint as error:
            warn(f"passed over: {error}")
        else:
            return path
    if candidates:
        raise CorruptCheckpoint(
            explain(
                f"{folder} holds {len(candidates)} checkpoints",
                "all of them are corrupt, and a run from the beginning is not what was asked for",
                "Move them away to begin anew",
            )
        )
    say("no checkpoint in %s: the run starts from the beginning", folder)
    return None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _written_at(path: Path) -> int:
    manifest = path / MANIFEST
    return (manifest if manifest.is_file() else path).stat().st_mtime_ns


def _sweep(folder: Path) -> None:
    """Finish or remove what killed saves left. Several ranks may come here at once: one after the other."""
    if not any(path.name.startswith((TEMPORARY, _OLD)) for path in _entries(folder)):
        return
    with lock(folder):
        for path in _entries(folder):
            if path.name.startswith(_OLD):
                name = path.name.removeprefix(_OLD)
                if not is_being_written(folder / f"{TEMPORARY}{name}" / _LOCK):
                    _settle(folder / name)
            elif path.name.startswith(TEMPORARY) and not is_being_written(path / _LOCK if path.is_dir() else path):
                if path.is_dir():
                    _settle(folder / path.name.removeprefix(TEMPORARY))
                else:
                    path.unlink(missing_ok=True)
