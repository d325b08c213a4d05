"""Compute the outputs of a frozen part of a model once for each sample, and read them afterwards."""

import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from lightning_fasttrain.core.atomic_write import refuse_unwritable, write_atomic
from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, list_some, warn, warn_on_any_rank
from lightning_fasttrain.core.modules.parameters import bytes_of, quantized_tensors
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, wrappers_in, wrappers_on
from lightning_fasttrain.core.safe_load import open_safetensors
from lightning_fasttrain.core.state.rng import keep_random_state, torch_generators
from lightning_fasttrain.core.state.values import to_float64
from lightning_fasttrain.finetune.selection.base_fingerprint import first_tensor, list_trainable
from lightning_fasttrain.finetune.selection.gradual_unfreezing import GradualUnfreezing
from lightning_fasttrain.technique import Conflict, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep

KEY_BYTES = 16
_WORDS = 2**14  # 32-bit words of a chunk
_LANES = 3  # independent sums of a chunk, of 64 bits each
_FLUSH_BYTES = 2**28  # of rows that are in memory, before they are written to a file
Row = list[Tensor]


def row_keys(args: Sequence[object], kwargs: Mapping[str, object], context: bytes) -> list[bytes]:
    """Return a key for each row of a batch: a hash of the row in each tensor, and of everything that rows share.

    The host waits once for the device.

    Args:
        args: positional arguments of a module; tensors with as many rows as the first one are cut into rows.
        kwargs: keyword arguments.
        context: hashed with each row.

    Raises:
        TypeError: an argument is neither a tensor nor a plain value, so that it cannot be hashed.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> first, second, third = row_keys([x], {}, b"")
        >>> first == third != second, first == row_keys([x[:1]], {}, b"")[0], first == row_keys([x[:1]], {}, b"b")[0]
        (True, True, False)
    """
    leaves, structure = tree_flatten((list(args), kwargs))
    rows = count_rows(leaves)
    shared = hashlib.blake2b(context + repr(structure).encode(), digest_size=KEY_BYTES)
    cut = []
    for leaf in leaves:
        if is_cut(leaf, rows):
            shared.update(f"{leaf.dtype} {tuple(leaf.shape[1:])}".encode())
            cut.append(_sums(leaf.reshape(rows, -1)))
        elif isinstance(leaf, Tensor):
            shared.update(_hash_tensor(leaf))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
            shared.update(repr(leaf).encode())
        else:
            raise TypeError(f"an argument is a {type(leaf).__name__}, which has no contents to compare")
    sums = torch.cat(cut, dim=1).cpu().numpy()
    return [hashlib.blake2b(shared.digest() + row.tobytes(), digest_size=KEY_BYTES).digest() for row in sums]


def count_rows(leaves: Iterable[object]) -> int:
    """Return the length of the first tensor that has an axis; 0 if there is none."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)


def is_cut(leaf: object, rows: int) -> bool:
    """Return whether an argument has one entry for each row of the batch."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows


