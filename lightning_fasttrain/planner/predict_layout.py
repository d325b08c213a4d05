"""Predict the step of a layout: on the whole model, or on shallow ones where its blocks are equal."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.core.batch.leaves import batch_size, walk_leaves
from lightning_fasttrain.core.messages import quiet_libraries
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import bytes_of, trained_parameters
from lightning_fasttrain.loss import FusedLossHead
from lightning_fasttrain.memory.fake_step import fake_module
from lightning_fasttrain.memory.memory_report import Moment
from lightning_fasttrain.model.activation_checkpointing import ActivationCheckpointing
from lightning_fasttrain.planner.cluster_plan import RECOMPUTED, Layout
from lightning_fasttrain.step_time.machine import Machine
from lightning_fasttrain.step_time.predict_time import TimeReport, find_bounds, predict_on, recorder_for, uses_tf32
from lightning_fasttrain.step_time.record_step import StepRecorder
from lightning_fasttrain.step_time.simulate_step import MOST_LAID_OUT
from lightning_fasttrain.strategy.zero.zero_states import ZeROSizes
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import Facts, add_model

DEPTHS = 3, 4
"""Blocks of the models on which layouts are compared; fewer do not hold all that is prefetched."""
_FEW_LAUNCHES = 0.05  # of the time of a step: they make it no longer than by that
_AT_ENDS = 2  # blocks from the first and from the last that are equal in models of any depth

Moments = Mapping[Moment, Any]  # → bytes of all and of states, or seconds: the most at each moment of a step


@dataclass(frozen=True)
class PredictedLayout:
    """The predicted step of a layout.

    Args:
        seconds, low, high: as of a :class:`TimeReport`.
        ideal_seconds: those of its model FLOPs at the peak of the device.
        peak_bytes: the peak memory of a device.
        states: the bytes of parameters, gradients and optimizer state at that time.
        exact: whether it is predicted on the whole model.
    """

    seconds: float
    low: float
    high: float
    ideal_seconds: float
    peak_bytes: float
    states: float
    exact: bool = True


class LayoutPredictor:
    """Predicts layouts of one model, each once.

    Args:
        net: the model, on fake tensors.
        batch: one batch.
        techniques: of every layout.
        given: further arguments of :func:`~lightning_fasttrain.step_time.predict_time.predict_on`.
        tell: called with the progress, in words.

    Attributes:
        shallow: models with few of the blocks; none where these differ, or are in several lists.
        depth: number of blocks.
        gradient_bytes: bytes of all gradients, as far as no technique changes that; 0 if techniques were given.
        can_fuse: whether a fused loss head can be added.
        recomputed: what blocks may recompute.
    """

    def __init__(
        self,
        net: nn.Module,
        batch: Any,
        techniques: list[Technique],
        given: dict[str, Any],
        tell: Callable[[str], object],
    ) -> None:
        self.net, self.batch, self.techniques, self.given, self.tell = net, batch, techniques, given, tell
        self.size = batch_size(batch)
        self.shallow, self._parent, self.depth = _make_shallow(net)
        # ZeRO reduces gradients by buckets: with several blocks in each, a step is not in proportion to the blocks.
        self._fills_buckets = _count_weights(self.shallow) >= ZeROSizes.reduce_bucket
        self.gradient_bytes = 0 if techniques else _count_gradient_bytes(net, given["precision"])
        self._known: dict[tuple[Layout, bool], PredictedLayout] = {}
        facts, given_kinds = add_model(Facts("cuda"), net), {type(one) for one in techniques}
        has_logits = count_batch(batch)[1] > 0 and FusedLossHead.why_not(facts) is None
        self.can_fuse = has_logits and FusedLossHead not in given_kinds
        self.recomputed: tuple[str, ...] = ("",)
        if facts.blocks and ActivationCheckpointing not in given_kinds:
            self.recomputed = RECOMPUTED

    def predict(self, layout: Layout, exact: bool) -> PredictedLayout:
        """Predict the step of a layout, on the whole model if it is to be exact or has no shallow ones.

        Raises:
            Exception: what the step itself raises.
        """
        in_proportion = self._fills_buckets or not layout.strategy.startswith("zero")
        exact = exact or not (self.shallow and in_proportion)
        if (layout, exact) not in self._known:
            self.tell(f"{len(self._known) + 1} layouts: {layout}")
            # What is said of one layout does not hold for the plan.
            with quiet_libraries("lightning_fasttrain"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._known[layout, exact] = self._predict_whole(layout) if exact else self._predict_shallow(layout)
        return self._known[layout, exact]

    def _predict_whole(self, layout: Layout) -> PredictedLayout:
        report, recorder = self._run(self.net, layout, warms_up=True)
        return PredictedLayout(*_list_times(report), report.peak_bytes, max(recorder.moments.values())[1])

    def _predict_shallow(self, layout: Layout) -> PredictedLayout:
        """Continue what the deeper model has more than the other, of memory and of waiting at each moment of a step.

        The peak of a deeper model may be at another moment; and the launches of a shallow one may be hidden behind one
        long kernel, as those of a deeper model are not.
        """
        (less, of_less), (more, of_more) = (self._run(net, layout, warms_up=False) for net in self.shallow)
        peak_bytes, states = max(self._continue_moments(of_less.moments, of_more.moments))
        in_blocks = more.peak_bytes / max(of_more.moments.values())[0]  # of the caching allocator, which are larger
        seconds, low, high, ideal_seconds = self._continue(_list_times(less), _list_times(more))
        slower = self._find_slowdown(layout, of_less, of_more, more.seconds)
        slowed = slower * seconds, slower * low, slower * high
        return PredictedLayout(*slowed, ideal_seconds, peak_bytes * in_blocks, states, exact=False)

    def _continue(self, less: Sequence[float], more: Sequence[float]) -> list[float]:
        """Continue values of the shallow models to the depth of the whole one."""
        times = (self.depth - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
        return [value + times * (value - before) for before, value in zip(less, more, strict=True)]

    def _continue_moments(self, less: Moments, more: Moments) -> list[list[float]]:
        less, more = _name_blocks(less, self._parent, DEPTHS[0]), _name_blocks(more, self._parent, DEPTHS[1])
        return [self._continue(less[moment], more[moment]) for moment in less.keys() & more.keys()]

    def _find_slowdown(self, layout: Layout, less: StepRecorder, more: StepRecorder, seconds: float) -> float:
        """Return how many times longer a deep step is than one whose launches stay hidden as in the shallow ones."""
        machine: Machine = self.given["machine"]
        step = more.steps[-1]
        launches = len(step.events) * step.micro_batches / max(len(step.starts), 1)
        if not machine.runs_ahead or launches * machine.host_us * 1e-6 < _FEW_LAUNCHES * seconds:
            return 1.0
        on = machine, uses_tf32([*self.techniques, *layout.techniques()]), layout.devices // layout.nodes

        def find_seconds(micro_batches: int) -> tuple[float, float]:
            late_less, late_more = (find_bounds(recorder, *on, micro_batches) for recorder in (less, more))
            (hidden,) = self._continue(max(late_less.values()), max(late_more.values()))
            (bound,) = max(self._continue_moments(late_less, late_more))
            return hidden, bound

        most = min(step.micro_batches, MOST_LAID_OUT)
        hidden, bound = find_seconds(most)
        further = step.micro_batches - most
        if further:
            hidden_before, bound_before = find_seconds(most - 1)
            hidden += further * (hidden - hidden_before)
            bound += further * (bound - bound_before)
        return max(1.0, bound / hidden)

    def _run(self, net: nn.Module, layout: Layout, warms_up: bool) -> tuple[TimeReport, StepRecorder]:
        techniques = [*self.techniques, *layout.techniques()]
        recorder = recorder_for(techniques)
        report = predict_on(
            net,
            resize_batch(self.batch, self.size, layout.micro_batch),
            devices=layout.devices,
            nodes=layout.nodes,
            strategy=layout.make_strategy(),
            techniques=techniques,
            accumulate=layout.accumulate,
            warms_up=warms_up,
            recorder=recorder,
            **self.given,
        )
        return report, recorder


def _list_times(report: TimeReport) -> tuple[float, float, float, float]:
    """Return the times of a step, in the order of those of a layout."""
    return report.seconds, report.low, report.high, report.mfu * report.seconds


def _name_blocks(moments: Moments, parent: str, depth: int) -> Moments:
    """Return the moments in which blocks are named by their distance from the first and the last, others left out."""
    named: dict[Moment, Any] = {}
    prefix = f"{parent}." if parent else ""
    block = re.compile(rf"{re.escape(prefix)}(\d+)(?=\.|$)")
    for moment, held in moments.items():
        found = block.match(moment.module)
        modules = [moment.module]
        if found:
            rest, number = moment.module[found.end() :], int(found[1])
            after = {"first": number, "last": depth - 1 - number}
            modules = [f"{end} {distance}{rest}" for end, distance in after.items() if distance < _AT_ENDS]
        for module in modules:
            key = moment._replace(module=module)
            named[key] = max(held, named.get(key, held))
    return named


def resize_batch(batch: Any, size: int, samples: int) -> Any:
    """Return a batch of ``samples`` samples without values, like one of ``size``."""

    def resize(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size:
            return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            return type(leaf)([leaf[0]] * samples)
        return leaf

    return walk_leaves(batch, resize, "batch")


def _make_shallow(net: nn.Module) -> tuple[list[nn.Module], str, int]:
    """Return copies of a deep model with few of its equal blocks, the name of their list, and the depth of the model.

    None are made of models whose blocks differ, or are in several lists.
    """
    try:
        blocks = find_blocks(net)
    except ValueError:
        return [], "", 0
    parents = {name.rpartition(".")[0] for name in blocks}
    parent = next(iter(parents))
    listed = net.get_submodule(parent)
    kinds = set()
    for block in blocks.values():
        kinds.add(tuple((one.shape, one.dtype, one.requires_grad) for one in block.parameters()))
    is_list = isinstance(listed, nn.ModuleList) and len(listed) == len(blocks)
    if len(parents) > 1 or len(kinds) > 1 or not is_list or len(blocks) <= 2 * DEPTHS[1]:
        return [], "", len(blocks)
    made = []
    for depth in DEPTHS:
        copied = fake_module(net, FakeMode())
        kept = copied.get_submodule(parent)
        assert isinstance(kept, nn.ModuleList)
        del kept[depth:]
        made.append(copied)
    return made, parent, len(blocks)


def _count_weights(shallow: Sequence[nn.Module]) -> int:
    """Return the elements of a block that are trained: what the deepest model has more than the others; 0 for none."""
    if not shallow:
        return 0
    least, most = (sum(map(Tensor.numel, trained_parameters(net))) for net in shallow)
    return most - least


def _count_gradient_bytes(net: nn.Module, precision: str) -> int:
    trained = trained_parameters(net)
    if precision in ("bf16-true", "16-true"):
        return 2 * sum(map(Tensor.numel, trained))
    return bytes_of(trained)
