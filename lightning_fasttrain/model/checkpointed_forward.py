"""A block's forward that is run again in the backward pass, as it was."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_fasttrain._surgery import WrappedForward
from lightning_fasttrain.model.checkpoint_savings import CheckpointSavings

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class CheckpointedForward(WrappedForward):
    """A forward whose activations are recomputed in the backward pass.

    Args:
        module: the block.
        keeps: says of each operation in it whether its result is kept; None for nothing at all.
        savings: what counts the bytes of the first pass; None for nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        keeps: Callable[..., Keep] | None = None,
        savings: CheckpointSavings | None = None,
    ) -> None:
        super().__init__(module)
        self.keeps = keeps
        self.savings = savings
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
        self.ran = True
        if torch.compiler.is_compiling():  # the compiler traces the recomputation, and functionalises buffers itself
            if self.keeps is None:
                return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
            contexts = partial(create_selective_checkpoint_contexts, self.keeps)
            return checkpoint(self.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # By position and flat: of other tensors, torch neither finds the device, whose random state is to be put back,
        # nor lets hooks on saved tensors see them.
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return self.inner(*args, **kwargs)

        contexts = self._contexts
        if self.savings is not None and self.savings.counting:
            contexts = partial(self._counted_contexts, self.savings, leaves)
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)

    def _counted_contexts(self, savings: CheckpointSavings, inputs: Iterable[Any]) -> Contexts:
        forward, again = self._contexts()

        @contextmanager
        def counted_forward() -> Iterator[None]:
            with forward, savings.of_call(self.module, inputs, self.keeps):
                yield

        @contextmanager
        def recompute() -> Iterator[None]:
            savings.tell()  # the backward has begun, so all blocks have been called
            with again:
                yield

        return counted_forward(), Again(recompute)

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """For a forward that does not count: random states and buffers are afterwards as they were."""
        self.seen = False  # which buffers change is not known yet: copy all
        _, again = self._contexts()
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        devices = [] if device.type == "cpu" else [device]  # the host's generator is always among them
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), again:
            yield
        self.seen = False

    def _contexts(self) -> Contexts:
        """What the forward and the recomputation run in."""
        keeping, reusing = nullcontext(), nullcontext()
        if self.keeps is not None:
            keeping, reusing = create_selective_checkpoint_contexts(self.keeps)
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
            with keeping:
                yield
            for name, (owner, key, buffer) in buffers.items():
                if buffer._version != versions[name] or owner._buffers.get(key) is not buffer:
                    self.changing.add(name)
            # ``before`` lives until the backward; from the second forward on it holds just these in the first place.
            for name in before.keys() - self.changing:
                del before[name]

        @contextmanager
        def recompute() -> Iterator[None]:
            now = random.getstate(), np.random.get_state()
            # The buffers of now, not of then: other batches may have come between forward and backward.
            held = {name: (owner, key, owner._buffers[key]) for name, (owner, key, _) in buffers.items()}
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for name, earlier in before.items():
                owner, key, _ = held[name]
                owner._buffers[key] = earlier.clone()  # the recomputation changes a copy of what the forward saw
            try:
                with reusing:
                    yield
            finally:
                for owner, key, buffer in held.values():
                    owner._buffers[key] = buffer
                random.setstate(now[0])
                np.random.set_state(now[1])

        return forward(), Again(recompute)


class Again(AbstractContextManager[None]):
    """A context that can be entered again, as by a second backward through the same graph: ``make`` makes a new one."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.context = self.make()
        self.context.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self.context.__exit__(*exception)
