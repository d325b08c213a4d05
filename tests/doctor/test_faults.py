"""Each planted fault is found, at its line."""

import pytest

from tests.doctor.examined import examine_script
from tests.doctor.faulty_scripts import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_at_its_line(fault, tmp_path, monkeypatch):
    examined = examine_script(fault.script, tmp_path, monkeypatch)
    kinds = [finding["kind"] for finding in examined.all]
    assert fault.kind in kinds
    if examined.marked:
        assert examined.lines(fault.kind) == examined.marked
