"""examples/gpu/prove.py on pieces of a second: what is run, skipped, stopped and kept; and what its report says."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.run_example import ROOT

MACHINE = ({"gpu": None, "cpu": "a processor"}, {"torch": "2.11"})


@pytest.fixture
def prove(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gpu"))
    return importlib.import_module("prove")


@pytest.fixture
def make(prove, tmp_path):
    """Makes a piece that runs these lines of Python; ``result`` is the file that it should write."""

    def piece(name, code, **settings):
        script = tmp_path / f"{name}.py"
        script.write_text(f"import pathlib, sys\nresult = pathlib.Path(sys.argv[1])\n{code}\n")
        defaults = {"estimate_s": 0, "limit_s": 60}
        return prove.PIECES[0].__class__(name, **(defaults | settings), command=f"{script} {{folder}}/result.json")

    return piece


@pytest.fixture
def run(prove, tmp_path):
    """Runs pieces and gives their last lines."""

    def run_all(*pieces, seconds=60, **settings):
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        prove.run_pieces(pieces, out, time.monotonic() + seconds, MACHINE, **settings)
        return prove.last_lines(out)

    return run_all


def test_a_finished_piece_has_a_line_and_is_not_run_again(make, run, tmp_path):
    log = tmp_path / "log"
    piece = make("one", f"open({str(log)!r}, 'a').write('run '); result.write_text('[1, 2]')")
    line = run(piece)["one"]
    assert (line["status"], line["result"], line["hardware"]) == ("done", [1, 2], MACHINE[0])
    assert line["command"].endswith("one.py FOLDER/result.json")
    run(piece)
    assert log.read_text() == "run "
    run(piece, again=True)
    assert log.read_text() == "run run "


def test_a_piece_for_which_time_is_short_is_named_and_waits_for_the_next_call(make, run, capsys):
    long, short = make("long", "result.write_text('1')", estimate_s=100), make("short", "result.write_text('2')")
    lines = run(long, short)
    assert lines["long"]["status"].startswith("skipped: takes about 100 s, and 5")
    assert lines["short"]["status"] == "done"
    assert "long: skipped" in capsys.readouterr().out
    assert run(long, short, seconds=200)["long"]["status"] == "done"


def test_a_piece_whose_package_or_device_is_missing_is_skipped_with_the_reason(make, run):
    lines = run(make("package", "", needs=("no_such_package",)), make("card", "", needs=("cuda",)))
    assert lines["package"]["status"] == "skipped: no_such_package is not installed"
    assert lines["card"]["status"] == "skipped: needs a CUDA device"


def test_a_piece_that_takes_too_long_ends_with_all_it_started_and_keeps_what_it_wrote(make, run, tmp_path):
    beat = tmp_path / "beat"
    forever = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('.')\n    time.sleep(0.05)"
    (tmp_path / "child.py").write_text(forever)
    code = "import subprocess, time\nresult.write_text('[\"a row\"]')\n"
    code += f"subprocess.Popen([sys.executable, {str(tmp_path / 'child.py')!r}])\ntime.sleep(60)"
    line = run(make("slow", code, limit_s=3))["slow"]
    assert (line["status"], line["result"]) == ("stopped after 3 s", ["a row"])
    after = beat.stat().st_size
    assert after > 0
    time.sleep(0.5)
    assert beat.stat().st_size == after


def test_a_piece_that_fails_says_why_and_the_next_one_runs(make, run):
    lines = run(make("bad", "raise OSError('/home/someone/data: no space')"), make("good", "result.write_text('1')"))
    assert lines["bad"]["status"] == "failed with exit code 1"
    assert lines["bad"]["last_words"][-1] == "OSError: …/data: no space"
    assert lines["good"]["status"] == "done"


def test_a_line_that_a_crash_cut_short_costs_that_line_alone(make, run, prove, tmp_path):
    run(make("one", "result.write_text('1')"))
    with open(tmp_path / "out" / "lines.jsonl", "a") as file:
        file.write('{"piece": "two", "sta')
    lines = run(make("three", "result.write_text('3')"))
    assert {name: line["result"] for name, line in lines.items()} == {"one": 1, "three": 3}


def test_a_little_run_does_not_stand_for_a_real_one(make, run):
    piece = make("one", "result.write_text('1')")
    assert run(piece, tiny=True)["one"]["tiny"] is True
    assert run(piece)["one"]["tiny"] is False


def test_an_unknown_piece_is_refused_with_what_there_is(prove):
    with pytest.raises(ValueError, match=r"piece 'cellings': there is none of this name. Use fairness, correctness, "):
        prove.choose(["cellings"])
    assert [piece.name for piece in prove.choose(["doctor", "ceilings", "doctor"])] == ["doctor", "ceilings"]
    assert [piece.name for piece in prove.choose(["stacks"])] == [
        *("gpt2 ours-between 1", "ladder", "chunked loss", "ceilings")
    ]
    assert prove.choose(None) == list(prove.PIECES)


def test_what_is_missing_is_named_and_nothing_else_is_installed(prove, monkeypatch):
    assert prove.find_missing() == []
    there = prove.version

    def version(name):
        if name == "torchmetrics":
            raise prove.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(prove, "version", version)
    assert [re.match(r"\w+", requirement)[0] for requirement in prove.find_missing()] == ["torchmetrics"]
    with pytest.raises(SystemExit, match=r"torchmetrics.*: not installed, and --no-install was given"):
        prove.install_missing(False)


def test_it_starts_where_this_package_is_not_installed(tmp_path):
    script = ROOT / "examples" / "gpu" / "prove.py"
    alone = "import runpy, sys; sys.path = [one for one in sys.path if one and not one.endswith('editable__')]; "
    alone += "sys.meta_path = [one for one in sys.meta_path if 'editable' not in str(one).lower()]; "
    alone += f"sys.argv = ['prove.py', '--report', {str(tmp_path)!r}]; sys.path.insert(0, {str(script.parent)!r}); "
    alone += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", alone], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "Nothing measured." in ended.stdout


def test_the_figures_that_count_come_within_three_minutes(prove):
    names = [piece.name for piece in prove.PIECES]
    first = names.index("gpt2 ours-lean 1")
    assert sum(piece.estimate_s for piece in prove.PIECES[: first + 1]) <= 180
    assert names[-1] == "tests"


def test_a_group_is_done_within_a_lease_of_twelve_minutes(prove):
    known = {piece.name for piece in prove.PIECES}
    for name, pieces in prove.GROUPS.items():
        assert name not in known
        assert sum(piece.estimate_s for piece in prove.choose([name])) <= 12 * 60, name
        assert len(set(pieces)) == len(pieces)


def test_tests_are_counted_also_where_they_were_stopped(prove):
    pieces = importlib.import_module("pieces")
    printed = (
        "collected 5 items\n\n"
        "tests/a.py::test_one PASSED                [ 20%]\n"
        "tests/a.py::test_two[a b] FAILED           [ 40%]\n"
        "tests/b.py::test_three SKIPPED (no card)   [ 60%]\n"
        "tests/b.py::test_four ERROR                [ 80%]\n"
        "tests/b.py::test_fi"
    )
    found = pieces.read_tests(printed, Path("nowhere"))
    assert found["names"] == ["tests/a.py::test_two[a b]", "tests/b.py::test_four"]
    assert [found[key] for key in ("passed", "failed", "skipped", "errors")] == [1, 1, 1, 1]


def test_every_piece_runs_a_script_that_exists_within_the_time_of_a_call(prove):
    names = [piece.name for piece in prove.PIECES]
    assert len(set(names)) == len(names)
    for piece in prove.PIECES:
        words = shlex.split(f"{piece.command} {piece.full} {piece.tiny}".format(folder="F", out="O", tokens=""))
        assert words[0] == "-m" or (ROOT / words[0]).exists()
        assert piece.estimate_s < piece.limit_s < 8.5 * 60


@pytest.fixture
def report(prove):
    return importlib.import_module("proof_report")


def test_flops_of_gpt2_are_those_of_palms_appendix(report):
    """By hand: 6 · 124,439,808 + 12 · 12 · 768 · 1024."""
    assert report.flops_per_token(124_439_808, layers=12, width=768, context=1024) == 746_638_848 + 113_246_208


def test_cards_are_told_by_their_names(report):
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "a card of tomorrow"]
    assert [report.data_sheet_tflops(name) for name in names] == [989, 756, 989, 312, None]


def a_line(piece, result, status="done", gpu="NVIDIA H200"):
    about = {"hardware": {"gpu": gpu, "cpu": "a processor"}, "versions": {"torch": "2.11"}, "tiny": False}
    return {"piece": piece, "status": status, "result": result, "date": "2026-01-02T00:00:00", **about}


def a_run(ms):
    settings = {"layers": 12, "width": 768, "length": 1024}
    return {
        "step_ms_all": [ms, 2 * ms],
        "peak_mib": 10240,
        "losses": [3.0, 2.0],
        "tokens_per_step": 32768,
        "parameters": 124_439_808,
        "settings": settings,
    }


def test_the_report_has_speed_mfu_and_peak_of_each_side(report):
    lines = [a_line("gpt2 loop 1", a_run(80)), a_line("gpt2 loop 2", a_run(100)), a_line("ceilings", {"tflops": 800.0})]
    lines.append(a_line("gpt2 hf-compile 1", None, status="stopped after 120 s"))
    found = {line["piece"]: line for line in lines}
    found["ceilings"]["result"]["gb_per_s"] = {"device": 4000.0}
    text = report.as_markdown(found)
    # 32,768 tokens in 90 ms, 859,885,056 operations each: 313.07 TFLOPS.
    assert "| a loop, torch.compile | 90.0 | 364,089 | 39.1% | 31.7% | 10.00 |" in text
    assert "| HF, torch_compile | stopped after 120 s |" in text
    assert "| ceilings | products 800.0 TFLOPS; copies 4,000 GB/s device |" in text
    assert "| offload | not run yet |" in text
    assert text.startswith("Measured on NVIDIA H200, torch 2.11, 2026-01-02 to 2026-01-02.\n")


def test_without_ceilings_and_data_sheet_there_is_no_mfu(report):
    line = a_line("gpt2 loop 1", a_run(100), gpu="a card of tomorrow")
    assert "| 100.0 | 327,680 |  |  | 10.00 |" in report.as_markdown({"gpt2 loop 1": line})


def test_the_report_compares_the_losses_of_naive_and_top(report):
    naive, top = {"losses": [4.0, 2.0] * 100}, {"losses": [4.0, 2.25] * 100, "source": "the ladder's rung fused"}
    lines = {name: a_line(name, result) for name, result in (("parity naive", naive), ("parity top", top))}
    assert report.parity(lines) == (
        "200 steps: losses differ by at most 0.25; mean of the last 50 3.0000 naive, 3.1250 at the top "
        "(the ladder's rung fused)"
    )
    assert report.parity({"parity naive": lines["parity naive"]}) is None


def test_the_report_is_written_beside_the_lines(report, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plots' brings it")
    text = report.write_report({"gpt2 loop 1": a_line("gpt2 loop 1", a_run(100))}, tmp_path)
    assert (tmp_path / "report.md").read_text() == text
    assert (tmp_path / "prove.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_says_so(report, tmp_path):
    assert report.as_markdown({}).startswith("Nothing measured.")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x5_nn_align8>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32_64x64x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("triton_poi_fused_gelu_gelu_backward_3", "element-wise"),
        ("triton_red_fused_native_layer_norm_backward_7", "sums and norms"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
            "optimizer",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("a kernel of tomorrow", "other"),
    ],
)
def test_kernels_are_told_by_their_names(prove, kernel, kind):
    profile = importlib.import_module("step_profile")
    assert profile.kind_of(kernel) == kind
    assert profile.sum_kinds({kernel: (2, 3.0), "another": (1, 1.0)})[kind] == (4.0 if kind == "other" else 3.0)


def test_the_profile_is_drawn_beside_the_roofline(prove, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plots' brings it")
    profile = importlib.import_module("step_profile")
    row = {"kernels": 5, "step_ms": 10.0, "host_ms": 4.0, "kinds": {"products": 6.0, "other": 2.0}}
    rows = [{"side": side, **row} for side in ("ours-fast", "ours-lean")]
    profile.draw({"products_ms": 5.0, "rows": [*rows, {"side": "ours-blocks", "kernels": 0}]}, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_top_is_the_fast_stack_of_the_ladder(prove, tmp_path):
    parity = importlib.import_module("parity")
    ladder = tmp_path / "ladder.json"
    ladder.write_text(json.dumps({"tops": {"fast": {"name": "bf16", "state": "its state"}}}))
    assert parity.top_of(ladder) == ("its state", "the ladder's rung bf16")
    ladder.write_text(json.dumps({"tops": {}}))
    assert parity.top_of(ladder)[0] is parity.top_of(tmp_path / "none.json")[0] is parity.DEFAULT_TOP
