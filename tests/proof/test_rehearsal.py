"""A rehearsal has no side effects, and finds errors in the first minute that would appear hours later."""

import copy
import itertools
import shutil
from collections import namedtuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint import AtomicCheckpointIO
from lightning_fasttrain.core.messages import format_bytes
from lightning_fasttrain.core.state.rng import random_state
from lightning_fasttrain.proof import RehearsalError
from tests.support.nets import ShallowLM, as_loader, lm_batches, trainer, weights

BATCHES = lm_batches(5)
GIB = 2**30


def rehearse(tmp_path, callbacks=(), module=None, batches=BATCHES, saves=True, validation=BATCHES[:1], **settings):
    """Fit with a rehearsal; return the report, the module and the Trainer."""
    rehearsal = settings.pop("rehearsal", None) or ft.proof.Rehearsal(seconds=5)
    writers = [ModelCheckpoint(tmp_path / "checkpoints")] if saves else []
    t = trainer([*callbacks, rehearsal, *writers], default_root_dir=tmp_path, enable_checkpointing=None, **settings)
    module = module or ShallowLM()
    loaders = as_loader(batches), None if validation is None else as_loader(validation)
    t.fit(module, *loaders)
    return rehearsal.report, module, t


def refused(tmp_path, words, *args, **settings):
    """Check that the rehearsal raises one error with these words, and leaves no file."""
    with pytest.raises(RehearsalError, match=words):
        rehearse(tmp_path, *args, **settings)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Runs that succeed


def test_a_step_that_cannot_be_predicted_does_not_fail(tmp_path):
    class Reads(ShallowLM):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            torch.bincount(batch["input_ids"].flatten())  # as long as the largest value
            return loss

    report, _, _ = rehearse(tmp_path, [ft.MicroBatching(2)], Reads())
    assert report.resumed_exactly
    assert report.predicted_bytes is None
    assert any(note.startswith("step: its memory could not be predicted: ") for note in report.notes)


def test_reports_five_lines_and_does_not_change_the_run(tmp_path, caplog):
    numbers = {}

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.log("rows", float(len(batch["labels"])))  # by a method that Lightning assigns to it
            numbers.setdefault(self, []).append((repr(random_state()), pl_module.losses[:], batch["input_ids"].sum()))

    caplog.set_level("INFO", logger="lightning_fasttrain")
    runs = []
    for rehearsal in ([], [ft.proof.Rehearsal(seconds=5)]):
        torch.manual_seed(11)
        watch, net = Watch(), ShallowLM(dropout=0.2)
        t = trainer([ft.MicroBatching(2), *rehearsal, watch], default_root_dir=tmp_path, accumulate_grad_batches=2)
        order = torch.Generator().manual_seed(5)
        t.fit(net, DataLoader(BATCHES, batch_size=None, shuffle=True, generator=order), as_loader(BATCHES[:1]))
        runs.append((watch, net, t))
    (plain, net, _), (watched, rehearsed, t) = runs
    assert [entry[0] for entry in numbers[plain]] == [entry[0] for entry in numbers[watched]]
    assert [int(entry[2]) for entry in numbers[plain]] == [int(entry[2]) for entry in numbers[watched]]
    assert all(torch.equal(value, weights(net)[name]) for name, value in weights(rehearsed).items())
    assert len(net.losses) == len(rehearsed.losses)
    assert list(tmp_path.rglob("*")) == []
    report = rehearsal[0].report
    assert list(report.lines) == ["verify", "step", "checkpoint", "resume", "largest batch"]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rehearsal, ")]
    assert len(said) == 5
    assert report.verified
    assert report.resumed_exactly
    assert "of 2 batches" in report.lines["step"]
    assert f" s and {format_bytes(report.predicted_bytes)} (predicted) (" in report.lines["step"]
    assert "a short window, a batch of validation, the end of an epoch succeeded" in report.lines["step"]
    assert report.as_dict()["checkpoint_bytes"] > 1000


def test_runs_first_and_only_once_whatever_its_position(tmp_path):
    first, last = ft.proof.Rehearsal(), ft.proof.Rehearsal()
    for callbacks in ([first, ft.FusedLossHead(head="head")], [ft.FusedLossHead(head="head"), last]):
        rehearse(tmp_path, callbacks[:-1], rehearsal=callbacks[-1] if callbacks[-1] is last else None, saves=False)
    assert last.report.verified
    before = last.report
    trainer([last]).fit(ShallowLM(), as_loader(BATCHES))
    assert last.report is before


