"""A script is measured up to its first step, and the advice can be applied and runs."""

import ast
import json
import runpy

import pytest

from lightning_fasttrain.cli import tune
from lightning_fasttrain.cli.command import CommandError
from lightning_fasttrain.cli.main import BAD_INPUT, main
from lightning_fasttrain.cli.rehearsal import rehearse
from lightning_fasttrain.cli.tune import Advice, apply_to_source, describe
from tests.cli.forked_script import start_fork

SCRIPT = """
import sys
import lightning as L, torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)], nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    def on_train_end(self):
        print("trained to the end")

trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[L.pytorch.callbacks.Timer()],
)
if __name__ == "__main__":
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(4096, 32), 2048))
"""
MANUAL = """
import lightning as L, torch

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.other(self.one(batch)).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.one, self.other)]

L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
    Net(), torch.utils.data.DataLoader(torch.randn(64, 4), 8)
)
"""


@pytest.fixture
def tuned(tmp_path, monkeypatch, capfd):
    """Run the command on a script with this source; the exit code, what it printed, and the script."""
    monkeypatch.setattr(rehearse, "run_script", start_fork)

    def run(source, *options):
        script = tmp_path / "train.py"
        script.write_text(source)
        code = main(["tune", "--minutes", "0.02", *options, str(script)])
        return code, capfd.readouterr(), script

    return run


def test_the_advice_is_measured_in_turn_verified_and_nothing_is_trained(tuned, tmp_path):
    code, printed, script = tuned(SCRIPT, "--json", "--memory", "0.0012", "--keep", "exact")
    found = json.loads(printed.out)
    assert code == 0
    assert found["techniques"]  # a plain step takes more than the limit
    assert 0 < found["after_bytes"] < found["before_bytes"]
    assert found["gain"][1] <= found["gain"][0] <= found["gain"][2]
    assert min(found["before_ms"], found["after_ms"]) > 0
    assert found["is_same"]
    assert "as verified on the first batches" in found["verdict"]
    assert found["precision"] is None
    assert "trained to the end" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == [script]


def test_manual_optimization_is_tuned_without_micro_batches(tuned):
    code, printed, _ = tuned(MANUAL, "--json", "--keep", "exact")
    assert code == 0
    assert not [made for made in json.loads(printed.out)["techniques"] if "MicroBatching" in made]


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("print(1)", [], "ended without a Trainer.fit"),
        ("raise SystemExit(3)", [], "ended with 3 before its first step"),
        (SCRIPT.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"'), [], "2 ranks"),
        (SCRIPT, ["--memory", "0.00001"], "0.000"),
        (SCRIPT, ["--minutes", "0"], "no time to measure"),
        (SCRIPT, ["--memory", "much"], "expected GiB"),
    ],
    ids=["no fit", "fails", "ranks", "nothing fits", "no time", "no number"],
)
def test_what_cannot_be_tuned_is_said_in_one_line(source, options, says, tuned):
    code, printed, _ = tuned(source, *options)
    assert code in (1, BAD_INPUT)
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("fasttrain tune: ")
    assert says in last


def advice(**changed):
    """An advice that is worth it."""
    return Advice(
        **{
            "before_ms": 100.0,
            "after_ms": 50.0,
            "gain": (2.0, 1.9, 2.1),
            "before_bytes": 2**30,
            "after_bytes": 2**28,
            "techniques": ["ft.MicroBatching(2)", "ft.EagerGradientRelease()"],
            "precision": "bf16-mixed",
            "reasons": ["MicroBatching(2): without it 1.000 GiB would not fit."],
            "notes": [],
            "verdict": "the same",
            "is_same": True,
            "replaced": [],
            "yaml": "trainer:\n  precision: bf16-mixed\n",
            **changed,
        }
    )


