"""A forward that reads the outputs of rows that it has seen, and computes the others."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, list_some, warn_on_any_rank
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.finetune.frozen_cache.content_keys import (
    Row,
    RowStore,
    count_rows,
    hash_module,
    is_cut,
    row_keys,
)
from lightning_fasttrain.finetune.selection.qualified_names import first_tensor, list_trainable


@dataclass
class _Form:
    """Form of a module's output, and the rows that were computed in the same way.

    Attributes:
        structure: containers of the output.
        constants: its leaves, with an ellipsis in place of each tensor.
        orders: of each tensor, its axes from the largest stride to the smallest.
        store: rows that were computed in the same way.
    """

    structure: TreeSpec
    constants: list[Any]
    orders: list[list[int]]
    store: RowStore

    def join(self, rows: Sequence[Row], device: torch.device) -> Any:
        """Return the output of a batch from its rows, in the memory layout of a computed one."""
        tensors = []
        for parts, order in zip(zip(*rows, strict=True), self.orders, strict=True):
            whole = torch.stack(parts).to(device, non_blocking=True)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            tensors.append(whole.permute(order).contiguous().permute(inverse))
        leaves = list(self.constants)
        for tensor in tensors:
            leaves[leaves.index(Ellipsis)] = tensor
        return tree_unflatten(leaves, self.structure)


def _tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


class CachedForward(WrappedForward):
    """A forward of a frozen module that keeps the outputs of rows.

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
        self._forms: dict[bytes, _Form] = {}  # by fingerprint
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
            if fingerprint not in self._forms:
                return self._first_call(fingerprint, keys, args, kwargs)
            return self._look_up(self._forms[fingerprint], keys, args, kwargs)

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
                self._forms.clear()
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
        """Compute a batch whatever is known, examine the module on it, and compare it with what was kept before."""
        output = self._run(args, kwargs, None)
        reason = why_not_repeatable(self.module, lambda chosen: self._run(args, kwargs, chosen), output, len(keys))
        if reason:
            raise self._refusal(*reason)
        tensors = _tensors_in(output)
        orders = [sorted(range(leaf.dim()), key=lambda axis: -leaf.stride(axis)) for leaf in tensors]
        constants, structure = tree_flatten(tree_map_only(Tensor, lambda _: Ellipsis, output))
        folder = self.folder and self.folder / fingerprint.hex()
        form = _Form(structure, constants, orders, RowStore(folder))
        self._compare_with_kept(form, keys, tensors)
        self._forms[fingerprint] = form
        self._keep(form, keys, tensors)
        return output

    def _compare_with_kept(self, form: _Form, keys: Sequence[bytes], tensors: Sequence[Tensor]) -> None:
        for number, key in enumerate(keys):
            row = form.store.get(key)
            if row is None:
                continue
            kept = [part[None] for part in row]
            computed = [tensor[number : number + 1].cpu() for tensor in tensors]
            if not are_close(computed, kept):
                warn_on_any_rank(f"FrozenCache: rows in {form.store.folder} are not those of '{self.name}'; not used.")
                form.store = RowStore(None)
                return

    def _look_up(self, form: _Form, keys: Sequence[bytes], args: object, kwargs: object) -> Any:
        rows: list[Any] = list(map(form.store.get, keys))
        missing = [number for number, row in enumerate(rows) if row is None]
        self.hits += len(keys) - len(missing)
        if len(missing) == len(keys):
            output = self._run(args, kwargs, None)
            self._keep(form, keys, _tensors_in(output))
            return output
        device = first_tensor(tree_leaves((args, kwargs))).device
        if missing:
            output = self._run(args, kwargs, missing)
            computed = self._keep(form, [keys[number] for number in missing], _tensors_in(output))
            for number, row in zip(missing, computed, strict=True):
                rows[number] = row
        return form.join(rows, device)

    def _keep(self, form: _Form, keys: Sequence[bytes], tensors: Sequence[Tensor]) -> list[Row]:
        self.misses += len(keys)
        on_host = [tensor.cpu() for tensor in tensors]
        rows: list[Row] = []
        for number, key in enumerate(keys):
            rows.append([tensor[number].clone() for tensor in on_host])  # a view would keep the whole batch
            if self.is_keeping:
                form.store.put(key, rows[-1])
        return rows

    def flush(self) -> None:
        """Write rows that are in memory alone, where there is a folder, and find those of other processes.

        The weights are hashed at the next call, since a change through ``.data`` leaves no other trace.
        """
        self._weights = ((), self._weights[1])
        for form in self._forms.values():
            form.store.flush()

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
        before = _generators(leaves)
        again = tree_leaves(run(None))
        drew = not all(map(torch.equal, before, _generators(leaves)))
    if drew or not _are_equal(leaves, again):
        return "it draws random numbers: dropout in training mode, or noise", to_eval
    if rows > 1 and not are_close(leaves, tree_leaves(run(range(rows - 1)))):
        return "the output of a sample depends on the other samples of its batch", "Name a part in which it does not"
    return None


def _generators(leaves: Sequence[object]) -> list[Tensor]:
    states, device = [torch.get_rng_state()], first_tensor(leaves).device
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _are_equal(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, Tensor) and not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def are_close(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the rows in ``others``, which may be fewer, agree up to the rounding of other batch sizes.

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
        first, second = one[: len(other)].double(), other.double()
        if first.numel() and (first - second).abs().amax() > close * first.abs().amax():
            return False
    return True
