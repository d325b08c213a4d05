"""Compare what the ranks of a launch say about themselves, and report what is wrong."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from lightning_fasttrain.core.messages import explain

INTERFACE = "Name the interface on every node: GLOO_SOCKET_IFNAME=eth0 (`ip -brief address` lists them)"
_SLOW = 0.5  # of the median speed
_SKEW_S = 1.0  # clocks that differ by more order log lines and file times wrongly
_SPEEDS = {"gflops": "GFLOP/s", "write_mib_s": "MiB/s written", "read_mib_s": "MiB/s read"}


@dataclass
class ClusterReport:
    """The result of :func:`check_cluster`.

    Attributes:
        ranks: for each rank that came, its host, address, versions, and speeds.
        pairs: MiB/s between two ranks, by backend.
        findings: sentences about what is wrong, each of which names ranks.
        slow: sentences about ranks and pairs that are less than half as fast as the median.
    """

    ranks: dict[int, dict[str, Any]]
    pairs: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for rank, about in sorted(self.ranks.items()):
            speeds = [f"{about[key]:,.0f} {unit}" for key, unit in _SPEEDS.items() if key in about]
            lines.append(f"rank {rank}: {about['host']} {about['address']}, {', '.join(speeds)}")
        for backend, speeds in self.pairs.items():
            lines.append(
                f"{backend}: " + ", ".join(f"{a}↔{b} {mib_s:,.0f}" for (a, b), mib_s in speeds.items()) + " MiB/s"
            )
        return "\n".join([*lines, *self.slow, *(self.findings or ["No fault was found."])])


def compare_versions(ranks: Mapping[int, Mapping[str, object]]) -> Iterator[str]:
    """Yield what differs among the versions and addresses of ranks."""
    names = set[str]().union(*map(itemgetter("versions"), ranks.values()))
    for name in sorted(names):
        by_version: dict[str, list[int]] = {}
        for rank, about in sorted(ranks.items()):
            by_version.setdefault(str(about["versions"].get(name, "none")), []).append(rank)
        if len(by_version) > 1:
            found = [f"{version} on {name_ranks(some)}" for version, some in by_version.items()]
            yield explain(f"{name} differs", "; ".join(found), "Install the same on all nodes")
    hosts = set(map(itemgetter("host"), ranks.values()))
    for rank, about in sorted(ranks.items()):
        if len(hosts) > 1 and about["address"].startswith("127."):
            why = f"{about['host']} resolves its own name to {about['address']}, which others cannot reach"
            yield explain(f"rank {rank} has the wrong interface", why, INTERFACE)


def find_skew(ranks: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Yield ranks whose clocks differ from that of rank 0."""
    for rank, about in sorted(ranks.items()):
        if abs(about.get("skew_s", 0.0)) > _SKEW_S:
            ahead = "behind"
            if about["skew_s"] > 0:
                ahead = "ahead of"
            what = f"the clock of rank {rank} ({about['host']}) is {abs(about['skew_s']):.1f} s {ahead} rank 0's"
            yield explain(what, "logs and file times are in the wrong order", "Synchronize the nodes by NTP")


def find_slow_ranks(ranks: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Yield ranks with less than half of the median speed."""
    for key, unit in _SPEEDS.items():
        speeds = {rank: about[key] for rank, about in sorted(ranks.items())}
        usual = statistics.median(speeds.values())
        for rank, speed in speeds.items():
            if speed < _SLOW * usual:
                what = f"rank {rank} ({ranks[rank]['host']}) has {speed:,.0f} {unit}"
                yield explain(what, f"the median of the ranks is {usual:,.0f}", "All ranks wait for the slowest one")


def find_slow_pairs(pairs: Mapping[str, Mapping[tuple[int, int], float]]) -> Iterator[str]:
    """Yield pairs of ranks with less than half of the median bandwidth."""
    for backend, speeds in pairs.items():
        usual = statistics.median(speeds.values() or [0.0])
        for (one, other), mib_s in speeds.items():
            if mib_s < _SLOW * usual:
                what = f"ranks {one} and {other} exchange {mib_s:,.0f} MiB/s over {backend}"
                yield explain(what, f"the median of the pairs is {usual:,.0f}", "Look at the link between their nodes")


def join_pairs(ranks: Mapping[int, Mapping[str, object]]) -> dict[str, dict[tuple[int, int], float]]:
    """Return MiB/s by backend and pair, as the lower rank measured it."""
    pairs: dict[str, dict[tuple[int, int], float]] = {}
    for rank, about in sorted(ranks.items()):
        for backend in ("gloo", "nccl"):
            for other, speed in about.get(backend, {}).items():
                if rank < int(other):
                    pairs.setdefault(backend, {})[rank, int(other)] = speed
    return pairs


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the words for one rank or several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"
