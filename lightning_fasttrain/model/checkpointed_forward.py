"""A block's forward that is recomputed identically in the backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.recomputation import (
    Again,
    Contexts,
    RecomputedForward,
    recompute_in_backward,
    recomputed_outside,
)
from lightning_fasttrain.core.modules.select import class_name


class CheckpointedForward(RecomputedForward):
    """A forward whose activations are recomputed in the backward.

    Args:
        module: the block.
        keeps: decides for each operation whether its result is kept; None keeps nothing.
    """

    def __init__(self, module: nn.Module, keeps: Callable[..., Keep] | None = None) -> None:
        super().__init__(module)
        self.keeps = keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        self.ran = True
        # The compiler traces the recomputation, and functionalizes buffers itself.
        if torch.compiler.is_compiling():
            if self.keeps is None:
                return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
            contexts = partial(create_selective_checkpoint_contexts, self.keeps)
            return checkpoint(self.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if recomputed_outside.get():
            return self.inner(*args, **kwargs)
        run, leaves = self._by_position(args, kwargs)
        versions = self.versions_of(leaves)
        output = recompute_in_backward(run, leaves, self._contexts())
        self.look_at(output, leaves, versions)
        return output

    def _by_position(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Callable[..., Any], Sequence[object]]:
        """Return the forward, and the tensors to call it with by position.

        Of tensors inside others neither the device is found, whose random state must be restored, nor do hooks on saved
        tensors see them.
        """
        if not kwargs and all(isinstance(one, Tensor) for one in args):
            return self.inner, args
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves: object) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return self.inner(*args, **kwargs)

        return run, leaves

    def _contexts(self) -> Contexts:
        if self.keeps is None:
            return self.contexts(nullcontext(), nullcontext())
        forward, again = self.contexts(*create_selective_checkpoint_contexts(self.keeps))
        return forward, Again(partial(self._refuse_changed_results, again))

    @contextmanager
    def _refuse_changed_results(self, again: AbstractContextManager[Any]) -> Iterator[None]:
        """Raises: RuntimeError: the block has changed a result in place that was kept for the recomputation."""
        try:
            with again:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            what = f"selective recomputation of {class_name(self.module)}"
            why = "it changes the result of an expensive operation in place, as ReLU(inplace=True) may"
            way_out = "Set inplace=False, leave the block out, or recompute it as a whole, with EveryBlock()"
            raise RuntimeError(explain(what, why, way_out)) from None
