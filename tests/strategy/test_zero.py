"""ZeROStrategy and FabricZeROStrategy: real processes with gloo, one launch of one process and one of two."""

import itertools
import json
import os
import subprocess
import sys
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.zero.zero_engine import make_broadcastable_
from lightning_fasttrain.strategy.zero.zero_host import read_batch
from lightning_fasttrain.strategy.zero.zero_states import STAGES as KNOWN
from lightning_fasttrain.strategy.zero.zero_strategy import FabricZeROStrategy, ZeROStrategy
from lightning_fasttrain.technique import check_together
from tests.strategy.zero_launches import EQUAL, IN_FABRIC, WEIGHED, launched
from tests.support.nets import trainer
from tests.support.ranks import ROOT

STAGES = ("0", "1", "2", "3")
KINDS = [ZeROStrategy, FabricZeROStrategy]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return launched(tmp_path_factory)


@pytest.fixture
def one(runs):
    return runs[0][1][0]


@pytest.fixture
def two(runs):
    return runs[0][2]


def test_every_scenario_ran(one, two):
    for found in (one, *two):
        assert not [key for key, value in found.items() if str(value).startswith("Traceback")], found


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_losses_and_weights_equal_those_of_one_plain_process(two, kind):
    for rank in two:
        for stage in EQUAL[kind]:
            found = rank[f"{kind} {stage}"]
            assert found["losses"] < 1e-5
            assert found["weights"] < 1e-4
            assert found["agree"] == 0


def test_torchs_own_linear_is_restored_after_stage_3(two):
    assert all(rank["linear restored"] for rank in two)


def test_step_counts_equal_the_engines(two):
    for kind, stages in EQUAL.items():
        for stage in stages:
            assert two[0][f"{kind} {stage}"]["steps"] == [4, 4]


def test_optimizer_takes_the_same_steps_as_in_one_process(one):
    cases = {key: found for key, found in one.items() if key.startswith("steps ") and isinstance(found, dict)}
    assert len(cases) == 2 * 5 + 1 + 3  # dtypes, optimizers and groups; auto; Fabric
    for key, found in cases.items():
        assert found["counts"] == ([] if "sgd" in key else [4.0]), key
        assert found["weights"] < 1e-6 < 1e-3 < found["moved"], (key, found)
        assert found["rates"] < 1e-9, key
        assert found["named"] == ("SGD" if "sgd" in key else "AdamW"), key
    assert one["stage of auto"] == 0


def test_resumed_equals_uninterrupted_bitwise_in_16_bits(one):
    assert one["resumed in bf16 0"] == one["resumed in bf16 2"] == [True, True]


def test_scheduler_with_an_unknown_empty_group_is_refused(one):
    assert "parameter group 1 under ZeRO, in which nothing trains" in one["schedule unknown"]


def test_scheduler_that_would_count_micro_batches_as_steps_is_refused(one):
    assert "create it in configure_optimizers" in one["late schedule"]


def test_an_adagrad_that_deepspeed_would_replace_is_refused(one):
    assert one["adagrad plain"] < 1e-6
    assert isinstance(one["adagrad decayed at 0"], float)
    assert "DeepSpeed replaces it by another one" in one["adagrad decayed"]


def test_targets_have_equal_weight_over_unequal_ranks_and_micro_batches(two):
    for kind, stages in WEIGHED.items():
        for stage in stages:
            assert two[0][f"tokens {kind} {stage}"] < 1e-4


def test_uninitialized_padding_of_a_shard_is_not_taken_for_a_weight(two):
    for rank in two:
        assert "NaN or infinite values are in trained.0.bias" in rank["padding"]


def test_guards_skip_a_step_that_one_rank_spoils_bitwise_on_both(two):
    for found in two:
        skips = {key: value for key, value in found.items() if key.startswith("skipped, ")}
        assert len(skips) == 7
        assert {key: value[:2] for key, value in skips.items()} == {key: [True, 1] for key in skips}
        assert [found[f"skipped in Fabric {stage}"] for stage in (2, 3)] == [[1, True]] * 2
        assert "that is 1 step in a row" in found["stopped"]
    assert "batch 3, rank 1, the non-finite value could not be reproduced" in two[0]["skipped, factor 2"][2][0]
    assert "batch 3, rank 1, in the gradient of trained.2.bias" in two[0]["skipped, factor 3"][2][0]
    assert "rank 1 (skipped so far" in two[0]["skipped, constant 3"][2][0]


