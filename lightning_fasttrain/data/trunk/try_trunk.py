"""Check whether a step gives the same result as the unsplit step if submodules run in micro-batches."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import batch_size, list_tensors
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.data.normalizer.trial.runs import LOW_PRECISION, Run, Trial, entries_of, relative_difference
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, run_again, try_unsplit
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk, find_batch_size

# Errors that a user's model may raise when it is called with unfamiliar shapes.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)
_FLOAT32 = 1e-4  # rounding differences between micro-batch sizes


class TrunkTrial(Protocol):
    """The data on which submodules are tried."""

    stage: Stage

    def find_shared(self, module: nn.Module) -> frozenset[str] | None:
        """Return the tensors that all micro-batches share; None where a call is not batch-first."""
        ...

    def is_exact(self, trunk: Trunk) -> bool:
        """Whether the step has the loss and gradient of the unsplit one with this trunk in micro-batches."""
        ...


class TrialOnSamples:
    """Tries submodules on a few samples, which have been run unsplit and in micro-batches.

    Args:
        stage: where the step runs.
        trial: a trial with gradients.
    """

    def __init__(self, stage: Stage, trial: Trial) -> None:
        self.stage, self._trial = stage, trial
        self._unsplit = _record_calls(stage, trial, None)
        self._micro_batch = _record_calls(stage, trial, 1)
        where = trial.sample.cuttings[0][1][1]
        self._rows = trial.sample.size, 0 if where is None else where.stop - where.start

    def find_shared(self, module: nn.Module) -> frozenset[str] | None:
        unsplit, micro_batch = self._unsplit.get(module, []), self._micro_batch.get(module, [])
        if not unsplit or len(unsplit) != len(micro_batch) or not self._rows[1]:
            return None
        shared: set[str] = set()
        for one, other in zip(unsplit, micro_batch, strict=True):
            if one.inputs.keys() != other.inputs.keys() or one.outputs.keys() != other.outputs.keys():
                return None
            inputs = {path for path in one.inputs if self._has_grown(one.inputs[path], other.inputs[path])}
            outputs = {path for path in one.outputs if self._has_grown(one.outputs[path], other.outputs[path])}
            if not inputs or not outputs or one.returns_numbers:
                return None
            shared |= one.inputs.keys() - inputs
            shared |= {path for path in one.outputs if one.outputs[path] == other.outputs[path]}
        return frozenset(shared)

    def _has_grown(self, unsplit: torch.Size, micro_batch: torch.Size) -> bool:
        """Whether the first axis follows the number of samples."""
        if not len(unsplit) or len(unsplit) != len(micro_batch):
            return False
        return unsplit[0] * self._rows[1] == micro_batch[0] * self._rows[0] and unsplit[0] != micro_batch[0]

    def is_exact(self, trunk: Trunk) -> bool:
        run = _run_through(self.stage, self._trial, trunk, 2)
        return run is not None and _is_near(self._trial, trunk, self._trial.whole, run)


class TrialOnOutputs(TrialOnSamples):
    """Tries submodules on a few samples by their outputs, where parameters are sharded.

    Gradients cannot be computed beside those of the training there. But a submodule with the same outputs in
    micro-batches has the same gradient, too. Each run gathers parameters on all ranks, so they decide together.
    """

    def find_shared(self, module: nn.Module) -> frozenset[str] | None:
        found = from_all_ranks([super().find_shared(module)])
        return None if None in found else frozenset[str]().union(*found)

    def is_exact(self, trunk: Trunk) -> bool:
        with _recording_calls(trunk.modules.values(), values=True) as expected:
            whole = run_again(self.stage, self._trial)
        with _recording_calls(trunk.modules.values(), values=True) as seen:
            run = _run_through(self.stage, self._trial, trunk, 2)
        return all(from_all_ranks([run is not None and self._is_the_same(trunk, whole, expected, run, seen)]))

    def _is_the_same(self, trunk: Trunk, whole: Run, expected: "_Calls", run: Run, seen: "_Calls") -> bool:
        if not _changes_what_is_expected(trunk, whole, run) or expected.keys() != seen.keys():
            return False
        pairs = [(torch.tensor([whole.loss]), torch.tensor([run.loss]))]
        for module, calls in expected.items():
            if len(calls) != len(seen[module]):
                return False
            for one, other in zip(calls, seen[module], strict=True):
                pairs += [(value, other.values[path]) for path, value in one.values.items() if path in other.values]
        limit = LOW_PRECISION if self._trial.rounding else _FLOAT32
        return all(one.shape == other.shape and relative_difference(one, other) <= limit for one, other in pairs)


class TrialOnBatch:
    """Tries submodules on a whole batch, for a step that does not run on a few of its samples.

    The activations of the unsplit batch may not fit in memory, so only its loss is computed, without gradients. Where
    samples depend on one another in a submodule, the loss changes in micro-batches, and gradients differ between ``n``
    micro-batches and another number of them.

    Args:
        stage: the stage on which the step runs.
        batch: the batch on which it runs.
        n: number of micro-batches.

    Raises: whatever the step raises.
    """

    def __init__(self, stage: Stage, batch: Any, n: int) -> None:
        self.stage, self._size = stage, batch_size(batch)
        self._n = min(max(2, n), self._size)
        sample = Sample(batch, self._size, [])
        with torch.no_grad(), _recording_calls(_all_modules(stage.models)) as self._calls:
            self._trial = try_unsplit(replace(stage, gradients=False), sample)

    def find_shared(self, module: nn.Module) -> frozenset[str] | None:
        calls = self._calls.get(module, [])
        shared: set[str] = set()
        for call in calls:
            outputs = {path for path, shape in call.outputs.items() if len(shape) and shape[0] % call.size == 0}
            if call.size % self._size or not outputs or call.returns_numbers:
                return None
            shared |= {path for path, shape in call.inputs.items() if not len(shape) or shape[0] != call.size}
            shared |= call.outputs.keys() - outputs
        return frozenset(shared) if calls else None

    def is_exact(self, trunk: Trunk) -> bool:
        whole = self._trial.whole
        one = _run_through(self.stage, self._trial, trunk, self._n)
        other = _run_through(self.stage, self._trial, trunk, self._n + 1 if self._n < self._size else self._n - 1)
        if one is None or other is None:
            return False
        as_unsplit = replace(one, loss=whole.loss, changed=whole.changed)
        return all(_is_near(self._trial, trunk, as_unsplit, run) for run in (one, other))


def _run_through(stage: Stage, trial: Trial, trunk: Trunk, n: int) -> Run | None:
    """Run the step on the samples of a trial with this trunk in micro-batches; return None where it fails."""
    _, undo = trunk.install(n)
    try:
        return run_again(stage, trial)
    except FAILURES:
        return None
    finally:
        undo()


def _is_near(trial: Trial, trunk: Trunk, expected: Run, run: Run) -> bool:
    """Whether two runs have the same loss and gradient, and no buffer changes once per micro-batch."""
    if not _changes_what_is_expected(trunk, expected, run):
        return False
    leaves = trial.parameters
    if not trial.splits:
        # A step may create other leaves in each run, such as the inputs of a gradient penalty.
        leaves = [leaf for leaf in expected.entries if leaf in run.entries or isinstance(leaf, nn.Parameter)]
    expected, run = copy.copy(expected), copy.copy(run)
    for one in (expected, run):
        one.keep(leaves)
    tried = replace(trial, whole=expected, splits=[[run]])
    return bool(leaves) and tried.error(lambda runs: [1.0]) <= tried.limit


def _changes_what_is_expected(trunk: Trunk, expected: Run, run: Run) -> bool:
    """Whether the same buffers change as in the unsplit step, and none of them in each micro-batch."""
    return set(run.changed) <= set(expected.changed) and not any(_holds(trunk, name) for name in expected.changed)


def _holds(trunk: Trunk, buffer: str) -> bool:
    """Whether a buffer that the step changes is in the trunk, where each micro-batch would change it."""
    return any(not name or buffer.startswith(f"{name}.") for name in trunk.modules)


@dataclass
class _Call:
    """Inputs and outputs of one module call: shapes and, on request, some entries of the outputs."""

    inputs: dict[str, torch.Size]
    outputs: dict[str, torch.Size]
    size: int
    values: dict[str, Tensor]

    @property
    def returns_numbers(self) -> bool:
        """Whether an output is a scalar, such as a mean over the samples."""
        return any(len(shape) == 0 for shape in self.outputs.values())


_Calls = dict[nn.Module, list[_Call]]


def _record_calls(stage: Stage, trial: Trial, micro_batch: int | None) -> _Calls:
    """Record all calls of all modules in one run of the step."""
    with _recording_calls(_all_modules(stage.models)) as calls:
        run_again(stage, trial, micro_batch)
    return calls


@contextmanager
def _recording_calls(modules: Iterable[nn.Module], values: bool = False) -> Iterator[_Calls]:
    """Record the calls of these modules, with entries of their outputs if ``values`` is true."""
    calls: _Calls = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = list_tensors((args, kwargs), "input"), list_tensors(output, "output")
        call = _Call(_shapes_of(inputs), _shapes_of(outputs), find_batch_size((args, kwargs)), {})
        if values:
            call.values.update({path: entries_of(tensor, tensor) for path, tensor in outputs.items()})
        calls.setdefault(module, []).append(call)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield calls


def _all_modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    return list({module: None for model in models for module in model.modules()})


def _shapes_of(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {path: tensor.shape for path, tensor in tensors.items()}
