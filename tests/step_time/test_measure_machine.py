"""The machine at hand, measured."""

from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fasttrain.core.device import peak_flops
from lightning_fasttrain.step_time import measure_machine, read_machine
from lightning_fasttrain.step_time import measure_machine as function
from lightning_fasttrain.step_time.machine import Link


@pytest.fixture
def quick(monkeypatch):
    """Each measurement runs twice, on small tensors."""
    module = __import__(function.__module__, fromlist=["_"])
    monkeypatch.setattr(module, "_SECONDS_EACH", 0.0)
    monkeypatch.setattr(module, "_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(module, "_SIDES", {"cpu": (64, 128, 256)})
    monkeypatch.setattr(module, "_CACHED_BYTES", (2**16, 2**18))
    return module


def test_this_machine_is_measured_and_read_again(quick, tmp_path):
    drawn = torch.get_rng_state()
    machine = measure_machine("cpu")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert set(machine.peak_flops) == {"float32", "bfloat16"}
    assert not machine.runs_ahead
    assert machine.source.startswith("measured here: ")
    assert "links are not measured" in machine.source
    assert min(machine.peak_flops.values()) > 1e-3 * peak_flops(torch.device("cpu"), torch.float32)
    assert read_machine(machine.save(tmp_path / "here.json")) == machine
    assert "products in float32" in str(machine)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="device='tpu': expected 'cpu', or 'cuda' where there is a GPU"):
        measure_machine("tpu")


@pytest.mark.parametrize("mib", [1.5, 6.0, 20.0])
def test_the_size_of_a_cache_is_found_by_the_times_of_kernels(quick, monkeypatch, mib):
    def pretend(device, nbytes):
        """The rate of a cache of 40e9 bytes/s, before memory of 8e9."""
        moved = 2 * nbytes
        inside = min(moved, mib * 2**20)
        return moved / (inside / 40 + (moved - inside) / 8)

    monkeypatch.setattr(quick, "_CACHED_BYTES", tuple(2**power for power in (18, 20, 22, 24)))
    monkeypatch.setattr(quick, "_measure_elementwise", pretend)
    found = quick._measure_cache(torch.device("cpu"), 8.0)
    assert found["cached_gb_per_s"] == pytest.approx(40)
    assert found["cache_mib"] == pytest.approx(mib, rel=0.06)
    assert quick._measure_cache(torch.device("cpu"), 50.0) == {}


def test_what_convolutions_take_is_found_by_a_network_of_them(quick, monkeypatch):
    machine = replace(read_machine("H100"), runs_ahead=False, host_us=10.0, kernel_us=0.0)

    def pretend(device, run):
        """What the host needs to start 11 kernels, and 50 µs for each of the 12 convolutions in 8 of them."""
        run()
        return 11 * 10e-6 + 12 * 50e-6

    monkeypatch.setattr(quick, "_usual_seconds", pretend)
    assert quick._measure_convolutions(torch.device("cpu"), replace(machine, runs_ahead=True)) == 0
    assert quick._measure_convolutions(torch.device("cpu"), machine) == pytest.approx(50, rel=0.05)


def test_attention_is_found_by_its_rates_at_several_lengths(quick, monkeypatch):
    def pretend(device, dtype, length):
        return 40 * length / (length + 32), 30 * length / (length + 128)

    monkeypatch.setattr(quick, "_time_attention", pretend)
    found = quick._measure_attention(torch.device("cpu"), torch.float32, 80)
    assert found["attention_share"] == pytest.approx(0.5, rel=0.02)
    assert found["attention_backward_share"] == pytest.approx(30 / 80, rel=0.02)
    assert found["attention_half_length"] == pytest.approx(32, abs=2)
    assert found["attention_backward_half_length"] == pytest.approx(128, abs=2)


def test_a_link_is_found_by_the_times_of_gathers_and_reductions(quick, monkeypatch):
    def pretend(device, run):
        """10 µs, and 2e9 bytes/s in a gather between three ranks; three times as long to reduce and scatter."""
        run()
        whole = max(tensor.numel() for tensor in run.args) * 4
        return (1 + 2 * (run.func is dist.reduce_scatter_tensor)) * (0.01 + whole * 2 / 3 / 2e6)

    monkeypatch.setattr(quick, "time_ms", pretend)
    assert quick._measure_link(torch.device("cpu")) is None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        link = quick._measure_link(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert link.gb_per_s * link.share == pytest.approx(2, rel=0.01)
    assert link.latency_us == pytest.approx(5, rel=0.2)  # the little one is not nothing
    assert link.reduce_factor == pytest.approx(3)


def test_the_hooks_of_sharding_are_found_by_a_network_with_and_without_them(quick, monkeypatch):
    machine = replace(read_machine("H100"), inside=Link(1, 100, 1.0, reduce_factor=3.0))

    def pretend(device, run):
        """30 µs a collective, besides 200 µs to gather and 600 µs to reduce among three ranks, and 8,896 bytes."""
        run()
        (net,) = run.__defaults__
        sent = 5 * (200 + 8_896 * 2 / 3 / 1000)
        return 1.0 + isinstance(net, FSDPModule) * 8 * (3 * 30 + sent) / 1000

    monkeypatch.setattr(quick, "time_ms", pretend)
    assert quick._measure_sharding(torch.device("cpu"), machine) == 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        found = quick._measure_sharding(torch.device("cpu"), machine)
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(30, rel=0.01)


def test_the_hooks_of_modules_are_found_by_a_network_with_and_without_zero(quick, monkeypatch):
    machine = replace(read_machine("H100"), inside=Link(1, 100, 1.0, reduce_factor=3.0))
    linear = torch.nn.functional.linear

    def pretend(device, run):
        """30 µs for each of 73 modules, besides 600 µs to reduce among three ranks, and 71,168 bytes."""
        before = engine_calls[0]
        run()
        return 1.0 + (engine_calls[0] > before) * (73 * 30 + 3 * (200 + 71_168 * 2 / 3 / 1000)) / 1000

    engine_calls = [0]
    forward = deepspeed.DeepSpeedEngine.forward

    def counted(engine, *args):
        engine_calls[0] += 1
        return forward(engine, *args)

    def fail():
        raise RuntimeError("no compiler")

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "forward", counted)
    monkeypatch.setattr(quick, "time_ms", pretend)
    assert quick._measure_fetching(torch.device("cpu"), machine) == 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        found = quick._measure_fetching(torch.device("cpu"), machine)
        monkeypatch.setattr(quick, "import_deepspeed", fail)
        assert quick._measure_fetching(torch.device("cpu"), machine) == 0
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(30, rel=0.01)
    assert torch.nn.functional.linear is linear
