"""AutoBatchSize: what it finds is what fits, on all ranks, and the run is the one without the search, bit for bit."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.planner.auto_batch_size import possible_parts, predict_parts
from tests.support.nets import ShallowLM, as_loader, heard, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_ranks

GIB = 2**30
BATCHES = lm_batches(5, size=12, length=40)
for one in BATCHES:
    one["labels"][:, -1] = 1  # no padding that could be cut off: micro-batches have equally many rows


def train(module, callbacks, **settings):
    """A run that draws random numbers in the loader and in the model; its weights, and its next random number."""
    torch.manual_seed(5)
    t = trainer(callbacks, **settings)
    t.fit(module, DataLoader(as_loader(BATCHES).dataset, batch_size=None, shuffle=True))
    return {**weights(module), "random": torch.rand(1)}, t


class Staged(ShallowLM):
    """Runs out of memory with more than ``rows`` samples, in one place of a step."""

    def __init__(self, rows=100, place="forward", **settings):
        super().__init__(dropout=0.2, **settings)
        self.rows, self.place, self.seen = rows, place, 0

    def training_step(self, batch, batch_idx):
        self.seen = len(batch["labels"])
        if self.place == "forward" and not isinstance(batch["labels"], FakeTensor):
            self.fail()
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        if self.place == "optimizer":
            self.fail()

    def fail(self):
        if self.seen > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")


@pytest.mark.parametrize("size", [1, 2, 7, 12, 100])
def test_the_fewest_parts_within_a_limit_are_found_with_few_questions(size):
    parts = possible_parts(size)
    assert sorted({-(-size // n) for n in parts}) == sorted({-(-size // n) for n in range(1, size + 1)})
    for limit in range(0, 1200, 7):
        asked = []

        def peak(n, asked=asked):
            asked.append(n)
            return 100 + 1000 * -(-size // n) / size

        fitting = [n for n in parts if peak(n) <= limit]
        asked.clear()
        assert predict_parts(peak, limit, parts) == (fitting[0] if fitting else parts[-1])
        assert len(asked) <= 1 + len(parts).bit_length()


@pytest.mark.parametrize("beside", [(), (ft.ExactResume,)])
def test_where_all_fits_nothing_is_changed(beside):
    """The loader draws its order: with ExactResume by a state of its own."""
    auto = ft.AutoBatchSize(memory_gib=1)
    expected, plain = train(ShallowLM(dropout=0.2), [make() for make in beside])
    found, t = train(ShallowLM(dropout=0.2), [auto, *(make() for make in beside)])
    assert auto.parts == 1
    assert largest_difference(expected, found) == 0
    assert [type(callback) for callback in t.callbacks] == [ft.AutoBatchSize, *map(type, plain.callbacks)]


@functools.cache
def peak_in(parts):
    """What PeakMemory measures in a run of so many parts, which is also what MemoryMeter says."""
    meter = ft.MemoryMeter()
    train(ShallowLM(dropout=0.2), [ft.MicroBatching(parts), meter])
    return meter.peak_bytes


def test_the_fewest_parts_within_the_limit_are_used_and_the_run_is_that_of_the_number():
    peaks = {parts: peak_in(parts) for parts in (2, 3, 4)}
    auto = ft.AutoBatchSize(memory_gib=(peaks[2] + peaks[3]) / 2 / GIB)
    with heard() as said:
        found, _ = train(ShallowLM(dropout=0.2), [auto])
    expected, _ = train(ShallowLM(dropout=0.2), [ft.MicroBatching(3)])
    assert auto.parts == 3
    assert auto.measured_bytes == pytest.approx(peaks[3], rel=0.1)  # with the random states, to try again
    assert auto.predicted_bytes == pytest.approx(peaks[3], rel=0.1)
    assert largest_difference(expected, found) == 0
    assert any(line.startswith("AutoBatchSize: batches run in 3 parts of 4 samples; a step took") for line in said)


def test_what_grows_is_tried_as_it_will_be():
    peaks = {parts: peak_in(parts) for parts in (2, 3)}
    growing = [ft.loaders.SequenceLengthWarmup(2, 40, over=4), ft.loaders.BatchSizeWarmup(2, over=3)]
    auto = ft.AutoBatchSize(memory_gib=(peaks[2] + peaks[3]) / 2 / GIB)
    train(ShallowLM(dropout=0.2), [auto, *growing])
    assert auto.parts == 3
    assert auto.measured_bytes > peaks[3] * 0.95


class Hoards(L.Callback):
    """Keeps a copy of the weights' size in memory, as an average of weights does: no prediction knows of it."""

    def on_train_start(self, trainer, pl_module):
        self.held = torch.zeros(500_000)

    def on_after_backward(self, trainer, pl_module):
        self.held = self.held + 1


def test_steps_that_are_tried_have_the_runs_own_callbacks():
    auto = ft.AutoBatchSize(memory_gib=(peak_in(1) + 1_000_000) / GIB)
    with heard() as said, pytest.raises(ValueError, match="one sample at a time takes"):
        train(ShallowLM(dropout=0.2), [auto, Hoards()])
    assert said[0] == "AutoBatchSize: batches in 1 part do not fit"
    plain = ft.AutoBatchSize(memory_gib=auto.memory_gib)
    train(ShallowLM(dropout=0.2), [plain])
    assert plain.parts == 1


@pytest.mark.parametrize("place", ["forward", "optimizer"])
def test_what_does_not_fit_though_it_should_is_tried_in_more_parts(place):
    auto = ft.AutoBatchSize(memory_gib=1)
    found, _ = train(Staged(4, place), [auto, ft.ActivationCheckpointing()], accumulate_grad_batches=2)
    expected, _ = train(
        ShallowLM(dropout=0.2), [ft.MicroBatching(3), ft.ActivationCheckpointing()], accumulate_grad_batches=2
    )
    assert auto.parts == 3
    assert largest_difference(expected, found) == 0


