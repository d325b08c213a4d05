"""Each planted fault is found, at its line, and its cost is what the cure brings."""

import statistics

import pytest

from tests.doctor.examined import examine_script
from tests.doctor.faulty_scripts import FAULTS

# Whether a cure is faster depends on how busy the machine is.
TIMED = {"unfused_optimizer"}
ROWS = [pytest.param(fault, id=fault.name, marks=[pytest.mark.benchmark] * (fault.kind in TIMED)) for fault in FAULTS]


@pytest.mark.parametrize("fault", ROWS)
def test_a_planted_fault_is_found_at_its_line(fault, tmp_path, monkeypatch):
    # Lines are sampled, and fast machines take some steps for a sample.
    examined = examine_script(fault.script, tmp_path, monkeypatch, steps=30)
    kinds = [finding["kind"] for finding in examined.all]
    # How many operators could be tried depends on the machine, as does whether bfloat16 is.
    assert [note for note in examined.report["notes"] if "for lack of time" not in note] == []
    assert fault.kind in kinds
    if examined.marked:
        assert examined.lines(fault.kind) == examined.marked


COSTLY = [fault for fault in FAULTS if fault.cured]


@pytest.mark.benchmark
@pytest.mark.parametrize("fault", COSTLY, ids=lambda fault: fault.name)
def test_a_stated_cost_is_within_a_factor_of_two_of_what_the_cure_brings(fault, tmp_path, monkeypatch):
    gains, stated = [], []
    for turn in range(3):
        folder = tmp_path / str(turn)
        reports = {}
        for name, script in (("faulty", fault.script), ("cured", fault.cured_script)):
            (folder / name).mkdir(parents=True)
            with monkeypatch.context() as patches:
                reports[name] = examine_script(script, folder / name, patches, steps=20, warmup=3)
        gains.append(reports["faulty"].report["step_ms"] - reports["cured"].report["step_ms"])
        stated.append(sum(finding["cost"]["value"] for finding in reports["faulty"].of_kind(fault.kind)))
    print(f"{fault.name}: stated {stated} ms, gained {gains} ms")
    assert statistics.median(gains) / 2 < statistics.median(stated) < 2 * statistics.median(gains)
