"""Sizes of a model, its activations and its optimizer, in bytes and elements, and how ranks shard them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from lightning_fasttrain.core.checks import NonNegativeInt, check_arguments, one_of
from lightning_fasttrain.core.modules.parameters import bytes_of, count_uses
from lightning_fasttrain.core.state.select_entries import without
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized, quantization_of
from lightning_fasttrain.optim.named.state_bytes import Group, groups_of, state_bytes
from lightning_fasttrain.predict.fake_model import fake_module
from lightning_fasttrain.predict.predict_memory import PRECISIONS, predict_memory
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer, make_optimizer

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
        net = fake_module(module, FakeTensorMode(allow_non_fake_inputs=True))
    return Held(net, make_optimizer(net, optimizer), world_size, precision != "32-true")


def predict_activations(
    module: nn.Module | Callable[[], nn.Module], batch: Any, precision: str, **settings: Any
) -> int:
    """Predict a step's peak bytes without parameters, gradients and optimizer state.

    Args:
        module, batch, precision: as for :func:`~lightning_fasttrain.predict_memory`.
        settings: further arguments of it.
    """

    def make(parameters: ParamsT) -> SGD:
        # Without momentum SGD has no state, so none is in the peak.
        return SGD(parameters, lr=0.0)

    report = predict_memory(module, batch, optimizer=make, precision=precision, **settings)
    if report.phase == "optimizer step":
        # The peak is in the optimizer step, after backward, where no activations are left.
        return report.peaks["activations"] + report.peaks["inputs"]
    states = ("parameters", "gradients", "optimizer state")
    return report.peak_bytes - sum(map(report.at_peak.__getitem__, states))


class Held:
    """Sizes of a model and its optimizer over a number of ranks, in bytes and elements."""

    def __init__(self, net: nn.Module, optimizer: Optimizer, ranks: int, low_precision: bool) -> None:
        self.net, self.ranks, self.low = net, ranks, low_precision
        self.optimizer, self.groups = optimizer, groups_of(optimizer)
        self.parameters = list(net.parameters())
        self._uses = count_uses(net)
        self.trained = sum(group.numel for group in self.groups)
        self.size = 2 if low_precision else self.groups[0].dtype.itemsize
        self.whole = sum(map(self._bytes, self.parameters))
        self.extras = sum(map(self._bytes, net.buffers())) + _constants(net)
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

    def cut(self) -> int:
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
