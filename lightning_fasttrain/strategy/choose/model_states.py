"""Predicts what parameters, gradients and optimizer state take on each rank, at every stage of ZeRO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.strategy.choose._model_sizes import MASTER, Held, ZeROSizes, held_by
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer, refuse_unshardable

# From the cheapest to the most expensive. 0 sends each gradient around once (all-reduce). 1 and 2 do so too, and
# then gather the updated parameters; 2 sends in each micro-batch, 1 once a step. 3 gathers parameters in each forward
# and each backward. Offload adds the host's link, which is slower than the one between devices, and a disk is slower
# still.
STAGES = ("0", "1", "2", "3", "2+offload", "3+offload", "3+nvme")
"""Stages of ZeRO and their offload variants, from the cheapest to the most expensive."""

_ALL_REDUCE_BUCKET = 500_000_000  # elements, fixed in DeepSpeed's engine for stage 0
_SWAP_BUFFERS = 4  # of a sub-group each, in host memory
_PARAMETERS_IN_HOST = 1_000_000_000  # elements, of those that have gone to disk
_PARAMETER_SWAP = 500_000_000  # elements: 5 buffers of 100 million


@dataclass(frozen=True)
class ModelStates:
    """Bytes that the states of a model take on one rank, the one that has most.

    Args:
        stage: one of :data:`STAGES`.
        parameters: on the device, as forward and backward keep them between uses; buffers of the module too.
        gradients: on the device, kept until the optimizer's step.
        optimizer: on the device: its state, and the float32 copies that it updates.
        buffers: on the device: buckets, parameters gathered for use, and the step's own copy of gradients.
        host: in host memory, for this rank.
        nvme: on disk, for this rank.
    """

    stage: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0
    nvme: int = 0

    @property
    def device(self) -> int:
        """Bytes on the device, all together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def predict_model_states(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    world_size: int,
    precision: str = "32-true",
    stages: Sequence[str] = STAGES,
    sizes: ZeROSizes | None = None,
) -> list[ModelStates]:
    """Predict what the states of a model take on each rank under DeepSpeed's ZeRO, stage by stage.

    For N numbers that train, n ranks, s bytes each (4, or 2 in bfloat16) and k bytes of optimizer state a number
    (AdamW: 8), and without padding, buckets and what is frozen:

    - 0: s·N + s·N + k·N, and 4·N more in bfloat16, for the copies that are updated
    - 1: s·N + s·N + (4 + k)·N/n; 2: s·N + s·N/n + (4 + k)·N/n; 3: s·N/n + s·N/n + (4 + k)·N/n, the copies in float32
      too

    Optimizer state is learnt by a step on tensors without memory, of the shapes that the engine will give the
    optimizer: from stage 1 on these are flat. Tied parameters count once, frozen ones have no gradient and no state
    and are cut in parts from stage 3 on, quantised ones count as they are stored. In bfloat16, DeepSpeed turns all
    other floating-point parameters and buffers into it, for "mixed" too, and sums gradients in it.

    Not counted: activations, the temporaries of the optimizer's own step, and under offload what accumulating
    gradients over several micro-batches takes in host memory. "gradients" of stage 1 are those of all parameters, as
    accumulation needs them.

    Args:
        module: the model, real or on ``"meta"`` or of fake tensors, or what builds it. Nothing is allocated, and it
            is left as it is.
        optimizer: the one really used, or a function of the parameters that makes it; by default that of the
            LightningModule's ``configure_optimizers``.
        world_size: ranks that the model is shared among.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``, as Lightning means them.
        stages: those wanted.
        sizes: of buckets; by default Lightning's and DeepSpeed's, but no reduce bucket beyond what trains.

    Returns:
        One of each stage, in the order of ``stages``.

    Raises:
        TypeError: no model, or no optimizer.
        ValueError: a world size below one, an unknown precision or stage, or an optimizer that cannot be sharded.

    Example:
        >>> import torch
        >>> net = nn.Linear(1000, 1000, bias=False)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> for states in predict_model_states(net, optimizer, world_size=4, stages=("0", "1", "3")):
        ...     states.stage, states.parameters, states.gradients, states.optimizer
        ('0', 4000000, 4000000, 4000000)
        ('1', 4000000, 4000000, 2000000)
        ('3', 1000000, 1000000, 2000000)

    Source:
        Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, and DeepSpeed 0.19.8's sources for what it
        keeps beside; held against its engines' own tensors on the CPU. Disk, and what CUDA keeps, were read only.
    """
    for stage in stages:
        one_of("stage", stage, STAGES)
    held = held_by(module, optimizer, world_size, precision)
    return states_of(held, stages, sizes or usual_sizes(held))


