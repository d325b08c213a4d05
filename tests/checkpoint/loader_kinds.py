"""Loaders of all kinds whose state a run may depend on: counters, epochs and generators of datasets and samplers."""

import random

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = 10


def seeded(seed=9):
    return torch.Generator().manual_seed(seed)


def my_share(items):
    worker = get_worker_info()
    return list(items) if worker is None else list(items)[worker.id :: worker.num_workers]


class Rows(Dataset):
    def __init__(self, count=ROWS, shift=0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor([float(i + self.shift), 0.0])


class Augmented(Rows):
    """Draws from the generators of three libraries."""

    def __getitem__(self, i):
        return torch.tensor([float(i), random.random() + np.random.rand() + float(torch.rand(()))])


class WithGenerator(Rows):
    """Draws from its own generator, which is held by an object in a list."""

    def __init__(self):
        super().__init__()
        self.stages = [Noise(np.random.default_rng(3)), Noise(random.Random(4))]

    def __getitem__(self, i):
        return torch.tensor([float(i), sum(stage.draw() for stage in self.stages)])


class Noise:
    def __init__(self, generator):
        self.generator = generator

    def draw(self):
        return self.generator.random()


class Counting(Rows):
    """A sample depends on how many were read before: a curriculum, for instance."""

    def __init__(self):
        super().__init__()
        self.read = {"all": 0}

    def __getitem__(self, i):
        self.read["all"] += 1
        return torch.tensor([float(i), float(self.read["all"])])


class WithEpoch(Rows):
    """Its samples depend on the epoch that a hook has set."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return torch.tensor([float(i), float(self.epoch)])


class KeepsRead(Counting):
    def state_dict(self):
        return {"read": self.read["all"]}

    def load_state_dict(self, state):
        self.read["all"] = state["read"]


class Permuted(Sampler):
    """Counts its epochs, from which the order follows."""

    def __init__(self, count=ROWS):
        self.count, self.epoch = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


class PermutedByHost(Permuted):
    """The host sets the epoch."""

    def set_epoch(self, epoch):
        self.epoch = 2 * epoch

    def __iter__(self):
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        yield from order


class Endless(Sampler):
    """Continues where the last pass ended."""

    def __init__(self, length=7):
        self.place, self.length = 0, length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            self.place = (self.place + 3) % ROWS
            yield self.place


class Buckets(Sampler):
    """Batches of an own generator and of growing size."""

    def __init__(self):
        self.random, self.passes = random.Random(1), 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.passes += 1
        for _ in range(4):
            yield self.random.sample(range(ROWS), 1 + self.passes)


class Stream(IterableDataset):
    def __init__(self, count=ROWS, shift=0):
        self.count, self.shift, self.generator = count, shift, seeded()

    def __iter__(self):
        for i in my_share(range(self.count)):
            yield torch.tensor([float(i + self.shift), float(torch.rand((), generator=self.generator))])


class CountsPasses(IterableDataset):
    """As WebDataset's ``detshuffle``: the order follows from the number of passes, counted at the beginning or end."""

    def __init__(self, at_end=False, length=None):
        self.epoch, self.at_end = 0, at_end
        if length is not None:
            self.length = length

    def __iter__(self):
        self.epoch += not self.at_end
        order = list(range(ROWS))
        random.Random(self.epoch).shuffle(order)
        for i in my_share(order):
            yield torch.tensor([float(i), float(self.epoch)])
        self.epoch += self.at_end


class HasLength(CountsPasses):
    def __len__(self):
        return self.length


class SetByHook(CountsPasses):
    def set_epoch(self, epoch):
        self.epoch = 10 * epoch

    def __iter__(self):
        order = list(range(ROWS))
        random.Random(self.epoch).shuffle(order)
        for i in my_share(order):
            yield torch.tensor([float(i), float(self.epoch)])


class SharedEpoch(SetByHook):
    """As the streams of Hugging Face: the epoch is a tensor in shared memory, so that workers see it."""

    def __init__(self):
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(10 * epoch)

    def __iter__(self):
        order = list(range(ROWS))
        random.Random(int(self.epoch)).shuffle(order)
        for i in my_share(order):
            yield torch.tensor([float(i), float(self.epoch)])


class Buffered(IterableDataset):
    """Shuffles in a buffer by its own generator."""

    def __init__(self):
        self.random = random.Random(2)

    def __iter__(self):
        buffer = []
        for i in my_share(range(ROWS)):
            buffer.append(i)
            if len(buffer) > 3:
                yield torch.tensor([float(buffer.pop(self.random.randrange(len(buffer)))), self.random.random()])
        while buffer:
            yield torch.tensor([float(buffer.pop(self.random.randrange(len(buffer)))), 0.0])


class Pipeline(IterableDataset):
    """As WebDataset: a list of stages that hold counters and generators."""

    def __init__(self):
        self.stages = [CountsPasses(), Shuffle(), Shuffle(seed=5)]

    def __iter__(self):
        source, *rest = self.stages
        samples = iter(source)
        for stage in rest:
            samples = stage(samples)
        yield from samples


class Shuffle:
    def __init__(self, seed=None):
        self.epoch, self.seed, self.random = -1, seed, random.Random(7)

    def __call__(self, samples):
        self.epoch += 1
        generator = self.random if self.seed is None else random.Random(self.seed + self.epoch)
        samples = list(samples)
        generator.shuffle(samples)
        yield from samples


class KeepsPosition(IterableDataset):
    def __init__(self):
        self.next = 0

    def __iter__(self):
        mine = my_share(range(ROWS))
        while self.next < len(mine):
            self.next += 1
            yield torch.tensor([float(mine[self.next - 1]), 0.0])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Again:
    """Not a DataLoader; counts its passes."""

    def __init__(self):
        self.passes, self.rng = 0, np.random.RandomState(5)

    def __iter__(self):
        self.passes += 1
        for i in range(4):
            yield torch.tensor([[float(i + 10 * self.passes), self.rng.rand()]])


class EpochOfModule:
    """A hook of the user sets the epoch of the dataset, which the host skips where it resumes within an epoch."""

    @staticmethod
    def on_train_epoch_start(module):
        module.trainer.train_dataloader.dataset.set_epoch(module.current_epoch)


class Harder:
    """A hook of the user changes the sampler in mid-epoch."""

    @staticmethod
    def on_train_batch_start(module, *args):
        sampler = module.trainer.train_dataloader.sampler
        sampler.weights[module.global_step % ROWS] = 5.0


def weighted():
    return WeightedRandomSampler(torch.ones(ROWS, dtype=torch.float64), ROWS)


def two(mode, count=2):
    parts = {"a": DataLoader(Rows(8), 2, shuffle=True), "b": DataLoader(CountsPasses(), 2)}
    if count == 3:
        parts["c"] = DataLoader(Augmented(6), 2, shuffle=True)
    return CombinedLoader(parts, mode)


WORKERS = {"num_workers": 2, "persistent_workers": False}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}