def test_works_with_the_mixin_a_datamodule_and_exact_resume(tmp_path):
    class Net(ft.FastTrainMixin, ShallowLM):
        techniques = [ft.ActivationCheckpointing(), ft.ExactResume(), ft.AtomicCheckpoints()]

        prepared = []

        def prepare_data(self):
            self.prepared.append(1)

        def setup(self, stage):
            assert self.trainer.datamodule.rows == 6

    class Data(L.LightningDataModule):
        rows, set_up = 6, 0

        def setup(self, stage):
            self.set_up += 1

        def train_dataloader(self):
            return as_loader(BATCHES)

        def val_dataloader(self):
            return [as_loader(BATCHES[:2]), as_loader(BATCHES[2:])]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {"input_ids": batch["input_ids"], "labels": batch["labels"]}

    class Net2(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))

    data, rehearsal = Data(), ft.proof.Rehearsal(seconds=5)
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer([rehearsal, checkpoints], default_root_dir=tmp_path, enable_checkpointing=True).fit(
        Net2(dropout=0.1), datamodule=data
    )
    assert data.set_up == len(Net.prepared) == 1
    assert rehearsal.report.resumed_exactly
    assert "this run lacks" not in rehearsal.report.lines["resume"]
    assert "all, at most 3 are kept" in rehearsal.report.lines["checkpoint"]
    assert rehearsal.report.kept == 3 >= len(list(tmp_path.glob("*.ckpt")))
    assert not list(tmp_path.glob(".*"))


def test_works_with_weights_only_and_without_validation(tmp_path):
    writer = ModelCheckpoint(tmp_path, save_weights_only=True)
    report, *_ = rehearse(tmp_path, [writer], saves=False, validation=None)
    assert "cannot resume from weights only" in report.lines["resume"]
    assert "validation" not in report.lines["step"]
    assert report.resumed_exactly is None


def test_callbacks_that_cannot_be_copied_are_left_out_with_a_note(tmp_path):
    class Holder(L.Callback):
        def __init__(self):
            self.lines = (line for line in "ab")

    report, *_ = rehearse(tmp_path, [Holder(), L.pytorch.callbacks.LambdaCallback()], saves=False)
    assert ["Holder" in note or "LambdaCallback" in note for note in report.notes] == [True, True]


def test_strategies_that_cannot_be_copied_are_reported(tmp_path):
    report, *_ = rehearse(tmp_path, strategy=ft.FSDP2Strategy())
    assert report.lines["step"].startswith("not rehearsed: a copy cannot be run beside FSDP2Strategy")


def longer(rows=3):
    return {key: torch.cat([value] * rows) for key, value in BATCHES[0].items()}


def test_the_largest_batch_is_found_and_run(tmp_path):
    report, *_ = rehearse(tmp_path, batches=[*BATCHES, longer(), BATCHES[0]], saves=False)
    assert report.batches_seen == 7
    assert report.lines["largest batch"] == "18 × 5, the largest of 7 (the first: 6 × 5), succeeded"


# Runs that would fail, or train differently, hours later


def test_a_technique_that_breaks_its_promise_is_refused(tmp_path):
    class Bends(ft.Technique):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                parameter.grad.mul_(1.01)

    refused(
        tmp_path,
        r"verify with Bends\(\) on the first batch: different training",
        [Bends(), ft.EagerGradientRelease()],
    )


class LoadsAnother(AtomicCheckpointIO):
    """A checkpoint plugin that loads another file of the run than requested."""

    def load_checkpoint(self, path, *args, **kwargs):
        others = [other for other in path.parent.glob("*.ckpt") if other != path]
        return super().load_checkpoint(others[0], *args, **kwargs)


class Damages(AtomicCheckpointIO):
    def load_checkpoint(self, path, *args, **kwargs):
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        checkpoint["state_dict"]["head.weight"][0, 0] += 1e-6
        return checkpoint


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (LoadsAnother, "differs in global step, .*: global step was 1 and is 2"),
        (Damages, "differs in weight embed.weight: weight embed.weight is off by .*e-06 in 1 of its 136 values"),
    ],
)
def test_a_checkpoint_plugin_that_loads_different_content_is_refused(tmp_path, plugin, words):
    refused(tmp_path, words, plugins=[plugin()])


def test_weights_that_are_loaded_differently_are_refused(tmp_path):
    writer = ModelCheckpoint(tmp_path, save_weights_only=True)
    refused(tmp_path, "saved and loaded, but differ in weight", [writer], saves=False, plugins=[Damages()])


class Stops(L.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_run_that_a_callback_stops_at_once_is_refused(tmp_path):
    refused(tmp_path, "ended after .*, before its second epoch: .* trainer.should_stop", [Stops()])


class Warmup(L.Callback):
    """Counts steps, and loses the count when the run is killed."""

    def __init__(self, keeps):
        self.keeps, self.steps = keeps, 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * self.steps

    def state_dict(self):
        return {"steps": self.steps} if self.keeps else {}

    def load_state_dict(self, state):
        self.steps = state.get("steps", 0)


def test_unsaved_callback_state_is_found(tmp_path):
    words = r"differs from .*not in the checkpoint, perhaps .*Warmup.steps \(1 before, 0 after the load\)"
    refused(tmp_path, words, [Warmup(keeps=False)])
    assert rehearse(tmp_path, [Warmup(keeps=True)])[0].resumed_exactly


class Scales(L.Callback):
    """Changes gradients minimally: by its counter, or by a value that differs in each run."""

    def __init__(self, counts):
        self.counts, self.steps = counts, 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        by = self.steps if self.counts else 1 + next(COUNTER)
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1 + 3e-7 * by)


