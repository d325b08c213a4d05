"""Draw the page of an advice: time against memory of what was measured, where the time goes, and what to change."""

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path

from lightning_fasttrain.cli.tuning.advice import Advice, describe_change, list_facts, list_findings
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import format_bytes, format_ms
from lightning_fasttrain.doctor.page import draw_bar
from lightning_fasttrain.profiling.memory_record import fill_page

_WIDTH, _HEIGHT, _MARGIN = 800, 420, 60
# Of Okabe and Ito, which all readers can tell apart.
_SCRIPT, _ADVISED, _OTHER = "#d55e00", "#0072b2", "#999999"
_SHADES = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#999999")


def save_page(advice: Advice, script: Path, path: str | os.PathLike[str]) -> Path:
    """Write the page to a file.

    Raises:
        OSError: it could not be written.
    """
    return write_atomic(Path(path), render_page(advice, script))


def render_page(advice: Advice, script: Path) -> str:
    """Render the page, which needs no other file."""
    rows = "".join(f"<tr><th>{escape(label)}<td>{escape(fact)}" for label, fact in list_facts(advice))
    body = [f"<table>{rows}</table>", *draw_points(advice), *_draw_costs(advice)]
    sentences = [*list_findings(advice), *advice.reasons, *advice.notes]
    body += [f"<p>{escape(sentence)}</p>" for sentence in sentences]
    if advice.is_worth_it:
        body.append(f"<h2>What to change</h2><pre>{escape(chr(10).join(describe_change(script, advice)))}</pre>")
    title = "Nothing to gain"
    if advice.is_worth_it:
        title = f"{advice.gain[0]:.2f} times as fast" if advice.gain[0] > 1 else "Less memory"
    return fill_page(title, f"fasttrain tune {script}", "\n".join(body))


def draw_points(advice: Advice) -> Iterator[str]:
    """Yield the picture of time against memory, with the script as it is and the advice named."""
    # Bytes, ms, colour, name, and what a pointer shows.
    points: list[tuple[float, float, str, str, str]] = []
    for point in advice.points:
        if point["measured"]:
            shown = f"{point['name']}: {format_ms(point['ms'])} ms, {format_bytes(point['bytes'])}"
            points.append((point["bytes"], point["ms"], _OTHER, "", shown))
    if advice.before_ms:
        points.append((advice.before_bytes, advice.before_ms, _SCRIPT, "as it is", "the script as it is"))
    if advice.is_worth_it:
        points.append((advice.after_bytes, advice.after_ms, _ADVISED, "advised", "as advised"))
    if not points:
        return
    most_bytes = 1.1 * max(nbytes for nbytes, *_ in points)
    most_ms = 1.1 * max(ms for _, ms, *_ in points)
    yield "<h2>Time against memory of a step</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="time against memory">'
    across, up = (_WIDTH - 2 * _MARGIN) / most_bytes, (_HEIGHT - 2 * _MARGIN) / most_ms
    bottom = _HEIGHT - _MARGIN
    yield f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="{_OTHER}"/>'
    for part in (0.25, 0.5, 0.75, 1.0):
        x, y = _MARGIN + part * (_WIDTH - 2 * _MARGIN), bottom - part * (_HEIGHT - 2 * _MARGIN)
        yield f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{format_bytes(part * most_bytes)}</text>'
        yield f'<text x="{_MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{format_ms(part * most_ms)} ms</text>'
    for nbytes, ms, colour, name, shown in points:
        x, y = _MARGIN + nbytes * across, bottom - ms * up
        radius = 8 if name else 5
        yield f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{radius}" fill="{colour}"><title>{escape(shown)}</title></circle>'
        if name:
            yield f'<text x="{x + 12:.0f}" y="{y + 4:.0f}" style="fill:{colour};font-weight:600">{name}</text>'
    yield "</svg>"


def _draw_costs(advice: Advice) -> Iterator[str]:
    if not advice.costs:
        return
    yield "<h2>Where the time of a step of the script goes</h2>"
    parts = []
    for number, (what, ms) in enumerate(advice.costs):
        parts.append((what, ms, _SHADES[min(number, len(_SHADES) - 1)]))
    yield from draw_bar(parts, "costs of a step")
    total = sum(ms for _, ms in advice.costs) or 1.0
    yield "<table>"
    for what, ms, colour in parts:
        yield f'<tr><td><i style="background:{colour}"></i>{what}<td>{format_ms(ms)} ms<td>{ms / total:.0%}'
    yield "</table>"
