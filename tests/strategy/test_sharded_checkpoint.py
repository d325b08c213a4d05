"""Sharded checkpoints in one plain process: round trips, hostile and damaged folders, background saves."""

import json
import os
import pickle
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.background_save import BackgroundSave, to_host
from lightning_fasttrain.checkpoint.checkpoint_folder import verify_checkpoint
from lightning_fasttrain.checkpoint.newest_checkpoint import KEY, RunMark, whole_or_older
from lightning_fasttrain.core.safe_load import CorruptCheckpoint
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import (
    INDEX,
    full_checkpoint,
    full_state_dict,
    load_full_,
    load_sharded_,
    save_sharded,
)
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state
from tests.support.nets import TinyLM, largest_difference, lm_batches, weights


def trained(steps=2, make=torch.optim.AdamW, **settings):
    module = TinyLM(optimizer=make, **settings)
    optimizer = module.configure_optimizers()
    step(module, optimizer, lm_batches(steps))
    return module, optimizer


def step(module, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()


def saved(folder, module, optimizer, **rest):
    save_sharded(folder, module.state_dict(), {"o": named_state(module, optimizer)}, rest)
    return folder


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
def test_model_optimizer_and_rest_resume_bit_for_bit(tmp_path, make):
    module, optimizer = trained(make=make)
    saved(tmp_path / "c", module, optimizer, step=2, names=["a", None], nested={"x": torch.ones(2)})
    again, other = trained(0, make=make)
    rest = load_sharded_(tmp_path / "c", again, {"o": other})
    assert (rest["step"], rest["names"], rest["nested"]["x"].sum()) == (2, ["a", None], 2)
    for pair in ((module, optimizer), (again, other)):
        step(*pair, lm_batches(3, seed=9))
    assert largest_difference(weights(module), weights(again)) == 0


def test_optimizer_without_steps_is_saved_without_state(tmp_path):
    module, optimizer = trained(0)
    saved(tmp_path / "c", module, optimizer)
    assert optimizer.state_dict()["state"] == {}
    again, other = trained(2)
    load_sharded_(tmp_path / "c", again, {"o": other})
    assert other.state_dict()["state"] == {}


def test_parameter_order_may_differ_if_names_agree(tmp_path):
    module, optimizer = trained()
    saved(tmp_path / "c", module, optimizer)
    again = TinyLM()
    turned = torch.optim.AdamW(list(again.parameters())[::-1], lr=0.5)
    load_sharded_(tmp_path / "c", again, {"o": turned})
    expected = optimizer.state[module.blocks[1].up.weight]["exp_avg"]
    assert torch.equal(turned.state[again.blocks[1].up.weight]["exp_avg"], expected)
    assert turned.param_groups[0]["lr"] == 0.01
    split = torch.optim.AdamW([{"params": [p]} for p in again.parameters()])
    with pytest.raises(ValueError, match="AdamW in .* has 1 parameter groups: this one has 19"):
        load_sharded_(tmp_path / "c", again, {"o": split})


@pytest.mark.parametrize(
    ("module", "strict", "message"),
    [
        (TinyLM(depth=2), True, "the model lacks blocks.2.down.bias"),
        (TinyLM(depth=4), True, "it lacks blocks.3.down.bias"),
        (TinyLM(depth=4), False, None),
    ],
)
def test_other_models_are_refused_unless_not_strict(tmp_path, module, strict, message):
    saved(tmp_path / "c", *trained())
    if message is None:
        load_sharded_(tmp_path / "c", module, strict=strict)
    else:
        with pytest.raises(ValueError, match=message):
            load_sharded_(tmp_path / "c", module, strict=strict)


def test_full_model_can_be_saved_as_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    module, optimizer = trained()
    saved(tmp_path / "c", module, optimizer)
    save_file(full_state_dict(tmp_path / "c"), tmp_path / "whole.safetensors")
    again = TinyLM()
    again.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    assert largest_difference(weights(module), weights(again)) == 0


def test_full_checkpoint_uses_torchs_parameter_indices(tmp_path):
    module, optimizer = trained()
    saved(tmp_path / "c", module, optimizer, epoch=3)
    whole = full_checkpoint(tmp_path / "c")
    assert whole["epoch"] == 3
    [state], expected = whole["optimizer_states"], optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert all(torch.equal(state["state"][i][k], v) for i, s in expected["state"].items() for k, v in s.items())


def test_checkpoint_file_of_one_device_loads(tmp_path):
    module, optimizer = trained()
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    torch.save(state, tmp_path / "file.ckpt")
    again, other = trained(0)
    assert load_full_(tmp_path / "file.ckpt", again, {"o": other}, strict=True) == {"epoch": 1}
    for pair in ((module, optimizer), (again, other)):
        step(*pair, lm_batches(2, seed=9))
    assert largest_difference(weights(module), weights(again)) == 0


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_rest_that_would_run_code_is_refused(tmp_path):
    folder = saved(tmp_path / "c", *trained())
    torch.save({"rest": Runs(tmp_path / "ran")}, folder / "rest.pt")
    with pytest.raises(pickle.UnpicklingError, match="posix.system"):
        load_sharded_(folder, TinyLM())
    assert not (tmp_path / "ran").exists()


def test_torchs_own_pickled_index_is_never_read(tmp_path):
    """With a negative control: in torch's own reader, the command runs."""
    folder = saved(tmp_path / "c", *trained())
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    load_sharded_(folder, TinyLM())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):
        torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    assert (tmp_path / "ran").exists()


