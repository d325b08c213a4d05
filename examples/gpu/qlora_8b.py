"""QLoRA of a Llama of 8B parameters on one card: where its memory goes, and tokens per second beside PEFT with the
Trainer of transformers, at the same settings, in one run.

    python examples/gpu/qlora_8b.py [--batch 4] [--length 2048] [--out examples/results/qlora_8b_gpu.json]
    python examples/gpu/qlora_8b.py --predict        # without a GPU: the memory alone, in half a minute

The weights are random, as memory and speed do not depend on them; both sides start from the same ones, quantised to
nf4 with double quantisation, adapt all linear layers with rank 16 in bfloat16 and recompute every block. PEFT runs
twice: as its guide has it, which keeps head and norms in float32, and at its best, with Liger's kernels and both in
bfloat16, as ours has them. Full fine-tuning, which no such card holds with AdamW in float32, is predicted without
being allocated. Each side is a process of its own, so that neither finds the memory of the other. --layers and
--width make it small enough for a try.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import GIB, hardware, package_version, versions

WARMUP, STEPS = 5, 20
SIDES = ("peft + transformers", "peft + Liger + bf16 head", "ours", "ours + FusedLossHead")


class RandomTokens(Dataset):
    def __init__(self, count, length, vocabulary):
        self.rows = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def config_of(options):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 128,
        num_key_value_heads=max(options.width // 512, 1),
        use_cache=False,
    )


def build(options, device):
    """The model in bfloat16, one layer at a time on the device."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config_of(options))
    finally:
        torch.set_default_dtype(before)


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, fused=self.device.type == "cuda")


class Clock:
    """Seconds from the end of the warm-up to the last step, waiting for the device at both; the peak is of these steps.

    The peak of the whole run would be that of the model before it was quantised.
    """

    def __init__(self):
        self.steps, self.started, self.seconds = 0, 0.0, 0.0

    def step(self):
        self.steps += 1
        if self.steps in (WARMUP, WARMUP + STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                if self.steps == WARMUP:
                    torch.cuda.reset_peak_memory_stats()
            self.started, self.seconds = time.perf_counter(), time.perf_counter() - self.started


def ours(options, data, device, techniques):
    module = Module(build(options, device))
    ft.finetune.quantize_base_(module)
    clock = Clock()

    class Tick(L.Callback):
        def on_train_batch_end(self, *_):
            clock.step()

    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-true",
        max_steps=WARMUP + STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[ft.LoRA(rank=16, alpha=32), ft.ActivationCheckpointing(), *techniques, Tick()],
    )
    trainer.fit(module, DataLoader(data, options.batch))
    return clock


def theirs(options, data, device, at_its_best=False):
    import peft
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = build(options, device)
    ft.finetune.quantize_base_(model)
    model.is_loaded_in_4bit = True
    if not at_its_best:  # all that is not quantised becomes float32, the head's logits too
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    clock = Clock()

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=WARMUP + STEPS,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            use_liger_kernel=at_its_best,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Tick()]).train()
    return clock


def run_side(options, device):
    data = RandomTokens((WARMUP + STEPS) * options.batch, options.length, options.vocabulary)
    match options.side:
        case "peft + transformers":
            clock = theirs(options, data, device)
        case "peft + Liger + bf16 head":
            clock = theirs(options, data, device, at_its_best=True)
        case "ours":
            clock = ours(options, data, device, [])
        case "ours + FusedLossHead":
            clock = ours(options, data, device, [ft.FusedLossHead()])
    return {
        "side": options.side,
        "tokens_per_s": STEPS * options.batch * options.length / clock.seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None,
    }


def in_a_process(side):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--out", str(out)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"{side}: {process.stderr[-3000:]}")
        return json.loads(out.read_text())


def predicted(options):
    """Bytes by category at the peak of a step, by way of training; nothing is allocated."""
    from transformers import LlamaForCausalLM

    batch = next(iter(DataLoader(RandomTokens(options.batch, options.length, options.vocabulary), options.batch)))

    def make():
        return Module(LlamaForCausalLM(config_of(options)))

    ways = {
        "full fine-tuning": ([ft.ActivationCheckpointing()], "bf16-mixed"),
        "LoRA": ([ft.LoRA(rank=16), ft.ActivationCheckpointing()], "bf16-true"),
        "QLoRA": ([ft.QLoRA(rank=16), ft.ActivationCheckpointing()], "bf16-true"),
        "QLoRA + FusedLossHead": (
            [ft.QLoRA(rank=16), ft.ActivationCheckpointing(), ft.FusedLossHead()],
            "bf16-true",
        ),
    }
    rows = {}
    for way, (techniques, precision) in ways.items():
        report = ft.predict_memory(make, batch, techniques=techniques, precision=precision)
        rows[way] = {"peak_gib": report.peak_bytes / GIB}
        rows[way] |= {category: held / GIB for category, held in report.at_peak.items()}
        print(f"predicted {way:24} {rows[way]['peak_gib']:8.2f} GiB", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--predict", action="store_true", help="predictions only; needs no GPU")
    parser.add_argument("--side", choices=SIDES, help="one of them, in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out or Path(f"examples/results/qlora_8b_{'predicted' if options.predict else 'gpu'}.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.side:
        write_atomic(options.out, json.dumps(run_side(options, device)))
        return
    if device == "cpu" and options.width > 512 and not options.predict:
        sys.exit("no CUDA device: nothing to measure; for a try: --layers 2 --width 128 --vocabulary 512 --length 64")
    report = {
        "hardware": hardware(),
        "versions": {
            **versions(),
            "cuda": torch.version.cuda,
            **{name: package_version(name) for name in ("peft", "transformers", "bitsandbytes")},
        },
        "command": without_paths(shlex.join(["python", "examples/gpu/qlora_8b.py", *sys.argv[1:]])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "predicted": predicted(options),
        "measured": [],
    }
    for side in () if options.predict else SIDES:
        row = in_a_process(side)
        report["measured"].append(row)
        peak = f"{row['peak_gib']:8.2f} GiB" if row["peak_gib"] is not None else ""
        print(f"measured  {side:24} {peak} {row['tokens_per_s']:10,.0f} tokens/s", flush=True)
    write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
