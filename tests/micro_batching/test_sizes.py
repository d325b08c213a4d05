"""Batch size and sequence length warmup: exact counts, schedules, resuming, and two processes."""

import math
from dataclasses import dataclass, field

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_fasttrain as ft
from lightning_fasttrain.loaders import (
    BatchSizeWarmup,
    Growth,
    SequenceLengthWarmup,
    cut_sequences,
    grow_sequences,
    grow_windows,
    scale_rates_,
)
from tests.support.nets import TinyLM, as_loader, fit, heard, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_ranks

RAGGED = [*lm_batches(4, size=6), *lm_batches(4, size=3, seed=4), *lm_batches(4, size=5, seed=5)]  # rows of a batch
ROWS = [len(batch["labels"]) for batch in RAGGED]


@pytest.mark.parametrize(("start", "full", "grid", "over"), [(1, 8, 1, 100), (16, 100, 8, 1000), (3, 3, 1, 10)])
def test_all_sizes_below_the_full_one_last_equally_long(start, full, grid, over):
    growth = Growth(start, full, over, grid)
    sizes = [growth.size_at(done) for done in range(2 * over)]
    below = list(range(start, full, grid))
    for number, size in enumerate(below):
        first, last = (math.ceil(over * share / len(below)) for share in (number, number + 1))
        assert set(sizes[first:last]) == {size}
    assert set(sizes[over:]) == {full}


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Growth(4, 2, 10), ValueError, "the size must grow"),
        (lambda: Growth(0, 2, 10), ValueError, "start=0"),
        (lambda: BatchSizeWarmup(2.5, 10), TypeError, "full=2.5"),
        (lambda: BatchSizeWarmup(8, "5%"), ValueError, "Give steps, samples or tokens"),
        (lambda: BatchSizeWarmup(8, "1ep"), ValueError, "Give steps, samples or tokens"),
        (lambda: BatchSizeWarmup(8, 10, rate="cubic"), ValueError, "Use one of 'linear', 'sqrt'"),
        (lambda: SequenceLengthWarmup(2, 8, 10, cut=3), TypeError, "expected a function or None"),
    ],
)
def test_invalid_growths_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


class Sizes(L.Callback):
    """Records the rows of each optimizer step and its learning rate."""

    def __init__(self):
        self.rows, self.rates, self.window = [], [], 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.window += len(batch["labels"])

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > len(self.rows):
            self.rows.append(self.window)
            self.window = 0


def by_samples(rows, full, over):
    """Compute the windows by a slow reference: the size depends on the rows seen before."""
    steps, seen, window = [], 0, []
    for row in rows:
        below = full - 1
        size = full if seen >= over else 1 + int(seen * below / over)
        window.append(row)
        if len(window) == size:
            steps.append(sum(window))
            seen += sum(window)
            window = []
    return [*steps, sum(window)] if window else steps


def test_batches_of_different_sizes_are_counted_exactly():
    warmup, seen = BatchSizeWarmup(full=4, over="30 samples"), Sizes()
    fit(TinyLM(), RAGGED, [warmup, seen])
    assert seen.rows == by_samples(ROWS, 4, 30)
    assert (warmup.growth.samples, warmup.growth.tokens) == (sum(ROWS), 5 * sum(ROWS))
    in_a_loop = [sum(len(b["labels"]) for b in window) for window in grow_windows(RAGGED, Growth(1, 4, "30 samples"))]
    assert in_a_loop == seen.rows


