"""Every report at 80 and 160 columns: no line is longer, and no word is lost or broken."""

import functools
import io
import logging
import math
import sys

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder import report as ladder_report
from lightning_fasttrain.bench.ladder.results import Climbed
from lightning_fasttrain.cli import doctor, technique_cards
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.core import messages
from lightning_fasttrain.core.messages import Report, ReportTable, output_width, wrap
from lightning_fasttrain.doctor.diagnosis import Cost, Diagnosis, Finding
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
from lightning_fasttrain.estimate import count_step_flops, estimate_training
from lightning_fasttrain.memory import predict_memory
from lightning_fasttrain.model.memory_budget.checkpoint_plan import KEPT, BlockPlan, CheckpointPlan
from lightning_fasttrain.planner import why_not
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.plan import Plan, Tried
from lightning_fasttrain.profiling.memory_record import Allocation, MemoryRecord
from lightning_fasttrain.proof.rehearsal.context import RehearsalReport
from lightning_fasttrain.proof.verification.compare_records import Distance
from lightning_fasttrain.proof.verification.report import QUANTITIES, Verification, Verified
from lightning_fasttrain.strategy import choose_strategy
from tests.support.run_example import ROOT

LONG = "a sentence about the run that is long enough to be wrapped on any terminal, and longer than most of them are"
LADDER = ROOT / "examples/results/ladder_cpu.json"


def net():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])


def loss(model, batch):
    return model(batch).sum()


def make_plan():
    choice = Choice(precision="bf16-mixed", parts=16, recompute="all", compile="blocks")
    rows = [Tried(choice, 2.0**30, 120.5, (119.0, 120.5), 2**30), Tried(Choice(), 2.0**32, 90.0, why_not=LONG)]
    return Plan(rows[0], rows[1], tuple(rows), (LONG,), {"adapter lora": LONG}, 8.0, "cuda", True, notes=(LONG,))


def make_verification():
    distances = [Distance(what, 2e-7, 1e-5, bitwise=False, where="", share=0.0) for what in QUANTITIES]
    names = ("MicroBatching(n=4)", "ActivationCheckpointing(policy=SelectiveOps(('aten.mm', 'aten.addmm')))")
    rows = [
        Verified(names, "bf16-mixed", "exact", tuple(distances)),
        Verified(names[:1], "32-true", "exact", failure=LONG),
    ]
    return Verification("Transformer", tuple(rows), problems=(LONG,), notes=(LONG,))


def make_diagnosis():
    line = SourceLine("/home/user/project/train.py", 12, "loss.item()")
    gain = Cost(12.0, 10.0, 14.0, is_gain=True)
    found = Finding("host_sync", LONG, "Log every 50 steps", "exact", line, gain, (LONG,))
    return Diagnosis("cuda", 20, 40.0, {"forward": 30.0, "backward": 10.0}, (found,), notes=(LONG,))


def make_record():
    held = Allocation(2**20, 0.0, category="parameters", name="model.layers.0.self_attention.query_projection.weight")
    return MemoryRecord("cpu", [held], steps_ms=[0.0], end_ms=3.0)


def make_rehearsal():
    return RehearsalReport({"verify": LONG, "largest batch": LONG}, notes=[LONG], seconds=12.0)


def make_checkpoint_plan():
    block = BlockPlan("model.layers.17.decoder_block_with_a_long_name", KEPT, 2**20, 2**20, 1.0, 0.0)
    return CheckpointPlan(2**30, (block,), 1, 2**28, 2**29)