def test_single_samples_that_do_not_fit_end_the_run_and_leave_the_trainer_as_it_was():
    auto = ft.AutoBatchSize(memory_gib=1)
    t = trainer([auto])
    with pytest.raises(torch.OutOfMemoryError):
        t.fit(Staged(0), as_loader(BATCHES))
    assert t.callbacks[0] is auto
    assert not any(isinstance(callback, ft.MicroBatching) for callback in t.callbacks)


def test_a_step_that_cannot_be_predicted_is_only_tried():
    class Asks(Staged):
        def training_step(self, batch, batch_idx):
            assert batch["labels"].unique().numel() > 1  # a shape that depends on values
            return super().training_step(batch, batch_idx)

    auto = ft.AutoBatchSize(memory_gib=1)
    with heard() as said:
        train(Asks(6), [auto])
    assert (auto.parts, auto.predicted_bytes) == (2, None)
    assert "since a step cannot be predicted" in said[0]


def test_loggers_hear_nothing_of_it(tmp_path):
    class Listens(CSVLogger):
        steps = []

        def log_metrics(self, metrics, step=None):
            self.steps.append(step)

    _, t = train(Staged(4), [ft.AutoBatchSize(memory_gib=1)], logger=Listens(tmp_path), log_every_n_steps=1)
    assert t.logger.steps == [0, 1, 2, 3, 4, 4]  # the last is that of the epoch


def test_a_resumed_run_goes_on_with_what_was_found(tmp_path):
    first, second = ft.AutoBatchSize(memory_gib=1), ft.AutoBatchSize(memory_gib=1)
    _, t = train(Staged(4), [first])
    t.save_checkpoint(tmp_path / "a.ckpt")
    with heard() as said:
        resumed = trainer([second], max_epochs=2)
        resumed.fit(Staged(4), as_loader(BATCHES), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert (second.parts, resumed.global_step) == (3, 10)
    assert not any(line.startswith("AutoBatchSize") for line in said)


@pytest.mark.parametrize("first", ["auto", "rehearsal"])
def test_a_rehearsal_beside_it_runs_in_the_parts_that_were_found(tmp_path, first):
    auto, rehearsal = ft.AutoBatchSize(memory_gib=1), ft.proof.Rehearsal(seconds=1)
    callbacks = [auto, rehearsal] if first == "auto" else [rehearsal, auto]
    found, _ = train(Staged(4), callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    expected, _ = train(ShallowLM(dropout=0.2), [ft.MicroBatching(3)])
    assert rehearsal.report.resumed_exactly
    assert auto.parts == 3
    assert largest_difference(expected, found) == 0


@pytest.mark.parametrize(
    ("callbacks", "settings", "says"),
    [
        (lambda auto: [auto, ft.MicroBatching(2)], {}, "both choose the number of parts"),
        (lambda auto: [auto, ft.Auto()], {}, "both choose the number of parts"),
        (lambda auto: [ft.ActivationCheckpointing(), auto], {}, "List AutoBatchSize first"),
        (lambda auto: [auto], {"strategy": ft.FSDP2Strategy()}, "Give a number, such as MicroBatching"),
    ],
)
def test_what_it_cannot_be_used_with_is_refused(callbacks, settings, says):
    with pytest.raises(ValueError, match=says):
        train(ShallowLM(), callbacks(ft.AutoBatchSize(memory_gib=1)), **settings)


@pytest.mark.parametrize("arguments", [{"memory_gib": 0}, {"memory_gib": "all"}, {"steps": 1}])
def test_bad_arguments_are_refused_at_once(arguments):
    with pytest.raises(ValueError, match="Use|Leave it out"):
        ft.AutoBatchSize(**arguments)


RANKS = """
import os
import torch
import lightning_fasttrain as ft
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.planner.test_auto_batch_size import Staged

rank = int(os.environ["RANK"])
mine = lm_batches(3, size=(6, 4)[rank], seed=rank)

def run(module, callback):
    torch.manual_seed(rank)
    t = trainer([callback], devices=2, strategy="ddp")
    t.fit(module, as_loader(mine))
    return {**weights(module), "random": torch.rand(1)}

auto = ft.AutoBatchSize(memory_gib=1)
found = run(Staged(2 if rank == 1 else 100), auto)
assert auto.parts == 2, auto.parts
expected = run(ShallowLM(dropout=0.2), ft.MicroBatching(2))
assert largest_difference(expected, found) == 0
"""


def test_the_rank_with_the_least_room_decides_for_both(tmp_path):
    """Rank 1 has room for 2 of its 4 samples, and rank 0 for all of its 6: both run in 2 parts."""
    script = tmp_path / "program.py"
    script.write_text(RANKS)
    run_ranks(str(script), log=tmp_path / "program.log", timeout_s=90)


@pytest.mark.gpu
def test_on_a_gpu_the_largest_part_that_fits_beside_what_is_taken():
    taken = torch.empty(int(0.9 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    rows = max(8, int(free / (4 * 512 * 17 * 8)))  # whose logits alone take more than is free
    batches = lm_batches(2, size=rows, length=512)
    auto, net = ft.AutoBatchSize(), ShallowLM()
    trainer([auto], accelerator="gpu", devices=1).fit(net, as_loader(batches))
    assert auto.parts > 1
    assert auto.measured_bytes - taken.nbytes < free


def test_cuda_graphs_are_refused_on_a_cpu():
    with pytest.raises(ValueError, match="cuda_graph=True on cpu: only a CUDA device replays graphs"):
        train(ShallowLM(), [ft.AutoBatchSize(memory_gib=1, cuda_graph=True)])