class Save(L.Callback):
    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchSizeWarmup(full=4, over="150 tok", rate="sqrt"),
        lambda: BatchSizeWarmup(full=3, over=5),
        lambda: SequenceLengthWarmup(2, 5, over="150 tok", grid=1),
        lambda: SequenceLengthWarmup(2, 5, over="50%", grid=1),
    ],
)
def test_a_run_resumed_during_growth_matches_the_uninterrupted_one(tmp_path, make, at):
    """The run is interrupted after 4 batches, within a window."""
    whole, resumed, first, second = TinyLM(), TinyLM(), make(), make()
    fit(whole, RAGGED, [first, ft.ExactResume(), Save(tmp_path / "half.ckpt", at)])
    torch.manual_seed(12)
    t = trainer([second, ft.ExactResume()])
    t.fit(resumed, as_loader(RAGGED), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0
    assert second.state_dict() == first.state_dict()


def test_a_checkpoint_within_a_window_has_no_effect(tmp_path):
    plain, saves = TinyLM(), TinyLM()
    fit(plain, RAGGED, [BatchSizeWarmup(full=4, over="100 tok", rate="linear")])
    fit(saves, RAGGED, [BatchSizeWarmup(full=4, over="100 tok", rate="linear"), Save(tmp_path / "a.ckpt", 4)])
    assert largest_difference(weights(plain), weights(saves)) == 0


@pytest.mark.parametrize(("rule", "expected"), [("linear", [1 / 3, 2 / 3, 1]), ("sqrt", [3**-0.5, (2 / 3) ** 0.5, 1])])
def test_learning_rates_follow_the_size_and_changes_are_logged(rule, expected):
    """Updates of plain SGD show the learning rate that was used; the schedule is unaffected."""

    class Moves(TinyLM):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return ft.build_schedule(optimizer, "linear", total=8).to_lightning()

        def on_before_optimizer_step(self, optimizer):
            self.before, self.grad = self.head.weight.detach().clone(), self.head.weight.grad.clone()

        def on_train_batch_end(self, *_):
            used = (self.before - self.head.weight.detach()).norm() / self.grad.norm()
            if self.trainer.global_step > len(self.used):
                self.used.append(float(used))
                self.left.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    module = Moves()
    module.used, module.left = [], []
    with heard() as said:
        fit(module, lm_batches(6), [BatchSizeWarmup(full=3, over=2, rate=rule)])
    plain = [0.1 * (1 - k / 8) for k in range(4)]
    assert module.used == pytest.approx([rate * by for rate, by in zip(plain, expected, strict=False)], rel=1e-4)
    assert module.left == pytest.approx(plain[1:])
    told = [line for line in said if line.startswith("BatchSizeWarmup: from")]
    assert told[1] == f"BatchSizeWarmup: from step 1 on, 2 of 3 batches per step, learning rate × {expected[1]:.3g}"
    assert len(told) == 3


def test_torch_schedulers_are_not_affected():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    undo, rates = scale_rates_(optimizer, lambda: 0.1), []
    for _ in range(3):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125]
    undo()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.tolist() == [1 - 0.125]


def test_a_failed_step_restores_the_learning_rates():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    undo = scale_rates_(optimizer, lambda: 0.5)

    def fail():
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(fail)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert (weight.item(), optimizer.param_groups[0]["lr"]) == (0.5, 1.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    undo()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_schedule_knows_the_number_of_steps():
    class Scheduled(TinyLM):
        def configure_optimizers(self):
            self.schedule = ft.build_schedule(super().configure_optimizers(), "cosine", module=self)
            return self.schedule.to_lightning()

    module = Scheduled()
    t = trainer([BatchSizeWarmup(full=4, over=6)], max_epochs=2)
    t.fit(module, as_loader(RAGGED))
    assert module.schedule.plan.total == t.global_step == 9  # 1 1 2 2 3 3 and 4 4 4
    with pytest.raises(ValueError, match="Give the total in tokens, or the growth in steps"):
        fit(Scheduled(), RAGGED, [BatchSizeWarmup(full=4, over="100tok")])


@dataclass(frozen=True)
class Row:
    ids: Tensor
    names: list


def test_all_tensors_of_a_batch_are_cut_to_the_same_length():
    ids = torch.arange(24).reshape(2, 12)
    batch = {
        "nested": (ids, Row(ids + 1, ["a", "b"])),
        "mask": torch.ones(2, 12, dtype=torch.bool),
        "table": torch.ones(2, 1, 12, 12),
        "flags": torch.ones(2, 12, 12, dtype=torch.bool),
        "embeddings": torch.ones(2, 12, 7),
        "weight": torch.ones(2, 5),
        "size": torch.tensor(2),
    }
    cut = cut_sequences(batch, 5)
    assert torch.equal(cut["nested"][0], ids[:, :5])
    assert torch.equal(cut["nested"][1].ids, ids[:, :5] + 1)
    shapes = [tuple(cut[name].shape) for name in ("mask", "table", "flags", "embeddings", "weight", "size")]
    assert shapes == [(2, 5), (2, 1, 5, 5), (2, 5, 5), (2, 5, 7), (2, 5), ()]
    assert cut["nested"][0].view(-1).shape == (10,)
    assert cut_sequences(batch, 12) is batch
    with pytest.raises(ValueError, match="Give cut="):
        cut_sequences({"x": torch.ones(2, 12)}, 5)


def left_padded(lengths, full):
    """Return rows whose real tokens are 1, 2, 3 … from their start; padding is 0."""
    real = torch.stack([torch.arange(full) >= full - n for n in lengths])
    ids = real.cumsum(dim=1) * real
    places = torch.arange(full).expand(len(lengths), full)
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": torch.where(real, ids, -100),
        "table": (real[:, :, None] & real[:, None, :])[:, None],
        "embeddings": torch.stack([ids, places], dim=2).double(),
    }


