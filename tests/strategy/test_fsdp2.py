"""FSDP2 on two real processes with gloo, against one process and against DDP. One launch serves all tests."""

import copy
import json
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.broadcast_weights import list_shared_buffers
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import (
    ShardReader,
    full_checkpoint,
    full_state_dict,
    save_sharded,
)
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state
from tests.support.nets import ShallowLM, WideLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_code, run_on_two_gpus, run_ranks

ROOT = Path(__file__).parent.parent.parent
CASTS_BYTES = TorchVersion(torch.__version__) < "2.12"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one plain process: its checkpoint as a file and as a folder, and its weights after another epoch."""
    folder = tmp_path_factory.mktemp("fsdp2")
    module, batches = ShallowLM(), lm_batches(2, size=6, seed=3)
    t = trainer()
    t.fit(module, as_loader(batches))
    t.save_checkpoint(folder / "single.ckpt")
    rest = torch.load(folder / "single.ckpt", weights_only=True)
    optimizers = {"optimizer_0": named_state(module, t.optimizers[0])}
    rest.pop("optimizer_states")
    save_sharded(folder / "one", rest.pop("state_dict"), optimizers, rest)
    ends, whole = {}, ft.QLoRA(rank=2, checkpoint="full")
    for name, net, techniques in (
        ("single", ShallowLM, []),
        ("single-lora", ShallowLM, [ft.LoRA(rank=2)]),
        ("single-qlora", WideLM, [whole]),
    ):
        if techniques:
            torch.manual_seed(3)
            t = trainer(techniques)
            t.fit(net(), as_loader(batches))
            t.save_checkpoint(folder / f"{name}.ckpt")
        again = net()
        again_from = {"ckpt_path": folder / f"{name}.ckpt", "weights_only": True}
        trainer(techniques, max_epochs=2).fit(again, as_loader(batches), **again_from)
        ends[f"{name}.ckpt"] = weights(again)
    return folder, {**ends, "one": ends["single.ckpt"]}


@pytest.fixture(scope="module")
def found(single):
    folder, _ = single
    run_ranks("tests.strategy.fsdp2_scenarios", folder / "found.json", folder, log=folder / "log", timeout_s=240)
    return json.loads((folder / "found.json").read_text())


def largest(found, *keys):
    return max(reduce(getitem, keys, rank) for rank in found)


@pytest.mark.parametrize("run", ["adamw", "sgd"])  # the first with checkpointing and compiled blocks
def test_losses_and_weights_equal_those_of_one_process(found, run):
    """With accumulation, incomplete windows at the end of epochs, and clipping, on unequal batches."""
    assert largest(found, f"{run} losses") < 1e-5
    assert largest(found, f"{run} weights") < 1e-4
    assert largest(found, f"{run} agree") == 0
    assert {rank[f"{run} steps"] for rank in found} == {2 * 2 + 1}


def test_window_with_unequal_targets_equals_one_concatenated_batch(found):
    assert largest(found, "concatenated") < 1e-6
    assert {rank["concatenated reductions"] for rank in found} == {3 * 3}  # three steps, two blocks and the root


def test_gradients_are_reduced_once_per_step(found):
    for rank in found:
        assert rank["reductions"] == {"ours": 2 * 3, "each": 4 * 3, "stock": 4 * 3}
        for name in ("ours", "each", "stock"):
            assert rank[f"reductions {name} weights"] < 1e-6


EXACT = ("hybrid", "kept", "number", "offload", "blocks", "value", "fused", "bf16-true", "no blocks")


@pytest.mark.parametrize("option", EXACT)
def test_options_do_not_change_training(found, option):
    assert largest(found, f"option {option}") < 1e-6
    assert largest(found, f"option {option} agree") == 0


def test_bf16_mixed_keeps_float32_weights(found):
    assert 0 < largest(found, "option bf16-mixed") < 2e-2  # weights are rounded before norms too
    assert largest(found, "option bf16-mixed agree") == 0
    assert found[0]["option bf16-mixed dtype"] == "torch.float32"
    assert found[0]["option bf16-true dtype"] == "torch.bfloat16"


def test_float32_residual_makes_bf16_mixed_equal_to_ddp(found):
    assert largest(found, "option float32 residual") < 1e-6
    assert largest(found, "option float32 residual agree") == 0


def test_running_statistics_are_shared_and_saved_as_under_ddp(found):
    for rank, tells in enumerate(found):
        shared, apart = tells["buffers True"], tells["buffers False"]
        assert shared["ranks validate"] == 0
        assert (apart["ranks validate"] > 0) is (rank > 0)
        for seen in (shared, apart):
            assert seen["beside DDP"] < 1e-6 < 1e-2 < seen["moved"]
            assert seen["saved"] == 0
        assert shared["resumed"] == [0, 0]


def test_constant_buffers_are_not_shared():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
    net[0].register_buffer("codes", torch.ones(2, 2))
    net[0].register_buffer("cache", torch.ones(2), persistent=False)
    statistics = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(list_shared_buffers(net)) == ["0.codes", *statistics]
    net[0].register_buffer("packed", torch.ones(2, 2, dtype=torch.int32))  # beside which codes are scales
    assert list(list_shared_buffers(net)) == statistics


def test_blocks_are_found_automatically_or_by_name(found):
    assert found[0]["option kept blocks"] == ["blocks.0", "blocks.1"]
    assert found[0]["option blocks blocks"] == ["blocks.0"]


# fmt: off
TECHNIQUES = [
    "LoRA", "QLoRA", "IA3", "FusedLossHead", "Distillation", "ActivationCheckpointing", "ActivationOffload",
    "EagerGradientRelease", "MicroBatching", "DevicePrefetch", "experts in 4 bits",
]
# fmt: on


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_techniques_train_as_under_ddp(found, technique):
    for rank in found:
        difference, agreement = rank["techniques"][technique]
        assert difference < 1e-6
        assert agreement == 0


@pytest.mark.parametrize("loop", ["validation in a window", "manual"])
def test_other_loops_train_as_under_ddp(found, loop):
    assert largest(found, loop) < 1e-6


def test_a_rank_without_the_mask_of_the_others_does_not_leave_them_waiting(found):
    for rank in found:
        difference, agreement, saved = rank["mask on one rank"]
        assert difference < 1e-6
        assert agreement == saved == 0


def test_step_wrappers_are_removed_after_a_run(found):
    assert all(rank["left behind"] == [] for rank in found)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OptimizerInBackward", "OptimizerInBackward with FSDP2Strategy: it owns the gradients"),
        ("GradualUnfreezing", "GradualUnfreezing with FSDP2Strategy: the strategy shards the parameters"),
        ("WeightAveraging", "FSDP2Strategy + WeightAveraging: it averages a copy of the whole model"),
        ("GaLoreAdamW", "a DTensor of shape (16, 8): it is quantized or sharded"),
    ],
)
def test_callbacks_without_shard_support_are_refused(found, name, why):
    for rank in found:
        assert why in rank["refused"][name]


def test_every_rank_starts_with_the_weights_of_rank_zero(found):
    assert largest(found, "drawn") == 0
    assert largest(found, "drawn agree") == 0


def test_a_model_on_the_meta_device_gets_weights_and_buffers_of_rank_zero(found):
    assert largest(found, "meta on rank 1") == 0
    assert [rank["meta scale"] for rank in found] == [[1.0] * 3] * 2


def test_rank_zero_initializes_a_model_on_the_meta_device(found):
    assert all(rank["was empty"] for rank in found)
    assert largest(found, "meta everywhere agree") == 0
    assert all(last < first for first, last in (rank["meta everywhere trained"] for rank in found))


def test_steps_may_use_layers_directly(found):
    assert largest(found, "direct") == 0


def test_quantised_weights_that_differ_are_refused_on_all_ranks(found):
    assert "another rank has refused its model" in found[0]["other quantised"]
    assert "rank 1 has quantised other weights than rank 0 in 'blocks.0.up" in found[1]["other quantised"]


def test_models_that_differ_between_ranks_are_refused(found):
    assert "another rank has refused its model" in found[0]["other build"]
    assert "rank 1 has built another model than rank 0: blocks.2" in found[1]["other build"]


def test_layers_replaced_after_sharding_are_named(found):
    for rank in found:
        assert "'blocks.1.up.weight', 'blocks.1.up.bias'" in rank["swapped"]


def test_an_optimizer_of_old_parameters_is_refused(found):
    assert all("SGD holds 13 of 13 parameters that the model no longer has" in rank["stale"] for rank in found)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_resumed_equals_uninterrupted_bit_for_bit(found, kind):
    for rank in found:
        assert rank[f"{kind} steps"] == [6, 2]
        assert rank[f"{kind} losses"] == [0.0] * 2
    assert largest(found, f"{kind} resumed") == 0


def test_checkpoint_resumes_on_another_mesh(found):
    assert largest(found, "hybrid resumed") < 1e-6


@pytest.mark.parametrize("kind", ["LoRA", "QLoRA"])
def test_adapter_only_checkpoints_resume_bit_for_bit(found, single, kind):
    assert largest(found, f"{kind} resumed") == 0
    folder, _ = single
    held = ShardReader(folder / kind / "epoch=0.ckpt").list_tensors()  # of model and optimizer
    assert len(held) == 4 * 8
    assert all("lora_" in name for name in held)
    for rank in found:
        assert "the checkpoint was trained with another base model than FSDPOtherBase" in rank[f"{kind} other base"]
        assert "lora_A.default.weight has shape [2, " in rank[f"{kind} other rank"]


@pytest.mark.parametrize("run", ["narrow", "wide", "offload", "bf16-mixed", "experts"])
def test_sharded_4_bit_base_trains_bitwise_like_an_unsharded_one(found, run):
    """Also with activation checkpointing, and for rows that start within a block of 64."""
    for rank in found:
        seen = rank[f"4 bits {run}"]
        assert set(seen["losses"]) <= {0.0}
        assert (seen["weights"], seen["agree"], seen["keys"]) == (0, 0, True)
        assert seen["moved"] > 1e-3
        whole, part = seen["packed"]
        assert part == (whole if run == "bf16-mixed" and CASTS_BYTES else whole / 2)


def test_a_whole_checkpoint_of_a_4_bit_base_resumes_exactly_and_loads_in_a_plain_model(found, single):
    assert largest(found, "4 bits resumed") == 0
    folder, _ = single
    state, plain = full_state_dict(folder / "full" / "epoch=1.ckpt"), WideLM()
    ft.apply(plain, [ft.QLoRA(rank=2)])
    assert set(state) == set(plain.state_dict())
    plain.load_state_dict(state)
    end = torch.load(folder / "qlora.pt", weights_only=True)["two"]
    assert largest_difference(end, plain.state_dict()) == 0
    assert plain.loss(lm_batches(1)[0]) > 0


def test_checkpoint_of_a_quantised_model_resumes_from_one_process_on_two(found, single):
    folder, expected = single
    end = torch.load(folder / "qlora.pt", weights_only=True)["from one"]
    trained = {name: tensor for name, tensor in end.items() if name in expected["single-qlora.ckpt"]}
    assert largest_difference(expected["single-qlora.ckpt"], trained) < 1e-6


def test_checkpoint_of_a_sharded_adapter_resumes_on_one_device(found, single, tmp_path):
    folder, _ = single
    torch.save(full_checkpoint(folder / "LoRA" / "epoch=0.ckpt"), tmp_path / "whole.ckpt")
    t = trainer([ft.LoRA(rank=2)], max_epochs=2)
    t.fit(ShallowLM(), as_loader(lm_batches(2, size=6, seed=3)), ckpt_path=tmp_path / "whole.ckpt", weights_only=True)
    assert t.global_step == 4


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_old_checkpoints_are_removed_without_leftovers(found, kind):
    assert found[0][f"{kind} kept"] == ["epoch=1.ckpt", "epoch=2.ckpt"]


def test_damaged_checkpoint_is_skipped_with_a_note(found):
    for rank in found:
        assert rank["fell back"] == [0.0, 2]  # from the previous checkpoint
    assert any("epoch=2.ckpt is corrupt" in text and "epoch=1.ckpt is loaded" in text for text in found[0]["heard"])
    assert found[1]["heard"] == []


def test_checkpoints_of_other_models_and_optimizers_are_refused(found):
    for rank in found:
        assert "there is no such checkpoint" in rank["nothing there"]
        assert "the model lacks blocks.1.down.bias" in rank["other model"]
        assert "does not match this SGD" in rank["other optimizer"]


def test_error_of_the_last_background_save_ends_the_run_on_all_ranks(found):
    assert "/dev/null" in found[0]["async error"]
    assert "could not be written: another rank failed" in found[1]["async error"]


def test_a_checkpoint_inside_a_window_warns(found):
    assert any("inside an accumulation window" in text for text in found[0]["window"])


def test_unreadable_state_is_refused_when_saving(found):
    for rank in found:  # each rank checks its own state, so each names it
        assert "entry ['rest']['odd']['deep'][1] of class Unreadable" in rank["odd"]
    assert found[0]["odd left"] == []


@pytest.mark.parametrize("name", ["single.ckpt", "one", "single-lora.ckpt"])
def test_checkpoint_of_one_process_resumes_on_two(found, single, name):
    folder, expected = single
    assert all(rank[f"from {name}"] == [4, 0.0] for rank in found)
    assert largest_difference(expected[name], torch.load(folder / f"from {name}.pt", weights_only=True)) < 1e-6


def test_a_checkpoint_of_two_processes_loads_in_one_plain_process(found, single):
    folder, _ = single
    expected = torch.load(folder / "expected.pt", weights_only=True)
    state = full_state_dict(folder / "async" / "epoch=2.ckpt")
    assert list(state) == list(ShallowLM().state_dict())
    assert largest_difference(expected, state) == 0
    ShallowLM().load_state_dict(state)


def test_checkpoint_of_two_processes_resumes_on_one_device(found, single, tmp_path):
    folder, _ = single
    torch.save(full_checkpoint(folder / "async" / "epoch=1.ckpt"), tmp_path / "whole.ckpt")
    module = ShallowLM()
    t = trainer(max_epochs=3)
    t.fit(module, as_loader(lm_batches(2, size=6, seed=3)), ckpt_path=tmp_path / "whole.ckpt", weights_only=True)
    steps = {state["step"].item() for state in t.optimizers[0].state.values()}
    assert (t.global_step, steps) == (6, {6.0})


ONE_PROCESS = """
import sys, torch
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import full_state_dict
from tests.support.nets import ShallowLM, WideLM, as_loader, largest_difference, lm_batches, trainer, weights
import lightning as L

