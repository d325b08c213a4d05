"""A forward that is run again in the backward pass, with the buffers that it had."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.recomputation import Contexts, has_version
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.core.state.restore import remember_attributes
from lightning_fasttrain.core.state.surroundings import Surroundings

# Whether a forward around this one is recomputed as a whole: then the ones inside need not be, once more.
recomputed_outside: ContextVar[bool] = ContextVar("recomputed_outside", default=False)


class RecomputedForward(WrappedForward):
    """Base of wrappers whose forward is recomputed in the backward pass, with the buffers that it had.

    Args:
        module: whose buffers are in the recomputation as they were.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Places of the buffers that the forward changes. The kernels of these norms do it behind autograd's back; any
        # other change raises the buffer's version, and is noticed at the first forward.
        norms = nn.modules.batchnorm._NormBase
        self.changing = {place for place in _buffers_of(module) if isinstance(place[0], norms)}
        self.seen = False
        self.looked = False

    def versions_of(self, inputs: Iterable[object]) -> list[int]:
        """Return how often each tensor among the inputs was written to, before the first forward in training."""
        return [] if self.looked else _versions(inputs)

    def look_at(self, output: object, inputs: Sequence[object], versions: list[int]) -> None:
        """Refuse, after the first forward in training, what cannot be recomputed and no module shows.

        Raises:
            RuntimeError: the forward from ``inputs``, which had these ``versions``, to ``output`` writes into one of
                them, or has an rrelu.
        """
        if self.looked or not self.module.training:
            return
        recomputed = f"{type(self.module).__name__}, which is recomputed in the backward"
        if _versions(inputs) != versions:
            why = "the recomputation would read what it wrote"
            way_out = "Write x = x + y instead of x += y, set inplace=False, or leave this block out"
            raise RuntimeError(explain(f"{recomputed}, writes into its input in place", why, way_out))
        for node in nodes_between(output, inputs):
            # Without training its noise is not used.
            if node.name().startswith("Rrelu") and node._saved_training:
                why = "torch saves its noise before it is drawn, and the recomputation may stop in between"
                way_out = "Use another activation, such as LeakyReLU, or leave this block out"
                raise RuntimeError(explain(f"rrelu in {recomputed}", why, way_out))
        self.looked = True

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """For a forward that does not count: random states, buffers and attributes are afterwards as they were."""
        self.seen = False  # which buffers change is not known yet: copy all
        _, again = self.contexts(nullcontext(), nullcontext())
        around = Surroundings(islice(self.module.parameters(), 1))
        restore_attributes = remember_attributes(self.module.modules())
        try:
            with around.restored(), again, capturing_nothing():
                yield
        finally:
            restore_attributes()
            self.seen = False

    def contexts(self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]) -> Contexts:
        """Return the contexts of forward and recomputation, each with a further context entered inside."""
        buffers = _buffers_of(self.module)
        if not buffers:
            return keeping, reusing
        # At the first forward all buffers are copied, to be sure.
        unseen, self.seen = not self.seen, True
        before = {
            place: buffer.detach().clone() for place, buffer in buffers.items() if unseen or place in self.changing
        }

        @contextmanager
        def forward() -> Iterator[None]:
            versions = {place: buffer._version for place, buffer in buffers.items()}
            with keeping:
                yield
            for (owner, key), buffer in buffers.items():
                if buffer._version != versions[owner, key] or owner._buffers.get(key) is not buffer:
                    self.changing.add((owner, key))
            # ``before`` lives until the backward; from the second forward on it holds just these in the first place.
            for place in before.keys() - self.changing:
                del before[place]

        @contextmanager
        def recompute() -> Iterator[None]:
            # The buffers of now, not of then: other batches may have come between forward and backward.
            held = {(owner, key): owner._buffers[key] for owner, key in buffers}
            for (owner, key), earlier in before.items():
                # The recomputation changes a copy of what the forward saw.
                owner._buffers[key] = earlier.clone()
            try:
                with reusing:
                    yield
            finally:
                for (owner, key), buffer in held.items():
                    owner._buffers[key] = buffer

        return forward(), Again(recompute)


@contextmanager
def capturing_nothing() -> Iterator[None]:
    """Models of transformers collect outputs of their layers by hooks, such as router logits: not those of a trial."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def _versions(values: Iterable[object]) -> list[int]:
    return [value._version for value in values if has_version(value)]


def _buffers_of(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return each buffer in ``module`` by the module that holds it, and its key there."""
    found: dict[tuple[nn.Module, str], Tensor] = {}
    ahead: list[nn.Module | None] = [module]
    done: set[nn.Module | None] = {None}
    # Done at every call, and several times as fast as ``named_modules``.
    while ahead:
        owner = ahead.pop()
        if owner is None or owner in done:
            continue
        done.add(owner)
        ahead += owner._modules.values()
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                found[owner, key] = buffer
    return found


def nodes_between(output: object, inputs: object) -> Iterator[Any]:
    """Every node of the graph of ``output`` that comes after those of ``inputs``."""
    done, ahead = set(_grad_fns(inputs)), _grad_fns(output)
    while ahead:
        node = ahead.pop()
        if node is None or node in done:
            continue
        done.add(node)
        yield node
        ahead.extend(before for before, _ in node.next_functions)


def _grad_fns(values: object) -> list[Any]:
    return [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Again(AbstractContextManager[None]):
    """A context that can be entered again, as by a second backward through the same graph: ``make`` makes a new one."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.context = self.make()
        self.context.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self.context.__exit__(*exception)