@pytest.mark.parametrize("length", [2, 5, 8])
def test_left_padded_rows_keep_their_first_real_tokens(length):
    lengths = [9, 8, 5, 3, 1]
    batch = left_padded(lengths, 9)
    cut = cut_sequences(batch, length)
    for row, n in enumerate(lengths):
        kept = min(n, length)
        first = min(9 - n, 9 - length)
        assert cut["input_ids"][row].tolist() == [0] * (length - kept) + list(range(1, kept + 1))
        for name in ("attention_mask", "labels", "embeddings"):
            assert torch.equal(cut[name][row], batch[name][row, first : first + length]), name
        square = batch["table"][row, :, first : first + length, first : first + length]
        assert torch.equal(cut["table"][row], square)
    assert torch.equal(cut_sequences(batch, 9)["input_ids"], batch["input_ids"])
    inverted = {"ids": batch["input_ids"], "key_padding_mask": batch["attention_mask"] == 0}
    assert torch.equal(cut_sequences(inverted, length)["ids"], cut["input_ids"])


def test_right_padded_rows_and_prompt_masks_are_cut_at_the_end():
    batch = left_padded([9, 4], 9)
    behind = {name: tensor.flip(1) for name, tensor in batch.items() if tensor.ndim == 2}
    behind["loss_mask"] = batch["attention_mask"]  # labels ignore the prompt, which is not padding
    for name, tensor in cut_sequences(behind, 5).items():
        assert torch.equal(tensor, behind[name][:, :5]), name


def test_scores_with_as_many_classes_as_tokens_keep_all_classes():
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "labels": torch.rand(2, 6),
        "token_weights": torch.rand(2, 6),
    }
    cut = cut_sequences(batch, 4)
    assert torch.equal(cut["labels"], batch["labels"])
    assert torch.equal(cut["token_weights"], batch["token_weights"][:, :4])
    assert cut_sequences((batch["input_ids"], batch["labels"]), 4)[1].shape == (2, 6)


def test_only_training_batches_are_cut_and_trained_tokens_counted():
    lengths = {"train": [], "validate": []}

    class Looking(TinyLM):
        def forward(self, ids):
            lengths["train" if self.training else "validate"].append(ids.shape[1])
            return super().forward(ids)

    warmup = SequenceLengthWarmup(1, 5, over="50%", grid=2)
    trainer([warmup], max_epochs=2).fit(Looking(), as_loader(lm_batches(4)), as_loader(lm_batches(1)))
    assert lengths["train"] == [1, 1, 3, 3, 5, 5, 5, 5]
    assert set(lengths["validate"]) == {5}
    assert (warmup.growth.samples, warmup.growth.tokens) == (48, 6 * sum(lengths["train"]))