def _hash_tensor(tensor: Tensor) -> bytes:
    """Return a hash of dtype, shape and contents."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=KEY_BYTES)
    digest.update(_sums(tensor.detach().reshape(1, -1)).cpu().numpy().tobytes())
    return digest.digest()


def hash_module(module: nn.Module) -> bytes:
    """Return a hash of a module's layers, settings, parameters and buffers.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = hash_module(layer)
        >>> _ = layer.weight.data[0, 0].add_(1e-6)
        >>> before == hash_module(layer)
        False
    """
    digest = hashlib.blake2b(f"{module} {getattr(module, 'config', '')}".encode(), digest_size=KEY_BYTES)
    for tensors in (module.named_parameters(), module.named_buffers(), quantized_tensors(module)):
        for name, tensor in tensors:
            digest.update(name.encode() + _hash_tensor(tensor))
    return digest.digest()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20250601)
    return torch.randint(-(2**62), 2**62, (_LANES, _WORDS), generator=generator).mul_(2).add_(1).to(device)


def _sums(rows: Tensor) -> Tensor:
    """Map (rows, elements) to (rows, chunks · lanes): sums of words times random odd factors, modulo 2⁶⁴.

    Integer sums are the same in any order, so keys do not depend on the device's kernels. Words have 32 bits: with 64,
    changes in the highest bits of two words would cancel.
    """
    if rows.numel() == 0:
        return torch.zeros(len(rows), 0, dtype=torch.int64, device=rows.device)
    content = rows.contiguous().view(torch.uint8)
    chunk = min(4 * _WORDS, content.shape[1] + -content.shape[1] % 4)  # in bytes
    padded = F.pad(content, (0, -content.shape[1] % chunk))
    words = padded.view(torch.int32).long().unflatten(1, (-1, chunk // 4))
    return torch.cat([(words * lane).sum(-1) for lane in _factors(rows.device)[:, : chunk // 4]], dim=1)


class RowStore:
    """Outputs of a module by sample, all computed in the same way.

    With a folder, rows go to files of up to 256 MiB, each written by one process, and are read from there; all
    processes see a file once it is complete.

    Args:
        example: output of a batch.
        folder: None keeps all rows in memory.
    """

    def __init__(self, example: object, folder: Path | None) -> None:
        self.folder = folder
        self._example = tree_map_only(Tensor, lambda leaf: leaf.to("meta"), example)
        self._rows: dict[bytes, Row] = {}
        self._pending_bytes = 0
        self._filed: dict[bytes, tuple[Any, int]] = {}  # key → open file, and the row in it
        self._files: set[str] = set()
        self.refresh()

    def __deepcopy__(self, memo: object) -> Self:
        return self  # copies of a model share it: keys tell their weights apart

    def get(self, key: bytes) -> Row | None:
        """Return the tensors of a row, without the batch's axis; None if it is unknown."""
        row = self._rows.get(key)
        if row is not None or key not in self._filed:
            return row
        file, index = self._filed[key]
        return [file.get_slice(str(number))[index] for number in range(len(file.keys()) - 1)]

    def put(self, key: bytes, row: Row) -> None:
        """Keep a row, unless it is known."""
        if key in self._rows or key in self._filed:
            return
        self._rows[key] = row
        self._pending_bytes += bytes_of(row)
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def join(self, rows: Sequence[Row], device: torch.device) -> Any:
        """Return the output of a batch from its rows, in the memory layout of a computed one."""
        parts = iter(zip(*rows, strict=True))

        def stack(example: Tensor) -> Tensor:
            values = torch.stack(next(parts))
            order = sorted(range(example.dim()), key=lambda axis: -example.stride(axis))
            empty = torch.empty_permuted(values.shape, order, dtype=values.dtype, device=device)
            return empty.copy_(values, non_blocking=True)

        return tree_map_only(Tensor, stack, self._example)

    def flush(self) -> None:
        """Write the rows that are in memory alone, and read what other processes have written."""
        if self.folder is None:
            return
        safetensors: Any = require("safetensors.torch", extra="finetune")
        # Rows of one file have the same shapes and dtypes.
        by_shape: dict[object, list[bytes]] = {}
        for key, row in self._rows.items():
            by_shape.setdefault(tuple((tensor.shape, tensor.dtype) for tensor in row), []).append(key)
        for keys in by_shape.values():
            rows = map(self._rows.__getitem__, keys)
            tensors = {str(number): torch.stack(parts) for number, parts in enumerate(zip(*rows, strict=True))}
            tensors["keys"] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
            name = f"rows-{os.getpid()}-{secrets.token_hex(4)}.safetensors"
            write_atomic(self.folder / name, safetensors.save(tensors))
        self._pending_bytes = 0
        self.refresh()
        for key in self._rows.keys() & self._filed.keys():
            del self._rows[key]

    def refresh(self) -> None:
        """Read the keys of files that are new since the last call."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob("rows-*.safetensors")):
            if path.name not in self._files:
                self._files.add(path.name)
                self._read_keys(path)

    def _read_keys(self, path: Path) -> None:
        try:
            file = open_safetensors(path)
            keys = file.get_tensor("keys")
            lengths = {file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118 (not a mapping)
            if keys.dtype is not torch.uint8 or keys.shape[1:] != (KEY_BYTES,) or lengths != {len(keys)}:
                raise ValueError("its tensors are not rows with keys")
        except Exception as error:
            warn_on_any_rank(f"FrozenCache: {path} is damaged and not used ({error}). Remove it.")
            return
        for index, key in enumerate(keys.numpy()):
            self._filed.setdefault(key.tobytes(), (file, index))


def _tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


class CachedForward(WrappedForward):
    """Forward of a frozen module that keeps its outputs by row.

    Args:
        module: the frozen part.
        name: its qualified name, for messages.
        folder: where rows are kept; None for host memory.

    Attributes:
        hits: rows that were read.
        misses: rows that were computed.
        is_keeping: whether rows that are computed are kept.
    """

    def __init__(self, module: nn.Module, name: str, folder: Path | None) -> None:
        super().__init__(module)
        self.name = name
        self.folder = folder
        self.hits = self.misses = 0
        self.is_keeping = True
        self._stores: dict[bytes, RowStore] = {}  # by fingerprint
        self._weights: tuple[tuple[Any, ...], bytes] = ((), b"")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leaves = tree_leaves((args, kwargs))
        rows = count_rows(leaves)
        if rows == 0 or torch.compiler.is_compiling() or detect_fake_mode(leaves) is not None:
            return self.inner(*args, **kwargs)
        self._refuse_gradients(leaves)
        self.ran = True
        fingerprint = self._fingerprint(first_tensor(leaves).device)
        try:
            keys = row_keys(args, kwargs, fingerprint)
        except TypeError as error:
            raise self._refusal(str(error), "Name a part that is called with tensors") from error
        # A checkpoint around it that keeps results of operators would find fewer in the recomputation, where rows are
        # read: it sees none in either pass.
        with torch.no_grad(), _disable_current_modes():
            if fingerprint not in self._stores:
                return self._first_call(fingerprint, keys, args, kwargs)
            return self._look_up(self._stores[fingerprint], keys, args, kwargs)

    def _refusal(self, why: str, way_out: str) -> ValueError:
        return ValueError(explain(f"FrozenCache of '{self.name}' ({type(self.module).__name__})", why, way_out))

    def _refuse_gradients(self, leaves: Sequence[object]) -> None:
        if reason := why_not_frozen(self.module):
            raise self._refusal(*reason)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            why = "an input requires a gradient, which an output that is read does not give"
            raise self._refusal(why, "Freeze what comes before it, or name a part that includes it")

    def _fingerprint(self, device: torch.device) -> bytes:
        """Return a hash of what the output depends on beside the input; weights are hashed when they change."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        now = tuple((id(tensor), tensor._version, tensor.data_ptr()) for tensor in tensors)
        if self._weights[0] != now:
            if is_sharded(self.module):
                raise self._refusal("its weights are sharded", "Leave the part out of the sharding")
            before, self._weights = self._weights[1], (now, hash_module(self.module))
            if before != self._weights[1]:
                self.flush()
                self._stores.clear()
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        modes = [part.training for part in self.module.modules()]
        text = f"{self._weights[1].hex()} {torch.__version__} {kind} {cast} {modes}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _run(self, args: Any, kwargs: Any, chosen: Sequence[int] | None) -> Any:
        if chosen is None:
            return self.inner(*args, **kwargs)
        rows, index = count_rows(tree_leaves((args, kwargs))), list(chosen)
        some_args, some_kwargs = tree_map(lambda leaf: leaf[index] if is_cut(leaf, rows) else leaf, (args, kwargs))
        return self.inner(*some_args, **some_kwargs)

    def _first_call(self, fingerprint: bytes, keys: Sequence[bytes], args: object, kwargs: object) -> Any:
        """Compute the first batch, check that the module repeats it, and compare it with rows that were kept before."""
        output = self._run(args, kwargs, None)
        reason = why_not_repeatable(self.module, lambda chosen: self._run(args, kwargs, chosen), output, len(keys))
        if reason:
            raise self._refusal(*reason)
        folder = self.folder and self.folder / fingerprint.hex()
        tensors, store = _tensors_in(output), RowStore(output, folder)
        if self._holds_others(store, keys, tensors):
            warn_on_any_rank(f"FrozenCache: rows in {folder} are not those of '{self.name}'; not used.")
            store = RowStore(output, None)
        self._stores[fingerprint] = store
        self._keep(store, keys, tensors)
        return output

    def _holds_others(self, store: RowStore, keys: Sequence[bytes], tensors: Sequence[Tensor]) -> bool:
        """Return whether rows that were kept before differ from the computed ones."""
        for number, key in enumerate(keys):
            row = store.get(key)
            if row is None:
                continue
            kept = [part[None] for part in row]
            computed = [tensor[number : number + 1].cpu() for tensor in tensors]
            if not are_close(computed, kept):
                return True
        return False

    def _look_up(self, store: RowStore, keys: Sequence[bytes], args: object, kwargs: object) -> Any:
        rows: list[Any] = list(map(store.get, keys))
        missing = [number for number, row in enumerate(rows) if row is None]
        self.hits += len(keys) - len(missing)
        if len(missing) == len(keys):
            output = self._run(args, kwargs, None)
            self._keep(store, keys, _tensors_in(output))
            return output
        if missing:
            output = self._run(args, kwargs, missing)
            computed = self._keep(store, [keys[number] for number in missing], _tensors_in(output))
            for number, row in zip(missing, computed, strict=True):
                rows[number] = row
        return store.join(rows, first_tensor(tree_leaves((args, kwargs))).device)

    def _keep(self, store: RowStore, keys: Sequence[bytes], tensors: Sequence[Tensor]) -> list[Row]:
        self.misses += len(keys)
        on_host = [tensor.cpu() for tensor in tensors]
        rows: list[Row] = []
        for number, key in enumerate(keys):
            rows.append([tensor[number].clone() for tensor in on_host])  # a view would keep the whole batch
            if self.is_keeping:
                store.put(key, rows[-1])
        return rows

    def flush(self) -> None:
        """Write rows that are in memory alone, where there is a folder, and find those of other processes.

        The weights are hashed at the next call, since a change through ``.data`` leaves no other trace.
        """
        self._weights = ((), self._weights[1])
        for store in self._stores.values():
            store.flush()

    def undo(self) -> None:
        super().undo()
        self.flush()


