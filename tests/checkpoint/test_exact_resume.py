"""A run resumed from any of its checkpoints ends as the uninterrupted one: complete checkpoints are bitwise equal."""

import copy
import itertools
import pickle
import random
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, SubsetRandomSampler

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.exact_resume import KEY, ExactResume
from lightning_fasttrain.core.distributed import pack, unpack
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.technique import Technique
from tests.support.nets import trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step..*")


class Rows(Dataset):
    """Samples augmented with the generators of three libraries."""

    def __init__(self, count=8):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor([float(i), random.random(), np.random.rand(), float(torch.rand(()))])


class Stream(IterableDataset):
    """Has no length, so that Lightning prefetches a batch."""

    def __init__(self, count=8):
        self.count, self.generator = count, torch.Generator().manual_seed(5)

    def __iter__(self):
        for i in range(self.count):
            yield torch.cat([torch.tensor([float(i), random.random()]), torch.rand(2, generator=self.generator)])


class OtherRows(Rows):
    """Other data of the same length."""


class Net(L.LightningModule):
    """Draws in every hook, logs in every way, and has a schedule that depends on validation."""

    def __init__(self):
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        torch.set_rng_state(state)
        self.logged, self.forever = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.seen = []

    def on_train_start(self):
        torch.rand(7)

    def on_train_epoch_start(self):
        random.random(), torch.rand(3)

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = torch.cat([part for part in batch.values() if part is not None])
        self.seen.append(batch.clone())
        loss = self.net(batch).sub(random.random() + np.random.rand()).pow(2).mean()
        self.logged.update(loss.detach()), self.forever.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", batch_size=len(batch))
        self.log("mean", self.logged, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).pow(2).mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class SGD(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def net_with(lr=0.01, schedules=1, patience=0, split=None, width=8):
    """A class of modules like Net, but for these settings."""

    class Changed(Net):
        def __init__(self):
            super().__init__()
            if width != 8:
                self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, 1))

        def configure_optimizers(self):
            parameters = list(self.parameters())
            groups = parameters if split is None else [{"params": parameters[:split]}, {"params": parameters[split:]}]
            optimizer = torch.optim.AdamW(groups, lr=lr)
            made = []
            for _ in range(schedules):
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, patience=patience, factor=0.5, threshold=10.0
                )
                made.append({"scheduler": plateau, "monitor": "val"})
            return [optimizer], made

    return Changed


class WithoutValidation(Net):
    validation_step = None

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)  # creates the loaders before anything is restored
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RestoresLate(SingleDeviceStrategy):
    """Restores late, as sharding strategies do."""

    restore_checkpoint_after_setup = True


class SaveEverywhere(L.Callback):
    """Saves after batches, validation, complete iterations, epochs, and the work that follows an epoch."""

    def __init__(self, folder):
        self.folder, self.files = folder, []

    def save(self, trainer, name):
        self.files.append(self.folder / f"{len(self.files):02d}-{name}.ckpt")
        trainer.save_checkpoint(self.files[-1])

    def on_train_start(self, trainer, pl_module):
        for loop, name in ((trainer.fit_loop.epoch_loop, "iteration"), (trainer.fit_loop, "all of an epoch")):
            patch(loop, "on_advance_end", self.saving_after(trainer, loop.on_advance_end, name))

    def saving_after(self, trainer, original, name):
        def on_advance_end(*args):
            original(*args)
            self.save(trainer, name)

        return on_advance_end

    def on_train_batch_end(self, trainer, *args):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")


def shuffled(**settings):
    return DataLoader(Rows(), batch_size=2, shuffle=True, **settings)


def own_generator():
    return torch.Generator().manual_seed(6)


def two_loaders():
    return {"a": shuffled(), "b": DataLoader(Rows(4), batch_size=2, shuffle=True, generator=own_generator())}


def run(callbacks, ckpt=None, loader=shuffled, net=Net, seed=3, val=lambda: DataLoader(Rows(4), batch_size=2), **more):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    module, more["strategy"] = net(), more.get("strategy", lambda: "auto")()
    trainer = L.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
            **more,
        },
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader(), val() if module.validation_step else None, ckpt_path=ckpt, weights_only=True)
    return module, trainer, opened(trainer._checkpoint_connector.dump_checkpoint())


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """The module, the end and the files of a run with default settings; tests copy a file before they change it."""
    save = SaveEverywhere(tmp_path_factory.mktemp("plain"))
    module, _, whole = run([ExactResume(), save])
    return module, whole, save.files


