"""Predict compiled blocks: run a block as the two graphs that the compiler would make of its forward and backward.

Compiled code keeps other tensors for the backward than the block itself, as the compiler computes cheap ones again. Its
own partition of the block decides that here, on tensors without memory, and nothing is compiled. Values between matrix
products that only fused kernels use are never stored.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_fasttrain.core.messages import describe_error
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from lightning_fasttrain.model.compile.compiled_forward import key_of_code
from lightning_fasttrain.technique.declarations import PredictedStep

Partition = tuple[Callable[..., Sequence[Any]], list[TreeSpec]]  # the graphs, and the structure of their outputs


class PartitionedForward(WrappedForward):
    """Runs a block as the compiler's graphs of it; a block that cannot be traced runs as it is, which is noted.

    Args:
        module: the block, with fake tensors.
        index: its place among the blocks.
        known: the graphs of the blocks that ran already, which equal blocks share.
        step: the predicted step.
    """

    def __init__(
        self, module: nn.Module, index: int, known: dict[tuple[Any, ...], Partition], step: PredictedStep
    ) -> None:
        super().__init__(module)
        self.index, self.known, self.step = index, known, step

    def __call__(self, *args: object, **kwargs: object) -> Any:
        named = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [*named.values(), *filter(_is_tensor, leaves)]
        if any(isinstance(tensor, DTensor) for tensor in inputs):
            self._give_up("tensor parallel ranks share it")
        if self.failure is not None:
            return self.inner(*args, **kwargs)
        others = [leaf for leaf in leaves if not _is_tensor(leaf)]
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in inputs]
        switches = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), self.module.training
        key = (*switches, *shapes, str(structure), repr(others), *_values_of(self.module, self.index))
        key = (*key, key_of_code(self.module))
        try:
            if key not in self.known:
                self.known[key] = self._trace(list(named), leaves, structure, inputs)
            run, outputs = self.known[key]
            return tree_unflatten(run(*inputs), outputs[0])
        except Exception as error:
            self._give_up(describe_error(error))
            return self.inner(*args, **kwargs)

    def _give_up(self, why: str) -> None:
        self.failure = why
        kind = type(self.module).__name__
        note = f"{kind} is predicted uncompiled, an upper bound, as the compiler's graphs are unknown: {why}."
        if note not in self.step.notes:
            self.step.notes.append(note)

    def _trace(self, names: list[str], leaves: list[Any], structure: TreeSpec, inputs: list[Tensor]) -> Partition:
        """Return the block as a function of tensors alone, which runs the compiler's graphs."""
        from torch._functorch.aot_autograd import aot_function  # all of which take long to import
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        outputs: list[TreeSpec] = []
        places = [place for place, leaf in enumerate(leaves) if _is_tensor(leaf)]

        def run_block(*tensors: Tensor) -> list[Any]:
            given = iter(tensors[len(names) :])
            filled = list(leaves)
            for place in places:
                filled[place] = next(given)
            args, kwargs = tree_unflatten(filled, structure)
            with torch.nn.utils.stateless._reparametrize_module(self.module, dict(zip(names, tensors, strict=False))):
                found, outputs[:] = _flatten(self.inner(*args, **kwargs))
            return found

        run = aot_function(
            run_block,
            fw_compiler=functools.partial(_run_fused, self.step),
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
        )
        # Who watches the step, or keeps what it saves, is to see the graphs run, not how they are made.
        with _disable_current_modes(), saved_tensors_hooks(_as_it_is, _as_it_is):
            run(*inputs)
        return run, outputs


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _flatten(result: Any) -> tuple[list[Any], list[TreeSpec]]:
    leaves, structure = tree_flatten(result)
    return leaves, [structure]


def _values_of(block: nn.Module, index: int) -> Iterator[object]:
    """Yield the plain values of the modules in a block, on which its code may depend, but not the block's own place."""
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            is_place = type(value) is int and value == index
            if isinstance(value, bool | int | float | str) and not is_place:
                yield name, key, value


def _run_fused(step: PredictedStep, gm: fx.GraphModule, example_inputs: object) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph operator by operator, and tells which results would not be stored."""
    unstored = _find_unstored(gm.graph)

    def run(inputs: list[Any]) -> Any:
        return _FusedRun(gm, unstored, step).boxed_run(inputs)  # a new one, since it keeps the last values

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _FusedRun(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, unstored: set[fx.Node], step: PredictedStep) -> None:
        super().__init__(graph)
        self.unstored, self.step = unstored, step

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.unstored:
            for tensor in filter(_is_tensor, result if isinstance(result, list | tuple) else [result]):
                self.step.not_stored(tensor)
        return result


_FUSED = ("sum", "mean", "var_mean", "amax", "amin", "convert_element_type", "full", "scalar_tensor", "iota")


def _find_unstored(graph: fx.Graph) -> set[fx.Node]:
    """Return the operators whose results only fused kernels use."""
    return {node for node in graph.nodes if _is_fused(node) and not _is_stored(node)}


def _is_stored(node: fx.Node) -> bool:
    """Return whether a result leaves the graph, or goes into an operator that is a kernel of its own."""
    views, others = [], []
    for user in node.users:
        (views if _is_view(user) else others).append(user)
    return not all(map(_is_fused, others)) or any(map(_is_stored, views))


def _is_fused(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket.__name__ in _FUSED


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)