folder, batches = sys.argv[1], lm_batches(2)
full = lambda module: {name: value.full_tensor() for name, value in weights(module).items()}

class Loaded(L.Callback):
    def on_train_start(self, trainer, pl_module):
        assert largest_difference(full_state_dict(folder), full(pl_module)) == 0
        assert {s["step"].item() for s in trainer.optimizers[0].state.values()} == {4.0}

t = trainer([Loaded()], devices=1, max_epochs=3, strategy=FSDP2Strategy())
t.fit(ShallowLM(), as_loader(batches), ckpt_path=folder)
assert t.global_step == 6
batches = lm_batches(3)
plain, sharded = ShallowLM(), ShallowLM()
trainer(accumulate_grad_batches=2, gradient_clip_val=0.1).fit(plain, as_loader(batches))
t = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1, devices=1, strategy=FSDP2Strategy(offload="cpu"))
t.fit(sharded, as_loader(batches))
assert largest_difference(weights(plain), full(sharded)) < 1e-6
"""


def test_one_sharded_process_trains_like_a_plain_one(found, single, tmp_path):
    folder, _ = single
    run_code(ONE_PROCESS, folder / "sync" / "epoch=1.ckpt", folder=tmp_path)


def test_validation_keeps_shards_and_a_second_fit_continues(found):
    for rank in found:
        assert rank["validated"] == rank["validated again"] == rank["validated alone"] > 0
    assert largest(found, "second fit") == 0
    assert all(rank["moved in second fit"] > 0 for rank in found)
    assert [rank["new groups in second fit"] for rank in found] == [0, 0]


def test_fabric_trains_with_an_optimizer_created_before_setup(found):
    assert largest(found, "fabric") < 1e-4
    assert largest(found, "fabric resumed") == 0
    assert {rank["fabric reductions"] for rank in found} == {4 * 3}
    assert all(rank["fabric late moved"] > 1e-3 for rank in found)


def test_fabric_shares_running_statistics_before_a_forward(found):
    assert [rank["fabric buffers"][0] > 0 for rank in found] == [False, True]
    assert [rank["fabric buffers"][1] for rank in found] == [0, 0]


def test_fabric_initializes_a_meta_model_on_rank_zero(found):
    assert all(rank["fabric empty"] == [True, 0.0] for rank in found)


def test_fabric_refuses_an_optimizer_of_another_model(found):
    assert all("SGD holds 1 parameters that are in no model" in rank["fabric foreign"] for rank in found)


def test_invalid_arguments_are_errors_before_ranks_wait(found):
    for rank in found:
        assert "replicas=3 over 2 processes" in rank["replicas"]
        assert "precision='16-true' with FSDP2" in rank["float16"]
        assert "reshard_after_forward=3 over 2 shards" in rank["no number"]


@pytest.mark.parametrize("strategy", [FSDP2Strategy, FabricFSDP2Strategy])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"offload": "nvme"}, "offload='nvme': not a known choice"),
        ({"replicas": 0}, "replicas=0"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0"),
        ({"reduce_dtype": "float16"}, "reduce_dtype='float16'"),
        ({"stage": 2}, "unexpected keyword argument 'stage'"),
    ],
)
def test_unknown_options_are_refused(strategy, options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        strategy(**options)


def test_strategies_can_be_copied_before_a_run():
    assert copy.deepcopy(FSDP2Strategy(replicas=2)).sharding == FSDP2Strategy(replicas=2).sharding


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_gpu_trains_as_without_sharding(precision, offload, tmp_path):
    """In a separate process, since a process group persists."""
    code = f"""
