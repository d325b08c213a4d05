"""What is said of the loader, from how long its samples take, and of the optimizer, from what it keeps."""

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_fasttrain as ft
from lightning_fasttrain.planner.make_plan import suggest_leaner_optimizer, suggest_trimming, suggest_workers
from tests.support.clock import Clock
from tests.support.nets import ShallowLM, as_loader, lm_batches, padded_batches


class Slow(Dataset):
    """Two milliseconds a sample, by a clock that nobody waits for."""

    def __init__(self, clock):
        self.clock, self.read = clock, []

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.read.append(index)
        self.clock.passes(2)
        return torch.rand(3)


@pytest.fixture
def slow(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return Slow(clock)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("step_ms", "workers", "said"),
    [
        (10.0, 0, "num_workers=2, persistent_workers=True) hides it."),  # 16 ms a batch
        (10.0, 2, ""),
        (1000.0, 0, ""),
        (1.05, 4, "num_workers=8, persistent_workers=True) hides a part of it; 16 would hide all."),
        (1.0, 8, "more than 8 workers on 8 cores can hide"),
    ],
)
def test_as_many_as_keep_up(slow, step_ms, workers, said):
    found = suggest_workers(DataLoader(slow, batch_size=8, num_workers=workers), step_ms)
    assert said in found
    assert bool(found) == bool(said)


def test_nothing_is_drawn_and_no_sampler_moves(slow):
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(slow, batch_size=8, shuffle=True, generator=generator)
    before = torch.get_rng_state(), generator.get_state()
    suggest_workers(loader, 10.0)
    assert slow.read == list(range(64))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])


def test_a_stream_is_not_looked_into():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError

    assert suggest_workers(DataLoader(Stream()), 1.0) == ""
    assert suggest_workers([1, 2], 1.0) == ""


def test_a_plan_says_it():
    class Late(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            time.sleep(0.3)
            return torch.zeros(1)

    (batch,) = lm_batches(1, size=4, length=8)
    found = ft.make_plan(
        ShallowLM(), batch, 1.0, keep="exact", device="cpu", seconds=0.01, loader=DataLoader(Late(), batch_size=2)
    )
    assert any("A batch takes the loader" in note and "num_workers" in note for note in found.notes)


def test_what_eight_bits_would_save():
    class Net(ShallowLM):
        def __init__(self, optimizer, width):
            super().__init__()
            self.wide, self.optimizer = torch.nn.Linear(width, width), optimizer

        def configure_optimizers(self):
            return self.optimizer(self.parameters(), lr=1e-3)

    large = Net(torch.optim.AdamW, 512)
    now = 8 * sum(parameter.numel() for parameter in large.parameters())
    said = suggest_leaner_optimizer(large)
    assert said.startswith(f"AdamW's state takes {now / 2**20:.2f} MiB; ft.build_optimizer(self, 'adamw8bit', ...)")
    assert suggest_leaner_optimizer(Net(torch.optim.SGD, 512)) == ""
    assert suggest_leaner_optimizer(Net(torch.optim.AdamW, 4)) == ""  # tensors this small stay in 32 bits


def one_hot_labels():
    return torch.randn(8, 16), torch.eye(16)[:8].long()


def pictures_with_masks():
    return torch.rand(8, 3, 16, 16), (torch.arange(16)[None, None] < torch.arange(1, 9)[:, None, None]).expand(
        8, 16, 16
    )


def prompts_without_loss():
    ids = torch.randint(2, 50, (8, 64))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(64)[None] < 40, -100)}


def objects():
    return [object()]


@pytest.mark.parametrize("make", [one_hot_labels, pictures_with_masks, prompts_without_loss, objects])
def test_batches_that_only_look_padded_are_not_called_padded(make):
    assert suggest_trimming(make()) == ""


def test_the_share_of_padding_is_that_of_the_first_four_batches_of_the_loader():
    batches = padded_batches([16, 8, 8, 8, 32])
    share = 1 - (4 * 32 + 7 * (16 + 3 * 8)) / (4 * 8 * 32)
    loader = as_loader(batches)
    assert f"{share:.0%} of the tokens of 4 batches" in suggest_trimming(batches[0], loader)
    assert "of 1 batch " in suggest_trimming(batches[0])
    assert "of 1 batch " in suggest_trimming(batches[0], iter(loader))  # the run could not read it again


def test_an_explanation_states_the_padding_that_no_technique_cuts_off():
    batch = padded_batches([8])[0]
    found = ft.planner.explain(ShallowLM(), batch, [ft.EagerGradientRelease()])
    assert found.padding == suggest_trimming(batch)
    assert f"  Padding       {found.padding.rstrip('.')}\n" in str(found)
    assert ft.planner.explain(ShallowLM(), batch, [ft.MicroBatching(4)]).padding == ""
