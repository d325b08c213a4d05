"""What datasets, samplers and workers hold is saved and restored, and other data than in the saved run are noticed."""

import collections
import io
import multiprocessing
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.loader_state import attributes as module
from lightning_fasttrain.checkpoint.loader_state.attributes import Attributes, watch_attributes
from lightning_fasttrain.checkpoint.loader_state.dataset_state import find_persistent_workers
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import checksum, resumable
from lightning_fasttrain.core.distributed import pack, unpack
from lightning_fasttrain.core.messages import FastTrainWarning
from tests.checkpoint.loader_kinds import Augmented, CountsPasses, Permuted, Rows
from tests.checkpoint.test_loader_kinds import differing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*set_vital"),
]


class Part:
    def __init__(self):
        self.count, self.generator = 0, None


class Holder(Dataset):
    """Has an attribute of each kind that may change."""

    def __init__(self):
        self.epoch, self.name, self.scale = 0, "a", 1.5
        self.weights, self.array = torch.ones(3), np.zeros(2)
        self.number, self.shared = np.int64(3), multiprocessing.Value("i", 1)
        self.seen, self.queue, self.order, self.table = {1, 2}, collections.deque([1], maxlen=3), [3, 1], {"x": (1, 2)}
        self.parts = [Part(), {"deep": Part()}]
        self.random = random.Random(1)

    def change(self):
        self.epoch, self.name, self.scale = 4, "b", float("nan")
        self.weights[1] = 5.0
        self.array += 2
        self.number, self.shared.value = np.int64(7), 9
        self.seen.add(8), self.queue.append(6), self.order.reverse()
        self.table["y"] = [None, b"z", 2j]
        self.parts[0].count, self.parts[1]["deep"].count = 3, 5
        self.parts[0].generator = np.random.default_rng(2)
        self.parts[0].generator.random(), self.random.random()
        self.later = "set later"


def contents(holder):
    state = {key: value for key, value in vars(holder).items() if key not in ("shared", "parts", "random")}
    parts = [vars(holder.parts[0]), vars(holder.parts[1]["deep"])]
    made = holder.parts[0].generator
    generators = holder.random.getstate(), made and made.bit_generator.state
    return repr((state, holder.shared.value, [part["count"] for part in parts], generators))


def test_everything_that_changed_is_restored_in_another_process_s_objects():
    first, second = Holder(), Holder()
    watched, others = Attributes([first]), Attributes([second])
    shared = second.weights, second.array, second.queue, second.parts[0]
    first.change()
    others.restore(unpack(pack(watched.changes())))  # as in a checkpoint, without pickled objects
    assert contents(second) == contents(first)
    assert all(map(lambda a, b: a is b, shared, (second.weights, second.array, second.queue, second.parts[0])))
    assert second.queue.maxlen == 3
    assert first.parts[0].generator.random() == second.parts[0].generator.random()
    others.restore({})
    watched.restore({})
    assert contents(second) == contents(first)
    assert "later" not in vars(second)
    assert second.epoch == 0
    assert second.order == [3, 1]


@pytest.mark.parametrize("made", [io.StringIO(), Part()], ids=["file", "object"])
def test_what_a_checkpoint_cannot_hold_is_left_out_with_the_flags_beside_it(made):
    class Files(Dataset):
        def __init__(self):
            self.file, self.is_open, self.epoch, self.cache, self.reader = None, False, 0, {}, Part()

    first, second = Files(), Files()
    watched, others = Attributes([first]), Attributes([second])
    first.file, first.is_open, first.epoch, first.cache = made, True, 3, dict.fromkeys(range(300), 1)
    first.reader.count = 7
    changes = watched.changes()
    assert sorted(path for path, value in changes.items() if module.is_left_out(value)) == ["0.cache", "0.file"]
    others.restore(changes)
    assert (second.file, second.is_open, second.epoch, second.cache, second.reader.count) == (None, False, 3, {}, 7)


