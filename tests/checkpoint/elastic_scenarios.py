"""A worker of ``examples/cluster/elastic.py`` that records which samples it trains on (see test_elastic.py)."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fasttrain.core.atomic_write import write_atomic

RANK = int(os.environ.get("RANK", 0))


class Recorder(L.Callback):
    """Writes a line for each sample: launch, step, epoch, and the sample; and takes time for each step."""

    def __init__(self, folder, launch, pause_s):
        self.folder, self.launch, self.pause_s = Path(folder), launch, pause_s
        self.lines = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        loader: Any = trainer.train_dataloader
        if loader.has_samples(batch_idx):
            for row in batch[0]:
                sample = hash(tuple(row.tolist())) % 10**9
                self.lines.append(f"{self.launch} {trainer.global_step} {trainer.current_epoch} {sample}\n")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop._should_accumulate():
            return
        with open(self.folder / f"{self.launch}-{RANK}.samples", "a") as file:
            file.writelines(self.lines)
        self.lines = []
        write_atomic(self.folder / f"{self.launch}-{RANK}.pid", f"{os.getpid()}")
        time.sleep(self.pause_s)


def main(launch, folder, pause_s, *arguments):
    from examples.cluster import elastic

    elastic.main(arguments, [Recorder(folder, launch, float(pause_s))], layers=1, width=16)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
