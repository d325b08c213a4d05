"""Datasets that keep their position themselves resume there, in this process and in workers, without reading again."""

import functools
import itertools
import multiprocessing
import pickle
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.loader_state.dataset_state import keeps_position
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import resumable
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from tests.support.nets import trainer, weights

COUNT, EPOCHS = 11, 2
READ = multiprocessing.Value("i", 0)  # samples read, in all processes


def augment(i, generator):
    with READ:
        READ.value += 1
    return torch.tensor([float(i), random.random(), np.random.rand(), generator.random()]) + torch.rand(4)


class Lines(IterableDataset):
    """Reads its share of lines in an order of its own, and remembers sums, as a packing dataset does."""

    def __init__(self, shares=(1, 1)):
        self.next, self.sum, self.shares, self.generator = 0, 0.0, shares, np.random.default_rng(4)

    def __iter__(self):
        worker = get_worker_info()
        mine = list(range(COUNT))
        if worker is not None:
            of = [w for w, share in enumerate(self.shares) for _ in range(share)]
            mine = [i for i in mine if of[i % len(of)] == worker.id]
        while self.next < len(mine):
            sample = augment(mine[self.next], self.generator)
            self.sum += float(sample[0])
            self.next += 1
            yield sample + self.sum
        self.next = 0

    def state_dict(self):
        return {"next": self.next, "sum": torch.tensor(self.sum, dtype=torch.float64)}

    def load_state_dict(self, state):
        self.next, self.sum = state["next"], float(state["sum"])


class Counting(Dataset):
    """A map-style dataset whose samples depend on how many were read before."""

    def __init__(self):
        self.read, self.generator = 0, np.random.default_rng(5)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        self.read += 1
        return augment(i, self.generator) + self.read

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Rows(Dataset):
    """The same without a state."""

    def __init__(self):
        self.generator = np.random.default_rng(5)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return augment(i, self.generator)


LOADERS = {
    "stream": lambda: DataLoader(Lines(), 2),
    "stream, one by one": lambda: DataLoader(Lines(), None),
    "stream, two workers": lambda: DataLoader(Lines(), 2, num_workers=2),
    "stream, uneven workers": lambda: DataLoader(Lines((1, 3)), 1, num_workers=2),
    "map": lambda: DataLoader(Counting(), 2, shuffle=True),
    "map, two workers": lambda: DataLoader(Counting(), 2, shuffle=True, num_workers=2),
    "map, persistent workers": lambda: DataLoader(
        Counting(), 2, shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=print
    ),
}


def run(make, saved=None, stop=None):
    loader = resumable(make())
    first, seen = 0, []
    if saved is not None:
        first, seen = saved["epoch"], list(saved["seen"])
        loader.load_state_dict(saved["loader"])
        set_random_state(saved["random"])
    for epoch in range(first, EPOCHS):
        for batch in loader:
            seen.append(batch + torch.rand(()))
            if len(seen) == stop:
                state = {"epoch": epoch, "seen": seen, "loader": loader.state_dict(), "random": random_state()}
                return pickle.loads(pickle.dumps(state))
    return seen


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@functools.cache
def uninterrupted(make):
    seed(1)
    return run(make)


def resumed(make, stop):
    seed(1)
    saved = run(make, stop=stop)
    seed(2)
    before = READ.value
    return run(make, saved), READ.value - before


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", LOADERS)
def test_resumes_identically_and_reads_nothing_again(name):
    make = LOADERS[name]
    whole = uninterrupted(make)
    in_pass = len(whole) // EPOCHS
    workers, batch_size = make().num_workers, make().batch_size or 1
    for stop in (1, 2, 3, 4, in_pass - 1) if workers == 0 else (3,):
        found, read = resumed(make, stop)
        assert equal(whole, found), stop
        left = EPOCHS * COUNT - stop * batch_size
        assert read <= left + workers * batch_size, stop  # the batches of one turn at most


def test_workers_resume_in_the_second_pass():
    make = LOADERS["stream, two workers"]
    whole = uninterrupted(make)
    found, _ = resumed(make, len(whole) // EPOCHS + 2)
    assert equal(whole, found)


@pytest.mark.parametrize("name", ["stream", "map, two workers"])
def test_control_the_state_of_the_dataset_is_needed(name):
    make = LOADERS[name]
    seed(1)
    saved = run(make, stop=3)
    saved["loader"]["checksum"] = None  # otherwise the difference is refused
    for _, state in saved["loader"]["dataset"]["states"]:
        own = state.get("own", state)
        own[next(iter(own))] += 1
    assert not equal(uninterrupted(make), run(make, saved))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_saved_is_reported_and_not_used(workers):
    class Odd(Counting):
        def state_dict(self):
            return {"read": self.read, "place": itertools}

    class Plain(Counting):
        state_dict = None

    seed(1)
    with pytest.warns(ft.FastTrainWarning, match="the state_dict of Odd is not used"):
        saved = run(lambda: DataLoader(Odd(), 2, num_workers=workers), stop=2)
    assert saved["loader"]["dataset"] is None
    seed(1)
    plain = run(lambda: DataLoader(Plain(), 2, num_workers=workers), stop=2)
    assert equal(saved["seen"], plain["seen"])


def test_another_number_of_workers_is_refused():
    seed(1)
    saved = run(LOADERS["stream, two workers"], stop=2)
    with pytest.raises(ValueError, match="num_workers=1 for a checkpoint with num_workers=2: each worker has its own"):
        run(lambda: DataLoader(Lines(), 2, num_workers=1), saved)


def test_a_position_that_needs_arguments_is_not_one():
    class Streaming(Lines):
        def state_dict(self, num_samples_yielded, num_workers, batch_size):
            return {}

    assert keeps_position(Lines())
    assert not keeps_position(Streaming())
    assert not keeps_position(Rows())


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch):
        return self.net(batch).square().mean() + torch.rand(())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


class SaveAt(L.Callback):
    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", ["stream", "stream, two workers", "map, two workers"])
def test_the_trainer_resumes_at_the_position_of_the_dataset(name, tmp_path):
    torch.manual_seed(0)
    whole, again = Net(), Net()
    seed(1)
    trainer([ft.ExactResume(), SaveAt(tmp_path / "a.ckpt", 3)], max_epochs=EPOCHS).fit(whole, LOADERS[name]())
    seed(2)
    before = READ.value
    t = trainer([ft.ExactResume()], max_epochs=EPOCHS)
    t.fit(again, LOADERS[name](), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert all(map(torch.equal, weights(whole).values(), weights(again).values()))
    assert READ.value - before <= EPOCHS * COUNT - 6 + 4
