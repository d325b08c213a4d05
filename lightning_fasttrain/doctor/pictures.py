"""Pictures of a step for the page of a diagnosis: its phases, the forward by block, and memory by category."""

from collections.abc import Iterator, Mapping
from html import escape

from lightning_fasttrain.core.messages import format_bytes, format_ms
from lightning_fasttrain.profiling.memory_files import COLOURS
from lightning_fasttrain.profiling.memory_record import CATEGORIES, MemoryRecord

# Phase → colour, and what a reader sees.
PHASES = {
    "data_wait": ("#d1603d", "waiting for data"),
    "transfer": ("#e3a63d", "host to device"),
    "forward": ("#3f68a8", "forward"),
    "backward": ("#6f93cf", "backward"),
    "optimizer": ("#4f9f78", "optimizer"),
    "callbacks": ("#8f7cbf", "callbacks"),
    "other": ("#b3b7bf", "everything else"),
}
_WIDTH, _BAR, _TICK, _AREA = 960, 46, 18, 220
_LEAST_LABEL = 0.06  # share of the picture below which a phase has no label in the bar
# Two in turn, so that neighbours differ.
_BLOCKS = ("#3f68a8", "#6f93cf")


def draw_phases(phase_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield the phases of a step as a bar, in their order, with a scale below it; and a legend with all times."""
    parts = [(PHASES[name][1], ms, PHASES[name][0]) for name, ms in phase_ms.items()]
    yield from _bar(parts, "phases of a step")
    total = sum(phase_ms.values()) or 1.0
    yield "<table>"
    for label, ms, colour in parts:
        key = f'<i class=key style="background:{colour}"></i>{label}'
        yield f"<tr><td>{key}<td>{format_ms(ms)} ms<td>{ms / total:.0%}"
    yield "</table>"


def draw_blocks(block_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield the forward of each block as a bar; nothing if no blocks were timed."""
    if not block_ms:
        return
    yield "<h2>The forward, block by block</h2>"
    parts = [(name, ms, _BLOCKS[number % 2]) for number, (name, ms) in enumerate(block_ms.items())]
    yield from _bar(parts, "forward by block")
    slowest = sorted(block_ms.items(), key=lambda one: -one[1])[:3]
    listed = ", ".join(f"<code>{escape(name)}</code> {format_ms(ms)} ms" for name, ms in slowest)
    yield f"<p class=faint>The slowest: {listed}.</p>"


def _bar(parts: list[tuple[str, float, str]], what: str) -> Iterator[str]:
    """Yield a bar of parts (label, milliseconds, colour), side by side, with a scale below it."""
    total = sum(ms for _, ms, _ in parts) or 1.0
    yield f'<svg viewBox="0 0 {_WIDTH} {_BAR + _TICK}" width="100%" role="img" aria-label="{what}">'
    x = 0.0
    for label, ms, colour in parts:
        width, shown = _WIDTH * ms / total, escape(label)
        title = f"<title>{shown}: {format_ms(ms)} ms</title>"
        yield f'<rect x="{x:.1f}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{title}</rect>'
        if ms >= _LEAST_LABEL * total:
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
    yield f"<p class=faint>The peak is {escape(record.where)}. This step was slower, since it was recorded.</p>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_AREA + _TICK}" width="100%" role="img" aria-label="memory of a step">'
    for category, outline in _stacked(record):
        title = f"<title>{category}</title>"
        yield f'<polygon points="{outline}" fill="{COLOURS[category]}">{title}</polygon>'
    yield from _scale(record.end_ms, _AREA)
    yield "</svg><table><tr><th>category<th>at the peak<th><th>largest holder"
    for category, nbytes in record.at_peak.items():
        holders = record.holders(category)
        largest = ""
        if holders:
            largest = f"<code>{escape(holders[0].name)}</code> {format_bytes(holders[0].nbytes)}"
        key = f'<i class=key style="background:{COLOURS[category]}"></i>{category}'
        yield f"<tr><td>{key}<td>{format_bytes(nbytes)}<td>{nbytes / record.peak_bytes:.0%}<td>{largest}"
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
