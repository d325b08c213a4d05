"""A script is measured up to its first step, and the advice can be applied and runs."""

import ast
import json
import runpy
import time
from types import SimpleNamespace

import pytest

from lightning_fasttrain.cli.command import CommandError
from lightning_fasttrain.cli.main import BAD_INPUT, main
from lightning_fasttrain.cli.rehearsal import rehearse
from lightning_fasttrain.cli.tuning import tune
from lightning_fasttrain.cli.tuning.apply_advice import apply_to_source
from lightning_fasttrain.cli.tuning.make_advice import Tuning, rank
from lightning_fasttrain.cli.tuning.tune import Advice, describe
from lightning_fasttrain.cli.tuning.tune_page import render_page
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.timing import Timed
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


FIND_RATE = """    from lightning.pytorch.tuner import Tuner
    loader = torch.utils.data.DataLoader(torch.randn(4096, 32), 64)
    Tuner(trainer).lr_find(Net(), loader, num_training=20, update_attr=False)
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
    # Steps of a Tuner are no loop of the script's own. A logger would create its folder before the first hook.
    source = SCRIPT.replace("    trainer.fit(", f"{FIND_RATE}    trainer.fit(")
    source = source.replace("logger=False", "logger=L.pytorch.loggers.CSVLogger('.')")
    code, printed, script = tuned(source, "--json", "--memory", "0.0012", "--keep", "exact")
    found = json.loads(printed.out)
    assert code == 0
    assert found["techniques"]  # a plain step takes more than the limit
    assert 0 < found["after_bytes"] < found["before_bytes"]
    assert found["gain"][1] <= found["gain"][0] <= found["gain"][2]
    assert min(found["before_ms"], found["after_ms"]) > 0
    assert found["is_same"]
    assert "as verified on the first batches" in found["verdict"]
    assert found["precision"] is None
    assert {"matrix products", "optimizer", "waiting for data"} <= dict(found["costs"]).keys()
    assert all(point["bytes"] > 0 for point in found["points"])
    assert "trained to the end" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == [script]


def test_manual_optimization_is_tuned_without_micro_batches(tuned):
    code, printed, _ = tuned(MANUAL, "--json", "--keep", "exact")
    assert code == 0, printed.err
    assert not [made for made in json.loads(printed.out)["techniques"] if "MicroBatching" in made]


LOOP = """
import lightning as L, torch
import lightning_fasttrain as ft
from torch import nn

fabric = L.Fabric(accelerator="cpu", devices=1)
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)], nn.Linear(64, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
def step(batch):
    return model(batch).square().mean()
for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(40960, 64), 1024)):
    optimizer.zero_grad()
    STEP
    optimizer.step()
