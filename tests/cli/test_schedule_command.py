"""``fasttrain schedule`` draws what ``build_schedule`` does."""

import xml.etree.ElementTree as xml

import pytest

from lightning_fasttrain.cli.main import main


def test_it_draws_the_rate_as_columns(capsys):
    assert main(["schedule", "linear", "--total", "4", "--lr", "0.02"]) == 0
    chart = capsys.readouterr().out.splitlines()
    columns = [line.partition("│")[2].ljust(4) for line in chart[:10]]
    heights = [sum(" ▁▂▃▄▅▆▇█".index(block) for block in column) for column in zip(*columns, strict=True)]
    assert chart[0].startswith("    0.02 │")
    assert "linear: 4 steps, warm-up 0, rate 0.02 → 0.005" in chart[10]
    assert heights == [80, 60, 40, 20]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_it_writes_a_picture(tmp_path, capsys, kind):
    path = tmp_path / f"rate.{kind}"
    assert main(["schedule", "wsd", "--total", "1e9tok", "--warmup", "5%", "--out", str(path)]) == 0
    assert f"Written: {path}" in capsys.readouterr().out
    if kind == "svg":
        assert xml.parse(path).getroot().tag.endswith("svg")
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_epochs_need_their_steps(capsys):
    assert main(["schedule", "step", "--total", "3ep", "--at", "1ep,2ep"]) == 2
    assert "give --epoch-steps" in capsys.readouterr().err
    assert main(["schedule", "step", "--total", "3ep", "--at", "1ep,2ep", "--epoch-steps", "50"]) == 0
    assert "step: 150 steps, warm-up 0, rate 1 → 0.01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cosinus", "--total", "9"], "shape='cosinus'"),
        (["cosine", "--total", "soon"], "total='soon'"),
        (["cosine", "--total", "9", "--out", "rate.pdf"], "expected an SVG or PNG file"),
        (["cosine", "--total", "9", "--warmup", "1tok"], "Give all lengths in one of them"),
    ],
)
def test_what_it_cannot_draw_is_refused(arguments, says, capsys):
    assert main(["schedule", *arguments]) == 2
    assert says in capsys.readouterr().err
