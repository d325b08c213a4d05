"""Do the nodes see each other? Run it the way you will run your training, before you spend hours on that.

torchrun --nproc-per-node=2 examples/cluster/hello.py

Every rank says where it is; rank zero names the ranks that did not come. Then numbers are sent around, with a deadline,
once over gloo and, where there are GPUs, once over NCCL, and the speed of each is printed.
"""

import argparse
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
ADVICE = {
    "rendezvous": "Is MASTER_ADDR a name that every node resolves to rank zero's address, and is MASTER_PORT open?",
    "gloo": "Name the network interface on every node: GLOO_SOCKET_IFNAME=eth0 (`ip -brief address` lists them).",
    "nccl": "NCCL_SOCKET_IFNAME=eth0 names the interface, NCCL_DEBUG=INFO says which one was taken.",
}


def environment(name, default=None):
    return os.environ.get(name) or os.environ.get(SLURM.get(name, name)) or default


def meet(rank, world_size, timeout):
    """Every rank writes its name where rank zero keeps the books; rank zero reads who came."""
    address, port = environment("MASTER_ADDR", "127.0.0.1"), int(environment("MASTER_PORT", "29500"))
    store = dist.TCPStore(
        address,
        port,
        is_master=rank == 0 and environment("TORCHELASTIC_USE_AGENT_STORE") != "True",  # torchrun keeps it itself
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    store = dist.PrefixStore("hello", store)
    store.set(f"here/{rank}", f"{socket.gethostname()} {address_of_this_host()}")
    if rank == 0:
        deadline, there = time.monotonic() + timeout, {}
        while len(there) < world_size and time.monotonic() < deadline:
            there |= {r: store.get(f"here/{r}").decode() for r in range(world_size) if store.check([f"here/{r}"])}
            time.sleep(0.1)
        for r, where in sorted(there.items()):
            print(f"rank {r}: {where}", flush=True)
        missing = [r for r in range(world_size) if r not in there]
        if missing:
            raise TimeoutError(f"ranks {missing} did not come within {timeout:g} s")
        store.set("all", "here")
    store.wait(["all"], timedelta(seconds=2 * timeout))
    return store


def address_of_this_host():
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"(its name does not resolve: {error})"


def send_around(backend, store, rank, world_size, timeout, mib=8):
    """Sum numbers over all ranks and check the sum; MiB/s that each rank sends."""
    local = int(environment("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(backend, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    numbers = torch.full((mib * 2**18,), float(rank), device=device)
    dist.all_reduce(numbers.clone())
    start = time.perf_counter()
    dist.all_reduce(numbers)
    total = numbers[0].item()
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    assert total == world_size * (world_size - 1) / 2, total
    return mib * 2 * (world_size - 1) / world_size / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the others; default: 60")
    timeout = parser.parse_args().timeout
    rank, world_size = int(environment("RANK", "0")), int(environment("WORLD_SIZE", "1"))
    stage = "rendezvous"
    try:
        store = meet(rank, world_size, timeout)
        for stage in ["gloo"] + ["nccl"] * (torch.cuda.is_available() and dist.is_nccl_available()):
            speed = send_around(stage, store, rank, world_size, timeout)
            if rank == 0:
                print(f"{stage}: {world_size} ranks agree, {speed:,.0f} MiB/s", flush=True)
    except Exception as error:
        print(f"rank {rank} on {socket.gethostname()}: {stage} failed: {error}\n{ADVICE[stage]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
