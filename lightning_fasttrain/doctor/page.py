"""The page of a diagnosis: one HTML file without scripts or external resources, and the same as JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.messages import format_ms, number_of
from lightning_fasttrain.doctor.diagnosis import Diagnosis, describe_cost
from lightning_fasttrain.doctor.finding import Finding
from lightning_fasttrain.doctor.observation.measured import LineTime
from lightning_fasttrain.doctor.pictures import PHASES, draw_blocks, draw_memory, draw_phases

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
article { border-left: 4px solid #d1603d; padding: .2rem 0 .2rem 1rem; margin: 1rem 0; }
article.accuracy { border-color: #a33; }
div.cost { font-weight: 600; } .faint { opacity: .7; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; background: #8881; padding: .5rem; margin: .4rem 0; }
mark { background: #e3a63d55; color: inherit; display: block; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .8rem .15rem 0; }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
i.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
"""


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
    title = f"{format_ms(diagnosis.step_ms)} ms per step on {diagnosis.device}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>fasttrain doctor: {title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        f"<p class=faint>{number_of(diagnosis.steps, 'step')} timed, after a warm-up.</p>",
        "<h2>Where the time of a step goes</h2>",
        *draw_phases(diagnosis.phase_ms),
        *draw_blocks(diagnosis.block_ms),
        *draw_memory(diagnosis.memory),
        "<h2>What was found, the most expensive first</h2>",
        *_findings(diagnosis),
        *_lines(diagnosis),
        *[f"<p class=faint>{escape(note)}.</p>" for note in diagnosis.notes],
        "</html>\n",
    ]
    return "\n".join(parts)


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
        yield "<p class=faint>A line counts with all that it calls outside of your own files.</p>"
        yield from _table_of_lines(diagnosis.lines)


def _table_of_lines(lines: Sequence[tuple[str, LineTime]]) -> Iterator[str]:
    yield "<table><tr><th>ms/step<th>phase<th>line<th>"
    for phase, timed in lines:
        label = PHASES[phase][1]
        where, text = escape(str(timed.line)), escape(timed.line.text)
        yield f"<tr><td>{format_ms(timed.ms)}<td>{label}<td>{where}<td><code>{text}</code>"
    yield "</table>"
