"""Run micro-batches without waiting for other ranks, and average gradients over ranks at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.data.out_of_memory.rank_vote import Agreement

_WAITS = "the other ranks would wait there for a rank that runs out of memory earlier"
_WAY_OUT = "Give a number, as MicroBatching(8): then no batch is retried"


class Together:
    """The search for a number of micro-batches by all processes of a run; this base class is for a single process."""

    def __init__(self, several: bool = False) -> None:
        # Every process is a member, so every process must create it.
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self.agree = Agreement(self._group)

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        """Enter a context in which no rank waits for another in a forward or backward."""
        yield

    def join(self) -> None:
        """Average the gradients over ranks after the attempt, if this batch ends an optimizer step."""

    def leave(self) -> None:
        """Destroy the process group at the end of the run."""
        if self._group is not None:
            with suppress(RuntimeError, ValueError):  # destroyed already, with the default process group
                dist.destroy_process_group(self._group)


class DDPTogether(Together):
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


def together_of(trainer: L.Trainer) -> Together:
    """Return how the processes of this run search together.

    Raises:
        ValueError: a strategy whose forwards wait for other ranks.
    """
    if trainer.world_size == 1:
        return Together()
    if isinstance(trainer.strategy, DDPStrategy) and replicates(trainer.strategy):
        return DDPTogether(trainer.strategy)
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
