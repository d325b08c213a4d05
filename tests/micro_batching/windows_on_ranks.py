"""Windows of whole batches on two ranks with other numbers of targets: how far each is from its closed form."""

import json
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from tests.micro_batching import test_windows as windows
from tests.support.nets import largest_difference, trainer, weights

RANK = int(os.environ["LOCAL_RANK"])
TARGETS = {"different": ((6, 1, 4, 2, 3), (2, 5, 1, 6, 1)), "without": ((3, 0, 5, 1, 0), (0, 2, 0, 4, 1))}


def misses(name, targets, factor):
    """How far the weights of a run are from those of a plain loop over the batches of both ranks."""
    function, _ = windows.LOSSES[name]
    both = [windows.list_batches(each, seed=len(name) + place) for place, each in enumerate(TARGETS[targets])]
    module = windows.Lit(function)
    loader = DataLoader([windows.Rows(*batch, []) for batch in both[RANK]], batch_size=None, collate_fn=lambda b: b)
    strategy = DDPStrategy(process_group_backend="gloo")
    settings = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    trainer([ft.TokenWeightedAccumulation(factor)], **settings).fit(module, loader)
    mixed = [batch for pair in zip(*both, strict=True) for batch in pair]
    return largest_difference(windows.train_in_closed_form(function, mixed, 2 * factor), weights(module.net))


def main(path):
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    found = {}
    for name, (_, needs_targets) in windows.LOSSES.items():
        for targets in TARGETS:
            # DDP waits for the gradients of a leaf that the step makes.
            if name != "masked_or_a_leaf" and not (needs_targets and targets == "without"):
                for factor in (1, 2):
                    found[f"{name}, {targets}, {factor}"] = misses(name, targets, factor)
    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    with open(path, "w") as file:
        json.dump(gathered, file)
    os._exit(0)  # without destructors: see ddp_scenarios.py


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
