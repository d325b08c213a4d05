"""Keep activations that the forward saves in host memory, or on disk, until the backward needs them."""

import functools
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_fasttrain.core.checks import NonNegativeFloat, check_arguments
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.recomputation import without_graph
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    undo_all,
    why_none_ran,
    wrapper_on,
)
from lightning_fasttrain.technique import Capability, Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks


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


class Offload:
    """Decides which storages move, in which order, and how many at once."""

    def __init__(self, min_mib: float, in_flight_mib: float, folder: str | os.PathLike[str] | None) -> None:
        self.settings = min_mib, in_flight_mib, folder
        # Moving empty storages gains nothing.
        self.min_bytes = max(1, int(min_mib * 2**20))
        self.in_flight_bytes = int(in_flight_mib * 2**20)
        self.folder = folder
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(explain(f"folder={str(folder)!r}", "the folder does not exist", "Create it first"))
        self.spill: SpillFolder | None = None
        self.largest_left = 0  # bytes of the largest tensor below min_mib
        self.moved = self.cannot_pin = self.is_reported = False
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        # A copy keeps a weak reference to its storage, so that its address is not reused while it is listed.
        self._stored: weakref.WeakValueDictionary[tuple[Any, ...], StoredBytes] = weakref.WeakValueDictionary()
        self._leaving: list[weakref.ref[PinnedCopy]] = []
        self._order: list[weakref.ref[_Saved]] = []
        self._waiting: list[tuple[_Saved, Tensor, Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:  # a copied or spawned model gets its own
        return Offload, self.settings

    def watch_forward(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context for a forward of ``module``."""
        # Other classes of tensors, such as DTensor, may have no accessible storage, and are never moved.
        tensors = [t for t in (*module.parameters(), *module.buffers()) if type(t) in (Tensor, nn.Parameter)]
        devices = {tensor.device.type for tensor in tensors}
        if self.folder is None and devices and "cuda" not in devices:
            where = ", ".join(sorted(devices))
            if where == "cpu":
                where += ", which is host memory already"
            note_once(f"activation offload does nothing on the {where}; with folder= activations are spilled to disk")
            return nullcontext()
        kept = {tensor.untyped_storage()._cdata for tensor in tensors}
        return self._watching(kept)

    @contextmanager
    def _watching(self, kept: set[int]) -> Iterator[None]:
        try:
            with saved_tensors_hooks(functools.partial(self._pack, kept), self._unpack):
                yield
            while self._waiting:
                self._move(*self._waiting.pop(0))
        finally:
            self._waiting.clear()

    def close(self) -> None:
        if self.spill is not None:
            self.spill.close()

    def _pack(self, kept: set[int], tensor: Tensor) -> "_Saved":
        # Copied only after two more are saved: rrelu saves its noise and its input before it draws the noise.
        if len(self._waiting) == 2:
            self._move(*self._waiting.pop(0))
        saved = _Saved(tensor)
        if self._moves(tensor, kept):
            self._waiting.append((saved, tensor, _own_part(tensor)))
        return saved

    def _move(self, saved: "_Saved", tensor: Tensor, source: Tensor) -> None:
        stored = self._store(tensor, source)
        if stored is None:
            return
        # Drop entries of finished backwards, otherwise the list grows with every step.
        while self._order and self._order[-1]() is None:
            self._order.pop()
        saved.move(tensor, source, stored, len(self._order))
        self._order.append(weakref.ref(saved))

    def _unpack(self, saved: "_Saved") -> Tensor:
        if not self.is_reported:  # the first backward: a complete forward has been seen
            self.is_reported = True
            self._tell_if_idle()
        tensor = saved.unpack()
        if isinstance(saved.stored, PinnedCopy):
            self._fetch_ahead(saved.index)
        return tensor

    def _tell_if_idle(self) -> None:
        if self.largest_left and not self.moved:
            largest = f"the largest saved tensor has {self.largest_left / 2**20:.3g} MiB"
            note_once(f"activation offload: nothing was moved: {largest}, below min_mib={self.settings[0]}")

    def _moves(self, tensor: Tensor, kept: set[int]) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or isinstance(tensor._base, nn.Parameter):
            return False
        if tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in kept or is_copy_of_parameter(tensor):
            return False
        if storage.nbytes() < self.min_bytes:
            self.largest_left = max(self.largest_left, storage.nbytes())
            return False
        return self.folder is not None or tensor.device.type == "cuda"

    def _store(self, tensor: Tensor, source: Tensor) -> StoredBytes | None:
        """Store the bytes of the storage of ``source``, which is ``tensor`` or a copy; once for all that share them."""
        storage = tensor.untyped_storage()
        part = None if source is tensor else (tensor.storage_offset(), tensor.size(), tensor.stride())
        key = storage._cdata, tensor._version, part  # a later version has other bytes
        stored = self._stored.get(key)
        if stored is None:
            # All bytes of the storage, even if the tensor is only a part of it.
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source.untyped_storage())
            stored = self._to_disk(whole) if self.folder is not None else self._to_host(whole)
            if stored is None:
                return None
            stored.origin = StorageWeakRef(storage)
            self._stored[key] = stored
            self.moved = True
        return stored

    def _to_disk(self, source: Tensor) -> FileCopy:
        if self.spill is None:
            assert self.folder is not None
            self.spill = SpillFolder(Path(self.folder))
        return FileCopy(source, self.spill)

    def _to_host(self, source: Tensor) -> PinnedCopy | None:
        if self.cannot_pin:
            return None
        if source.device not in self._streams:
            self._streams[source.device] = torch.cuda.Stream(source.device), torch.cuda.Stream(source.device)
        try:
            host = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self.cannot_pin = True
            why = str(error).partition("\n")[0].rstrip(".")
            warn(explain("activations stay on the device from now on", why, "Raise min_mib, or spill to a folder="))
            return None
        stored = PinnedCopy(source, host, *self._streams[source.device])
        leaving = [one for ref in self._leaving if (one := ref()) is not None]
        while sum(one.nbytes for one in leaving) > self.in_flight_bytes:
            # The oldest, since its copy has progressed furthest.
            leaving.pop(0).leave()
        self._leaving = list(map(weakref.ref, (*leaving, stored)))
        return stored

    def _fetch_ahead(self, index: int) -> None:
        """Start copying back the storages saved before this one, which the backward needs next."""
        ahead = 0
        for i in reversed(range(index)):
            saved = self._order[i]()
            if saved is not None and isinstance(saved.stored, PinnedCopy):
                saved.stored.fetch()
                ahead += saved.stored.nbytes
                # Checked after the fetch, so that at least one copy is running.
                if ahead >= self.in_flight_bytes:
                    return


def is_copy_of_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a trained parameter cast to another dtype by autocast, or a view of that.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> is_copy_of_parameter(linear.weight.bfloat16().t()), is_copy_of_parameter(linear(torch.ones(2)).bfloat16())
        (True, False)
    """
    whole = tensor if tensor._base is None else tensor._base
    if whole.grad_fn is None or whole.grad_fn.name() != "ToCopyBackward0":  # the node of ``Tensor.to``
        return False
    source = whole.grad_fn.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), nn.Parameter)


def _own_part(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if it is a part of its storage but not a view known to autograd.

    Such tensors, as created by ``unsafe_chunk`` in an LSTM, are written one by one, and each version counter counts
    only its own writes. A saved storage would therefore hold outdated values of the neighboring tensors.
    """
    if tensor._base is not None:
        return tensor
    part = _without_repeats(tensor.detach())
    whole = part.nbytes >= tensor.untyped_storage().nbytes()
    if whole:
        return tensor
    return part.clone(memory_format=torch.contiguous_format)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the tensor before it was expanded: its dimensions of stride 0 get one element."""
    sizes = list(tensor.size())
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            sizes[axis] = min(sizes[axis], 1)
    return tensor.as_strided(sizes, tensor.stride())


class _Saved:
    """One saved tensor: its bytes in a storage, and its version."""

    def __init__(self, tensor: Tensor) -> None:
        self.stored: StoredBytes | None = None
        self.version, self.index = tensor._version, 0
        self.tensor = without_graph(tensor)

    def move(self, tensor: Tensor, source: Tensor, stored: StoredBytes, index: int) -> None:
        """Replace the tensor's memory by the stored bytes of ``source``, which is ``tensor`` or a copy of it."""
        self.stored, self.index = stored, index
        self.view = source.storage_offset(), source.size(), source.stride()
        self.layout = None if source is tensor else (tensor.size(), tensor.stride())
        self.tensor = tensor.detach()
        # It takes no memory, but keeps the version counter of the original.
        self.tensor.data = tensor.new_empty(0)

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            what = f"expected a saved tensor at version {self.version}, got version {self.tensor._version}"
            why = "one of the variables needed for gradient computation has been modified by an inplace operation"
            raise RuntimeError(explain(what, why, "Use an out-of-place operation: x = x + 1 instead of x += 1"))
        if self.stored is None:
            return self.tensor
        found = self.tensor.new_empty(0).set_(self.stored.bytes().untyped_storage(), *self.view)
        if self.layout is None:
            return found
        # Compiled code relies on size and stride, and other kernels round differently.
        size, stride = self.layout
        found = torch.empty_strided(found.size(), stride, dtype=found.dtype, device=found.device).copy_(found)
        return found.as_strided(size, stride)


@check_arguments
def offload_activations(
    model: nn.Module,
    min_mib: NonNegativeFloat = 1.0,
    *,
    in_flight_mib: NonNegativeFloat = 1024.0,
    folder: str | os.PathLike[str] | None = None,
) -> AbstractContextManager[None]:
    """Offload tensors that autograd saves in this context to pinned host memory; for any code.

    Copies run beside the computation: to the host during the forward, and back, in the reverse order of saving, ahead
    of the backward. A storage that is saved several times, also through different views, is copied once. Values are
    bitwise the same; changing a saved tensor in place before the backward is an error, as it is without hooks. A
    storage whose copy is still running when the backward needs it is used from the device.

    Host memory comes from torch's cache of pinned memory, which later steps reuse, and which rounds each size up to a
    power of two. On the CPU nothing is moved, since tensors are in host memory already, unless ``folder`` is given.
    Sparse, quantized and nested tensors and tensor subclasses are not moved.

    Args:
        model: the model whose parameters and buffers, and views of them, are not moved. Neither are the copies that
            autocast makes of trained parameters; those of frozen ones, and those in compiled code, are treated as
            activations.
        min_mib: smaller storages, in MiB, are not moved, since launching a small copy takes longer than copying.
        in_flight_mib: maximum size of running copies in MiB, in each direction, or one storage if it is larger. A
            larger value smooths the traffic, and takes that much device memory.
        folder: spill to files in a private folder inside this existing one, for machines short of host memory. The
            computation waits for the disk. A folder in memory, such as ``/dev/shm``, saves nothing.

    Returns:
        A context manager for the forward; the backward may run later.

    Raises:
        TypeError, ValueError: a size is not a number of at least 0, or the folder does not exist.
        RuntimeError: in the backward, if a saved tensor was changed in place.
        OSError: the disk is full, or the files were changed.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> with offload_activations(net, min_mib=0, folder=getfixture("tmp_path")):
        ...     loss = net(torch.ones(2, 4)).sum()
        >>> loss.backward()

    Source:
        The saved-tensor hooks of ``torch.autograd.graph.save_on_cpu``, which copies every tensor, including
        parameters, on the computing stream. Two streams as in torchtune's activation offloading; the rest is ours.
    """
    return Offload(min_mib, in_flight_mib, folder).watch_forward(model)


class OffloadedForward(WrappedForward):
    """A forward whose saved tensors are offloaded until the backward."""

    def __init__(self, module: nn.Module, offload: Offload) -> None:
        super().__init__(module)
        self.offload = offload

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self.ran = True
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.inner(*args, **kwargs)
        with self.offload.watch_forward(self.module):
            return self.inner(*args, **kwargs)


# With this, the compiler runs the method instead of tracing it.
@torch.compiler.assume_constant_result
def _say_compiled() -> bool:
    note_once("ActivationOffload: a compiled graph keeps its saved tensors. Compile the blocks with CompileBlocks")
    return True


class ActivationOffload(Technique):
    """Move activations that the model's blocks save for the backward to pinned host memory, and back in time.

    Acts right after ``configure_model`` and after compilation, because the hooks must lie outside of compiled and
    checkpointed blocks: for compiled ones they receive tensors that the graph saves; for checkpointed ones, the inputs.
    Tensors saved outside of the blocks are not moved. Undone at teardown.

    Args:
        min_mib: as for :func:`~lightning_fasttrain.model.offload_activations`.
        in_flight_mib: as for :func:`~lightning_fasttrain.model.offload_activations`.
        folder: as for :func:`~lightning_fasttrain.model.offload_activations`.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        TypeError, ValueError: as for :func:`~lightning_fasttrain.model.offload_activations`.

    Example:
        >>> offload = ActivationOffload(min_mib=4)

    Source:
        See :func:`~lightning_fasttrain.model.offload_activations`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.OFFLOAD
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ACTS_IN_BACKWARD})
    effect: ClassVar[str] = "saved activations are kept in host memory, or on disk"
    when: ClassVar[str] = (
        "activations of long sequences do not fit, and recomputing them would cost more than moving them; not on a CPU"
    )
    in_a_loop: ClassVar[str] = "with model.offload_activations(model): ..."
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("offload", "activations", cost=1.4),)
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        min_mib: NonNegativeFloat = 1.0,
        *,
        in_flight_mib: NonNegativeFloat = 1024.0,
        folder: str | os.PathLike[str] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.settings = min_mib, in_flight_mib, folder
        self.blocks = blocks
        Offload(*self.settings)  # raises now rather than in the first forward

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "activations on a CPU are in host memory already"
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "offloaded activations are counted as if they stayed, so this is an upper bound")

    def apply(self, model: nn.Module) -> Undo:
        offload = Offload(*self.settings)
        undos: list[Undo] = [offload.close]
        for block in find_blocks(model, self.blocks).values():
            if not wrapper_on(block, OffloadedForward):
                undos.append(OffloadedForward(block, offload).install())
        return undo_all(undos)

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, OffloadedForward)
        where = "host memory" if self.settings[2] is None else "files"
        return blocks and f"activations of {blocks} are kept in {where}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, OffloadedForward)