def opened(checkpoint):
    if KEY not in checkpoint:
        return checkpoint
    return {**checkpoint, KEY: {**checkpoint[KEY], "ranks": [unpack(rank) for rank in checkpoint[KEY]["ranks"]]}}


def differences(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{path}: {set(a) ^ set(b)}"] if set(a) != set(b) else []
        return missing + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        pairs = enumerate(zip(a, b, strict=False))
        return [path] * (len(a) != len(b)) + [d for i, (x, y) in pairs for d in differences(x, y, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a} {b}"]


SETTINGS = {
    "plain": {},
    "validation in mid-epoch": {"val_check_interval": 2},
    "accumulation": {"accumulate_grad_batches": 3, "val_check_interval": 2},
    "max_steps": {"max_epochs": -1, "max_steps": 7},
    "no validation, loaders made early": {"net": WithoutValidation},
    "restored after the loaders are made": {"net": WithoutValidation, "strategy": lambda: RestoresLate("cpu")},
    "own generator": {"loader": lambda: shuffled(generator=own_generator())},
    "part of the data": {"loader": lambda: shuffled(generator=own_generator()), "limit_train_batches": 3},
    "no length": {"loader": lambda: DataLoader(Stream(), batch_size=2), "max_epochs": 3},
    "several loaders": {"loader": two_loaders, "max_epochs": 3},
    "several until all end": {"loader": lambda: CombinedLoader(two_loaders(), "max_size")},
    "several without length": {"loader": lambda: {"a": DataLoader(Stream(), 2), "b": DataLoader(Stream(6), 2)}},
    "loaders made again": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3},
}


EVERY, THIRDS = slice(None), [slice(first, None, 3) for first in range(3)]
# All places of a save in a plain run, and a third of them in the others.
USUAL = [("plain", EVERY), *zip(list(SETTINGS)[1:], itertools.cycle(THIRDS))]
EXHAUSTIVE = [pytest.param(name, EVERY, marks=pytest.mark.benchmark) for name in list(SETTINGS)[1:]]


@pytest.mark.parametrize(("name", "which"), [*USUAL, *EXHAUSTIVE])
def test_resuming_from_any_checkpoint_equals_the_uninterrupted_run(name, which, tmp_path):
    save = SaveEverywhere(tmp_path)
    module, trainer, whole = run([ExactResume(), save], **SETTINGS[name])
    plain, *_ = run([], **SETTINGS[name])
    assert not differences(plain.state_dict(), module.state_dict())
    for path in save.files[which]:
        resumed, _, end = run([ExactResume()], path, seed=4, **SETTINGS[name])
        rest = module.seen[len(module.seen) - len(resumed.seen) :]
        assert not differences(rest, resumed.seen), path.name
        # Nothing is left to train after its last checkpoints, so the rest is not restored.
        left = ("state_dict",) if is_last(path, save.files, trainer) else whole.keys()
        assert not differences({key: whole[key] for key in left}, {key: end[key] for key in left}), path.name


def test_a_finished_run_is_resumed_with_what_lightning_forgets(tmp_path):
    class SaveAtEnd(L.Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    def writer():
        return ModelCheckpoint(tmp_path / "saved", monitor="val", enable_version_counter=False)

    first, second = writer(), writer()
    module, trainer, _ = run([ExactResume(), SaveAtEnd(), first])
    _, again, _ = run([ExactResume(), second], tmp_path / "end.ckpt")
    assert second.state_dict() == first.state_dict()
    assert again.callback_metrics == {key: trainer.callback_metrics[key] for key in again.callback_metrics}
    assert again.callback_metrics.keys() == trainer.callback_metrics.keys()


def is_last(path, files, trainer):
    if trainer.max_steps > 0:
        return torch.load(path, weights_only=True)["global_step"] == trainer.max_steps
    return path in files[-2:]


WORKERS = {
    "two workers": lambda: shuffled(num_workers=2),
    "persistent workers": lambda: shuffled(num_workers=2, persistent_workers=True),
    "workers of an own generator": lambda: shuffled(num_workers=2, generator=own_generator()),
}


@pytest.mark.parametrize("name", WORKERS)
def test_resuming_with_workers_equals_the_uninterrupted_run(name, tmp_path):
    save = SaveEverywhere(tmp_path)
    *_, whole = run([ExactResume(), save], loader=WORKERS[name])
    for path in (save.files[2], save.files[13]):  # in mid-epoch, in the next
        *_, end = run([ExactResume()], path, seed=4, loader=WORKERS[name])
        assert not differences(whole, end), path.name


def test_seeded_samples_resume_exactly_and_without_reading_again(tmp_path, caplog):
    save = SaveEverywhere(tmp_path)
    *_, whole = run([ExactResume(seed_samples=True), save], loader=lambda: shuffled(num_workers=2))
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        for path, workers in ((save.files[4], 1), (save.files[13], 2)):
            resume = ExactResume(seed_samples=True)
            *_, end = run([resume], path, seed=4, loader=lambda n=workers: shuffled(num_workers=n))
            assert not differences(whole, end), path.name
    assert "reading and dropping" not in caplog.text
    with pytest.raises(ValueError, match="seed_samples = True, this run has seed_samples = False"):
        run([ExactResume()], save.files[4])


def test_negative_control_lightning_alone_ends_differently(tmp_path):
    save = SaveEverywhere(tmp_path)
    *_, whole = run([save])
    files = save.files[:-5]  # the last five hold the weights of the end
    assert not any(not differences(whole["state_dict"], run([], path, seed=4)[2]["state_dict"]) for path in files)


def tampered(path, part, value, folder):
    """Copy a checkpoint, and replace one part of one process's state."""
    checkpoint = torch.load(path, weights_only=True)
    mine = unpack(checkpoint[KEY]["ranks"][0])
    if part == "gradients":
        del checkpoint[KEY]["gradients"]
    elif part == "point":
        checkpoint[KEY]["point"] = value
    elif part == "given":
        mine["loaders"][0]["given"] = value
    else:
        mine[part] = value(mine[part])
    checkpoint[KEY]["ranks"] = [pack(mine)]
    torch.save(checkpoint, folder / path.name)
    return folder / path.name


IN_A_WINDOW = {"accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 1}


@pytest.fixture(scope="module")
def run_with_windows(tmp_path_factory):
    save = SaveEverywhere(tmp_path_factory.mktemp("windows"))
    return run([ExactResume(), save], **IN_A_WINDOW)[2], save.files


@pytest.mark.parametrize(
    ("part", "value", "shows_in"),
    [
        ("random", lambda state: {**state, "torch": torch.Generator().manual_seed(8).get_state()}, ".state_dict"),
        ("random", lambda state: {**state, "python": random.Random(8).getstate()}, ".state_dict"),
        ("given", 3, ".state_dict"),
        ("gradients", None, ".state_dict"),
        ("point", "validation", f".{KEY}.ranks[0].callback_metrics.val"),
        ("logged", lambda state: {}, f".{KEY}.ranks[0].callback_metrics"),
        ("metrics", lambda state: {}, f".{KEY}.ranks[0].metrics.forever"),
    ],
)
@pytest.mark.filterwarnings("ignore:the last batch before the saved position differs")
def test_negative_control_every_part_of_the_state_is_needed(part, value, shows_in, run_with_windows, tmp_path):
    whole, files = run_with_windows
    path = tampered(files[2], part, value, tmp_path)
    assert path.name == "02-batch.ckpt"  # two of the three batches of a window are done, and validation is pending
    *_, end = run([ExactResume(on_change="warn")], path, seed=4, **IN_A_WINDOW)
    found = differences(whole, end)
    assert any(difference.startswith(shows_in) for difference in found), found


class FetchAhead(Technique):
    """Prefetches two batches, as a prefetcher to a device does; independent of the wrapped loader."""

    def attach(self, trainer, pl_module):
        process = trainer.strategy.process_dataloader
        return patch(trainer.strategy, "process_dataloader", lambda loader: Ahead(process(loader)))


class Ahead:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        waiting = []
        for batch in self.inner:
            waiting.append(batch)
            if len(waiting) == 3:
                yield waiting.pop(0)
        yield from waiting


@pytest.mark.parametrize("turned", [False, True])
def test_resumes_exactly_with_a_prefetcher_in_either_order(turned, tmp_path):
    save, make = SaveEverywhere(tmp_path), lambda: [ExactResume(), FetchAhead()][:: -1 if turned else 1]
    module, *_ = run([*make(), save])
    for path in save.files[:16:3]:
        end, *_ = run(make(), path, seed=4)
        assert not differences(module.seen[-len(end.seen) :], end.seen), path.name
        assert not differences(module.state_dict(), end.state_dict()), path.name


def test_resumes_exactly_with_device_prefetch_in_either_order(plain_run):
    _, whole, files = plain_run
    for callbacks in ([ft.DevicePrefetch(), ExactResume()], [ExactResume(), ft.DevicePrefetch()]):
        *_, end = run(callbacks, files[2], seed=4)
        assert not differences(whole["state_dict"], end["state_dict"])


def test_resumes_exactly_with_token_weighted_accumulation(tmp_path):
    def window():
        return [ft.TokenWeightedAccumulation(3, count=len), ExactResume()]

    save = SaveEverywhere(tmp_path)
    *_, whole = run([*window(), save])
    for path in save.files[:9:2]:
        checkpoint = torch.load(path, weights_only=True)
        assert "gradients" not in checkpoint[KEY]
        *_, end = run(window(), path, seed=4)
        assert not differences(whole["state_dict"], end["state_dict"]), path.name


def test_the_loss_scale_of_half_precision_is_restored(tmp_path):
    def scaled():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)  # overflows at first
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "accumulate_grad_batches": 2}

    save = SaveEverywhere(tmp_path)
    *_, whole = run([ExactResume(), save], **scaled())
    assert whole["MixedPrecision"]["scale"] != 2.0**40
    for path in save.files[:12]:
        assert not differences(whole, run([ExactResume()], path, seed=4, **scaled())[2]), path.name


@pytest.mark.parametrize("often", [{"val_check_interval": 2}, {"check_val_every_n_epoch": 2, "net": SGD}])
def test_a_validation_loader_with_its_own_generator(often, tmp_path):
    settings = {"val": lambda: shuffled(generator=own_generator()), "limit_val_batches": 2, **often}
    save = SaveEverywhere(tmp_path)
    *_, whole = run([ExactResume(), save], **settings)
    for path in save.files[:12]:
        *_, end = run([ExactResume()], path, seed=4, **settings)
        found = differences(whole, end)
        assert not [difference for difference in found if "reloaded" not in difference], path.name


def test_model_checkpoint_state_is_resumed_too(tmp_path):
    """Also inside a window, where a ModelCheckpoint without its state would save the last step again."""

    def callbacks(folder):
        every_step = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        best = ModelCheckpoint(folder, "best-{step}", monitor="val", save_top_k=2)
        return [ExactResume(), every_step, best]

    settings = {"net": SGD, "accumulate_grad_batches": 2, "check_val_every_n_epoch": 2, "max_epochs": 3}
    *_, whole = run(callbacks(tmp_path / "whole"), **settings)
    stopped = tmp_path / "stopped"
    run(callbacks(stopped), **settings)
    (stopped / "step=6.ckpt").unlink()  # as if it had been killed before
    before = (stopped / "step=5.ckpt").read_bytes()
    *_, end = run(callbacks(stopped), stopped / "step=5.ckpt", seed=4, **settings)
    assert before == (stopped / "step=5.ckpt").read_bytes()
    text = repr(end["callbacks"]).replace(str(stopped), "")
    assert text == repr(whole["callbacks"]).replace(str(tmp_path / "whole"), "")


def test_a_requested_stop_survives_a_resume(tmp_path):
    save = SaveEverywhere(tmp_path)

    class Stops(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = trainer.should_stop or trainer.global_step == 4

    module, *_ = run([ExactResume(), Stops(), save])
    assert len(module.seen) == 4
    path = next(path for path in save.files if "validation" in path.name)
    resumed, *_ = run([ExactResume()], path, seed=4)
    assert resumed.seen == []


def test_after_an_exception_the_batch_is_run_again(plain_run, tmp_path):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if len(self.seen) == 3:
                raise RuntimeError("out of luck")
            return loss

    save = ModelCheckpoint(tmp_path, "failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        run([ExactResume(), save], net=Fails)
    whole, *_ = plain_run
    resumed, *_ = run([ExactResume()], tmp_path / "failed.ckpt", seed=4)
    order = [batch[:, 0] for batch in whole.seen]
    assert not differences(order[2:4], [batch[:, 0] for batch in resumed.seen[:2]])


class Stateful(list):
    position = 0

    def __iter__(self):
        for i in range(self.position, 4):
            self.position = i + 1
            yield self[i]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def own_state():
    return Stateful(torch.full((2, 4), float(i)) for i in range(4))


class Several(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(torch.cat(batch), batch_idx)


def test_a_stateful_loader_is_left_to_lightning(tmp_path):
    def both():
        return CombinedLoader([own_state(), shuffled()], "min_size")

    save = SaveEverywhere(tmp_path)
    module, *_ = run([ExactResume(), save], loader=both, net=Several, max_epochs=1)
    resumed, *_ = run([ExactResume()], save.files[2], seed=4, loader=both, net=Several, max_epochs=1)
    assert not differences(module.seen[2:], resumed.seen)


@pytest.mark.parametrize("turned", [False, True])
def test_loaders_beside_an_iterator_resume_at_their_position(turned, tmp_path):
    def three():
        loaders = [iter([torch.zeros(1, 4)] * 4), own_state(), shuffled()]
        return CombinedLoader(loaders[::-1] if turned else loaders, "min_size")

    save = SaveEverywhere(tmp_path)
    told = {"match": "an iterator cannot be read again"}
    with pytest.warns(ft.FastTrainWarning, **told):
        module, *_ = run([ExactResume(), save], loader=three, net=Several, max_epochs=1)
    with pytest.warns(ft.FastTrainWarning, **told):
        resumed, *_ = run([ExactResume()], save.files[2], seed=4, loader=three, net=Several, max_epochs=1)
    assert not differences(module.seen[2:], resumed.seen)


def test_a_checkpoint_resumes_without_exact_resume_as_in_lightning(plain_run):
    module, *_ = run([], plain_run[2][2], seed=4)
    assert len(module.seen) == 6


def test_a_checkpoint_saved_without_exact_resume_gives_a_warning(tmp_path):
    save = SaveEverywhere(tmp_path)
    run([save])
    with pytest.warns(ft.FastTrainWarning, match="this checkpoint was saved without ExactResume"):
        module, *_ = run([ExactResume()], save.files[2], seed=4)
    assert len(module.seen) == 6


def test_batches_that_are_left_out_after_a_stop_within_an_epoch_give_a_warning(tmp_path, recwarn):
    settings = {"seed": 3, "max_epochs": -1}
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    _, trainer, _ = run([ExactResume(), every], max_steps=3, **settings)
    stopped, ended = tmp_path / "stopped.ckpt", tmp_path / "ended.ckpt"
    trainer.save_checkpoint(stopped)
    run([ExactResume()], ckpt=stopped, max_steps=3, **settings)  # trains nothing more
    whole, trainer, _ = run([ExactResume()], max_steps=4, **settings)
    trainer.save_checkpoint(ended)
    run([ExactResume()], ckpt=ended, max_steps=6, **settings)
    resumed, _, _ = run([ExactResume()], ckpt=tmp_path / "step=3.ckpt", max_steps=4, **settings)
    assert torch.equal(resumed.seen[-1], whole.seen[-1])
    assert not [w for w in recwarn if "leaves out" in str(w.message)]
    with pytest.warns(ft.FastTrainWarning, match="stopped after 3 batches of an epoch.*leaves out the other batches"):
        resumed, _, _ = run([ExactResume()], ckpt=stopped, max_steps=4, **settings)
    assert not torch.equal(resumed.seen[-1], whole.seen[-1])


def test_an_iterator_as_a_loader_gives_a_warning(tmp_path):
    with pytest.warns(ft.FastTrainWarning, match="generator as a training loader: an iterator cannot be read again"):
        run([ExactResume()], loader=lambda: (torch.rand(2, 4) for _ in range(4)), max_epochs=1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"loader": lambda: DataLoader(Rows(6), 2, shuffle=True)},
            "samples in the training data = 8, this run has .* = 6",
        ),
        ({"loader": lambda: DataLoader(Rows(), 4, shuffle=True)}, "batch size = 2, this run has .* = 4"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches = 1, this run has .* = 2"),
        ({"net": SGD}, r"optimizers = \['AdamW'\], this run has .* = \['SGD'\]"),
        ({"loader": lambda: DataLoader(Rows(), 2)}, "shuffle = True, this run has .* = False"),
        (
            {"loader": lambda: DataLoader(Rows(), 2, sampler=SubsetRandomSampler(range(8)))},
            "shuffle = True, this run has .* = SubsetRandomSampler",
        ),
        ({"loader": lambda: shuffled(drop_last=True)}, "drop_last = False, this run has .* = True"),
        ({"loader": lambda: DataLoader(OtherRows(), 2, shuffle=True)}, "training data = .*Rows, this run has .*OtherR"),
        ({"gradient_clip_val": 0.1}, "gradient_clip_val = none, this run has .* = 0.1"),
        ({"precision": "bf16-true"}, "precision = 32-true, this run has .* = bf16-true"),
        ({"processes": 2}, "processes = 2, this run has .* = 1: positions .* do not fit"),
        ({"net": net_with(lr=0.02)}, "AdamW.lr = 0.01, this run has .* = 0.02: .* the resumed run would use 0.01"),
        ({"net": net_with(patience=1)}, "ReduceLROnPlateau.patience = 0, this run has .* = 1: the saved state"),
        (
            {"net": net_with(schedules=2)},
            "schedules = .*, this run has .* = .*: the checkpoint has no state of the add",
        ),
        ({"net": net_with(schedules=0)}, "schedules = .*, this run has .* = .*: the state of the saved schedule would"),
    ],
)
@pytest.mark.filterwarnings("ignore:the last batch before the saved position differs")
def test_a_run_with_different_settings_is_refused(other, message, plain_run, tmp_path):
    path, other = plain_run[2][2], dict(other)
    if (processes := other.pop("processes", None)) is not None:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint[KEY]["settings"]["processes"] = processes
        checkpoint[KEY]["ranks"] *= processes
        path = tmp_path / path.name
        torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=message):
        run([ExactResume()], path, **other)
    if other.get("net") is SGD:  # its state cannot be restored
        with pytest.raises(ValueError, match=f"{message}: the optimizer state cannot be converted"):
            run([ExactResume(strict=False)], path, **other)
    elif "precision" not in other:
        with pytest.warns(ft.FastTrainWarning, match=message):
            run([ExactResume(strict=False)], path, **other)


@pytest.mark.parametrize("net", [net_with(split=2), net_with(width=6)], ids=["groups", "width"])
def test_what_cannot_be_restored_is_refused_without_strictness_too(net, plain_run):
    message = (
        r"parameters per group = \[\[4\]\], this run has .* = \[\[2, 2\]\]: the optimizer state cannot be converted"
    )
    if net().net[0].weight.shape[0] == 6:
        message = r"another model: its weights do not fit this one \(size mismatch for net.0.weight: .*"
    for strict in (True, False):
        with pytest.raises(ValueError, match=message):
            run([ExactResume(strict=strict)], plain_run[2][2], net=net)


def test_a_changed_learning_rate_has_the_effect_that_is_announced(plain_run, tmp_path):
    save = SaveEverywhere(tmp_path)
    with pytest.warns(ft.FastTrainWarning, match="would use 0.01"):
        *_, end = run([ExactResume(strict=False), save], plain_run[2][2], net=net_with(lr=0.02))
    settings = end[KEY]["settings"].pop("restored")
    assert settings["AdamW.lr"] == 0.01
    assert differences(end["optimizer_states"], plain_run[1]["optimizer_states"]) == []


@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set')
def test_last_without_a_last_checkpoint_is_an_error(tmp_path):
    where = {"default_root_dir": tmp_path, "max_epochs": 1}
    with pytest.raises(FileNotFoundError, match=r"ckpt_path='last': there is no .*newest_checkpoint\(folder\)"):
        run([ExactResume()], "last", **where)
    with pytest.warns(ft.FastTrainWarning, match="ckpt_path='last': there is no last checkpoint"):
        run([ExactResume(strict=False)], "last", **where)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    run([ExactResume(), keeper], ft.newest_checkpoint(tmp_path), **where)
    assert run([ExactResume(), keeper], "last", **{**where, "max_epochs": 2})[1].current_epoch == 2


class Held(Rows):
    """Augmented like its base class, with distinguishable contents."""

    def __init__(self, numbers, cache=None):
        super().__init__()
        self.numbers, self.cache = numbers, [] if cache is None else cache

    def __getitem__(self, i):
        self.cache.append(i)  # does not make it different data
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (lambda: Held(torch.arange(8.0)), lambda: Held(torch.arange(8.0) + 1), "training data.numbers"),
        (lambda: Held(np.arange(8.0)), lambda: Held(np.arange(8.0) + 1), "training data.numbers"),
        (lambda: Held(["/a/x.png", "/a/y.png"]), lambda: Held(["/b/x.png", "/b/z.png"]), "training data.numbers"),
        (lambda: Subset(Rows(), range(8)), lambda: Subset(Rows(9), range(1, 9)), "training data.indices"),
    ],
)
def test_different_data_of_the_same_length_is_detected(then, now, told, tmp_path):
    save = SaveEverywhere(tmp_path)
    run([ExactResume(), save], loader=lambda: DataLoader(then(), 2), max_epochs=1)
    run([ExactResume()], save.files[2], loader=lambda: DataLoader(then(), 2), max_epochs=1)
    with pytest.raises(ValueError, match=f"saved with {told} = "):
        run([ExactResume()], save.files[2], loader=lambda: DataLoader(now(), 2), max_epochs=1)


