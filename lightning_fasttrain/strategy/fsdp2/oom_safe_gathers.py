"""FSDP2 gathers that complete on every rank, even if a rank stops in the middle of a micro-batch trial.

Each forward and backward gathers parameters, block by block, and every rank waits there for all others. Therefore the
gathers of a micro-batch are recorded beforehand, in a dry run in which no rank waits: one sample, with each rank's own
shard in place of all shards. A rank that runs out of memory, fails otherwise, or has fewer micro-batches, then does the
remaining gathers.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import patched
from lightning_fasttrain.core.state.restore import remember
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import Together
from lightning_fasttrain.data.out_of_memory.retry_with_smaller_micro_batches import split_until_it_fits
from lightning_fasttrain.strategy.fsdp2.shard_blocks import is_reducing, without_gradient_reduction

Result = TypeVar("Result")


class FSDP2Together(Together):
    """Protocol for micro-batch trials under FSDP2: unsharded gradients are reduced once all ranks have succeeded.

    Args:
        model_of: function that returns the model, once it is sharded.
    """

    # Each micro-batch of a forward would gather once more.
    may_split_forwards: ClassVar[bool] = False

    def __init__(self, model_of: Callable[[], nn.Module]) -> None:
        super().__init__(several=True)
        self._model_of = model_of
        self._script: _Script | None = None
        self._due = False
        self._restore_sums: Callable[[], None] = _do_nothing

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        model = self._model_of()
        self._due = is_reducing(model)
        # A failed attempt leaves partial sums, and those of earlier batches must be restored.
        self._restore_sums = _save_sums(model)
        with without_gradient_reduction(model):
            yield

    def rehearse(self, run_one: Callable[[], object], then: Callable[[], Any]) -> None:
        """Record the gathers of one micro-batch, the first time only."""
        if self._script is not None:
            return
        model = self._model_of()
        script, restore = _Script(model), remember([model])

        def rehearse(_: int) -> None:
            self._begin()
            script.lines.clear()
            with script.handle(script.learn):
                run_one()

        try:
            split_until_it_fits(rehearse, model, 1, 1, then=then(), agree=self.agree)
        except BaseException:
            script.close()
            raise
        restore()
        self._script = script

    def wrap(self, attempt: Callable[[int], Result]) -> Callable[[int], Result]:
        """Wrap ``attempt`` so that this rank does as many gathers as all others, however the attempt ends."""
        script = self._script
        assert script is not None

        def try_once(n: int) -> Result:
            self._begin()
            script.done = 0
            try:
                with script.handle(script.count):
                    result = attempt(n)
            except BaseException as error:
                # The frames hold the activations.
                traceback.clear_frames(error.__traceback__)
                self._begin()
                gc.collect()
                torch.cuda.empty_cache()
                script.finish(n)
                raise
            if not script.finish(n):
                why = "a rank with fewer micro-batches cannot take part in the others' gathers during backward"
                way_out = "Use reshard_after_forward=True, or drop_last=True in the loader"
                raise ValueError(explain("batches with fewer samples than micro-batches", why, way_out))
            return result

        return try_once

    def _begin(self) -> None:
        """Reset FSDP2 and the gradient sums to the state before this batch."""
        model: Any = self._model_of()
        if _has_run(model):  # before the first forward FSDP2 has no state to reset
            model.reset_iter_state()
        self._restore_sums()

    def join(self) -> None:
        """Run a backward of the root alone, after which FSDP2 reduces the gradient sums of all blocks."""
        if not self._due:
            return
        model = self._model_of()
        # FSDP2 hooks the root's backward on its output, and reduces what is pending at the end of it.
        with patched(model, "forward", lambda _: torch.zeros((), requires_grad=True).clone()):
            nothing = model(None)
        nothing.backward()

    def leave(self) -> None:
        if self._script is not None:
            self._script.close()
        super().leave()


@dataclass(frozen=True)
class _Line:
    """Record of one gather: its parameters, the function that gathers, and the size of this rank's share."""

    parameters: Any  # FSDP2's parameter group
    gather: Any
    numel: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup


