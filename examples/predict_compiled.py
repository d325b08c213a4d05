"""Predict the peak memory of compiled blocks, and compare it with what an H200 has measured.

    python -m examples.predict_compiled [--out COMPILED.json]

Nothing is compiled, and no GPU is needed: the compiler's own partition of each block decides what is kept for the
backward. Rows of models whose shape has changed since they were measured are left out.
"""

import argparse
import json
from pathlib import Path

import lightning as L
import torch

import lightning_fasttrain as ft
from examples import rivals
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import versions

MEASURED = Path(__file__).parent / "results" / "h200" / "lines.jsonl"
SIDES = {"ours-fast": rivals.fast, "ours-lean": rivals.lean, "ours-lean-in-one": rivals.lean_in_one}


class Net(L.LightningModule):
    """The model of a measured row, with the optimizer that it was measured with."""

    def __init__(self, settings):
        super().__init__()
        self.model = rivals.build_model(argparse.Namespace(**settings))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def list_measured():
    """Return the measured rows with compiled blocks, of each piece the last."""
    rows = {}
    for line in map(json.loads, MEASURED.read_text().splitlines()):
        model, side = (*line["piece"].split(), "")[:2]
        result = line.get("result") or {}
        if side in SIDES and "peak_mib" in result and has_this_shape(result):
            measured = int(result["peak_mib"] * 2**20)
            rows[line["piece"]] = {
                **{"piece": line["piece"], "side": side.removeprefix("ours-"), "model": model},
                **{"settings": result["settings"], "measured_bytes": measured},
            }
    return list(rows.values())


def has_this_shape(result):
    """Return whether the model would be built as it was measured."""
    with torch.device("meta"):
        model = rivals.build_model(argparse.Namespace(**result["settings"]))
    return sum(parameter.numel() for parameter in model.parameters()) == result["parameters"]


def predict_row(row):
    """Return the predicted peak in bytes."""
    settings = row["settings"]
    ids = torch.zeros(settings["batch"], settings["length"], dtype=torch.long)
    report = ft.predict_memory(
        lambda: Net(settings),
        {"input_ids": ids, "labels": ids},
        precision=settings["precision"],
        techniques=SIDES[f"ours-{row['side']}"](),
    )
    return report.peak_bytes


def list_lines(rows):
    """Return the lines of a table in Markdown, of the rows with their predictions."""
    lines = ["| | predicted | measured | |", "| --- | --- | --- | --- |"]
    for row in rows:
        sizes = [f"{row[name] / 2**30:.2f} GiB" for name in ("predicted_bytes", "measured_bytes")]
        lines.append(f"| {row['piece']} | {' | '.join(sizes)} | {row['error']:+.1%} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the rows")
    options = parser.parse_args()
    rows = []
    for row in list_measured():
        row["predicted_bytes"] = predict_row(row)
        row["error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        rows.append(row)
    print("\n".join(list_lines(rows)))
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    print(f"mean error {mean:.1%} of {len(rows)} rows")
    if options.out:
        found = {"command": "python -m examples.predict_compiled", "versions": versions(), "mean_error": mean}
        write_atomic(options.out, json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
