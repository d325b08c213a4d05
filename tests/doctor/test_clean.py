"""Nothing is found in scripts without faults."""

import pytest

from tests.doctor.clean_scripts import CLEAN
from tests.doctor.examined import examine_script

# In the default tests nothing may depend on a time, so findings that do are left to the benchmark.
_OF_TIMES = {"data_wait", "slow_item", "slow_collate", "slow_conversion", "slow_callback"}
_OF_TIMES |= {"bf16", "tf32", "channels_last", "cudnn_benchmark", "padded_sizes", "returned_memory"}


@pytest.mark.parametrize("name", CLEAN)
def test_a_script_without_faults_has_no_findings(name, tmp_path, monkeypatch):
    examined = examine_script(CLEAN[name], tmp_path, monkeypatch, steps=6)
    assert [finding for finding in examined.report["findings"] if finding["kind"] not in _OF_TIMES] == []


@pytest.mark.benchmark
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_in_a_script_without_faults_costs_two_percent(name, tmp_path, monkeypatch):
    examined = examine_script(CLEAN[name], tmp_path, monkeypatch, steps=20, warmup=3)
    for finding in examined.report["findings"]:
        # Where a machine multiplies bf16 faster, float32 is a choice and no fault.
        assert finding["kind"] in ("bf16", "tf32") or finding["cost"]["share"] < 0.02, finding
