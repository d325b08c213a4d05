"""Run by two processes under torchrun (see test_traffic.py): what engines really hold and send."""

import json
import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_fasttrain.strategy.zero.zero_states import ZeROSizes

VOCAB, WIDTH, HIDDEN = 211, 60, 133  # the number of parameters is odd


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Three blocks, a frozen layer and a tied head; its parameters do not divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def adam(net, kind=torch.optim.AdamW):
    """Two groups, as is usual: biases do not decay."""
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}]
    return kind(groups, lr=1e-3)


def optimizer_for(name, net):
    """The optimizer of a scenario."""
    if not name.endswith("8bit"):
        return adam(net)
    import bitsandbytes

    return adam(net, bitsandbytes.optim.AdamW8bit)


SMALL = ZeROSizes(reduce_bucket=100_000, prefetch=0, persistence=0, reuse=0)
USUAL = ZeROSizes(reduce_bucket=100_000, persistence=500)
ZERO = {  # what it is called → stage, precision, sizes, micro-batches
    **{f"zero-{s} {p}": (s, p, SMALL, 1) for s in ("0", "1", "2", "3") for p in ("32-true", "bf16-true")},
    "zero-3 usual": ("3", "32-true", USUAL, 2),
    "zero-3 between": ("3", "32-true", ZeROSizes(100_000, prefetch=0, persistence=0, reuse=50_000), 1),
    "zero-1 twice": ("1", "32-true", SMALL, 2),
    "zero-2 twice": ("2", "32-true", SMALL, 2),
    "zero-2 8bit": ("2", "32-true", SMALL, 1),
    "zero-3 8bit": ("3", "bf16-true", SMALL, 1),
    "zero-2+offload 32-true": ("2+offload", "32-true", SMALL, 1),
    "zero-2+offload bf16-true": ("2+offload", "bf16-true", SMALL, 1),
    "zero-3+offload 32-true": ("3+offload", "32-true", SMALL, 1),
    "zero-3+offload bf16-true": ("3+offload", "bf16-true", SMALL, 1),
}


class Collectives(TorchDispatchMode):
    """Sums the bytes of collectives: what each rank would send if all were done in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.scattered = 0.0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            n, name = dist.get_world_size(), func._schema.name.removeprefix("c10d::").strip("_")
            share = (n - 1) / n
            if name == "allreduce":
                self.sent += 2 * share * nbytes(args[0])
            elif name in ("allgather_base", "allgather", "allgather_into_tensor_coalesced"):
                self.sent += share * nbytes(args[0])
            elif name in ("reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced"):
                self.sent += share * nbytes(args[1])
                self.scattered += share * nbytes(args[1])
            elif name == "broadcast":
                self.sent += share * nbytes(args[0])
            else:
                assert name in ("barrier", "monitored_barrier"), name
        return func(*args, **(kwargs or {}))


def nbytes(things):
    return sum(t.nbytes for t in tree_iter(things) if isinstance(t, torch.Tensor))


def on_the_wire():
    """Return the bytes that this process has sent over all its TCP connections, as counted by Linux since 4.19."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        if not os.readlink(entry.path).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                total += sent - again
    return total


def held(things):
    """Return the bytes of the storages of these tensors, each counted once."""
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in things if t is not None}
    return sum(pieces.values())


def batch():
    g = torch.Generator().manual_seed(5 + dist.get_rank())
    return torch.randint(VOCAB, (4, 7), generator=g), torch.randint(VOCAB, (4, 7), generator=g)


def loss_of(net, ids, targets):
    return F.cross_entropy(net(ids).flatten(0, 1).float(), targets.flatten())


def counted(step):
    """Return what one step sends, after two uncounted steps in which engines learn the order of layers."""
    step(), step()
    dist.barrier()
    before = on_the_wire()
    with Collectives() as collectives:
        step()
    dist.barrier()  # flushes pending sends
    wire = on_the_wire() - before
    return {"sent": collectives.sent, "scattered": collectives.scattered, "wire": wire}