class _Script:
    """Recorded gathers of one micro-batch, in order, and the number done in an attempt."""

    def __init__(self, model: nn.Module) -> None:
        self.lines: list[_Line] = []
        self.done = 0
        self.how: Callable[[_Line, Tensor, Tensor, bool], Any] | None = None
        self._groups = [group for state in _states(model) for group in state._fsdp_param_groups]
        for group in self._groups:
            group._all_gather_comm = _Gather(group, self)

    def close(self) -> None:
        for group in self._groups:
            group._all_gather_comm = group._all_gather_comm.inner

    @contextmanager
    def handle(self, how: Callable[[_Line, Tensor, Tensor, bool], object]) -> Iterator[None]:
        """Have ``how`` answer the gathers in this context: :meth:`learn` or :meth:`count`."""
        self.how = how
        try:
            yield
        finally:
            self.how = None

    def learn(self, line: _Line, output: Tensor, share: Tensor, async_op: bool) -> None:
        """Record a gather, without waiting for other ranks."""
        self.lines.append(line)
        for other in output.view(-1, line.numel):  # (ranks, numel): one row per rank
            # FSDP2 gathers in place: its own share is in the output already.
            if other.data_ptr() != share.data_ptr():
                other.copy_(share)

    def count(self, line: _Line, output: Tensor, share: Tensor, async_op: bool) -> Any:
        """Count a gather, and compare it with the recorded one."""
        # Every micro-batch gathers the same, in order.
        if line != self.lines[self.done % len(self.lines)]:
            why = "micro-batches gather different parameters, so ranks cannot wait for one another"
            way_out = "Give a number, such as MicroBatching(8)"
            raise ValueError(explain("MicroBatching('auto') with FSDP2", why, way_out))
        self.done += 1
        return line.gather(output_tensor=output, input_tensor=share, group=line.group, async_op=async_op)

    def finish(self, parts: int) -> bool:
        """Do the remaining gathers of an attempt with ``parts`` micro-batches.

        Returns:
            Whether the other ranks received this rank's parameters.
        """
        complete = True
        while self.done < parts * len(self.lines):
            line = self.lines[self.done % len(self.lines)]
            self.done += 1
            share = _share_of(line.parameters, line.dtype)
            # It was gathered from a secondary shard, which exists during a step only.
            if share.numel() != line.numel:
                complete = False
                share = torch.zeros(line.numel, dtype=line.dtype, device=line.device)
            output = torch.empty(line.numel * line.group.size(), dtype=line.dtype, device=line.device)
            line.gather(output_tensor=output, input_tensor=share, group=line.group, async_op=False)
        return complete


@torch.no_grad()
def _share_of(group: object, dtype: torch.dtype) -> Tensor:
    """Return this rank's input to a gather."""
    shares = [share for parameter in group.fsdp_params for share in parameter.all_gather_inputs]
    return torch.cat([share.flatten().view(dtype) for share in shares])


class _Gather:
    """Replacement for the object that FSDP2 calls to gather a block's parameters."""

    def __init__(self, parameters: object, script: _Script) -> None:
        self.inner, self._parameters, self._script = parameters._all_gather_comm, parameters, script

    def allocate(self, *args: object, **kwargs: object) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        how = self._script.how
        if how is None:
            return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        line = _Line(self._parameters, self.inner, input_tensor.numel(), input_tensor.dtype, input_tensor.device, group)
        return how(line, output_tensor, input_tensor, async_op)


def _states(model: nn.Module) -> list[Any]:
    states: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            states.append(module._get_fsdp_state())
    return states


def _has_run(model: nn.Module) -> bool:
    # torch sets `_is_root` in the first forward.
    return any(state._is_root is not None for state in _states(model))


def _sharded_parameters(model: nn.Module) -> Iterator[Any]:
    for state in _states(model):
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params


def _save_sums(model: nn.Module) -> Callable[[], None]:
    """Save the gradient sums of earlier batches of a window; return a function that restores them."""
    sums = []
    for parameter in _sharded_parameters(model):
        whole = getattr(parameter, "_unsharded_param", None)
        gradient = getattr(whole, "grad", None)
        sums.append((parameter, _copy(gradient), _copy(parameter.unsharded_accumulated_grad)))

    def restore() -> None:
        for parameter, gradient, total in sums:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = _copy(gradient)
            parameter.unsharded_accumulated_grad = _copy(total)

    return restore


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _do_nothing() -> None:
    pass


def forget_unfinished_(model: nn.Module) -> None:
    """Discard the gradients of a window that an error has interrupted, which ``zero_grad`` does not reach."""
    # FSDPModule has this method, but not in every supported torch.
    reset: Any = getattr(model, "reset_iter_state", None)
    if reset is not None:
        # Torch raises it if the model was sharded but never run.
        with suppress(AttributeError):
            reset()