def test_large_data_and_models_are_not_walked_through():
    class Large(Dataset):
        def __init__(self):
            self.samples = [Part() for _ in range(1000)]
            self.encoder = torch.nn.Linear(2, 2)
            self.text = list(range(3000))
            self.weights, self.array = torch.arange(2.0**19), np.arange(2.0**19)
            self.view, self.sparse = torch.ones(2**10, 2**10).t(), torch.eye(2**10).to_sparse()
            self.objects = np.array([Part(), None], dtype=object)

    large = Large()
    watched = Attributes([large])
    assert sorted(watched.began) == sorted(["0", *(f"0.{name}" for name in vars(large))])
    assert all(module.is_left_out(value) for value in watched.began.values())
    assert watched.changes() == {}
    random.Random(1).shuffle(large.text)
    large.weights.mul_(2)
    large.array += 1
    assert sorted(watched.changes()) == ["0", "0.array", "0.text", "0.weights"]


def test_tensors_that_are_written_or_replaced_are_noticed_each_time():
    holder = Holder()
    watched = Attributes([holder])
    assert watched.changes().keys() == watched.changes().keys()  # unwritten since
    for value in (2.0, 3.0):
        holder.weights.fill_(value)
        assert watched.changes()["0.weights"][1].tolist() == [value] * 3
    holder.weights.fill_(1.0)
    assert "0.weights" not in watched.changes()
    holder.weights = torch.full((3,), 9.0)
    assert watched.changes()["0.weights"][1].tolist() == [9.0] * 3


def test_a_dataset_is_compared_with_how_it_was_when_first_seen():
    dataset = Rows()
    watch_attributes(DataLoader(dataset))
    dataset.shift = 5
    assert watch_attributes(DataLoader(dataset, 2)).changes()["0.shift"] == 5


@pytest.mark.parametrize("kind", ["sampler that counts", "pipeline", "persistent workers of a stream"])
def test_negative_control_without_attributes_a_resumed_run_differs_and_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "are_equal", lambda one, other: True)
    found, _ = differing(kind, tmp_path, every=3)
    assert any("differs from the one that the saved run has read" in said for said in found.values())


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum() + torch.rand(())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed_samples", [False, True])
def test_changed_data_are_refused_or_reported(workers, seed_samples):
    def read(shift, saved=None, stop=3, **settings):
        torch.manual_seed(1)
        loader = resumable(DataLoader(Rows(10, shift), 2, shuffle=True, num_workers=workers), seed_samples, **settings)
        if saved is not None:
            loader.load_state_dict(saved)
        batches = iter(loader)
        seen = [next(batches) for _ in range(stop)]
        return loader.state_dict(), seen

    saved, _ = read(0)
    read(0, saved, stop=2)
    with pytest.raises(ValueError, match='last batch before the saved position differs .* pass on_change="warn"'):
        read(100, saved, stop=1)
    with pytest.warns(FastTrainWarning, match="last batch before the saved position differs"):
        read(100, saved, stop=1, on_change="warn")


def test_the_first_batch_is_compared_where_it_had_been_prefetched():
    def make(shift):
        return resumable(DataLoader(Rows(10, shift), 2))

    loader = make(0)
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    saved = loader.position(2)
    assert saved["next"] == checksum(torch.tensor([[4.0, 0.0], [5.0, 0.0]]))
    saved["checksum"] = None
    other = make(100)
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match="the first batch after the saved position differs"):
        next(iter(other))


