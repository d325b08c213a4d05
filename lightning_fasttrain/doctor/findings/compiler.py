"""Work of the compiler: graph breaks and recompilations, by line of the user's code."""

import re
from collections import defaultdict
from collections.abc import Iterator

from lightning_fasttrain.core.messages import number_of
from lightning_fasttrain.doctor.finding import Cost, Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.module_watch import list_compilations
from lightning_fasttrain.doctor.observation.source_lines import SourceLine, user_files
from lightning_fasttrain.doctor.observation.watch import Watch

# What follows a graph break is a function of its own, which the compiler names after the line of the break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_(\d+)")


def find_compiler_work(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield lines at which the compiler breaks its graph, and functions that it compiled again while watched."""
    yield from _find_graph_breaks()
    yield from _find_recompilations(watch)


def _find_graph_breaks() -> Iterator[Finding]:
    breaks: dict[SourceLine, str] = {}
    reason, files = "", user_files()
    for compilation in list_compilations():
        resumed = _RESUMED.fullmatch(compilation.co_name or "")
        if resumed is not None and compilation.co_filename in files:
            line = SourceLine(str(compilation.co_filename), int(resumed[2]), resumed[1])
            breaks.setdefault(line, reason)
        # Compiling restarts at a break, and ends there; the next entry is what follows it.
        reason = next(iter(sorted(compilation.restart_reasons or ())), "")
    for line, why in breaks.items():
        what = f"`{line.text}` divides the compiled graph in two"
        cure = "Move it out of what is compiled, or behind `if not torch.compiler.is_compiling():`"
        yield Finding("graph_break", what, cure, "exact", line, Cost.unmeasured(), _explain(why))


def _explain(reason: str) -> tuple[str, ...]:
    """Return torch's explanation of a graph break, or the first line of its reason."""
    lines = [line.strip().rstrip(".") for line in reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return tuple([*explained, *lines][:1])


def _find_recompilations(watch: Watch) -> Iterator[Finding]:
    seconds: dict[SourceLine, list[float]] = defaultdict(list)
    reasons: dict[SourceLine, str] = {}
    known = set(map(id, watch.compilations))
    for compilation in list_compilations():
        if id(compilation) in known or not compilation.recompile_reason:
            continue
        line = SourceLine(str(compilation.co_filename), compilation.co_firstlineno or 0, compilation.co_name or "")
        seconds[line].append(compilation.entire_frame_compile_time_s or 0.0)
        reasons[line] = compilation.recompile_reason
    for line, spent in seconds.items():
        ms = 1e3 * sum(spent) / watch.counted
        what = f"`{line.function}` was compiled again {number_of(len(spent), 'time')} while watched"
        cure = "Pad to a few sizes, or mark the size that changes: torch._dynamo.mark_dynamic(x, 0)"
        details = (f"The last reason: {reasons[line]}",)
        shown = line if line.file in user_files() else None
        yield Finding("recompilation", what, cure, "exact", shown, Cost(ms, ms, ms), details)
