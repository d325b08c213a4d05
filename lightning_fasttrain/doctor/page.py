"""Draw the page of a diagnosis: pictures of where time goes, as HTML in one file."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import format_bytes, format_ms, number_of
from lightning_fasttrain.doctor.diagnosis import PHASE_NAMES, Diagnosis, Finding, describe_cost
from lightning_fasttrain.doctor.observation.step_records import LineTime
from lightning_fasttrain.profiling.memory_record import CATEGORIES, COLOURS, MemoryRecord, fill_page

PHASES = {
    "data_wait": "#d1603d",
    "transfer": "#e3a63d",
    "forward": "#3f68a8",
    "backward": "#6f93cf",
    "optimizer": "#4f9f78",
    "callbacks": "#8f7cbf",
    "other": "#b3b7bf",
}
_WIDTH, _BAR, _TICK, _AREA = 960, 46, 18, 220
_LETTER = 7  # width of a letter: a part of a bar has its label if that fits
# Two in turn, so that neighbours differ.
_BLOCKS = ("#3f68a8", "#6f93cf")


def draw_phases(phase_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield the phases of a step as a bar, in their order, with a scale below it; and a legend with all times."""
    parts = [(PHASE_NAMES[name], ms, PHASES[name]) for name, ms in phase_ms.items()]
    yield from draw_bar(parts, "phases of a step")
    total = sum(phase_ms.values()) or 1.0
    yield "<table>"
    for label, ms, colour in parts:
        key = f'<i style="background:{colour}"></i>{label}'
        yield f"<tr><td>{key}<td>{format_ms(ms)} ms<td>{ms / total:.0%}"
    yield "</table>"