def test_files_moved_to_another_folder_count_as_the_same_data(tmp_path):
    save = SaveEverywhere(tmp_path)
    for folder, ckpt in (("/a", None), ("/b", 2)):
        paths = [f"{folder}/{i}.png" for i in range(8)]
        path = None if ckpt is None else save.files[ckpt]
        callbacks = [ExactResume(), save] if ckpt is None else [ExactResume()]
        run(callbacks, path, loader=lambda paths=paths: DataLoader(Held(paths), 2), max_epochs=1)


def test_different_hyper_parameters_are_named(tmp_path):
    class Set(Net):
        def __init__(self, dropout, width=8):
            super().__init__()
            self.save_hyperparameters()

    save = SaveEverywhere(tmp_path)
    run([ExactResume(), save], net=lambda: Set(0.1), max_epochs=1)
    with pytest.warns(
        ft.FastTrainWarning, match="different hyper-parameters .*: dropout = 0.1 in the checkpoint, 0.2 in"
    ):
        run([ExactResume()], save.files[2], net=lambda: Set(0.2), max_epochs=1)


def at_layer(**settings):
    return [ft.LoRA(rank=2, targets="net.0", **settings)]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            lambda: at_layer(alpha=32.0),
            lambda: at_layer(alpha=8),
            "LoRA with alpha = 32 in .*, 8 in this run",
        ),
        (lambda: [ft.optim.AdaptiveClipping(0.1)], list, "AdaptiveClipping in the checkpoint only"),
        (list, lambda: [ft.optim.AdaptiveClipping(0.1)], "AdaptiveClipping in this run only"),
        (
            lambda: [ft.TokenWeightedAccumulation(2, count=len)],
            lambda: [ft.TokenWeightedAccumulation(4, count=len)],
            "TokenWeightedAccumulation with factor = 2 in the checkpoint, 4 in this run",
        ),
        (
            lambda: [ft.OptimizerInBackward()],
            lambda: [ft.OptimizerInBackward(clip_norm=1.0)],
            "clip_norm = None in",
        ),
    ],
)
def test_different_techniques_are_refused_by_name(then, now, message, tmp_path):
    save = SaveEverywhere(tmp_path)
    run([*then(), ExactResume(), save], max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ft.FastTrainWarning)
        run([*then(), ExactResume()], save.files[2], max_epochs=1)
    with pytest.raises(ValueError, match=f"{message}.*: so the resumed run would differ"):
        run([*now(), ExactResume()], save.files[2], max_epochs=1)
    # LoRA itself warns of another alpha, too.
    with warnings.catch_warnings(action="ignore"), pytest.warns(ft.FastTrainWarning, match=message):
        run([*now(), ExactResume(strict=False)], save.files[2], max_epochs=1)


