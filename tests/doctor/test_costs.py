"""A step's time is divided among kinds of operators, and padding has its share."""

import pytest
import torch
from torch import nn

from lightning_fasttrain.doctor.diagnosis import Diagnosis
from lightning_fasttrain.doctor.findings.run_costs import find_padding
from lightning_fasttrain.doctor.observation.operator_costs import ATTENTION, LOGITS, PRODUCTS, REST, OperatorCosts
from lightning_fasttrain.doctor.observation.operator_watch import OperatorWatch
from lightning_fasttrain.doctor.observation.step_records import Measured
from lightning_fasttrain.doctor.observation.watch import Watch


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
