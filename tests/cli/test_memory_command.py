import json
import textwrap

import pytest

import lightning_fasttrain as ft
from lightning_fasttrain.cli.main import main
from tests.support.run_example import last_line

MODULE = """
import lightning as L, torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self, width=8, depth=2, name="net"):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.width = width

    def training_step(self, batch):
        return self.net(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(12, self.width), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class NoLoader(Net):
    train_dataloader = L.LightningModule.train_dataloader

def pair(rows):
    return Net(width=16), torch.zeros(rows, 16)

def reads_values():
    return Net(width=int(torch.ones(1).item()))


number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is found because it lies in the current folder; every test has its own name for it."""
    name = f"subject_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    return name


def predicted(capsys, *arguments):
    assert main(["memory", *arguments, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    assert main(["memory", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fasttrain memory: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_class_with_arguments_and_its_own_loader(module, capsys):
    report = predicted(capsys, f"{module}:Net", "--arg", "width=32", "--arg", "depth=3", "--arg", "name=any word")
    assert report["peaks"]["parameters"] == 3 * 32 * 32 * 4
    assert report["peaks"]["inputs"] == 4 * 32 * 4


def test_a_function_that_returns_module_and_batch(module, capsys):
    report = predicted(capsys, f"{module}:pair", "--arg", "rows=5")
    assert report["peaks"]["inputs"] == 5 * 16 * 4


def test_a_reference_size_with_techniques(capsys):
    plain = predicted(capsys, "--size", "nano", "--batch", "4")
    techniques = "ActivationCheckpointing, MicroBatching=2"
    both = predicted(capsys, "--size", "nano", "--batch", "4", "--techniques", techniques, "--precision", "bf16-mixed")
    assert both["at_peak"]["activations"] < plain["at_peak"]["activations"] / 4
    assert both["precision"] == "bf16-mixed"


def test_it_prints_a_table(module, capsys):
    assert main(["memory", f"{module}:Net"]) == 0
    printed = capsys.readouterr().out
    assert "on cuda, 32-true" in printed
    assert "optimizer state" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either TARGET or --size"),
        (["{module}:Net", "--size", "nano"], "give either TARGET or --size"),
        (["--size", "huge"], "size='huge'"),
        (["--size", "nano", "--batch", "0"], "batch=0"),
        (["--size", "nano", "--techniques", "Magic"], "technique 'Magic'"),
        (["--size", "nano", "--techniques", "MicroBatching=0"], "n=0"),
        (["--size", "nano", "--precision", "fp8"], "precision='fp8'"),
        (["{module}"], "Write package.module:Name"),
        (["{module}:Absent"], "has no attribute 'Absent'"),
        (["no_such_module_anywhere:Net"], "No module named"),
        (["{module}:Net", "--arg", "width"], "not of the form key=value"),
        (["{module}:Net", "--arg", "wide=3"], "wide"),
        (["{module}:NoLoader"], "returns (module, batch)"),
        (["{module}:number"], "cannot be called"),
        (["{module}:reads_values"], "named with --data"),
    ],
)
def test_bad_input_is_one_line(module, capsys, arguments, says):
    assert says in refusal(capsys, *[argument.format(module=module) for argument in arguments])


def test_values_are_read_and_never_run(module, capsys, tmp_path):
    refusal(capsys, f"{module}:Net", "--arg", "width=open('ran', 'w')")
    assert not (tmp_path / "ran").exists()


def test_every_technique_can_be_named():
    from lightning_fasttrain.cli.subject import techniques_named

    made = techniques_named("ActivationCheckpointing,EagerGradientRelease,MicroBatching=auto,OptimizerInBackward")
    assert [type(t) for t in made] == [
        ft.ActivationCheckpointing,
        ft.EagerGradientRelease,
        ft.MicroBatching,
        ft.OptimizerInBackward,
    ]
    assert made[2].adaptive


@pytest.mark.slow
def test_the_example_finds_prediction_and_measurement_in_agreement():
    last = last_line("memory_prediction.py", "--models", "uneven blocks", "--ways", "plain,checkpointing")
    assert float(last.removeprefix("largest error ").removesuffix("%")) < 10