def why_not_frozen(module: nn.Module) -> tuple[str, str] | None:
    """Return why outputs of ``module`` cannot be kept, as its parameters train, and what to do; None if they can."""
    trainable = list_trainable(module)
    if not trainable:
        return None
    why = f"{len(trainable)} of its parameters train ({list_some(trainable)}), so its outputs change"
    return why, "Freeze it: lightning_fasttrain.finetune.freeze_(part), before the optimizer is created"


def why_not_repeatable(
    module: nn.Module, run: Callable[[Sequence[int] | None], object], output: object, rows: int
) -> tuple[str, str] | None:
    """Return why the output of a row is not the same at each call, and what to do; None if it is.

    Args:
        module: the module.
        run: rows to run it on, None for all → its output.
        output: its output for all rows, at the call before.
        rows: number of rows.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    to_eval = "Call .eval() on it, also where the model's train() is called: freeze_ keeps BatchNorm in eval mode"
    if norms:
        return f"BatchNorm normalizes by the batch in training mode ({list_some(norms)})", to_eval
    leaves = tree_leaves(output)
    if not any(is_cut(leaf, rows) for leaf in leaves):
        return "it returns no tensor with a row for each sample", "Name the module inside that does, with part="
    odd = [leaf for leaf in leaves if not (leaf is None or is_cut(leaf, rows))]
    if odd:
        kind = type(odd[0]).__name__
        return f"it returns a {kind} that has no row for each sample", "Name a module inside that returns tensors"
    with keep_random_state():  # the generators are no longer where they were before the first run, if it draws
        before = torch_generators()
        again = tree_leaves(run(None))
        drew = not all(map(torch.equal, before, torch_generators()))
    if drew or not are_close(leaves, again):
        return "it draws random numbers: dropout in training mode, or noise", to_eval
    if rows > 1 and not are_close(leaves, tree_leaves(run(range(rows - 1)))):
        return "the output of a sample depends on the other samples of its batch", "Name a part in which it does not"
    return None


def are_close(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether the rows in ``others``, which may be fewer, agree up to the rounding of other batch sizes.

    Example:
        >>> x = torch.randn(3, 2)
        >>> are_close([x], [x[:2] * 1.0001]), are_close([x], [x[:2] * 2]), are_close([x], [x[:, :1]])
        (True, False, False)
    """
    if len(leaves) != len(others):
        return False
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, Tensor):
            continue
        if one.shape[1:] != other.shape[1:]:
            return False
        close = 1e-3 if one.dtype in (torch.float32, torch.float64) else 0.02
        first, second = to_float64(one[: len(other)]), to_float64(other)
        if first.numel() and (first - second).abs().amax() > close * first.abs().amax():
            return False
    return True


