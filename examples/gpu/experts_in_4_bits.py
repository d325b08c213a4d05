"""A mixture of experts with LoRA on the experts, in bfloat16 and in 4 bits: where its bytes are, and what a step takes.

    python examples/gpu/experts_in_4_bits.py [--side bf16|"4 bits"] [--layers N] [--width N] [--experts N] [--out FILE]

``account_bytes`` counts the model's bytes by kind. Beside them stand the bytes that the device has really given out for
the model, the peak of a training step, and its tokens/s. Both ways begin at the same weights.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import peft
import torch
import transformers

import lightning_fasttrain as ft
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.finetune import account_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = peft.LoraConfig(r=8, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
WARMUP_STEPS = 2


def build(options):
    config = transformers.MixtralConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 64,
        num_local_experts=options.experts,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return transformers.MixtralForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def measure(options, techniques):
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else None
    model = build(options)
    ids = torch.randint(options.vocabulary, (options.batch, options.length), device=DEVICE)
    times = []
    with ft.apply(model, techniques):
        gc.collect()
        account = account_bytes(model)
        allocated = torch.cuda.memory_allocated() - before if before is not None else None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        with ft.profiling.PeakMemory(DEVICE, model, optimizer) as peak:
            for _ in range(WARMUP_STEPS + options.steps):
                started = time.perf_counter()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                last = loss.item()  # which waits for the device
                times.append(time.perf_counter() - started)
    tokens_per_s = ids.numel() / statistics.median(times[WARMUP_STEPS:])
    counted = {"counted_bytes": account.total, "by_kind": account.by_kind(), "allocated_bytes": allocated}
    return {**counted, "peak_bytes": peak.peak_bytes, "tokens_per_s": tokens_per_s, "loss": last}


SIDES = {
    "bf16": lambda: [ft.finetune.Adapter(EXPERTS), ft.ActivationCheckpointing()],
    "4 bits": lambda: [ft.finetune.QuantizedBase(), ft.finetune.Adapter(EXPERTS), ft.ActivationCheckpointing()],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", choices=SIDES, default="4 bits")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("experts_in_4_bits.json"))
    options = parser.parse_args()
    found = {"side": options.side, **measure(options, SIDES[options.side]())}
    write_atomic(options.out, json.dumps(found) + "\n")
    print(*(f"{key}={value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
