"""Report of the compiler's work: graphs, recompilations, graph breaks, time."""

from collections import Counter
from dataclasses import dataclass, field

from lightning_fasttrain.core.messages import number_of


@dataclass
class CompileReport:
    """Work of the compiler.

    Attributes:
        graphs: number of compiled graphs, including recompilations.
        recompiles: how many of them were for code already compiled once (new shapes, other guards).
        graph_breaks: reason → number of graph breaks.
        seconds: time spent compiling.
        fallbacks: names of blocks that run eagerly → why.
        apart: for each kind of block that was compared with eager code, the largest relative distance.
    """

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    fallbacks: dict[str, str] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.recompiles} of them recompilations; "
            f"{sum(self.graph_breaks.values())} graph breaks"
        )
        if self.apart:
            kinds = number_of(len(self.apart), "kind")
            text += f"; {kinds} of block compared with eager code, relative difference at most {max(self.apart):.0e}"
        for reason, times in sorted(self.graph_breaks.items(), key=lambda item: -item[1])[:3]:
            text += f"\n  {times}× {reason.strip().splitlines()[0]}"
        for name, why in self.fallbacks.items():
            text += f"\n  block '{name}' runs uncompiled: {why}"
        return text


class CompileWatch:
    """Counts the compiler's work from now on.

    Example:
        >>> watch = CompileWatch()
        >>> watch.report().graphs
        0
    """

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._utils = utils
        self._breaks = Counter(utils.counters["graph_break"])
        self._compiled = len(self._durations())
        # By identity: torch keeps one list per process, and drops the oldest entries when it is full.
        # References are held, since torch drops old entries, whose ids new ones could reuse.
        self._known = list(utils.get_compilation_metrics())

    def _durations(self) -> list[float]:
        return self._utils.compilation_time_metrics.get("_compile.compile_inner", [])

    def report(self) -> CompileReport:
        durations = self._durations()[self._compiled :]
        # The backward graph has a separate entry, and is not a second compilation.
        known = set(map(id, self._known))
        new = [m for m in self._utils.get_compilation_metrics() if id(m) not in known and m.is_forward]
        ids = [m.compile_id or "" for m in new]  # "frame/attempt"
        again = [compile_id for compile_id in ids if "/" in compile_id and not compile_id.endswith("/0")]
        breaks = Counter(self._utils.counters["graph_break"]) - self._breaks
        return CompileReport(len(durations), len(again), dict(breaks), sum(durations))
