"""How a rank of a test's launch ends: with what all ranks found, or with its error."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist


def write_findings(path, found):
    """Gather what each rank found, write it as JSON from rank zero, and end this process."""
    gathered = [found]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(path).write_text(json.dumps(gathered))
    sys.stdout.flush()
    time.sleep(1)  # another rank may still be reading the gathered tensors; see ddp_scenarios.py
    os._exit(0)  # gloo's destructor can hang


def run_rank(main, *arguments):
    """Call ``main``; an error is printed, and ends this process at once, since other ranks must not wait for it."""
    try:
        main(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
