"""Check the machines of a run before it: missing ranks, versions, clocks, speeds, disks, and connections by pair."""

import hashlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.machine import versions
from lightning_fasttrain.core.messages import explain, write_to_stderr
from lightning_fasttrain.strategy._cluster_findings import (
    INTERFACE,
    ClusterReport,
    compare_versions,
    find_skew,
    find_slow_pairs,
    find_slow_ranks,
    join_pairs,
    name_ranks,
)
from lightning_fasttrain.strategy._cluster_store import ClusterStore, environment

MIB = 2**20
_AFTER_DEADLINE_S = 5.0
_MOST_ROUNDS = 32
_MOST_CLOCKS = 64
_STAGES = ("meeting", "compute", "disk", "clock", "gloo", "nccl", "report")
_ADVICE = {
    "meeting": "MASTER_ADDR must be a name that every node resolves to rank 0's address, and MASTER_PORT must be open",
    "disk": "Look at the file system of the folder on this node",
    "gloo": INTERFACE,
    "nccl": "Name the interface: NCCL_SOCKET_IFNAME=eth0; NCCL_DEBUG=INFO prints the one that is used",
}


@check_arguments
def check_cluster(
    timeout_s: PositiveFloat = 60.0,
    folder: str | os.PathLike[str] | None = None,
    code: str | os.PathLike[str] | None = None,
    mib: PositiveInt = 8,
) -> ClusterReport:
    """Check that the ranks of a launch see each other, run the same code, and are equally fast; all ranks must call it.

    The ranks are those of the environment, as torchrun or SLURM set it. They meet in a store, so that missing ranks are
    named; compare versions and clocks (of more than 64 ranks, those of one of each node); time a matrix product, and a
    file in ``folder``; and exchange tensors in pairs, each rank with at most 32 others, all of which rank 0 reports. A
    stage that hangs ends every rank: a thread watches the deadline.

    Args:
        timeout_s: limit for the whole check, half of it for the meeting and half for all that follows.
        folder: where checkpoints will go; by default the folder for temporary files.
        code: a file or folder of Python code, whose content must be the same on all ranks.
        mib: MiB that a pair exchanges.

    Returns:
        On rank 0 the report of all ranks; elsewhere that of this rank alone.

    Raises:
        TimeoutError: ranks did not come, named on rank 0; the exit code of a later stage that hangs is 1.

    Example:
        >>> report = check_cluster(mib=1)
        >>> report.findings, report.ranks[0]["gflops"] > 0
        ([], True)

    Source:
        Ours. NVIDIA's ``nccl-tests`` measure collectives in more detail, once all ranks are there.
    """
    rank, world_size = int(environment("RANK", "0")), int(environment("WORLD_SIZE", "1"))
    check = _Check(rank, world_size, timeout_s)
    with check.limited():
        mine = _describe(code)
        there = check.meet(mine)
        report = ClusterReport({rank: mine})
        if rank == 0:
            report.ranks = there
            report.findings += list(compare_versions(there))
        mine["gflops"] = check.stage("compute", _measure_compute)
        mine |= check.stage("disk", lambda: _measure_disk(folder, mib))
        if world_size > 1:
            # Rank 0 answers the others in turn, so of many ranks one of each node asks.
            asking = [other for other in sorted(there) if other > 0 and there[other]["asks"]]
            if rank == 0 or mine["asks"]:
                mine["skew_s"] = check.stage("clock", lambda: check.measure_skew(asking))
            for backend in _backends():
                mine[backend] = check.stage(backend, lambda backend=backend: check.measure_pairs(backend, mib))
        everyone = check.stage("report", lambda: check.collect("speeds", mine))
        if rank == 0:
            report.ranks = everyone
            report.pairs = join_pairs(everyone)
            report.findings += find_skew(everyone)
            report.slow = [*find_slow_ranks(everyone), *find_slow_pairs(report.pairs)]
    return report


