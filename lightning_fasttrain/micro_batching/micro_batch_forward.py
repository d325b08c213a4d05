"""Run a submodule in micro-batches with recomputation, for losses that need the whole batch."""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.batch.leaves import list_tensors, split_sizes, walk_leaves
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.recomputation import RecomputedForward, recompute_in_backward, recomputed_outside
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.trial.deterministic_step import list_batch_statistics

_LOW = (torch.bfloat16, torch.float16)


class Float32Uses:
    """Gives each micro-batch of a forward its own use of a module's 16-bit parameters.

    Autograd adds the gradients of several uses of a parameter in the parameter's own dtype, and rounds each time. Here
    the uses add theirs to a separate float32 sum, which replaces them right before accumulation, so that DDP and hooks
    see one gradient, rounded once. Sharded parameters are left unchanged.

    Args:
        module: the module whose parameters are used several times.
    """

    def __init__(self, module: nn.Module) -> None:
        self._sums: dict[str, _Sum] = {}
        for name, parameter in module.named_parameters():
            plain = parameter.dtype in _LOW and not is_traceable_wrapper_subclass(parameter)
            if plain and parameter.requires_grad and not hasattr(parameter, "ds_id"):
                self._sums[name] = _Sum(parameter)

    def __bool__(self) -> bool:
        return bool(self._sums)

    def run(self, module: nn.Module, function: Callable[[], object], uses: dict[str, Tensor]) -> Any:
        """Call a function of the module with these tensors in place of its parameters."""
        return torch.func.functional_call(
            _Calls(module, function), {f"module.{name}": use for name, use in uses.items()}
        )

    def use(self) -> dict[str, Tensor]:
        """Return the parameters for one more micro-batch, by name."""
        return {name: _Use.apply(sum_.parameter, sum_) for name, sum_ in self._sums.items()}  # pyright: ignore[reportReturnType]


class _Sum:
    """The gradient of one parameter so far."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.total: Tensor | None = None
        self._handle: Any = None
        self._backward = -1

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient; return what autograd accumulates: zeros for the first use, so that hooks are called."""
        if self.total is not None and self._backward == _current_backward():
            self.total.add_(gradient)
            return None
        self.total, self._backward = gradient.float(), _current_backward()
        if self._handle is None:
            self._handle = self.parameter.register_hook(self._finish)
        return gradient.new_zeros(()).expand_as(gradient)

    def _finish(self, gradient: Tensor) -> Tensor:
        self._handle.remove()
        total, self.total, self._handle = self.total, None, None
        if total is None or self._backward != _current_backward():
            return gradient  # left behind by an earlier backward that failed
        return total.add_(gradient).to(gradient.dtype)


def _current_backward() -> int:
    return torch._C._current_graph_task_id()


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, parameter: Tensor, sum_: _Sum) -> Tensor:
        ctx.sum_ = sum_
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.sum_.add(gradient), None


