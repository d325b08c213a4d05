"""Predictions for many GPUs beside published measurements: memory of a rank, and tokens per second at a stated MFU.

    python examples/scale_published.py [--out RESULTS.json]

The measurements are torchtitan's, of Llama 3 with 8,192 tokens: on H100s in its benchmarks/llama3_h100_202412, on A100s
in its docs/performance, whose MFU counts embeddings. Models are built without memory; Hugging Face's Llama stands for
torchtitan's. What is published is the memory that the allocator reserves, and what is predicted is that of tensors. The
time of GPT-2 is llm.c's, in its scripts/run_gpt2_124M.sh, beside the MFU that ``estimate_training`` assumes by default.
"""

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import reference_models
import torch
from torch.utils.checkpoint import CheckpointPolicy

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.device import versions
from lightning_fasttrain.estimate import find_accelerator, palm_flops_per_token

LENGTH, VOCABULARY, KV_HEADS = 8192, 128256, 8
SHAPES = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64)}  # layers, width, MLP width, heads
# Model, GPUs → GiB; FSDP with selective recomputation and 2 sequences a GPU, table 1 and 3.
MEMORY = {("8B", 8): 82.4, ("8B", 128): 67.0}
# Model, accelerator, whether embeddings count as parameters, MFU → tokens per second and GPU.
SPEED = {
    ("8B", "H100", False, 0.33): 5762,
    ("8B", "H100", False, 0.39): 6667,
    ("8B", "A100", True, 0.582): 2973,
    ("70B", "A100", True, 0.517): 331,
}
GPT2_STEPS, GPT2_MINUTES = 18865, 94.3  # of 524,288 tokens on eight A100


class EverySecondProduct(ft.model.SelectiveOps):
    """Torchtitan's selective recomputation: it keeps every second product with a weight, of seven in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.products = {False: 0, True: 0}  # in the block so far, when it is computed and when it is recomputed

    def keeps(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = super().keeps(context, op, *args, **kwargs)
        if op is not torch.ops.aten.mm.default:
            return kept
        again = context is not None and context.is_recompute
        self.products[again] = self.products[again] % 7 + 1
        return CheckpointPolicy.PREFER_RECOMPUTE if self.products[again] % 2 == 0 else kept


def llama(name: str) -> Any:
    layers, width, inner, heads = SHAPES[name]
    hf: Any = require("transformers", extra="finetune")
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
    )
    return reference_models.Supervised(hf.LlamaForCausalLM(config).train(), reference_models._own_loss)


def memory_row(name: str, world: int, published: float) -> dict[str, Any]:
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    report = ft.predict_memory(
        lambda: llama(name),
        {"input_ids": tokens, "labels": tokens},
        techniques=[ft.ActivationCheckpointing(EverySecondProduct())],
        precision="bf16-mixed",
        strategy=ft.FSDP2Strategy(),
        world=world,
    )
    what = f"GiB of a rank, Llama 3 {name} on {world} H100"
    return {"what": what, "published": published, "predicted": report.peak_bytes / 2**30}


def speed_row(name: str, gpu: str, embeddings: bool, mfu: float, published: float) -> dict[str, Any]:
    layers, width, _, heads = SHAPES[name]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in llama(name).parameters())
    parameters -= 0 if embeddings else VOCABULARY * width
    flops = palm_flops_per_token(parameters, layers, heads, width // heads, LENGTH)
    what = f"tokens/s of a GPU, Llama 3 {name} on {gpu} at {mfu:.1%} MFU"
    return {"what": what, "published": published, "predicted": find_accelerator(gpu).flops * mfu / flops}


def time_row() -> dict[str, Any]:
    hf: Any = require("transformers", extra="finetune")
    with torch.device("meta"):
        module = reference_models.Supervised(hf.GPT2LMHeadModel(hf.GPT2Config()).train(), reference_models._own_loss)
    tokens = torch.zeros(1, 1024, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    speed = ft.estimate.estimate_training(module, batch, GPT2_STEPS * 524288, gpu="A100:8").speed
    what = f"minutes of GPT-2 124M on 8 A100 at the assumed MFU of {speed.mfu:.0%}"
    return {"what": what, "published": GPT2_MINUTES, "predicted": 60 * speed.hours}


def as_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the results."""
    lines = ["| | published | predicted | error |", "| --- | --- | --- | --- |"]
    for row in rows:
        shown = ("{:,.1f}" if row["published"] < 100 else "{:,.0f}").format
        cells = [row["what"], shown(row["published"]), shown(row["predicted"]), f"{error_of(row):+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def error_of(row: dict[str, Any]) -> float:
    return row["predicted"] / row["published"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows = [memory_row(*setting, published) for setting, published in MEMORY.items()]
    rows += [speed_row(*setting, published) for setting, published in SPEED.items()]
    rows.append(time_row())
    print("\n".join(as_lines(rows)))
    if options.out is not None:
        about = {
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/scale_published.py", *sys.argv[1:]])),
        }
        write_atomic(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
