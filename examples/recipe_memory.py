"""Predict the memory of the recipe "Fit a 7B fine-tune on 24 GB" in docs/recipes.md, without weights and without a GPU.

    python examples/recipe_memory.py [--out RESULTS.json]

The model is the default of transformers' LlamaConfig, written to a folder as a config.json. Each row is what
``fasttrain memory`` prints for it with other techniques; the table of docs/recipes.md has the same rows.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import versions

SETTINGS = ("--batch", "4", "--length", "2048", "--precision", "bf16-mixed")
TECHNIQUES = ("", "QLoRA", "QLoRA,ActivationCheckpointing", "QLoRA,ActivationCheckpointing,MicroBatching=4")


def predict(folder: str, techniques: str) -> int:
    """Return the peak in bytes that the command prints."""
    command = [sys.executable, "-m", "lightning_fasttrain.cli", "memory", "--hf", folder, *SETTINGS, "--json"]
    if techniques:
        command += ["--techniques", techniques]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(said)["peak_bytes"]


def as_lines(rows: list[dict]) -> list[str]:
    """Return the rows of the table of docs/recipes.md."""
    lines = []
    for row in rows:
        command = "fasttrain memory MODEL"
        if row["techniques"]:
            command += f" --techniques {row['techniques']}"
        lines.append(f"| `{command}` | {row['peak_bytes'] / 2**30:.2f} GiB |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="a file for the rows, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        rows = [{"techniques": techniques, "peak_bytes": predict(folder, techniques)} for techniques in TECHNIQUES]
    print("\n".join(as_lines(rows)))
    if options.out:
        found = {
            "versions": versions(),
            "command": f"python {Path(__file__).parent.name}/{Path(__file__).name}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "settings": SETTINGS,
            "rows": rows,
        }
        write_atomic(Path(options.out), json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
