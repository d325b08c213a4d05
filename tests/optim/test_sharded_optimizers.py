"""Named optimizers on two real processes, under FSDP2 and ZeRO: they train as in one process, or are refused."""

import json

import pytest

from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    run_ranks("tests.optim.sharded_scenarios", folder / "found.json", log=folder / "log")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    ("run", "most"),
    [
        ("fsdp2 lion", 1e-6),
        ("fsdp2 clipping", 1e-6),
        ("fsdp2 muon", 1e-3),
        ("zero lion", 1e-6),
        ("zero adamw8bit", 1e-6),
    ],
)
def test_two_processes_train_as_one(found, run, most):
    assert found["untrained"] > 1e-2
    assert found["clipping changes"] > 1e-4
    assert found[run] < most  # Muon rounds to bfloat16 internally, in another order of sums


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("fsdp2 galore", "its singular vectors cannot be computed locally. Use torch.optim.AdamW"),
        ("fsdp2 adamw8bit", "its kernels do not support shards. Use AdamW"),
        ("fsdp2 offload", "shards of tensors belong to their devices. Use FSDP2Strategy(offload='cpu')"),
        ("fsdp2 updates", "bits are on several devices. Keep float32 shards, with precision='bf16-mixed'"),
        ("zero muon", "MuonAdamW with ZeRO: it makes no step on a shard of a layer"),
        ("zero offload", "HostOptimizer with ZeRO: its copy of the weights"),
    ],
)
def test_unsupported_sharding_is_refused_with_the_reason(found, run, why):
    assert why in found[run]