def draw_blocks(block_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield the forward of each block as a bar; nothing if no blocks were timed."""
    if not block_ms:
        return
    yield "<h2>The forward, block by block</h2>"
    parts = [(name, ms, _BLOCKS[number % 2]) for number, (name, ms) in enumerate(block_ms.items())]
    yield from draw_bar(parts, "forward by block")
    slowest = sorted(block_ms.items(), key=lambda one: -one[1])[:3]
    listed = ", ".join(f"<code>{escape(name)}</code> {format_ms(ms)} ms" for name, ms in slowest)
    yield f"<p>The slowest: {listed}.</p>"


def draw_bar(parts: list[tuple[str, float, str]], what: str) -> Iterator[str]:
    """Yield a bar of parts (label, milliseconds, colour), side by side, with a scale below it."""
    total = sum(ms for _, ms, _ in parts) or 1.0
    yield f'<svg viewBox="0 0 {_WIDTH} {_BAR + _TICK}" width="100%" role="img" aria-label="{what}">'
    x = 0.0
    for label, ms, colour in parts:
        width, shown = _WIDTH * ms / total, escape(label)
        title = f"<title>{shown}: {format_ms(ms)} ms</title>"
        yield f'<rect x="{x:.1f}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{title}</rect>'
        if width >= _LETTER * len(label):
            yield f'<text x="{x + 6:.1f}" y="{_BAR / 2 + 4:.0f}" style="fill:#fff">{shown}</text>'
        x += width
    yield from _scale(total, _BAR)
    yield "</svg>"


def _scale(total_ms: float, height: int) -> Iterator[str]:
    for part in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        tick = f'x="{_WIDTH * part / 4:.0f}" y="{height + _TICK - 3}" text-anchor="{anchor}"'
        yield f"<text {tick}>{format_ms(total_ms * part / 4)} ms</text>"


def draw_memory(record: MemoryRecord | None) -> Iterator[str]:
    """Yield memory over a step by category, stacked, and what holds it at the peak; nothing without a record."""
    if record is None or not record.peak_bytes:
        return
    yield f"<h2>Memory over a step: {format_bytes(record.peak_bytes)} at the peak</h2>"
    yield f"<p>The peak is {escape(record.where)}. This step was slower, since it was recorded.</p>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_AREA + _TICK}" width="100%" role="img" aria-label="memory of a step">'
    for category, outline in _stacked(record):
        title = f"<title>{category}</title>"
        yield f'<polygon points="{outline}" fill="{COLOURS[category]}">{title}</polygon>'
    yield from _scale(record.end_ms, _AREA)
    yield "</svg><table><tr><th>category<th>at the peak<th><th>largest holder"
    for category, nbytes, share, _, holder in record.list_categories():
        largest = ""
        if holder is not None:
            largest = f"<code>{escape(holder.name)}</code> {format_bytes(holder.nbytes)}"
        key = f'<i style="background:{COLOURS[category]}"></i>{category}'
        yield f"<tr><td>{key}<td>{format_bytes(nbytes)}<td>{share:.0%}<td>{largest}"
    yield "</table>"


def _stacked(record: MemoryRecord) -> Iterator[tuple[str, str]]:
    """Yield the outline of each category's area, which stands on the sum of those before it."""
    points = record.sample(400)
    across = _WIDTH / (record.end_ms or 1.0)
    up = _AREA / record.peak_bytes
    below = [0] * len(points)
    for i, category in enumerate(CATEGORIES):
        above = [base + point.nbytes[i] for base, point in zip(below, points, strict=True)]
        # Memory is constant until it changes, so each point begins a step.
        top, bottom = [], []
        for number, point in enumerate(points):
            end_ms = points[number + 1].ms if number + 1 < len(points) else record.end_ms
            for ms in (point.ms, end_ms):
                top.append(f"{across * ms:.1f},{_AREA - up * above[number]:.1f}")
                bottom.append(f"{across * ms:.1f},{_AREA - up * below[number]:.1f}")
        yield category, " ".join([*top, *reversed(bottom)])
        below = above


_STYLE = """<style>
article { border-left: 4px solid #d1603d; padding: .2rem 0 .2rem 1rem; margin: 1rem 0; }
article.accuracy { border-color: #a33; }
div.cost { font-weight: 600; }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; background: #8881; padding: .5rem; margin: .4rem 0; }
mark { background: #e3a63d55; color: inherit; display: block; }
</style>"""


def save_diagnosis(diagnosis: Diagnosis, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``doctor.html`` and ``doctor.json`` to a folder, which is created if it is missing.

    Returns:
        The files.

    Raises:
        OSError: a file could not be written.

    Example:
        >>> nothing = Diagnosis("cpu", 18, 10.0, {"forward": 6.0, "backward": 4.0})
        >>> [file.name for file in save_diagnosis(nothing, getfixture("tmp_path"))]
        ['doctor.html', 'doctor.json']
    """
    text = json.dumps(diagnosis.as_dict(), indent=2)
    return [
        write_atomic(Path(folder) / "doctor.html", render_page(diagnosis)),
        write_atomic(Path(folder) / "doctor.json", text),
    ]


def render_page(diagnosis: Diagnosis) -> str:
    """Render the page: time and memory of a step, the findings with their source lines, and the most expensive lines.

    Example:
        >>> page = render_page(Diagnosis("cpu", 18, 10.0, {"forward": 6.0, "backward": 4.0}))
        >>> "Nothing was found" in page, "<script" in page, "http" in page
        (True, False, False)
    """
    body = [
        _STYLE,
        "<h2>Where the time of a step goes</h2>",
        *draw_phases(diagnosis.phase_ms),
        *_compare_to_machine(diagnosis),
        *draw_blocks(diagnosis.block_ms),
        *draw_memory(diagnosis.memory),
        "<h2>What was found, the most expensive first</h2>",
        *_findings(diagnosis),
        *_lines(diagnosis),
        *[f"<p>{escape(note)}.</p>" for note in diagnosis.notes],
    ]
    title = f"{format_ms(diagnosis.step_ms)} ms per step on {diagnosis.device}"
    return fill_page(
        title, f"fasttrain doctor: {number_of(diagnosis.steps, 'step')} timed, after a warm-up", "\n".join(body)
    )


def _compare_to_machine(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.needed_ms:
        yield f"<h2>What {escape(diagnosis.compared_with)} needs for its kernels</h2>"
        needs = enumerate(diagnosis.needed_ms.items())
        parts = [(kind, ms, _BLOCKS[number % 2]) for number, (kind, ms) in needs]
        yield from draw_bar(parts, "what the kernels need by kind")
        yield f"<p>{escape(diagnosis.compare_to_machine())}.</p>"


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.findings:
        yield "<p>Nothing was found that costs at least 1% of a step.</p>"
    for finding in diagnosis.findings:
        yield from _article(finding, diagnosis.step_ms)
    if diagnosis.minor:
        count = number_of(len(diagnosis.minor), "finding")
        yield f"<details><summary>{count} below 1% of a step</summary>"
        for finding in diagnosis.minor:
            yield from _article(finding, diagnosis.step_ms)
        yield "</details>"


def _article(finding: Finding, step_ms: float) -> Iterator[str]:
    kind = "accuracy" if finding.cost is None else "cost"
    yield f"<article class={kind}><div class=cost>{escape(describe_cost(finding, step_ms))}</div>"
    yield f"<div>{escape(finding.what)}.</div>"
    for detail in finding.details:
        yield f"<div class=faint>{escape(detail)}.</div>"
    if finding.line is not None:
        yield f"<div class=faint>{escape(str(finding.line))}</div>{_excerpt(finding)}"
    yield f"<div>Cure: <code>{escape(finding.cure)}</code> <span class=faint>({escape(finding.exactness)})</span></div>"
    yield "</article>"


def _excerpt(finding: Finding) -> str:
    """Return the line of a finding between its neighbours."""
    assert finding.line is not None
    rows = []
    for number, text in finding.line.context(1):
        row = escape(f"{number:>5}  {text}")
        rows.append(f"<mark>{row}</mark>" if number == finding.line.number else f"{row}\n")
    return f"<pre>{''.join(rows)}</pre>"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.lines:
        yield "<h2>Your lines that took longest</h2>"
        yield "<p>A line counts with all that it calls outside of your own files.</p>"
        yield from _table_of_lines(diagnosis.lines)


def _table_of_lines(lines: Sequence[tuple[str, LineTime]]) -> Iterator[str]:
    yield "<table><tr><th>ms/step<th>phase<th>line<th>"
    for phase, timed in lines:
        label = PHASE_NAMES[phase]
        where, text = escape(str(timed.line)), escape(timed.line.text)
        yield f"<tr><td>{format_ms(timed.ms)}<td>{label}<td>{where}<td><code>{text}</code>"
    yield "</table>"
