"""``fasttrain rehearse --kill``: scripts that are killed and started again, and must end as if they were not."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_fasttrain.cli.main import main
from lightning_fasttrain.cli.rehearsal import rehearse as command
from lightning_fasttrain.cli.rehearsal.killed_script import fingerprint
from lightning_fasttrain.cli.rehearsal.rehearse import rehearse_kills
from lightning_fasttrain.proof.verification.digest import take_digest
from tests.cli.forked_script import start_fork

SCRIPT = """
import sys
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_fasttrain as ft

folder, words = sys.argv[1], sys.argv[2:]

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    if "unseeded" in words:
        torch.seed()
    else:
        L.seed_everything(0)
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, enable_version_counter=False)]
    if "safe" in words:
        callbacks += [ft.ExactResume(), ft.AtomicCheckpoints()]
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks, logger=False,
                        enable_progress_bar=False, enable_model_summary=False)
    path = None if "forgetful" in words else ft.newest_checkpoint(folder)
    trainer.fit(Net(), DataLoader(torch.randn(32, 4), batch_size=4, shuffle=True), ckpt_path=path)
    open(folder + "/after", "w").close()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def rehearse(script, *words, kills=1, steps=12, seed=1):
    return rehearse_kills(script, ["{folder}", *words], kills, steps, seed, start=start_fork)


def run(script, *arguments):
    command = [sys.executable, "-m", "lightning_fasttrain.cli", "rehearse", *arguments]
    return subprocess.run(command, cwd=Path(script).parent, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_script_that_goes_on_exactly(seed, script):
    found = rehearse(script, "safe", kills=4, steps=20, seed=seed)
    assert found.problem == ""
    assert found.ok
    assert found.steps == 20
    assert len(found.moments) == 4
    assert found.differ == []


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("forgetful", "it began from nothing after every kill"),
        ("unseeded", "two uninterrupted runs end differently too"),
    ],
)
def test_a_script_that_does_not(word, problem, script):
    found = rehearse(script, word)
    assert problem in found.problem
    assert not found.ok


def test_a_run_with_fewer_steps_ends_where_it_ends(script):
    found = rehearse(script, "safe", steps=1000)
    assert (found.ok, found.steps) == (True, 24)


def test_a_script_that_fails(script):
    Path(script).write_text("raise SystemExit(3)")
    assert rehearse(script).problem == "it failed by itself, with exit code 3, see above"


def test_the_command(script, capsys, monkeypatch):
    monkeypatch.setattr(command, "rehearse_kills", partial(rehearse_kills, start=start_fork))
    assert main(["rehearse", "--kill", "1", "--steps", "6", "--json", script, "{folder}", "safe"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["steps"], found["differ"]) == (True, 6, [])
    assert {path.name for path in Path(script).parent.iterdir()} == {"train.py"}
    assert main(["rehearse", "--kill", "1", "--steps", "6", script, "{folder}", "plain"]) == 1
    assert "it does not end as the uninterrupted run" in capsys.readouterr().err


def test_bad_input(script):
    for arguments, words in (
        (("--kill", "2", "train.py"), "--kill needs {folder} among the script's arguments"),
        (("--kill", "20", "train.py", "{folder}"), "--kill 20 with --steps 20"),
        (("--kill", "-1", "train.py", "{folder}"), "it is a number of kills"),
    ):
        done = run(script, *arguments)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_fingerprint_tells_the_last_bit():
    def digest(tensor):
        return fingerprint(take_digest(tensor))

    numbers = torch.randn(5)
    nearly = torch.nextafter(numbers, numbers + 1)
    assert digest(numbers) == digest(numbers[:].clone())
    assert digest(numbers[1:3]) == digest(numbers[1:3].clone())
    assert digest(numbers) != digest(numbers.flip(0))
    assert len({digest(numbers), digest(nearly), digest(numbers.double()), digest(numbers[None])}) == 4
