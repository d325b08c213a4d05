import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_fasttrain.strategy.choose._model_sizes import ZeROSizes
from lightning_fasttrain.strategy.choose.choose_stage import choose_stage
from lightning_fasttrain.strategy.choose.model_states import STAGES

GIB = 2**30
SMALL = ZeROSizes(reduce_bucket=0, prefetch=0, persistence=0, reuse=0)


def choose(free_gib, world_size=8, **more):
    """Choose for 2³⁰ parameters in 16 equal layers, in float32, with AdamW: 16 bytes each, 20 with copies."""
    with torch.device("meta"):
        net = nn.Sequential(*[nn.Linear(2**13, 2**13, bias=False) for _ in range(16)])
    optimizer = torch.optim.AdamW(net.parameters())
    settings = {"world_size": world_size, "headroom": 0.0, "sizes": SMALL, **more}
    return choose_stage(net, optimizer, free_bytes=int(free_gib * GIB), **settings)


# Parameters, gradients, state and float32 copies; then the step's copy, or for stage 0 the bucket of 5·10⁸ numbers.
TAKES = {
    "0": 4 + 4 + 8 + 4 * 5e8 / GIB,
    "1": 4 + 4 + 12 / 8 + 4 / 8,
    "2": 4 + 4 / 8 + 12 / 8 + 4 / 8,
    "3": (4 + 4 + 12) / 8 + 4 / 8,
}


@pytest.mark.parametrize("stage", TAKES)
def test_the_first_stage_that_fits_is_chosen(stage):
    assert choose(TAKES[stage] + 0.001).stage == stage
    if stage != "3":
        assert choose(TAKES[stage] - 0.001).stage != stage


def test_offload_is_tried_after_sharding():
    assert choose(2.9, world_size=4).stage == "3+offload"
    assert choose(4.26, world_size=2).stage == "2+offload"


def test_headroom_and_activations_are_subtracted_first():
    assert choose(TAKES["1"] + 0.001, headroom=0.1).stage == "2"
    assert choose(TAKES["1"] + 1.001, activation_bytes=GIB).stage == "1"
    assert choose(TAKES["1"] + 0.999, activation_bytes=GIB).stage == "2"


def test_host_memory_is_checked_too(tmp_path):
    needs = choose(1.0).states.host
    assert choose(1.0, host_bytes=needs).stage == "3+offload"
    with pytest.raises(ValueError, match="of host memory for each rank"):
        choose(1.0, host_bytes=needs - 1)


def test_disk_is_used_only_if_a_folder_is_given(tmp_path):
    assert "3+nvme" not in [row.stage for row in choose(100).rows]
    assert [row.stage for row in choose(100, nvme_path=tmp_path).rows] == list(STAGES)


def test_disk_is_the_last_resort(tmp_path):
    room = {"host_bytes": 18 * GIB, "nvme_path": tmp_path, "sizes": ZeROSizes(0, 0, 0, 0, sub_group=2**20)}
    chosen = choose(1.0, world_size=1, **room)
    assert chosen.stage == "3+nvme"
    assert chosen.states.nvme > 20 * GIB


def test_choice_explains_the_reason():
    assert choose(100).why.startswith("Stage 0 fits, and sends least: ")
    why = choose(TAKES["3"] + 0.001).why
    assert "3.00 GiB of 3.00 GiB on each device; stage 2 would be 3.50 GiB over" in why
    assert "offload" not in why


def test_shortage_error_has_the_amount_and_a_way_out():
    with pytest.raises(ValueError) as caught:
        choose(0.15)
    assert "the nearest is 3+offload and lacks 0.10 GiB on each device" in str(caught.value)  # a layer is 0.25 GiB
    with pytest.raises(ValueError, match="Recompute activations"):
        choose(1.0, activation_bytes=GIB)
    with pytest.raises(ValueError, match="Give nvme_path="):
        choose(1.0, host_bytes=GIB)


def test_the_table_shows_all_stages_in_gib():
    text = io.StringIO()
    chosen = choose(TAKES["2"] + 0.501, activation_bytes=GIB // 2)
    Console(file=text, width=80).print(chosen.as_table())
    rows = {line.split()[1]: line for line in text.getvalue().splitlines() if line.startswith("│")}
    assert list(rows) == [row.stage for row in chosen.rows]
    figures = [cell.strip() for cell in rows["2"].split("│")[2:-1]]
    assert figures == ["4.00", "0.50", "1.50", "0.50", "7.00", "0"]
    assert "activations take 0.50 GiB at every stage" in " ".join(text.getvalue().split())
    assert "2 ←" in rows["2"]
    assert chosen.why in " ".join(text.getvalue().split())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"free_gib": 0}, "free_bytes=0"),
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"activation_bytes": -5}, "activation_bytes=-5"),
        ({"headroom": 1.0}, "headroom=1.0"),
        ({"headroom": -0.1}, "headroom=-0.1"),
        ({"nvme_path": "/no/such/folder"}, "there is no such folder"),
        ({"world_size": 0}, "world_size=0"),
        ({"precision": "16-true"}, "precision='16-true'"),
    ],
)
def test_invalid_arguments_are_refused(more, says):
    with pytest.raises(ValueError, match=says):
        choose(**{"free_gib": 1, **more})