def test_one_screen_says_what_to_change_and_what_it_gains(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = describe(advice(), script)
    assert "100 ms/step, peak memory 1.00 GiB" in said
    assert "2.00 times as fast (1.90 to 2.10, in turn)" in said
    assert "256.00 MiB, 4.0 times less" in said
    assert said.endswith("callbacks=[ft.MicroBatching(2), ft.EagerGradientRelease(), ...])")
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "L.Trainer(" in text)
    assert f"in line {line} of " in said
    said = describe(advice(before_ms=0.0, gain=(1.0, 1.0, 1.0), replaced=["LoRA"]), script)
    assert "Without techniques  does not fit: predicted peak memory 1.00 GiB" in said
    assert "times as fast" not in said
    script.write_text("from lightning.pytorch.cli import LightningCLI\nLightningCLI()")
    assert describe(advice(), script).endswith("In the configuration:\n\ntrainer:\n  precision: bf16-mixed")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gain": (1.01, 0.9, 1.1), "after_bytes": 2**30}, "nothing: no technique"),
        ({"gain": (0.8, 0.7, 0.9), "after_bytes": 2**30}, "nothing: no technique"),
        ({"is_same": False, "verdict": "the gradient differs"}, "another training (the gradient differs)"),
    ],
)
def test_what_gains_nothing_or_trains_otherwise_is_not_advised(changed, says, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = advice(**changed)
    assert not found.is_worth_it
    said = " ".join(describe(found, script).split())
    assert says in said
    assert "import lightning_fasttrain" not in said


APPLIED = {
    "no arguments": ("L.Trainer()", "L.Trainer(callbacks=[A()], precision='p')"),
    "arguments": ("L.Trainer(max_epochs=1,)", "L.Trainer(max_epochs=1, callbacks=[A()], precision='p',)"),
    "an empty list": ("L.Trainer(callbacks=[])", "L.Trainer(callbacks=[A()], precision='p')"),
    "a list": ("L.Trainer(callbacks=[x])", "L.Trainer(callbacks=[A(), x], precision='p')"),
    "a precision": ("pl.Trainer(precision=32)", "pl.Trainer(precision='p', callbacks=[A()])"),
    "umlauts": ("ü = 'ü'; t = Trainer(name='ü')", "ü = 'ü'; t = Trainer(name='ü', callbacks=[A()], precision='p')"),
}


@pytest.mark.parametrize(("line", "expected"), APPLIED.values(), ids=APPLIED)
def test_techniques_are_written_into_the_call_of_the_trainer(line, expected):
    changed = apply_to_source(f"import lightning as L\nimport torch\n\n{line}\n", ["A()"], "p")
    first, second, third, _, last = changed.splitlines()
    assert (first, second, third) == ("import lightning as L", "import torch", "import lightning_fasttrain as ft")
    written, wanted = (keywords_of(text) for text in (last, expected))
    assert written == wanted


def keywords_of(line):
    """The call that a line ends with, and its keyword arguments, whose order does not matter."""
    call = ast.parse(line).body[-1].value
    return ast.unparse(call.func), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""A script."""\n\ndef main():\n    import lightning as L\n    L.Trainer()\n', 2),
        ("#!/usr/bin/env python\n# a comment\ndef main():\n    L.Trainer()\n", 3),
        ("from __future__ import annotations\nimport os\nx = 1\nimport sys\nL.Trainer()\n", 3),
    ],
    ids=["docstring", "shebang", "future"],
)
def test_the_import_comes_where_python_accepts_it(source, line):
    changed = apply_to_source(source, ["A()"], None)
    assert changed.splitlines()[line - 1] == "import lightning_fasttrain as ft"
    compile(changed, "script", "exec")


def test_no_copy_is_written_of_a_script_whose_techniques_are_replaced(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(CommandError, match="has LoRA, which the advice replaces"):
        tune.write_copy(script, advice(replaced=["LoRA"]))
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    "source", ["x = 1", "L.Trainer()\nL.Trainer()", "L.Trainer(**settings)", "L.Trainer(callbacks=made())"]
)
def test_a_call_that_a_program_cannot_change_is_left(source):
    assert apply_to_source(source, ["A()"], None) is None


def test_the_copy_is_written_beside_the_script_and_makes_the_trainer(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    copy = tune.write_copy(script, advice())
    assert copy == tmp_path / "train_tuned.py"
    assert script.read_text() == SCRIPT
    trainer = runpy.run_path(str(copy))["trainer"]
    assert [type(callback).__name__ for callback in trainer.callbacks[:3]] == [
        "MicroBatching",
        "EagerGradientRelease",
        "Timer",
    ]
    assert trainer.precision == "bf16-mixed"