def test_manual_optimization_accumulates_until_the_last_backward(one):
    for stage in STAGES:
        assert one[f"manual {stage}"] < 1e-5


def test_window_without_targets_changes_nothing(one):
    for stage in ("0", "1", "3", "2+offload"):
        assert one[f"empty {stage}"] < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_equals_uninterrupted_bit_for_bit(runs, ranks):
    for found in runs[0][ranks]:
        for stage in (*STAGES, "3+offload"):
            assert found[f"resumed {stage}"] == 0
            assert found[f"through {stage}"] < 1e-5  # saving has not changed it
            assert found[f"rate {stage}"] == [4, pytest.approx(0.9**4)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_on_another_number_of_processes_is_exact(runs, ranks):
    for found in runs[0][ranks]:
        for stage in ("1", "2", "3", "3+offload"):
            resharded = found[f"resharded {stage}"]
            assert resharded["differ"] == []
            assert resharded["decay"] == [0.1, 0.0]
            assert resharded["rate"] == pytest.approx(0.9**2)
            assert resharded["steps"] == 2 + 2
            assert resharded["went on"] < 1e-6


def test_no_temporary_files_are_left(runs):
    assert list(runs[1].rglob(".fasttrain*")) == []


def test_another_world_size_is_refused(runs):
    assert "saved by 1 processes, and this run has 2" in runs[0][2][0]["other world"]
    assert runs[0][2][1]["other world"] == runs[0][2][0]["other world"]
    assert "saved by 2 processes, and this run has 1" in runs[0][1][0]["other world"]


def test_checkpoints_that_cannot_be_resharded_are_refused_on_all_ranks(two):
    for rank in two:
        assert "universal=True with SGD" in rank["sgd universal"]
        assert "under ZeRO stage 2, and this run is stage 3" in rank["other stage"]


def test_chosen_stage_fits_the_smallest_rank(two):
    assert two[0]["chosen"] == two[1]["chosen"] == ["2+offload", 2]  # stage 0 fits the first rank, not the second


def test_shortage_on_one_rank_is_an_error_on_all(one, two):
    for found in (one, *two):
        assert "No stage fits" in found["too small"]
        assert "GiB on each device" in found["too small"]


def test_adapters_quantised_layers_and_the_fused_loss_train_as_under_ddp(two):
    for name in ("LoRA", "QLoRA int8", "QLoRA nf4", "FusedLossHead"):
        for stage in (2, 3):
            assert two[0][f"{name} {stage}"] < 1e-5


@pytest.mark.parametrize("run", ["LoRA 2", "QLoRA 3"])
def test_adapter_only_checkpoints_resume_bit_for_bit(two, run):
    assert len(two[0][f"held {run}"]) == 8
    assert all("lora_" in name for name in two[0][f"held {run}"])
    for found in two:
        assert found[f"kept {run}"] == 0
        assert "the checkpoint was trained with another base model than TinyLM" in found[f"kept {run} other base"]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_fabric_strategy_accumulates_clips_and_resumes(two, kind):
    stages = IN_FABRIC[kind]
    for rank in two:
        for stage in stages:
            found = rank[f"fabric {kind} {stage}"]
            assert found["losses"] < 1e-5
            assert found["weights"] < 1e-4
            assert found["resumed"]
            assert found["norm"] == pytest.approx(rank[f"fabric {kind} {stages[0]}"]["norm"], rel=1e-5)


def test_loss_is_divided_once_under_accumulation(one):
    assert one["scale ours"] == pytest.approx(1.0)
    assert one["scale stock"] == pytest.approx(0.5)


def test_step_count_is_correct_with_incomplete_windows(one):
    trainers, engines = one["steps ours"]
    assert trainers == engines == 4
    trainers, engines = one["steps stock"]
    assert trainers != engines


def test_optimizer_hooks_fire_once_per_step(one):
    assert set(one["hooks ours"].values()) == {4}
    assert one["hooks stock"]["on_before_optimizer_step"] == one["hooks stock"]["optimizer_step"] == 6


def test_validation_keeps_the_hooks_of_the_model(one):
    assert one["validation ours"] == 5
    assert one["validation stock"] == 0


def test_fabric_does_not_clip_by_default(one):
    assert one["unclipped ours"] < 1e-6
    assert one["unclipped stock"] > 1e-3


def test_reused_folder_holds_no_old_shards(one):
    assert one["reused ours"] == 0
    assert "Expected 1 of '*_optim_states.pt'" in one["reused stock"]


def test_a_module_is_fitted_validated_and_fitted_again(one):
    assert one["fit twice"] < 1e-6
    assert one["hooks left"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_trains_with_one_trainer_after_another_and_is_freed(one, two, stage):
    for found in (one, *two):
        assert found[f"two Trainers {stage}"] < 1e-6
        assert found[f"freed {stage}"]


def test_the_destructor_of_an_earlier_engine_leaves_parameters_alone(one):
    for name in ("kept", "kept 1", "kept 2"):
        assert one[name]
        assert all(one[name])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_trains_in_one_fabric_after_another(one, two, stage):
    assert all(found[f"two Fabrics {stage}"] < 1e-6 for found in (one, *two))


def test_a_model_with_shards_that_the_strategy_cannot_use_is_refused(one):
    by = {"stage 3": "ZeRO stage 3", "FSDP2": "FSDP2"}
    usable = {("stage 3", "stage 3"), ("FSDP2", "FSDP2"), ("FSDP2", "one device")}
    for first, then in itertools.product(by, ("stage 3", "stage 1", "auto", "FSDP2", "DDP", "one device")):
        said = one[f"{first}, then {then}"]
        if (first, then) in usable:
            assert said == "no error"
        else:
            assert f"with a model that is sharded by {by[first]}" in said
    assert "FabricZeROStrategy with a model that is sharded by ZeRO stage 3" in one["in Fabric"]


def test_a_checkpoint_of_any_lower_stage_can_be_evaluated(one):
    assert one["validated"] == 0


def test_checkpoint_inside_a_window_warns(one):
    assert len(one["window"]) == 1
    assert "is not saved" in one["window"][0]


def test_failed_save_is_an_error_on_all_ranks_and_keeps_the_old_checkpoint(one, two):
    assert "no space left on device" in one["failed save"]
    assert "another rank failed" in two[0]["failed save"]
    assert "no space left on device" in two[1]["failed save"]
    assert all(found["untouched"] for found in (one, *two))


def test_damaged_checkpoint_is_skipped_on_all_ranks(one, two):
    for found in (one, *two):
        assert found["fell back"] == 4  # from step 2 of the other checkpoint


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("clipping by hand", "your code would clip nothing"),
        ("two optimizers", "multiple optimizers"),
        ("LBFGS", "closure several times a step"),
        ("Adafactor", "Adafactor with ZeRO"),
        ("Distillation", "Distillation + ZeROStrategy"),
        ("EagerGradientRelease", "needs them in the next step"),
        ("no manifest", "corrupt"),
        ("hostile", "objects of posix.system"),
    ],
)
def test_unsupported_features_are_refused_with_the_reason(one, what, words):
    assert words in one[what]


