"""Checkpoints in object storage, through fsspec: a manifest is written last, and a checkpoint is read from a copy.

A folder is stored as ``URL/data-…/file`` and ``URL/MANIFEST.json``. Every save has ``data-…`` of its own, so an
older checkpoint of the same name stays complete until the new manifest replaces the old one.
"""

import glob
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from lightning_fasttrain.checkpoint.checkpoint_folder import (
    MANIFEST,
    all_or_none,
    checkpoint_folder,
    join_manifest,
    read_manifest,
    sums_of,
    verify_checkpoint,
)
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import ControlGroup, from_all_ranks, from_first_of_node
from lightning_fasttrain.core.messages import explain, first_line, say, warn
from lightning_fasttrain.core.safe_load import CorruptCheckpoint, is_object_storage

_DATA = "data-"
_NAME = re.compile(rf"{_DATA}[0-9a-f]{{16}}/(?P<file>[^/\0]+(/[^/\0]+)*)")
# Object stores, in which an upload is visible only when it is complete.
_ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"}


class _StorageError(OSError):
    """Error of a file system with an explanation."""


class _NoSuchCheckpoint(_StorageError, FileNotFoundError):
    pass


def upload_file(local: Path, url: str) -> None:
    """Upload one file; an object store shows the old one or the complete new one.

    Raises:
        OSError: it could not be uploaded.
    """
    fs, path = _open(url)
    if _is_atomic(fs):
        _upload(fs, local, path, url)
        return
    with _explained(url, "written"):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        part = f"{path}.part-{secrets.token_hex(4)}"
        try:
            fs.put_file(str(local), part)
            fs.mv(part, path)
        except BaseException:
            _remove(fs, part)
            raise


def why_unwritable_storage(url: str) -> str | None:
    """Return why checkpoints cannot be written to an address; None if they can. An empty file is written and removed.

    Example:
        >>> why_unwritable_storage("memory://checkpoints") is None
        True
    """
    try:
        fs, path = _open(url)
        probe = f"{path}/.fasttrain-probe-{secrets.token_hex(4)}"
        with tempfile.NamedTemporaryFile() as empty:
            _upload(fs, Path(empty.name), probe, f"in {url}")
    except OSError as error:
        return str(error)
    _remove(fs, probe)
    return None


@contextmanager
def remote_folder(url: str, *, ranks: ControlGroup, about: Mapping[str, object] | None) -> Iterator[Path]:
    """Yield a local folder for this rank's files, which are uploaded on leaving; rank zero writes the manifest last.

    Args:
        url: the checkpoint's address; an older checkpoint there is replaced when the new one is complete.
        ranks, about: as for
            :func:`~lightning_fasttrain.checkpoint.checkpoint_folder.checkpoint_folder`.

    Raises:
        OSError: this rank, or another, could not write; an older checkpoint is as it was.
    """
    fs, path = _open(url)
    own = f"{_DATA}{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="fasttrain-upload-") as temporary:
        folder = Path(temporary)
        with all_or_none(url, ranks), _explained(url, "written"):
            if ranks.rank == 0:
                fs.exists(path)  # an error here, such as of wrong credentials, leaves nothing to remove
        try:
            with all_or_none(url, ranks):
                yield folder
                sums = {f"{own}/{name}": entry for name, entry in sums_of(folder).items()}
                for name in sums:
                    _upload(fs, folder / name.removeprefix(f"{own}/"), f"{path}/{name}", url)
            (folder / MANIFEST).write_text(join_manifest(sums, ranks, about))
            with all_or_none(url, ranks):
                if ranks.rank == 0:
                    _upload(fs, folder / MANIFEST, f"{path}/{MANIFEST}", url)
                    _remove_older(fs, path, read_manifest(folder))
        except BaseException:
            _remove(fs, f"{path}/{own}")
            raise


def folder_to_write(
    target: str | os.PathLike[str], *, ranks: ControlGroup, about: Mapping[str, object]
) -> AbstractContextManager[Path]:
    """Return :func:`remote_folder` for an address in object storage, otherwise :func:`checkpoint_folder`."""
    if is_object_storage(target):
        return remote_folder(str(target), ranks=ranks, about=about)
    return checkpoint_folder(target, ranks=ranks, about=about)


