"""SampleGuard reports unreadable samples and dead workers."""

import os
import pickle
import signal
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_fasttrain as ft
from lightning_fasttrain.loaders import SampleGuard, guard_samples
from lightning_fasttrain.loaders.sample_guard import TolerantDataset
from tests.support.nets import TinyLM, largest_difference, lm_batches, trainer, weights

WHOLE = lm_batches(1, size=12)[0]
ROWS = [{name: value[row] for name, value in WHOLE.items()} for row in range(12)]


class Rows(Dataset):
    """A dataset in which some rows cannot be read, and one kills the reading process."""

    def __init__(self, bad=(), deadly=None):
        self.bad, self.deadly = bad, deadly

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"file {index} is broken")
        if index == self.deadly:
            os._exit(3)
        return ROWS[index]


class Several(Rows):
    """Reads a batch at once, like Hugging Face's datasets."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def batch_of(*indices):
    return {name: torch.stack([ROWS[i][name] for i in indices]) for name in ROWS[0]}


def same(batches, others):
    return all(
        torch.equal(one[name], other[name]) for one, other in zip(batches, others, strict=True) for name in WHOLE
    )


@pytest.mark.parametrize("kind", [Rows, Several])
@pytest.mark.parametrize(("workers", "reader"), [(0, "the training process"), (1, "worker 0")])
def test_a_bad_sample_is_reported_and_left_out_of_its_batch(kind, workers, reader):
    loader = DataLoader(kind(bad=[5]), batch_size=4, num_workers=workers)
    guarded = guard_samples(loader, skip_bad_samples=1)
    with pytest.warns(
        ft.FastTrainWarning, match=f"sample 5, read by {reader}: OSError: file 5 is broken .*1 of at most"
    ):
        batches = list(guarded)
    assert same(batches, [batch_of(0, 1, 2, 3), batch_of(4, 6, 7), batch_of(8, 9, 10, 11)])
    assert (guarded.skipped, len(guarded), type(loader.dataset)) == (1, 3, kind)


def test_closing_restores_the_loader():
    loader = DataLoader(Rows(bad=[5]), batch_size=4)
    guard_samples(loader, skip_bad_samples=1).close()
    with pytest.raises(OSError, match="file 5 is broken"):
        list(loader)


def test_persistent_workers_are_guarded_and_restored_afterwards():
    dataset = Rows()
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    plain = list(loader)  # by workers without the guard
    dataset.bad = [5]
    guarded = guard_samples(loader, skip_bad_samples=2)
    with pytest.warns(ft.FastTrainWarning, match="sample 5"):
        assert [len(batch["labels"]) for batch in guarded] == [4, 3, 4]
    with pytest.warns(ft.FastTrainWarning, match="sample 5"):
        list(guarded)
    dataset.bad = ()
    guarded.close()
    assert same(list(loader), plain)


def test_one_bad_sample_too_many_and_an_empty_batch_are_errors():
    with pytest.raises(RuntimeError, match="sample 5, read by the training process: OSError.*skip_bad_samples=0"):
        list(guard_samples(DataLoader(Rows(bad=[5]), batch_size=4)))
    with (
        pytest.warns(ft.FastTrainWarning),
        pytest.raises(RuntimeError, match="sample 7.*skip_bad_samples=1"),
    ):
        list(guard_samples(DataLoader(Rows(bad=[5, 7]), batch_size=4), skip_bad_samples=1))
    for size in (1, None):
        with (
            pytest.warns(ft.FastTrainWarning),
            pytest.raises(RuntimeError, match="a batch has no readable sample: sample 5"),
        ):
            list(guard_samples(DataLoader(Rows(bad=[5]), batch_size=size), skip_bad_samples=3))
    with pytest.raises(ValueError, match="skip_bad_samples=-1"):
        SampleGuard(-1)


def test_a_dead_worker_is_reported_with_its_batch(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # s that torch waits for dead workers
    guarded = guard_samples(DataLoader(Rows(deadly=1), batch_size=2, num_workers=1))
    with pytest.raises(
        RuntimeError, match=r"worker 0 of the loader \(process \d+\) died with exit code 3; .* number 0 of"
    ):
        list(guarded)


def end_soon_and_break_the_connection(process):
    threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
    raise EOFError


class DiesWhileHandingOver(Rows):
    """Its samples break the connection to their worker a moment before the system reports that it was killed."""

    def __getitem__(self, index):
        return self

    def __reduce__(self):
        return end_soon_and_break_the_connection, (os.getpid(),)


def test_a_worker_that_is_killed_while_it_hands_a_batch_over_is_named():
    loader = DataLoader(DiesWhileHandingOver(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"worker 0 of the loader \(process \d+\) died by SIGKILL"):
        list(guard_samples(loader))


class Stream(IterableDataset):
    def __iter__(self):
        yield from ROWS


def test_streams_and_other_loaders_pass_through():
    assert same(list(guard_samples(DataLoader(Stream(), batch_size=6))), [batch_of(*range(6)), batch_of(*range(6, 12))])
    assert list(guard_samples([1, 2])) == [1, 2]


def test_the_guarded_dataset_can_be_sent_to_spawned_workers():
    again = pickle.loads(pickle.dumps(TolerantDataset(Several(bad=[1]))))
    assert [type(sample).__name__ for sample in again.__getitems__([0, 1])] == ["dict", "BadSample"]


def fit(dataset, callbacks, workers=0, epochs=1, **settings):
    torch.manual_seed(5)
    net, t = TinyLM(), trainer(callbacks, max_epochs=epochs)
    loader = DataLoader(dataset, batch_size=3, shuffle=True, num_workers=workers)
    t.fit(net, loader, **settings)
    return net, t


def test_without_bad_samples_the_run_is_the_plain_one():
    assert largest_difference(*(weights(fit(Rows(), guard)[0]) for guard in ([], [SampleGuard()]))) == 0


class SaveAt(ft.Technique):
    """Saves a checkpoint after some batches."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("step", [2, 5])
def test_a_resumed_run_matches_the_uninterrupted_one_including_its_count(tmp_path, workers, step):
    bad, path = Rows(bad=[2, 7]), tmp_path / "cut.ckpt"
    whole, resumed = SampleGuard(10), SampleGuard(10)
    with pytest.warns(ft.FastTrainWarning):
        net, t = fit(bad, [whole, ft.ExactResume(), SaveAt(step, path)], workers, epochs=2)
    with pytest.warns(ft.FastTrainWarning):
        again, _ = fit(bad, [ft.ExactResume(), resumed], workers, epochs=2, ckpt_path=path, weights_only=True)
    assert largest_difference(weights(net), weights(again)) == 0
    assert whole.skipped == resumed.skipped == 4
    assert t.global_step == 8