def test_another_rank_of_lora_is_named_before_the_weights_are_loaded(tmp_path):
    save = SaveEverywhere(tmp_path)
    run([*at_layer(), ExactResume(), save], max_epochs=1)
    other = ft.LoRA(rank=3, targets="net.0")
    with pytest.raises(ValueError, match=r"LoRA with rank = 2 in the checkpoint, 3 in this run"):
        run([copy.deepcopy(other), ExactResume()], save.files[2], max_epochs=1)
    with pytest.raises(ValueError, match=r"adapter 'net.default' has r=2, and this run's has r=3"):
        run([copy.deepcopy(other), ExactResume(strict=False)], save.files[2], max_epochs=1)
    with pytest.raises(ValueError, match="LoRA in the checkpoint only"):
        run([ExactResume()], save.files[2], max_epochs=1)


def test_techniques_that_change_only_rounding_give_a_warning(tmp_path, recwarn):
    save = SaveEverywhere(tmp_path)
    parts = {"count": len, "check": False}
    run([ft.MicroBatching(2, **parts), ExactResume(), save], max_epochs=1)
    recwarn.clear()
    run([ft.MicroBatching(2, "samples", check=False), ft.StepMeter(), ExactResume()], save.files[2], max_epochs=1)
    assert "MicroBatching with count" in str(recwarn.pop(ft.FastTrainWarning).message)
    recwarn.clear()
    run([ft.MicroBatching(n=2, **parts), ft.StepMeter(), ExactResume()], save.files[2], max_epochs=1)
    assert not [one for one in recwarn if "techniques" in str(one.message)]
    with pytest.warns(ft.FastTrainWarning, match="MicroBatching in the checkpoint only.*may not resume bit for bit"):
        run([ExactResume()], save.files[2], max_epochs=1)


