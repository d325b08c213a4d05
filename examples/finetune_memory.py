"""What QLoRA of large models takes, before there is a card: where the bytes are, and the peak of a step.

    python examples/finetune_memory.py [--models 8B,70B,8x7B] [--batch 1] [--length 2048]
                                       [--out examples/results/finetune_memory_predicted.json]

Llamas of 8 and 70 billion parameters and Mixtral's mixture of 8 × 7 billion, in bfloat16, rank 16 on all linear layers
and blocks recomputed. Nothing is allocated: tensors have shapes and lifetimes alone. The account says what the weights
are after surgery, kind by kind; the prediction what a step needs at its peak.
"""

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

import lightning as L
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import lightning_fasttrain as ft
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import package_version, versions

GIB = 2**30
LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8}
MODELS = {
    "8B": ("Llama", {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}),
    "70B": (
        "Llama",
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "8x7B": ("Mixtral", {"num_key_value_heads": 8}),  # as transformers has it by default
    "tiny": ("Llama", {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}),
    "tiny mixture": (
        "Mixtral",
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
    ),
}


class Module(L.LightningModule):
    """A language model with the loss that it brings, and AdamW on what trains."""

    def __init__(self, name):
        super().__init__()
        import transformers

        family, settings = MODELS[name]
        config = getattr(transformers, f"{family}Config")(**settings, use_cache=False)
        self.model = getattr(transformers, f"{family}ForCausalLM")(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-4)


def account(name):
    """Bytes of the weights after surgery: kind → GiB."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            module = Module(name)
    finally:
        torch.set_default_dtype(before)
    ft.apply(module, [ft.QLoRA(rank=16)])
    found = ft.finetune.account_bytes(module)
    return {kind: nbytes / GIB for kind, nbytes in found.by_kind().items()}


def predicted(name, batch, length):
    """Bytes at the peak of a step: category → GiB."""
    vocabulary = MODELS[name][1].get("vocab_size", 32_000)
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    techniques = [ft.QLoRA(rank=16), ft.ActivationCheckpointing(), ft.FusedLossHead()]
    report = ft.predict_memory(
        lambda: Module(name), {"input_ids": ids, "labels": ids}, techniques=techniques, precision="bf16-true"
    )
    return {"peak": report.peak_bytes / GIB, **{what: nbytes / GIB for what, nbytes in report.at_peak.items()}}


def table(rows):
    shown = Table(
        box=box.SIMPLE_HEAD,
        title="QLoRA, rank 16: GiB of the weights by kind, of the optimizer, and at the peak of a step",
    )
    columns = ("weights", "4 bits", "tables", "heads", "adapters", "AdamW", "peak")
    shown.add_column("model")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        kinds, step = row["weights"], row["step"]
        cells = [sum(kinds.values()), *(kinds.get(kind, 0.0) for kind in ("4 bits", "embeddings", "heads", "adapters"))]
        cells += [step["optimizer state"], step["peak"]]
        shown.add_row(row["model"], *(f"{cell:.2f}" for cell in cells))
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="8B,70B,8x7B", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("examples/results/finetune_memory_predicted.json"))
    options = parser.parse_args()
    console, rows = Console(), []
    for name in options.models.split(","):
        with console.status(f"{name}: the account of its bytes, and a step"):
            step = predicted(name, options.batch, options.length)
            rows.append({"model": name, "weights": account(name), "step": step})
    console.print(table(rows))
    report = {
        "versions": versions() | {name: package_version(name) for name in ("peft", "transformers", "bitsandbytes")},
        "command": shlex.join(["python", "examples/finetune_memory.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tokens": options.batch * options.length,
        "rows": rows,
    }
    write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