COUNTER = itertools.count()


def test_any_difference_counts_if_steps_are_deterministic(tmp_path):
    refused(tmp_path, "perhaps .*Scales.steps", [Scales(counts=True)])


def test_rounding_is_allowed_if_steps_are_not_deterministic(tmp_path):
    report, *_ = rehearse(tmp_path, [Scales(counts=False)])
    assert report.resumed_exactly is False
    assert "up to the difference of two equal steps" in report.lines["resume"]


def test_an_unsaved_buffer_is_found(tmp_path):
    class Scaled(ShallowLM):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def training_step(self, batch, batch_idx):
            self.scale.mul_(0.9)
            return self.scale * super().training_step(batch, batch_idx)

    refused(tmp_path, "buffer scale, which is not persistent", module=Scaled())


def test_an_error_in_validation_is_reported(tmp_path):
    class Broken(ShallowLM):
        def validation_step(self, batch, batch_idx):
            raise KeyError("labls")

    refused(tmp_path, "rehearsing validation: KeyError: 'labls'", module=Broken(), num_sanity_val_steps=0)


def test_a_non_finite_loss_is_refused(tmp_path):
    class Overflows(ShallowLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if self.trainer.global_step > 0 else 1.0)

    refused(tmp_path, "the loss is inf in step 2", module=Overflows())


def test_a_monitor_that_is_never_logged_is_refused(tmp_path):
    writer = ModelCheckpoint(tmp_path, monitor="val_acc")
    words = r"ModelCheckpoint\(monitor='val_acc'\): no value of that name is logged, only loss, loss_epoch, .*val_loss"
    refused(tmp_path, words, [writer], saves=False)
    refused(tmp_path, "val_acc", [EarlyStopping("val_acc")], saves=False)


def test_out_of_memory_in_the_largest_batch_is_reported(tmp_path):
    class Small(ShallowLM):
        def training_step(self, batch, batch_idx):
            if len(batch["labels"]) > 6:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().training_step(batch, batch_idx)

    words = r"the largest batch \(18 × 5, the largest of 7 .*: out of memory: CUDA .*MicroBatching\(\"auto\"\)"
    refused(tmp_path, words, module=Small(), batches=[*BATCHES, longer(), BATCHES[0]])


Usage = namedtuple("Usage", "total used free")


def test_too_little_disk_space_for_all_kept_checkpoints_is_refused(tmp_path, monkeypatch):
    writer = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=4)
    report, *_ = rehearse(tmp_path, [writer], saves=False, max_epochs=9)
    assert report.kept == 4
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    free = int(3.5 * report.checkpoint_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    words = r"0.00 GiB are missing: a checkpoint takes .* will keep 4 of them and write one more. .*save_top_k=2"
    refused(tmp_path, words, [copy.copy(writer)], saves=False, max_epochs=9)


def test_an_unwritable_checkpoint_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    writer = ModelCheckpoint(tmp_path / "file" / "checkpoints")
    with pytest.raises(RehearsalError, match="checkpoints cannot be written to .*Not a directory"):
        rehearse(tmp_path, [writer], saves=False)


def test_a_loader_that_can_be_read_only_once_is_refused(tmp_path):
    with pytest.raises(RehearsalError, match="the loader is a list_iterator: the run could not read"):
        trainer([ft.proof.Rehearsal()]).fit(ShallowLM(), iter(BATCHES))


def test_a_negative_time_is_refused():
    with pytest.raises(ValueError, match="seconds=-1"):
        ft.proof.Rehearsal(seconds=-1)


@pytest.mark.gpu
def test_gpu_the_run_is_parked_in_host_memory(tmp_path):
    class Large(ShallowLM):
        def __init__(self):
            super().__init__()
            self.ballast = torch.nn.Linear(4096, 8192)  # 128 MiB

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0.0 * self.ballast.weight.sum()

        def on_train_batch_start(self, batch, batch_idx):
            assert self.ballast.weight.is_cuda
            self.peak = torch.cuda.max_memory_allocated()

    torch.cuda.reset_peak_memory_stats()
    report, module, _ = rehearse(tmp_path, module=Large(), accelerator="gpu", devices=1)
    assert report.resumed_exactly is not None
    assert module.peak < 128 * 2**20 * 6  # weight, gradient, two moments, temporaries of an Adam step; no second weight
