"""Prediction of the memory for parameters, gradients and optimizer state on each rank, at every stage of ZeRO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of
from lightning_fasttrain.strategy.choose._model_sizes import MASTER, Held, ZeROSizes, held_by
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer, refuse_unshardable

# From the cheapest to the most expensive. Stage 0 all-reduces each gradient once. Stages 1 and 2 do so too, and then
# gather the updated parameters; stage 2 reduces in each micro-batch, stage 1 once a step. Stage 3 gathers parameters
# in each forward and each backward. Offload adds transfers between host and device, which are slower than those
# between devices, and a disk is slower still.
STAGES = ("0", "1", "2", "3", "2+offload", "3+offload", "3+nvme")
"""Stages of ZeRO and their offload variants, from the cheapest to the most expensive."""

_ALL_REDUCE_BUCKET = 500_000_000  # elements, fixed in DeepSpeed's engine for stage 0
_SWAP_BUFFERS = 4  # of a sub-group each, in host memory
_PARAMETERS_IN_HOST = 1_000_000_000  # elements of disk-offloaded parameters that stay in host memory
_PARAMETER_SWAP = 500_000_000  # elements: 5 buffers of 100 million


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a model's states on one rank, the one that holds most.

    Args:
        stage: one of :data:`STAGES`.
        parameters: bytes on the device of the parameters, as kept between uses, and of the module's buffers.
        gradients: bytes on the device of the gradients kept until the optimizer step.
        optimizer: bytes on the device of the optimizer state, and of the float32 master weights.
        buffers: bytes on the device of buckets, parameters gathered for use, and the step's copy of the gradients.
        host: bytes in host memory, for this rank.
        nvme: bytes on disk, for this rank.
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
        """Total bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@check_arguments
def predict_model_states(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    world_size: PositiveInt,
    precision: str = "32-true",
    stages: Sequence[str] = STAGES,
    sizes: ZeROSizes | None = None,
) -> list[ModelStates]:
    """Predict the memory for a model's states on each rank under DeepSpeed's ZeRO, for each stage.

    For N trained parameters of s bytes each (4, or 2 in bfloat16), n ranks and k bytes of optimizer state per
    parameter (AdamW: 8), without padding, buckets and frozen parameters:

    - stage 0: s·N + s·N + k·N, and 4·N more in bfloat16, for the float32 master weights
    - stage 1: s·N + s·N + (4 + k)·N/n; stage 2: s·N + s·N/n + (4 + k)·N/n; stage 3: s·N/n + s·N/n + (4 + k)·N/n; in
      float32 the master weights are copies too

    Optimizer state is measured by a step on fake tensors of the shapes that the engine will give the optimizer: from
    stage 1 these are flat. Tied parameters count once. Frozen parameters have no gradient and no state, and are
    sharded at stage 3. Quantised parameters count as they are stored. In bfloat16, DeepSpeed casts all other
    floating-point parameters and buffers to it, under "bf16-mixed" too, and accumulates gradients in it.

    Not counted: activations, temporaries of the optimizer step, and under offload the host memory for accumulating
    gradients over several micro-batches. At stage 1 "gradients" are those of all parameters, since accumulation
    needs them.

    Args:
        module: the model (real, on ``"meta"``, or of fake tensors), or a function that builds it. Nothing is
            allocated, and the model is not changed.
        optimizer: the optimizer in use, or a function of the parameters that makes it; by default that of the
            LightningModule's ``configure_optimizers``.
        world_size: number of ranks that the model is sharded over.
        precision: Lightning's ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        stages: the stages to predict.
        sizes: bucket sizes; by default Lightning's and DeepSpeed's, with a reduce bucket no larger than the trained
            parameters.

    Returns:
        One :class:`ModelStates` per stage, in the order of ``stages``.

    Raises:
        TypeError: ``module`` is not a model, or there is no optimizer.
        ValueError: the world size is below one, the precision or a stage is unknown, or the optimizer cannot be
            sharded.

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
        Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, and DeepSpeed 0.19.8's sources for its
        further buffers; compared with the tensors of its engines on the CPU. Figures for disk and for CUDA were read
        from the sources only.
    """
    for stage in stages:
        one_of("stage", stage, STAGES)
    held = held_by(module, optimizer, world_size, precision)
    return states_of(held, stages, sizes or usual_sizes(held))


def states_of(held: Held, stages: Sequence[str], sizes: ZeROSizes) -> list[ModelStates]:
    """Predict the model states for each stage from sizes that are measured already."""
    if set(stages) - {"0"}:
        refuse_unshardable(held.optimizer)
    return [_PREDICT[stage](held, sizes) for stage in stages]


def split_buffers(held: Held, states: ModelStates, sizes: ZeROSizes) -> tuple[int, int]:
    """Return the bytes of ``states.buffers`` in forward and backward, and those in the optimizer step."""
    bucket = sizes.reduce_bucket * held.size
    if states.stage in ("1", "2"):
        return 2 * bucket, held.step_copy(held.flat_shards())
    if states.stage == "3":
        _, passing = held.gathered_bytes(sizes, offloaded=False)
        shards = held.parameter_shards()
        return bucket + passing, bucket + held.step_copy([min(max(shards), sizes.sub_group)])
    return states.buffers, states.buffers


def usual_sizes(held: Held) -> ZeROSizes:
    """Return Lightning's and DeepSpeed's default sizes, with a reduce bucket no larger than the trained parameters."""
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
    parts = held.flat_shards()
    return ModelStates(
        stage,
        parameters=held.whole + held.padding() + held.extras,
        gradients=held.owned_bytes() if stage == "2" else held.trained * held.size,
        optimizer=sum(parts) * MASTER + held.state(parts),
        # Buckets are freed before the step.
        buffers=max(2 * sizes.reduce_bucket * held.size, held.step_copy(parts)),
    )


def _stage_2_offload(held: Held, sizes: ZeROSizes) -> ModelStates:
    parts = held.flat_shards()
    return ModelStates(
        "2+offload",
        parameters=held.whole + held.padding() + held.extras,
        gradients=0,
        optimizer=0,
        buffers=(2 * sizes.reduce_bucket + held.largest) * held.size,
        host=sum(parts) * (2 * MASTER + held.size) + held.largest * held.size + held.state(parts),
    )


def _stage_3(held: Held, sizes: ZeROSizes) -> ModelStates:
    parts = held.parameter_shards()
    staying, passing = held.gathered_bytes(sizes, offloaded=False)
    return ModelStates(
        "3",
        parameters=held.cut() + staying + held.extras,
        gradients=sum(parts) * held.size,
        optimizer=sum(parts) * MASTER + held.state(parts),
        buffers=sizes.reduce_bucket * held.size + max(passing, held.step_copy([min(max(parts), sizes.sub_group)])),
    )


def _stage_3_away(held: Held, sizes: ZeROSizes, stage: str) -> ModelStates:
    parts = held.parameter_shards()
    total = sum(parts)
    staying, passing = held.gathered_bytes(sizes, offloaded=True)
    # The float32 master weights, their gradients, and their state.
    updated = total * 2 * MASTER + held.state(parts)
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