def test_checkpoints_load_without_unpickling_objects(run_with_windows):
    state = torch.load(run_with_windows[1][2], weights_only=True)[KEY]
    assert [rank.dtype for rank in state["ranks"]] == [torch.uint8]
    assert state["gradients"][0].keys() == dict(Net().named_parameters()).keys()


def test_can_be_copied_and_pickled():
    for callback in (copy.deepcopy(ExactResume(strict=False)), pickle.loads(pickle.dumps(ExactResume(strict=False)))):
        assert not callback.strict
        run([callback], max_epochs=1)


def test_sampling_with_replacement_and_a_second_fit(tmp_path):
    def loader():
        return DataLoader(Rows(), 2, sampler=RandomSampler(Rows(), replacement=True, num_samples=70))

    callback, save = ExactResume(), SaveEverywhere(tmp_path)
    *_, whole = run([callback, save], loader=loader, limit_train_batches=4)
    *_, again = run([callback], loader=loader, limit_train_batches=4)
    assert not differences(whole["state_dict"], again["state_dict"])
    *_, end = run([callback], save.files[5], loader=loader, limit_train_batches=4, seed=4)
    assert not differences(whole, end)


def test_the_same_trainer_twice(plain_run):
    _, whole, files = plain_run
    last = files[6]  # after the last batch of an epoch, before validation
    module, trainer, _ = run([ExactResume()], max_epochs=2)
    trainer.fit(module, shuffled(), DataLoader(Rows(4), batch_size=2), ckpt_path=last, weights_only=True)
    assert not differences(whole, opened(trainer._checkpoint_connector.dump_checkpoint()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_resumes_exactly_with_the_prefetcher(tmp_path):
    settings = {"accelerator": "gpu", "devices": 1, "accumulate_grad_batches": 3, "net": SGD}
    settings["loader"] = lambda: shuffled(pin_memory=True)
    settings["val"] = lambda: DataLoader(Rows(4), batch_size=2, pin_memory=True)
    save = SaveEverywhere(tmp_path)
    *_, whole = run([ExactResume(), ft.DevicePrefetch(), save], **settings)
    for path in save.files[:12]:
        *_, end = run([ExactResume(), ft.DevicePrefetch()], path, seed=4, **settings)
        assert not differences(whole["state_dict"], end["state_dict"]), path.name


class ReadsTogether(L.LightningModule):
    """Remembers the samples of several loaders."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(())), []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, repr(batch)))
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_shuffled_loaders_that_are_read_together_resume_at_the_end_of_an_epoch(mode, count, tmp_path):
    """Passes draw their seeds when they begin, one after the other, and their orders with the first batches."""

    def read(epochs, seed, path=None):
        L.seed_everything(seed, verbose=False)
        # Each has its own length.
        loaders = [DataLoader(range(8 + 4 * place), 4, shuffle=True) for place in range(count)]
        saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        run = trainer([ExactResume(), saves], max_epochs=epochs, enable_checkpointing=True)
        module = ReadsTogether()
        run.fit(module, CombinedLoader(loaders, mode), ckpt_path=path, weights_only=True if path else None)
        return [batch for epoch, batch in module.seen if epoch > 0]

    whole = read(3, seed=1)
    assert len(whole) == len(set(whole))  # no epoch has the order of another
    assert read(3, seed=7, path=tmp_path / "epoch=0.ckpt") == whole
