"""A loader that resumes at its position, without a Trainer."""

import copy
import functools
import multiprocessing
import pickle
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.loader_state.attributes import watch_attributes
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import resumable
from lightning_fasttrain.core.state.rng import random_state, set_random_state

EPOCHS = 3
READ = multiprocessing.Value("i", 0)  # samples read, in all processes


class Rows(Dataset):
    """Samples augmented with the generators of three libraries, and with its own."""

    def __init__(self, count=7):
        self.count, self.generator = count, np.random.default_rng(3)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        with READ:
            READ.value += 1
        drawn = random.random() + np.random.rand() + self.generator.random()
        return torch.tensor([float(i), drawn]) + torch.rand(())


class Stream(IterableDataset):
    def __init__(self, generator=None):
        self.generator, self.random = generator, random.Random(4)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(first, 7, step):
            yield torch.tensor([float(i), self.random.random()]) + torch.rand((), generator=self.generator)


class Again:
    """An iterable without a length that is not a DataLoader."""

    def __init__(self):
        self.rng = np.random.RandomState(5)

    def __iter__(self):
        for i in range(4):
            yield torch.tensor([i, self.rng.rand()])


def seeded(seed=9):
    return torch.Generator().manual_seed(seed)


def batches_of(count):
    return BatchSampler(RandomSampler(range(7), generator=seeded()), count, drop_last=False)


LOADERS = {
    "plain": lambda: DataLoader(Rows(), batch_size=2),
    "shuffled": lambda: DataLoader(Rows(), batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(Rows(), batch_size=2, sampler=WeightedRandomSampler(range(1, 8), 7)),
    "replacement": lambda: DataLoader(Rows(), 2, sampler=RandomSampler(range(7), True, 70, generator=seeded())),
    "batch sampler": lambda: DataLoader(Rows(), batch_sampler=batches_of(2)),
    "one by one": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(seeded()), batch_size=2),
    "no DataLoader": Again,
    "two workers": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2),
    "workers of an own generator": lambda: DataLoader(Rows(), 2, shuffle=True, num_workers=2, generator=seeded()),
    "persistent workers": lambda: DataLoader(Rows(), 2, shuffle=True, num_workers=2, persistent_workers=True),
    "streams of workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
}


def run(make, saved=None, stop=None):
    """Run a loop that draws random numbers, as training does; return all batches, or the state saved at ``stop``."""
    loader = resumable(make())
    first, seen = 0, []
    if saved is not None:
        first, seen = saved["epoch"], list(saved["seen"])
        loader.load_state_dict(saved["loader"])
        set_random_state(saved["random"])
    for epoch in range(first, EPOCHS):
        for batch in loader:
            seen.append(batch + torch.rand(()) + random.random() + np.random.rand())
            if len(seen) == stop:
                state = {"epoch": epoch, "seen": seen, "loader": loader.state_dict(), "random": random_state()}
                return pickle.loads(pickle.dumps(state))
    return seen


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@functools.cache  # the same for each stop
def uninterrupted(make):
    seed(1)
    return run(make)


def run_to(stop, make):
    """Return the state that the same run saves after ``stop`` batches; then seed as in another process."""
    seed(1)
    saved = run(make, stop=stop)
    seed(2)
    return saved


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", LOADERS)
def test_resumes_identically_after_any_batch(name):
    whole = uninterrupted(LOADERS[name])
    for stop in (1, 3, 4, 5, 6, 10) if "worker" not in name else (6,):
        assert equal(whole, run(LOADERS[name], run_to(stop, LOADERS[name]))), stop


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "persistent workers"])
def test_wrapped_loader_returns_the_same_batches(name):
    seed(1)
    plain = LOADERS[name]()
    seen = [b + torch.rand(()) + random.random() + np.random.rand() for _ in range(EPOCHS) for b in plain]
    assert equal(seen, uninterrupted(LOADERS[name]))


