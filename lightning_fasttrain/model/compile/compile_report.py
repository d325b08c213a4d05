"""Report what a compiler did."""

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
        others: for how many blocks code was compiled again since they differ in a value, such as a rate that grows
            from block to block; not part of ``recompiles``.
    """

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    fallbacks: dict[str, str] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    others: int = 0

    def __str__(self) -> str:
        text = (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.recompiles} of them recompilations; "
            f"{sum(self.graph_breaks.values())} graph breaks"
        )
        if self.others:
            text += f"; {number_of(self.others, 'block')} compiled separately, since they differ in a value"
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
        again = 0
        for metrics in self._utils.get_compilation_metrics():
            _, slash, attempt = (metrics.compile_id or "").rpartition("/")  # "frame/attempt"
            if id(metrics) not in known and metrics.is_forward and slash:
                again += attempt != "0"
        breaks = Counter(self._utils.counters["graph_break"]) - self._breaks
        return CompileReport(len(durations), again, dict(breaks), sum(durations))