# In this process: refusals need no process group.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [4, -1, "2 + offload", "1+offload"])
def test_an_unknown_stage_is_refused_with_the_known_ones(kind, stage):
    with pytest.raises(ValueError, match=r"no such stage. Use stage='auto', or one of 0, 1, 2, 3, '2\+offload'"):
        kind(stage=stage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 2, "config": {"zero_optimization": {"stage": 1}}}, "both set the stage"),
        ({"memory_gib": 8, "config": {"zero_optimization": {"stage": 1}}}, "used by stage=.auto. only"),
        ({"stage": 2, "memory_gib": 8}, "used by stage=.auto. only"),
        ({"stage": 2, "offload_optimizer": True}, "the stage determines the placement"),
        ({"offload_parameters": True}, "the stage determines the placement"),
        ({"config": {"zero_optimization": {}}, "overlap_comm": False}, "would be ignored"),
        ({"stage": "3+nvme"}, "no folder to offload to"),
        ({"memory_gib": 0}, "it must be greater than 0"),
        ({"headroom": 1.0}, "stays free. Use a number from 0 to below 1"),
    ],
)
def test_contradicting_settings_are_refused(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        kind(**arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no such file"), ("{'a': 1}", "not valid JSON"), ("[1]", "contains a list instead of")],
)
def test_a_config_that_cannot_be_read_is_refused(kind, content, words, tmp_path):
    path = tmp_path / "deepspeed.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=f"config='{path}': .*{words}"):
        kind(config=path)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_lightning_are_used_beside_a_config(kind, tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    strategy = kind(config=path, load_full_weights=True, loss_scale=2.0, timeout=timedelta(seconds=9))
    assert strategy.stage == 3
    assert (strategy.load_full_weights, strategy.loss_scale, strategy._timeout) == (True, 2.0, timedelta(seconds=9))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_on_a_cpu_is_refused_before_anything_starts(precision):
    with pytest.raises(ValueError, match="no float16 there. Use precision='bf16"):
        trainer(strategy=ZeROStrategy(stage=2), precision=precision, devices=2)
    with pytest.raises(ValueError, match="no float16 there"):
        L.Fabric(accelerator="cpu", strategy=FabricZeROStrategy(stage=2), precision=precision, devices=2)


@pytest.mark.parametrize("kind", KINDS)
def test_without_deepspeed_the_extra_is_named(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-fasttrain\[deepspeed\]'"):
        kind(stage=2)


DATA = TensorDataset(torch.arange(10.0))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"batch_size": 4, "shuffle": True}, [0.0, 1.0, 2.0, 3.0]),
        ({"batch_size": None}, 0.0),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 2, drop_last=False)}, [0.0, 1.0]),
    ],
)
def test_batch_is_read_without_changing_the_data_order(how, expected):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state(), torch.get_rng_state()
    assert read_batch(DataLoader(DATA, generator=generator, **how))[0].tolist() == expected
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("stage", KNOWN)
def test_stages_have_lightnings_meaning(stage, tmp_path):
    config = ZeROStrategy(stage=stage, nvme_path=str(tmp_path)).config
    zero = config["zero_optimization"]
    level, _, where = stage.partition("+")
    device = {"": None, "offload": "cpu", "nvme": "nvme"}[where]
    assert zero["stage"] == int(level)
    assert zero.get("offload_optimizer", {}).get("device") == device
    assert zero.get("offload_param", {}).get("device") == (device if level == "3" else None)
    assert config["gradient_clipping"] == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stage", ["2+offload", "3+offload"])
