"""A store in which the ranks of a launch meet before there is a process group."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_AGAIN_S = 0.02
_TURNS = 5


def environment(name: str, otherwise: str) -> str:
    """Return a variable as torchrun sets it, or SLURM under a name of its own."""
    return os.environ.get(name) or os.environ.get(_SLURM.get(name, name)) or otherwise


class ClusterStore:
    """Entries that each rank writes and rank 0 reads, and a clock that rank 0 tells.

    Args:
        rank: this rank, of ``world_size``.
        timeout_s: time to reach the store.

    Raises:
        RuntimeError, OSError: the store cannot be reached.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        limit = timedelta(seconds=timeout_s)
        if world_size == 1:
            self.store: Any = dist.HashStore()
            self.for_groups = self.store
            return
        address, port = environment("MASTER_ADDR", "127.0.0.1"), int(environment("MASTER_PORT", "29500"))
        # torchrun has a store there already.
        is_master = rank == 0 and environment("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
        self._server = dist.TCPStore(address, port, is_master=is_master, timeout=limit, wait_for_workers=False)
        self.store = dist.PrefixStore("fasttrain-cluster-check", self._server)
        # A connection of their own: one that waits is locked, and the thread that watches the deadline needs the other.
        client = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        self.for_groups = dist.PrefixStore("fasttrain-cluster-check-groups", client)

    def announce(self, stage: str) -> None:
        """Write which stage this rank has begun."""
        self.store.set(f"stage/{self.rank}", stage)

    def stages(self) -> Iterator[tuple[int, str]]:
        """Yield the stage of each rank."""
        for rank in range(self.world_size):
            if self.store.check([f"stage/{rank}"]):
                yield rank, self.store.get(f"stage/{rank}").decode()

    def collect(self, name: str, mine: Mapping[str, object], until: float) -> dict[int, dict[str, Any]]:
        """Write an entry; on rank 0 return those that are there by ``until``, on the others wait for rank 0."""
        self.store.set(f"{name}/{self.rank}", json.dumps(mine))
        if self.rank > 0:
            self._wait(f"{name}/all", until + 1)
            return {}
        there: dict[int, dict[str, Any]] = {}
        while len(there) < self.world_size and time.monotonic() < until:
            for rank in range(self.world_size):
                if rank not in there and self.store.check([f"{name}/{rank}"]):
                    there[rank] = json.loads(self.store.get(f"{name}/{rank}"))
            time.sleep(_AGAIN_S * (len(there) < self.world_size))
        if len(there) == self.world_size:
            self.store.set(f"{name}/all", "")
        return there

    def compare_clocks(self, asking: Sequence[int], until: float) -> float:
        """Return by how many seconds this clock is ahead of rank 0's; rank 0 answers those ``asking`` one by one."""
        if self.rank == 0:
            for rank in asking:
                for turn in range(_TURNS):
                    self._wait(f"ask/{rank}/{turn}", until)
                    self.store.set(f"now/{rank}/{turn}", repr(time.time()))
            return 0.0
        answers: list[tuple[float, float]] = []
        for turn in range(_TURNS):
            asked = time.time()
            self.store.set(f"ask/{self.rank}/{turn}", "")
            self._wait(f"now/{self.rank}/{turn}", until)
            answered = time.time()
            theirs = float(self.store.get(f"now/{self.rank}/{turn}"))
            answers.append((answered - asked, (asked + answered) / 2 - theirs))
        return min(answers)[1]  # of the quickest answer, whose error is smallest

    def _wait(self, key: str, until: float) -> None:
        # Not by the store's own wait, which locks it meanwhile.
        while not self.store.check([key]):
            if time.monotonic() > until:
                raise RuntimeError(f"rank 0 or another rank did not answer ({key})")
            time.sleep(_AGAIN_S / 10)

    def close(self) -> None:
        """Wait until all ranks are done with the store, for a moment, since rank 0 may have it."""
        if self.rank > 0:
            self.store.set(f"done/{self.rank}", "")
            return
        until = time.monotonic() + 2
        while time.monotonic() < until and not self.store.check([f"done/{r}" for r in range(1, self.world_size)]):
            time.sleep(_AGAIN_S)