REPORTS = {
    "verify": make_verification,
    "shard": lambda: choose_strategy(
        net(), torch.zeros(2, 64), 4, memory_gib=8, loss=loss, optimizer=torch.optim.AdamW, device="cpu", nodes=2
    ),
    "doctor, of a script": make_diagnosis,
    "doctor, of the machine": lambda: doctor.as_table([*doctor.examine(), doctor.Finding("x", "missing", LONG, "pip")]),
    "plan": make_plan,
    "why-not": lambda: why_not(net()),
    "memory": lambda: predict_memory(net, torch.zeros(2, 64), loss=loss, optimizer=torch.optim.AdamW, device="cpu"),
    "estimate": lambda: estimate_training(
        ft.bench.gpt.reference_gpt("nano", 2).module, ft.bench.gpt.reference_gpt("nano", 2).batch(), 1e9, gpu="H100:8"
    ),
    "FLOPs": lambda: count_step_flops(net, torch.zeros(2, 64), loss=loss),
    "techniques": lambda: technique_cards.as_table(technique_cards.read_cards()),
    "techniques for a goal": lambda: technique_cards.as_table(technique_cards.find_cards("out of memory")),
    "rehearse": make_rehearsal,
    "ladder": lambda: ladder_report.as_table(Climbed.read(LADDER)),
    "memory timeline": make_record,
    "checkpoint plan": lambda: make_checkpoint_plan().table(),
}


@functools.cache
def table_of(kind):
    made = REPORTS[kind]()
    return made.as_table() if isinstance(made, Report) else made


def words_of(lines):
    # Facts below a row are joined by commas and semicolons.
    return {word.rstrip(",;") for line in lines for word in line.split()}


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("kind", REPORTS)
def test_every_report_fits_the_terminal_and_keeps_every_word(kind, width):
    table = table_of(kind)
    lines = table.as_text(width).splitlines()
    assert max(map(len, lines)) <= width
    said = [table.title, *table.notes]
    for cells, _ in table.rows:
        said += [line for cell in cells for line in cell]
    lost = words_of(said) - words_of(lines)
    assert not [word for word in lost if len(word) < 70]  # a path may be longer than a line
    # Names stand at the left, alone or in the first column.
    names = [cells[0][0] for cells, _ in table.rows if cells]
    starts = [name.split()[0] for name in names if name]
    assert all(any(line.split()[:1] == [start] for line in lines) for start in starts)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_sentences_are_never_narrower_than_thirty_columns(width):
    table = ReportTable("", {"name": "name", "GiB": "number", "": "prose", "and": "prose"})
    table.add("bf16 mixed, micro-batches ×16", "12.30", LONG, LONG)
    wrapped = table.as_text(width).splitlines()[1:]
    assert max(map(len, wrapped)) <= width
    assert len(wrapped) <= 2 + 2 * math.ceil(len(LONG) / 22)


@pytest.mark.parametrize("width", [1, 10, 80])
def test_a_table_without_rows_has_a_heading(width):
    words = RehearsalReport().as_table().as_text(width).replace("\n", "")
    assert words.replace(" ", "").startswith("Rehearsalstage")


def test_a_word_longer_than_the_line_is_the_only_one_that_is_broken():
    assert wrap("see model.layers.0.attention here", 12) == ["see model.la", "  yers.0.att", "  ention", "  here"]


def test_the_width_is_that_of_columns_or_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert output_width() == 80
    assert max(map(len, str(make_plan()).splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda descriptor: (_ for _ in ()).throw(OSError("no terminal")))
    assert output_width() == 120


@pytest.mark.parametrize(
    "arguments",
    [["techniques"], ["memory", "--size", "nano"], ["shard", "--size", "nano", "--devices", "4", "--memory", "4"]],
    ids=str,
)
def test_commands_print_for_80_columns(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_go_to_what_stderr_is_when_they_are_said_and_are_wrapped_on_a_terminal(monkeypatch):
    log = logging.getLogger("lightning_fasttrain.heard_here")
    log.addHandler(messages._StderrHandler())
    log.propagate = False
    monkeypatch.setenv("COLUMNS", "40")
    bar, file = Terminal(), io.StringIO()
    for stream in (bar, file):  # as a progress bar does while it runs
        monkeypatch.setattr(sys, "stderr", stream)
        log.warning("%s\n  Time  12 ms/step", LONG)
    assert file.getvalue() == f"{LONG}\n  Time  12 ms/step\n"
    lines = bar.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(map(str.strip, lines[:-1])) == LONG
    assert lines[-1] == "  Time  12 ms/step"
