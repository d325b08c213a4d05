"""Activations of a block are recomputed in the backward pass instead of being kept."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fasttrain._checks import positive_int
from lightning_fasttrain._messages import note_once
from lightning_fasttrain._surgery import Blocks, Undo, WrappedForward, find_blocks, wrapper_on
from lightning_fasttrain._technique import Surgery, Technique, patch


def checkpoint_activations_(model: nn.Module, every: int = 1, blocks: Blocks | None = None) -> dict[str, Undo]:
    """Keep only the inputs of the model's blocks, in place, and recompute the rest in the backward pass.

    With L equal blocks that save A bytes each, the peak falls from L·A to about A plus L inputs, for one more
    forward of each block. The recomputation is the same computation: the random state of torch, Python and NumPy is
    put back for it (dropout draws the same masks), and buffers that the forward changes (BatchNorm statistics) are
    changed once. Non-reentrant always, so frozen inputs, keyword arguments and DDP work.

    Args:
        model: any module. Hugging Face models have their key-value cache switched off, which cannot be recomputed.
        every: every how many-th block; 1 is all of them.
        blocks: which modules are blocks, as for :func:`~lightning_fasttrain.find_blocks`.

    Returns:
        Qualified name of each block that is now checkpointed → how to undo it; for one that was before, nothing. Where
        a model's cache was switched off, that setting's name too.

    Raises:
        TypeError, ValueError: ``every`` is no whole number of at least 1; no blocks found.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        >>> list(checkpoint_activations_(net, every=2))
        ['0', '2']

    Source:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174; on
        ``torch.utils.checkpoint``, which keeps torch's random state but neither Python's, NumPy's nor buffers.
    """
    positive_int("every", every)
    chosen = list(find_blocks(model, blocks).items())[::every]
    undos: dict[str, Undo] = {}
    for name, block in chosen:
        undos[name] = _nothing if wrapper_on(block, CheckpointedForward) else CheckpointedForward(block).install()
    _without_cache(model, undos)
    return undos


def _nothing() -> None:
    pass


def _without_cache(model: nn.Module, undos: dict[str, Undo]) -> None:
    """A key-value cache filled in the forward would be filled again by the recomputation."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            undos[f"{name}.config.use_cache"] = patch(config, "use_cache", False)
            note_once("checkpoint_activations_: use_cache=False in the model's config while its blocks are recomputed")


class CheckpointedForward(WrappedForward):
    """A forward whose activations are recomputed in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Names of the buffers that the forward changes. The kernels of these norms do it behind autograd's back; any
        # other change raises the buffer's version, and is noticed at the first forward.
        self.changing = {
            f"{prefix}.{key}"
            for prefix, owner in module.named_modules()
            if isinstance(owner, nn.modules.batchnorm._NormBase)
            for key in owner._buffers
        }
        self.seen = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler traces the recomputation, and functionalises buffers itself
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        buffers = {
            name: (owner, key, buffer)
            for prefix, owner in self.module.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and (name := f"{prefix}.{key}")
        }
        unseen, self.seen = not self.seen, True  # at the first forward all buffers are copied, to be sure
        before: dict[str, Tensor] = {
            name: buffer.detach().clone() for name, (_, _, buffer) in buffers.items() if unseen or name in self.changing
        }
        python_state, numpy_state = random.getstate(), np.random.get_state()

        @contextmanager
        def forward() -> Iterator[None]:
            versions = {name: buffer._version for name, (_, _, buffer) in buffers.items()}
            yield
            for name, (owner, key, buffer) in buffers.items():
                if buffer._version != versions[name] or owner._buffers.get(key) is not buffer:
                    self.changing.add(name)
            for name in before.keys() - self.changing:
                del before[name]

        @contextmanager
        def recompute() -> Iterator[None]:
            now = random.getstate(), np.random.get_state()
            held = {name: (owner, key, owner._buffers[key]) for name, (owner, key, _) in buffers.items()}
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for name, earlier in before.items():
                owner, key, _ = held[name]
                owner._buffers[key] = earlier.clone()  # the recomputation changes a copy of what the forward saw
            try:
                yield
            finally:
                for owner, key, buffer in held.values():
                    owner._buffers[key] = buffer
                random.setstate(now[0])
                np.random.set_state(now[1])

        return forward(), recompute()


class ActivationCheckpointing(Technique):
    """Recompute the activations of the model's blocks in the backward pass.

    Acts right after ``configure_model``, before adapters' optimizer and compilation; undone at teardown.

    Args:
        every: every how many-th block; 1 is all of them.
        blocks: which modules are blocks, as for :func:`~lightning_fasttrain.find_blocks`.

    Example:
        >>> checkpointing = ActivationCheckpointing(every=2)

    Source:
        See :func:`~lightning_fasttrain.checkpoint_activations_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.CHECKPOINT
    effect: ClassVar[str] = "only the blocks' inputs are kept; one more forward"
    in_a_loop: ClassVar[str] = "checkpoint_activations_(model)"

    def __init__(self, every: int = 1, blocks: Blocks | None = None) -> None:
        self.every = positive_int("every", every)
        self.blocks = blocks

    def apply(self, model: nn.Module) -> Undo:
        undos = checkpoint_activations_(model, self.every, self.blocks)
        return lambda: _all(undos.values())


def _all(undos: Any) -> None:
    for undo in undos:
        undo()
