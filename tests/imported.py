"""What the scripts of tests import, done once in the process that forks them."""

import importlib

from lightning_fasttrain.strategy.zero._zero_engine import import_deepspeed
from tests import host_costs

host_costs.spare()
importlib.import_module("tests.cases")
import_deepspeed()
for name in ("torch.utils.cpp_extension", "deepspeed.runtime.zero.muon.muon_optimizer"):
    importlib.import_module(name)
