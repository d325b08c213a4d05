"""Common part of the Trainer's and Fabric's FSDP2 strategies: options, device mesh, groups, gradients, checkpoints."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.checkpoint.background_save import BackgroundSave
from lightning_fasttrain.checkpoint.newest_checkpoint import KEY, mark_of, step_in, whole_or_older
from lightning_fasttrain.checkpoint.remote_checkpoint import fetched_on_each_node
from lightning_fasttrain.core.checks import NotACallback, one_of, positive_int
from lightning_fasttrain.core.distributed import from_rank_zero
from lightning_fasttrain.core.host.late_parameters import refuse_earlier_shards
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.parameters import local_part
from lightning_fasttrain.core.safe_load import is_object_storage, local_path
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import (
    any_meta,
    leave_to_rank_zero,
    send_from_rank_zero_,
    tensors_on_rank_zero,
)
from lightning_fasttrain.strategy.fsdp2.shard_blocks import (
    OFFLOADS,
    is_opaque,
    precision_policy,
    replicate_scalars_,
    shard_blocks_,
    without_gradient_reduction,
)
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import (
    NamesToLoad,
    load_full_,
    load_sharded_,
    save_sharded,
)
from lightning_fasttrain.strategy.tensor_parallel.context_parallel import divide_context_
from lightning_fasttrain.strategy.tensor_parallel.parallelize import compute_locally_, parallelize_
from lightning_fasttrain.strategy.tensor_parallel.plan import TensorPlan, common_divisors, plan_tensor_parallel
from lightning_fasttrain.technique import Capability

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass
class Sharding:
    """Options for sharding a model; see :class:`~lightning_fasttrain.FSDP2Strategy`.

    Example:
        >>> Sharding(replicas=2).shape(8), Sharding(tensor_parallel=2).shape(8), Sharding(context_parallel=2).shape(8)
        ((2, 4), (4, 2), (8,))
    """

    reshard_after_forward: bool | int = True
    offload: str | None = None
    replicas: int = 1
    blocks: Blocks | None = None
    reduce_dtype: str | None = None
    float32_residual: bool = False
    tensor_parallel: int = 1
    tensor_plan: TensorPlan | None = None
    sequence_parallel: bool = False
    context_parallel: int = 1

    def __post_init__(self) -> None:
        if self.offload is not None:
            one_of("offload", self.offload, OFFLOADS)
        positive_int("replicas", self.replicas)
        positive_int("tensor_parallel", self.tensor_parallel)
        positive_int("context_parallel", self.context_parallel)
        if not isinstance(self.reshard_after_forward, bool):
            positive_int("reshard_after_forward", self.reshard_after_forward)
        precision_policy(reduce_dtype=self.reduce_dtype)
        if self.sequence_parallel and self.tensor_parallel == 1:
            why = "the ranks of a tensor group share the tokens, and each group has one rank"
            raise ValueError(explain("sequence_parallel=True with tensor_parallel=1", why, "Give tensor_parallel=2"))
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            what = f"context_parallel={self.context_parallel} with tensor_parallel={self.tensor_parallel}"
            way_out = "Use one of them; tensor_parallel with sequence_parallel=True divides tokens too"
            raise ValueError(explain(what, "both divide the heads of attention over the ranks of a group", way_out))
        self.batch_group: dist.ProcessGroup | None = None

    def shape(self, world_size: int) -> tuple[int, ...]:
        """Return the shape of the mesh over ``world_size`` processes: (shards,), or also with replicas and tensor."""
        together = self.replicas * self.tensor_parallel
        if world_size % together:
            way_out = f"Use one of replicas={common_divisors([world_size])}"
            what = f"replicas={self.replicas}"
            if self.tensor_parallel > 1:
                what = f"{what} x tensor_parallel={self.tensor_parallel}"
                way_out = f"{way_out} and tensor_parallel, whose product divides {world_size}"
            why = "each replica of the model is sharded over the same number of processes"
            raise ValueError(explain(f"{what} over {world_size} processes", why, way_out))
        if world_size % self.ranks_per_batch:
            why = "each context group has the same number of ranks"
            way_out = f"Use one of context_parallel={common_divisors([world_size])}"
            raise ValueError(explain(f"{self.group_option} over {world_size} processes", why, way_out))
        return tuple(self._axes(world_size).values())

    def _axes(self, world_size: int) -> dict[str, int]:
        """Return the dimensions of the mesh; the ranks of a tensor group are neighbours, as within a node."""
        shards = world_size // (self.replicas * self.tensor_parallel)
        axes = {"replicate": self.replicas, "shard": shards, "tensor": self.tensor_parallel}
        return {name: size for name, size in axes.items() if size > 1 or name == "shard"}

    def mesh(self, device: torch.device, world_size: int) -> DeviceMesh:
        shape = self.shape(world_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(self._axes(world_size)))
        if mesh.ndim > 1 and self.tensor_parallel > 1:
            mesh._flatten()  # so that a norm over all dimensions is one reduction
        self.batch_group = None
        if self.tensor_parallel > 1:
            self.batch_group = mesh["tensor"].get_group()
        elif self.context_parallel > 1:
            # Parameters are sharded over all ranks, also over those of a context group.
            groups = (world_size // self.context_parallel, self.context_parallel)
            neighbours = init_device_mesh(device.type, groups, mesh_dim_names=("data", "context"))
            self.batch_group = neighbours.get_group("context")
        return mesh

    @property
    def ranks_per_batch(self) -> int:
        """Number of neighbouring ranks that compute one batch together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def group_option(self) -> str:
        """The option by which ranks compute one batch together, as users write it."""
        name = "context_parallel" if self.context_parallel > 1 else "tensor_parallel"
        return f"{name}={self.ranks_per_batch}"

    def data_ranks(self, world_size: int, rank: int) -> dict[str, int]:
        """Return arguments for a distributed sampler: ranks that compute one batch together get the same samples."""
        return {"num_replicas": world_size // self.ranks_per_batch, "rank": rank // self.ranks_per_batch}

    @property
    def splits_logits(self) -> bool:
        """Whether a layer of ``tensor_plan`` returns DTensors, of which ``loss_parallel`` computes the loss."""
        styles = (self.tensor_plan or {}).values()
        return any(getattr(style, "use_local_output", True) is False for style in styles)

    def backend(self, device: torch.device) -> str | None:
        """Return the process-group backend; under offload, norms of shards are reduced in host memory too."""
        if self.offload == "cpu" and device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
        return None

    def shard_(self, model: nn.Module, mesh: DeviceMesh, precision: object, device: torch.device) -> list[str]:
        """Shard ``model``, and give all ranks the weights of rank zero; a sharded model is not changed."""
        if isinstance(model, FSDPModule):
            return []
        refuse_earlier_shards(model)
        # Collected now, since after sharding no rank has unsharded weights.
        whole = tensors_on_rank_zero(model)
        names = self.shard_locally_(model, mesh, precision, device)
        send_from_rank_zero_(model, whole, device, torch.device("cpu") if self.offload else None)
        replicate_scalars_(model, device)  # those that were on the meta device are others now
        return names

    def shard_locally_(self, model: nn.Module, mesh: DeviceMesh, precision: object, device: torch.device) -> list[str]:
        """Shard ``model`` without communication: each rank keeps its part of its own values, if any."""
        policy = precision_policy(str(precision), self.reduce_dtype)
        # FSDP2 does not move quantised layers and their constants.
        for module in model.modules():
            quantised = list(filter(is_opaque, module.parameters(recurse=False)))
            # Meta tensors have no values to move.
            if quantised and not any_meta(quantised):
                module.to(device)
        data, layouts = mesh, None
        if self.tensor_parallel > 1:
            _refuse_quantised(model, self.tensor_parallel)
            data = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")]
            plan = plan_tensor_parallel(model, self.tensor_parallel, self.tensor_plan)
            layouts = parallelize_(model, mesh["tensor"], plan, self.sequence_parallel)
        elif self.context_parallel > 1:
            assert self.batch_group is not None
            divide_context_(model, self.batch_group)
        names = shard_blocks_(
            model,
            data,
            policy=policy,
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
            blocks=self.blocks,
            float32_residual=self.float32_residual,
        )
        if layouts is not None:
            compute_locally_(model, layouts, mesh["tensor"])
        return names


def _refuse_quantised(model: nn.Module, tensor_parallel: int) -> None:
    for name, parameter in model.named_parameters():
        if is_opaque(parameter):
            why = "the rows and columns of packed weights cannot be divided"
            way_out = "Use tensor_parallel=1, or LoRA() on an unquantised base"
            raise ValueError(explain(f"tensor_parallel={tensor_parallel} with the quantised '{name}'", why, way_out))


class FSDP2Host(NotACallback):
    """Base of the Trainer's and Fabric's FSDP2 strategies, which inherit it before Lightning's own class.

    For its arguments, see :class:`~lightning_fasttrain.FSDP2Strategy`.
    """

    where_to_use: ClassVar[str] = "It is a strategy: use Trainer(strategy=FSDP2Strategy())"
    reads_remote: ClassVar[bool] = True  # addresses, for which it copies a checkpoint once to each node
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.GATHERS_PARAMETERS})
    # Of the arguments of Lightning's FSDPStrategy and ModelParallelStrategy.
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "sharding_strategy": "reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP",
        "cpu_offload": "offload='cpu'",
        "auto_wrap_policy": "blocks=",
        "mixed_precision": "Trainer(precision='bf16-mixed') and reduce_dtype=",
        "activation_checkpointing": "the technique ActivationCheckpointing() beside the strategy",
        "activation_checkpointing_policy": "the technique ActivationCheckpointing() beside the strategy",
        "state_dict_type": "full_state_dict(folder) to read the sharded checkpoints that it writes",
        "device_mesh": "replicas=, tensor_parallel= and context_parallel=",
        "data_parallel_size": "tensor_parallel=",
        "tensor_parallel_size": "tensor_parallel=",
    }

    def __init__(
        self,
        reshard_after_forward: bool | int = True,
        *,
        offload: str | None = None,
        replicas: int = 1,
        blocks: Blocks | None = None,
        reduce_dtype: str | None = None,
        float32_residual: bool = False,
        tensor_parallel: int = 1,
        tensor_plan: TensorPlan | None = None,
        sequence_parallel: bool = False,
        context_parallel: int = 1,
        broadcast_buffers: bool = True,
        reduce_once: bool = True,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        of_lightning: dict[str, Any] = {"process_group_backend": process_group_backend, "timeout": timeout}
        super().__init__(**of_lightning)
        options = (reshard_after_forward, offload, replicas, blocks, reduce_dtype, float32_residual)
        self.sharding = Sharding(*options, tensor_parallel, tensor_plan, sequence_parallel, context_parallel)
        self.broadcast_buffers, self.reduce_once = broadcast_buffers, reduce_once
        self.async_checkpoints = async_checkpoints
        self.sharded_blocks: list[str] = []
        self._steps = ExitStack()  # removes what ``setup`` puts around the methods of a LightningModule
        self._saving: dist.ProcessGroup | None = None
        self._background: BackgroundSave | None = None

    def does(self, capability: Capability) -> bool:
        """Whether it has this capability, as techniques ask for in their conflicts."""
        return capability in self.capabilities

    def shard_predicted_(self, model: nn.Module, world: int, precision: str, step: str) -> None:
        """Shard ``model`` for :func:`~lightning_fasttrain.predict_memory`, as one of ``world`` ranks."""
        device, sharding = torch.device("cpu"), self.sharding_on_device
        sharding.shard_locally_(model, sharding.mesh(device, world), precision, device)
        register_fsdp_forward_method(model, step)

    @property
    def sharding_on_device(self) -> Sharding:
        """The sharding without offload, which decides a predicted step."""
        return replace(self.sharding, offload=None)

    @property
    def offloads(self) -> bool:
        """Whether shards are in host memory."""
        return self.sharding.offload is not None

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of all micro-batches but the last, in which gradients are summed unsharded."""
        return without_gradient_reduction(model) if self.reduce_once else nullcontext()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.sharding.data_ranks(self.world_size, self.global_rank)

    def setup_environment(self) -> None:
        # A wrong number of processes is refused before any process waits for another.
        self.sharding.shape(self.num_nodes * self.num_processes)
        self._process_group_backend = self._process_group_backend or self.sharding.backend(self.parallel_devices[0])
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        self._device_mesh = self.sharding.mesh(self.root_device, self.world_size)
        if self.async_checkpoints:
            # A group of its own, since its collectives must not mix with those of the training thread; and a new one
            # for each run, since a save may still be in flight when the next run starts.
            self._saving = dist.new_group(backend="gloo", timeout=self._timeout)
            self._background = self._background or BackgroundSave(self._write)

    def _agree_on_batch(self, batch: object = None) -> None:
        """Share the random state of ranks that compute one batch together; refuse batches that differ."""
        group = self.sharding.batch_group
        if group is not None:
            share_random_state_(group)
            refuse_other_batches(batch, group, self.root_device)

    def _write(self, path: Path | str, *states: Any) -> None:
        save_sharded(path, *states, group=self._saving)

    def _save(
        self,
        path: str | Path,
        model: nn.Module,
        state: Mapping[str, object],
        optimizers: Mapping[str, Mapping[str, object]],
        rest: dict[str, Any],
    ) -> None:
        # Not Lightning's own saving, which writes into the final folder: a run that is killed would leave half of it.
        # Rank zero's path for all: one with a time in it may differ.
        path = self.broadcast(path)
        path = str(path) if is_object_storage(path) else local_path(path)
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
        with ExitStack() as undo:
            if is_object_storage(path):
                found = undo.enter_context(fetched_on_each_node(str(path)))
            else:
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


def scale_gradients_(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients of sharded and of replicated parameters by ``factor``."""
    # Offloaded gradients are in host memory, those of parameters without a dimension on the device.
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            # This rank's part of each, since shards on different meshes cannot be multiplied in one call.
            mine = local_part(parameter.grad)
            by_device[mine.device].append(mine)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def share_random_state_(group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the random state of its first rank, so that they drop the same activations.

    Args:
        group: a tensor group.
    """
    if group.size() == 1:
        return
    states = [random_state()]
    dist.broadcast_object_list(states, group=group, group_src=0)
    set_random_state(states[0])


def refuse_other_batches(batch: object, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse batches that differ in a tensor group; a collective.

    Args:
        batch: this rank's batch, of any structure; only its tensors are compared, by number, size and sum.
        group: a tensor group.
        device: the device on which the group communicates.

    Raises:
        ValueError: on all ranks of the group, its ranks have different batches.
    """
    if group.size() == 1:
        return
    tensors = [leaf.detach() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    mine = torch.zeros(2, dtype=torch.float64, device=device)
    for place, tensor in enumerate(tensors, start=1):
        mine[0] += place * tensor.numel()
        # NaN in both batches is no difference.
        mine[1] += tensor.double().sum().nan_to_num()
    # The maximum of the negated values is the negated minimum, so one collective gives both.
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if not torch.equal(extremes[0], -extremes[1]):
        why = "the ranks of a group compute parts of the layers or of the tokens for the same batch"
        way_out = "Let the Trainer or Fabric set the sampler, or use strategy.distributed_sampler_kwargs for your own"
        raise ValueError(explain("the ranks of a tensor or context group have different batches", why, way_out))
