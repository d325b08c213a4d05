"""Profile the blocks in the first steps of a training, and decide which of them are recomputed."""

import functools
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from itertools import zip_longest
from operator import gt
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.device import GIB, DeviceTimer
from lightning_fasttrain.core.distributed import largest_over_ranks, rank_count
from lightning_fasttrain.core.messages import note_once, say
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import is_compiled, is_replayed, patch
from lightning_fasttrain.core.peak_memory import PeakMemory
from lightning_fasttrain.model.activation_checkpointing import Again, CheckpointedForward, SelectiveOps
from lightning_fasttrain.model.memory_budget.block_cost import BlockCost, Storages, costs_over_ranks, measure_block
from lightning_fasttrain.model.memory_budget.checkpoint_plan import (
    KEPT,
    RECOMPUTED,
    SELECTIVE,
    CheckpointPlan,
    explain_excess,
    make_plan,
    what_fits,
)

_WORTH_A_PLAN = 0.05  # of the limit; for less free memory no other plan is made, which compiled blocks compile again
_MOST_RAISES = 3


class _Stage(Enum):
    COSTS = "costs of each block, measured beside the training"
    PEAKS = "peak between each two blocks, with every block recomputed"
    COMPILING = "nothing, while blocks are compiled as the plan says"
    CHECK = "peak under the plan"
    TIMING = "time spent in recomputation"
    DONE = "nothing"


