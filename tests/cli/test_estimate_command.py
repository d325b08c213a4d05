import json

import pytest

from lightning_fasttrain.cli.main import main
from lightning_fasttrain.estimate.estimate_training import format_count, read_count

MODULE = """
import lightning as L, torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 100)

    def training_step(self, batch):
        return self.head(self.embed(batch)).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(12, 16, dtype=torch.long), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def images():
    class Images(Net):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.net = nn.Linear(8, 2)

        def training_step(self, batch):
            return self.net(batch).mean()

    return Images(), torch.zeros(4, 8)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is found because it lies in the current folder; every test has its own name for it."""
    name = f"subject_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_training_on_gpus_is_estimated_without_computing_it(module, capsys, tmp_path):
    arguments = [
        "estimate",
        f"{module}:Net",
        "--arg",
        "width=1024",
        "--tokens",
        "10B",
        "--gpu",
        "A100:4",
        "--mfu",
        "0.5",
    ]
    assert main([*arguments, "--json", "--out", "estimate.json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found == json.loads((tmp_path / "estimate.json").read_text())
    assert found["length"] == 10e9
    per_token = 6 * 1024 * 100
    assert found["flops"]["counted"] == per_token * 64
    assert found["speed"]["hours"] == pytest.approx(per_token * 10e9 / (4 * 312e12 * 0.5) / 3600)
    assert found["measured"] is None
    assert "Written: estimate.json" in captured.err


def test_without_a_gpu_it_is_measured_here(module, capsys):
    assert main(["estimate", f"{module}:Net", "--tokens", "1M", "--critical-batch", "2k"]) == 0
    printed = capsys.readouterr().out
    for words in ("measured here", "1.7k parameters on 1M tokens", "measured, as given", "peak, measured"):
        assert words in printed


def test_a_training_of_images_has_a_length_in_samples(module, capsys):
    assert main(["estimate", f"{module}:images", "--samples", "1M", "--gpu", "T4"]) == 0
    assert "on 1M samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Net"], "give either --tokens or --samples"),
        (["Net", "--tokens", "1B", "--samples", "1B"], "give either --tokens or --samples"),
        (["Net", "--tokens", "lots", "--gpu", "T4"], "--tokens lots: expected a number above 0, with k, M, B or T"),
        (["Net", "--samples", "1B", "--gpu", "T4"], "--samples: the batch holds token ids. Use --tokens."),
        (["images", "--tokens", "1B", "--gpu", "T4"], "--tokens: the batch holds no token ids. Use --samples."),
        (["Net", "--tokens", "1B", "--gpu", "H1000"], "accelerator 'H1000': it is not in the table. Use B300, B200"),
        (["Net", "--tokens", "1B", "--mfu", "0.3"], "mfu=0.3 without gpu"),
    ],
)
def test_bad_input_is_answered_in_one_line(module, capsys, arguments, says):
    target, *options = arguments
    assert main(["estimate", f"{module}:{target}", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err


@pytest.mark.parametrize("text", ["0", "-1", "1X", "", "1 000", "nan", "inf", "1e999"])
def test_numbers_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"--tokens .*expected a number above 0"):
        read_count("--tokens", text)


@pytest.mark.parametrize(("text", "count"), [("10B", 1e10), ("1_000k", 1e6), ("1.4t", 1.4e12), ("3E+5", 3e5), ("7", 7)])
def test_numbers_are_read_as_papers_write_them(text, count):
    assert read_count("--tokens", text) == count
    assert read_count("--tokens", format_count(count)) == count
