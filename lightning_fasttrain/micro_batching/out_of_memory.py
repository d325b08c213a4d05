"""Run a batch again in smaller micro-batches when memory runs out, and synchronize gradients after all of them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.device import is_out_of_memory, return_unused_memory
from lightning_fasttrain.core.distributed import ControlGroup, rank_here
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, list_some, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.technique import Exactness, Surgery, Technique, apply

_WAITS = "the other ranks would wait there for a rank that runs out of memory earlier"
_WAY_OUT = "Give a number, as MicroBatching(8): then no batch is retried"


class FittingSearch:
    """The search for a number of micro-batches by all processes of a run; this base class is for a single process."""

    def __init__(self, several: bool = False) -> None:
        self.agree = Agreement(ControlGroup.apart() if several else None)
        self._written: set[str] = set()  # parameters that the step itself writes
        self._batches = 0

    @contextmanager
    def restorable(self, model: nn.Module) -> Iterator[StepState]:
        """Enter a context for a batch; yields the state before it, with the parameters that earlier ones have written.

        Which ones is looked at in the batches 1, 2, 4, 8, and so on: at first, a teacher may equal its student.
        """
        state = StepState([model])
        state.copy(self._written)
        self._batches += 1
        is_examined = not self._batches & (self._batches - 1)
        if is_examined:
            state.note_sizes()
        yield state
        if is_examined:
            self._written.update(state.list_lost())

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        """Enter a context in which no rank waits for another in a forward or backward."""
        yield

    def join(self) -> None:
        """Average the gradients over ranks after the attempt, if this batch ends an optimizer step."""

    def leave(self) -> None:
        """Destroy the process group at the end of the run."""
        if self.agree.ranks is not None:
            self.agree.ranks.close()


class DDPFittingSearch(FittingSearch):
    """For DDP: its collectives run before the first micro-batch and after the last, where no rank can run out of
    memory.

    A plain run overlaps the averaging with the last micro-batch's backward. Here it waits until all ranks have reported
    that this backward is done, since the others would otherwise hang in it if one rank runs out of memory.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        super().__init__(several=True)
        self.strategy = strategy
        self._due = False

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        replica = self._replica
        self._due = replica.require_backward_grad_sync  # read before it is switched off below
        with self.strategy.block_backward_sync():
            _call_inside(replica, nullcontext)  # DDP's work before a forward: rank zero's buffers, new buckets
            yield

    def join(self) -> None:
        """Average through DDP's own reducer, with its buckets and communication hooks, by a backward that adds zero."""
        if not self._due:
            return
        replica = self._replica
        nothing = _call_inside(replica, lambda: _AddNothing.apply(*_find_due(replica)))
        if nothing.requires_grad:
            nothing.backward()

    @property
    def _replica(self) -> DistributedDataParallel:
        replica: Any = self.strategy.model
        return replica


def fitting_search_of(trainer: L.Trainer) -> FittingSearch:
    """Return how the processes of this run search together.

    Raises:
        ValueError: a strategy whose forwards wait for other ranks.
    """
    if trainer.world_size == 1:
        return FittingSearch()
    if isinstance(trainer.strategy, DDPStrategy) and replicates(trainer.strategy):
        return DDPFittingSearch(trainer.strategy)
    what = f"MicroBatching('auto') with {type(trainer.strategy).__name__} on {trainer.world_size} processes"
    why = f"parameters are gathered inside forward and backward, and {_WAITS}"
    raise ValueError(explain(what, why, "Give a number, as MicroBatching(8), or use DDP"))


def refuse_collectives(model: nn.Module) -> None:
    """Refuse modules that are known to wait for other ranks inside a ``training_step``.

    Raises:
        ValueError: names the module, the reason and the solution.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, Metric) and module.dist_sync_on_step):
            what = f"MicroBatching('auto') with {type(module).__name__} '{name}'"
            raise ValueError(explain(what, f"it synchronizes inside the step, and {_WAITS}", _WAY_OUT))


class CollectivesWatch:
    """Detects a step that waits for other ranks, by the process group's number of collectives."""

    def __init__(self) -> None:
        self.seen = False

    def wrap(self, step: Callable[..., object]) -> Callable[..., Any]:
        """Return ``step``, watched for collectives."""

        def watch_step(*args: object) -> Any:
            before = _collectives_so_far()
            try:
                return step(*args)
            finally:
                self.seen |= _collectives_so_far() != before

        return watch_step

    def refuse(self) -> None:
        """Raises: ValueError: a collective was seen."""
        if self.seen:
            what = "MicroBatching('auto') with a training_step that communicates (all_gather, all_reduce)"
            raise ValueError(explain(what, _WAITS, _WAY_OUT))


