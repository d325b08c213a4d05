"""On several ranks: the parts of a batch run without waiting for other ranks, and gradients are averaged at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, ClassVar, TypeVar

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

Result = TypeVar("Result")
_WAITS = "a rank that runs out of memory before it would leave the others waiting there"
_WAY_OUT = "Give a number, as MicroBatching(8): then nothing is tried again"


class Together:
    """How the processes of a run try a number of parts: here, a single one that need not ask anybody.

    Attributes:
        may_split_forwards: whether forwards inside of the step may run in parts.
    """

    may_split_forwards: ClassVar[bool] = True

    def __init__(self, several: bool = False) -> None:
        # Every process is a member, so every process must make it.
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self.agree = Agreement(self._group)

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        """Within it, no rank waits for another in a forward or backward."""
        yield

    def rehearse(self, run_one: Callable[[], object], then: Callable[[], Any]) -> None:
        """Before the first attempt, with what runs a single sample, and what else can be tried if that is too much."""

    def wrap(self, attempt: Callable[[int], Result]) -> Callable[[int], Result]:
        """``attempt``, with what other ranks need of this one in it."""
        return attempt

    def join(self) -> None:
        """After it: average the gradients over ranks, if this batch ends an optimizer step."""

    def leave(self) -> None:
        """At the end of the run."""
        if self._group is not None:
            with suppress(RuntimeError, ValueError):  # gone already, with the whole process group
                dist.destroy_process_group(self._group)


class DDPTogether(Together):
    """Under DDP: its collectives come before the first part and after the last, where no rank can be out of memory.

    A plain run hides the averaging behind the last part's backward. Here it waits until all ranks have said that this
    backward is done, since one that is not, of any batch, would leave the others waiting in it for ever.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        super().__init__(several=True)
        self.strategy = strategy
        self._due = False

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        replica = self._replica
        self._due = replica.require_backward_grad_sync  # asked before it is switched off below
        with self.strategy.block_backward_sync():
            _call_inside(replica, nullcontext)  # what DDP does before a forward: buffers of rank zero, new buckets
            yield

    def join(self) -> None:
        """Through DDP's own reducer, with its buckets and communication hooks: a backward that adds nothing."""
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
    """How the processes of this run try together.

    Raises:
        ValueError: a strategy whose forwards wait for other ranks.
    """
    if trainer.world_size == 1:
        return Together()
    if isinstance(trainer.strategy, DDPStrategy) and replicates(trainer.strategy):
        return DDPTogether(trainer.strategy)
    own: Callable[[], Together] | None = getattr(trainer.strategy, "try_together", None)
    if own is not None:
        return own()
    what = f"MicroBatching('auto') with {type(trainer.strategy).__name__} on {trainer.world_size} processes"
    why = f"parameters are gathered inside of forward and backward, and {_WAITS}"
    raise ValueError(explain(what, why, "Give a number, as MicroBatching(8), or use DDP or FSDP2Strategy"))


def refuse_collectives(model: nn.Module) -> None:
    """Refuse what is known to wait for other ranks inside of a ``training_step``.

    Raises:
        ValueError: the module · why · the way out.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, Metric) and module.dist_sync_on_step):
            what = f"MicroBatching('auto') with {type(module).__name__} '{name}'"
            raise ValueError(explain(what, f"it synchronises inside of the step, and {_WAITS}", _WAY_OUT))


class CollectivesWatch:
    """Notices that a step waits for other ranks, by the number of collectives that the process group has seen."""

    def __init__(self) -> None:
        self.seen = False

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, watched."""

        def watch_step(*args: Any) -> Any:
            before = _collectives_so_far()
            try:
                return step(*args)
            finally:
                self.seen |= _collectives_so_far() != before

        return watch_step

    def refuse(self) -> None:
        """Raises: ValueError: one was seen."""
        if self.seen:
            what = "MicroBatching('auto') with a training_step that communicates (all_gather, all_reduce)"
            raise ValueError(explain(what, _WAITS, _WAY_OUT))


def _collectives_so_far() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    world: Any = dist.group.WORLD
    with suppress(RuntimeError):  # a backend that does not count
        return world._get_sequence_number_for_group()
    return 0


def _call_inside(replica: DistributedDataParallel, function: Callable[[], Any]) -> Any:
    """``function()`` as DDP's forward, with all that DDP does before and after one."""
    restore: Undo = patch(replica.module, "forward", lambda _: function())
    try:
        return replica(None)
    finally:
        restore()


def _find_due(replica: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients are due.

    DDP waits for all of them, also for one that no part of this rank has used, unless it looks for unused ones itself.
    """
    found = []
    for name, parameter in replica.module.named_parameters():
        used = parameter.grad is not None or not replica.find_unused_parameters
        if parameter.requires_grad and used and name not in replica.parameters_to_ignore:
            found.append(parameter)
    return found


class _AddNothing(torch.autograd.Function):
    """A loss whose gradient is zero for each parameter, without a tensor of zeros for any."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device if parameters else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)
