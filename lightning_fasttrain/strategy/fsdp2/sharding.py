"""What the FSDP2 strategies of both hosts have in common: their options, the mesh, and what is done to a model."""

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
    """How a model is sharded; see :class:`~lightning_fasttrain.FSDP2Strategy` for the options.

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
        """The mesh over so many processes: (shards,), or (replicas, shards)."""
        if world_size % self.replicas:
            why = "each replica of the model is sharded over equally many"
            way_out = f"Use one of replicas={[n for n in range(1, world_size + 1) if world_size % n == 0]}"
            raise ValueError(explain(f"replicas={self.replicas} over {world_size} processes", why, way_out))
        shards = world_size // self.replicas
        return (shards,) if self.replicas == 1 else (self.replicas, shards)

    def mesh(self, device: torch.device, world_size: int) -> DeviceMesh:
        shape = self.shape(world_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def backend(self, device: torch.device) -> str | None:
        """Where the host holds shards, norms are reduced over them there too."""
        return "cpu:gloo,cuda:nccl" if self.offload == "cpu" and device.type == "cuda" else None

    def shard_(self, model: nn.Module, mesh: DeviceMesh, precision: object, device: torch.device) -> list[str]:
        """Shard ``model``, and give all ranks the weights of rank zero; once sharded it is left as it is."""
        policy = precision_policy(str(precision), self.reduce_dtype)
        if isinstance(model, FSDPModule):
            return []
        whole = whole_on_rank_zero(model)  # taken now: afterwards no rank has whole weights
        for module in model.modules():  # quantised layers are left to us, with all that belongs to their weights
            quantised = [p for p in module.parameters(recurse=False) if is_opaque(p)]
            if quantised and not any(p.is_meta for p in quantised):  # on the meta device there is nothing to move
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
