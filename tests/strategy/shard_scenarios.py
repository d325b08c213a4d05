"""Run by two processes (see test_sharded_averages.py): the scenarios of one launch, each of which writes results."""

import faulthandler
import sys
import time
from pathlib import Path

from tests.strategy import average_scenarios, dtype_scenarios, muon_scenarios
from tests.support.end_of_rank import run_rank, write_findings

SCENARIOS = average_scenarios.SCENARIOS + muon_scenarios.SCENARIOS + dtype_scenarios.SCENARIOS


def main(path, folder):
    faulthandler.dump_traceback_later(200, exit=True)
    found, seconds = {}, {}
    for scenario in SCENARIOS:
        began = time.time()
        scenario(found, Path(folder))
        seconds[scenario.__name__] = round(time.time() - began, 2)
    write_findings(path, {**found, "seconds": seconds})


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
