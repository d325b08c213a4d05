"""``fasttrain rehearse``: scripts run unchanged, in processes of their own, and end before their first step."""

import json
import subprocess
import sys

import pytest

from lightning_fasttrain.cli.main import main
from lightning_fasttrain.cli.rehearsal import rehearse as command
from tests.cli.forked_script import start_fork

SCRIPT = """
import sys
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

class Net(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log(sys.argv[1], self.layer(batch).sum())

if __name__ == "__main__":
    settings = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")} if "ddp" in sys.argv else {}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[ModelCheckpoint("saved", monitor="val")],
        logger=False, num_sanity_val_steps=0, limit_train_batches=4, enable_progress_bar=False, **settings,
    )
    print("before")
    trainer.fit(Net())
    open("after", "w").close()
"""


def run(folder, *arguments, code=SCRIPT):
    (folder / "train.py").write_text(code)
    command = [sys.executable, "-m", "lightning_fasttrain.cli", "rehearse", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    left = {path.name for path in folder.rglob("*")} - {"train.py", "__pycache__"}
    return done, left


@pytest.mark.slow
def test_a_script_on_two_ranks_that_its_trainer_starts(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["rehearse", "--seconds", "2", "--json", "train.py", "val", "ddp"]) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert found["ok"]
    assert found["report"]["resumed_exactly"]
    assert "before" in printed.err
    assert {path.name for path in tmp_path.rglob("*")} - {"__pycache__"} == {"train.py"}


def test_a_run_that_would_fail_at_its_first_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_script", start_fork)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["rehearse", str(tmp_path / "train.py"), "vall"]) == 1
    words = "fasttrain rehearse: ModelCheckpoint(monitor='val'): no value of that name is logged"
    assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*")} == {"train.py"}


def test_nothing_to_rehearse(tmp_path):
    for code, words, expected in (
        ("print('done')", "ended without a Trainer.fit", 2),
        ("raise SystemExit(3)", "ended with 3 before its first step", 1),
    ):
        done, _ = run(tmp_path, "train.py", code=code)
        assert (done.returncode, words in done.stderr) == (expected, True)
    done, _ = run(tmp_path, "missing.py")
    assert done.returncode == 2
    assert "there is no script missing.py" in done.stderr
