"""Compare the bytes that recomputed blocks keep between forward and backward with those of plain blocks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy as Keep

from lightning_fasttrain.core.messages import explain, note_once, warn

_WORTH_A_WARNING = 2**20  # bytes; with less in all blocks, memory does not matter


class CheckpointSavings:
    """Counts in the first pass of a training, and warns if no memory is saved.

    Recomputed blocks hold their inputs and the results that a policy keeps, and one of them at a time holds all that it
    saves. For small blocks, such as the single layers of an MLP, that is as much as all plain blocks save, or more.

    Args:
        policy: name of the policy in the warning.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counting = True
        self.saves: bool | None = None  # not known yet
        self._plain, self._kept = _Storages(), _Storages()
        self._calls: list[_Storages] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointSavings":
        # A copy of the model starts a separate count.
        return CheckpointSavings(self.policy)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointSavings, (self.policy,)

    @contextmanager
    def of_call(self, block: nn.Module, inputs: Iterable[Any], keeps: Callable[..., Keep] | None) -> Iterator[None]:
        """Count one forward, inside of the hooks with which the checkpoint drops saved tensors."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # those of the checkpoint
        if outer is None:
            yield
            return
        call = _Storages()
        self._calls.append(call)
        # Weights exist with and without recomputation.
        fixed = _Storages()
        for tensor in (*block.parameters(), *block.buffers()):
            fixed.add(tensor)
        for leaf in inputs:
            self._kept.add(leaf)

        def pack(tensor: Tensor) -> Any:
            if not fixed.has(tensor):
                call.add(tensor)
                self._plain.add(tensor)
            return outer[0](tensor)  # torch calls only the innermost hooks

        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(pack, outer[1]))
            if keeps is not None:
                stack.enter_context(_KeptResults(keeps, self._kept))
            yield

    def tell(self) -> None:
        """Compare once, at the end of the forward."""
        if not self.counting:
            return
        self.counting = False
        # Blocks are recomputed one after the other, so only one of them is complete at a time.
        largest = max((call.nbytes(without=self._kept) for call in self._calls), default=0)
        plain, recomputed = self._plain.nbytes(), self._kept.nbytes() + largest
        calls = len(self._calls)
        self._plain, self._kept, self._calls = _Storages(), _Storages(), []
        self.saves = recomputed < plain
        if not self.saves:
            tell = warn if plain >= _WORTH_A_WARNING else note_once
            tell(
                explain(
                    f"ActivationCheckpointing({self.policy}) saves no memory in this model",
                    f"{calls} calls of blocks keep {recomputed / 2**20:.3g} MiB, including one recomputed block, "
                    f"while plain blocks keep {plain / 2**20:.3g} MiB",
                    "Remove it, or select larger blocks with blocks=",
                )
            )


class _Storages:
    """A set of storages, held weakly: they may be freed, but their identities are not reused."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, thing: object) -> None:
        storage = _storage_of(thing)
        if storage is not None and storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def has(self, thing: object) -> bool:
        storage = _storage_of(thing)
        return storage is not None and storage._cdata in self._sizes

    def nbytes(self, without: "_Storages | None" = None) -> int:
        others = without._sizes if without is not None else {}
        return sum(nbytes for key, (_, nbytes) in self._sizes.items() if key not in others)


def _storage_of(thing: object) -> torch.UntypedStorage | None:
    if not isinstance(thing, Tensor) or thing.layout is not torch.strided:
        return None
    try:
        return thing.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
        return None


class _KeptResults(TorchDispatchMode):
    """Records the results that a policy keeps."""

    def __init__(self, keeps: Callable[..., Keep], kept: _Storages) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.keeps(None, func, *args, **(kwargs or {})) is Keep.MUST_SAVE:
            for leaf in tree_iter(out):
                self.kept.add(leaf)
        return out