@pytest.mark.parametrize("strict", [True, False])
def test_the_trainer_refuses_changed_data_of_the_same_kind_or_reports_them(strict, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def fit(callbacks, shift, path=None):
        settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_epochs=1, enable_checkpointing=False, callbacks=callbacks, **settings)
        trainer.fit(Net(), DataLoader(Rows(10, shift), 2), ckpt_path=path)

    fit([ft.ExactResume(), Save()], 0)
    resuming = [ft.ExactResume(strict=strict)]
    if strict:
        with pytest.raises(ValueError, match="last batch before the saved position differs"):
            fit(resuming, 3, tmp_path / "2.ckpt")
    else:
        with pytest.warns(FastTrainWarning, match="last batch before the saved position differs"):
            fit(resuming, 3, tmp_path / "2.ckpt")


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.arange(6.0).view(2, 3), "n": ["a", "c"]},
        {"x": torch.arange(6.0).view(3, 2), "n": ["a", "b"]},
        {"x": torch.arange(6).view(2, 3), "n": ["a", "b"]},
        {"y": torch.arange(6.0).view(2, 3), "n": ["a", "b"]},
        {"x": torch.arange(6.0).view(2, 3) + torch.tensor([0.0, 0.0, 1e-3]), "n": ["a", "b"]},
    ],
    ids=["text", "shape", "dtype", "key", "value"],
)
def test_a_checksum_tells_batches_apart(other):
    batch = {"x": torch.arange(6.0).view(2, 3), "n": ["a", "b"]}
    assert checksum(batch) == checksum({"x": torch.arange(6.0).view(2, 3).clone(), "n": ["a", "b"]}) != checksum(other)


class Cyclic:
    def __init__(self, value):
        self.value, self.itself, self.others = value, self, [self]


def test_a_checksum_reads_every_sample_and_any_container():
    images = torch.rand(64, 3, 32, 32)
    for sample in range(64):
        changed = images.clone()
        changed[sample] = 0.5
        assert checksum(changed) != checksum(images)
    for one, other in [
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (np.ones(3), np.zeros(3)),
        (Holder(), None),
        (torch.eye(3).to_sparse(), torch.eye(4).to_sparse()),
        (torch.ones(4, 4).t()[::2], torch.zeros(4, 4).t()[::2]),
        ([torch.ones(2), (1, "a")], [torch.ones(2), (2, "a")]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
        (Cyclic(1), Cyclic(2)),
        (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
    ]:
        assert checksum(one) != checksum(other)


def test_workers_that_ran_before_are_started_anew_and_known_from_then_on():
    loader = DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 5
    held = resumable(loader)
    batches = iter(held)
    next(batches)
    saved = held.state_dict()
    rest = list(batches)
    again = resumable(DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True))
    again.load_state_dict(saved)
    assert all(map(torch.equal, rest, list(again)))
    assert all(map(torch.equal, list(held), list(again)))  # the next pass, for which no state was saved


def test_a_worker_that_does_not_answer_is_reported():
    held = resumable(DataLoader(CountsPasses(), 2, num_workers=1, persistent_workers=True))
    assert len(list(held)) == 5
    assert held.between_passes()["workers"] is not None
    find_persistent_workers(held.inner)._questions[0].close()
    with pytest.warns(FastTrainWarning, match="the state of persistent workers is not saved"):
        assert held.between_passes()["workers"] is None


def test_another_number_of_persistent_workers_is_refused():
    def make(count):
        return resumable(DataLoader(CountsPasses(), 2, num_workers=count, persistent_workers=True))

    held = make(1)
    list(held)
    other = make(2)
    other.load_state_dict(held.between_passes())
    with pytest.raises(ValueError, match="num_workers=2 for a checkpoint with num_workers=1"):
        iter(other).__next__()


class FromEnvironment(IterableDataset):
    """A worker_init_fn of the user sets what it reads, as torch's documentation shows."""

    start = 0

    def __iter__(self):
        yield from range(self.start, self.start + 3)


def shift_by_worker(worker):
    torch.utils.data.get_worker_info().dataset.start = 10 * worker


def test_the_users_own_worker_init_fn_sees_the_dataset():
    make = lambda: DataLoader(  # noqa: E731
        FromEnvironment(), None, num_workers=2, persistent_workers=True, worker_init_fn=shift_by_worker
    )
    held = resumable(make())
    assert [list(held), list(held)] == [list(make())] * 2 == [[0, 10, 1, 11, 2, 12]] * 2


def test_a_loop_resumes_between_passes_of_a_sampler_that_counts():
    def make():
        return resumable(DataLoader(Rows(), 2, sampler=Permuted()))

    held = make()
    list(held)
    saved = held.state_dict()
    again = make()
    again.load_state_dict(saved)
    assert all(map(torch.equal, list(held), list(again)))