print("trained to the end")
"""


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("ft.accumulate_gradients(step, batch, n=1, backward=fabric.backward)", "Script as it is"),
        ("fabric.backward(step(batch))", "Write loss = ft.accumulate_gradients(step, batch, n=1)"),
    ],
    ids=["marked", "unmarked"],
)
def test_a_loop_is_watched_and_tuned_where_its_step_is_marked(step, says, tuned):
    code, printed, _ = tuned(LOOP.replace("STEP", step))
    assert code == 0
    assert "trained to the end" not in printed.out
    assert "Time goes to" in printed.out
    assert says in " ".join(printed.out.split())


@pytest.mark.slow
def test_one_of_two_forked_ranks_is_tuned_and_their_launcher_ends(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp_fork"'))
    assert main(["tune", "--minutes", "0.02", str(script)]) == 0
    assert "Measured on one of 2 ranks alone" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("print(1)", [], "ended without a Trainer.fit"),
        ("raise SystemExit(3)", [], "ended with 3 before its first step"),
        (
            SCRIPT.replace("import lightning as L", "import pytorch_lightning as L"),
            [],
            "import lightning.pytorch as pl",
        ),
        (SCRIPT, ["--memory", "0.00001"], "0.000"),
        (SCRIPT, ["--minutes", "0"], "no time to measure"),
        (SCRIPT, ["--memory", "much"], "expected GiB"),
    ],
    ids=["no fit", "fails", "the other package", "nothing fits", "no time", "no number"],
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


def test_the_page_has_the_picture_the_shares_and_the_lines(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    points = [{"name": "32-true, 2 micro-batches", "ms": 60.0, "bytes": 2**28, "measured": True}]
    page = render_page(advice(points=points, costs=[("matrix products", 75.0), ("optimizer", 25.0)]), script)
    shown = ("as it is", "advised", "32-true, 2 micro-batches: 60 ms", "75%", "ft.MicroBatching(2)", "the same")
    assert [text for text in shown if text not in page] == []
    assert "http" not in page


def test_one_screen_says_what_to_change_and_what_it_gains(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = describe(advice(), script)
    assert "100 ms/step, peak memory 1.00 GiB" in said
    assert "2.00 times as fast (1.90 to 2.10, in turn)" in said
    assert "256.00 MiB, 4.0 times less" in said
    waits = describe(advice(costs=[("waiting for data", 50.0), ("attention", 50.0)]), script)
    assert "2.00 times as fast (1.90 to 2.10, in turn); with the wait for data 1.33" in " ".join(waits.split())
    assert said.endswith("callbacks=[ft.MicroBatching(2), ft.EagerGradientRelease(), ...])")
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "L.Trainer(" in text)
    assert f"in line {line} of " in said
    said = describe(advice(before_ms=0.0, gain=(1.0, 1.0, 1.0), replaced=["LoRA"]), script)
    assert "Without techniques  does not fit: predicted peak memory 1.00 GiB" in said
    assert "times as fast" not in said
    script.write_text("from lightning.pytorch.cli import LightningCLI\nLightningCLI()")
    assert describe(advice(), script).endswith("In the configuration:\n\ntrainer:\n  precision: bf16-mixed")


class Watch:
    """Times steps that take what ``ms`` says; a choice without a time fails."""

    def __init__(self, ms):
        self.ms, self.runs = ms, []

    def time(self, choice):
        self.runs.append(choice)
        return Timed([self.ms[choice]], self.ms[choice])


PLAIN, RELEASED, FUSED = Choice(), Choice(gradients="released"), Choice(head="fused")
HALVED, WIDE = Choice(parts=2), Choice(precision="bf16-mixed")


def measured(ms):
    """The times in turn of what the watch knows, beside the plain step, and the ranks of those that fit."""
    watch = Watch(ms)
    tuning = Tuning("fit", "exact", 60.0, SimpleNamespace(say=lambda what: None), time.monotonic())
    times = tuning.measure_in_turn(watch, [PLAIN, RELEASED, FUSED, HALVED, WIDE])
    plan = SimpleNamespace(plain=SimpleNamespace(choice=PLAIN))
    return times, rank(plan, times, [RELEASED, FUSED, HALVED, WIDE])


def test_rivals_are_out_by_thirds_and_the_plain_step_stays():
    times, ranked = measured({PLAIN: 100.0, RELEASED: 70.0, FUSED: 80.0, HALVED: 90.0, WIDE: 50.0})
    turns = {choice: len(taken) for choice, taken in times.items()}
    assert turns == {PLAIN: 3, WIDE: 3, RELEASED: 2, FUSED: 2, HALVED: 1}
    assert ranked == [WIDE, RELEASED, FUSED, HALVED]


def test_of_equal_rivals_the_simpler_is_ranked_first_and_what_fails_is_left_out():
    times, ranked = measured({RELEASED: 98.0, FUSED: 100.0, HALVED: 99.0})
    assert set(times) == {RELEASED, FUSED, HALVED}  # the plain step does not fit
    assert ranked[0] == HALVED  # of no technique but more micro-batches
    with pytest.raises(KeyError):
        measured({})


class NoisyWatch(Watch):
    """The first step of one choice meets other work."""

    def time(self, choice):
        slowed = 3.0 if choice == WIDE and WIDE not in self.runs else 1.0
        timed = super().time(choice)
        return Timed([slowed * timed.ms], slowed * timed.ms)


@pytest.mark.parametrize(("watch", "turns"), [(Watch, 3), (NoisyWatch, 5)])
def test_it_is_measured_until_the_gain_is_known(watch, turns):
    watch = watch({PLAIN: 100.0, WIDE: 30.0})
    tuning = Tuning("fit", "exact", 60.0, SimpleNamespace(say=lambda what: None), time.monotonic())
    times = tuning.measure_in_turn(watch, [PLAIN, WIDE])
    assert {choice: len(taken) for choice, taken in times.items()} == {PLAIN: turns, WIDE: turns}


_SLOW = {"gain": (1.0, 0.9, 1.1), "after_bytes": 2**30}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gain": (1.01, 0.9, 1.1), "after_bytes": 2**30}, "nothing: no technique"),
        ({"gain": (0.8, 0.7, 0.9), "after_bytes": 2**30}, "nothing: no technique"),
        ({**_SLOW, "costs": [("waiting for data", 80.0), ("optimizer", 20.0)]}, "your step waits for data 80%"),
        (  # a step of 1 ms that is twice as fast, after a wait of 99 ms
            {"gain": (2.0, 1.9, 2.1), "after_bytes": 2**30, "costs": [("waiting for data", 99.0), ("optimizer", 1.0)]},
            "your step waits for data 99%",
        ),
        ({**_SLOW, "costs": [("attention", 80.0), ("optimizer", 20.0)]}, "the most goes to attention, 80%"),
        ({"gain": (0.6, 0.5, 0.7)}, "nothing: no technique"),
        ({"gain": (1.5, 0.1, 9.0)}, "nothing: the times vary too much to tell"),
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
