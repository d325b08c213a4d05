"""A folder that answers to s3://…, for processes that share no memory."""

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class LocalBucket(LocalFileSystem):
    """Object storage in the folder that the variable LOCAL_BUCKET names: files appear when they are complete."""

    protocol = "s3"

    @classmethod
    def _strip_protocol(cls, path):
        root = os.environ["LOCAL_BUCKET"]
        path = os.fspath(path)
        return path.rstrip("/") if path.startswith(root) else f"{root}/{path.removeprefix('s3://').strip('/')}"

    def put_file(self, lpath, rpath, **kwargs):
        target = Path(self._strip_protocol(rpath))
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_bytes(Path(lpath).read_bytes())
        part.rename(target)

    def get_file(self, rpath, lpath, **kwargs):
        Path(lpath).write_bytes(Path(self._strip_protocol(rpath)).read_bytes())


def use_local_bucket(folder):
    os.environ["LOCAL_BUCKET"] = str(folder)
    fsspec.register_implementation("s3", LocalBucket, clobber=True)
