"""What the scripts of tests import, done once in the process that forks them; and what a first run looks up."""

import functools
import gc
import importlib
import logging
import warnings
from contextlib import suppress

import torch
from lightning.fabric.utilities import registry

from lightning_fasttrain.core.host.deepspeed import import_deepspeed
from lightning_fasttrain.strategy.fsdp2 import sharding
from tests.support import host_costs
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

host_costs.spare()
importlib.import_module("tests.cases")
import_deepspeed()
for name in (
    *("torch.utils.cpp_extension", "torch.distributed.algorithms.ddp_comm_hooks"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops"),
    "deepspeed.module_inject.auto_ep_layer",
):
    with suppress(ImportError):  # for speed alone; some releases have them elsewhere
        importlib.import_module(name)


def train_once() -> None:
    """Lightning imports late, and finds out the kind of everything that it meets: in forks no more."""
    batches = as_loader(lm_batches(1))
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        trainer().fit(TinyLM(), batches, batches)
    logging.disable(logging.NOTSET)


train_once()
# Each mesh has process groups, whose threads wake up 100 times a second: a launch needs one of a shape.
sharding.init_device_mesh = functools.cache(sharding.init_device_mesh)
registry.entry_points.cache_clear()  # a script may bring its own
gc.collect()
gc.freeze()  # nobody need look through it again
