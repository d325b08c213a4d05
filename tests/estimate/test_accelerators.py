import pytest
import torch
from lightning.fabric.utilities import throughput

from lightning_fasttrain.estimate import ACCELERATORS, find_accelerator, read_devices


def test_each_accelerator_names_its_source_and_is_found_by_its_name():
    for name, accelerator in ACCELERATORS.items():
        assert accelerator.source
        assert find_accelerator(name.lower().replace("-", " ")) is accelerator
        # FLOPs for each byte, and for each watt: a wrong unit, or sparsity, would be far from all others.
        assert 75 < accelerator.flops / accelerator.bandwidth_gb_per_s / 1e9 < 425
        assert accelerator.watts is None or 1.8e11 < accelerator.flops / accelerator.watts < 2.3e12


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("H100-SXM", "h100 sxm"), ("H100-PCIe", "h100 pcie"), ("L4", "l4"), ("L40", "l40"), ("A100", "a100")],
)
def test_dense_peaks_are_those_that_lightning_states(name, theirs):
    stated = throughput._CUDA_FLOPS[theirs][torch.bfloat16]
    assert find_accelerator(name).flops == pytest.approx(stated, rel=1e-3)


def test_devices_are_counted():
    assert read_devices("A100")[1] == 1
    accelerator, count = read_devices("h100-pcie:16")
    assert (accelerator.name, count) == ("H100-PCIe", 16)


@pytest.mark.parametrize("text", ["H100:0", "H100:-1", "H100:2.5", "H100:8:8"])
def test_a_number_of_devices_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a number of devices\. Write H100:8"):
        read_devices(text)


def test_an_unknown_accelerator_lists_the_table():
    with pytest.raises(ValueError, match=r"'H1000': it is not in the table\. Use B300, B200.*or make an Accelerator"):
        find_accelerator("H1000")
