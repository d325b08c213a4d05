"""Run by two processes (see test_sharded_averages.py): the scenarios of one launch, each of which writes results."""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from tests.strategy import average_scenarios, dtype_scenarios, muon_scenarios

SCENARIOS = average_scenarios.SCENARIOS + muon_scenarios.SCENARIOS + dtype_scenarios.SCENARIOS


def main(path, folder):
    faulthandler.dump_traceback_later(200, exit=True)
    found, seconds = {}, {}
    for scenario in SCENARIOS:
        began = time.time()
        scenario(found, Path(folder))
        seconds[scenario.__name__] = round(time.time() - began, 2)
    gathered = [None, None]
    dist.all_gather_object(gathered, {**found, "seconds": seconds})
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(gathered))
    time.sleep(0.5)  # the other rank may still be reading the gathered tensors; see ddp_scenarios.py
    os._exit(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank must not wait for this one