import lightning as L, torch
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.support.nets import ShallowLM, as_loader, lm_batches, trainer, weights
ends = []
for strategy in ("auto", FSDP2Strategy(offload={offload!r})):
    module = ShallowLM()
    t = trainer(accelerator="gpu", devices=1, precision={precision!r}, strategy=strategy)
    t.fit(module, as_loader(lm_batches(6)))
    ends.append({{k: getattr(v, "full_tensor", lambda v=v: v)().cpu().float() for k, v in module.state_dict().items()}})
for name in ends[0]:
    torch.testing.assert_close(ends[0][name], ends[1][name], atol=5e-2 if "bf16" in {precision!r} else 1e-4, rtol=0)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", ["", "offload='cpu'", "replicas=2", "async_checkpoints=True"])
def test_ranks_agree_on_two_gpus(options, tmp_path):
    code = f"""
import os, time, torch, torch.distributed as dist
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.support.nets import ShallowLM, as_loader, lm_batches, trainer
rank = int(os.environ["RANK"])
module = ShallowLM()
t = trainer(accelerator="gpu", devices=2, strategy=FSDP2Strategy({options}), gradient_clip_val=0.5)
t.fit(module, as_loader(lm_batches(6, seed=rank)))
t.save_checkpoint({str(tmp_path / "two.ckpt")!r})
t.strategy.teardown()
flat = torch.cat([v.full_tensor().flatten().cuda() for v in module.state_dict().values()])
other = flat.clone()
dist.broadcast(other, 0)
assert torch.equal(flat, other)
time.sleep(1)
os._exit(0)
"""
    run_on_two_gpus(code, tmp_path)
