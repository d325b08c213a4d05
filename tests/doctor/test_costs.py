"""A step's time is divided among kinds of operators, and padding has its share."""

import mmap
import sys

import pytest
import torch
from torch import nn

from lightning_fasttrain.doctor.diagnosis import Diagnosis
from lightning_fasttrain.doctor.findings import run_costs
from lightning_fasttrain.doctor.findings.run_costs import find_padding, find_run_costs
from lightning_fasttrain.doctor.observation.operator_costs import ATTENTION, LOGITS, PRODUCTS, REST, OperatorCosts
from lightning_fasttrain.doctor.observation.operator_watch import OperatorWatch
from lightning_fasttrain.doctor.observation.step_records import Measured
from lightning_fasttrain.doctor.observation.watch import PageFaults, Watch
from tests.doctor.examined import examine_script


def kinds_of(step):
    costs = OperatorCosts(torch.device("cpu"))
    with OperatorWatch(lambda: "forward", lambda *_: None, costs):
        step()
    return set(costs.read())


def head(samples, width=16, classes=2048):
    x, weight = torch.randn(samples, width, requires_grad=True), torch.randn(classes, width)
    nn.functional.cross_entropy(x @ weight.t(), torch.zeros(samples, dtype=torch.long)).backward()


@pytest.mark.parametrize("samples", [8, 2048])
def test_products_of_a_head_count_as_logits(samples):
    assert PRODUCTS not in kinds_of(lambda: head(samples))
    # As many samples as classes do not make other products those of a head.
    other = torch.randn(samples, 16), torch.randn(16, 32)
    assert {PRODUCTS, LOGITS} <= kinds_of(lambda: (head(samples), torch.mm(*other)))


def test_scores_and_their_product_with_values_are_attention():
    query, values = torch.randn(2, 8, 4), torch.randn(2, 8, 4)
    kinds = kinds_of(lambda: (query @ query.transpose(1, 2)).softmax(-1) @ values)
    assert ATTENTION in kinds
    assert PRODUCTS not in kinds


def test_costs_add_up_to_the_step_and_the_largest_comes_first():
    phases = {"data_wait": 5.0, "forward": 20.0, "backward": 40.0, "optimizer": 10.0}
    diagnosis = Diagnosis("cpu", 9, 75.0, phases, operator_ms={PRODUCTS: 30.0, REST: 15.0})
    costs = diagnosis.list_costs()
    assert sum(ms for _, ms in costs) == pytest.approx(75.0)
    assert costs[0] == (PRODUCTS, 30.0)
    assert dict(costs)["Python between operators"] == pytest.approx(15.0)
    # Operators that were slower in their step than in most are scaled.
    slower = Diagnosis("cpu", 9, 75.0, phases, operator_ms={PRODUCTS: 90.0, REST: 30.0})
    assert sum(ms for _, ms in slower.list_costs()) == pytest.approx(75.0)


@pytest.mark.parametrize(("side", "says"), [("left", "Pad on the right"), ("right", "ft.MicroBatching(8)")])
def test_padding_has_its_share_of_the_step_and_a_way_out(side, says):
    ids = torch.zeros(8, 64, dtype=torch.long)
    for row, length in enumerate(range(8, 72, 8)):
        place = slice(64 - length, None) if side == "left" else slice(length)
        ids[row, place] = torch.randint(5, 99, (length,))
    watch = Watch(torch.device("cpu"), 6, 1)
    watch.padding.add({"input_ids": ids, "attention_mask": (ids != 0).long()})
    times = {"step": 100.0, "forward": 30.0, "backward": 50.0, "data_wait": 0.0}
    (found,) = find_padding(watch, Measured([times] * 5, {}))
    assert "44% of the tokens of 1 batch are padding" in found.what
    assert found.share_of(100.0) == pytest.approx(0.44 * 0.8, abs=0.01)
    assert found.cure.startswith(says)


def touch_pages(count):
    with mmap.mmap(-1, count * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(count):
            memory[page * mmap.PAGESIZE] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count page faults")
def test_pages_that_a_step_takes_from_the_system_are_counted():
    faults = PageFaults()
    for pages in (2000, 5000):
        faults.begin_step()
        touch_pages(pages)
        faults.end_step()
    faults.end_step()  # of a step that was not begun
    assert [count >= pages for count, pages in zip(faults.counts, (2000, 5000), strict=True)] == [True, True]
    assert faults.counts[1] - faults.counts[0] >= 2000
    assert sum(faults.system_ms) >= 0


def test_memory_that_is_given_back_in_each_step_costs_what_the_system_works():
    watch = Watch(torch.device("cpu"), 6, 1)
    measured = Measured([{"step": 100.0, "forward": 40.0, "backward": 50.0}] * 3, {})
    returned = lambda: [one for one in find_run_costs(watch, measured) if one.kind == "returned_memory"]  # noqa: E731
    watch.faults.counts, watch.faults.system_ms = [12_000, 11_000, 900_000], [18.0, 20.0, 22.0]
    (found,) = returned()
    assert (found.cost.low, found.cost.value, found.cost.high) == (0.0, 20.0 / torch.get_num_threads(), 20.0)
    assert "46.88 MiB" in found.what
    assert "MALLOC_TRIM_THRESHOLD_" in found.cure
    watch.faults.system_ms = [4.0, 4.0, 4.0]  # of 100
    assert returned() == []
    watch.faults.counts, watch.faults.system_ms = [100, 100, 100], [18.0, 20.0, 22.0]  # the system does something else
    assert returned() == []


def test_a_first_collection_of_garbage_is_no_rate(monkeypatch):
    monkeypatch.setattr(run_costs, "find_only_call", lambda *_, **__: None)  # the tests call gc.collect() themselves
    watch = Watch(torch.device("cpu"), 6, 1)
    measured = Measured([{"step": 100.0, "forward": 40.0, "backward": 50.0}] * 3, {})
    kinds = lambda: [one.kind for one in find_run_costs(watch, measured)]  # noqa: E731
    watch.actions["garbage collection"] = [0.3]  # due to what was imported and compiled
    assert "garbage_collection" not in kinds()
    watch.actions["garbage collection"] = [0.3, 0.3]
    assert "garbage_collection" in kinds()


GIVES_MEMORY_BACK = """
import mmap

import lightning as L
import torch
from torch.utils.data import DataLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        with mmap.mmap(-1, 24_000 * mmap.PAGESIZE) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(24_000):
                memory[page * mmap.PAGESIZE] = 1
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Net(), DataLoader(torch.randn(96, 16), batch_size=4))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count page faults")
def test_the_doctor_of_a_script_names_memory_that_is_given_back(tmp_path, monkeypatch):
    (found,) = examine_script(GIVES_MEMORY_BACK, tmp_path, monkeypatch, steps=8).of_kind("returned_memory")
    assert found["what"].startswith("Page faults: malloc returns 9")  # 93.75 MiB, and what the step itself takes
    assert 0 < found["cost"]["value"] <= found["cost"]["high"]