class _Calls(nn.Module):
    """Calls a function as a module, so that other parameters can be passed."""

    def __init__(self, module: nn.Module, function: Callable[[], object]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> Any:
        return self.function()


@check_arguments
def micro_batch_forward_(module: nn.Module, n: PositiveInt) -> Undo:
    """Run ``module`` in ``n`` micro-batches and recompute each in the backward pass, in place.

    The rest of the model sees the outputs of the whole batch, joined along their first axis, so any loss has the
    gradient of the unsplit step: contrastive, with several normalizers, or nonlinear in its mean. Only the activations
    of one micro-batch are in memory at a time, at the cost of one more forward; blocks that are recomputed anyway are
    not recomputed twice. There is one backward, so DDP and FSDP need no changes. Where gradients are off nothing is
    split.

    Tensor arguments whose first axis is the batch are split; everything else, such as masks of shape (1, T, T) or a
    table of positions, is passed unchanged to each micro-batch. Output tensors are joined; None and equal values are
    passed on; tuples, lists, mappings and dataclasses keep their type.

    Args:
        module: a module in which samples do not depend on one another, such as an encoder; its inputs are batch-first.
        n: number of micro-batches; a batch of fewer samples is run one sample at a time.

    Returns:
        A function that restores the module.

    Raises:
        ValueError: n is less than 1; in a forward: BatchNorm uses the batch's statistics, or an output
            cannot be joined.

    Example:
        >>> encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> texts, images = torch.randn(6, 4), torch.randn(6, 4)
        >>> def contrast():
        ...     scores = encoder(texts) @ encoder(images).T
        ...     return nn.functional.cross_entropy(scores, torch.arange(6))
        >>> expected = torch.autograd.grad(contrast(), encoder[0].weight)[0]
        >>> restore = micro_batch_forward_(encoder, n=3)
        >>> torch.allclose(torch.autograd.grad(contrast(), encoder[0].weight)[0], expected, atol=1e-6)
        True
        >>> restore()

    Source:
        For one kind of loss: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
        (GradCache), https://arxiv.org/abs/2101.06983. Here autograd recomputes, so that any loss and hook works.
    """
    return MicroBatchedForward(module, n).install()


class MicroBatchedForward(RecomputedForward):
    """A forward that runs in micro-batches, each recomputed in the backward pass.

    Attributes:
        n: number of micro-batches.
        shared: paths of arguments and outputs whose first axis is not the batch, though it may have its length.
        fixed: paths of outputs that have the same shape for one row and for two; None where that is not known yet.
    """

    def __init__(self, module: nn.Module, n: PositiveInt) -> None:
        super().__init__(module)
        self.n = n
        self.shared: frozenset[str] = frozenset()
        self.fixed: frozenset[str] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.n == 1 or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        size = find_batch_size((args, kwargs), self.shared)
        if size < 2:
            return self.inner(*args, **kwargs)
        refuse_batch_statistics(self.module)
        self.ran = True
        sizes = split_sizes(size, self.n)
        outputs: list[Any] = []
        uses = Float32Uses(self.module)
        start = 0
        for rows in sizes:
            outputs.append(self._run_rows(args, kwargs, start, rows, size, uses))
            start += rows
        self._find_fixed = functools.partial(self._compare_rows, args, kwargs, size)
        try:
            return self._join(outputs, sizes, "output")
        finally:
            del self._find_fixed

    @torch.no_grad()
    def _compare_rows(self, args: object, kwargs: object, size: int) -> frozenset[str]:
        """Return the outputs whose first axis does not follow the number of rows, such as a table of positions."""
        shapes: list[dict[str, torch.Size]] = []
        for rows in (1, 2):

            def take(leaf: Any, path: str, rows: int = rows) -> Any:
                if is_batched(leaf, path, size, self.shared):
                    return leaf[:rows]
                return leaf

            with self.leaving_no_trace():
                some_args, some_kwargs = walk_leaves((args, kwargs), take, "input")
                outputs = list_tensors(self.inner(*some_args, **some_kwargs), "output")
            shapes.append({path: output.shape for path, output in outputs.items()})
        return frozenset(path for path, shape in shapes[0].items() if shapes[1].get(path) == shape)

    def _run_rows(self, args: object, kwargs: object, start: int, rows: int, size: int, uses: Float32Uses) -> Any:
        tensors: list[Tensor] = []

        def take(leaf: Any, path: str) -> Any:
            if is_batched(leaf, path, size, self.shared):
                leaf = leaf[start : start + rows]
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            return leaf

        taken = walk_leaves((args, kwargs), take, "input")

        used = uses.use()

        # By position and flat: the devices whose random states must be restored, and hooks on saved tensors, are found
        # only through such tensors.
        def run(*tensors: Tensor) -> Any:
            given = iter(tensors)
            outside = recomputed_outside.set(True)
            try:
                args, kwargs = walk_leaves(taken, lambda x, _: next(given) if isinstance(x, Tensor) else x, "input")
                if not used:
                    return self.inner(*args, **kwargs)
                return uses.run(self.module, lambda: self.inner(*args, **kwargs), used)
            finally:
                recomputed_outside.reset(outside)

        versions = self.versions_of(tensors)
        output = recompute_in_backward(run, tensors, self.contexts(nullcontext(), nullcontext()))
        self.examine(output, tensors, versions)
        return output

    def _join(self, outputs: list[Any], sizes: Sequence[int], path: str) -> Any:
        """Join outputs into those of the unsplit forward."""
        first = outputs[0]
        if isinstance(first, Tensor):
            return self._join_tensors(outputs, sizes, path)
        if isinstance(first, Mapping):
            joined: dict[Any, Any] = {}
            for key in first:
                joined[key] = self._join(list(map(operator.itemgetter(key), outputs)), sizes, f"{path}[{key!r}]")
            kind: Any = type(first)
            return kind(joined)
        if isinstance(first, list | tuple):
            columns = zip(*outputs, strict=True)
            items = [self._join(list(column), sizes, f"{path}[{i}]") for i, column in enumerate(columns)]
            if hasattr(first, "_fields"):
                return type(first)(*items)
            return type(first)(items)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            joined_fields = copy.copy(first)
            for field in dataclasses.fields(first):
                values = list(map(operator.attrgetter(field.name), outputs))
                # Bypasses __setattr__, which a frozen dataclass forbids.
                object.__setattr__(joined_fields, field.name, self._join(values, sizes, f"{path}.{field.name}"))
            return joined_fields
        if all(output is first or (type(output) in _PLAIN and output == first) for output in outputs):
            return first
        return NotJoined(path, type(first).__name__)

    def _join_tensors(self, outputs: list[Tensor], sizes: Sequence[int], path: str) -> Tensor:
        if path in self.shared:
            return outputs[0]
        multiple = outputs[0].shape[0] // sizes[0] if outputs[0].ndim > 0 else 0
        # A table of positions (T, D) may be as long as a micro-batch; no gradients flow through it.
        if multiple > 0 and not outputs[0].requires_grad and len({output.shape for output in outputs}) == 1:
            if self.fixed is None:
                self.fixed = self._find_fixed()
            if path in self.fixed:
                return outputs[0]
        # A flattened (B·T, C) has several rows for each sample.
        if multiple > 0 and all(o.shape[0] == multiple * rows for o, rows in zip(outputs, sizes, strict=True)):
            return torch.cat(outputs)
        if all(_is_the_same(output, outputs[0]) for output in outputs):
            return outputs[0]  # such as a table of positions
        what = f"{path} of {type(self.module).__name__}, of shape {tuple(outputs[0].shape)}, in micro-batches"
        why = "its first axis is not the batch, so outputs of several micro-batches cannot be joined"
        raise ValueError(explain(what, why, "Use through= to name a submodule whose outputs are batch-first"))


@dataclass
class Backbone:
    """Submodules that run in micro-batches while the rest of a step sees the whole batch.

    Attributes:
        modules: qualified name → module.
        shared: name → the arguments and outputs whose first axis is not the batch, where that is known.
    """

    modules: dict[str, nn.Module]
    shared: dict[str, frozenset[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return list_some([repr(name or "the module itself") for name in self.modules])

    def install(self, n: PositiveInt) -> tuple[list[MicroBatchedForward], Undo]:
        """Run these submodules in ``n`` micro-batches until the returned function is called."""
        with ExitStack() as stack:
            wrappers: list[MicroBatchedForward] = []
            for name, module in self.modules.items():
                wrapper = MicroBatchedForward(module, n)
                if name in self.shared:
                    wrapper.shared, wrapper.fixed = self.shared[name], frozenset()
                stack.callback(wrapper.install())
                wrappers.append(wrapper)
            return wrappers, stack.pop_all().close


def _is_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are equal, as far as can be determined without waiting for a device."""
    if one.requires_grad or one.shape != other.shape:
        return False
    return one.device.type != "cpu" or torch.equal(one, other)


_PLAIN = (int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device)


class NotJoined:
    """Placeholder of an output that cannot be joined, such as a cache of keys and values unused in training."""

    def __init__(self, path: str, kind: str) -> None:
        self._path, self._kind = path, kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what = f"{self._path}, a {self._kind}"
        why = "outputs of this type from several micro-batches cannot be joined"
        raise AttributeError(explain(what, why, "Use through= to name a submodule that does not return it"))


def find_batch_size(arguments: object, shared: frozenset[str] = frozenset()) -> int:
    """Return the most frequent first axis of the tensors in arguments, the first of equals; 1 without tensors."""
    found: dict[int, int] = {}
    for path, tensor in list_tensors(arguments, "input").items():
        if tensor.ndim > 0 and tensor.shape[0] > 1 and path not in shared:
            found[tensor.shape[0]] = found.get(tensor.shape[0], 0) + 1
    return max(found, key=lambda size: found[size], default=1)


def is_batched(leaf: object, path: str, size: int, shared: frozenset[str]) -> bool:
    """Whether an argument has one row per sample."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size and path not in shared


def refuse_batch_statistics(module: nn.Module) -> None:
    """Raises: ValueError: a BatchNorm layer uses the statistics of the batch."""
    names = list(list_batch_statistics(module))
    if names:
        what = f"micro-batches through {type(module).__name__} with BatchNorm in training mode ('{names[0]}')"
        why = "its statistics are those of the samples that run together"
        raise ValueError(explain(what, why, "Use GroupNorm or LayerNorm, or freeze the BatchNorm layers with .eval()"))
