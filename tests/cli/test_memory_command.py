import json
import logging
import textwrap

import pytest

import lightning_fasttrain as ft
from lightning_fasttrain.cli import subject
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
        ([], "give one of TARGET, --size and --hf"),
        (["{module}:Net", "--size", "nano"], "give one of TARGET, --size and --hf"),
        (["--size", "huge"], "size='huge'"),
        (["--size", "nano", "--batch", "0"], "batch=0"),
        (["--size", "nano", "--techniques", "Magic"], "no technique is called 'Magic'"),
        (["--size", "nano", "--techniques", "MicroBatching=0"], "n=0"),
        (["--size", "nano", "--techniques", "MicroBatching(4"], "a bracket is not closed"),
        (["--size", "nano", "--techniques", "MicroBatching(parts)"], "its arguments are no literals"),
        (["--size", "nano", "--techniques", "gradient checkpointing"], "Use ActivationCheckpointing or TiledMLP"),
        (["--size", "nano", "--techniques", "ema"], "technique 'ema': there is none of this name. Use WeightEMA"),
        (["--size", "nano", "--length", "8"], "--length goes with --hf"),
        (["--size", "nano", "--hf", "folder"], "give one of TARGET, --size and --hf"),
        (["--hf", "no/such/folder"], "it has no config.json"),
        (["--size", "nano", "--precision", "fp8"], "precision='fp8'"),
        (["{module}"], "Write package.module:Name"),
        (["{module}:Absent"], "has no attribute 'Absent'"),
        (["no_such_module_anywhere:Net"], "No module named"),
        (["{module}:Net", "--arg", "width"], "not of the form key=value"),
        (["{module}:Net", "--arg", "wide=3"], "wide"),
        (["{module}:NoLoader"], "returns (module, batch)"),
        (["{module}:number"], "cannot be called"),
    ],
)
def test_bad_input_is_one_line(module, capsys, arguments, says):
    assert says in refusal(capsys, *[argument.format(module=module) for argument in arguments])


def test_a_model_that_reads_values_while_it_is_made_is_made_really(module, capsys, monkeypatch):
    assert predicted(capsys, f"{module}:reads_values")["at_peak"]["parameters"] == 2 * 4
    monkeypatch.setattr(subject, "free_bytes", lambda device: 7)
    assert "its parameters take 8 B, of which 7 B are free" in refusal(capsys, f"{module}:reads_values")


def test_a_model_that_would_fill_the_memory_is_not_made_to_train(module, capsys, monkeypatch):
    monkeypatch.setattr(subject, "free_bytes", lambda device: 4 * 512 * 4 - 1)
    assert main(["estimate", f"{module}:Net", "--arg", "width=16", "--samples", "10"]) == 2
    said = capsys.readouterr().err
    assert "its parameters take 2.00 KiB, and training them 4 times as much" in said
    assert "estimate with --gpu" in said


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


def test_names_come_in_any_spelling_and_with_all_their_arguments():
    from lightning_fasttrain.cli.subject import techniques_named

    asked = "micro-batching(4, check=False), loaders.BatchSizeWarmup(64, over=100), ft.LoRA(targets=['up', 'down'])"
    micro, warmup, lora = techniques_named(asked)
    assert (micro.n, micro.check) == (4, False)
    assert repr(warmup) == repr(ft.loaders.BatchSizeWarmup(64, 100))
    assert repr(lora) == repr(ft.LoRA(targets=["up", "down"]))


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


@pytest.mark.parametrize(
    ("name", "settings", "labels"),
    [
        ("LlamaForCausalLM", {}, (2, 7)),
        ("BertForSequenceClassification", {"num_labels": 3}, (2,)),
        ("BertForTokenClassification", {"num_labels": 3}, (2, 7)),
        ("T5ForConditionalGeneration", {"d_model": 32, "num_layers": 2, "decoder_start_token_id": 0}, (2, 7)),
    ],
)
def test_a_configuration_of_hugging_face_gives_a_model_and_a_batch(tmp_path, name, settings, labels):
    transformers = pytest.importorskip("transformers")
    from lightning_fasttrain.cli.subject import load_hugging_face

    kind = getattr(transformers, name)
    sizes = {"vocab_size": 99} if name.startswith("T5") else SIZES
    kind.config_class(architectures=[name], **sizes, **settings).save_pretrained(tmp_path)
    make, batch = load_hugging_face(str(tmp_path), 2, 7)
    assert batch["input_ids"].shape == (2, 7)
    assert batch["labels"].shape == labels
    model = make()
    assert type(model.model) is kind
    model.training_step(batch, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_transformers_reports_about_a_configuration_is_not_printed(tmp_path, capfd):
    transformers = pytest.importorskip("transformers")
    logger = logging.getLogger("transformers")
    level = logger.level
    # Its token ids and its loss are unusual, on which transformers comments.
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"], n_embd=32, n_layer=2, n_head=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    assert main(["memory", "--hf", str(tmp_path), "--length", "7", "--device", "cpu"]) == 0
    assert "transformers" not in capfd.readouterr().err
    assert logger.level == level


def test_a_configuration_is_predicted_as_its_model_is(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from lightning_fasttrain.cli.subject import load_hugging_face

    transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path / "images")
    assert "does not take token ids and labels" in refusal(capsys, "--hf", str(tmp_path / "images"))
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path / "unnamed")
    assert "names no class. Add one" in refusal(capsys, "--hf", str(tmp_path / "unnamed"))
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(tmp_path)
    found = predicted(capsys, "--hf", str(tmp_path), "--batch", "2", "--length", "7", "--device", "cpu")
    module, batch = load_hugging_face(str(tmp_path), 2, 7)
    assert found["peak_bytes"] == ft.predict_memory(module, batch, device="cpu").peak_bytes


@pytest.mark.slow
def test_the_example_finds_prediction_and_measurement_in_agreement():
    last = last_line("memory_prediction.py", "--models", "uneven blocks", "--ways", "plain,checkpointing")
    assert float(last.removeprefix("largest error ").removesuffix("%")) < 10
