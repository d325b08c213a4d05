import json

from lightning_fasttrain.cli import main
from tests.plan.test_memory_command import module  # noqa: F401  (a fixture)


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


def test_bad_input_is_one_line(capsys):
    for arguments, words in (
        ((), "give either TARGET or --size"),
        (("--size", "nano"), "there is nothing to compare the plain step with"),
        (("--size", "nano", "--techniques", "LoRe"), "technique 'LoRe'"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
