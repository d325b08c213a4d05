"""What the lines of ``prove.py`` say: a Markdown table for the README, and a picture."""

import sys
from importlib.util import find_spec
from pathlib import Path

from pieces import PIECES

sys.path.append(str(Path(__file__).parents[1]))
from against import summarise

from lightning_fasttrain.core.atomic_write import write_atomic

# Dense bf16 TFLOPS of the makers' data sheets. The first name that is in the card's is taken.
DATA_SHEET_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "A100": 312,
    "L40S": 362,
    "B200": 2250,
}
MODELS = {"gpt2": "GPT-2 124M", "gpt2-medium": "GPT-2 354M", "gpt2-xl": "GPT-2 1.6B", "llama-1b": "Llama 1.3B"}
UNTIED = ("llama-1b",)  # their embeddings are no heads
LAST_STEPS = 50
DONE = "done"


def flops_per_token(parameters, layers, width, context, unmultiplied=0):
    """Forward and backward: 6 for each parameter that is multiplied, and 12·layers·width·context for attention.

    The convention of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B): a head that is tied to
    the embedding counts once, an embedding of its own, which is looked up, does not; recomputation counts for nothing;
    and attention counts whole, though half is masked.
    """
    return 6 * (parameters - unmultiplied) + 12 * layers * width * context


def data_sheet_tflops(card):
    """None for a card that is not in the table."""
    return next((tflops for name, tflops in DATA_SHEET_TFLOPS.items() if name in card), None)


def result_of(lines, name):
    """What a piece found, or None if it is not done."""
    line = lines.get(name)
    return line["result"] if line is not None and line["status"] == DONE else None


def gpt2_rows(lines, model="gpt2"):
    """A row for each side of the comparison on a model, with tokens/s, MFU and peak."""
    runs = []
    for name, line in lines.items():
        if name.startswith(f"{model} ") and not line["status"].startswith("skipped"):
            error = None if line["status"] == DONE else line["status"]
            runs.append({"side": name.split()[1], **(line["result"] or {}), "error": error})
    good = [run for run in runs if run["error"] is None]
    rows = summarise(runs) if good else []
    ceilings = result_of(lines, "ceilings")
    for row in rows:
        if row["error"] is not None:
            continue
        run = next(run for run in good if run["side"] == row["side"])
        shape = run["settings"]
        embedding = shape["vocabulary"] * shape["width"] if model in UNTIED else 0
        sizes = shape["layers"], shape["width"], shape["length"]
        per_token = flops_per_token(run["parameters"], *sizes, unmultiplied=embedding)
        tflops = row["tokens_per_s"] * per_token / 1e12
        card = lines[next(name for name in lines if name.startswith(f"{model} "))]["hardware"]["gpu"]
        sheet = data_sheet_tflops(card or "")
        row["mfu_of_ceiling"] = tflops / ceilings["tflops"] if ceilings else None
        row["mfu_of_data_sheet"] = tflops / sheet if sheet else None
    return rows


def share(value):
    return f"{value:.1%}" if value is not None else ""


def gpt2_cells(row):
    if row["error"] is not None:
        return [row["title"], row["error"], "", "", "", ""]
    return [
        row["title"],
        f"{row['step_ms']:,.1f}",
        f"{row['tokens_per_s']:,.0f}",
        share(row["mfu_of_ceiling"]),
        share(row["mfu_of_data_sheet"]),
        f"{row['peak_mib'] / 1024:.2f}",
    ]


def parity(lines):
    """One sentence about both runs, or None while one is missing."""
    naive, top = (result_of(lines, f"parity {way}") for way in ("naive", "top"))
    if naive is None or top is None:
        return None
    difference = max(abs(a - b) for a, b in zip(naive["losses"], top["losses"], strict=True))
    ends = [sum(run["losses"][-LAST_STEPS:]) / len(run["losses"][-LAST_STEPS:]) for run in (naive, top)]
    steps = len(naive["losses"])
    return (
        f"{steps:,} steps: losses differ by at most {difference:.2g}; mean of the last {min(LAST_STEPS, steps)} "
        f"{ends[0]:.4f} naive, {ends[1]:.4f} at the top ({top['source']})"
    )


def about_ceilings(found):
    copies = ", ".join(f"{speed:,.0f} GB/s {way}" for way, speed in found["gb_per_s"].items())
    return f"products {found['tflops']:,.1f} TFLOPS; copies {copies}"


def about_tests(found):
    names = f": {', '.join(found['names'])}" if found["names"] else ""
    return f"{found['passed']} passed, {found['skipped']} skipped, {found['failed'] + found['errors']} failed{names}"


def about_prediction(found):
    return f"largest error {found['largest_error']:.1%} in {len(found['rows'])} cases"


def about_ladder(found):
    tops = [
        f"{name} {top['speedup']:.2f} times naive's speed in {top['memory_ratio']:.1f} times less memory"
        for name, top in found["tops"].items()
        if top is not None
    ]
    return "; ".join(tops) or "no rung halves naive's memory"


def about_parity(found):
    speed = f", {found['step_ms']:.1f} ms/step" if "step_ms" in found else ""  # none beside other work
    return f"loss {found['losses'][0]:.4f} → {found['loss']:.4f}{speed}"


def about_cold_start(found):
    return "; ".join(
        f"{row['blocks']} blocks, {row['kind']}: {row['cold']['s']:.1f} s, again {row['again']['s']:.1f} s"
        for row in found["rows"]
    )