def test_folder_with_torchs_own_index_alone_is_refused_with_a_way_to_convert_it(tmp_path):
    folder = saved(tmp_path / "c", *trained())
    (folder / INDEX).unlink()
    with pytest.raises(CorruptCheckpoint, match=r"has no index.json: .* earlier version .* convert it with torch"):
        load_sharded_(folder, TinyLM())


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["model.blocks.0.down.bias"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda entry: entry["shards"][0].__setitem__(2, "../elsewhere"),
            "points out of its folder, to",
        ),
        (lambda entry: entry["shards"][0].__setitem__(2, "elsewhere"), "names elsewhere: that file is missing"),
        (lambda entry: entry["shards"][0].__setitem__(3, -1), "not a list of natural numbers"),
        (lambda entry: entry["shards"][0].__setitem__(4, 2**40), "but its files have"),
        (lambda entry: entry.update(size=[2**40]), "shards of model.blocks.0.down.bias are missing"),
        (lambda entry: entry.update(size=[2**40], shards=[[[0], [2**40], "__0_0.distcp", 0, 1]]), "its tensors need"),
        (lambda entry: entry.update(dtype="os.system"), "does not fit together .KeyError: 'os.system'"),
    ],
)
def test_index_that_does_not_fit_its_files_is_refused(tmp_path, change, message):
    folder = saved(tmp_path / "c", *trained())
    change_index(folder, change)
    with pytest.raises(CorruptCheckpoint, match=message):
        load_sharded_(folder, TinyLM())


@pytest.mark.parametrize("data", [b"", b"not an index", pickle.dumps({"a": 1}), b'{"a": 1}', b"[1]"])
def test_damaged_index_raises_corrupt_checkpoint(tmp_path, data):
    folder = saved(tmp_path / "c", *trained())
    (folder / INDEX).write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        load_sharded_(folder, TinyLM())


def test_unreadable_state_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"entry \['rest'\]\['callbacks'\]\['mine'\]\[0\] of class PosixPath"):
        save_sharded(tmp_path / "c", {}, rest={"callbacks": {"mine": [tmp_path]}, "fine": 1})
    assert list(tmp_path.iterdir()) == []


def test_for_a_changed_folder_an_older_one_of_the_same_run_is_chosen_to_resume(tmp_path):
    ours, other = RunMark(), RunMark()
    for name, run, step in (("old", ours, 1), ("new", ours, 2), ("newer", ours, 3), ("of another run", other, 2)):
        saved(tmp_path / name, *trained(1), **{KEY: run.facts(step)})
    assert whole_or_older(tmp_path / "new", substitute=True) == tmp_path / "new"
    (tmp_path / "new" / INDEX).unlink()
    with pytest.raises(CorruptCheckpoint, match="index.json is missing"):
        full_state_dict(tmp_path / "new")
    with pytest.raises(CorruptCheckpoint, match="index.json is missing"):
        whole_or_older(tmp_path / "new", substitute=False)
    with pytest.warns(ft.FastTrainWarning, match="old is loaded, an older one of the same run"):
        assert whole_or_older(tmp_path / "new", substitute=True) == tmp_path / "old"
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        whole_or_older(tmp_path / "never", substitute=True)


