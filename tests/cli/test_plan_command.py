import json

import torch

import lightning_fasttrain as ft
from lightning_fasttrain.cli import subject
from lightning_fasttrain.cli.main import main
from tests.support.nets import ShallowLM, lm_batches


def small():
    return ShallowLM(), lm_batches(1)[0]


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    out = str(tmp_path / "planned")
    asked = "--size", "mini", "--batch", "1", "--memory", "9", "--keep", "exact", "--device", "cuda", "--out", out
    assert main(["plan", *asked]) == 0
    captured = capsys.readouterr()
    assert "predicted alone" in captured.out
    assert "trainer = L.Trainer(" in captured.out
    written = sorted(path.name for path in (tmp_path / "planned").iterdir())
    assert written == ["plan.json", "plan.png", "plan.yaml"]
    assert json.loads((tmp_path / "planned" / "plan.json").read_text())["measured"] is False


def larger_than_a_machine():
    class Large(ShallowLM):
        def build(self):
            super().build()
            self.blocks.append(torch.nn.Linear(300_000, 300_000, bias=False))

        def forward(self, ids):
            return self.head(self.embed(ids) + self.blocks[-1].weight[0, 0])

    return Large(), lm_batches(1)[0]


ABSENT = "cpu" if torch.cuda.is_available() else "cuda"


def test_a_model_for_a_device_that_is_not_here_is_not_built(capsys):
    assert main(["plan", f"{__name__}:larger_than_a_machine", "--memory", "9000", "--device", ABSENT]) == 0
    assert "predicted alone" in capsys.readouterr().out
    plan = ft.make_plan(lambda: larger_than_a_machine()[0], lm_batches(1)[0], 9000, device=ABSENT)
    assert plan.plain.predicted_bytes > 4 * 4 * 300_000**2


def test_a_model_too_large_to_be_trained_here_is_refused_before_it_is_built(capsys, monkeypatch):
    monkeypatch.setattr(subject, "free_bytes", lambda device: 2**20)
    for command in (["plan", "--size", "nano"], ["estimate", "--size", "nano", "--tokens", "1M"]):
        assert main(command) == 2
        assert "--size nano: its parameters take" in capsys.readouterr().err


def test_bad_input_is_one_line(capsys):
    for arguments, words in (
        ((), "give one of TARGET, --size and --hf"),
        (("--size", "nano", "--memory", "lots"), "memory_gib='lots'"),
        ((f"{__name__}:small", "--memory", "0.00001", "--device", "cuda", "--keep", "exact"), "too much"),
    ):
        assert main(["plan", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err


def test_a_cluster_is_planned_without_it(tmp_path, capsys):
    drawn = tmp_path / "plan.png"
    asked = "--gpu", "H100", "--batch-tokens", "1k", "--tokens", "1M", "--top", "1"
    assert main(["plan", "--size", "nano", *asked, "--out", str(drawn)]) == 0
    captured = capsys.readouterr()
    assert "1 × H100-SXM" in captured.out
    assert "With 2 devices: " in captured.out
    assert "1,024 tokens a step" in captured.out
    assert "pipeline parallelism, offload" in " ".join(captured.out.split())
    assert "accumulate_grad_batches=" in captured.out
    assert drawn.stat().st_size > 0


def test_bad_input_for_a_cluster_is_one_line_at_once(capsys):
    for arguments, words in (
        (("--gpu", "H1000"), "it is not in the table. Use B300"),
        (("--gpu", "H100", "--devices", "3", "--nodes", "2"), "Use devices=2 or 4"),
        (("--gpu", "H100", "--batch-tokens", "100"), "has 256 tokens. Use 256"),
        (("--gpu", "H100", "--devices", "4", "--nodes", "4", "--batch-tokens", "768"), "Use batch_tokens=1,024"),
        (("--gpu", "H100", "--batch-tokens", "many"), "--batch-tokens many"),
        (("--gpu", "H100", "--memory", "9"), "--memory goes without --gpu"),
        (("--gpu", "H100", "--out", "plans"), "Write --out plan.png"),
        (("--tokens", "1T"), "--tokens goes with --gpu"),
    ):
        assert main(["plan", "--size", "nano", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err
        assert captured.err.count("\n") == 1