def zero(name, stage, precision, sizes, micro_batches):
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    net = Net()
    level, _, away = stage.partition("+")
    section = {"stage": int(level), "overlap_comm": True, "contiguous_gradients": True, **sizes.as_config()}
    if away:
        section["offload_optimizer"] = {"device": "cpu"}
    if stage == "3+offload":
        section["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision != "32-true"},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer_for(name, net), config=config)
    seen = {}

    def step():
        for _ in range(micro_batches):
            engine.backward(loss_of(engine, *batch()))
            if engine.is_gradient_accumulation_boundary():
                seen["gradients"] = held(gradients(engine, level))
                seen["buckets"] = held(buckets(engine, level))
            elif "first gradients" not in seen:
                seen["first gradients"] = held(gradients(engine, level))
            engine.step()

    sent = counted(step)
    parameters = list(net.parameters())
    optimizer = engine.optimizer
    if level == "3":
        states = [*optimizer.fp32_partitioned_groups_flat, *states_of(optimizer.optimizer)]
        kept = [p.ds_tensor for p in parameters]
    else:
        kept = parameters
        masters = getattr(optimizer, "single_partition_of_fp32_groups", getattr(optimizer, "fp32_groups", []))
        states = [*tree_iter(masters), *states_of(getattr(optimizer, "optimizer", optimizer))]
    seen["parameters"] = held(kept)
    seen["whole"] = held(p.data for p in parameters) if level == "3" else 0
    seen["buckets in step"] = held(buckets(engine, level))
    seen["optimizer"] = held(states) - (held(kept) - held(k for k in kept if not _in(k, states)))
    if away:
        seen["host gradients"] = held(t.grad for t in states if t.is_leaf)
        seen["host more"] = held(
            [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_cpu_offload]
            if level == "2"
            else [optimizer.grad_partitions_flat_buffer]
        )
    engine.destroy()
    return {**sent, **seen}


def _in(tensor, others):
    return tensor.untyped_storage().data_ptr() in {o.untyped_storage().data_ptr() for o in others}


def states_of(optimizer):
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def gradients(engine, level):
    """Return all gradient memory of the engine between backward and step, in buckets or out of them."""
    optimizer = engine.optimizer
    if level == "3":
        return [optimizer.grad_partitions_flat_buffer]
    kept = [p.grad for p in engine.module.parameters()]
    if level in "12":
        kept += [optimizer.grads_in_partition, *tree_iter(optimizer.averaged_gradients)]
        kept += [*tree_iter(optimizer.all_grad_tensors)]
    return [t for t in kept if isinstance(t, torch.Tensor)]


def buckets(engine, level):
    if level == "0":
        return []
    pairs = engine.optimizer.ipg_buckets.values()
    return [b for pair in pairs for b in tree_iter(pair.buffer) if isinstance(b, torch.Tensor)]


def ddp():
    torch.manual_seed(0)
    net = Net()
    net.register_buffer("seen", torch.zeros(500))
    wrapped, optimizer = DistributedDataParallel(net), adam(net)

    def step():
        optimizer.zero_grad()
        loss_of(wrapped, *batch()).backward()
        optimizer.step()

    found = counted(step)
    states = states_of(optimizer)
    kept = [*net.parameters(), *net.buffers()]
    return {
        **found,
        "parameters": held(kept),
        "optimizer": held(states),
        "gradients": held(p.grad for p in net.parameters()),
    }


def fsdp2(precision, micro_batches):
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    half = torch.bfloat16 if precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = adam(net)

    def step():
        optimizer.zero_grad()
        for i in range(micro_batches):
            net.set_requires_gradient_sync(i == micro_batches - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=half is not None):
                loss = loss_of(net, *batch())
            loss.backward()
        optimizer.step()

    found = counted(step)
    net.reshard()
    local = [p.to_local() for p in net.parameters()]
    return {
        **found,
        "parameters": held(local),
        "optimizer": sum(s.to_local().nbytes if s.ndim else s.nbytes for s in states_of(optimizer)),
        "gradients": held(p.grad.to_local() for p in net.parameters() if p.grad is not None),
    }


def main(path):
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
    dist.init_process_group("gloo")
    found = {name: zero(name, *asked) for name, asked in ZERO.items()}
    found["ddp"] = ddp()
    found["fsdp2 32-true"] = fsdp2("32-true", 1)
    found["fsdp2 bf16-mixed"] = fsdp2("bf16-mixed", 1)
    found["fsdp2 twice"] = fsdp2("32-true", 2)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(everyone, file)
    dist.barrier()
    time.sleep(1)
    os._exit(0)  # gloo's destructor can hang


if __name__ == "__main__":
    main(sys.argv[1])
