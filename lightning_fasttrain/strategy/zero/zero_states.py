"""Formulas of each rank's memory under DeepSpeed's ZeRO, and the optimizers that its flat shards suit.

Formulas, since DeepSpeed's engine cannot run on tensors without memory, as FSDP2 can.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import NonNegativeInt, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import bytes_of, count_uses
from lightning_fasttrain.core.state.values import without
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized, quantization_of
from lightning_fasttrain.memory.fake_step import fake_module
from lightning_fasttrain.memory.one_rank import RankStates, RankTraffic
from lightning_fasttrain.memory.predict_memory import PRECISIONS
from lightning_fasttrain.optim.named.build_optimizer import NamedOptimizer
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.optim.named.optimizer_state import Group, groups_of, state_bytes

MakeOptimizer = Callable[[Any], Optimizer]
# A norm of each layer scales its update, which the state does not show.
_BY_LAYER = ("lamb", "lars")
_PROBE = (64, 128)  # large enough that bitsandbytes does not fall back to 32 bits


def make_optimizer(module: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> Optimizer:
    """Return the optimizer, or build it with the given function or with the LightningModule's own method.

    Raises:
        TypeError: there is neither an optimizer nor a LightningModule, or the function did not return an optimizer.
        ValueError: the LightningModule has several optimizers.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, NamedOptimizer):
        # Its parameter groups depend on the names of the parameters.
        return optimizer(module)
    way_out = "Give an optimizer, or a function: lambda parameters: torch.optim.AdamW(parameters)"
    if optimizer is not None:
        # On "meta" instead of fake tensors: some optimizers build lookup tables when constructed, which need values.
        made = optimizer(list(map(_make_meta, module.parameters())))
        if not isinstance(made, Optimizer):
            what = f"optimizer={optimizer!r}, which gives {type(made).__name__}"
            raise TypeError(explain(what, "an optimizer is needed", way_out))
        return made
    if not isinstance(module, L.LightningModule):
        why = "only a LightningModule has configure_optimizers"
        raise TypeError(explain(f"{type(module).__name__} without optimizer", why, way_out))
    optimizers, _ = configured_optimizers(module)
    if len(optimizers) != 1:
        what = f"{type(module).__name__} with {len(optimizers)} optimizers"
        raise ValueError(explain(what, "a sharding engine supports one", "Give the one to be sharded as optimizer="))
    return optimizers[0]


