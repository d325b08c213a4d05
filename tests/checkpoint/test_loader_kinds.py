"""A run with ExactResume reads what the plain run reads, and resumed from any place it reads what it would have read.

All kinds, in fresh processes: ``python -m tests.checkpoint.test_loader_kinds [result.json]``.
"""

import concurrent.futures
import contextlib
import datetime
import json
import logging
import multiprocessing
import platform
import random
import sys
import tempfile
import types
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from tests.checkpoint.loader_kinds import KINDS, Rows
from tests.support.nets import trainer as make_trainer

EPOCHS = 3

# Of hosts, about loaders that are unusual, as they are here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Net(L.LightningModule):
    """Draws random numbers, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
        nn.init.ones_(self.net.weight)
        self.seen, self.fails_at = [], None

    def training_step(self, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        read = torch.cat([part.reshape(-1) for part in parts if part is not None])
        if len(self.seen) == self.fails_at:
            raise RuntimeError("stopped here")
        self.seen.append(read)
        return self.net(read[: len(read) // 2 * 2].view(-1, 2)).sub(torch.rand(())).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        torch.rand(3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAnywhere(L.Callback):
    """Saves after batches, in validation, at the ends of epochs and after an exception; keeps how far training was."""

    def __init__(self, folder):
        self.folder, self.files = folder, {}

    def save(self, trainer, place):
        path = self.folder / f"{len(self.files)}.ckpt"
        trainer.save_checkpoint(path)
        self.files[f"{place}, after {len(trainer.lightning_module.seen)}"] = path

    def on_train_batch_end(self, trainer, *args):
        self.save(trainer, "in mid-epoch")

    def on_validation_batch_end(self, trainer, *args):
        if not trainer.sanity_checking:
            self.save(trainer, "in validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "at an epoch's end")

    def on_exception(self, trainer, pl_module, exception):
        self.save(trainer, "after an exception")


def train(kind, callbacks, checkpoint=None, seed=1, fails_at=None):
    make, settings, hooks = (*KINDS[kind], {}, None)[:3]
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed)
    module = Net()
    module.fails_at = fails_at
    for name, hook in vars(hooks or object).items():
        if name.startswith("on_"):
            setattr(module, name, types.MethodType(hook.__func__, module))
    loops = {"max_epochs": EPOCHS, "check_val_every_n_epoch": 2, **settings}
    trainer = make_trainer(callbacks, enable_checkpointing=False, **loops)
    error = pytest.raises(RuntimeError, match="stopped here") if fails_at is not None else contextlib.nullcontext()
    with error:
        trainer.fit(module, make(), DataLoader(Rows(2)), ckpt_path=checkpoint)
    return module


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def save_anywhere(kind, folder):
    """Train uninterrupted, without and with ExactResume; return what was read, and the checkpoints by their places."""
    plain, save, failing = train(kind, []), SaveAnywhere(folder / "whole"), SaveAnywhere(folder / "failed")
    whole = train(kind, [ft.ExactResume(), save])
    train(kind, [ft.ExactResume(), failing], fails_at=len(whole.seen) // 2 + 1)
    is_left_alone = same(plain.seen, whole.seen) and torch.equal(plain.net.weight, whole.net.weight)
    last = list(failing.files.items())[-1]
    return plain.seen, plain.net.weight.detach(), is_left_alone, {**save.files, last[0]: last[1]}


def resume(kind, files, seen, weight):
    """Return the places from which a resumed run differs, with what it said."""
    found = {}
    for place, path in files.items():
        try:
            resumed = train(kind, [ft.ExactResume()], path, seed=2)
        except Exception as error:
            found[place] = f"{type(error).__name__}: {error}"
            continue
        if not same(seen[int(place.split()[-1]) :], resumed.seen) or not torch.equal(weight, resumed.net.weight):
            found[place] = "other batches"
    return found


def differing(kind, folder, call=lambda function, *arguments: function(*arguments), every=1):
    """What differs, by the places that a run was resumed from, and how many there were."""
    seen, weight, is_left_alone, files = call(save_anywhere, kind, folder)
    found = {} if is_left_alone else {"uninterrupted": "other batches"}
    files = dict(list(files.items())[::every])
    return found | call(resume, kind, files, seen, weight), len(files)


CHOSEN = random.Random(1).sample(list(KINDS), len(KINDS) // 10)


@pytest.mark.parametrize("kind", CHOSEN)
def test_an_uninterrupted_run_is_left_alone_and_a_resumed_one_is_bitwise(kind, tmp_path):
    assert differing(kind, tmp_path, every=3 if "workers" in kind else 1)[0] == {}  # each run starts its workers


@pytest.mark.benchmark
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CHOSEN])
def test_so_it_is_with_all_loaders(kind, tmp_path):
    assert differing(kind, tmp_path)[0] == {}


def in_fresh_process(function, *arguments):
    """Call it in a fork of this process, which itself has only imported modules."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"), be_quiet) as pool:
        return pool.submit(function, *arguments).result()


def be_quiet():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def sweep(path=None):
    """Try all kinds, each run and each kind's resumed runs in fresh processes, and write what was found to a file."""
    found, places = {}, 0
    for number, kind in enumerate(KINDS, start=1):
        with tempfile.TemporaryDirectory() as folder:
            differs, tried = differing(kind, Path(folder), in_fresh_process)
        places += tried
        if differs:
            found[kind] = differs
        print(f"{number} of {len(KINDS)}: {kind}: {differs or 'equal'}", flush=True)
    result = {
        "command": "python -m tests.checkpoint.test_loader_kinds examples/results/resuming_cpu.json",
        "date": f"{datetime.date.today()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "kinds": len(KINDS),
        "resumed": places,
        "differing": found,
    }
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sweep(*sys.argv[1:])