def test_persistent_workers_keep_the_loaders_order():
    make = lambda: DataLoader(range(7), 2, shuffle=True, num_workers=2, persistent_workers=True)  # noqa: E731
    seed(1)
    loader = make()
    seen = [batch for _ in range(EPOCHS) for batch in loader]
    seed(1)
    loader = resumable(make())
    assert equal(seen, [batch for _ in range(EPOCHS) for batch in loader])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("own generator", "attributes of the pass"),
        ("own generator", "given"),
        ("own generator", "attributes"),
        ("shuffled", "first"),
        ("two workers", "random"),
    ],
)
def test_negative_control_every_part_of_the_state_is_needed(name, part):
    whole, saved = uninterrupted(LOADERS[name]), run_to(6, LOADERS[name])
    position, start = saved["loader"], saved["loader"]["start"]
    other = DataLoader(Rows(), batch_size=2, shuffle=True, generator=seeded(7))
    other.dataset.generator.random()
    changes = watch_attributes(other).changes()
    first = {"random": random_state(), "attributes": changes}
    if part == "given":
        position["given"] = 1
    elif part == "attributes":
        position["attributes"] = changes
    elif part == "attributes of the pass":
        start["attributes"] = start["first"]["attributes"] = changes
    elif part == "first":
        start["first"] = first
    else:
        start["random"] = random_state()
    position["checksum"] = None  # otherwise the difference is refused
    assert not equal(whole, run(LOADERS[name], saved))


def test_skipping_by_indices_loads_no_samples_but_of_the_last_batch():
    loader = resumable(DataLoader(Rows(), batch_size=2, shuffle=True))
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    again = resumable(DataLoader(Rows(), batch_size=2, shuffle=True))
    again.load_state_dict(loader.state_dict())
    before = READ.value
    next(iter(again))
    assert READ.value - before == 2 + 1  # of the third batch, which is compared, and of the fourth: 7 rows