def test_offload_on_one_gpu_trains_as_on_the_cpu(stage, tmp_path):
    code = "import sys; from tests.strategy.zero_scenarios import on_gpu; on_gpu(sys.argv[1], sys.argv[2])"
    out = tmp_path / "found.json"
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", code, stage, str(out)], cwd=ROOT, env=environment, check=True, timeout=400)
    assert json.loads(out.read_text())["losses"] < 1e-4


@pytest.mark.parametrize("offload", [False, True])
def test_lightnings_own_strategy_is_not_released(offload):
    check_together([ft.EagerGradientRelease()], DeepSpeedStrategy(stage=2, offload_optimizer=offload))
    ours = ZeROStrategy(stage="2+offload" if offload else 2)
    if offload:
        with pytest.raises(ValueError, match=r"EagerGradientRelease \+ ZeROStrategy: .* needs them in the next step"):
            check_together([ft.EagerGradientRelease()], ours)
    else:
        check_together([ft.EagerGradientRelease()], ours)


def test_parameters_that_deepspeed_cannot_broadcast_are_made_contiguous_or_refused():
    net = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = net.weight.detach().clone()
    make_broadcastable_(net)
    assert net.weight.is_contiguous()
    assert torch.equal(net.weight, before)
    net.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="parameter 'scale' of shape .*FSDP2Strategy"):
        make_broadcastable_(net)
