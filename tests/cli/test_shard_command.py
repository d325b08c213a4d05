import io
import json
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fasttrain.bench.gpt import reference_gpt as gpt
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.strategy.choose_strategy import CANDIDATES, choose_strategy
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import save_sharded
from tests.support.ranks import run_code

ROOT = Path(__file__).parents[2]

MODULE = """
import lightning as L, torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self, width=8, kind="SGD"):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(3)])
        self.width, self.kind = width, kind

    def training_step(self, batch):
        return self.net(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(12, self.width), batch_size=4)

    def configure_optimizers(self):
        return getattr(torch.optim, self.kind)(self.parameters(), lr=0.1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is found because it lies in the current folder; every test has its own name for it."""
    name = f"subject_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    return name


NANO = ("--size", "nano", "--devices", "2", "--memory", "8")


def chosen(capsys, *arguments):
    assert main(["shard", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def nano():
    """What is chosen for the reference GPT on four sequences."""
    with redirect_stdout(io.StringIO()) as said:
        assert main(["shard", *NANO, "--batch", "4", "--json"]) == 0
    return json.loads(said.getvalue())


def at_peak(found, name):
    return next(row["at_peak"] for row in found["candidates"] if row["name"] == name)


def refusal(capsys, command, *arguments):
    assert main([command, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"fasttrain {command}: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_reference_size_is_what_the_function_finds(nano):
    specimen = gpt("nano", batch=4)
    with torch.device("meta"):
        net = specimen.module()
    assert nano == json.loads(json.dumps(choose_strategy(net, specimen.batch(), 2, memory_gib=8).as_dict()))


def test_a_class_with_arguments_its_optimizer_and_its_batch(module, capsys):
    found = chosen(capsys, f"{module}:Net", "--arg", "width=32", "--devices", "2", "--memory", "1")
    assert at_peak(found, "ddp")["parameters"] == 3 * 32 * 32 * 4
    assert at_peak(found, "ddp")["optimizer state"] == 0
    assert at_peak(found, "ddp")["inputs"] == 512  # four rows of 32 numbers


def test_another_optimizer(module, capsys):
    arguments = [f"{module}:Net", "--arg", "width=64", "--devices", "2", "--memory", "1", "--optimizer"]
    numbers = 3 * 64 * 64

    def state(found, name="ddp"):
        # CUDA's allocator rounds up to 512 bytes, for a count of steps too.
        return pytest.approx(at_peak(found, name)["optimizer state"], abs=3 * 512)

    assert state(chosen(capsys, *arguments, "AdamW")) == 8 * numbers
    assert state(chosen(capsys, *arguments, "sgd-momentum")) == 4 * numbers
    muon = chosen(capsys, *arguments, "muon")
    assert state(muon) == 4 * numbers
    assert state(muon, "fsdp2") == 4 * numbers / 2
    assert {row["name"] for row in muon["candidates"]} == {"ddp", "fsdp2", "fsdp2+offload"}
    assert any("ZeRO is left out: MuonAdamW needs whole matrices" in note for note in muon["notes"])
    pytest.importorskip("bitsandbytes")
    eight = at_peak(chosen(capsys, *arguments, "adamw8bit"), "ddp")["optimizer state"]
    assert 2 * numbers < eight < 3 * numbers


def test_a_reference_gpt_is_predicted_on_one_sequence_unless_told_otherwise(nano, capsys):
    one = chosen(capsys, *NANO)
    assert 3 < at_peak(nano, "ddp")["activations"] / at_peak(one, "ddp")["activations"] < 5


def test_it_prints_a_table(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "170")
    asked = ["--devices", "16", "--nodes", "2", "--memory", "24", "--precision", "bf16-mixed"]
    assert main(["shard", f"{module}:Net", *asked]) == 0
    printed = capsys.readouterr().out
    assert "16 devices in 2 nodes, bf16-mixed" in printed
    assert all(name in printed for name in CANDIDATES)


def test_any_number_of_devices_without_the_memory(tmp_path):
    """A thousand GPUs and 124 million parameters, whose states take 1.9 GiB, in a process that may have 1 GiB more."""
    code = (
        "import resource\n"
        "held = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmData'))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (int(held) * 2**10 + 2**30,) * 2)\n"
        "from lightning_fasttrain.cli.main import main\n"
        "raise SystemExit(main(['shard', '--size', 'gpt2-small', '--devices', '1024', '--memory', '80', '--json']))"
    )
    found = json.loads(run_code(code, folder=tmp_path))
    assert found["devices"] == 1024
    numbers = at_peak(found, "ddp")["parameters"] // 4
    assert numbers > 120_000_000
    states = at_peak(found, "zero-2")["optimizer state"]
    assert states == pytest.approx(12 * numbers / 1024, rel=0.1)  # in blocks of 512 bytes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of TARGET, --size and --hf"),
        (["{module}:Net", "--size", "nano"], "give one of TARGET, --size and --hf"),
        (["{module}:Net", "--batch", "2"], "TARGET brings its own batch"),
        (["--size", "huge"], "size='huge'"),
        (["--size", "nano", "--batch", "0"], "batch=0"),
        (["--size", "nano", "--devices", "0"], "devices=0"),
        (["--size", "nano", "--devices", "-2"], "devices=-2"),
        (["--size", "nano", "--nodes", "3"], "devices=8 in nodes=3"),
        (["--size", "nano", "--memory", "0"], "memory_gib=0"),
        (["--size", "nano", "--memory", "-1"], "memory_gib=-1"),
        (["--size", "nano", "--host", "0"], "host_gib=0"),
        (["--size", "nano", "--precision", "fp8"], "precision='fp8'"),
        (["--size", "nano", "--optimizer", "magic"], "optimizer='magic'"),
        (["--size", "nano", "--optimizer", "adafactor"], "Adafactor with ZeRO"),
        (["{module}:Net", "--memory", "0.0000001"], "Nothing fits, the nearest is"),
        (["{module}:Absent"], "has no attribute 'Absent'"),
        (["{module}:Net", "--arg", "width"], "not of the form key=value"),
        (["{module}:Net", "--arg", "kind=LBFGS"], "LBFGS with ZeRO"),
    ],
)
def test_bad_input_is_one_line(module, capsys, arguments, says):
    given = [argument.format(module=module) for argument in arguments]
    for name, usual in (("--devices", "8"), ("--memory", "24")):
        if name not in given:
            given += [name, usual]
    assert says in refusal(capsys, "shard", *given)


@pytest.mark.parametrize("missing", ["--devices", "--memory"])
def test_what_must_be_given(capsys, missing):
    given = {"--size": "nano", "--devices": "8", "--memory": "24"}
    given.pop(missing)
    assert "--devices and --memory" in refusal(capsys, "shard", *[word for pair in given.items() for word in pair])


def test_a_named_gpu_brings_its_number_and_its_memory(module, capsys):
    arguments = [f"{module}:Net", "--arg", "width=32"]
    assert chosen(capsys, *arguments, "--gpu", "h100x8") == chosen(
        capsys, *arguments, "--devices", "8", "--memory", "80"
    )
    fewer = chosen(capsys, *arguments, "--gpu", "H100", "--devices", "2", "--memory", "8")
    assert fewer == chosen(capsys, *arguments, "--devices", "2", "--memory", "8")


def test_techniques_are_part_of_what_is_compared(capsys):
    asked = ["--size", "nano", "--batch", "4", "--devices", "2", "--memory", "24"]
    plain, recomputed = chosen(capsys, *asked), chosen(capsys, *asked, "--techniques", "ActivationCheckpointing")
    assert at_peak(recomputed, "ddp")["activations"] < at_peak(plain, "ddp")["activations"] / 2


def test_consolidate_refuses_what_is_no_checkpoint_in_one_line(tmp_path, capsys):
    assert "no such checkpoint" in refusal(capsys, "consolidate", str(tmp_path / "absent"))
    assert "not a sharded checkpoint" in refusal(
        capsys, "consolidate", str(tmp_path), "--out", str(tmp_path / "x.safetensors")
    )
    assert not list(tmp_path.iterdir())


def test_consolidate_writes_one_file(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    net = nn.Linear(3, 2)
    for folder, file in (("step=5.ckpt", "step=5.safetensors"), ("loss=0.25", "loss=0.25.safetensors")):
        save_sharded(tmp_path / folder, net.state_dict())
        assert main(["consolidate", str(tmp_path / folder)]) == 0
        assert "2 tensors, 8 numbers" in capsys.readouterr().out
        written = safetensors.load_file(tmp_path / file)
        assert all(torch.equal(written[name], tensor) for name, tensor in net.state_dict().items())