@check_arguments
def cache_frozen_(model: nn.Module, part: str, folder: str | os.PathLike[str] | None = None) -> CachedForward:
    """Keep the outputs of a frozen part of ``model`` by sample, in place, and read them when a sample comes again.

    Samples are distinguished by a hash of what the part is called with, row by row, so neither the order of batches,
    their size, workers, micro-batches nor a resumed run matter, and an input that is augmented differently is another
    sample, which is computed. The hash of weights, settings, autocast and device belongs to it as well. Rows of a batch
    that are known are read, the others are computed together. Where a batch is read or computed as a whole, as with
    equal batch sizes, the values are those of the plain step bit for bit on most kernels; a row that was computed in a
    batch of another size is equal to rounding.

    In the first call the part is examined: the same batch twice with other random numbers, and without its last row. A
    text that is padded to another length is another sample, so pad to a fixed one. Each call waits once for the device,
    as the hashes are needed on the host. Hooks inside the part see only what is computed.

    Args:
        model: any module.
        part: qualified name of the part, such as ``"backbone"`` or ``"vae.encoder"``; it is called with tensors, and
            returns tensors with one row for each sample.
        folder: where outputs are kept, in safetensors files, for later runs and for other processes; None keeps them
            in host memory.

    Returns:
        The replacement of the part's ``forward``: with ``hits`` and ``misses``, ``flush()``, and ``undo()``.

    Raises:
        ValueError: there is no such part, or it has parameters that train; in its first call: its inputs require a
            gradient, it draws random numbers, or a sample's output depends on other samples.
        OSError: ``folder`` cannot be written to.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = net[0].requires_grad_(False)
        >>> cached = cache_frozen_(net, "0")
        >>> x = torch.randn(3, 4)
        >>> for _ in range(2):
        ...     net(x).sum().backward()
        >>> cached.misses, cached.hits
        (3, 3)

    Source:
        The precomputed features of linear probing and the cached latents of diffusion trainers, such as
        ``--cache_latents`` of Hugging Face's diffusers examples, which are keyed by file and refuse augmentation.
    """
    module = find_module(model, part, "part")
    if existing := next(wrappers_on(module, CachedForward), None):
        return existing
    if reason := why_not_frozen(module):
        raise ValueError(explain(f"FrozenCache of '{part}' ({type(module).__name__})", *reason))
    if is_sharded(module):
        why = "its weights are sharded, so no rank can tell whether they have changed"
        raise ValueError(explain(f"FrozenCache of '{part}'", why, "Leave the part out of the sharding"))
    if folder is not None:
        refuse_unwritable(folder, f"FrozenCache(folder={os.fspath(folder)!r})")
    cached = CachedForward(module, part, None if folder is None else Path(folder))
    cached.install()
    return cached


