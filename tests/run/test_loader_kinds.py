"""A run with ExactResume reads what the plain run reads, and resumed from any place it reads what it would have read.

All kinds, in fresh processes: ``python -m tests.run.test_loader_kinds [result.json]``.
"""

import contextlib
import random
import types

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from tests.run.loader_kinds import KINDS, Rows
from tests.support.nets import trainer as make_trainer

EPOCHS = 3


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


def list_differences(kind, folder, places=slice(None)):
    """Return what differs from the plain run: the uninterrupted one, and resumed ones by their places."""
    plain, save, failing = train(kind, []), SaveAnywhere(folder / "a"), SaveAnywhere(folder / "b")
    whole = train(kind, [ft.ExactResume(), save])
    found = (
        [] if same(plain.seen, whole.seen) and torch.equal(plain.net.weight, whole.net.weight) else ["uninterrupted"]
    )
    train(kind, [ft.ExactResume(), failing], fails_at=len(whole.seen) // 2 + 1)
    files = [*save.files.items(), list(failing.files.items())[-1]]
    for place, path in files[places]:
        try:
            resumed = train(kind, [ft.ExactResume()], path, seed=2)
        except Exception as error:
            found.append(f"{place}: {type(error).__name__}: {str(error)[:300]}")
            continue
        rest = plain.seen[int(place.split()[-1]) :]
        if not same(rest, resumed.seen) or not torch.equal(plain.net.weight, resumed.net.weight):
            found.append(place)
    return found


if __name__ == "__main__":
    import logging
    import sys
    import tempfile
    import time
    import warnings
    from pathlib import Path

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for kind in KINDS:
        if len(sys.argv) > 1 and sys.argv[1] not in kind:
            continue
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            print(f"{kind:45}", list_differences(kind, Path(folder)), round(time.time() - began, 1), flush=True)
