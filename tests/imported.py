"""What the scripts of tests import, done once in the process that forks them; and what a first run looks up."""

import gc
import importlib
import logging

from lightning_fasttrain.strategy.zero._zero_engine import import_deepspeed
from tests import host_costs

host_costs.spare()
importlib.import_module("tests.cases")
import_deepspeed()
for name in (
    *("torch.utils.cpp_extension", "torch.distributed.algorithms.ddp_comm_hooks", "torch.profiler._cupti_monitor"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops"),
    "deepspeed.module_inject.auto_ep_layer",
):
    importlib.import_module(name)


def train_once() -> None:
    """Lightning asks for entry points and for the kinds of everything that it meets; a tenth of a second each time."""
    import warnings

    from tests.nets import TinyLM, as_loader, lm_batches, trainer

    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer().fit(TinyLM(), as_loader(lm_batches(1)), as_loader(lm_batches(1)))
    logging.disable(logging.NOTSET)


train_once()
gc.collect()
gc.freeze()  # nobody need look through it again