class FrozenCache(Technique):
    """Compute the outputs of a frozen part once for each sample; see :func:`cache_frozen_`.

    Acts after every other operation on the model, so that adapters and compiled code belong to the part; undone at
    teardown. Files are completed at the end of each epoch, when the outputs of other processes are found as well. A
    warning tells that no input of an epoch had been seen before, as with random augmentation; from then on nothing more
    is kept.

    Args:
        part: as for the function.
        folder: as for the function.

    Raises:
        ValueError: in ``fit``: as for the function.

    Example:
        >>> import lightning_fasttrain as ft
        >>> probing = ft.finetune.FrozenCache("backbone")
        >>> latents = ft.finetune.FrozenCache("vae.encoder", folder="latents")

    Source:
        See :func:`cache_frozen_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.UNPAD
    effect: ClassVar[str] = "outputs of a frozen part are computed once for each sample, and read in later epochs"
    when: ClassVar[str] = (
        "a frozen encoder or backbone takes much of the step, and the same samples come in several epochs; not with "
        "random augmentation before it"
    )
    in_a_loop: ClassVar[str] = "finetune.cache_frozen_(model, part)"
    predicted: ClassVar[bool] = True

    def __init__(self, part: str, folder: str | os.PathLike[str] | None = None) -> None:
        self.part = part
        self.folder = folder
        self._cached: CachedForward | None = None
        self._before = (0, 0)

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "it unfreezes the part in the course of the run, and its outputs change from then on"
        return (Conflict(GradualUnfreezing, why, "Use FrozenCache for the epochs in which the part is frozen"),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.trains == 1:
            return "no parameter is frozen"
        return None

    def apply(self, model: nn.Module) -> Undo:
        already = set(wrappers_in(model, CachedForward))
        self._cached = cached = cache_frozen_(model, self.part, self.folder)
        self._before = (cached.hits, cached.misses)
        return (lambda: None) if cached in already else cached.undo

    def predict(self, step: PredictedStep) -> None:
        step.notes.append("Outputs that FrozenCache keeps in host memory are not counted.")

    def describe_effect(self, model: nn.Module) -> str:
        if not any(wrappers_in(model, CachedForward)):
            return ""
        where = "host memory"
        if self.folder is not None:
            where = f"'{os.fspath(self.folder)}'"
        return f"outputs of '{self.part}' are kept in {where}"

    def outcome(self, model: nn.Module) -> str:
        cached = self._cached
        if cached is None or not cached.hits + cached.misses:
            return ""
        return f"{cached.hits:,} outputs of '{self.part}' were read, {cached.misses:,} computed"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if self._cached is None or self._cached.ran:
            return None
        return f"'{self.part}' was not called, or inside of compiled code", "Name a part that training_step calls"

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: no batch of the epoch has been computed; other processes may have written files."""
        if self._cached is not None:
            self._cached.flush()
            self._before = (self._cached.hits, self._cached.misses)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: all samples of the epoch have been seen, and later epochs show them again."""
        cached = self._cached
        if cached is None:
            return
        cached.flush()
        hits, misses = cached.hits - self._before[0], cached.misses - self._before[1]
        if trainer.current_epoch > 0 and self._before[1] and misses and not hits and cached.is_keeping:
            cached.is_keeping = False
            why = f"none of the {misses:,} inputs of this epoch had been seen before, so they are augmented anew"
            warn(explain(f"FrozenCache of '{self.part}'", why, "Remove the augmentation, or FrozenCache"))
