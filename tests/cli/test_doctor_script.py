"""``fasttrain doctor script.py``: the script runs unchanged, and ends after the steps that are watched."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fasttrain.cli import examine_script
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.cli.rehearsal.run_script import write_entry_point
from lightning_fasttrain.step_time.machine import read_machine
from tests.support.ranks import Ranks

LOOP = """
import sys
import torch

net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
kept = []
for step in range(int(sys.argv[1])):
    loss = net(torch.ones(8, 64)).square().mean()
    kept.append(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("after", "w").close()
"""


def start_fork(script, arguments, point, orders, *, quiet=False):
    """As ``run_script`` does it for ``python -c``, but as a fork of a process that has imported everything."""
    assert script == "-c"
    code, *rest = arguments
    with tempfile.TemporaryDirectory() as name:
        write_entry_point(Path(name), point)
        program = Path(name) / "start.py"
        program.write_text(
            f"import os, sys\nos.environ |= {dict(orders)}\nsys.path[:0] = ['', {name!r}]\nsys.argv = {['-c', *rest]}\n"
            f"os.chdir({str(Path(rest[0]).parent)!r})\nexec({code!r})\n"
        )
        (code,), _, _ = Ranks(str(program), log=Path(name) / "log", count=None).end()
        return code


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(examine_script, "run_script", start_fork)
    file = tmp_path / "train.py"
    file.write_text(LOOP)
    return file


def test_a_script_ends_after_its_steps_with_a_page_and_a_table(script, tmp_path, capsys):
    assert main(["doctor", "--steps", "8", "--out", str(tmp_path / "out"), str(script), "1000"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Python") < printed.index("ms/step on cpu")
    assert "kept.append(loss)" in printed
    assert f"Written: {tmp_path / 'out' / 'doctor.html'}" in printed
    assert not (tmp_path / "after").exists()
    page = (tmp_path / "out" / "doctor.html").read_text()
    assert "kept.append(loss)" in page
    for external in ("http:", "https:", "<script", "url(", "@import"):
        assert external not in page


def test_json_has_the_machine_and_the_findings(script, tmp_path, capsys):
    assert main(["doctor", "--steps", "8", "--out", str(tmp_path / "out"), "--json", str(script), "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"][0]["name"] == "Python"
    assert found["step_ms"] > 0
    (grown,) = [finding for finding in found["findings"] if finding["kind"] == "growing_memory"]
    assert grown["line"] == {"file": str(script), "number": 10, "text": "kept.append(loss)"}


def test_a_script_that_trains_nothing_is_an_error(script, capsys):
    script.write_text("print('nothing')")
    assert main(["doctor", str(script)]) == 2
    assert "the script trained nothing" in capsys.readouterr().err
    script.write_text("raise SystemExit(3)")
    assert main(["doctor", str(script)]) == 1
    assert "the script ended with 3 before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--steps", "2"], "at least 6 steps"), (["--warmup", "0"], "--warmup 0"), (["none.py"], "no script none.py")],
)
def test_bad_input_is_refused(arguments, says, capsys):
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "H1000", "SCRIPT"], "'H1000': it is not in the table"),
        (["--machine", "nowhere.json", "SCRIPT"], "nowhere.json: there is no such file"),
        (["--machine", "A100"], "Give a script, too"),
    ],
)
def test_a_machine_that_is_not_known_is_refused_before_the_script_runs(script, arguments, said, capsys):
    assert main(["doctor", *(str(script) if one == "SCRIPT" else one for one in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_the_step_of_a_script_is_compared_with_a_machine(script, tmp_path, capsys):
    profile = replace(read_machine("A100"), name="mine").save(tmp_path / "mine.json")
    command = ["doctor", "--steps", "8", "--machine", str(profile), "--out", str(tmp_path / "out"), "--json"]
    assert main([*command, str(script), "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared_with"] == "mine"
    assert found["needed_ms"]["products"] > 0
