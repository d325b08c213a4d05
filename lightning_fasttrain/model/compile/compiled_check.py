"""Compare the results of a compiled block with those of eager code before it is used."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import describe_error
from lightning_fasttrain.core.modules.recomputation import capturing_nothing, recomputed_outside, without_graph
from lightning_fasttrain.core.modules.wrapped_forward import has_dropout, without_dropout
from lightning_fasttrain.core.state.rng import random_state, set_random_state, torch_generators
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.core.state.values import to_float64

_SHARES = ((1e-10, 1e-8), (1e-6, 2e-3), (1.0, 5e-2))  # up to this rounding: float64, float32 with TF32, 16 bits
_NUDGED = 8.0  # multiple of the effect that rounding of the inputs has on the eager block's results
_SAME_MASK = 0.03  # allowed relative error of a gradient against the forward
_TOO_ROUGH = 0.1  # if the eager block's own gradient has a larger error, the check is inconclusive
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device)

Forward = Callable[..., Any]
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        apart: largest distance of an output or a gradient from the eager block's, relative to its size.
        failure: why the compiled block cannot be trusted; "" if it can.
        of_masks: whether the failure concerns dropout masks.
        unchecked: why nothing was compared; "" if it was.
        without_masks: whether masks exist but were not compared, since no input of this block has a gradient.
    """

    apart: float = 0.0
    failure: str = ""
    of_masks: bool = False
    unchecked: str = ""
    without_masks: bool = False


