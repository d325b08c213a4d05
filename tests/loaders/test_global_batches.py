"""The same global batches whatever the number of ranks and the batch size; processes are in test_other_ranks.py."""

import itertools
import random

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

import lightning_fasttrain as ft
from lightning_fasttrain.loaders.global_batch import BatchShares
from tests.support.nets import TinyLM, concatenate, heard, largest_difference, lm_batches, sgd, trainer, weights

ROWS = concatenate(lm_batches(7, size=4))
SAMPLES = [{name: value[i] for name, value in ROWS.items()} for i in range(26)]  # steps of 12, 12 and 2
LARGE_STEPS = {"optimizer": sgd, "lr": 0.5}  # sensitive to a wrong scale


def shares_of(ranks, most, samples=26, per_step=12):
    """Return the places that each step has on each rank."""
    shares = BatchShares(samples, per_step, ranks, most)
    steps = {}
    for batch in range(shares.batches):
        for rank in range(ranks):
            places = shares.places(batch, rank)
            assert len(places) <= most
            steps.setdefault(shares.step_of(batch), []).extend(places)
    return shares, steps


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 12, 16])
def test_the_shares_of_all_ranks_are_the_global_batches(ranks, most):
    _, steps = shares_of(ranks, most)
    expected = [list(range(26))[first : first + 12] for first in (0, 12, 24)]
    assert [sorted(steps[step]) for step in range(3)] == expected


def test_shares_differ_by_one_sample_at_most():
    shares, _ = shares_of(ranks=5, most=3)
    assert [len(shares.places(0, rank)) for rank in range(5)] == [2, 2, 3, 2, 3]
    assert [len(shares.places(2, rank)) for rank in range(5)] == [0, 0, 1, 0, 1]  # the last step has two samples


def epochs_of(loader, count=2):
    seen = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        seen.append([batch.tolist() for batch in loader])
    return seen


def flat(epochs):
    """Return the samples of each epoch, whatever batch they are in."""
    return [list(itertools.chain.from_iterable(epoch)) for epoch in epochs]


@pytest.mark.parametrize("how", ["shuffle", "generator", "weights"])
def test_the_order_depends_on_the_seed_and_the_epoch_alone(how):
    def loader(seed=0, batch_size=4):
        sampler = WeightedRandomSampler(torch.ones(26), 26) if how == "weights" else None
        generator = torch.Generator() if how == "generator" else None
        made = DataLoader(range(26), batch_size, shuffle=sampler is None, sampler=sampler, generator=generator)
        return ft.loaders.global_batches(made, 12, seed=seed)

    torch.manual_seed(1)
    first, before = epochs_of(loader()), torch.get_rng_state()
    assert torch.equal(torch.Generator().manual_seed(1).get_state(), before)  # training's generator has not moved
    torch.manual_seed(2)
    assert epochs_of(loader()) == first
    assert first[0] != first[1]
    assert epochs_of(loader(seed=1)) != first
    assert flat(epochs_of(loader(batch_size=3))) == flat(first)


class Augmented(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), torch.rand(()).item()])


@pytest.mark.parametrize("settings", [{"batch_size": 2}, {"batch_size": 12, "num_workers": 2}])
def test_augmentations_depend_neither_on_the_batch_nor_on_the_worker(settings):
    def read(**settings):
        return torch.cat(list(ft.loaders.global_batches(DataLoader(Augmented(), shuffle=True, **settings), 12)))

    assert torch.equal(read(batch_size=5), read(**settings))


def test_a_position_continues_with_another_batch_size_at_the_same_sample():
    def loader(batch_size):
        return ft.loaders.global_batches(DataLoader(range(26), batch_size, shuffle=True), 12)

    whole = flat(epochs_of(loader(3)))
    saving = loader(3)
    saving.set_epoch(1)
    batches = iter(saving)
    for _ in range(6):  # a step and a half
        next(batches)
    state = saving.state_dict()
    for batch_size, first in [(3, 18), (4, 12), (12, 12)]:
        resumed = loader(batch_size)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)  # as Lightning does
        assert torch.cat(list(resumed)).tolist() == whole[1][first:]


def test_the_pass_after_a_finished_one_is_the_next_epoch():
    def make():
        return ft.loaders.global_batches(DataLoader(range(26), 4, shuffle=True), 12)

    first, second = epochs_of(make())
    assert first != second
    loader, resumed = make(), make()
    assert [batch.tolist() for batch in loader] == first
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in resumed] == second


def test_a_pass_of_which_no_more_was_asked_for_ends_when_it_is_resumed():
    def make():
        return ft.loaders.global_batches(DataLoader(range(26), 4, shuffle=True), 12)

    first, second = epochs_of(make())
    loader, resumed = make(), make()
    assert [batch.tolist() for _, batch in zip(first, loader, strict=False)] == first
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in resumed] == second