def _collectives_so_far() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    world: Any = dist.group.WORLD
    with suppress(RuntimeError):  # a backend without a counter
        return world._get_sequence_number_for_group()
    return 0


def _call_inside(replica: DistributedDataParallel, function: Callable[[], object]) -> Any:
    """Call ``function()`` as DDP's forward, with all that DDP does before and after one."""
    restore: Undo = patch(replica.module, "forward", lambda _: function())
    try:
        return replica(None)
    finally:
        restore()


def _find_due(replica: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP waits for.

    It waits for all of them, also for one that no micro-batch of this rank used, unless it looks for unused ones
    itself.
    """
    found = []
    for name, parameter in replica.module.named_parameters():
        used = parameter.grad is not None or not replica.find_unused_parameters
        if parameter.requires_grad and used and name not in replica.parameters_to_ignore:
            found.append(parameter)
    return found


class _AddNothing(torch.autograd.Function):
    """A loss whose gradient is zero for each parameter, without allocating tensors of zeros."""

    @staticmethod
    def forward(ctx: object, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device if parameters else None)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


_SAVES = (Surgery.CHECKPOINT, Surgery.OFFLOAD)


class FurtherSavings:
    """Techniques that are applied when they are needed, in order, and stay for the rest of the run.

    Args:
        techniques: exact ones that change how activations are stored, and nothing that an optimizer holds.

    Attributes:
        taken: number of techniques in use, or in use when the last run ended.

    Raises:
        TypeError, ValueError: another kind of technique, or one that measures before it decides.
    """

    def __init__(self, techniques: Iterable[Technique]) -> None:
        self.techniques = [_refuse_others(technique) for technique in techniques]
        self.taken = 0
        self._undo: ExitStack | None = None

    def try_on(self, model: nn.Module) -> None:
        """Apply all techniques and undo it, so that errors are raised before training starts."""
        with ExitStack() as undo:
            for technique in self.techniques:
                undo.enter_context(apply(model, [technique]))

    def take_again(self, model: nn.Module) -> None:
        """Apply the techniques that were in use before."""
        for technique in self.techniques[: self.taken]:
            self._apply(technique, model)

    def list_left(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Yield functions that apply the remaining techniques."""
        for technique in self.techniques[self.taken :]:
            yield partial(self._take, technique, model)

    def _take(self, technique: Technique, model: nn.Module) -> None:
        say("Out of memory with single samples: applying %s from now on, and repeating the batch unsplit", technique)
        self._apply(technique, model)
        self.taken += 1

    def _apply(self, technique: Technique, model: nn.Module) -> None:
        self._undo = self._undo or ExitStack()
        self._undo.enter_context(apply(model, [technique]))

    def close(self) -> None:
        """Undo the techniques in use; the next run starts with them."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


def _refuse_others(technique: Technique) -> Technique:
    what, way_out = f"then=[{technique!r}]", "Use ActivationCheckpointing() and ActivationOffload()"
    if not isinstance(technique, Technique):
        raise TypeError(explain(what, f"expected a Technique, got {type(technique).__name__}", way_out))
    if technique.surgery not in _SAVES or technique.exactness is not Exactness.EXACT:
        why = "during a run, only techniques that change nothing but how activations are stored can start"
        raise ValueError(explain(what, why, way_out))
    if getattr(getattr(technique, "policy", None), "measures", False):  # MemoryBudget
        why = "MemoryBudget needs a few complete steps to measure, but this fallback starts inside a step"
        raise ValueError(explain(what, why, "Use ActivationCheckpointing(), or list it among the callbacks"))
    return technique


_HEARD_WITHIN = timedelta(seconds=10)  # a failing rank exits after this time, received or not
_RANKS = 2**24  # upper bound of the number of ranks


class Outcome(IntEnum):
    """The outcome of an attempt; the worst of all ranks counts."""

    FITS = 0
    TOO_LARGE = 1
    TOO_LARGE_IN_ONES = 2  # out of memory with single samples
    FAILED = 3


@dataclass(frozen=True)
class Verdict:
    """The common result of all ranks.

    Attributes:
        outcome: the worst outcome.
        rank: a rank that had it.
        most: the largest useful number of micro-batches of any rank, so that all continue with the same number.
    """

    outcome: Outcome
    rank: int
    most: int


class Agreement:
    """Exchanges the outcome of an attempt, and returns the worst of all ranks.

    Args:
        ranks: a group for this purpose alone; None in a single process.

    Example:
        >>> Agreement()(Outcome.TOO_LARGE, most=8)
        Verdict(outcome=<Outcome.TOO_LARGE: 1>, rank=0, most=8)
    """

    def __init__(self, ranks: ControlGroup | None = None) -> None:
        self.ranks = ranks

    def __call__(self, outcome: Outcome, most: int) -> Verdict:
        """Raises: RuntimeError: a rank has exited or did not answer in time."""
        if self.ranks is None:
            return Verdict(outcome, 0, most)
        # One maximum carries both: the worst outcome, and a rank that had it.
        self.ranks.vote(outcome * _RANKS + rank_here(), most)
        try:
            worst, most = self.ranks.read_vote()
        except RuntimeError as error:
            reason = f"{error}".partition("\n")[0].rstrip(".")
            way_out = "Look at the first error in the output of the other ranks"
            raise RuntimeError(explain("a rank has exited or did not answer in time", reason, way_out)) from error
        return Verdict(Outcome(worst // _RANKS), worst % _RANKS, most)

    def give_up(self) -> None:
        """Report an error of this rank alone to the others, with a short timeout."""
        if self.ranks is not None:
            self.ranks.vote(Outcome.FAILED * _RANKS + rank_here())
            with suppress(RuntimeError):
                self.ranks.read_vote(_HEARD_WITHIN)


Result = TypeVar("Result")
_WAYS_OUT = (
    "Next: then=[ActivationCheckpointing(), ActivationOffload()] if not in use yet, shorter samples, "
    "FusedLossHead, a lower precision, or a smaller model"
)
_MIB = {"b": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10}  # by the first letter of the unit


@check_arguments
def split_until_it_fits(
    attempt: Callable[[int], Result],
    model: nn.Module,
    n: PositiveInt,
    most: PositiveInt,
    *,
    then: Iterable[Callable[[], object]] = (),
    agree: Agreement | None = None,
    state: StepState | None = None,
) -> tuple[Result, int]:
    """Run ``attempt(n)``; whenever it runs out of memory, restore the state and run it with twice as many
    micro-batches.

    Restored are the random states (torch, CUDA, Python, NumPy), the model's buffers (BatchNorm), its metrics, its
    attributes and what is in them, and its gradients, so the result is that of a run which had the larger ``n`` from
    the start. Gradients that exist beforehand, within an accumulation window, are copied for this. Parameters are not:
    where an attempt has written to one before memory ran out, as a step may that updates a teacher, it is an error.

    Args:
        attempt: runs forward and backward of one batch in the given number of micro-batches.
        model: whose buffers, metrics and gradients the attempt changes.
        n: number of micro-batches of the first attempt.
        most: the largest useful number: the samples in the batch.
        then: fallbacks, applied one after another, where single samples do not fit either. After each the search
            restarts with one micro-batch, since the memory it saves may be enough for larger ones.
        agree: on several ranks, how they exchange outcomes, so that all continue in the same way. The attempt must not
            wait for other ranks, so gradients must be synchronized afterwards.
        state: what is restored before each further attempt; read now if None.

    Returns:
        The result of the attempt, and the number of micro-batches that fitted.

    Raises:
        torch.OutOfMemoryError: single samples do not fit either, on this rank or another; or the attempt had written to
            parameters.
        RuntimeError: another rank failed otherwise, or has exited.

    Example:
        >>> def attempt(n):
        ...     if n < 4:
        ...         raise torch.OutOfMemoryError("too large")
        ...     return "done"
        >>> split_until_it_fits(attempt, nn.Linear(1, 1), n=1, most=8)
        ('done', 4)

    Source:
        Composer's ``device_train_microbatch_size='auto'`` halves likewise, but restores only gradients.
    """
    agree = agree or Agreement()
    measures = list(then)
    if state is None:
        state = StepState([model])
        state.note_sizes()
    restore_gradients = _remember_gradients(model)
    while True:
        try:
            result = attempt(n)
        except BaseException as error:  # including KeyboardInterrupt: the others wait for an answer
            if not is_out_of_memory(error):
                agree.give_up()
                raise
            _refuse_lost(state, error, agree)
            worst = agree(Outcome.TOO_LARGE if n < most else Outcome.TOO_LARGE_IN_ONES, most)
            if worst.outcome is Outcome.FAILED or (worst.outcome is Outcome.TOO_LARGE_IN_ONES and not measures):
                error.add_note(_note(error, n, most))
                raise
        else:
            worst = agree(Outcome.FITS, most)
            if worst.outcome is Outcome.FITS:
                return result, n
            del result  # the next attempt needs its memory
            _end_with(worst, n, bool(measures))
        # Outside the handler, since the error's traceback holds the activations of the failed attempt.
        state.restore()
        restore_gradients()
        return_unused_memory()
        if worst.outcome is Outcome.TOO_LARGE_IN_ONES:
            measures.pop(0)()
            n = 1
        else:
            where = f" on rank {worst.rank}" if agree.ranks is not None else ""
            say("Out of memory with %d micro-batches%s: repeating the batch with %d", n, where, min(2 * n, worst.most))
            n = min(2 * n, worst.most)


def _refuse_lost(state: StepState, error: BaseException, agree: Agreement) -> None:
    """Raise the error if the attempt has written what cannot be restored."""
    lost = state.list_lost()
    if lost:
        agree.give_up()
        what = (
            f"The batch cannot be repeated in smaller micro-batches: the step had already written to {list_some(lost)}"
        )
        error.add_note(f"{what}. {_WAY_OUT}, or run a forward beforehand if this is its initialization.")
        raise error


def _remember_gradients(model: nn.Module) -> Callable[[], None]:
    """Remember the gradients that are there; returns how to put them back."""
    grads = [(parameter, _copy_of(parameter.grad)) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, before in grads:
            parameter.grad = _copy_of(before)  # it may be restored again

    return restore


def _copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _end_with(worst: Verdict, n: int, has_more: bool) -> None:
    """Raise on a rank whose attempt fitted, if another rank cannot continue."""
    if worst.outcome is Outcome.FAILED:
        way_out = "Look at the first error in the output of that rank"
        raise RuntimeError(explain(f"rank {worst.rank} failed in this step", "no rank can continue alone", way_out))
    if worst.outcome is Outcome.TOO_LARGE_IN_ONES and not has_more:
        why = "its samples do not fit one at a time, and no rank can continue alone"
        raise torch.OutOfMemoryError(explain(f"rank {worst.rank}, with {n} micro-batches", why, _WAYS_OUT))


def _note(error: BaseException, n: int, most: int) -> str:
    of_one = " of one sample each" if n >= most else ""
    return f"Out of memory with {n} micro-batches{of_one}{_shortfall(error)}. {_WAYS_OUT}."


def _shortfall(error: BaseException) -> str:
    """Describe how much memory was missing, if the allocator reports it.

    Example:
        >>> said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB of which 512.00 MiB is free."
        >>> _shortfall(torch.OutOfMemoryError(said))
        ': at least 1536 MiB more are needed'
    """
    number = r"([\d.]+) (bytes|[KMG]i?B)"
    cuda = re.search(rf"allocate {number}.*of which {number} is free", f"{error}", re.DOTALL)
    apple = re.search(
        rf"MPS allocated: {number}, other allocations: {number}, max allowed: {number}\)\. Tried to allocate {number}",
        f"{error}",
    )
    if cuda is not None:
        asked, free = _mib_in(cuda)
    elif apple is not None:
        allocated, others, allowed, asked = _mib_in(apple)
        free = allowed - allocated - others
    else:
        return ""
    missing = asked - free
    return f": at least {max(missing, 1.0):.0f} MiB more are needed"


def _mib_in(matched: re.Match[str]) -> list[float]:
    """Return the numbers of a message in MiB, from groups of a number and its unit in turn."""
    found = matched.groups()
    return [float(number) * _MIB[unit[0]] for number, unit in zip(found[::2], found[1::2], strict=True)]