def _remove_older(fs: AbstractFileSystem, path: str, manifest: Mapping[str, Any]) -> None:
    kept = {name.partition("/")[0] for name in manifest["files"]}
    for name in _list(fs, path):
        # What earlier versions have left begins with the second.
        if name.startswith((_DATA, ".sums-")) and name not in kept:
            _remove(fs, f"{path}/{name}")


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Yield a verified local copy of the checkpoint at ``url``, which is removed on leaving.

    Args:
        url: a folder that :func:`remote_folder` has uploaded, or a file.

    Raises:
        CorruptCheckpoint: it is incomplete, or differs from what was written.
        FileNotFoundError: there is no such checkpoint.
        OSError: it could not be read, such as with wrong credentials.
    """
    fs, path = _open(url)
    with tempfile.TemporaryDirectory(prefix="fasttrain-download-") as temporary:
        local = Path(temporary) / path.rstrip("/").rpartition("/")[2]
        with _explained(url, "read"):
            _download(fs, path, local, url)
        verify_checkpoint(local)
        yield local


def _download(fs: AbstractFileSystem, path: str, local: Path, url: str) -> None:
    if not fs.isdir(path):
        if not fs.exists(path):
            raise _NoSuchCheckpoint(explain(url, "there is no such checkpoint", "Check its address"))
        fs.get_file(path, str(local))
        return
    local.mkdir()
    if not fs.exists(f"{path}/{MANIFEST}"):
        why = f"it has no {MANIFEST}, which is written last: its upload was interrupted"
        raise CorruptCheckpoint(explain(url, why, "Use an older one"))
    fs.get_file(f"{path}/{MANIFEST}", str(local / MANIFEST))
    manifest, files = read_manifest(local), {}
    for name, entry in manifest["files"].items():
        named = _NAME.fullmatch(name)
        if named is None or ".." in name.split("/"):
            raise CorruptCheckpoint(explain(url, f"its {MANIFEST} names {name[:200]!r}", "Use an older one"))
        target = local / named["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not fs.exists(f"{path}/{name}"):
            raise CorruptCheckpoint(explain(url, f"{name} is missing", "Use an older one"))
        fs.get_file(f"{path}/{name}", str(target))
        files[named["file"]] = entry
    # In the copy, the files have the names that they had when they were written.
    (local / MANIFEST).write_text(json.dumps({**manifest, "files": files}))


@contextmanager
def fetched_on_each_node(url: str) -> Iterator[Path]:
    """Yield a local copy as :func:`fetched` does, one for all ranks of a node; a collective."""
    with ExitStack() as stack:
        folder = from_first_of_node(lambda: stack.enter_context(fetched(url)))
        try:
            yield folder
        finally:
            from_all_ranks([True])  # before the copy is removed


@check_arguments
def newest_remote_checkpoint(url: str) -> str | None:
    """Return the newest complete checkpoint under an address of object storage, for ``trainer.fit(ckpt_path=...)``.

    The newest is the one whose manifest, or whose file, was written last, by the clock of the storage; of two in the
    same second, the one with larger numbers in its name. Each candidate is downloaded and compared with its checksums,
    until one is complete; the others are passed over with a warning. So one checkpoint must fit into the system's
    temporary folder.

    Args:
        url: the folder of the checkpoints, in any file system of fsspec, such as ``"s3://bucket/run"``.

    Returns:
        The address; None, with a message, if there is no checkpoint.

    Raises:
        ValueError: it is not an address in object storage.
        CorruptCheckpoint: there are checkpoints, but none is complete.
        OSError: the storage cannot be read, such as with wrong credentials.

    Example:
        >>> newest_remote_checkpoint("memory://no-run") is None
        True

    Source:
        Ours, on ``fsspec``.
    """
    fs, path = _open(url)
    with _explained(url, "read"):
        found = {name: _written_at(fs, f"{path}/{name}") for name in _list(fs, path)}
    candidates = [name for name, at in found.items() if at is not None]
    # S3 counts whole seconds, in which a short run saves several.
    for name in sorted(candidates, key=lambda one: (str(found[one]), _numbers_in(one)), reverse=True):
        address = f"{url.rstrip('/')}/{name}"
        try:
            with fetched(address):
                return address
        except CorruptCheckpoint as error:
            warn(f"passed over: {error}")
    if candidates:
        why = "none of them is complete, and a run from the beginning is not what was asked for"
        what = f"{url} holds {len(candidates)} checkpoints"
        raise CorruptCheckpoint(explain(what, why, "Remove them to begin again"))
    say("no checkpoint in %s: the run starts from the beginning", url)
    return None


def _numbers_in(name: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", name)))


def _written_at(fs: AbstractFileSystem, path: str) -> object:
    """Return when a checkpoint was written; None for what is none."""
    if fs.isdir(path):
        path = f"{path}/{MANIFEST}"
        if not fs.exists(path):
            return None
    elif not path.endswith(".ckpt"):
        return None
    return fs.modified(path)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    if not is_object_storage(url):
        why = "expected an address in object storage, such as s3://bucket/run"
        raise ValueError(explain(url, why, "For files of this machine use newest_checkpoint"))
    with _explained(url, "reached"):
        fs, path = fsspec.core.url_to_fs(url)
        # Otherwise a listing from before another process has written would be used.
        fs.invalidate_cache()
        return fs, path.rstrip("/")


def _is_atomic(fs: AbstractFileSystem) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _ATOMIC.isdisjoint(protocols)


def _upload(fs: AbstractFileSystem, local: Path, path: str, url: str) -> None:
    with _explained(url, "written"):
        # An object store has no folders, and takes a request for one as a request for a new bucket.
        if not _is_atomic(fs):
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(local), path)


def _list(fs: AbstractFileSystem, path: str) -> list[str]:
    if not fs.exists(path):
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)]


def remove_remote(url: str) -> None:
    """Remove a checkpoint at an address, and nothing that its name would match as a pattern."""
    _remove(*_open(url))


def _remove(fs: AbstractFileSystem, path: str) -> None:
    """Remove what is no longer needed; what stays costs space alone."""
    try:
        if glob.has_magic(path):  # which ``rm`` would take for a pattern, and remove what else it matches
            for file in fs.find(path):
                fs.rm_file(file)
        elif fs.exists(path):
            fs.rm(path, recursive=True)
    except Exception as error:
        warn(f"{path} could not be removed ({type(error).__name__}: {first_line(error)})")


@contextmanager
def _explained(url: str, what: str) -> Iterator[None]:
    """Turn errors of a file system, each of which has its own, into an ``OSError`` with a way out."""
    try:
        yield
    except (CorruptCheckpoint, _StorageError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        way_out = "Check the credentials of this process, the address and the network"
        raise _StorageError(explain(f"checkpoint {url} could not be {what}", why, way_out)) from error