class _Check:
    """The stages of a check, each of which is announced to rank 0."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.current = "meeting"
        self.store: ClusterStore | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        """End the process at the deadline, and say in which stage it is; on rank 0, where the others are."""
        done = threading.Event()

        def watch() -> None:
            # The others leave rank 0, which may have the store, a moment to name them. The meeting moves the deadline.
            while (left_s := self.deadline + (self.rank > 0) - time.monotonic()) > 0:
                if done.wait(min(left_s, 0.5)):
                    return
            write_to_stderr(f"{self._explain_hang()}\n")
            os._exit(1)  # a thread cannot interrupt a collective

        threading.Thread(target=watch, daemon=True, name="fasttrain-cluster-check").start()
        try:
            yield
        finally:
            done.set()
            if self.store is not None:
                self.store.close()

    def _explain_hang(self) -> str:
        where = ""
        if self.rank == 0 and self.store is not None:
            here = _STAGES.index(self.current)
            behind = [f"rank {rank} ({stage})" for rank, stage in self.store.stages() if _STAGES.index(stage) < here]
            if behind:
                where = f"; behind it: {', '.join(behind)}"
        what = f"rank {self.rank} on {socket.gethostname()}: {self.current} did not end within {self.timeout_s / 2:g} s"
        return explain(f"{what}{where}", "it hangs, or is slow", _ADVICE.get(self.current, "Look at that rank"))

    def left_s(self) -> float:
        """Return a limit for what waits for other ranks, after which the thread has ended this process."""
        return max(0.0, self.deadline - time.monotonic()) + _AFTER_DEADLINE_S

    def meet(self, mine: Mapping[str, object]) -> dict[int, dict[str, Any]]:
        """Return what the ranks say about themselves, once all came.

        Raises:
            TimeoutError: some did not come.
        """
        # Half of the time is for the meeting, so that missing ranks are named in any case.
        until = time.monotonic() + self.timeout_s / 2
        try:
            self.store = ClusterStore(self.rank, self.world_size, self.timeout_s / 2)
            there = self.store.collect("here", mine, until)
        except (RuntimeError, OSError) as error:
            why = f"{error}".partition("\n")[0]
            raise TimeoutError(
                explain(f"rank {self.rank} did not reach the others", why, _ADVICE["meeting"])
            ) from error
        missing = set(range(self.world_size)) - set(there)
        # Ranks may have come at different times; from here on their time is the same.
        self.deadline = time.monotonic() + self.timeout_s / 2
        if missing and self.rank == 0:
            came = ", ".join(f"{rank} ({about['host']})" for rank, about in sorted(there.items()))
            what = f"{name_ranks(sorted(missing))} did not come within {self.timeout_s / 2:g} s"
            way_out = (
                "Start the job on all nodes, with the same number of nodes and the same MASTER_ADDR and MASTER_PORT"
            )
            raise TimeoutError(explain(what, f"those that came are {came}", way_out))
        return there

    def stage(self, name: str, run: Callable[[], object]) -> Any:
        """Run a stage; a rank that is behind is named by rank 0 if the time is over."""
        self.current = name
        assert self.store is not None
        self.store.announce(name)
        return run()

    def collect(self, name: str, mine: Mapping[str, object]) -> dict[int, dict[str, Any]]:
        """Return what all ranks give on rank 0, and nothing on the others, once rank 0 has all."""
        assert self.store is not None
        return self.store.collect(name, mine, time.monotonic() + self.left_s())

    def measure_skew(self, asking: Sequence[int]) -> float:
        """Return by how many seconds this rank's clock is ahead of rank 0's, which answers ``asking``, as in NTP."""
        assert self.store is not None
        return self.store.compare_clocks(asking, time.monotonic() + self.left_s())

    def measure_pairs(self, backend: str, mib: int) -> dict[str, float]:
        """Return MiB/s to each other rank; in each round every rank exchanges with one other."""
        assert self.store is not None
        device = _device(on_gpu=backend == "nccl")
        store = dist.PrefixStore(backend, self.store.for_groups)
        limit = timedelta(seconds=self.left_s())
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        sent = torch.zeros(mib * MIB, dtype=torch.uint8, device=device)
        received = torch.zeros_like(sent)
        speeds: dict[str, float] = {}
        try:
            for other in _partners(self.rank, self.world_size):
                dist.barrier()
                if other is None:
                    continue
                _exchange(sent[:1024], received[:1024], other)  # opens the connection
                start = time.perf_counter()
                _exchange(sent, received, other)
                speeds[str(other)] = 2 * mib / (time.perf_counter() - start)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return speeds


def _exchange(sent: torch.Tensor, received: torch.Tensor, other: int) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)])
    for work in works:
        work.wait()
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)


def _partners(rank: int, ranks: int) -> Iterator[int | None]:
    """Yield the partner of a rank in each round of a tournament of all pairs; None where it has none.

    Of more than :data:`_MOST_ROUNDS` rounds, evenly spaced ones: the time of all would grow with the number of ranks,
    and each rank has met enough others then to be found if it is slow.

    Example:
        >>> [list(_partners(rank, 3)) for rank in range(3)]
        [[2, None, 1], [None, 2, 0], [0, 1, None]]
        >>> len(set(_partners(7, 1024)))
        32
    """
    rounds = ranks - 1 + ranks % 2
    step = -(-rounds // _MOST_ROUNDS)
    for number in range(0, rounds, step):
        other = (number - rank - 1) % rounds
        if rank == rounds:  # the last of an even number stays where it is, and the others pass by
            other = next(one for one in range(rounds) if (number - one - 1) % rounds == one)
        elif other == rank:
            other = rounds  # the last rank, or none if their number is odd
        yield other if other < ranks else None


def _backends() -> list[str]:
    backends = ["gloo"]
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends.append("nccl")
    return backends


def _device(on_gpu: bool) -> torch.device:
    if on_gpu:
        return torch.device("cuda", int(environment("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _describe(code: str | os.PathLike[str] | None) -> dict[str, Any]:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "(its name does not resolve)"
    said = {**versions(), "this package's code": _hash_code(Path(__file__).parent.parent)}
    if torch.cuda.is_available():
        said |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "GPU": torch.cuda.get_device_name()}
    if code is not None:
        said["the model's code"] = _hash_code(Path(code))
    asks = int(environment("WORLD_SIZE", "1")) <= _MOST_CLOCKS or environment("LOCAL_RANK", "0") == "0"
    return {"host": host, "address": address, "versions": said, "asks": asks}


def _hash_code(path: Path) -> str:
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _measure_compute() -> float:
    """Return GFLOP/s of a float32 matrix product, the best of a few."""
    device = _device(torch.cuda.is_available())
    size = 4096 if torch.cuda.is_available() else 512
    matrix, best = torch.ones(size, size, device=device), 0.0
    for _ in range(6):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return best


def _measure_disk(folder: str | os.PathLike[str] | None, mib: int) -> dict[str, float]:
    data = os.urandom(MIB) * mib
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fasttrain-tmp-check-") as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        file.seek(0)
        if file.read() != data:
            raise OSError(f"{file.name} does not hold what was written to it.")
        read = time.perf_counter()
    return {"write_mib_s": mib / (written - start), "read_mib_s": mib / (read - written)}