def about_budget(found):
    limited = [row for row in found["rows"] if row["limit_gib"] and row["peak_gib"]]
    within = sum(row["peak_gib"] <= row["limit_gib"] for row in limited)
    return f"peak within the limit: {within} of {len(limited)}"


def about_offload(found):
    good = [row for row in found["results"] if "time_ratio" in row and row["way"] != "plain"]
    return "; ".join(
        f"{row['size']} {row['way']}: ×{row['time_ratio']:.2f} time, ×{row['peak_ratio']:.2f} peak" for row in good
    )


def about_chunked_loss(found):
    good = [row for row in found["rows"] if row["error"] is None]
    return "; ".join(f"{row['way']} {row['step_ms']:.1f} ms, {row['added_mib']:,.0f} MiB" for row in good)


def about_qlora(found):
    peak = f", {found['peak_gib']:.2f} GiB" if found["peak_gib"] is not None else ""
    return f"{found['tokens_per_s']:,.0f} tokens/s{peak}"


def about_experts(found):
    gib = {key: found[f"{key}_bytes"] for key in ("counted", "allocated", "peak")}
    said = [f"{key} {value / 2**30:.2f} GiB" for key, value in gib.items() if value is not None]
    return f"{', '.join(said)}; {found['tokens_per_s']:,.0f} tokens/s, loss {found['loss']:.4f}"


def about_low_precision(found):
    good = [row for row in found["rows"] if row["error"] is None]
    said = [f"{row['way']} {row['step_ms']:.1f} ms, loss off by {row.get('loss_difference', 0):.2g}" for row in good]
    return "; ".join([*said, *(f"{row['way']}: {row['error']}" for row in found["rows"] if row["error"])])


def about_zero(found):
    said = []
    for row in found["rows"]:
        peak = f", {row['peak_gib']:.2f} GiB" if row["peak_gib"] is not None else ""
        said.append(
            f"stage {row['stage']}: {row['ms']:.0f} ms{peak}" if row["fits"] else f"{row['stage']} does not fit"
        )
    return "; ".join(said)


def about_step_profile(found):
    return "; ".join(
        f"{row['side']} {row['step_ms']:.1f} ms, host {row['host_ms']:.1f} ms, {row['kernels']:,} kernels of "
        f"{row['kernel_ms']:.1f} ms"
        for row in found["rows"]
    )


ABOUT = {
    "doctor": lambda found: f"{len(found['text'])} lines",
    "ceilings": about_ceilings,
    "tests": about_tests,
    "prediction": about_prediction,
    "ladder": about_ladder,
    "parity": about_parity,
    "cold": about_cold_start,
    "budget": about_budget,
    "offload": about_offload,
    "chunked": about_chunked_loss,
    "qlora": about_qlora,
    "experts": about_experts,
    "low": about_low_precision,
    "zero": about_zero,
    "step": about_step_profile,
}


def describe(piece, line):
    """One cell: what was found, and how the piece ended if it is not done."""
    if line is None:
        return "not run yet"
    status = "" if line["status"] == DONE else line["status"]
    about = ABOUT.get(piece.split()[0])
    if line["result"] is None or about is None:
        return status
    return f"{status}; {about(line['result'])}" if status else about(line["result"])


def as_markdown(lines):
    machines = {
        f"{line['hardware']['gpu'] or line['hardware']['cpu']}, torch {line['versions']['torch']}"
        for line in lines.values()
    }
    dates = sorted(line["date"][:10] for line in lines.values())
    parts = [f"Measured on {'; '.join(sorted(machines))}, {dates[0]} to {dates[-1]}." if lines else "Nothing measured."]
    if any(line["tiny"] for line in lines.values()):
        parts[0] += " **Tiny sizes: these figures say nothing.**"
    for model, title in MODELS.items():
        rows = gpt2_rows(lines, model)
        if rows:
            columns = [title, "ms/step", "tokens/s", "MFU of the ceiling", "of the data sheet", "peak GiB"]
            parts.append(table(columns, map(gpt2_cells, rows)))
    others = [piece.name for piece in PIECES if piece.name.split()[0] not in MODELS]
    parts.append(table(["piece", "found"], ([name, describe(name, lines.get(name))] for name in others)))
    both = parity(lines)
    return "\n\n".join([*parts, *([both] if both else [])]) + "\n"


def table(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save_picture(lines, path):
    """Tokens/s and peak of each side, and the two curves of losses; None without matplotlib or anything to draw."""
    rows = [row for row in gpt2_rows(lines) if row["error"] is None]
    curves = {way: result_of(lines, f"parity {way}") for way in ("naive", "top")}
    if find_spec("matplotlib") is None or not (rows or any(curves.values())):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    speed, memory, losses = figure.subplots(1, 3)
    titles = [row["title"] for row in rows]
    speed.barh(titles, [row["tokens_per_s"] for row in rows])
    speed.set(title="GPT-2 124M, tokens/s")
    memory.barh(titles, [row["peak_mib"] / 1024 for row in rows])
    memory.set(title="peak GiB", yticklabels=[])
    for way, found in curves.items():
        if found is not None:
            losses.plot(found["losses"], label=way, linewidth=0.8)
    losses.set(title="loss, step by step")
    if any(curves.values()):
        losses.legend()
    return write_atomic(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def write_report(lines, folder):
    """Write ``report.md`` and ``prove.png`` beside the lines; the text."""
    text = as_markdown(lines)
    write_atomic(folder / "report.md", text)
    save_picture(lines, folder / "prove.png")
    return text
