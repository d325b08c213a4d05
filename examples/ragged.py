"""Padded batches in micro-batches: CPU time, memory and gradient of each way to run them.

    python examples/ragged.py [--lengths text,log-normal,bimodal,speech] [--seeds 5] [--out RESULTS.json]

Batches of 32 samples: real text (paragraphs of the standard library's source), and three synthetic distributions of
lengths. Each way computes the gradient of the same batches: the whole padded batch, 8 micro-batches with its padding,
8 micro-batches of rows of similar length without it, as many as hold a budget of tokens, and 8 whose blocks run no
padding at all. The ways take turns; times are CPU time of forward and
backward, medians over rounds, and ratios are means over seeds, to the whole padded batch. ``--trainers log-normal``
adds an epoch in Hugging Face's Trainer, with and without batches grouped by length, which makes other batches, beside
one in Lightning's with ours. ``--out`` writes a picture beside the figures.
"""

import argparse
import datetime
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_fasttrain as ft
from lightning_fasttrain.bench.text import read_text
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.micro_batching import check_padding_free, remove_padding_

ROWS, PARTS, VOCABULARY, LONGEST, MEL = 32, 8, 4096, 384, 64
MIB = 2**20
WAYS = {
    "whole batch": {"n": 1},
    "8 micro-batches": {"n": PARTS, "trim_padding": False},
    "8 trimmed": {"n": PARTS},
    "budget": {},  # of tokens: a quarter of the padded batch
    "8 padding-free": {"n": PARTS},
}


def draw_lengths(kind, count, generator):
    """Return the lengths of some samples."""
    if kind == "log-normal":
        lengths = torch.exp(4.4 + 0.55 * torch.randn(count, generator=generator))
    elif kind == "bimodal":  # short answers, and a quarter of long ones
        is_long = torch.rand(count, generator=generator) < 0.25
        short, long = (
            low + (high - low) * torch.rand(count, generator=generator) for low, high in ((16, 70), (250, 384))
        )
        lengths = torch.where(is_long, long, short)
    else:
        lengths = 220 + 65 * torch.randn(count, generator=generator)
    return lengths.long().clamp(8, LONGEST)


def read_paragraphs(count, generator):
    """Return paragraphs of real text as token ids: words and signs, each by its checksum."""
    paragraphs = [part for part in re.split(rb"\n\s*\n", read_text(max_mib=2)) if len(part) > 40]
    found = []
    for place in torch.randint(len(paragraphs), (count,), generator=generator).tolist():
        words = re.findall(rb"\w+|[^\w\s]", paragraphs[place])[:LONGEST]
        found.append(torch.tensor([1 + zlib.crc32(word) % (VOCABULARY - 1) for word in words]))
    return found