def check_compiled(
    module: nn.Module,
    plain: Forward,
    compiled: Forward,
    compile_again: Callable[[], Forward],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Verdict:
    """Run a block's forward and backward eagerly and compiled on the same inputs, without side effects.

    Dropout is off for the comparison, as masks differ. If there is dropout, the code that will run, with its masks,
    computes its gradient along one direction, which must match the change of its forward when the inputs move in that
    direction: a backward with a different mask fails this test.

    Args:
        module: the block.
        plain: its forward.
        compiled: its compiled forward.
        compile_again: returns another compiled forward, so that code without dropout is not a recompilation.
        args, kwargs: arguments of the call, which are not changed.

    Source:
        The accuracy test of TorchDynamo, which also compares with the eager model; here the bound is the effect of
        rounding the inputs on the eager block.
    """
    why_not = _why_not(module, args, kwargs)
    if why_not:
        return Verdict(unchecked=why_not)
    try:
        with _leaving_no_trace(module) as state:
            return _compare(_Probe(module, args, kwargs), state, plain, compiled, compile_again)
    except torch._dynamo.exc.TorchDynamoException:
        raise  # a compiler error, which the caller handles
    except Exception as error:
        # An error of the block itself will be raised by its own call.
        return Verdict(unchecked=describe_error(error))


def _why_not(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    leaves = tree_leaves((args, kwargs))
    if detect_fake_mode(leaves) is not None:
        return "its inputs have no values"
    if is_sharded(module) or any(isinstance(part, FSDPModule) for part in module.modules() if part is not module):
        return "its parameters, or those of a submodule, are sharded over ranks, which would have to compare together"
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            return f"it receives a {type(leaf).__name__}, which another call might change"
    return ""


def _compare(
    probe: "_Probe", state: StepState, plain: Forward, compiled: Forward, compile_again: Callable[[], Forward]
) -> Verdict:
    has_masks = has_dropout(probe.module)
    undo = without_dropout(probe.module)
    try:
        with state.watch():  # compiled code writes to the same tensors, unseen
            expected = probe.run(plain)
        draws = probe.has_drawn()
        allowed = probe.allow(expected, probe.run(plain, probe.nudges()))
        found = expected  # if there are random draws other than dropout, which cannot be disabled
        if has_masks and not draws:
            found = probe.run(compile_again())
        elif not draws:
            found = probe.run(compiled)
    finally:
        undo()
    apart, failure = _judge(expected, found, allowed)
    if failure or not (has_masks or draws):
        return Verdict(apart, failure)
    misses = probe.miss(plain), probe.miss(compiled)
    failure = _judge_masks(*misses)
    return Verdict(apart, failure, of_masks=failure != "", without_masks=None in misses)


def _judge(expected: Numbers, found: Numbers, allowed: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest relative distance, and a failure if one exceeds its limit; reads the device once."""
    if expected.keys() != found.keys():
        return 0.0, f"it has {', '.join(sorted(expected.keys() ^ found.keys()))} only when compiled, or only when not"
    largest = 0.0
    for name, (distance, size) in _distances(expected, found).items():
        if not distance <= allowed[name]:  # also true for NaN
            what = f"{name} is off by {distance:.2g} when compiled, at a size of {size:.2g}"
            return distance / max(size, 1e-30), f"{what}; rounding allows {allowed[name]:.2g}"
        if allowed[name] < size:  # no ratio for values that are only rounding
            largest = max(largest, distance / size)
    return largest, ""


def _judge_masks(plain: float | None, compiled: float | None) -> str:
    if plain is None or compiled is None or plain > _TOO_ROUGH or compiled <= max(4 * plain, _SAME_MASK):
        return ""
    what = f"its gradient differs from its forward's change by {compiled:.1%}, the eager block's by {plain:.1%}"
    return f"{what}: dropout has different masks in the backward"


def _distances(one: Numbers, other: Numbers) -> dict[str, tuple[float, float]]:
    """Return the distance and the size of each value, as Euclidean norms."""
    if not one:
        return {}
    numbers: list[Tensor] = []
    for name, expected in one.items():
        dtype = torch.promote_types(expected.dtype, torch.float32)
        a, b = expected.to(dtype), other[name].to(dtype)
        same = (a == b) | (a.isnan() & b.isnan())  # infinities of a mask too
        numbers += [torch.where(same, 0.0, b - a).norm(), torch.where(a.isfinite(), a, 0.0).norm()]
    norms = torch.stack(numbers).tolist()
    return dict(zip(one, zip(norms[::2], norms[1::2], strict=True), strict=True))


class _Probe:
    """Calls a block on copies of the same inputs, each time with the same random state."""

    def __init__(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.module = module
        self.leaves, self.structure = tree_flatten((args, dict(kwargs)))
        self.state = random_state()
        self.eps = 0.0  # of the coarsest dtype in which the block computes

    def run(self, forward: Forward, moves: Mapping[int, Tensor] | None = None) -> Numbers:
        """Return outputs, and gradients of all inputs and parameters, along fixed directions of the outputs."""
        numbers, inputs, outputs = self._call(forward, moves or {})
        wanted = {f"the gradient of input {i}": leaf for i, leaf in inputs.items()}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                wanted[f"the gradient of '{name}'"] = parameter
        gradients = self._gradients(outputs, list(wanted.values()))
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None and not gradient.is_sparse:
                numbers[name] = gradient
        return numbers

    def has_drawn(self) -> bool:
        """Whether the last call used torch's random state, which the compiler uses differently."""
        now = random_state()
        before, after = torch_generators(self.state), torch_generators(now)
        return not all(map(torch.equal, before, after))

    def allow(self, expected: Numbers, nudged: Numbers) -> dict[str, float]:
        """Return the allowed distance of each value: the effect of rounding the inputs, or a fraction of its size."""
        share = next(share for eps, share in _SHARES if self.eps <= eps)
        distances = _distances(expected, {**expected, **nudged})
        return {name: max(share * size, _NUDGED * moved) for name, (moved, size) in distances.items()}

    def miss(self, forward: Forward) -> float | None:
        """Return the relative error of a gradient against the forward's change; None if no input has a gradient."""
        _, inputs, outputs = self._call(forward, {})
        gradients = self._gradients(outputs, list(inputs.values()))
        ways: dict[int, Tensor] = {}
        for (i, leaf), gradient in zip(inputs.items(), gradients, strict=True):
            if gradient is not None:
                ways[i] = to_float64(gradient)
                if leaf.shape == outputs[0].shape:
                    ways[i] = _beside(ways[i], to_float64(_direction(0, leaf)))
        slope = sum(float(way.square().sum()) for way in ways.values())  # of the value, along the direction
        if not slope > 0:
            return None
        size = sum(float(to_float64(inputs[i]).square().sum()) for i in ways) ** 0.5
        step = (1e-2 if self.eps < 1e-6 else 5e-2) * size / slope**0.5
        ahead, behind = self._value(forward, ways, step), self._value(forward, ways, -step)
        return abs((ahead - behind) / (2 * step * slope) - 1)

    def _value(self, forward: Forward, ways: Mapping[int, Tensor], step: float) -> float:
        _, _, outputs = self._call(forward, {i: step * way for i, way in ways.items()})
        total = 0.0
        for i, output in enumerate(outputs):
            total += float((to_float64(output) * to_float64(_direction(i, output))).sum())
        return total

    def _call(self, forward: Forward, moves: Mapping[int, Tensor]) -> tuple[Numbers, dict[int, Tensor], list[Tensor]]:
        """Return the outputs as values, the inputs with a gradient, and the outputs with a gradient."""
        set_random_state(self.state)
        leaves = list(self.leaves)
        inputs: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[i] = leaf.detach().clone()
                if i in moves:
                    leaves[i] = (leaf.detach() + moves[i].to(leaf.device)).to(leaf.dtype)
                leaves[i].requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                inputs[i] = leaves[i]
        args, kwargs = tree_unflatten(leaves, self.structure)
        floats = [leaf for leaf in tree_leaves(forward(*args, **kwargs)) if _holds_floats(leaf)]
        self.eps = max([self.eps, *map(_eps_of, floats)])
        numbers = {f"output {i}": output.detach().clone() for i, output in enumerate(floats)}
        return numbers, inputs, [output for output in floats if output.requires_grad]

    def nudges(self) -> dict[int, Tensor]:
        """Perturb each value by as much as rounding to its computation dtype could have moved it."""
        nudges: dict[int, Tensor] = {}
        for i, leaf in enumerate(self.leaves):
            if _holds_floats(leaf):
                nudges[i] = leaf.detach() * self.eps * _direction(i, leaf).sign()
        return nudges

    def _gradients(self, outputs: list[Tensor], wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
        if not outputs or not wanted:
            return (None,) * len(wanted)
        directions = list(starmap(_direction, enumerate(outputs)))
        return torch.autograd.grad(outputs, wanted, directions, allow_unused=True)


def _holds_floats(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _direction(seed: int, like: Tensor) -> Tensor:
    """Return random values of a tensor's shape, the same each time and on each device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _beside(way: Tensor, other: Tensor) -> Tensor:
    """Return the part of a direction orthogonal to another, which removes the path of a residual connection."""
    return way - (way * other).sum() / other.square().sum() * other


def _eps_of(output: Tensor) -> float:
    device, eps = output.device.type, torch.finfo(output.dtype).eps
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    return eps


@contextmanager
def _leaving_no_trace(module: nn.Module) -> Iterator[StepState]:
    """Restore random states, and what the module changes, after calls that must have no side effects."""
    state = StepState([module])
    outside = recomputed_outside.set(True)  # recomputation is unnecessary here
    try:
        # The innermost hooks apply: those around the block must neither keep nor count tensors that are saved here.
        with saved_tensors_hooks(without_graph, lambda tensor: tensor), capturing_nothing():
            yield state
    finally:
        recomputed_outside.reset(outside)
        state.restore()
