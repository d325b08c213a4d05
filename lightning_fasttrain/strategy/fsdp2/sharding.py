"""Options shared by the Trainer's and Fabric's FSDP2 strategies, the device mesh, and the sharding of a model."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.strategy.fsdp2._packed_weights import is_opaque
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import send_from_rank_zero_, whole_on_rank_zero
from lightning_fasttrain.strategy.fsdp2.shard_blocks import OFFLOADS, precision_policy, shard_blocks_


@dataclass
class Sharding:
    """Options for sharding a model; see :class:`~lightning_fasttrain.FSDP2Strategy`.

    Example:
        >>> Sharding(replicas=2).shape(8)
        (2, 4)
    """

    reshard_after_forward: bool | int = True
    offload: str | None = None
    replicas: int = 1
    blocks: Blocks | None = None
    reduce_dtype: str | None = None
    float32_residual: bool = False

    def __post_init__(self) -> None:
        if self.offload is not None:
            one_of("offload", self.offload, OFFLOADS)
        positive_int("replicas", self.replicas)
        if not isinstance(self.reshard_after_forward, bool):
            positive_int("reshard_after_forward", self.reshard_after_forward)
        precision_policy(reduce_dtype=self.reduce_dtype)

    def shape(self, world_size: int) -> tuple[int, ...]:
        """Return the shape of the mesh over ``world_size`` processes: (shards,), or (replicas, shards)."""
        if world_size % self.replicas:
            why = "each replica of the model is sharded over the same number of processes"
            way_out = f"Use one of replicas={[n for n in range(1, world_size + 1) if world_size % n == 0]}"
            raise ValueError(explain(f"replicas={self.replicas} over {world_size} processes", why, way_out))
        shards = world_size // self.replicas
        return (shards,) if self.replicas == 1 else (self.replicas, shards)

    def mesh(self, device: torch.device, world_size: int) -> DeviceMesh:
        shape = self.shape(world_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def backend(self, device: torch.device) -> str | None:
        """Return the process-group backend; under offload, norms of shards are reduced in host memory too."""
        return "cpu:gloo,cuda:nccl" if self.offload == "cpu" and device.type == "cuda" else None

    def shard_(self, model: nn.Module, mesh: DeviceMesh, precision: object, device: torch.device) -> list[str]:
        """Shard ``model``, and give all ranks the weights of rank zero; a sharded model is not changed."""
        policy = precision_policy(str(precision), self.reduce_dtype)
        if isinstance(model, FSDPModule):
            return []
        whole = whole_on_rank_zero(model)  # collected now: afterwards no rank has unsharded weights
        for module in model.modules():  # FSDP2 does not move quantised layers and their constants
            quantised = [p for p in module.parameters(recurse=False) if is_opaque(p)]
            if quantised and not any(p.is_meta for p in quantised):  # meta tensors have no values to move
                module.to(device)
        names = shard_blocks_(
            model,
            mesh,
            policy=policy,
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
            blocks=self.blocks,
            float32_residual=self.float32_residual,
        )
        send_from_rank_zero_(model, whole, device, torch.device("cpu") if self.offload else None)
        return names