def _make_meta(parameter: Tensor) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update changes when parameters are flattened and sharded.

    Raises:
        ValueError: the optimizer's update would change; says why.
    """
    name = type(optimizer).__name__
    why = _unshardable_because(optimizer)
    if why is not None:
        way_out = "Use an elementwise optimizer (AdamW, SGD, Lion, AdamW8bit), or DDP (stage 0)"
        raise ValueError(explain(f"{name} with ZeRO", f"{why}, and ZeRO gives it flat shards of many layers", way_out))


def _unshardable_because(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, HostOptimizer):
        return "its copy of the weights in host memory would be that of whole layers"
    if any(word in type(optimizer).__name__.lower() for word in _BY_LAYER):
        return "it scales each layer's update by that layer's norm"
    for group in groups_of(optimizer):
        try:
            # An elementwise optimizer keeps as much state for a matrix as for the same matrix flattened.
            in_shape = state_bytes(optimizer, group, [_PROBE], torch.float32)
            flat = state_bytes(optimizer, group, [(math.prod(_PROBE),)], torch.float32)
        except ValueError as error:
            return f"it makes no step on a shard of a layer ({error.__cause__})"
        if in_shape != flat:
            return "its state depends on the shape of a matrix"
    return None


MASTER = 4  # bytes per element of the float32 master weights that the optimizer updates


@check_arguments
@dataclass(frozen=True)
class ZeROSizes:
    """Sizes of DeepSpeed's buckets and buffers, in elements.

    Args:
        reduce_bucket: gradients reduced at once; one buffer at stage 3, two below.
        prefetch: parameters gathered ahead of use, stage 3.
        persistence: parameters up to this size stay unsharded on every rank, stage 3.
        reuse: gathered parameters are kept if they are used again within this many elements, stage 3.
        sub_group: parameters that are updated at once, stage 3 with NVMe offload.

    Example:
        >>> ZeROSizes().as_config()["reduce_bucket_size"]
        200000000
    """

    reduce_bucket: NonNegativeInt = 200_000_000  # Lightning's default; the others are DeepSpeed's
    prefetch: NonNegativeInt = 50_000_000
    persistence: NonNegativeInt = 100_000
    reuse: NonNegativeInt = 1_000_000_000
    sub_group: NonNegativeInt = 1_000_000_000

    def as_config(self) -> dict[str, int]:
        """Return the entries for ``"zero_optimization"`` of a DeepSpeed config that sets these sizes."""
        return {
            "reduce_bucket_size": self.reduce_bucket,
            "stage3_prefetch_bucket_size": self.prefetch,
            "stage3_param_persistence_threshold": self.persistence,
            "stage3_max_reuse_distance": self.reuse,
            "sub_group_size": self.sub_group,
        }


def held_by(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None,
    world_size: int,
    precision: str,
) -> "Held":
    """Measure a model as DeepSpeed holds it: in bfloat16 under "bf16-mixed" too.

    Args:
        module: the model, or a function that builds it.
        optimizer: the optimizer, or a function of the parameters that makes it, or None for the LightningModule's own.
        world_size: number of ranks.
        precision: Lightning's name of the precision.

    Raises:
        TypeError: ``module`` is not a model, or there is no optimizer.
        ValueError: the world size is below one, the precision is unknown, or no parameter trains.
    """
    one_of("precision", precision, tuple(PRECISIONS))
    # An existing optimizer holds the real parameters; one that is still to be made gets fake parameters.
    if isinstance(module, nn.Module) and isinstance(optimizer, Optimizer):
        net = module
    else:
        net = fake_module(module, FakeMode())
    return Held(net, make_optimizer(net, optimizer), world_size, precision != "32-true")


class Held:
    """Sizes of a model and its optimizer over a number of ranks, in bytes and elements."""

    def __init__(self, net: nn.Module, optimizer: Optimizer, ranks: int, low_precision: bool) -> None:
        self.net, self.ranks, self.low = net, ranks, low_precision
        self.optimizer, self.groups = optimizer, groups_of(optimizer)
        self.parameters = list(net.parameters())
        self._uses = count_uses(net)
        self.trained = sum(group.numel for group in self.groups)
        self.size = 2 if low_precision else self.groups[0].dtype.itemsize
        self.parameter_bytes = sum(map(self._bytes, self.parameters))
        self.buffer_bytes = sum(map(self._bytes, net.buffers())) + _constants(net)
        self.largest = max(math.prod(shape) for group in self.groups for shape in group.shapes)

    def as_torch_does(self, precision: str) -> "Held":
        """Return the sizes as DDP and FSDP2 hold the model: in float32 under "bf16-mixed"."""
        return Held(self.net, self.optimizer, self.ranks, precision == "bf16-true")

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * self.itemsize(tensor)

    def itemsize(self, tensor: Tensor) -> int:
        return self._cast(tensor.dtype).itemsize

    def dtype_of(self, group: Group) -> torch.dtype:
        """Return the dtype that a parameter group computes in."""
        return self._cast(group.dtype)

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        if self.low and dtype.is_floating_point:
            return torch.bfloat16
        return dtype

    def flat_shards(self) -> list[int]:
        """Return the elements of a rank's shard of each flat, padded group (stages 1 and 2)."""
        # DeepSpeed aligns each rank's shard to 2 elements (nccl_start_alignment_factor).
        return [ceil_div(group.numel, 2 * self.ranks) * 2 for group in self.groups]

    def parameter_shards(self) -> list[int]:
        """Return the elements of a rank's shard of each group, every parameter sharded and padded alone (stage 3)."""
        shards = []
        for group in self.groups:
            shards.append(sum(ceil_div(math.prod(shape), self.ranks) for shape in group.shapes))
        return shards

    def padding(self) -> int:
        """Return the bytes of padding in the flat parameters (stages 1 and 2)."""
        each = zip(self.flat_shards(), self.groups, strict=True)
        return self.size * sum(part * self.ranks - group.numel for part, group in each)

    def sharded_bytes(self) -> int:
        """Return the bytes of a rank's shard of all parameters, frozen ones included (stage 3)."""
        return sum(ceil_div(p.numel(), self.ranks) * self.itemsize(p) for p in self.parameters)

    def owned_bytes(self) -> int:
        """Return the bytes of unsharded gradients that the busiest rank keeps (stage 2).

        A rank keeps the complete gradient of every parameter that overlaps its shard.
        """
        most = [0] * self.ranks
        for part, group in zip(self.flat_shards(), self.groups, strict=True):
            start = 0
            for shape in group.shapes:
                end = start + math.prod(shape)
                # The ranks whose shard overlaps it; a parameter that crosses a boundary belongs to both.
                for rank in range(start // part, ceil_div(end, part)):
                    most[rank] += end - start
                start = end
        return max(most) * self.size

    def state(self, parts: Sequence[int]) -> int:
        """Return the bytes of optimizer state for flat float32 parameters of these sizes, one per group."""
        each = zip(self.groups, parts, strict=True)
        return sum(state_bytes(self.optimizer, group, [(part,)], torch.float32) for group, part in each)

    def state_in_shape(self) -> int:
        """Return the bytes of optimizer state for the parameters in their own shapes."""
        nbytes = 0
        for group in self.groups:
            dtype = torch.float32 if self.low else group.dtype
            nbytes += state_bytes(self.optimizer, group, group.shapes, dtype)
        return nbytes

    def step_copy(self, parts: Sequence[int]) -> int:
        """Return the bytes of the step's copies of one group's gradients: flattened, and again in float32."""
        return max(parts) * (MASTER + (self.size if self.size != MASTER else 0))

    def gathered_bytes(self, sizes: ZeROSizes, offloaded: bool) -> tuple[int, int]:
        """Return the bytes of gathered parameters that stay on the device, and of those freed after use (stage 3)."""
        if self.ranks == 1 and not offloaded:
            return 0, 0  # the shard is the complete parameter
        others = self._passing_parameters(sizes)
        numels = list(map(Tensor.numel, others))
        # The largest parameter in use, and those prefetched.
        at_once = max(numels, default=0) + sizes.prefetch
        live = min(sum(numels), max(sizes.reuse // 2, at_once))
        widest = max(map(self.itemsize, others), default=0)
        return sum(map(self._bytes, self._staying_parameters(sizes))), live * widest

    def fetched_bytes(self, sizes: ZeROSizes) -> tuple[int, int]:
        """Return the bytes gathered after a step, and in each forward with its backward (stage 3)."""
        staying = once = again = numel = 0
        for parameter in self.parameters:
            padded = ceil_div(parameter.numel(), self.ranks) * self.ranks
            nbytes = padded * self.itemsize(parameter)
            if parameter.numel() <= sizes.persistence:
                staying += nbytes
                continue
            numel += padded
            once += nbytes
            # For each layer that uses it, once in forward and once in backward, unless it is kept in between.
            again += nbytes * (2 * self._uses[parameter] - 1)
        # A parameter is kept from forward to backward if fewer than `reuse` elements are used in between,
        # which holds for the last `reuse // 2` of them.
        kept = min(1.0, sizes.reuse // 2 / max(numel, 1))
        return staying, once + int((1 - kept) * again)

    def count_staying(self, sizes: ZeROSizes) -> int:
        """Return the number of parameters that each rank keeps whole (stage 3)."""
        return len(self._staying_parameters(sizes))

    def _staying_parameters(self, sizes: ZeROSizes) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.numel() <= sizes.persistence]

    def _passing_parameters(self, sizes: ZeROSizes) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.numel() > sizes.persistence]


def ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)


def _constants(net: nn.Module) -> int:
    """Return the bytes of quantization constants, which every rank holds."""
    found: set[Tensor] = set()  # tensors hash by identity
    for layer in net.modules():
        weight: Any = layer._parameters.get("weight")
        if is_quantized(layer) and not weight.is_floating_point():
            found.update(without(quantization_of(layer), ["weight"]).values())
    return bytes_of(found)


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
    if set(stages) - {"0"}:
        refuse_unshardable(held.optimizer)
    sizes = sizes or usual_sizes(held)
    return [_PREDICT[stage](held, sizes) for stage in stages]


def usual_sizes(held: Held) -> ZeROSizes:
    """Return Lightning's and DeepSpeed's default sizes, with a reduce bucket no larger than the trained parameters."""
    return ZeROSizes(reduce_bucket=min(ZeROSizes.reduce_bucket, held.trained))


@dataclass(frozen=True)
class ZeROStage:
    """A stage of ZeRO, as :func:`~lightning_fasttrain.predict_memory` takes it; it needs no DeepSpeed.

    It does not check whether the optimizer supports flat shards, which its users do once for all stages.

    Args:
        stage: one of :data:`STAGES`.
        sizes: bucket sizes; None for the usual ones.
    """

    stage: str
    sizes: ZeROSizes | None = None

    def predict_rank_states(self, model: nn.Module, optimizer: Optimizer, world: int, precision: str) -> RankStates:
        """Return the states of one of ``world`` ranks."""
        held = held_by(model, optimizer, world, precision)
        sizes = self.sizes or usual_sizes(held)
        states = _PREDICT[self.stage](held, sizes)
        in_backward, in_step = _split_buffers(held, states, sizes)
        gradients = states.gradients
        # Unsharded gradients in the bucket that is being filled, which are freed when it is reduced.
        waiting = min(held.trained, sizes.reduce_bucket) * held.size
        if self.stage == "2":
            gradients = min(held.trained * held.size, gradients + waiting)
        elif self.stage == "3":
            in_backward += waiting
        share = 1 / world
        if self.stage == "0":
            share = 1.0
        elif "+" in self.stage:
            share = 0.0  # the step runs in host memory
        return RankStates(
            states.parameters,
            gradients,
            states.optimizer,
            in_backward,
            in_step,
            step_share=share,
            gathers=self.stage.startswith("3"),
            host=states.host,
            nvme=states.nvme,
            traffic=self._find_traffic(held, sizes),
        )

    def _find_traffic(self, held: Held, sizes: ZeROSizes) -> RankTraffic:
        if self.stage == "0":
            return RankTraffic(_ALL_REDUCE_BUCKET * held.size)
        bucket = max(sizes.reduce_bucket, 1) * held.size
        if self.stage.startswith("3"):
            staying, fetched = held.fetched_bytes(sizes)
            return RankTraffic(
                bucket,
                each_micro_batch=True,
                scatters=True,
                fetched=fetched,
                prefetch=max(sizes.prefetch, 1) * held.size,
                updated=staying,
                modules=sum(1 for _ in held.net.modules()),
                updates=held.count_staying(sizes),
            )
        return RankTraffic(bucket, self.stage != "1", updated=sum(held.flat_shards()) * held.ranks * held.size)


def _split_buffers(held: Held, states: ModelStates, sizes: ZeROSizes) -> tuple[int, int]:
    """Return the bytes of ``states.buffers`` in forward and backward, and those in the optimizer step."""
    bucket = sizes.reduce_bucket * held.size
    if states.stage in ("1", "2"):
        return 2 * bucket, held.step_copy(held.flat_shards())
    if states.stage == "3":
        _, passing = held.gathered_bytes(sizes, offloaded=False)
        shards = held.parameter_shards()
        return bucket + passing, bucket + held.step_copy([min(max(shards), sizes.sub_group)])
    return states.buffers, states.buffers


def _stage_0(held: Held, sizes: ZeROSizes) -> ModelStates:
    masters = held.trained * MASTER if held.low else 0
    bucket = min(held.trained, _ALL_REDUCE_BUCKET) * held.size if held.ranks > 1 else 0
    return ModelStates(
        "0",
        parameters=held.parameter_bytes + held.buffer_bytes,
        gradients=held.trained * held.size,
        optimizer=masters + held.state_in_shape(),
        buffers=max(bucket, masters),
    )


def _stage_1_or_2(held: Held, sizes: ZeROSizes, stage: str) -> ModelStates:
    parts = held.flat_shards()
    return ModelStates(
        stage,
        parameters=held.parameter_bytes + held.padding() + held.buffer_bytes,
        gradients=held.owned_bytes() if stage == "2" else held.trained * held.size,
        optimizer=sum(parts) * MASTER + held.state(parts),
        # Buckets are freed before the step.
        buffers=max(2 * sizes.reduce_bucket * held.size, held.step_copy(parts)),
    )


def _stage_2_offload(held: Held, sizes: ZeROSizes) -> ModelStates:
    parts = held.flat_shards()
    return ModelStates(
        "2+offload",
        parameters=held.parameter_bytes + held.padding() + held.buffer_bytes,
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
        parameters=held.sharded_bytes() + staying + held.buffer_bytes,
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
    host, nvme = held.sharded_bytes() + total * held.size + updated, 0
    if stage == "3+nvme":
        kept = min(total, _PARAMETERS_IN_HOST)
        swap = _SWAP_BUFFERS * min(max(parts), sizes.sub_group) * MASTER
        host = (kept + _PARAMETER_SWAP + total) * held.size + swap
        nvme = held.sharded_bytes() + updated
    return ModelStates(
        stage,
        parameters=staying + held.buffer_bytes,
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