def test_complete_save_that_was_killed_before_renaming_is_used(tmp_path):
    saved(tmp_path / "c", *trained())
    (tmp_path / "c").rename(tmp_path / ".fasttrain-tmp-c")
    assert whole_or_older(tmp_path / "c", substitute=True) == tmp_path / "c"
    verify_checkpoint(tmp_path / "c")


def test_a_second_save_of_the_same_name_leaves_no_file_of_the_first(tmp_path):
    saved(tmp_path / "c", *trained())
    (tmp_path / "c" / "__9_0.distcp").write_bytes(b"stale")
    saved(tmp_path / "c", *trained())
    assert "__9_0.distcp" not in verify_checkpoint(tmp_path / "c")["files"]


def test_background_save_writes_the_state_at_its_start():
    gate, written = threading.Event(), []

    def write(state):
        gate.wait(10)
        written.append(state)

    save, weight = BackgroundSave(write), torch.ones(2)
    save.start({"nested": [weight], "n": 1})
    weight.zero_()
    assert save.in_flight
    gate.set()
    save.wait()
    assert written[0]["nested"][0].tolist() == [1.0, 1.0]


def test_next_save_waits_for_the_previous_one():
    gate, order = threading.Event(), []

    def write(name):
        gate.wait(10)
        order.append(name)

    save = BackgroundSave(write)
    save.start("first")
    threading.Timer(0.2, gate.set).start()
    save.start("second")
    assert order[0] == "first"
    save.wait()
    assert order == ["first", "second"]


def test_error_is_raised_by_the_next_save_and_older_checkpoints_stay():
    removed = []

    def write(state):
        raise OSError("disk full")

    save = BackgroundSave(write)
    save.start({})
    save.do_afterwards(lambda: removed.append("old"))
    with pytest.raises(OSError, match="disk full"):
        save.start({})
    assert removed == []
    save.wait()


def test_older_checkpoints_are_removed_after_the_newer_one_is_complete():
    gate, removed = threading.Event(), []
    save = BackgroundSave(lambda state: gate.wait(10))
    save.start({})
    save.do_afterwards(lambda: removed.append("old"))
    assert removed == []
    gate.set()
    save.wait()
    assert removed == ["old"]
    save.do_afterwards(lambda: removed.append("older"))
    assert removed == ["old", "older"]


def test_failing_run_reports_an_incomplete_checkpoint():
    gate = threading.Event()
    save = BackgroundSave(lambda state: gate.wait(10))
    save.start({})
    with pytest.warns(UserWarning, match="the last checkpoint was not completed"):
        save.give_up(0.05)
    save.wait()  # does not wait for an abandoned save
    gate.set()
    save.start({})
    save.wait()


def test_error_at_exit_is_printed(capfd):
    def write(state):
        raise OSError("disk full")

    save = BackgroundSave(write)
    save.start({})
    save._finish()  # called at exit
    said = capfd.readouterr().err
    assert "the last checkpoint was not completed" in said
    assert "OSError: disk full" in said
    save.wait()


def test_the_strategy_keeps_an_older_checkpoint_until_the_newer_one_is_complete(tmp_path):
    gate, older, strategy = threading.Event(), tmp_path / "older", FSDP2Strategy(async_checkpoints=True)
    older.mkdir()
    strategy._background = BackgroundSave(lambda state: gate.wait(10))
    strategy._background.start({})
    strategy.remove_checkpoint(older)
    assert older.exists()
    gate.set()
    strategy._background.wait()
    assert not older.exists()


def test_copies_share_no_memory():
    tensor = torch.ones(3)
    copied = to_host({"a": [tensor, (tensor, "x")], "b": None})
    assert copied["a"][0].data_ptr() != tensor.data_ptr() != copied["a"][1][0].data_ptr()
    assert copied["a"][1][1] == "x"
    Pair = namedtuple("Pair", "one other")
    assert to_host(Pair(tensor, 2)).other == 2


def test_rank_local_optimizer_state_is_named():
    module = nn.Linear(2, 2)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="SGD holds 1 parameters that the model no longer has"):
        named_state(module, foreign)
