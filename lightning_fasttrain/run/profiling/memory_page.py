"""Memory over time as one interactive HTML page without external resources."""

import json
from functools import reduce
from html import escape

from lightning_fasttrain.core.messages import format_bytes
from lightning_fasttrain.run.profiling.memory_record import CATEGORIES, MemoryRecord

COLOURS = dict(zip(CATEGORIES, ("#3f68a8", "#e3a63d", "#8f7cbf", "#e0775c", "#b3b7bf", "#4f9f78"), strict=True))


def memory_page(record: MemoryRecord) -> str:
    """Render the page: a stacked timeline and a table; about four thousand points of the record, including the peak.

    Example:
        >>> page = memory_page(MemoryRecord("cpu", [], end_ms=1.0))
        >>> "0 B at the peak" in page, "http" in page
        (True, False)
    """
    places: dict[tuple[str, ...], int] = {}
    points = []
    for point in record.sample():
        change, place, taken = point.change, ("", "", "", ""), 0
        if change is not None:
            place = change.category, change.name, change.module, change.op
            # The time tells an allocation from a free.
            taken = change.nbytes if change.begin_ms == point.ms else -change.nbytes
        points.append([round(point.ms, 4), *point.nbytes, taken, places.setdefault(place, len(places))])
    data = {
        "categories": CATEGORIES,
        "end": record.end_ms,
        "steps": record.steps_ms,
        "peak": [record.peak.ms, record.peak_bytes],
        "failed": record.failed_ms,
        "places": list(places),
        "points": points,
    }
    colours = [f"--c{i}: {colour};" for i, colour in enumerate(COLOURS.values())]
    rows = [_row(record, i, category) for i, category in enumerate(CATEGORIES)]
    parts = {
        "title": escape(f"{format_bytes(record.peak_bytes)} at the peak"),
        "summary": escape(f"on {record.device}, {record.where}"),
        "colours": " ".join(colours),
        "rows": "\n".join(rows),
        "total": format_bytes(record.peak_bytes),
        # Inserted last, since a name in the data may look like a placeholder.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # prevents tags in the data
    }
    return reduce(lambda page, part: page.replace(f"%{part[0]}%", part[1]), parts.items(), _PAGE)


