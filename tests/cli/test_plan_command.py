import json

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
