"""Keep snapshots of a sharded training state in the memory of two hosts each, and restore them after a lost rank."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fasttrain.core.checks import NonNegativeInt, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.files.safe_load import damage_of_archive, read_archive, refuse_unreadable
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.run.checkpoint.peers.local_state import load_local_state_, local_state

_NAME = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.pt")


@check_arguments
class PeerMemory:
    """Snapshots of a training state in memory: each rank keeps its own part, and that of a rank on another host.

    A snapshot is a file in a folder in memory, such as under ``/dev/shm``, so that it outlives the process: when
    torchrun restarts all workers after one was lost, ranks whose host is still there find their parts, and the others
    get theirs from the rank that keeps a copy. No file on a disk is read, so that snapshots can be taken often. They
    are restored on the same number of ranks, if no rank was lost together with the one that keeps its copy; save
    checkpoints for all other cases. For Fabric and bare loops; in a Trainer,
    :class:`~lightning_fasttrain.run.PeerSnapshots` uses it.

    Each rank takes the memory of two parts for each of two snapshots. Older snapshots are removed once all ranks have a
    newer one.

    Args:
        folder: folder in this host's memory, for this run alone: ``f"/dev/shm/{os.environ['TORCHELASTIC_RUN_ID']}"``.
        distance: a rank's copy is kept by the rank that is so many further; by default the number of ranks on a host,
            and 1 on a single host.
        timeout: limit for each exchange with other ranks.

    Raises:
        ValueError: a rank would keep its own copy.

    Example:
        >>> net, folder = torch.nn.Linear(2, 1), getfixture("tmp_path")
        >>> PeerMemory(folder).save(7, {"model": net, "epoch": 1})
        >>> restarted = {"model": torch.nn.Linear(2, 1), "epoch": 0}
        >>> PeerMemory(folder).load(restarted), restarted["epoch"], torch.equal(restarted["model"].weight, net.weight)
        (7, 1, True)

    Source:
        The replicated local checkpoints of NVIDIA's Resiliency Extension,
        https://nvidia.github.io/nvidia-resiliency-ext/checkpointing/local/; here every part is verified before it
        counts.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        distance: PositiveInt | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.folder = Path(folder)
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.distance = distance or (on_host if on_host < rank_count() else 1)
        if rank_count() > 1 and self.distance % rank_count() == 0:
            why = f"of {rank_count()} ranks, each would keep the copy of its own part"
            raise ValueError(explain(f"distance={self.distance}", why, "Leave it out, or use a smaller one"))
        # Separate from the training's, whose back end may not exchange tensors in host memory.
        self._group: Any = None
        if rank_count() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def save(self, step: NonNegativeInt, state: Mapping[str, object]) -> None:
        """Take a snapshot; a collective. If a rank is lost meanwhile, or cannot write, the snapshot before it stays.

        Args:
            step: number of optimizer steps so far.
            state: name → a model, an optimizer, another object with ``state_dict`` and ``load_state_dict``, or plain
                values.

        Raises:
            ValueError: the state holds a value that could not be read back; names it.
            OSError: on all ranks, one could not write, such as into a full memory; nothing is left of the snapshot.
        """
        mine = local_state(state)
        refuse_unreadable(mine)
        with self._on_all_ranks(step):
            write_atomic(self._path(step, rank_here()), lambda file: torch.save(mine, file))
        with self._on_all_ranks(step):
            self._copy_to_peer(step)
        # All ranks have this one, so two are enough.
        kept = sorted({found for _, found, _ in self._found()})[-2:]
        self._remove(lambda found: found not in kept)

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest snapshot of which all ranks' parts are held somewhere; a collective.

        Args:
            state: as for :meth:`save`: objects are loaded in place, and plain values replaced.

        Returns:
            Its step; None if there is no complete snapshot of this number of ranks.
        """
        while True:
            holders = self._holders()
            held = Counter(step for step, _ in holders)
            complete = [step for step, parts in held.items() if parts == rank_count()]
            step = max(complete, default=-1)
            # Incomplete ones: the run may get other values at their steps.
            self._remove(lambda found: found > step)  # noqa: B023
            if not complete:
                return self._warn_of_none(holders)
            sources = {rank: _source(rank, holders[step, rank]) for rank in range(rank_count())}
            # Only the parts that are used: reading takes most of the time.
            if not any(self._gather(self._remove_damaged(step, sources))):
                break
        for rank, source in sources.items():
            if source != rank:
                self._send(step, source, rank)
        load_local_state_(state, read_archive(self._path(step, rank_here())))
        if any(len(holders[step, rank]) < 2 for rank in sources):  # a host that was lost has no copies yet
            self._copy_to_peer(step)
        return step

    @contextmanager
    def _on_all_ranks(self, step: int) -> Iterator[None]:
        """Raise an error of writing on all ranks, once each is through; they would wait for one that raises alone."""
        why = ""
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
        failed = {rank: text for rank, text in enumerate(self._gather(why)) if text}
        if failed:
            self._remove(lambda found: found == step)
            rank, why = next(iter(failed.items()))
            what = f"PeerMemory: the snapshot of step {step} in {self.folder}"
            way_out = "The one before it stays. Give a folder in memory with room for two parts of two snapshots"
            raise OSError(explain(what, f"rank {rank} cannot write it: {why.lower()}", way_out))

    def _warn_of_none(self, holders: object) -> None:
        if any(self.folder.glob("step-*")) or holders:
            warn(f"PeerMemory: {self.folder} has no complete snapshot of {rank_count()} ranks. Load a checkpoint.")

    def _remove_damaged(self, step: int, sources: Mapping[int, int]) -> bool:
        """Remove the parts of a snapshot that this rank would use or send, and that are damaged; return whether any."""
        damaged = []
        for rank, source in sources.items():
            path = self._path(step, rank)
            if source == rank_here() and damage_of_archive(path) is not None:
                damaged.append(path)
                path.unlink(missing_ok=True)
        return bool(damaged)

    def _gather(self, mine: object) -> list[Any]:
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * rank_count()
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def clear(self) -> None:
        """Remove this rank's snapshots, at the end of a run."""
        self._remove(lambda found: True)

    def _path(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step}.rank-{rank}-of-{rank_count()}.pt"

    def _found(self) -> list[tuple[Path, int, int]]:
        """Return path, step and rank of the parts in the folder that this rank keeps: its own and its copy."""
        found = []
        kept = {rank_here(), (rank_here() - self.distance) % rank_count()}
        for path in self.folder.glob("step-*.pt"):
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[3]) == rank_count() and int(match[2]) in kept:
                found.append((path, int(match[1]), int(match[2])))
        return found

    def _holders(self) -> dict[tuple[int, int], list[int]]:
        """Map (step, rank) of each part to the ranks that hold it."""
        everyone = self._gather([(step, rank) for _, step, rank in self._found()])
        holders: dict[tuple[int, int], list[int]] = {}
        for holder, parts in enumerate(everyone):
            for part in parts:
                holders.setdefault(part, []).append(holder)
        return holders

    def _copy_to_peer(self, step: int) -> None:
        """Send this rank's part to the rank that keeps its copy, and keep that of another rank."""
        if self._group is None:
            return
        data = _read(self._path(step, rank_here()))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(rank_count())]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
        ahead, behind = (rank_here() + self.distance) % rank_count(), (rank_here() - self.distance) % rank_count()
        copy = torch.empty(int(sizes[behind]), dtype=torch.uint8)
        sending = dist.isend(data, ahead, group=self._group)
        dist.recv(copy, behind, group=self._group)
        assert sending is not None
        sending.wait()
        write_atomic(self._path(step, behind), _writer(copy))

    def _send(self, step: int, source: int, target: int) -> None:
        """Send the part of rank ``target`` from the rank ``source``, which holds it; the others do nothing."""
        size, path = torch.zeros(1, dtype=torch.int64), self._path(step, target)
        if rank_here() == source:
            data = _read(path)
            dist.send(size.fill_(data.numel()), target, group=self._group)
            dist.send(data, target, group=self._group)
        elif rank_here() == target:
            dist.recv(size, source, group=self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, source, group=self._group)
            write_atomic(path, _writer(data))

    def _remove(self, is_old: Callable[[int], bool]) -> None:
        """Remove the parts that this rank keeps of snapshots whose step is old."""
        for path, step, _ in self._found():
            if is_old(step):
                path.unlink(missing_ok=True)


def _source(rank: int, holders: list[int]) -> int:
    """Return the rank that a part comes from: the one it belongs to, if that holds it."""
    if rank in holders:
        return rank
    return min(holders)


def _read(path: Path) -> Tensor:
    """Return the bytes of a file without copying them."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _writer(data: Tensor) -> Any:
    return lambda file: data.numpy().tofile(file)