def _row(record: MemoryRecord, i: int, category: str) -> str:
    nbytes, holders = record.at_peak[category], record.holders(category)
    share = nbytes / (record.peak_bytes or 1)
    largest = f"<code>{escape(holders[0].name)}</code> {format_bytes(holders[0].nbytes)}" if holders else ""
    return (
        f'<tr><td><i style="background: var(--c{i})"></i>{category}</td><td>{format_bytes(nbytes)}</td>'
        f'<td><span class="bar" style="width: {share * 4:.2f}em; background: var(--c{i})"></span>{share:.0%}</td>'
        f"<td>{format_bytes(record.peaks[category])}</td><td>{largest}</td></tr>"
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%title%</title>
<style>
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #22252b; --faint: #70757f; --line: #e2e2dc; %colours% }
@media (prefers-color-scheme: dark) {
  :root { --paper: #17191d; --ink: #e8e8e4; --faint: #989da8; --line: #30343c; }
}
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { margin: 0; font-size: 2.1rem; font-weight: 650; letter-spacing: -0.02em; line-height: 1.2; }
p { margin: 0.3rem 0 1.6rem; color: var(--faint); }
#legend { display: flex; flex-wrap: wrap; gap: 0.2rem 0.4rem; margin-left: -0.5rem; }
#legend button { border: 0; border-radius: 0.4rem; padding: 0.15rem 0.5rem; background: none; color: inherit;
  font: inherit; cursor: pointer; }
#legend button:hover, #legend button:focus-visible { background: var(--line); outline: none; }
#legend button[aria-pressed="false"] { opacity: 0.4; text-decoration: line-through; }
i { display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.5em; border-radius: 0.2em; }
figure { position: relative; margin: 0.6rem 0 0; }
svg { display: block; width: 100%; height: 26rem; cursor: crosshair; touch-action: pan-y; user-select: none; }
svg text { fill: var(--faint); font-size: 12px; }
svg line { stroke: var(--line); }
svg .area { transition: opacity 0.12s; }
svg .mark { stroke: var(--ink); stroke-dasharray: 3 3; }
svg .strong { fill: var(--ink); font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
#hint { min-height: 1.5em; text-align: right; font-size: 13px; }
#tip { position: absolute; top: 0; left: 0; visibility: hidden; pointer-events: none; max-width: 22rem;
  padding: 0.6rem 0.8rem; border: 1px solid var(--line); border-radius: 0.5rem; background: var(--paper);
  box-shadow: 0 4px 16px #0002; font-size: 13px; }
#tip table { width: 100%; }
#tip td { padding: 0 0 0 1rem; border: 0; text-align: right; }
#tip td:first-child { padding: 0; text-align: left; }
#tip .here { font-weight: 650; }
#tip div { margin-top: 0.4rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--faint); font-weight: 500; }
th, td { padding: 0.4rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
th:last-child, td:last-child { width: 45%; padding-right: 0; text-align: left; white-space: normal; }
tfoot td { border: 0; font-weight: 650; }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
.bar { display: inline-block; height: 0.6em; margin-right: 0.6em; border-radius: 0.15em; }
</style>
</head>
<body>
<h1>%title%</h1>
<p>%summary%</p>
<div id="legend"></div>
<figure>
<svg id="chart" role="img" aria-label="Memory over time, stacked by category"></svg>
<div id="tip"></div>
</figure>
<p id="hint">Drag to zoom in.</p>
<table>
<thead><tr><th>category</th><th>at the peak</th><th>share</th><th>own peak</th><th>largest holder</th></tr></thead>
<tbody>
%rows%
</tbody>
<tfoot><tr><td>all</td><td>%total%</td><td></td><td></td><td></td></tr></tfoot>
</table>
<script>
const data = %data%;
const names = data.categories, points = data.points;
const find = id => document.getElementById(id);
const svg = find("chart"), tip = find("tip");
const pad = { left: 76, right: 12, top: 34, bottom: 30 };
const shown = names.map(() => true);
let from = 0, until = data.end, width = 0, height = 0, top_ = 1, dragged = null;

function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return (n / size).toFixed(2) + " " + unit;
  return n + " B";
}
const round = n => bytes(n).replace(".00", "");
const ms = t => t.toFixed(until - from < 20 ? 3 : 1) + " ms";
const escape_ = text => text.replace(/[&<>]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const x = t => pad.left + (t - from) / (until - from || 1) * (width - pad.left - pad.right);
const y = n => height - pad.bottom - n / top_ * (height - pad.top - pad.bottom);
const time = px => from + (px - pad.left) / (width - pad.left - pad.right) * (until - from);
const sum = point => names.reduce((all, _, i) => all + (shown[i] ? point[i + 1] : 0), 0);

function at(t) {  // the last point that is not after t
  let low = 0, high = points.length;
  while (high - low > 1) { const middle = (low + high) >> 1; points[middle][0] <= t ? low = middle : high = middle; }
  return low;
}

function line(x1, y1, x2, y2, kind = "") {
  return `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${kind}"/>`;
}

function words(x1, y1, text, anchor, kind = "") {
  return `<text x="${x1}" y="${y1}" text-anchor="${anchor}" class="${kind}">${text}</text>`;
}

function area(i, seen) {  // steps, not slopes: memory is constant until it changes
  const base = point => names.reduce((all, _, j) => all + (j < i && shown[j] ? point[j + 1] : 0), 0);
  let upper = "", lower = "";
  seen.forEach((point, k) => {
    const left = x(Math.max(point[0], from)).toFixed(1);
    const right = x(k + 1 < seen.length ? seen[k + 1][0] : until).toFixed(1);
    const low = y(base(point)).toFixed(1), high = y(base(point) + point[i + 1]).toFixed(1);
    upper += `${k ? "L" : "M"}${left},${high}H${right}`;
    lower = `L${right},${low}H${left}` + lower;
  });
  return `<path class="area" data-i="${i}" d="${upper + lower}Z" fill="var(--c${i})"/>`;
}

function draw() {
  width = svg.clientWidth; height = svg.clientHeight;
  const seen = points.slice(at(from), at(until) + 1);
  top_ = Math.max(1, ...seen.map(sum)) * 1.05;
  let out = "";
  const tick = 2 ** Math.ceil(Math.log2(top_ / 8));
  for (let n = 0; n <= top_; n += tick)
    out += line(pad.left, y(n), width - pad.right, y(n)) + words(pad.left - 10, y(n) + 4, round(n), "end");
  names.forEach((_, i) => { if (shown[i]) out += area(i, seen); });
  const rough = (until - from) / 7, ten = 10 ** Math.floor(Math.log10(rough));
  const every = ten * [1, 2, 5, 10].find(m => m * ten >= rough);
  for (let t = Math.ceil(from / every) * every; t <= until; t += every)
    out += words(x(t), height - 8, +t.toPrecision(6) + " ms", "middle");
  data.steps.forEach((t, i) => {
    if (t >= from && t < until)
      out += line(x(t), pad.top - 20, x(t), height - pad.bottom) +
        words(x(t) + 6, pad.top - 16, "step " + (i + 1), "start");
  });
  const [t, n] = data.peak;
  if (t >= from && t <= until && shown.every(Boolean)) {
    const side = x(t) > width * 0.7 ? -1 : 1;
    out += line(x(t), y(n), x(t), height - pad.bottom, "mark") +
      `<circle cx="${x(t)}" cy="${y(n)}" r="4.5" fill="var(--ink)" stroke="var(--paper)" stroke-width="2"/>` +
      words(x(t) + side * 10, y(n) - 6, "peak " + bytes(n), side > 0 ? "start" : "end", "strong halo");
  }
  if (data.failed !== null && data.failed >= from && data.failed <= until)
    out += line(x(data.failed), pad.top - 20, x(data.failed), height - pad.bottom, "mark") +
      words(x(data.failed) - 6, pad.top - 16, "out of memory", "end", "strong halo");
  svg.innerHTML = out + `<line id="cursor" class="mark" visibility="hidden"/>` +
    `<rect id="chosen" fill="var(--ink)" opacity="0.12" height="${height - pad.top - pad.bottom}" y="${pad.top}"/>`;
}

function set(id, attributes) {
  for (const [key, value] of Object.entries(attributes)) find(id).setAttribute(key, value);
}

function highlight(i) {
  for (const path of svg.querySelectorAll(".area")) path.style.opacity = i < 0 || +path.dataset.i === i ? 1 : 0.45;
}

function leave() {
  tip.style.visibility = "hidden";
  set("cursor", { visibility: "hidden" });
  highlight(-1);
}

function latest(point) {
  const change = point[7], [category, name, module, op] = data.places[point[8]].map(escape_);
  if (!change) return "at the start";
  const where = [op, module && "in " + module].filter(Boolean).join(" ");
  return (change > 0 ? "+" : "−") + bytes(Math.abs(change)) + " " + category + (name && " of " + name) +
    (where && `<br><code>${where}</code>`);
}

function hover(event) {
  const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  if (px < pad.left || px > width - pad.right) return leave();
  const point = points[at(time(px))];
  let base = 0, here = -1;
  names.forEach((_, i) => {
    if (!shown[i]) return;
    if (py <= y(base) && py > y(base + point[i + 1])) here = i;
    base += point[i + 1];
  });
  highlight(here);
  const rows = names.map((name, i) => `<tr class="${i === here ? "here" : ""}"><td>` +
    `<i style="background: var(--c${i})"></i>${name}</td><td>${bytes(point[i + 1])}</td></tr>`);
  const all = `<tr class="here"><td>all</td><td>${bytes(sum(point))}</td></tr>`;
  tip.innerHTML = `<b>${ms(time(px))}</b><table>${rows.reverse().join("")}${all}</table><div>${latest(point)}</div>`;
  const left = px > width / 2 ? px - tip.offsetWidth - 16 : px + 16;
  tip.style.transform = `translate(${left}px, ${Math.min(py, height - tip.offsetHeight)}px)`;
  tip.style.visibility = "visible";
  set("cursor", { x1: px, x2: px, y1: pad.top, y2: height - pad.bottom, visibility: "visible" });
  if (dragged !== null) set("chosen", { x: Math.min(px, dragged), width: Math.abs(px - dragged) });
}

function zoom(a, b) {
  [from, until] = [Math.max(0, a), Math.min(data.end, b)];
  find("hint").textContent = from > 0 || until < data.end ? "Double-click to see all of it." : "Drag to zoom in.";
  draw();
}

svg.addEventListener("pointermove", hover);
svg.addEventListener("pointerleave", () => { dragged = null; leave(); });
svg.addEventListener("pointerdown", event => { dragged = event.clientX - svg.getBoundingClientRect().left; });
svg.addEventListener("pointerup", event => {
  const px = event.clientX - svg.getBoundingClientRect().left, start = dragged;
  dragged = null;
  if (start !== null && Math.abs(px - start) > 8) zoom(time(Math.min(px, start)), time(Math.max(px, start)));
});
svg.addEventListener("dblclick", () => zoom(0, data.end));
addEventListener("resize", draw);

names.forEach((name, i) => {
  const button = document.createElement("button");
  button.innerHTML = `<i style="background: var(--c${i})"></i>${name}`;
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    shown[i] = !shown[i];
    button.setAttribute("aria-pressed", shown[i]);
    draw();
  });
  button.addEventListener("mouseenter", () => highlight(i));
  button.addEventListener("mouseleave", () => highlight(-1));
  find("legend").append(button);
});
draw();
</script>
</body>
</html>
"""
