"""consolidate: every sharded layout gives the plain model's weights, and no code in a file is run."""

import os
import shutil
import tempfile

import pytest
import safetensors.torch
import torch

from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST, checkpoint_folder
from lightning_fasttrain.core.safe_load import CorruptCheckpoint
from lightning_fasttrain.strategy.consolidate import consolidate
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import save_sharded
from tests.strategy.zero_launches import DEPTH, launched
from tests.support.nets import TinyLM, weights
from tests.support.ranks import run_code

STAGES = ("0", "1", "2", "3", "3+offload")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launched(tmp_path_factory)[1]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "weights.safetensors"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_file_loads_into_the_plain_model_and_holds_what_was_trained(folder, out, ranks, stage):
    consolidated = consolidate(folder / f"by-{ranks}-stage-{stage}", out)
    module = TinyLM(depth=DEPTH)
    module.load_state_dict(safetensors.torch.load_file(out))
    trained = torch.load(folder / f"weights-{ranks}-{stage}", weights_only=True)
    assert all(torch.equal(value, trained[name]) for name, value in weights(module).items())
    assert consolidated.numel == sum(p.numel() for p in module.parameters())
    assert consolidated.tensors == len(module.state_dict())


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("ranks", [1, 2])
def test_result_equals_deepspeeds_own_script(folder, out, ranks, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    path = folder / f"by-{ranks}-stage-{stage}"
    consolidate(path, out)
    state, theirs = safetensors.torch.load_file(out), get_fp32_state_dict_from_zero_checkpoint(path)
    assert set(state) == set(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in state.items())


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_bfloat16_runs_give_the_float32_copies(folder, out, stage):
    consolidate(folder / f"bf16-{stage}.ckpt", out)
    state = safetensors.torch.load_file(out)
    masters = torch.load(folder / f"masters-{stage}", weights_only=True)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], value) for name, value in masters.items())
    assert any((value != value.bfloat16()).any() for value in masters.values())  # more precise than the model's own
    assert torch.equal(state["head.weight"], state["embed.weight"])


@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_frozen_and_quantised_parameters_are_included(folder, out, kind, stage):
    consolidate(folder / f"QLoRA {kind}-{stage}.ckpt", out)
    state = safetensors.torch.load_file(out)
    expected = torch.load(folder / f"QLoRA {kind}-{stage}.ckpt.expected", weights_only=True)
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value) or torch.allclose(state[name].float(), value.float(), atol=1e-6), name


def test_deepspeed_is_not_needed(folder, out, tmp_path):
    code = (
        "import sys; sys.modules['deepspeed'] = None; from lightning_fasttrain.strategy.consolidate import consolidate;"
        "consolidate(*sys.argv[1:])"
    )
    run_code(code, folder / "by-2-stage-3", out, folder=tmp_path)
    assert out.exists()


def without_manifest(path, target):
    shutil.copytree(path, target)
    (target / MANIFEST).unlink()
    return target


def test_lightnings_own_checkpoints_without_a_manifest_are_read(folder, out, tmp_path):
    assert consolidate(without_manifest(folder / "by-2-stage-2", tmp_path / "a"), out).source == "ZeRO stage 2, 2 ranks"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_missing_partition_is_reported(folder, out, tmp_path, stage):
    path = without_manifest(folder / f"by-2-stage-{stage}", tmp_path / "a")
    (next(path.glob("checkpoint/*pp_rank_1_*optim_states.pt"))).unlink()
    with pytest.raises(CorruptCheckpoint, match="shards of 1 ranks: it was saved by 2"):
        consolidate(path, out)
    assert not out.exists()


def test_partition_of_an_earlier_run_is_reported(folder, out, tmp_path):
    path = without_manifest(folder / "by-1-stage-2", tmp_path / "a")
    piece = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(folder / "by-2-stage-2" / "checkpoint" / piece, path / "checkpoint" / piece)
    with pytest.raises(CorruptCheckpoint, match="in part by an earlier run"):
        consolidate(path, out)


def test_truncated_file_is_reported(folder, out, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(folder / "by-2-stage-2", path)
    (path / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    with pytest.raises(CorruptCheckpoint, match="2 bytes of"):
        consolidate(path, out)
    (path / MANIFEST).unlink()
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        consolidate(path, out)


class Payload:
    def __init__(self, function, *arguments):
        self.does = function, arguments

    def __reduce__(self):
        return self.does


def test_no_code_in_a_file_is_run(folder, out, tmp_path):
    path = without_manifest(folder / "by-1-stage-0", tmp_path / "a")
    file = path / "checkpoint" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "callbacks": Payload(tempfile.mkdtemp, None, "was-run", str(tmp_path))}, file)
    consolidate(path, out)
    module = TinyLM(depth=DEPTH)
    module.load_state_dict(safetensors.torch.load_file(out))
    torch.save({**state, "callbacks": Payload(os.mkdir, str(tmp_path / "was-run"))}, file)
    with pytest.raises(CorruptCheckpoint, match="posix is blocked"):  # torch does not even replace this class
        consolidate(path, out)
    assert not list(tmp_path.glob("was-run*"))


def test_tag_with_a_path_outside_the_folder_is_not_followed(folder, out, tmp_path):
    path = without_manifest(folder / "by-1-stage-2", tmp_path / "a")
    (path / "latest").write_text("../../elsewhere")
    assert consolidate(path, out).source == "ZeRO stage 2, 1 ranks"


def test_fsdp2_checkpoints_are_consolidated(out, tmp_path):
    module = TinyLM()
    save_sharded(tmp_path / "step-1", module.state_dict())
    consolidated = consolidate(tmp_path / "step-1", out)
    state = safetensors.torch.load_file(out)
    assert all(torch.equal(value, state[name]) for name, value in weights(module).items())
    assert consolidated.source == "FSDP2"


def test_folder_without_a_checkpoint_is_refused(out, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        consolidate(tmp_path / "nothing", out)
    with checkpoint_folder(tmp_path / "other") as folder:
        (folder / "notes.txt").write_text("no weights")
    with pytest.raises(ValueError, match="not a sharded checkpoint"):
        consolidate(tmp_path / "other", out)


@pytest.mark.parametrize("name", ["w.pt", "model.bin", "weights"])
def test_another_ending_is_refused(name, tmp_path):
    save_sharded(tmp_path / "step-1", {"weight": torch.ones(2)})
    with pytest.raises(ValueError, match=rf"{name}.*Use '.*/{name.partition('.')[0]}\.safetensors'"):
        consolidate(tmp_path / "step-1", tmp_path / name)
    assert not (tmp_path / name).exists()