class Augmented(Dataset):
    """Samples augmented with the generators of three libraries."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        with READ:
            READ.value += 1
        return torch.tensor([float(i), random.random(), np.random.rand(), float(torch.rand(()))])


def augmented(workers, seed_samples, **settings):
    settings = {"batch_size": 2, "shuffle": True, **settings}
    return resumable(DataLoader(Augmented(), num_workers=workers, **settings), seed_samples)


def drawn_in_two_passes(loader):
    """The batches that are left of two passes, in a loop that draws too."""
    return [batch + torch.rand(()) for _ in range(2) for batch in loader]


@pytest.mark.parametrize(
    ("settings", "workers"),
    [({}, (2, 0)), ({}, (0, 2)), ({"persistent_workers": True}, (2, 1)), ({"batch_size": None}, (1, 2))],
    ids=str,
)
def test_seeded_samples_are_skipped_whatever_the_number_of_workers(settings, workers):
    loader, again = (augmented(count, True, **settings) for count in workers)
    seed(1)
    batches = iter(loader)
    for _ in range(17):
        next(batches), torch.rand(())
    saved = pickle.loads(pickle.dumps((loader.state_dict(), random_state())))
    expected = [batch + torch.rand(()) for batch in batches] + [batch + torch.rand(()) for batch in loader]
    del batches  # ends its workers
    seed(2)
    before = READ.value
    again.load_state_dict(saved[0])
    set_random_state(saved[1])
    assert equal(expected, drawn_in_two_passes(again))
    assert READ.value - before == 2 * 40 - 16 * 40 // len(loader)  # of 17 batches the last is compared


def test_negative_control_samples_that_are_not_seeded_depend_on_their_worker():
    seen = []
    for workers in (1, 2):
        seed(1)
        seen.append(drawn_in_two_passes(augmented(workers, False)))
    assert not equal(*seen)


def test_passes_differ_and_leave_the_generators_of_training_alone():
    loader = resumable(DataLoader(Augmented(), 2, generator=seeded()), seed_samples=True)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, second = list(loader), list(loader)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not any(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(Stream()), "only a DataLoader of a map-style dataset"),
        (Again, "only a DataLoader of a map-style dataset"),
        (lambda: DataLoader(Rows()), "the dataset has generators of its own"),
    ],
)
def test_samples_that_cannot_be_seeded_are_refused(loader, why):
    with pytest.raises(ValueError, match=f"seed_samples=True with .*: {why}"):
        resumable(loader(), seed_samples=True)


def test_rereading_batches_is_logged_with_their_number(caplog):
    loader = resumable(Again())
    batches = iter(loader)
    next(batches), next(batches)
    again = resumable(Again())
    again.load_state_dict(loader.state_dict())
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        next(iter(again))
    assert "reading and dropping 2 batches" in caplog.text


def test_a_stream_using_the_global_generator_gives_a_warning():
    loader = resumable(DataLoader(Stream(), batch_size=2))
    with pytest.warns(ft.FastTrainWarning, match="draws from torch's global generator"):
        list(loader)


def test_state_saved_after_the_last_batch_and_after_the_pass():
    loader = resumable(DataLoader(range(4), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    within = loader.state_dict()
    assert next(batches, None) is None
    for state, rest in ((within, []), (loader.state_dict(), [[0, 1], [2, 3]])):
        again = resumable(DataLoader(range(4), batch_size=2))
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == rest


def test_a_loader_with_its_own_state_dict_is_returned_unchanged():
    class Stateful(Again):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    loader = Stateful()
    assert resumable(loader) is loader
    assert resumable(resumable(Again())).inner.__class__ is Again


def test_an_iterator_is_refused():
    with pytest.raises(TypeError, match="loader=list_iterator: an iterator ends with its first pass"):
        resumable(iter([1, 2]))


def test_a_different_sampler_than_the_saved_one_is_refused():
    loader = resumable(LOADERS["own generator"]())
    next(iter(loader))
    other = resumable(LOADERS["plain"]())
    other.load_state_dict(loader.state_dict())
    with pytest.raises(
        ValueError, match="the data are read by SequentialSampler, and by RandomSampler in the saved run"
    ):
        next(iter(other))


def test_attributes_are_forwarded_and_can_be_set():
    inner = DataLoader(Rows(), batch_size=2)
    loader = resumable(inner)
    assert (len(loader), loader.batch_size, loader.sampler) == (4, 2, inner.sampler)
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert copy.deepcopy(loader).batch_size == 2


@pytest.mark.parametrize("name", ["shuffled", "own generator", "two workers"])
def test_resumes_identically_under_fabric(name):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    make = lambda: fabric.setup_dataloaders(LOADERS[name]())  # noqa: E731
    assert equal(uninterrupted(make), run(make, run_to(6, make)))


def test_resuming_under_fabric_keeps_the_epoch_of_a_distributed_sampler():
    def make():
        sampler = DistributedSampler(range(8), num_replicas=2, rank=1, seed=3)
        loader = DataLoader(range(8), batch_size=2, sampler=sampler)
        return L.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader, use_distributed_sampler=False)

    saved = run_to(3, make)
    assert saved["epoch"] == 1
    assert equal(uninterrupted(make), run(make, saved))


def test_persistent_workers_under_fabric_are_refused():
    loader = L.Fabric(accelerator="cpu", devices=1).setup_dataloaders(LOADERS["persistent workers"]())
    with pytest.raises(ValueError, match="persistent_workers=True under Fabric"):
        resumable(loader)


def test_a_prefetcher_on_top_returns_the_loaders_state():
    make = lambda: ft.loaders.prefetch_to_device(resumable(LOADERS["shuffled"]()), "meta")  # noqa: E731  # one batch ahead
    batches = iter(loader := make())
    next(batches)
    assert loader.state_dict()["given"] == 1
    assert loader.inner.state_dict()["given"] == 2


def test_positions_count_used_batches_not_prefetched_ones():
    loader = resumable(LOADERS["shuffled"]())
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    assert [loader.position(used)["given"] for used in (0, 1, 3)] == [0, 1, 3]
    for _ in range(12):
        next(iter(loader))
    with pytest.raises(RuntimeError, match="15 batches were fetched and 1 used"):
        loader.position(1)


def test_two_loaders_that_a_loop_reads_together_resume_between_epochs():
    def read(saved=None, stop=None):
        loaders, seen, first = [resumable(DataLoader(range(8), 4, shuffle=True)) for _ in range(2)], [], 0
        if saved is not None:
            first = saved["epoch"]
            for loader, state in zip(loaders, saved["loaders"], strict=True):
                loader.load_state_dict(state)
            set_random_state(saved["random"])
        for epoch in range(first, EPOCHS):
            seen += [(epoch, repr(batch)) for batch in zip(*loaders, strict=True)]
            if epoch == stop:
                states = [loader.state_dict() for loader in loaders]
                return {"epoch": epoch + 1, "loaders": states, "random": random_state()}
        return seen

    torch.manual_seed(3)
    whole = [batch for batch in read() if batch[0] > 0]
    torch.manual_seed(3)
    saved = read(stop=0)
    torch.manual_seed(9)
    assert read(saved) == whole
