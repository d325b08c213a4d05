"""What GaLore saves and what it costs: AdamW against GaLore at several ranks, on the same text from the same weights.

    python examples/galore_memory.py [STEPS]

State is measured as the sum of the optimizer's tensors and stands beside its prediction. ms are medians; a refresh is a
step in which the subspaces are found again, every tenth here so that there are some to time, every 200th by default.
The first loss is that of the untrained model; the last is the mean of the last ten steps. One learning rate serves
all, so the losses say that it trains, not which is best. Last, what a Llama of 7B needs, which is computed from shapes.
"""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.text import batches, encode_text, read_text
from lightning_fasttrain.optim import GaLoreAdamW, galore_groups, galore_state_bytes

MIB, GIB = 2**20, 2**30
CONFIG = GPTConfig(context=64, layers=4, heads=4, width=256)
KINDS = {
    "AdamW": None,
    "GaLore, rank 64": {"rank": 64},
    "GaLore, rank 16": {"rank": 16},
    "GaLore, rank 16, sketched": {"rank": 16, "subspace": "sketched"},
}
REFRESH_EVERY = 10


def train(settings, steps):
    """Predicted and measured bytes of state, median seconds of a step and of a refresh, and all losses."""
    torch.manual_seed(0)
    net = GPTModule(CONFIG)
    if settings is None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    else:
        groups = galore_groups(net, update_every=REFRESH_EVERY, scale=1.0, **settings)
        optimizer = GaLoreAdamW(groups, lr=2e-3)
    predicted = galore_state_bytes(optimizer.param_groups)
    losses, usual, refreshing = [], [], []
    for i, batch in enumerate(batches(encode_text(read_text(), "bytes", 256), CONFIG.context, 8, steps)):
        optimizer.zero_grad()
        loss = net.loss(batch)
        loss.backward()
        started = time.perf_counter()
        optimizer.step()
        (refreshing if i % REFRESH_EVERY == 0 else usual).append(time.perf_counter() - started)
        losses.append(loss.item())
    held = sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())
    return predicted, held, statistics.median(usual), statistics.median(refreshing), losses


def main(steps=200):
    print(f"{'optimizer':<28}{'predicted':>11}{'measured':>11}{'step':>10}{'refresh':>11}   loss")
    for name, settings in KINDS.items():
        predicted, held, usual, refreshing, losses = train(settings, steps)
        figures = f"{predicted / MIB:>7.2f} MiB{held / MIB:>7.2f} MiB{usual * 1e3:>7.1f} ms"
        refresh = f"{refreshing * 1e3:>8.1f} ms" if settings else " " * 11
        print(f"{name:<28}{figures}{refresh}   {losses[0]:.3f} → {statistics.mean(losses[-10:]):.3f}")
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig()).to(torch.bfloat16)
    adamw = galore_state_bytes([{"params": list(llama.parameters())}])
    for rank in (1024, 128):
        state = galore_state_bytes(galore_groups(llama, rank=rank))
        print(f"a Llama of 7B in bfloat16, predicted: AdamW {adamw / GIB:.1f} GiB, rank {rank} {state / GIB:.1f} GiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