class StepWatch:
    """Profiles the first steps of a training from inside its blocks, one stage per step, and makes the plan.

    A *pass* is one forward and backward of the model; a step has one, or one for each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        budget_gib: float | str,
        tell: Callable[[CheckpointPlan], None],
    ) -> None:
        self.model, self.budget_gib, self.tell = model, budget_gib, tell
        self.plan: CheckpointPlan | None = None
        self.forwards = {name: PlannedForward(block, name, self) for name, block in blocks.items()}
        self.measuring = True  # every block is recomputed, and none is run compiled
        self._stage = _Stage.COSTS
        self._costs: dict[str, BlockCost] = {}  # in the order of the forward
        self._places: dict[str, int] = {}  # of the blocks, in that order
        self._calls: dict[str, int] = {}  # in one pass, for a block that is called several times
        self._fixed: Storages | None = None  # of the whole model, in this pass
        self._peaks: dict[str, int] = {}  # see `make_plan`
        self._aim: int | None = None
        self._misses = 0
        self._raises = 0  # plans made since compiled blocks take less than predicted
        self._began_smallest = False  # with the plan that recomputes every block, so that its peak is known
        self._cautious = False  # every block is recomputed in this pass
        self._passes = 0
        # Largest sizes so far of the first block's input, by dimension.
        self._extents: list[int] = []
        self._measure_costs = False
        self._device = torch.device("cpu")
        # Blocks with forward done in this pass and backward not begun: place and name, once for each call, sorted, so
        # that a search does not pass over all blocks.
        self._pending: list[tuple[int, str]] = []
        self._window: PeakMemory | None = None
        self._segments: list[str] = []  # for each segment of the window, the last pending block
        self._timer: DeviceTimer | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._closed = False
        self._hooks = ExitStack()
        self._end_of_step = ExitStack()
        # Applies to all optimizers in the process, because this model's own is created later.
        self._end_of_step.callback(register_optimizer_step_post_hook(self._on_step).remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepWatch":
        """Copy the current actions of a model, without profiling the copy."""
        idle = StepWatch(nn.Module(), {}, self.budget_gib, self.tell)
        idle.close()
        return idle

    def see(self, batch: object) -> None:
        """Record which batch comes: if the loader keeps it, it existed before the step."""
        if self._window is not None:
            self._window.hold(batch)

    # Called by the blocks.

    def enter(
        self, name: str, forward: CheckpointedForward, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Begin and measure a block's forward."""
        if not self._costs:  # the first block: from now on a hook reports when it begins
            self._begin_pass(forward.module, args, kwargs)
            self._hooks.callback(forward.module.register_forward_pre_hook(self._begin_pass, with_kwargs=True).remove)
        if self._measure_costs or name not in self._costs:
            if self._fixed is None:
                self._fixed = Storages(*self.model.parameters(), *self.model.buffers())
            cost = measure_block(forward, EXPENSIVE.keeps, self._fixed, args, kwargs)
            self._costs[name] = cost.at_least(self._costs.get(name, cost))
            self._places.setdefault(name, len(self._places))
        self._mark()

    def leave(self, name: str) -> None:
        """End and measure a block's forward."""
        call = self._places[name], name
        insort(self._pending, call)
        calls = bisect_right(self._pending, call) - bisect_left(self._pending, call)
        self._calls[name] = max(self._calls.get(name, 1), calls)
        self._mark()

    @contextmanager
    def watch_recomputation(self, name: str, again: AbstractContextManager[object]) -> Iterator[None]:
        """Track a recomputation of a block's forward."""
        call = self._places.get(name, -1), name
        place = bisect_left(self._pending, call)
        if self.measuring and call in self._pending[place : place + 1]:
            del self._pending[place]
            self._mark()
        with again, self._timer.measure() if self._timer is not None else nullcontext():
            yield

    def _mark(self) -> None:
        if self._window is not None:
            self._window.mark()
            last = self._pending[-1][1] if self._pending else ""
            self._segments.append(last)

    # Passes and steps.

    @torch._dynamo.disable
    def _begin_pass(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if self._closed or not torch.is_grad_enabled() or self._pending:  # last: one block is called several times
            return
        if self._cautious:  # the larger batch was in the previous pass
            self._follow(self.plan)
        self._cautious = False
        self._fixed = None  # it may have been replaced since
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        self._measure_costs = bool(tensors) and self._is_larger(tensors[0])
        if self._measure_costs:
            self._device = tensors[0].device
            self._make_ready_for_a_larger_batch(tensors)
        self._passes += self._stage is _Stage.PEAKS

    def _is_larger(self, tensor: Tensor) -> bool:
        return len(tensor.shape) > len(self._extents) or any(map(gt, tensor.shape, self._extents))

    def _make_ready_for_a_larger_batch(self, tensors: list[Tensor]) -> None:
        if not self.measuring:
            self._follow(None)
            # All ranks share the plan, but only one has this batch.
            if rank_count() > 1:
                note_once("MemoryBudget: all blocks are recomputed for a batch larger than those measured")
                self._cautious = True
                return
            note_once("MemoryBudget: measuring a batch larger than those measured before")
            if self._stage is _Stage.DONE:  # only then were the steps not profiled
                for optimizer in self._optimizers:
                    self._watch_step(optimizer)
            self._stage, self.measuring, self._passes = _Stage.PEAKS, True, 0
            self._open_window(tensors)
        self._extents = list(map(max, zip_longest(self._extents, tensors[0].shape, fillvalue=0)))

    def _on_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Hook: an optimizer has stepped; the first one of this model ends the first step."""
        # -1: no backward is running. Optimizers that update inside the backward step many times per step.
        if optimizer in self._optimizers or torch._C._current_graph_task_id() != -1:
            return
        mine = set(map(id, self.model.parameters()))
        sharded = rank_count() > 1  # then it may hold shards of the parameters
        if sharded or not mine.isdisjoint(map(id, parameters_of(optimizer))):
            self._optimizers.add(optimizer)
            self._watch_step(optimizer)
            if self._stage is _Stage.COSTS:
                self._end_step()

    def _watch_step(self, optimizer: Optimizer) -> None:
        """End a step once ``optimizer.step`` has returned: a profiler that saw it begin must not be stopped inside."""
        step = optimizer.step

        @functools.wraps(step)
        def then_end_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._end_step()
            return result

        self._end_of_step.callback(patch(optimizer, "step", then_end_step))

    def _end_step(self) -> None:
        # A forward without a backward leaves its blocks in the list.
        self._pending.clear()
        self._fixed = None
        if self._stage is _Stage.COSTS and self._costs:
            self._stage = _Stage.PEAKS
        elif self._stage is _Stage.PEAKS and self._window is not None:
            for name, peak in zip(self._segments, self._close_window().segments, strict=True):
                self._peaks[name] = max(self._peaks.get(name, 0), peak)
            self._decide()
        elif self._stage is _Stage.COMPILING:
            self._stage = _Stage.CHECK
        elif self._stage is _Stage.CHECK and self._window is not None:
            self._check(self._close_window().peak_bytes)  # with all that CUDA graphs keep
        elif self._stage is _Stage.TIMING:
            self._report()
        if self._stage in (_Stage.PEAKS, _Stage.CHECK):
            self._open_window()

    def _open_window(self, *held: object) -> None:
        """Measure from here to the end of a step, or later if another meter is active."""
        # On the CPU memory is measured by torch's profiler, and a process can run only one at a time.
        busy = self._device.type == "cpu" and torch.autograd._profiler_enabled()
        if self._window is None and not busy:
            self._segments = [""]
            self._window = PeakMemory(self._device, self.model, *self._optimizers, *held).__enter__()

    def _close_window(self) -> PeakMemory:
        window, self._window = self._window, None
        assert window is not None
        window.__exit__()
        self._in_use = window.peak_bytes - window.added_bytes
        return window

    # Work at the end of a step, by stage.

    def _decide(self) -> None:
        """Make the plan; it applies from the next pass on."""
        costs = {name: cost.times(self._calls[name]) for name, cost in self._costs.items()}
        costs, peaks = costs_over_ranks(costs, self._peaks)
        budget = self.budget_gib
        limit = what_fits(self._device, self._in_use) if isinstance(budget, str) else round(budget * GIB)
        if self._aim is None:
            # What CUDA graphs have taken they keep. So their first plan is the smallest, and shows how much that is.
            self._began_smallest = is_replayed(self.model)
            self._aim = 0 if self._began_smallest else limit
        compiled = is_compiled(self.model)
        plan = make_plan(costs, peaks, limit, self._passes, min(limit, self._aim), are_bounds=compiled)
        self._follow(plan)
        # The step that compiles takes memory of its own.
        self._stage, self.measuring = _Stage.COMPILING if compiled else _Stage.CHECK, False
        self._tell(plan)
        say("MemoryBudget: %s", plan)

    def _tell(self, plan: CheckpointPlan) -> None:
        self.plan = plan
        self.tell(plan)

    def _follow(self, plan: CheckpointPlan | None) -> None:
        for forward in self.forwards.values():
            forward.follow(RECOMPUTED)
        for block in plan.blocks if plan is not None else ():
            self.forwards[block.name].follow(block.action)

    def _check(self, peak: int) -> None:
        """Compare the peak with the limit, and with what was predicted; if they differ, make a new plan."""
        plan = self.plan
        assert plan is not None
        peak = int(largest_over_ranks([peak])[0])
        # If no block holds memory, the peak cannot be lowered further.
        if peak > plan.limit_bytes and any(block.held_bytes for block in plan.blocks):
            self._lower(plan, peak)
            return
        is_smallest = self._began_smallest and not (self._misses or self._raises)
        if peak > plan.limit_bytes and (is_smallest or plan.everything_bytes > plan.limit_bytes):
            raise ValueError(explain_excess(peak, plan.limit_bytes))
        room = plan.limit_bytes - peak if is_smallest else plan.predicted_bytes - peak
        if room > _WORTH_A_PLAN * plan.limit_bytes and self._may_raise(plan):
            self._learn(plan, peak)
            self._raises, self._aim = self._raises + 1, plan.limit_bytes
            self._decide()
            return
        self._tell(plan.with_measured(peak, None))
        self._stage, self._timer = _Stage.TIMING, DeviceTimer(self._device)

    def _lower(self, plan: CheckpointPlan, peak: int) -> None:
        """Aim lower, by more each time, down to the plan that is known to fit."""
        self._misses += 1
        back = (peak - plan.limit_bytes) << self._misses
        self._aim = plan.predicted_bytes - back if self._misses < 4 else 0
        note_once("MemoryBudget: the peak was above the limit; making a new plan")
        self._decide()

    def _may_raise(self, plan: CheckpointPlan) -> bool:
        """Whether a later plan may keep more activations.

        It may if a block is recomputed, all plans so far stayed within the limit, and few of them have been raised.
        """
        more = any(block.action != KEPT for block in plan.blocks)
        return more and not self._misses and self._raises < _MOST_RAISES

    def _learn(self, plan: CheckpointPlan, peak: int) -> None:
        """Correct what is predicted, as compiled blocks take less."""
        held = plan.predicted_bytes - plan.everything_bytes
        if self._began_smallest and held:
            share = max(peak - plan.everything_bytes, 0) / held
            self._costs = {name: cost.with_bytes(share) for name, cost in self._costs.items()}
            return
        spare = plan.predicted_bytes - peak
        self._peaks = {name: max(bound - spare, 0) for name, bound in self._peaks.items()}

    def _report(self) -> None:
        """Report after the first steps."""
        plan = self.plan
        assert self._timer is not None
        assert plan is not None
        assert plan.measured_bytes is not None
        ms = self._timer.ms()
        # A time of 0 although some was expected: recomputation in compiled code is not measured.
        if ms or not plan.predicted_ms:
            self._tell(plan.with_measured(plan.measured_bytes, ms))
        self._stage, self._timer = _Stage.DONE, None
        self._end_of_step.close()
        say("MemoryBudget: %s", self.plan)

    def close(self) -> None:
        """End profiling, because the training is over or the model is restored."""
        self._closed, self.measuring = True, False
        if self._window is not None:
            self._close_window()
        self._end_of_step.close()
        self._hooks.close()
        if self.plan is None and self._costs:
            say("MemoryBudget: no plan was made, since the training ended within its first two steps")


EXPENSIVE = SelectiveOps()


class Watch(Protocol):
    """Interface of what a planned forward reports to while the training is measured."""

    measuring: bool

    def enter(
        self, name: str, forward: CheckpointedForward, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None: ...

    def leave(self, name: str) -> None: ...

    def watch_recomputation(self, name: str, again: AbstractContextManager[object]) -> AbstractContextManager[None]: ...


class PlannedForward(CheckpointedForward):
    """A block's forward that is kept, partly kept or recomputed by the plan; recomputed while there is no plan."""

    measures: ClassVar[bool] = True

    def __init__(self, module: nn.Module, name: str, watch: Watch) -> None:
        super().__init__(module)
        self.name, self.watch = name, watch
        self.kept = False

    @property
    def is_measuring(self) -> bool:
        return self.watch.measuring

    def follow(self, action: str) -> None:
        self.kept = action == KEPT
        self.keeps = EXPENSIVE.keeps if action == SELECTIVE else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if self.watch.measuring:
            return self._call_measured(*args, **kwargs)
        if self.kept:
            return self.inner(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    @torch._dynamo.disable
    def _call_measured(self, *args: object, **kwargs: object) -> Any:
        self.watch.enter(self.name, self, args, kwargs)
        out = super().__call__(*args, **kwargs)
        self.watch.leave(self.name)
        return out

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, again = super()._contexts()
        return forward, Again(lambda: self.watch.watch_recomputation(self.name, again))
