"""Memory predicted for one rank of many, against real processes and closed forms; checkpoints in object storage."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain import predict_memory
from lightning_fasttrain.strategy.zero.zero_states import predict_model_states
from tests.strategy.scale_scenarios import URL, WAYS, batch, gpt
from tests.support.ranks import run_ranks
from tests.support.s3_server import s3_server


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    with s3_server(folder):
        run_ranks("tests.strategy.scale_scenarios", folder, log=folder / "log")
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("label", WAYS)
def test_the_predicted_peak_is_that_of_real_processes(found, label):
    precision, settings, micro_batches = WAYS[label]
    for rank in range(1 + (label == "FSDP2")):
        report = predict_memory(
            gpt,
            batch(),
            techniques=[ft.MicroBatching(micro_batches)],
            precision=precision,
            device="cpu",
            strategy=ft.FSDP2Strategy(**settings),
            world=2,
            rank=rank,
        )
        assert report.peak_bytes == pytest.approx(found[rank][label], rel=0.05)


def test_a_run_resumes_from_its_shards_in_object_storage(found):
    for rank in found:
        assert rank["storage"]["newest"] == f"{URL}/step=4.ckpt"
        assert rank["storage"]["equal"]


def test_an_upload_that_fails_on_one_rank_fails_on_all_and_leaves_no_checkpoint(found):
    assert "PermissionError: The request signature we calculated does not match" in found[1]["storage"]["error"]
    assert "another rank failed" in found[0]["storage"]["error"]
    assert not any(name.endswith(".json") for name in found[0]["storage"]["after a failure"])


def of_linear(world, rank=0, rows=64):
    """Predict two linear layers without biases, gathered as one group, for SGD with momentum."""
    return predict_memory(
        lambda: nn.Sequential(nn.Linear(32, rows, bias=False), nn.Linear(rows, 32, bias=False)),
        torch.zeros(2, 32),
        loss=lambda net, batch: net(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        device="cpu",
        strategy=ft.FSDP2Strategy(),
        world=world,
        rank=rank,
    )


def test_shards_have_the_closed_form():
    for world in (2, 8, 16):
        report = of_linear(world)
        assert report.peaks["optimizer state"] == 4 * 2 * 32 * 64 // world
        assert report.peaks["gradients"] == 4 * 2 * 32 * 64 // world


def test_the_last_rank_holds_less_where_rows_do_not_divide():
    first, last = (of_linear(4, rank, rows=65).peaks["optimizer state"] for rank in (0, 3))
    # 65 rows are 17, 17, 17 and 14; 32 rows are 8 each.
    assert (first, last) == (4 * (17 * 32 + 8 * 65), 4 * (14 * 32 + 8 * 65))


def test_a_thousand_ranks_are_predicted_and_gathered_weights_are_padded_to_them():
    report = of_linear(1024)
    assert report.peaks["optimizer state"] == 4 * (32 + 64)  # one row of each
    assert report.at_peak["parameters"] >= 4 * 1024 * 32  # 64 rows are gathered as 1,024


def test_the_process_is_as_it_was():
    resize, strategy = torch.UntypedStorage.resize_, ft.FSDP2Strategy()
    before = dict(vars(strategy))
    predict_memory(gpt, batch(), device="cpu", strategy=strategy, world=2)
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize
    assert dict(vars(strategy)) == before


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"world": 8}, ValueError, "world=8 without strategy=: the strategy decides what each rank holds"),
        ({"world": 2, "rank": 2}, ValueError, "rank=2 of world=2: ranks are counted from 0"),
        ({"strategy": "fsdp", "world": 2}, TypeError, "strategy='fsdp': its ranks cannot be predicted"),
        ({"strategy": ft.FSDP2Strategy(replicas=3), "world": 4}, ValueError, "replicas=3 over 4 processes"),
        ({"strategy": ft.ZeROStrategy(), "world": 4}, ValueError, "a prediction with stage='auto'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(settings, error, said):
    with pytest.raises(error, match=said):
        predict_memory(gpt, batch(), device="cpu", **settings)


def test_a_rank_of_a_launch_is_refused(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="this process is one of 1 ranks already"):
            predict_memory(gpt, batch(), device="cpu", strategy=ft.FSDP2Strategy(), world=2)
    finally:
        dist.destroy_process_group()


def test_states_under_zero_are_those_of_the_formulas():
    for stage in (1, 3):
        report = predict_memory(gpt, batch(), device="cpu", strategy=ft.ZeROStrategy(stage), world=4)
        (states,) = predict_model_states(gpt(), world_size=4, stages=[str(stage)])
        assert report.peaks["parameters"] == pytest.approx(states.parameters, abs=200)
        assert report.peaks["optimizer state"] == pytest.approx(states.optimizer, abs=200)
        assert report.peaks["gradients"] == pytest.approx(states.gradients, rel=0.01)
        assert report.peak_bytes > states.parameters + states.optimizer


def test_on_cuda_memory_comes_in_blocks():
    report = predict_memory(gpt, batch(), strategy=ft.FSDP2Strategy(), world=2)
    assert report.reserved_bytes >= report.peak_bytes
    assert any("as on one CUDA stream" in note for note in report.notes)
