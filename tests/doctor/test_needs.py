"""What the kernels of a watched step need on a machine, and how far the step is from that."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.doctor import Diagnosis, examine, save_diagnosis
from lightning_fasttrain.doctor.observation import operator_watch
from lightning_fasttrain.step_time.accelerators import find_device
from lightning_fasttrain.step_time.machine import read_machine
from tests.support.nets import TinyLM, fit, lm_batches, trainer

# A product takes a second for 1e9 FLOPs, and nothing else takes time.
SLOW = replace(
    read_machine("A100"),
    name="slow",
    peak_flops={"float32": 1e9},
    product_share={"float32": 1.0},
    product_half_size=0.0,
    gb_per_s=1e9,
    kernel_us=0.0,
    host_us=0.0,
)
# Of the layers 64 → 32 → 16 for 8 rows: the forward, the gradients of both weights, and of the second layer's input.
FLOPS = 2 * 8 * (2 * (64 * 32 + 32 * 16) + 32 * 16)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def watched(callbacks, dtype=torch.float32):
    doctor = ft.Doctor(steps=6, warmup=1, show=False, machine=SLOW)
    batches = [torch.ones(8, 64, dtype=dtype) for _ in range(8)]
    trainer([doctor, *callbacks], max_epochs=1).fit(Net().to(dtype), DataLoader(batches, batch_size=None))
    return doctor.diagnosis


@pytest.mark.parametrize("callbacks", [[], [ft.MicroBatching(4, check=False)]], ids=["whole", "micro-batches"])
def test_products_take_their_flops_of_the_peak(callbacks):
    diagnosis = watched(callbacks)
    assert diagnosis.needed_ms["products"] == pytest.approx(1e3 * FLOPS / 1e9)
    assert sum(diagnosis.needed_ms.values()) == pytest.approx(1e3 * FLOPS / 1e9, rel=1e-3)
    assert "slow could run these kernels in" in str(diagnosis)


def test_a_loop_is_compared_too():
    net = nn.Linear(64, 16, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with examine(steps=6, warmup=1, device="cpu", report=lambda _: None, machine=SLOW) as examination:
        for _ in range(8):
            net(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert examination.diagnosis.needed_ms["products"] == pytest.approx(1e3 * 2 * 2 * 8 * 64 * 16 / 1e9)


def test_a_dtype_without_a_peak_and_a_cpu_without_a_machine_are_not_compared():
    diagnosis = watched([], torch.float64)
    assert diagnosis.needed_ms == {}
    assert any("mm in float64 on slow: its profile has peaks of float32 alone" in note for note in diagnosis.notes)
    doctor = ft.Doctor(steps=6, warmup=1, show=False)
    trainer([doctor], max_epochs=1).fit(Net(), DataLoader(torch.ones(64, 64), batch_size=8))
    assert (doctor.diagnosis.needed_ms, doctor.diagnosis.compared_with) == ({}, "")


def test_an_operator_that_cannot_be_described_leaves_the_training_alone(monkeypatch):
    def fail(*_):
        raise NotImplementedError("no storage")

    monkeypatch.setattr(operator_watch, "note_call", fail)
    diagnosis = watched([])
    assert (diagnosis.steps, diagnosis.needed_ms) == (3, {})
    assert any("an operator cannot be described: NotImplementedError" in note for note in diagnosis.notes)


def test_a_compiled_model_is_not_compared_which_is_said():
    doctor = ft.Doctor(steps=6, warmup=1, show=False, machine=SLOW)
    fit(TinyLM(), lm_batches(8), [doctor, ft.CompileBlocks(backend="eager")])
    assert doctor.diagnosis.needed_ms == {}
    assert "The step was not compared with slow: its operators were not looked at" in doctor.diagnosis.notes


def test_the_rest_of_the_step_is_what_it_waited_for(tmp_path):
    phases = {"data_wait": 20.0, "forward": 30.0, "backward": 45.0, "optimizer": 5.0}
    needs = {"needed_ms": {"products": 40.0, "optimizer": 10.0}, "compared_with": "A100"}
    diagnosis = Diagnosis("cuda", 18, 100.0, phases, **needs)
    said = diagnosis.compare_to_machine()
    assert said == (
        "A100 could run these kernels in 50 ms (products 40, optimizer 10); the step takes 100 ms, with waiting for "
        "data 20, kernels below its rates and gaps between them 30"
    )
    assert said in save_diagnosis(diagnosis, tmp_path)[0].read_text()
    assert "the step takes less" in replace(diagnosis, step_ms=45.0).compare_to_machine()


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_gpus_are_known_by_the_names_that_torch_gives_them(name, accelerator):
    assert find_device(name).name == accelerator


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 3090 Ti", "NVIDIA A10", "NVIDIA H100 NVL"),
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_other_gpus_are_not_taken_for_known_ones(name):
    assert find_device(name) is None


def test_an_unknown_machine_is_refused_at_once():
    with pytest.raises(ValueError, match="it is not in the table"):
        ft.Doctor(machine="H1000")
    with pytest.raises(FileNotFoundError):
        examine(machine="nowhere.json")
