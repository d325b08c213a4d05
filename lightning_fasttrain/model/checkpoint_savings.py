"""Compare the bytes that recomputed blocks keep between forward and backward with those of plain blocks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
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
        self._plain, self._kept = Storages(), Storages()
        self._calls: list[Storages] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointSavings":
        # A copy of the model starts a separate count.
        return CheckpointSavings(self.policy)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointSavings, (self.policy,)

    @contextmanager
    def of_call(self, block: nn.Module, inputs: Iterable[object], keeps: Callable[..., Keep] | None) -> Iterator[None]:
        """Count one forward, inside of the hooks with which the checkpoint drops saved tensors."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # those of the checkpoint
        if outer is None:
            yield
            return
        call = Storages()
        self._calls.append(call)
        # Weights exist with and without recomputation.
        fixed = Storages(*block.parameters(), *block.buffers())
        self._kept.add(*inputs)

        def pack(tensor: Tensor) -> Any:
            if not fixed.has(tensor):
                call.add(tensor)
                self._plain.add(tensor)
            return outer[0](tensor)  # torch calls only the innermost hooks

        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(pack, outer[1]))
            if keeps is not None:
                stack.enter_context(KeptResults(keeps, self._kept))
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
        self._plain, self._kept, self._calls = Storages(), Storages(), []
        self.saves = recomputed < plain
        if not self.saves:
            what = f"ActivationCheckpointing({self.policy}) saves no memory in this model"
            why = f"{calls} calls of blocks keep {recomputed / 2**20:.3g} MiB, including one recomputed block, "
            why += f"while plain blocks keep {plain / 2**20:.3g} MiB"
            tell = warn if plain >= _WORTH_A_WARNING else note_once
            tell(explain(what, why, "Remove it, or select larger blocks with blocks="))


class Storages:
    """A set of storages, held weakly: they may be freed, but their identities are not reused.

    Args:
        nested: tensors, or containers of tensors, whose storages are in the set; other values are ignored.
    """

    def __init__(self, *nested: object) -> None:
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.add(*nested)

    def add(self, *nested: object) -> None:
        for storage in _storages_of(nested):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def has(self, nested: object) -> bool:
        """Check whether one of the tensors is in the set."""
        return any(storage._cdata in self._sizes for storage in _storages_of(nested))

    def nbytes(self, without: "Storages | None" = None) -> int:
        others = (without or Storages())._sizes
        return sum(nbytes for key, (_, nbytes) in self._sizes.items() if key not in others)


def _storages_of(nested: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_iter(nested):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            # A subclass that wraps other tensors has none of its own.
            with suppress(NotImplementedError, RuntimeError):
                yield leaf.untyped_storage()


class KeptResults(TorchDispatchMode):
    """Records the results that a policy keeps.

    Args:
        keeps: the policy.
        kept: gets the results.
        measure: a context in which each operation runs whose result is kept.

    Attributes:
        spoilt: whether a kept result was changed in place, so that a recomputation would get the changed one.
    """

    def __init__(
        self,
        keeps: Callable[..., Keep],
        kept: Storages,
        measure: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()
        self.keeps, self.kept, self.measure = keeps, kept, measure
        self.spoilt = False

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.keeps(None, func, *args, **kwargs) is not Keep.MUST_SAVE:
            if func._schema.is_mutable and self.kept.has(args):
                self.spoilt = True
            return func(*args, **kwargs)
        with self.measure():
            out = func(*args, **kwargs)
        self.kept.add(out)
        return out
