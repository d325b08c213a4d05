"""Check whether a step gives the same result as the unsplit step if submodules run in micro-batches."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import batch_size, list_tensors
from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.data.normalizer.trial.runs import Run, Trial, entries_of, relative_difference
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, run_again, try_unsplit, watching_calls
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk

# Errors that a user's model may raise when it is called with unfamiliar shapes.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)
_ROUNDING = 1e-4  # of outputs in float32, for products of other sizes


@dataclass
class TrunkTrial:
    """Tries submodules by running the step with them in micro-batches.

    Loss and gradient must be those of the unsplit run; where that has no gradient, as with sharded parameters, the
    outputs of the submodules instead, since a submodule with the same outputs has the same gradient, too. With sharded
    parameters each run gathers parameters on all ranks, so they decide together.

    Attributes:
        stage: where the step runs.
        trial: the unsplit run, which has a gradient only where the samples were run in micro-batches, too.
        unsplit: the calls of each module in the unsplit run.
        micro_batch: the same for some of the rows.
        rows: the numbers of rows of the two.
        n: number of micro-batches.
    """

    stage: Stage
    trial: Trial
    unsplit: "_Calls"
    micro_batch: "_Calls"
    rows: tuple[int, int]
    n: int

    @classmethod
    def on_samples(cls, stage: Stage, trial: Trial) -> "TrunkTrial":
        """Try submodules on a few samples, which have been run unsplit and in micro-batches."""
        rows = trial.sample.cuttings[0][1][1]
        fewer = 0 if rows is None else rows.stop - rows.start
        with _recording_calls(_all_modules(stage)) as unsplit:
            run_again(stage, trial)
        with _recording_calls(_all_modules(stage)) as micro_batch:
            run_again(stage, trial, 1)
        return cls(stage, trial, unsplit, micro_batch, (trial.sample.size, fewer), 2)

    @classmethod
    def on_batch(cls, stage: Stage, batch: object, n: int) -> "TrunkTrial":
        """Try submodules on a whole batch, for a step that does not run on a few of its samples.

        The activations of the unsplit batch may not fit in memory, so it runs without gradients.

        Raises: whatever the step raises.
        """
        size = batch_size(batch)
        with torch.no_grad(), _recording_calls(_all_modules(stage)) as unsplit:
            trial = try_unsplit(replace(stage, gradients=False), Sample(batch, size, []))
        one_row: _Calls = {}
        for module, calls in unsplit.items():
            one_row[module] = [call.expect_one_row(size) for call in calls]
        return cls(stage, trial, unsplit, one_row, (size, 1), min(max(2, n), size))

    def find_shared(self, module: nn.Module) -> frozenset[str] | None:
        """Return the tensors that all micro-batches share; None where a call is not batch-first."""
        found = self._tell_ranks(self._find_shared(module))
        if None in found:
            return None
        return frozenset[str]().union(*found)

    def _find_shared(self, module: nn.Module) -> frozenset[str] | None:
        unsplit, micro_batch = self.unsplit.get(module, []), self.micro_batch.get(module, [])
        if not unsplit or len(unsplit) != len(micro_batch) or not self.rows[1]:
            return None
        shared: set[str] = set()
        for one, other in zip(unsplit, micro_batch, strict=True):
            if one.shapes.keys() != other.shapes.keys() or one.returns_scalar:
                return None
            batched = {path for path in one.shapes if self._has_grown(one.shapes[path], other.shapes[path])}
            if {path.startswith("input") for path in batched} != {True, False}:
                return None  # its inputs or its outputs have another first axis
            shared |= one.shapes.keys() - batched
        return frozenset(shared)

    def _has_grown(self, unsplit: torch.Size, micro_batch: torch.Size) -> bool:
        """Whether the first axis follows the number of samples."""
        if not len(unsplit) or len(unsplit) != len(micro_batch):
            return False
        return unsplit[0] * self.rows[1] == micro_batch[0] * self.rows[0] and unsplit[0] != micro_batch[0]

    def is_exact(self, trunk: Trunk) -> bool:
        """Whether the step has the loss and gradient of the unsplit one with this trunk in micro-batches."""
        _, undo = trunk.install(self.n)
        try:
            with _recording_calls(trunk.modules.values()) as calls:
                run = run_again(self.stage, self.trial)
            is_near = self._is_near(trunk, run, calls)
        except FAILURES:
            is_near = False
        finally:
            undo()
        return all(self._tell_ranks(is_near))

    def _is_near(self, trunk: Trunk, run: Run, calls: "_Calls") -> bool:
        whole = self.trial.whole
        # In the trunk, each micro-batch would change a buffer that the unsplit step changes once.
        held = any(not name or buffer.startswith(f"{name}.") for name in trunk.modules for buffer in whole.changed)
        if held or not set(run.changed) <= set(whole.changed):
            return False
        run.keep(self.trial.parameters)
        limit = self.trial.limit
        if not replace(self.trial, splits=[[run]]).error(lambda runs: [1.0]) <= limit:
            return False
        if self.trial.parameters:
            return True
        if not self.trial.rounding:
            limit = min(limit, _ROUNDING)
        for module in trunk.modules.values():
            expected, seen = self.unsplit.get(module, []), calls.get(module, [])
            if len(seen) < len(expected):
                return False
            # Recomputation calls modules again, after the forward.
            for one, other in zip(expected, seen, strict=False):
                if not one.is_near(other, limit):
                    return False
        return True

    def _tell_ranks(self, mine: object) -> list[Any]:
        """Return what all ranks found, where they run together."""
        if self.stage.gradients:
            return [mine]
        return from_all_ranks([mine])


@dataclass
class _Call:
    """One module call: shapes of its inputs and outputs, and some entries of the outputs."""

    shapes: dict[str, torch.Size]
    values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def returns_scalar(self) -> bool:
        """Whether an output is a scalar, such as a mean over the samples."""
        return any(path.startswith("output") and len(shape) == 0 for path, shape in self.shapes.items())

    def expect_one_row(self, rows: int) -> "_Call":
        """Return the call expected of one of these rows: each first axis that they divide is as much shorter."""
        shapes = dict(self.shapes)
        for path, shape in self.shapes.items():
            if len(shape) and shape[0] % rows == 0:
                shapes[path] = torch.Size([shape[0] // rows, *shape[1:]])
        return _Call(shapes)

    def is_near(self, other: "_Call", limit: float) -> bool:
        """Whether another call returned the same, as far as it returned it at all."""
        for path in self.values.keys() & other.values.keys():
            one, two = self.values[path].nan_to_num(), other.values[path].nan_to_num()
            if one.shape != two.shape or not relative_difference(one, two) <= limit:
                return False
        return True


_Calls = dict[nn.Module, list[_Call]]


@contextmanager
def _recording_calls(modules: Iterable[nn.Module]) -> Iterator[_Calls]:
    """Record the calls of these modules."""
    calls: _Calls = {}

    def note(module: nn.Module, inputs: object, output: object) -> None:
        outputs = list_tensors(output, "output")
        tensors = {**list_tensors(inputs, "input"), **outputs}
        values = {path: entries_of(tensor, tensor) for path, tensor in outputs.items() if not tensor.is_complex()}
        call = _Call({path: tensor.shape for path, tensor in tensors.items()}, values)
        calls.setdefault(module, []).append(call)

    with watching_calls(modules, note):
        yield calls


def _all_modules(stage: Stage) -> list[nn.Module]:
    return list(dict.fromkeys(itertools.chain.from_iterable(map(nn.Module.modules, stage.models))))