def states_of(held: Held, stages: Sequence[str], sizes: ZeROSizes) -> list[ModelStates]:
    """As :func:`predict_model_states`, of what has been looked at already."""
    if any(stage != "0" for stage in stages):
        refuse_unshardable(held.optimizer)
    return [_PREDICT[stage](held, sizes) for stage in stages]


def usual_sizes(held: Held) -> ZeROSizes:
    """Lightning's and DeepSpeed's defaults, but no reduce bucket beyond what trains: it would never be full."""
    return ZeROSizes(reduce_bucket=min(ZeROSizes.reduce_bucket, held.trained))


def _stage_0(held: Held, sizes: ZeROSizes) -> ModelStates:
    masters = held.trained * MASTER if held.low else 0
    bucket = min(held.trained, _ALL_REDUCE_BUCKET) * held.size if held.ranks > 1 else 0
    return ModelStates(
        "0",
        parameters=held.whole + held.extras,
        gradients=held.trained * held.size,
        optimizer=masters + held.state_in_shape(),
        buffers=max(bucket, masters),
    )


def _stage_1_or_2(held: Held, sizes: ZeROSizes, stage: str) -> ModelStates:
    parts = held.flat_parts()
    return ModelStates(
        stage,
        parameters=held.whole + held.padding() + held.extras,
        gradients=held.owned_bytes() if stage == "2" else held.trained * held.size,
        optimizer=sum(parts) * MASTER + held.state(parts),
        buffers=max(2 * sizes.reduce_bucket * held.size, held.step_copy(parts)),  # buckets are freed before the step
    )


def _stage_2_offload(held: Held, sizes: ZeROSizes) -> ModelStates:
    parts = held.flat_parts()
    return ModelStates(
        "2+offload",
        parameters=held.whole + held.padding() + held.extras,
        gradients=0,
        optimizer=0,
        buffers=(2 * sizes.reduce_bucket + held.largest) * held.size,
        host=sum(parts) * (2 * MASTER + held.size) + held.largest * held.size + held.state(parts),
    )


def _stage_3(held: Held, sizes: ZeROSizes) -> ModelStates:
    parts = held.pieces()
    staying, passing = held.gathered_bytes(sizes, offloaded=False)
    return ModelStates(
        "3",
        parameters=held.cut() + staying + held.extras,
        gradients=sum(parts) * held.size,
        optimizer=sum(parts) * MASTER + held.state(parts),
        buffers=sizes.reduce_bucket * held.size + max(passing, held.step_copy([min(max(parts), sizes.sub_group)])),
    )


def _stage_3_away(held: Held, sizes: ZeROSizes, stage: str) -> ModelStates:
    parts = held.pieces()
    total = sum(parts)
    staying, passing = held.gathered_bytes(sizes, offloaded=True)
    updated = total * 2 * MASTER + held.state(parts)  # what is updated, its gradient, its state
    host, nvme = held.cut() + total * held.size + updated, 0
    if stage == "3+nvme":
        kept = min(total, _PARAMETERS_IN_HOST)
        swap = _SWAP_BUFFERS * min(max(parts), sizes.sub_group) * MASTER
        host = (kept + _PARAMETER_SWAP + total) * held.size + swap
        nvme = held.cut() + updated
    return ModelStates(
        stage,
        parameters=staying + held.extras,
        gradients=0,
        optimizer=0,
        buffers=sizes.reduce_bucket * held.size + passing,
        host=host,
        nvme=nvme,
    )


_PREDICT: dict[str, Callable[[Held, ZeROSizes], ModelStates]] = {
    "0": _stage_0,
    "1": lambda held, sizes: _stage_1_or_2(held, sizes, "1"),
    "2": lambda held, sizes: _stage_1_or_2(held, sizes, "2"),
    "3": _stage_3,
    "2+offload": _stage_2_offload,
    "3+offload": lambda held, sizes: _stage_3_away(held, sizes, "3+offload"),
    "3+nvme": lambda held, sizes: _stage_3_away(held, sizes, "3+nvme"),
}
