"""Ask for ranks, and exchange values among them."""

import io
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Answer = TypeVar("Answer")


def rank_count() -> int:
    """Return the number of ranks; 1 without ``torch.distributed``.

    Example:
        >>> rank_count(), rank_here()
        (1, 0)
    """
    return dist.get_world_size() if _is_launched() else 1


def rank_here() -> int:
    """Return the rank of this process; 0 without ``torch.distributed``."""
    return dist.get_rank() if _is_launched() else 0


class ControlGroup:
    """Ranks that decide together about the run itself, such as whether to stop, or whether a checkpoint is complete.

    Args:
        group: their process group; None for this process alone.

    Attributes:
        rank: of this process, among ``count``.

    Example:
        >>> ControlGroup().agree(True), ControlGroup().gather("mine")
        (True, ['mine'])
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.count = 0, 1
        if group is not None:
            self.rank, self.count = group.rank(), group.size()
        self._numbers: Tensor | None = None
        self._work: dist.Work | None = None

    @classmethod
    def apart(cls, timeout: timedelta | None = None) -> "ControlGroup":
        """Make a gloo group of all ranks that carries nothing but votes; all ranks must call it.

        A vote is a few bytes between host processes: no device is synchronized, and it cannot be mistaken for a part of
        the step's communication. A rank that has exited is an error at once, one that does not answer after ``timeout``
        (by default gloo's).
        """
        group: Any = dist.new_group(backend="gloo", timeout=timeout)
        return cls(group)

    def agree(self, ok: bool) -> bool:
        """Return whether every rank says yes; each waits for all."""
        return self.count == 1 or bool(_reduce([ok], "MIN", self.group)[0])

    def gather(self, mine: Answer) -> list[Answer]:
        """Return the values of all ranks, in the order of ranks; each waits for all."""
        if self.count == 1:
            return [mine]
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def vote(self, number: int, other: int = 0) -> None:
        """Start to compute the largest ``number`` and the largest ``other`` of all ranks, without waiting for them."""
        if self._numbers is None:
            # Lives as long as the group: gloo's thread would need the interpreter's lock to free it.
            self._numbers = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._numbers[0], self._numbers[1] = number, other
        self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def read_vote(self, timeout: timedelta = timedelta(0)) -> tuple[int, int]:
        """Wait for the last vote, and return its result; zeros if there was none, or it has been read.

        Args:
            timeout: how long to wait; by default as long as the group does.

        Raises:
            RuntimeError: a rank has exited or did not answer in time.
        """
        work, self._work = self._work, None
        if work is None or self._numbers is None:
            return 0, 0
        work.wait(timeout)
        largest, other = map(int, self._numbers.tolist())
        return largest, other

    def close(self) -> None:
        """Wait for a pending vote, and destroy the group."""
        if dist.is_initialized():
            self.read_vote()
            with suppress(RuntimeError, ValueError):  # destroyed already, with an earlier default process group
                dist.destroy_process_group(self.group)


def all_ranks() -> ControlGroup:
    """Return the ranks of the default process group, or this process alone."""
    group: Any = dist.group.WORLD if _is_launched() else None
    return ControlGroup(group)


def from_all_ranks(mine: list[Any]) -> list[Any]:
    """Return the entries of the lists of all ranks, so that all ranks decide the same."""
    return list(chain.from_iterable(all_ranks().gather(mine)))


def from_rank_zero(make: Callable[[], Answer]) -> Answer:
    """Run ``make`` on rank zero alone, and return its result, or raise its error, on every rank.

    Example:
        >>> from_rank_zero(lambda: "chosen")
        'chosen'
    """
    if rank_count() == 1:
        return make()
    answers: list[Any] = [_answer_or_error(make) if rank_here() == 0 else None]
    dist.broadcast_object_list(answers, src=0)
    _raise_any(answers)
    return answers[0]


def from_first_of_node(make: Callable[[], Answer]) -> Answer:
    """Run ``make`` on the first rank of each node, and return its result on the other ranks of that node.

    An error on any node is raised on every rank.

    Example:
        >>> from_first_of_node(lambda: "downloaded")
        'downloaded'
    """
    if rank_count() == 1:
        return make()
    hosts = from_all_ranks([socket.gethostname()])
    first = hosts.index(hosts[rank_here()])
    answers: list[Any] = from_all_ranks([_answer_or_error(make) if rank_here() == first else None])
    _raise_any(answers)
    return answers[first]


def _answer_or_error(make: Callable[[], Answer]) -> Answer | Exception:
    try:
        return make()
    except Exception as error:
        # Sent instead of raised, since the other ranks wait for the answer.
        return error


def _raise_any(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def largest_over_ranks(numbers: list[float]) -> list[float]:
    """Return the largest of each of the ``numbers`` over all ranks; each rank waits for all.

    Example:
        >>> largest_over_ranks([3.5, -2])
        [3.5, -2]
    """
    return _reduce(numbers, "MAX")


def _reduce(numbers: list[float], how: str, group: Any = None) -> list[float]:
    if rank_count() == 1:
        return numbers
    # NCCL cannot reduce a tensor on the CPU.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    # Exact for counts up to 2^53. float32 ends at 2^24, and a step may hold more tokens than that.
    reduced = torch.tensor(numbers, dtype=torch.float64, device=device)
    # By name, since a torch that was built without its distributed package has no ReduceOp.
    dist.all_reduce(reduced, op=getattr(dist.ReduceOp, how), group=group)
    return reduced.tolist()


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are sharded, so that no gradients can be computed beside those of the training itself."""
    # `ds_id` is of DeepSpeed's stage 3, `device_mesh` of DTensors.
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())


