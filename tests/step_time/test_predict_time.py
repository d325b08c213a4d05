"""The prediction of a step's time: what it holds together, and what it refuses at once."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.step_time import read_machine
from tests.step_time.test_record_step import blocks
from tests.support.nets import TinyLM, lm_batches


def net():
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])


def predicted(module=net, batch=None, **settings):
    batch = torch.zeros(64, 256) if batch is None else batch
    settings = {"loss": lambda net, x: net(x).float().sum(), "optimizer": torch.optim.AdamW, **settings}
    return ft.predict_time(module, batch, **settings)


def test_the_parts_add_up_and_the_memory_is_that_of_predict_memory():
    report = predicted()
    assert sum(report.by_kind.values()) == pytest.approx(report.seconds)
    assert report.low < report.seconds < report.high
    assert report.samples_per_second == pytest.approx(64 / report.seconds)
    assert report.tokens_per_second == 0
    settings = {"loss": lambda net, x: net(x).float().sum(), "optimizer": torch.optim.AdamW}
    memory = ft.predict_memory(net, torch.zeros(64, 256), precision="bf16-mixed", **settings)
    assert report.peak_bytes == memory.peak_bytes
    assert max(map(len, report.as_table().as_text(80).splitlines())) <= 80
    json.dumps(report.as_dict())


def test_products_alone_take_what_the_machine_says():
    machine = replace(read_machine("A100"), product_share={"bfloat16": 0.5}, peak_flops={"bfloat16": 312e12})
    machine = replace(machine, gb_per_s=1e9, host_us=0.0, kernel_us=0.0, product_half_size=0.0)
    report = predicted(machine=machine, precision="bf16-true", batch=torch.zeros(4096, 256))
    assert report.seconds == pytest.approx(report.flops / 156e12, rel=1e-3)
    assert report.mfu == pytest.approx(0.5, rel=1e-3)


def test_a_module_brings_its_own_step_and_tokens():
    report = ft.predict_time(TinyLM(), lm_batches(1)[0], gpu="L4", accumulate=3)
    assert report.tokens_per_second == pytest.approx(3 * 30 / report.seconds)
    assert report.samples_per_second == pytest.approx(3 * 6 / report.seconds)


@pytest.mark.filterwarnings("ignore")  # of torch's collectives
def test_ranks_of_a_context_group_compute_one_batch_together():
    settings = {"module": blocks(), "batch": torch.zeros(2, 32, 64), "devices": 4}
    plain = predicted(**settings, strategy=ft.FSDP2Strategy())
    assert plain.samples_per_second == pytest.approx(2 / plain.seconds)
    shared = predicted(**settings, strategy=ft.FSDP2Strategy(context_parallel=2))
    assert shared.samples_per_second == pytest.approx(2 / 2 / shared.seconds)
    assert shared.flops / plain.flops == pytest.approx(0.5)


def test_a_slower_network_takes_longer_and_recomputation_takes_longer():
    machine = replace(read_machine("H100"), host_us=1.0)
    slow = replace(machine, between=replace(machine.between, gb_per_s=0.1))
    settings = {"devices": 16, "nodes": 2, "strategy": ft.FSDP2Strategy()}
    assert predicted(machine=slow, **settings).seconds > predicted(machine=machine, **settings).seconds
    batch = torch.zeros(8192, 256)
    plain = predicted(batch=batch, machine=machine)
    recomputed = predicted(batch=batch, machine=machine, techniques=[ft.ActivationCheckpointing()])
    assert recomputed.seconds > plain.seconds
    assert recomputed.flops == plain.flops


def test_an_optimizer_in_the_backward_reads_its_counts_without_waiting():
    def loss(net, batch):
        value = net(batch).float().sum()
        value.item()
        return value

    assert predicted(techniques=[ft.OptimizerInBackward()]).by_kind["waiting"] == 0
    assert predicted(loss=loss).by_kind["waiting"] > 0


def test_tf32_is_used_where_the_technique_asks_for_it():
    batch = torch.zeros(8192, 256)
    plain = predicted(batch=batch, precision="32-true")
    tf32 = predicted(batch=batch, precision="32-true", techniques=[ft.model.MatmulPrecision("tf32")])
    assert tf32.by_kind["products"] < 0.5 * plain.by_kind["products"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "H1000"}, r"gpu='H1000': it is not in the table. Use B300, .*fasttrain machine --out"),
        ({"devices": 10, "nodes": 4}, r"devices=10 in nodes=4: .* Use devices=8 or 12"),
        ({"devices": 8}, r"devices=8 without strategy=.*FSDP2Strategy"),
        ({"precision": "bf17"}, "precision"),
        ({"gpu": "B200", "precision": "32-true"}, r"float32 on B200: .*bfloat16, float16, tf32"),
        ({"gpu": "T4"}, r"bfloat16 on T4: .*float16"),
        ({"devices": 2, "strategy": ft.FSDP2Strategy(offload="cpu")}, r"FSDP2Strategy with offload"),
        ({"techniques": [ft.ActivationOffload()]}, r"ActivationOffload with offload"),
        ({"devices": 2, "strategy": ft.ZeROStrategy("3+offload")}, r"ZeROStrategy with offload"),
    ],
)
def test_what_cannot_be_predicted_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        predicted(**settings)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    machine = replace(read_machine("A100"), name="mine", error=0.03, error_90=0.08)
    path = machine.save(tmp_path / "mine.json")
    assert read_machine(path) == machine
    report = predicted(machine=str(path))
    assert report.high == pytest.approx(report.seconds * 1.08)
    assert report.machine == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("gb_per_s"), "it lacks gb_per_s"),
        (lambda values: values.update(speed=1), "it has speed, which no machine has"),
        (lambda values: values.update(overlap=2), "overlap"),
        (lambda values: values["inside"].update(share=0), "share"),
        (lambda values: values.update(product_share={}), "product_share of no dtype"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, change, message):
    path = read_machine("A100").save(tmp_path / "mine.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"mine.json: .*{message}.*fasttrain machine"):
        read_machine(path)


@pytest.mark.benchmark
def test_seventy_billion_parameters_on_512_devices():
    """30 s and 0.6 GiB on two cores; see ``examples/results/machines``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    report = predicted(
        lambda: LlamaForCausalLM(config),
        torch.zeros(1, 8192, dtype=torch.long),
        loss=lambda net, ids: net(input_ids=ids, labels=ids).loss,
        devices=512,
        nodes=64,
        strategy=ft.FSDP2Strategy(),
        techniques=[ft.ActivationCheckpointing(), ft.FusedLossHead()],
    )
    assert 0.3 < report.mfu < 0.7