def make_samples(kind, count, seed):
    """Return samples of different lengths: token ids with a label for each, or frames of a spectrogram with one."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "text":
        return [{"input_ids": ids} for ids in read_paragraphs(count, generator)]
    samples = []
    for length in draw_lengths(kind, count, generator).tolist():
        if kind == "speech":
            samples.append({"frames": torch.randn(length, MEL, generator=generator)})
        else:
            samples.append({"input_ids": torch.randint(1, VOCABULARY, (length,), generator=generator)})
    return samples


def collate(samples):
    name = next(iter(samples[0]))
    values = torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample[name]) for sample in samples])
    mask = torch.arange(values.shape[1])[None] < lengths[:, None]
    batch = {name: values, "attention_mask": mask.long()}
    if name == "input_ids":
        batch["labels"] = ((7 * values + 1) % VOCABULARY).masked_fill(~mask, -100)
    else:
        batch["labels"] = (values.abs().sum((1, 2)).long() % 10).clone()
    return batch


class Listener(torch.nn.Module):
    """An encoder of frames, whose mean over the frames that are not padding is classified."""

    def __init__(self, width=192):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.enter, self.head = torch.nn.Linear(MEL, width), torch.nn.Linear(width, 10)
        self.encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, frames, attention_mask, labels):
        x = self.encoder(self.enter(frames), src_key_padding_mask=attention_mask == 0)
        kept = attention_mask[..., None]
        return {"loss": F.cross_entropy(self.head((x * kept).sum(1) / kept.sum(1)), labels)}


def build_model(kind):
    torch.manual_seed(0)
    if kind == "speech":
        return Listener()
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=768,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


class Side:
    """A way to compute the gradient of a batch."""

    def __init__(self, way, kind, batch):
        self.model, self.batch, self.times = build_model(kind), batch, []
        self.how = dict(WAYS[way])
        if way == "budget":
            rows, length = batch["attention_mask"].shape
            self.how["max_tokens"] = rows // 4 * length
        if way == "8 padding-free":
            remove_padding_(self.model)
            check_padding_free(lambda rows: self.compute_loss(rows)["loss"], batch)

    def step(self):
        self.model.zero_grad()
        if self.how == {"n": 1}:
            self.compute_loss(self.batch)["loss"].backward()
        else:
            ft.accumulate_gradients(self.compute_loss, self.batch, **self.how)

    def compute_loss(self, batch):
        return self.model(**batch)

    def measure_time(self):
        started = time.process_time()
        self.step()
        self.times.append(1e3 * (time.process_time() - started))

    def measure_memory(self):
        self.model.zero_grad()
        with ft.profiling.PeakMemory("cpu", self.model, self.batch) as peak:
            self.step()
        return peak.added_bytes / MIB

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def compare(kind, seed, rounds):
    """Return the figures of each way for one batch."""
    batch = collate(make_samples(kind, ROWS, seed))
    sides = {way: Side(way, kind, batch) for way in WAYS}
    for side in sides.values():
        side.step()  # finds how the loss is split, and the padding
    for _ in range(rounds):
        for side in sides.values():
            side.measure_time()
    whole = sides["whole batch"]
    expected, whole_ms = whole.gradient(), statistics.median(whole.times)
    rows = []
    for way, side in sides.items():
        error = (side.gradient() - expected).norm() / expected.norm()
        ms = statistics.median(side.times)
        row = {"way": way, "ms": ms, "speed": whole_ms / ms, "error": float(error)}
        rows.append({**row, "added_mib": side.measure_memory()})
    mask = batch["attention_mask"]
    return {"seed": seed, "padding": 1 - float(mask.float().mean()), "longest": mask.shape[1], "ways": rows}


def summarize(kind, results):
    """Print and return the means over seeds."""
    padding = statistics.mean(one["padding"] for one in results)
    print(f"{kind}: {padding:.0%} padding", flush=True)
    rows = []
    for place, way in enumerate(WAYS):
        seen = [one["ways"][place] for one in results]
        speeds = [one["speed"] for one in seen]
        row = {"way": way, "speed": statistics.mean(speeds), "slowest": min(speeds), "fastest": max(speeds)}
        row["ms"] = statistics.mean(one["ms"] for one in seen)
        row["added_mib"] = statistics.mean(one["added_mib"] for one in seen)
        row["error"] = max(one["error"] for one in seen)
        rows.append(row)
        speed = f"×{row['speed']:.2f} ({row['slowest']:.2f}–{row['fastest']:.2f})"
        print(
            f"  {way:16} {row['ms']:8,.0f} ms {speed:20} {row['added_mib']:7,.0f} MiB  error {row['error']:.0e}",
            flush=True,
        )
    return {"lengths": kind, "padding": padding, "ways": rows, "batches": results}


class Samples(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Trained(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.model = build_model(kind)

    def training_step(self, batch):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train_hugging_face(kind, samples, grouped):
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        options = {"train_sampling_strategy": "group_by_length"} if grouped else {}
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
            **options,
        )
        model = build_model(kind)
        trainer = transformers.Trainer(model, arguments, data_collator=collate, train_dataset=Samples(samples))
        started = time.process_time()
        trainer.train()
        return 1e3 * (time.process_time() - started)


def train_lightning(kind, samples, callbacks):
    loader = DataLoader(Samples(samples), ROWS, collate_fn=collate)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **settings)
    module = Trained(kind)
    started = time.process_time()
    trainer.fit(module, loader)
    return 1e3 * (time.process_time() - started)


def compare_trainers(kind, rounds):
    """Return the CPU time of an epoch of 8 batches in each trainer, the search for padding included."""
    samples = make_samples(kind, 8 * ROWS, seed=0)
    sides = {
        "HF Trainer": lambda: train_hugging_face(kind, samples, grouped=False),
        "HF Trainer, group_by_length": lambda: train_hugging_face(kind, samples, grouped=True),
        "Lightning": lambda: train_lightning(kind, samples, []),
        "Lightning, MicroBatching(8)": lambda: train_lightning(kind, samples, [ft.MicroBatching(PARTS)]),
    }
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(run())
    rows = [{"side": name, "epoch_ms": statistics.median(seen), "all_ms": seen} for name, seen in times.items()]
    for row in rows:
        print(
            f"  {row['side']:28} {row['epoch_ms']:8,.0f} ms an epoch, ×{rows[0]['epoch_ms'] / row['epoch_ms']:.2f}",
            flush=True,
        )
    return {"lengths": kind, "sides": rows}


def draw(report, path):
    """Draw the speed of each way for each distribution of lengths, with the range over batches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    ways = list(WAYS)[1:]
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        for group, found in enumerate(report["distributions"]):
            row = next(row for row in found["ways"] if row["way"] == way)
            spread = [[row["speed"] - row["slowest"]], [row["fastest"] - row["speed"]]]
            x = group + (place - (len(ways) - 1) / 2) * width
            label = way if group == 0 else None
            axes.bar(x, row["speed"], width, yerr=spread, color=f"C{place}", label=label, error_kw={"lw": 0.8})
    names = [f"{found['lengths']}\n{found['padding']:.0%} padding" for found in report["distributions"]]
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1, color="gray", lw=0.8)
    axes.set_ylabel("speed, in multiples of the padded batch's")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="text,log-normal,bimodal,speech")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainers", default="", help="lengths for which trainers are compared, too")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    kinds = options.lengths.split(",")
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "distributions": [],
        "trainers": [],
    }
    for kind in kinds:
        results = [compare(kind, seed, options.rounds) for seed in range(options.seeds)]
        report["distributions"].append(summarize(kind, results))
    for kind in filter(None, options.trainers.split(",")):
        print(f"{kind}: an epoch")
        report["trainers"].append(compare_trainers(kind, options.rounds))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        draw(report, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
