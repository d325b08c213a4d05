"""Every technique that is not in use, with the reason from its own class."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.core.batch import kind_of_batch
from lightning_fasttrain.planner.candidates import known_techniques
from lightning_fasttrain.technique.declarations import facts_of_machine
from tests.support.nets import ShallowLM, lm_batches, trainer

BATCH = lm_batches(1)[0]
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def reasons(module=None, techniques=None, **settings):
    found = ft.planner.why_not(module or ShallowLM(), techniques=techniques, **settings)
    return {row.name: row.why_not for row in found.rows}


def test_each_technique_is_in_use_or_has_a_row():
    in_use = [ft.MicroBatching(2), ft.ActivationCheckpointing()]
    found = ft.planner.why_not(ShallowLM(), techniques=in_use)
    assert found.used == ("MicroBatching", "ActivationCheckpointing")
    names = [row.name for row in found.rows]
    assert sorted([*names, *found.used]) == sorted(kind.__name__ for kind in known_techniques())
    order = [(row.why_not is not None, row.changes_training, row.gain) for row in found.rows]
    assert order == sorted(order)  # what may be worth trying comes first, and what keeps the training
    assert len(found.as_table().rows) == 10
    assert f"{len(names) - 10} more, of which" in str(found)


def test_reasons_are_of_the_model_of_what_is_in_use_and_of_what_they_would_raise():
    of_layers = reasons(torch.nn.Linear(4, 4), [ft.EagerGradientRelease()])
    assert "no repeated blocks" in of_layers["ActivationCheckpointing"]
    assert "it holds no Hugging Face model" in of_layers["PromptTuning"]
    beside = reasons(techniques=[ft.OptimizerInBackward()])
    assert "OptimizerInBackward + MicroBatching: each gradient is used and freed" in beside["MicroBatching"]
    assert beside["StepMeter"] is None


@pytest.mark.parametrize(
    ("settings", "name", "why"),
    [
        ({"accumulate_grad_batches": 4}, "EagerGradientRelease", "accumulated over 4 batches"),
        ({"accumulate_grad_batches": 4}, "OptimizerInBackward", "accumulated over 4 batches"),
        ({"gradient_clip_val": 1.0}, "OptimizerInBackward", "clips by the norm"),
        ({"precision": "bf16-mixed"}, "FusedClipping", "does not clip"),
        ({}, "FusedClipping", "only in bf16-mixed; the precision is 32-true"),
        ({}, "TokenWeightedAccumulation", "a step is one batch on one device"),
        ({}, "DevicePrefetch", "already on the CPU"),
    ],
)
def test_reasons_are_of_how_the_trainer_is_set(settings, name, why):
    assert why in reasons(trainer=trainer(**settings))[name]


def test_nothing_speaks_against_what_the_trainer_has_use_for():
    found = reasons(trainer=trainer(gradient_clip_val=0.5, precision="bf16-mixed", accumulate_grad_batches=2))
    assert found["FusedClipping"] is found["TokenWeightedAccumulation"] is found["MicroBatching"] is None


def test_a_package_that_is_missing_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "lightning-fasttrain[finetune]" in reasons()["LoRA"]


def test_what_changes_memory_is_predicted_beside_what_is_in_use():
    in_use = [ft.EagerGradientRelease()]
    found = ft.planner.why_not(ShallowLM(), BATCH, in_use)
    rows = {row.name: row for row in found.rows}
    plain = ft.predict_memory(ShallowLM(), BATCH, techniques=in_use, device=HERE).peak_bytes
    for tried in (ft.MicroBatching(4), ft.finetune.IA3(), ft.ActivationCheckpointing(), ft.CompileBlocks()):
        row = rows[type(tried).__name__]
        expected = ft.predict_memory(ShallowLM(), BATCH, techniques=[*in_use, tried], device=HERE).peak_bytes / plain
        assert (row.tried, row.factor) == (repr(tried), expected)
    assert found.peak_bytes == plain
    assert rows["StepMeter"].factor is None
    keeping = [row.gain for row in found.rows if row.why_not is None and not row.changes_training]
    assert keeping == sorted(keeping)
    assert rows["MicroBatching"].gain == rows["MicroBatching"].factor < rows["CompileBlocks"].gain < 1
    assert "MicroBatching(n=4)" in str(found)


IMAGES = [torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)]
ROWS = [torch.zeros(2, 3), torch.zeros(2)]


@pytest.mark.parametrize(
    ("batch", "idle"),
    [
        (BATCH, {"ProgressiveResizing"}),
        (IMAGES, {"SequenceLengthWarmup", "PaddingFree"}),
        (ROWS, {"ProgressiveResizing"}),
        (None, set()),
    ],
    ids=["tokens", "images", "numbers", "unknown"],
)
def test_reasons_are_of_what_the_batch_holds(batch, idle):
    facts = replace(facts_of_machine(), batch=None if batch is None else kind_of_batch(batch))
    without = {kind for kind in known_techniques() if kind.why_not(facts_of_machine()) is None}
    assert {kind.__name__ for kind in without if kind.why_not(facts) is not None} == idle


def test_where_nothing_can_be_predicted_the_reasons_stand_alone():
    found = ft.planner.why_not(ShallowLM(), BATCH, [ft.ActivationCheckpointing(ft.MemoryBudget(1.0))])
    assert {row.factor for row in found.rows} == {None}
    assert "Nothing is predicted: " in found.notes[0]


MODULE = """
import lightning as L, torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch):
        return self.net(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(12, 8), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_the_command_prints_a_table_or_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject_of_why_not.py").write_text(MODULE)
    arguments = ["why-not", "subject_of_why_not:Net", "--techniques", "MicroBatching=2"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["used"] == ["MicroBatching"]
    assert found["peak_bytes"] > 0
    of_fused = next(row["why_not"] for row in found["rows"] if row["name"] == "FusedLossHead")
    assert ".sum of deferred logits" in of_fused  # the step's own loss is none that it knows
    assert main(arguments) == 0
    ten = capsys.readouterr().out
    assert "in use: MicroBatching" in ten
    assert main([*arguments, "--all"]) == 0
    assert "GlobalBatch" in set(capsys.readouterr().out.split()) - set(ten.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of TARGET, --size and --hf"),
        (["--size", "nano", "--techniques", "MicroBatching=2,OptimizerInBackward"], "each gradient is used and freed"),
        (["--size", "nano", "--precision", "fp7"], "precision='fp7'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, says):
    assert main(["why-not", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_the_padding_of_a_batch_is_noted_with_what_would_be_left_of_it():
    ids = torch.arange(1, 65)[None] * (torch.arange(64)[None] < torch.tensor([64, 5, 9, 3, 2, 7, 4, 6])[:, None])
    words = ids % 11 + (ids > 0)
    batch = {"input_ids": words, "labels": words.masked_fill(words == 0, -100)}
    found = ft.planner.why_not(ShallowLM(), batch, [ft.MicroBatching(2, trim_padding=False)])
    note = next(note for note in found.notes if "seem to be padding" in note)
    assert note.startswith("80% of the tokens of 1 batch seem to be padding (['input_ids'] = 0): ")
    assert "MicroBatching(8) would run ×0.25 of them" in note
    with_it = ft.planner.why_not(ShallowLM(), batch, [ft.MicroBatching(4)])
    assert not any("padding" in note for note in with_it.notes)