def _is_launched() -> bool:
    return dist.is_available() and dist.is_initialized()


def sum_over_ranks(counts: list[int], world_size: int) -> list[int]:
    """Return the sum of each of the ``counts`` over all ranks.

    A single process returns its own. Several use one small all-reduce, for whose result the host waits, since all must
    continue with the same sums.
    """
    if world_size == 1:
        return counts
    return list(map(int, _reduce([*counts], "SUM")))


def pack(state: object) -> Tensor:
    """Serialize tensors and plain values to a uint8 tensor.

    Example:
        >>> unpack(pack({"n": 3, "of": torch.arange(2)}))
        {'n': 3, 'of': tensor([0, 1])}
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # torch warns of a buffer that cannot be written to, as bytes are.
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Deserialize what :func:`pack` returned, on the CPU. Only tensors and plain values are read."""
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def gather(mine: Tensor, device: torch.device, *, everywhere: bool = True) -> list[Tensor]:
    """Gather the bytes of all processes, in the order of ranks. All processes must call it.

    Args:
        mine: uint8 (n,), on the CPU; n may differ between ranks.
        device: this process's device, for backends that do not support CPU tensors.
        everywhere: whether all processes get them, whose number then counts twice, as for DeepSpeed, which writes them
            on every rank; otherwise only the first one does, and the result is empty on the others.
    """
    if rank_count() == 1:
        return [mine]
    device = _for_backend(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(rank_count())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device))
    # A collective takes tensors of the same size, so all are padded to the longest.
    counts = torch.cat(sizes).tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    everyone: list[Tensor] = []
    if everywhere or rank_here() == 0:
        everyone = [torch.empty_like(padded) for _ in counts]
    if everywhere:
        dist.all_gather(everyone, padded)
    else:
        dist.gather(padded, everyone or None, dst=0)
    # clone: otherwise a slice is saved together with its padding.
    return [data[:count].cpu().clone() for data, count in zip(everyone, counts, strict=False)]


def gather_values(mine: object, device: torch.device) -> list[Any]:
    """All-gather tensors and plain values of all processes, in the order of ranks. All processes must call it."""
    return list(map(unpack, gather(pack(mine), device)))


def gather_gradients(named: Iterable[tuple[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """Gather the gradients of all processes on rank 0's CPU; return [] elsewhere. All processes must call it.

    One parameter at a time, so that rank 0's device holds no more than one gradient per process.
    """
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if rank_count() == 1:
        return [{name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None}]
    device = _for_backend(device)
    # The ranks must call the same collectives, so they first agree on which parameters have a gradient somewhere.
    has = torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(has) for _ in range(rank_count())]
    dist.all_gather(everyone, has)
    held = torch.stack(everyone).cpu()
    gathered: list[dict[str, Tensor]] = [{} for _ in range(rank_count())]
    for i, (name, parameter) in enumerate(named):
        if not held[:, i].any():
            continue
        grad = parameter.grad
        # A rank without this gradient sends zeros, which rank 0 drops.
        if grad is None:
            grad = torch.zeros_like(parameter)
        grad = grad.detach().to(device).contiguous()
        parts = None
        if rank_here() == 0:
            parts = [torch.empty_like(grad) for _ in gathered]
        dist.gather(grad, parts, dst=0)
        for rank, part in enumerate(parts or []):
            if held[rank, i]:
                gathered[rank][name] = part.cpu().clone()
    if rank_here() != 0:
        return []
    return gathered


def _for_backend(device: torch.device) -> torch.device:
    # gloo gathers CPU tensors; "cpu:gloo,cuda:nccl" includes gloo too.
    if "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return device
