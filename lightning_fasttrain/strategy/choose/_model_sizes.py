"""What a model and its optimizer consist of, in bytes and elements, and how it is cut among ranks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.finetune.quantized._quantized_layer import is_quantized, quantization_of
from lightning_fasttrain.optim.named.state_bytes import Group, groups_of, state_bytes
from lightning_fasttrain.predict.fake_model import fake_module
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer, make_optimizer

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
MASTER = 4  # bytes of a number that the optimizer updates, float32


@dataclass(frozen=True)
class ZeROSizes:
    """The sizes, in elements, that decide what DeepSpeed keeps beside the model's states.

    Args:
        reduce_bucket: gradients reduced at once; one buffer, two below stage 3.
        prefetch: parameters gathered ahead, stage 3.
        persistence: parameters up to this size stay whole on every rank, stage 3.
        reuse: gathered parameters stay if they are used again within so many, stage 3.
        sub_group: parameters that are updated at once, stage 3 with disk.

    Example:
        >>> ZeROSizes().as_config()["reduce_bucket_size"]
        200000000
    """

    reduce_bucket: int = 200_000_000  # Lightning's default; the others are DeepSpeed's
    prefetch: int = 50_000_000
    persistence: int = 100_000
    reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000

    def as_config(self) -> dict[str, int]:
        """For ``"zero_optimization"`` in a DeepSpeed config, so that it keeps what was predicted."""
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
    """What is to be shared among ``world_size`` ranks, as DeepSpeed holds it: in bfloat16 under "mixed" too.

    Args:
        module: the model, or what builds it.
        optimizer: the one used, or what makes it of the parameters, or None for the LightningModule's own.
        world_size: ranks.
        precision: as Lightning means it.

    Raises:
        TypeError: no model, or no optimizer.
        ValueError: a world size below one, an unknown precision, nothing that trains.
    """
    positive_int("world_size", world_size)
    one_of("precision", precision, PRECISIONS)
    # An optimizer that exists knows what trains; one to be made gets parameters without memory.
    if isinstance(module, nn.Module) and isinstance(optimizer, Optimizer):
        net = module
    else:
        net = fake_module(module, FakeTensorMode(allow_non_fake_inputs=True))
    return Held(net, make_optimizer(net, optimizer), world_size, precision != "32-true")


class Held:
    """What a model and its optimizer consist of, in bytes and elements."""

    def __init__(self, net: nn.Module, optimizer: Optimizer, ranks: int, low_precision: bool) -> None:
        self.net, self.ranks, self.low = net, ranks, low_precision
        self.optimizer, self.groups = optimizer, groups_of(optimizer)
        self.parameters = list(net.parameters())
        self._uses = Counter(p for module in net.modules() for p in module.parameters(recurse=False))
        self.trained = sum(group.numel for group in self.groups)
        self.size = 2 if low_precision else self.groups[0].dtype.itemsize
        self.whole = sum(map(self._bytes, self.parameters))
        self.extras = sum(map(self._bytes, net.buffers())) + _constants(net)
        self.largest = max(math.prod(shape) for group in self.groups for shape in group.shapes)

    def as_torch_does(self, precision: str) -> "Held":
        """The same, as DDP and FSDP2 hold it: under "bf16-mixed" in float32."""
        return Held(self.net, self.optimizer, self.ranks, precision == "bf16-true")

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * self.itemsize(tensor)

    def itemsize(self, tensor: Tensor) -> int:
        return 2 if self.low and tensor.is_floating_point() else tensor.dtype.itemsize

    def dtype_of(self, group: Group) -> torch.dtype:
        """What a group computes in."""
        return torch.bfloat16 if self.low and group.dtype.is_floating_point else group.dtype

    def flat_parts(self) -> list[int]:
        """Stages 1 and 2: elements of a rank's part of each group, whose parameters lie end to end, padded."""
        # DeepSpeed aligns each rank's part to 2 elements (nccl_start_alignment_factor).
        return [ceil_div(group.numel, 2 * self.ranks) * 2 for group in self.groups]

    def pieces(self) -> list[int]:
        """Stage 3: elements of a rank's part of each group, every parameter of which is cut and padded by itself."""
        pieces = []
        for group in self.groups:
            pieces.append(sum(ceil_div(math.prod(shape), self.ranks) for shape in group.shapes))
        return pieces

    def padding(self) -> int:
        """Stages 1 and 2: bytes by which the flat parameters are longer than what is in them."""
        each = zip(self.flat_parts(), self.groups, strict=True)
        return self.size * sum(part * self.ranks - group.numel for part, group in each)

    def cut(self) -> int:
        """Stage 3: bytes of a rank's part of all parameters, frozen ones too."""
        return sum(ceil_div(p.numel(), self.ranks) * self.itemsize(p) for p in self.parameters)

    def owned_bytes(self) -> int:
        """Stage 2: bytes of gradients of all parameters that a rank has a part of, whole, for the busiest rank."""
        most = [0] * self.ranks
        for part, group in zip(self.flat_parts(), self.groups, strict=True):
            start = 0
            for shape in group.shapes:
                end = start + math.prod(shape)
                # The ranks whose part has a piece of it; one that is cut by a boundary belongs to both.
                for rank in range(start // part, ceil_div(end, part)):
                    most[rank] += end - start
                start = end
        return max(most) * self.size

    def state(self, parts: Sequence[int]) -> int:
        """Bytes of optimizer state about flat float32 parameters of these sizes, a group each."""
        each = zip(self.groups, parts, strict=True)
        return sum(state_bytes(self.optimizer, group, [(part,)], torch.float32) for group, part in each)

    def state_in_shape(self) -> int:
        """Bytes of optimizer state about the parameters as they are."""
        nbytes = 0
        for group in self.groups:
            dtype = torch.float32 if self.low else group.dtype
            nbytes += state_bytes(self.optimizer, group, group.shapes, dtype)
        return nbytes

    def step_copy(self, parts: Sequence[int]) -> int:
        """Bytes of one group's gradients made flat for the step, and again in float32."""
        return max(parts) * (MASTER + (self.size if self.size != MASTER else 0))

    def gathered_bytes(self, sizes: ZeROSizes, offloaded: bool) -> tuple[int, int]:
        """Stage 3: bytes of whole parameters that stay on the device, and of those that come and go."""
        if self.ranks == 1 and not offloaded:
            return 0, 0  # the part is the whole
        others = self._passing_parameters(sizes)
        # The largest in use, and what is fetched ahead.
        at_once = max((p.numel() for p in others), default=0) + sizes.prefetch
        live = min(sum(p.numel() for p in others), max(sizes.reuse // 2, at_once))
        widest = max(map(self.itemsize, others), default=0)
        return sum(map(self._bytes, self._staying_parameters(sizes))), live * widest

    def fetched_bytes(self, sizes: ZeROSizes) -> tuple[int, int]:
        """Stage 3: bytes gathered after a step, and in each forward with its backward."""
        passing, staying = self._passing_parameters(sizes), self._staying_parameters(sizes)
        padded = {p: ceil_div(p.numel(), self.ranks) * self.ranks for p in self.parameters}
        numel = sum(padded[p] for p in passing)
        # A parameter stays from forward to backward if fewer than `reuse` are used between, so the last half of it.
        kept = min(1.0, sizes.reuse // 2 / max(numel, 1))
        # Otherwise it is gathered for each layer that uses it, once in forward and once in backward.
        again = sum(padded[p] * self.itemsize(p) * (2 * self._uses[p] - 1) for p in passing)
        once = sum(padded[p] * self.itemsize(p) for p in passing)
        return sum(padded[p] * self.itemsize(p) for p in staying), once + int((1 - kept) * again)

    def _staying_parameters(self, sizes: ZeROSizes) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.numel() <= sizes.persistence]

    def _passing_parameters(self, sizes: ZeROSizes) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.numel() > sizes.persistence]


def ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)


def _constants(net: nn.Module) -> int:
    """Bytes of what belongs to quantised weights, and is on every rank."""
    found: dict[int, Tensor] = {}
    for layer in net.modules():
        weight: Any = layer._parameters.get("weight")
        if is_quantized(layer) and not weight.is_floating_point():
            found |= {id(t): t for name, t in quantization_of(layer).items() if name != "weight"}
    return sum(tensor.nbytes for tensor in found.values())
