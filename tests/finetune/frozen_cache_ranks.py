"""Run by two processes: each trains on its half of the data, then on the other's, with one folder for both."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from lightning_fasttrain.finetune import cache_frozen_

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    halves = torch.randn(2, 3, 4)
    cached = cache_frozen_(net, "0", folder / "rows")
    first = net(halves[rank])
    cached.flush()
    (folder / f"done-{rank}").touch()
    end = time.monotonic() + 60
    while not (folder / f"done-{1 - rank}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    cached.flush()
    other = net(halves[1 - rank])
    plain = net[1](torch.nn.functional.linear(halves[1 - rank], net[0].weight, net[0].bias))
    print(f"{cached.hits} read, {cached.misses} computed, {torch.equal(plain, other)}", flush=True)
