"""Find a split of a batch: at the loss, or at the backbone, the submodules that treat each sample by itself."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut, list_tensors, split_batch
from lightning_fasttrain.core.distributed import from_all_ranks, rank_count
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.select import as_list, is_wanted, keep_outermost, list_kinds
from lightning_fasttrain.micro_batching.micro_batch_forward import Backbone, refuse_batch_statistics
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count, CountRule, count_targets
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError, find_split, find_weight
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.trial.deterministic_step import list_batch_statistics
from lightning_fasttrain.trial.runs import Run, Trial, entries_of, relative_difference
from lightning_fasttrain.trial.sample_rows import Sample, first_micro_batch, sample_rows
from lightning_fasttrain.trial.try_split import (
    TrialStep,
    list_other_state,
    run_again,
    try_split,
    try_whole,
    watching_calls,
)

# Errors that a user's model may raise when it is called with unfamiliar shapes.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)
_ROUNDING = 1e-4  # of outputs in float32, for products of other sizes


@dataclass
class BackboneTrial:
    """Tries submodules by running the step with them in micro-batches.

    Loss and gradient must be those of the unsplit run; where that has no gradient, as with sharded parameters, the
    outputs of the submodules instead, since a submodule with the same outputs has the same gradient, too. With sharded
    parameters each run gathers parameters on all ranks, so they decide together.

    Attributes:
        trial_step: where the step runs.
        trial: the unsplit run, which has a gradient only where the samples were run in micro-batches, too.
        unsplit: the calls of each module in the unsplit run.
        micro_batch: the same for some of the rows.
        rows: the numbers of rows of the two.
        n: number of micro-batches.
    """

    trial_step: TrialStep
    trial: Trial
    unsplit: "_Calls"
    micro_batch: "_Calls"
    rows: tuple[int, int]
    n: int

    @classmethod
    def on_samples(cls, trial_step: TrialStep, trial: Trial) -> "BackboneTrial":
        """Try submodules on a few samples, which have been run unsplit and in micro-batches."""
        rows = trial.sample.cuttings[0][1][1]
        fewer = 0 if rows is None else rows.stop - rows.start
        with _recording_calls(_all_modules(trial_step)) as unsplit:
            run_again(trial_step, trial)
        with _recording_calls(_all_modules(trial_step)) as micro_batch:
            run_again(trial_step, trial, 1)
        return cls(trial_step, trial, unsplit, micro_batch, (trial.sample.size, fewer), 2)

    @classmethod
    def on_batch(cls, trial_step: TrialStep, batch: object, n: int) -> "BackboneTrial":
        """Try submodules on a whole batch, for a step that does not run on a few of its samples.

        The activations of the unsplit batch may not fit in memory, so it runs without gradients.

        Raises: whatever the step raises.
        """
        size = batch_size(batch)
        with _recording_calls(_all_modules(trial_step)) as unsplit:
            trial = try_whole(trial_step, batch, size)
        one_row: _Calls = {}
        for module, calls in unsplit.items():
            one_row[module] = [call.expect_one_row(size) for call in calls]
        return cls(trial_step, trial, unsplit, one_row, (size, 1), min(max(2, n), size))

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

    def is_exact(self, backbone: Backbone) -> bool:
        """Whether the step has the loss and gradient of the unsplit one with this backbone in micro-batches."""
        _, undo = backbone.install(self.n)
        try:
            with _recording_calls(backbone.modules.values()) as calls:
                run = run_again(self.trial_step, self.trial)
            is_near = self._is_near(backbone, run, calls)
        except FAILURES:
            is_near = False
        finally:
            undo()
        return all(self._tell_ranks(is_near))

    def _is_near(self, backbone: Backbone, run: Run, calls: "_Calls") -> bool:
        # In the backbone, each micro-batch would change what the unsplit step changes once.
        if set(list_other_state(self.trial.whole.left, run.left)) - set(self.trial.scratch):
            return False
        run.keep(self.trial.parameters)
        limit = self.trial.limit
        if not replace(self.trial, splits=[[run]]).error(lambda runs: [1.0]) <= limit:
            return False
        if self.trial.parameters:
            return True
        if not self.trial.rounding:
            limit = min(limit, _ROUNDING)
        for module in backbone.modules.values():
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
        if self.trial_step.gradients:
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
        """Return whether two outputs agree in all entries that both have."""
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


def _all_modules(trial_step: TrialStep) -> list[nn.Module]:
    return list(dict.fromkeys(itertools.chain.from_iterable(map(nn.Module.modules, trial_step.models))))


Through = str | type[nn.Module] | Sequence[str | type[nn.Module]]
# Layers that save only their input, which has to be kept anyway.
_SINGLE_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
)
_LEAST_SHARE = 0.5  # of the trained parameters; a few layers beside BatchNorm, for example, are not enough


def name_backbone(
    trial_step: TrialStep, samples: Iterator[Sample], batch: object, n: int, through: Through
) -> Backbone:
    """Return the backbone that a user named, after trying it where that is possible.

    Args:
        trial_step: where the step runs.
        samples: a few samples of the batch.
        batch: the batch, which is tried as a whole where the step fails on a few samples.
        n: its number of micro-batches.
        through: a name, a class, or several of these.

    Raises:
        ValueError: no module has that name or class; the message lists the candidates. Or BatchNorm is in it.
        CannotSplitError: the gradient differs from that of the unsplit samples.
    """
    backbone = _select_backbone(trial_step.models, through)
    try:
        trial = try_split(trial_step, samples)
    except FAILURES:
        if trial_step.gradients:
            raise
        return backbone  # with sharded parameters, the whole batch is not tried
    tried = _try_modules(trial_step, trial, batch, n)
    if tried is None or (trial_step.gradients and trial.why_not and not trial.failed):
        return backbone  # the samples show nothing, as without targets
    for name, module in backbone.modules.items():
        shared = tried.find_shared(module)
        if shared is not None:
            backbone.shared[name] = shared
    if not tried.is_exact(backbone):
        why = "its gradient differs from that of the unsplit samples, so they depend on one another inside it"
        raise CannotSplitError(f"through= names {backbone}, but {why}")
    return backbone


def _select_backbone(models: Sequence[nn.Module], through: Through) -> Backbone:
    wanted = as_list(through)
    found: dict[str, nn.Module] = {}
    for model in models:
        for name, module in model.named_modules():
            if any(is_wanted(name, module, one) for one in wanted):
                found.setdefault(name, module)
    outermost = keep_outermost(found)
    if not outermost:
        kinds = list_kinds(models[0]) if models else "none, since the step uses no module"
        way_out = "Give the qualified name of a submodule, a pattern or a class"
        raise ValueError(explain(f"through={through!r} matches nothing", f"candidates are {kinds}", way_out))
    for module in outermost.values():
        refuse_batch_statistics(module)
    return Backbone(outermost)


def find_backbone(trial_step: TrialStep, trial: Trial | None, batch: object, n: int) -> Backbone | str:
    """Return the largest submodules in which samples do not depend on one another, or why there are none.

    Modules whose inputs and outputs have the batch as their first axis are tried from the outermost to the innermost,
    and kept if the step with them in micro-batches has the loss and gradient of the unsplit one.

    Args:
        trial_step: where the step runs.
        trial: a trial of the step on a few samples of the batch, if there is one.
        batch: the batch, which is tried as a whole where the step fails on a few samples.
        n: its number of micro-batches.

    Raises: what the step raises on the whole batch.
    """
    tried = _try_modules(trial_step, trial, batch, n)
    if tried is None:
        return "no samples could be tried"
    backbone, has_statistics = _find_independent(trial_step.models, tried)
    is_large = _count_trained(backbone.modules.values()) >= _LEAST_SHARE * _count_trained(trial_step.models)
    if backbone.modules and (is_large or not has_statistics):
        return backbone
    if has_statistics:
        return "each submodule that could run in micro-batches contains BatchNorm: freeze it with .eval()"
    return "no submodule with batch-first inputs and outputs was found in which samples do not depend on one another"


def _try_modules(trial_step: TrialStep, trial: Trial | None, batch: object, n: int) -> BackboneTrial | None:
    """Prepare trials on a few samples, or on the whole batch where the step fails on these; None if neither works."""
    shows = trial is not None and bool(trial.splits)
    if not trial_step.gradients:
        shows = all(from_all_ranks([shows and trial is not None and not trial.why_not]))
    if trial is not None and shows and (trial.parameters or not trial_step.gradients):
        return BackboneTrial.on_samples(trial_step, trial)
    is_failed = trial_step.gradients and trial is not None and trial.failed
    if is_failed:
        return BackboneTrial.on_batch(trial_step, batch, n)
    return None


def _find_independent(models: Sequence[nn.Module], tried: BackboneTrial) -> tuple[Backbone, bool]:
    """Return the outermost modules without dependent samples, and whether others contain BatchNorm."""
    backbone = Backbone({})
    waiting: list[tuple[str, nn.Module]] = []
    for place, model in enumerate(models):
        name = f"{type(model).__name__}{place}"
        waiting.append((name if len(models) > 1 else "", model))
    has_statistics = False
    while waiting:
        name, module = waiting.pop(0)
        shared = tried.find_shared(module)
        if shared is not None and _count_trained([module]) and not isinstance(module, _SINGLE_LAYERS):
            mixes = any(list_batch_statistics(module))
            added = Backbone({**backbone.modules, name: module}, {**backbone.shared, name: shared})
            if not mixes and tried.is_exact(added):
                backbone = added
                continue
            has_statistics |= mixes
        waiting += [(f"{name}.{child}".strip("."), inner) for child, inner in module.named_children()]
    return backbone, has_statistics


def _count_trained(modules: Iterable[nn.Module]) -> int:
    """Return the number of elements of the trained parameters."""
    trained = {p for module in modules for p in module.parameters() if p.requires_grad}
    return sum(map(Tensor.numel, trained))


TRIES = 4  # earlier split, this batch's split, that without the counting rule, backbone
OUT_OF_TRIES = "its micro-batches have other normalizers than those found from this batch"


Found = LossSplit | Backbone


def guess_split() -> LossSplit:
    """Return the split that is used as long as no batch has shown one."""
    return LossSplit(None, count_targets, provisional=True)


def is_guess(found: Found) -> bool:
    """Whether no batch has shown how the step is split, as without targets."""
    return isinstance(found, LossSplit) and found.provisional


@dataclass(frozen=True)
class BatchSearch:
    """Finds how the step of one batch is split.

    Attributes:
        trial_step: the trial_step on which the step runs.
        batch: the batch on which it runs.
        n: number of micro-batches.
        split: how a batch is split, where it is a function of the user's.
        count: the given counting rule, or ``"auto"``.
        check: whether a split that would change the training is refused.
        preferred: the counting rule that is tried first.
        is_window: whether several batches are summed: then a backbone, which cannot run them as one, is not used.
        whole_batches: whether these batches run unsplit, each with its own statistics.
    """

    trial_step: TrialStep
    batch: Any
    n: int
    split: Callable[[Any, int], list[Any]] = split_batch
    count: Count = "auto"
    check: bool = True
    preferred: CountRule | None = None
    is_window: bool = False
    whole_batches: bool = False

    def find(self, before: Found, *, together: bool = True) -> Found:
        """Return how the step is split.

        Args:
            before: the split of earlier batches, which is kept where this one shows nothing.
            together: whether all ranks call this, and use the common result.

        Raises:
            CannotSplitError: it cannot be split.
        """
        log_rules, found, refused = getattr(before, "log_rules", None), None, None
        how: dict[str, Any] = {"check": self.check, "preferred": self.preferred, "together": together}
        try:
            if self.whole_batches:
                found = find_weight(self.trial_step, self.samples, self.batch, self.count, **how)
            else:
                found = find_split(self.trial_step, self.samples(), self.count, log_rules=log_rules, **how)
        except CannotSplitError as error:
            refused = error
        if refused is not None:  # outside of the handler, so that an error of the user's is shown alone
            return self._find_backbone(refused, together)
        if found is None or (found.provisional and not is_guess(before)):
            return before
        return found

    def samples(self) -> Iterator[Sample]:
        """Yield a few samples of the batch; where the user's function splits it, its first micro-batch."""
        if self.split is not split_batch:
            return first_micro_batch(self.batch, self.n, self.split)
        if self.whole_batches and not can_be_cut(self.batch):
            # There is nothing to compare, but the losses that the step computes may show the rule.
            return iter([Sample(self.batch, 1, [])])
        return sample_rows(self.batch, -(-batch_size(self.batch) // self.n))

    def find_another(self, before: LossSplit, error: OtherSplitError, attempt: int) -> Found:
        """Return a split for a batch whose loss is not split like earlier ones. Other ranks do not take part.

        Args:
            before: the split of earlier batches.
            error: the mismatch.
            attempt: the number of earlier calls for this batch.

        Raises:
            CannotSplitError: the loss cannot be split, or not without the other ranks.
        """
        if not self.trial_step.gradients and rank_count() > 1:
            why = f"{error}, and with sharded parameters a single rank cannot run a batch again"
            raise CannotSplitError(why)
        if attempt == 0:
            found = self.find(before, together=False)
            if found != before:
                return found
        if before.count is not None and before.read is not None and self.trial_step.may_scale:
            return replace(before, count=None)  # the counting rule does not match, so only the graph is read
        if self.whole_batches:
            raise CannotSplitError(f"{error}", of_window=True)
        return self._find_backbone(
            CannotSplitError(f"{error}", try_split(self.trial_step, self.samples())), together=False
        )

    def _find_backbone(self, error: CannotSplitError, together: bool) -> Found:
        """Return the backbone. Raises: CannotSplitError: there is none; or what the step raises on the whole batch."""
        windows = self.is_window or self.count != "auto"
        if windows and error.trial is not None and error.trial.failed and self.trial_step.gradients:
            try_whole(self.trial_step, self.batch)
        if self.is_window and not self.whole_batches and self.count == "auto":
            what = "micro-batches of a window of several batches, as with TokenWeightedAccumulation"
            why = f"{error.why}, and the samples of several batches are never in memory together"
            way_out = "Use larger batches in more micro-batches, or give count= a function"
            raise ValueError(explain(what, why, way_out)) from None
        if self.is_window or self.count != "auto":
            raise error
        found = find_backbone(self.trial_step, error.trial, self.batch, self.n)
        named = sorted(found.modules) if isinstance(found, Backbone) else found
        if together:
            for other in from_all_ranks([named]):
                if other != named:
                    found = f"on another rank: {other}"
                    break
        if isinstance(found, Backbone):
            say_backbone(found, f"since {error.why}")
            return found
        raise CannotSplitError(f"{error.why}, and {found}", error.trial) from None


def say_backbone(backbone: Backbone, why: str) -> None:
    what = "runs in micro-batches with recomputation (one additional forward), and the loss sees the whole batch"
    say("MicroBatching: %s %s, %s", backbone, what, why)