# name → (how its loader is made, settings of the Trainer, hooks of the module)
KINDS = {
    "map": (lambda: DataLoader(Rows(), 2),),
    "shuffled": (lambda: DataLoader(Rows(), 2, shuffle=True),),
    "own generator": (lambda: DataLoader(Rows(), 2, shuffle=True, generator=seeded()),),
    "augmented": (lambda: DataLoader(Augmented(), 2, shuffle=True),),
    "dataset with generators": (lambda: DataLoader(WithGenerator(), 2),),
    "dataset that counts": (lambda: DataLoader(Counting(), 2, shuffle=True),),
    "dataset that counts, in parts": (lambda: DataLoader(ConcatDataset([Counting(), Subset(Counting(), [3])]), 2),),
    "dataset with an epoch": (lambda: DataLoader(WithEpoch(), 2), {}, EpochOfModule),
    "dataset with a state": (lambda: DataLoader(KeepsRead(), 2, shuffle=True),),
    "sampler that counts": (lambda: DataLoader(Rows(), 2, sampler=Permuted()),),
    "sampler of the host": (lambda: DataLoader(Rows(), 2, sampler=PermutedByHost()),),
    "sampler that continues": (lambda: DataLoader(Rows(), 2, sampler=Endless()),),
    "subset": (lambda: DataLoader(Rows(), 2, sampler=SubsetRandomSampler([1, 4, 6, 7, 9])),),
    "replacement": (lambda: DataLoader(Rows(), 2, sampler=RandomSampler(range(ROWS), True, 9, generator=seeded())),),
    "weights that change": (lambda: DataLoader(Rows(), 2, sampler=weighted()), {}, Harder),
    "buckets": (lambda: DataLoader(Rows(), batch_sampler=Buckets()),),
    "batch sampler that counts": (lambda: DataLoader(Rows(), batch_sampler=BatchSampler(Permuted(), 3, True)),),
    "one by one": (lambda: DataLoader(Augmented(), None, shuffle=True),),
    "part of an epoch": (lambda: DataLoader(Augmented(), 2, sampler=Permuted()), {"limit_train_batches": 3}),
    "stream": (lambda: DataLoader(Stream(), 2),),
    "stream that counts": (lambda: DataLoader(CountsPasses(), 2),),
    "stream that counts at its end": (lambda: DataLoader(CountsPasses(at_end=True), 2),),
    "stream with an epoch": (lambda: DataLoader(SetByHook(), 2), {}, EpochOfModule),
    "stream with a length": (lambda: DataLoader(HasLength(length=ROWS), 2),),
    "stream with a shorter length": (lambda: DataLoader(HasLength(length=6), 2),),
    "stream with a buffer": (lambda: DataLoader(Buffered(), 2),),
    "stream with a state": (lambda: DataLoader(KeepsPosition(), 2),),
    "part of a stream": (lambda: DataLoader(CountsPasses(), 2), {"limit_train_batches": 3}),
    "pipeline": (lambda: DataLoader(Pipeline(), 3),),
    "no DataLoader": (Again,),
    "two, max_size_cycle": (lambda: two("max_size_cycle"),),
    "two, min_size": (lambda: two("min_size"),),
    "two, max_size": (lambda: two("max_size"),),
    "three, max_size_cycle": (lambda: two("max_size_cycle", 3),),
    "three, min_size": (lambda: two("min_size", 3),),
    "three, max_size": (lambda: two("max_size", 3),),
    "made anew": (lambda: DataLoader(Counting(), 2, shuffle=True), {"reload_dataloaders_every_n_epochs": 1}),
    "workers": (lambda: DataLoader(Augmented(), 2, shuffle=True, **WORKERS),),
    "workers of a sampler that counts": (lambda: DataLoader(Rows(), 2, sampler=Permuted(), **WORKERS),),
    "workers of a stream": (lambda: DataLoader(CountsPasses(), 2, **WORKERS),),
    "workers of a dataset with a state": (lambda: DataLoader(KeepsRead(), 2, **WORKERS),),
    "spawned workers": (lambda: DataLoader(Augmented(), 2, multiprocessing_context="forkserver", **PERSISTENT),),
    "workers of an epoch": (lambda: DataLoader(SharedEpoch(), 2, **WORKERS), {}, EpochOfModule),
    "persistent workers": (lambda: DataLoader(Augmented(), 2, shuffle=True, **PERSISTENT),),
    "persistent workers that count": (lambda: DataLoader(Counting(), 2, shuffle=True, **PERSISTENT),),
    "persistent workers with generators": (lambda: DataLoader(WithGenerator(), 2, generator=seeded(), **PERSISTENT),),
    "persistent workers of a stream": (lambda: DataLoader(CountsPasses(), 2, **PERSISTENT),),
    "persistent workers, counted at the end": (lambda: DataLoader(CountsPasses(at_end=True), 2, **PERSISTENT),),
    "persistent workers of a length": (lambda: DataLoader(HasLength(True, ROWS), 2, **PERSISTENT),),
    "persistent workers of a pipeline": (lambda: DataLoader(Pipeline(), 3, **PERSISTENT),),
    "persistent workers of a buffer": (lambda: DataLoader(Buffered(), 2, **PERSISTENT),),
    "persistent workers of a dataset with a state": (lambda: DataLoader(KeepsRead(), 2, shuffle=True, **PERSISTENT),),
    "persistent workers of a stream with a state": (lambda: DataLoader(KeepsPosition(), 2, **PERSISTENT),),
    "persistent workers of an epoch": (lambda: DataLoader(SharedEpoch(), 2, **PERSISTENT), {}, EpochOfModule),
    "persistent workers, part of an epoch": (
        lambda: DataLoader(Counting(), 2, **PERSISTENT),
        {"limit_train_batches": 3},
    ),
    "persistent workers, part of a stream": (
        lambda: DataLoader(CountsPasses(at_end=True), 1, **PERSISTENT),
        {"limit_train_batches": 3},
    ),
    "stateful": (lambda: StatefulDataLoader(Augmented(), 2, shuffle=True),),
    "stateful stream": (lambda: StatefulDataLoader(KeepsPosition(), 2),),
    "stateful stream that counts": (lambda: StatefulDataLoader(CountsPasses(), 2),),
    "stateful workers": (lambda: StatefulDataLoader(Rows(), 2, shuffle=True, num_workers=2),),
    "stateful workers of a stream": (lambda: StatefulDataLoader(KeepsPosition(), 2, num_workers=2),),
}
