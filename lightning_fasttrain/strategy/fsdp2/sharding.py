"""Common part of the Trainer's and Fabric's FSDP2 strategies: options, device mesh, process groups, checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.distributed import from_rank_zero
from lightning_fasttrain.core.files.background_save import BackgroundSave
from lightning_fasttrain.core.files.newest_checkpoint import whole_or_older
from lightning_fasttrain.core.files.run_mark import KEY, mark_of, step_in
from lightning_fasttrain.core.files.safe_load import local_path
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.strategy.fsdp2._packed_weights import is_opaque
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import (
    leave_to_rank_zero,
    send_from_rank_zero_,
    whole_on_rank_zero,
)
from lightning_fasttrain.strategy.fsdp2.shard_blocks import OFFLOADS, precision_policy, shard_blocks_
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import (
    NamesToLoad,
    load_full_,
    load_sharded_,
    save_sharded,
)
from lightning_fasttrain.strategy.rank_health import RollCall, own_group

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


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
        # Collected now, since after sharding no rank has unsharded weights.
        whole = whole_on_rank_zero(model)
        # FSDP2 does not move quantised layers and their constants.
        for module in model.modules():
            quantised = [p for p in module.parameters(recurse=False) if is_opaque(p)]
            # Meta tensors have no values to move.
            if quantised and not any(p.is_meta for p in quantised):
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


class FSDP2Host:
    """Base of the Trainer's and Fabric's FSDP2 strategies, which inherit it before Lightning's own class."""

    strategy_name: ClassVar[str] = "fasttrain_fsdp2"
    # Of the arguments of Lightning's FSDPStrategy and ModelParallelStrategy.
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "sharding_strategy": "reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP",
        "cpu_offload": "offload='cpu'",
        "auto_wrap_policy": "blocks=",
        "mixed_precision": "Trainer(precision='bf16-mixed') and reduce_dtype=",
        "activation_checkpointing": "the technique ActivationCheckpointing() beside the strategy",
        "activation_checkpointing_policy": "the technique ActivationCheckpointing() beside the strategy",
        "state_dict_type": "full_state_dict(folder) to read the sharded checkpoints that it writes",
        "device_mesh": "replicas=",
        "data_parallel_size": "replicas=",
    }

    def _set_options(self, sharding: Sharding, broadcast_buffers: bool, async_checkpoints: bool) -> None:
        self.sharding = sharding
        self.broadcast_buffers = broadcast_buffers
        self.async_checkpoints = async_checkpoints
        self.sharded_blocks: list[str] = []
        self.roll_call = RollCall(None)
        self._saving: dist.ProcessGroup | None = None
        self._background: BackgroundSave | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        # A wrong number of processes is refused before any process waits for another.
        self.sharding.shape(self.num_nodes * self.num_processes)
        self._process_group_backend = self._process_group_backend or self.sharding.backend(self.parallel_devices[0])
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        self._device_mesh = self.sharding.mesh(self.root_device, self.world_size)
        # Two groups: collectives of a background save must not mix with those of the training thread's health check.
        self.roll_call, self._saving = RollCall(own_group(self._timeout)), own_group(self._timeout)
        if self.async_checkpoints and self._background is None:
            self._background = BackgroundSave(self._write)

    def _write(self, path: Path, *states: Any) -> None:
        save_sharded(path, *states, group=self._saving)

    def _save(
        self,
        path: str | Path,
        model: nn.Module,
        state: Mapping[str, Any],
        optimizers: Mapping[str, Mapping[str, Any]],
        rest: dict[str, Any],
    ) -> None:
        # Rank zero's path for all: one with a time in it may differ.
        path = local_path(self.broadcast(path))
        rest[KEY] = mark_of(self).facts(step_in(rest))
        states = (leave_to_rank_zero(state, model), optimizers, rest)
        if self._background is not None:
            self._background.start(path, *states)
        else:
            self._write(path, *states)

    def _load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        *,
        substitute: bool,
        strict: bool,
        names: NamesToLoad | None = None,
    ) -> dict[str, Any]:
        self.wait()  # the checkpoint to load may still be in flight
        # One rank alone reads the files for their checksums, so that a shared disk is read once.
        found = from_rank_zero(lambda: whole_or_older(path, substitute=substitute))
        load = load_sharded_ if found.is_dir() else load_full_
        rest = load(found, model, optimizers, strict=strict, names=names)
        mark_of(self).continue_from(rest.pop(KEY, None))
        return rest

    def wait(self) -> None:
        """Wait until no checkpoint is being written, and raise the error of the last save, if any."""
        if self._background is not None:
            self._background.wait()
