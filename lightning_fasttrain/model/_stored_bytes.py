"""Copies of one device storage: in pinned host memory, or in a file."""

import itertools
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import explain


class PinnedCopy:
    """Bytes in pinned host memory. Both copies run on side streams, and the host waits for neither.

    The allocator reuses freed memory for the next kernel of the stream that allocated it. So neither the source of the
    copy to the host nor the target of the copy back is freed before that stream waits for the copy.
    (``Tensor.record_stream`` would avoid the wait, but keeps memory from being reused for as long as the host runs
    ahead.)

    Args:
        source: the complete storage as bytes [N], on a CUDA device.
        host: pinned memory [N] for it.
        out: the stream of copies to the host.
        back: the stream of copies to the device.
    """

    def __init__(self, source: Tensor, host: Tensor, out: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self.nbytes, self.host, self.back = source.nbytes, host, back
        self.main = torch.cuda.current_stream(source.device)
        out.wait_stream(self.main)
        with torch.cuda.stream(out):
            host.copy_(source, non_blocking=True)
        self.left = out.record_event()
        self.arrived: torch.cuda.Event | None = None
        self.here: Tensor | None = source

    def leave(self) -> None:
        """Free the memory on the device."""
        self.main.wait_event(self.left)
        self.here = None

    def fetch(self) -> None:
        """Start the copy back, unless the bytes are on the device."""
        if self.here is None:
            with torch.cuda.stream(self.main):
                # Allocated on the computing stream, whose kernels read it, so that it is freed after them.
                self.here = torch.empty(self.nbytes, dtype=torch.uint8, device=self.back.device)
            # Earlier users of this memory must be finished with it.
            self.back.wait_stream(self.main)
            with torch.cuda.stream(self.back):
                self.here.copy_(self.host, non_blocking=True)
            self.arrived = self.back.record_event()

    def bytes(self) -> Tensor:
        """Return all bytes [N], on the device."""
        self.fetch()
        if self.arrived is not None:
            self.main.wait_event(self.arrived)
        assert self.here is not None
        return self.here

    def __del__(self) -> None:
        for event in (self.left, self.arrived):
            if event is not None:
                self.main.wait_event(event)


class SpillFolder:
    """A private folder for :class:`FileCopy`, removed when it is closed, unused, or when Python ends.

    Args:
        parent: an existing folder.
    """

    def __init__(self, parent: Path) -> None:
        # ``mkdtemp`` gives access to this user only.
        self.path = Path(tempfile.mkdtemp(prefix="activations-", dir=parent))
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._numbers = itertools.count()

    def new_file(self) -> Path:
        """Return a path of a file that does not exist yet."""
        return self.path / str(next(self._numbers))


class FileCopy:
    """Bytes in a file, written at once and read when they are needed; the computation waits for both.

    Args:
        source: the complete storage as bytes [N], on any device.
        folder: the folder of the file.

    Raises:
        OSError: the file cannot be written; it is removed.
    """

    def __init__(self, source: Tensor, folder: SpillFolder) -> None:
        self.nbytes, self.device = source.nbytes, source.device
        self.folder, self.path = folder, folder.new_file()
        self.here: Tensor | None = None
        try:
            # The mode "x" never overwrites an existing file.
            with open(self.path, "xb") as file:
                file.write(source.cpu().numpy().data)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise self._disk_error(
                error, f"{self.nbytes / 2**20:.1f} MiB of activations could not be written"
            ) from error

    def bytes(self) -> Tensor:
        """Return all bytes [N], on the device of their source.

        Raises:
            OSError: the file is missing, or its size has changed.
        """
        if self.here is None:
            here = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            try:
                with open(self.path, "rb") as file:
                    # One more byte is read, to notice a file that has grown.
                    found = file.readinto(here.numpy().data) + len(file.read(1))
                if found != self.nbytes:
                    raise OSError(f"expected {self.nbytes} bytes, got {found}")
            except OSError as error:
                raise self._disk_error(error, "activations could not be read back") from error
            # Removed at once, so that the disk holds only bytes that are still needed.
            self.path.unlink()
            self.here = here.to(self.device)
        return self.here

    def _disk_error(self, error: OSError, what: str) -> OSError:
        way_out = "Use a folder with more free space, that nothing else cleans up, or remove folder="
        message = explain(f"{what} ({self.path})", error.strerror or str(error), way_out)
        return OSError(error.errno, message) if error.errno else OSError(message)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


StoredBytes = PinnedCopy | FileCopy