class Endless:
    def __iter__(self):
        return iter(range(8))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: [1, 2], TypeError, "expected"),
        (lambda: DataLoader(Stream()), TypeError, "Stream"),
        (lambda: DataLoader(range(8), sampler=Endless()), TypeError, "Endless has no length"),
        (lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)), ValueError, "shuffle=True"),
        (lambda: DataLoader(range(8), batch_sampler=[[0, 1], [2]]), ValueError, "batch_sampler=list"),
        (lambda: DataLoader(range(8), drop_last=True, batch_size=2), ValueError, "8 samples"),
    ],
)
def test_loaders_that_cannot_be_divided_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        ft.loaders.global_batches(make(), 12)


def run(batch_size, callbacks=(), ckpt_path=None, drop_last=False, samples=12, **settings):
    torch.manual_seed(3)
    module = TinyLM(**LARGE_STEPS)
    t = trainer([*callbacks, ft.loaders.GlobalBatch(samples)], max_epochs=2, **settings)
    loader = DataLoader(SAMPLES, batch_size, shuffle=True, drop_last=drop_last)
    t.fit(module, loader, ckpt_path=ckpt_path)
    return module, t


@pytest.fixture(scope="module")
def whole():
    return run(12)[0]


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_batches_of_any_size_make_the_same_steps(whole, batch_size):
    module, t = run(batch_size)
    assert largest_difference(weights(whole), weights(module)) < 2e-6
    assert t.global_step == 6


def test_an_incomplete_last_step_can_be_dropped():
    assert run(5, drop_last=True)[1].global_step == 4


@pytest.fixture(scope="module", params=["ExactResume", "Lightning"])
def saved(request, tmp_path_factory):
    """Checkpoints of a run in batches of 3, after every batch, so also inside of steps."""
    folder = tmp_path_factory.mktemp("saved")
    callbacks = [ft.ExactResume()] if request.param == "ExactResume" else []

    class SaveEach(ModelCheckpoint):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(folder / f"{trainer.current_epoch}-{batch_idx}.ckpt")

        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(folder / f"{trainer.current_epoch}-end.ckpt")

    module, _ = run(3, [SaveEach(folder, save_top_k=0), *callbacks], enable_checkpointing=True)
    return folder, callbacks, module


@pytest.mark.parametrize("place", ["0-1", "0-3", "0-8", "0-end", "1-0", "1-6"])
@pytest.mark.parametrize("batch_size", [2, 3, 12])
def test_a_run_resumes_with_another_batch_size(saved, place, batch_size):
    folder, callbacks, uninterrupted = saved
    module, t = run(batch_size, [type(callback)() for callback in callbacks], folder / f"{place}.ckpt")
    difference = largest_difference(weights(uninterrupted), weights(module))
    assert difference == 0 if batch_size == 3 else difference < 2e-6
    assert t.global_step == 6


class Estimating(TinyLM):
    """Asks for the number of steps, for which Lightning makes the loader before it restores a checkpoint."""

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("batch_size", [3, 5])
def test_a_loader_that_is_made_early_resumes_at_its_position(saved, batch_size):
    folder, callbacks, uninterrupted = saved
    module = Estimating(**LARGE_STEPS)
    techniques = [ft.loaders.GlobalBatch(12), *(type(callback)() for callback in callbacks)]
    loader = DataLoader(SAMPLES, batch_size, shuffle=True)
    trainer(techniques, max_epochs=2).fit(module, loader, ckpt_path=folder / "1-3.ckpt")
    assert largest_difference(weights(uninterrupted), weights(module)) < 2e-6
    assert module.steps == 6


def test_a_checkpoint_that_was_only_validated_sets_no_position(saved, whole):
    folder, _, _ = saved
    techniques = [ft.loaders.GlobalBatch(12)]
    module, t = TinyLM(**LARGE_STEPS), trainer(techniques, max_epochs=2)
    t.validate(TinyLM(**LARGE_STEPS), DataLoader(SAMPLES, 12), ckpt_path=folder / "1-3.ckpt", verbose=False)
    t.fit(module, DataLoader(SAMPLES, 3, shuffle=True))
    assert largest_difference(weights(whole), weights(module)) < 2e-6


def test_a_changed_division_is_said_in_one_line(saved):
    folder, callbacks, _ = saved
    with heard() as said:
        run(12, [type(callback)() for callback in callbacks], folder / "1-5.ckpt")
    assert "this run continues at sample 12 of epoch 1" in "\n".join(said)


def test_another_global_batch_is_refused(saved):
    folder, callbacks, _ = saved
    with pytest.raises(ValueError, match="12.*8"):
        run(3, [type(callback)() for callback in callbacks], folder / "1-3.ckpt", samples=8)


def test_two_training_loaders_are_refused():
    loaders = [DataLoader(SAMPLES, 2), DataLoader(SAMPLES, 2)]
    with pytest.raises(ValueError, match="one loader"):
        trainer([ft.loaders.GlobalBatch(12)]).fit(TinyLM(), loaders)
