import pytest

from lightning_fasttrain.bench.gpt import SIZES
from lightning_fasttrain.bench.ladder import preflight
from lightning_fasttrain.cli.main import main


@pytest.fixture(autouse=True)
def _no_rung_is_run(monkeypatch):
    from lightning_fasttrain.bench.ladder import run_ladder as climbing

    def climb(*arguments):
        raise AssertionError("a rung was run although the input was bad")

    monkeypatch.setattr(climbing, "climb", climb)


def refusal(capsys, *arguments):
    """The one line on stderr with which ``fasttrain ladder`` ends, and its exit code."""
    try:
        code = main(["ladder", *arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return code, captured.err


def test_unknown_size(tmp_path, capsys):
    code, line = refusal(capsys, "--size", "huge", "--out", str(tmp_path))
    assert code == 2
    assert "size='huge'" in line
    assert "'nano', 'tiny', 'mini', 'gpt2-small'" in line


def test_missing_text(tmp_path, capsys):
    code, line = refusal(capsys, "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path))
    assert (code, "no such file or folder" in line) == (2, True)


def test_empty_text(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    code, line = refusal(capsys, "--text", str(tmp_path / "empty.txt"), "--out", str(tmp_path))
    assert (code, "it holds no text" in line) == (2, True)


def test_text_shorter_than_a_batch(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("to be or not to be")
    code, line = refusal(capsys, "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path))
    assert (code, "shorter than one batch" in line) == (2, True)


def test_output_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, line = refusal(capsys, "--out", str(tmp_path / "file" / "inside"))
    assert (code, "output folder" in line, "--out" in line) == (2, True, True)


def test_output_folder_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(preflight.tempfile, "NamedTemporaryFile", refuse)  # root may write everywhere
    code, line = refusal(capsys, "--out", str(tmp_path))
    assert (code, "permission denied" in line) == (2, True)


def test_batch_smaller_than_micro_batches(tmp_path, capsys):
    code, line = refusal(capsys, "--batch", "2", "--micro-batches", "4", "--out", str(tmp_path))
    assert (code, "batch=2 with micro_batches=4" in line, "--batch 4" in line) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "0"], "batch=0"),
        (["--steps", "-1"], "steps=-1"),
        (["--attention", "fast"], "attention='fast'"),
        (["--rungs", "bf16,warp"], "rung 'warp'"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_other_bad_arguments(tmp_path, capsys, arguments, says):
    code, line = refusal(capsys, "--out", str(tmp_path), *arguments)
    assert (code, says in line) == (2, True)


def test_the_help_names_every_size(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["ladder", "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in SIZES)


def test_doctor_prints_a_table(capsys):
    assert main(["doctor"]) == 0
    assert "C++ compiler" in capsys.readouterr().out


def test_without_a_command_it_says_which_there_are(capsys):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_bad_input_is_one_line_and_leaves_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["ladder", "--size", "huge"]) == 2
    assert capsys.readouterr().err.startswith("fasttrain ladder: size='huge'")
    assert list(tmp_path.iterdir()) == []


def test_a_removed_command_is_answered_with_what_to_use(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["cluster-check", "--mib", "1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("fasttrain: cluster-check was removed. Use nccl-tests and PyTorch's flight recorder")
    assert said.count("\n") == 1