def test_loops_resume_their_growth():
    whole, first, second = (Growth(1, 5, over="100 tok") for _ in range(3))
    expected = [batch["labels"].shape for batch in grow_sequences(RAGGED, whole)]
    before = [batch["labels"].shape for batch in grow_sequences(RAGGED[:4], first)]
    second.load_state_dict(first.state_dict())
    assert before + [batch["labels"].shape for batch in grow_sequences(RAGGED[4:], second)] == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("over", ["4 steps", "30 samples", "60 tok"])
@pytest.mark.parametrize(
    "grow", [lambda *args: grow_sequences(*args, window=2), grow_windows], ids=["batches", "windows"]
)
def test_a_state_that_is_saved_in_the_body_of_a_loop_has_the_batch_in_hand(grow, over):
    def shape_of(item):
        return [batch["labels"].shape for batch in item] if isinstance(item, list) else item["labels"].shape

    def count_batches(item):
        return len(item) if isinstance(item, list) else 1

    whole, read, states = [], 0, []
    growth = Growth(1, 5, over)
    for item in grow(RAGGED, growth):
        whole.append(shape_of(item))
        read += count_batches(item)
        states.append((growth.state_dict(), read))
    assert len({str(shape) for shape in whole}) > 2
    for number, (state, read) in enumerate(states, start=1):
        if isinstance(item, dict) and number % 2:  # within a step
            continue
        resumed = Growth(1, 5, over)
        resumed.load_state_dict(state)
        assert [shape_of(item) for item in grow(RAGGED[read:], resumed)] == whole[number:]
        assert resumed.state_dict() == growth.state_dict()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loop_that_is_left_has_counted_the_batch_in_hand(keeps):
    growth, kept = Growth(1, 5, over=4), []
    for number in range(4):
        batches = grow_sequences(RAGGED, growth)
        kept += [batches] * keeps
        for batch in batches:
            assert batch["labels"].shape[1] == number + 1
            break


@dataclass
class Ids:
    """A batch in a class of its own, with a field that the step sets."""

    ids: torch.Tensor
    lengths: torch.Tensor = field(init=False)


def test_a_batch_in_a_dataclass_is_counted():
    growth = Growth(1, 3, "30 samples")
    windows = grow_windows([Ids(torch.zeros(4, 5, dtype=torch.long))] * 9, growth)
    # The size is 1 before 15 samples, and 2 before 30; the last window is short.
    assert [len(window) for window in windows] == [1, 1, 1, 1, 2, 2, 1]
    assert growth.state_dict() == {"steps": 7, "samples": 36, "tokens": 180}


RANKS = """
import os
import torch
from lightning_fasttrain.loaders import BatchSizeWarmup, Growth, SequenceLengthWarmup, grow_windows
from tests.micro_batching.test_sizes import Sizes
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer, weights

rank = int(os.environ["RANK"])
mine = lm_batches(8, size=2 + 4 * rank, seed=rank)
warmup, seen = BatchSizeWarmup(3, over="40 samples"), Sizes()
sequences = SequenceLengthWarmup(2, 5, over="300tok", grid=1)
module = TinyLM()
t = trainer([warmup, sequences, seen], devices=2, strategy="ddp")
t.fit(module, as_loader(mine))
assert (warmup.growth.samples, sequences.growth.samples) == (64, 64)
assert [rows // (2 + 4 * rank) for rows in seen.rows] == [1, 1, 1, 2, 3], seen.rows
other = torch.stack([weights(module)["head.weight"]] * 2)
torch.distributed.broadcast(other[1], src=0)
assert torch.equal(other[0], other[1])
windows = grow_windows(mine, Growth(1, 3, over="40 samples"))
assert [len(window) for window in windows] == [1, 1, 1, 2, 3]
"""


def test_two_ranks_count_all_samples_and_grow_together(tmp_path):
    """With 2 and 6 rows: separate counts would step at different batches, and the ranks would hang."""
    script = tmp_path / "program.py"
    script.write_text(RANKS)
    run_ranks(str(script), log=tmp_path / "program.log", timeout_s=60)
