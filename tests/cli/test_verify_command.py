import json

from lightning_fasttrain.cli.main import main
from lightning_fasttrain.cli.rehearsal import rehearse
from tests.cli.forked_script import start_fork
from tests.cli.test_memory_command import module  # noqa: F401  (a fixture)


def run(capsys, *arguments):
    code = main(["verify", *arguments, "--accelerator", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_strangers_module_by_its_import_path(module, capsys):  # noqa: F811
    techniques = "--techniques", "EagerGradientRelease", "--json"
    code, out, _ = run(capsys, f"{module}:pair", "--arg", "rows=3", *techniques)
    assert code == 1
    read = json.loads(out)
    assert read["model"] == "Net"
    assert read["rows"][0]["verdict"] == "the same"
    assert "The gradient is zero everywhere" in read["problems"][0]  # its batch is


def test_the_exit_code_is_the_verdict(capsys):
    code, out, _ = run(capsys, "--size", "nano", "--batch", "2", "--techniques", "ActivationCheckpointing")
    assert code == 0
    assert "the same" in out


DATA = """
import lightning as L, torch

class Data(L.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.arange(96.0).reshape(12, 8)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=6)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch / 96
"""
SCRIPT = """
import sys
import lightning as L, torch
import lightning_fasttrain as ft
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

class Wrong(ft.Technique):
    def on_after_backward(self, trainer, pl_module):
        pl_module.net[0].weight.grad.mul_(1.001)

wrong = [Wrong()] if "--wrong" in sys.argv else []
trainer = L.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
                    enable_checkpointing=False, callbacks=[ft.MicroBatching(2), *wrong])
trainer.fit(Net(), DataLoader(torch.randn(16, 4), batch_size=4))
print("the script went on")
"""


def test_a_datamodule_gives_the_batches_and_what_is_done_to_them(module, tmp_path, capsys):  # noqa: F811
    (tmp_path / f"{module}_data.py").write_text(DATA)
    found = "--data", f"{module}_data:Data", "--techniques", "MicroBatching=2", "--json"
    code, out, err = run(capsys, f"{module}:Net", *found)
    assert code == 0, err
    assert json.loads(out)["rows"][0]["verdict"] == "the same"
    assert run(capsys, f"{module}:Net", "--data", f"{module}:pair")[0] == 2


def test_a_script_as_it_is(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(rehearse, "run_script", start_fork)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, out, err = run(capfd, "--script", str(script))
    assert code == 0, err
    assert "MicroBatching(n=2)" in out
    assert "the script went on" not in out
    code, out, _ = run(capfd, "--script", str(script), "--script-args=--wrong", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["guilty"] == ["Wrong()"]
    assert report["begins"]["step"] == 1
    code, _, err = run(capfd, "--script", str(script), "--techniques", "LoRe")
    assert code == 2
    assert "no technique is called 'LoRe'" in err
    assert run(capfd, "--script", str(tmp_path / "none.py"))[0] == 2


def test_bad_input_is_one_line(capsys):
    for arguments, words in (
        ((), "give one of TARGET, --size and --hf"),
        (("--size", "nano", "--data", "a:B"), "--data names batches for TARGET"),
        (("--size", "nano"), "expected at least one technique to compare with the plain step"),
        (("--size", "nano", "--techniques", "LoRe"), "no technique is called 'LoRe'"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
