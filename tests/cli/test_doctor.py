import importlib.metadata
import re
import shutil

import pytest
from packaging.requirements import Requirement

from lightning_fasttrain.cli import doctor
from lightning_fasttrain.core.device import hardware, package_version, versions


def named(findings):
    return {finding.name: finding for finding in findings}


def test_it_looks_for_everything_and_says_how_to_get_what_is_missing():
    findings = named(doctor.examine())
    looked_for = {"GPU", "bf16", "fp8", "attention back ends", "C++ compiler", "bitsandbytes", "deepspeed", "torchao"}
    assert looked_for <= set(findings)
    for finding in findings.values():
        assert finding.detail
        assert bool(finding.fix) == (finding.status == "missing")


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda name: None if name == "torchao" else "1.0")
    assert named(doctor.examine())["torchao"].fix == "pip install 'lightning-fasttrain[ao]'"


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.1"), ("torch", "3.0.0"), ("peft", "0.18.1")])
def test_a_version_that_pip_would_replace_is_reported(name, version, monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda asked: version if asked == name else package_version(asked))
    finding = named(doctor.examine())[name]
    assert finding.status == "missing"
    command, _, wanted = finding.fix.rpartition(" ")
    assert command == "pip install"
    wanted = Requirement(wanted.strip("'"))
    assert wanted.name == name
    metadata = map(Requirement, importlib.metadata.requires("lightning-fasttrain"))
    assert wanted.specifier in [requirement.specifier for requirement in metadata if requirement.name == name]


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    finding = named(doctor.examine())["C++ compiler"]
    assert (finding.status, "apt-get install g++" in finding.fix) == ("missing", True)


def test_a_cpu_build_beside_a_driver_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.torch.version, "cuda", None)
    finding = named(doctor.examine())["GPU"]
    assert finding.status == "missing"
    assert "pytorch.org" in finding.fix


def test_bf16_units_of_the_processor_are_named(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "bf16_units", lambda: ["avx512_bf16", "amx_bf16"])
    finding = named(doctor.examine())["bf16"]
    assert (finding.status, "avx512_bf16, amx_bf16" in finding.detail) == ("ok", True)


def test_without_bf16_units_it_measures_what_bf16_costs(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "bf16_units", list)
    finding = named(doctor.examine())["bf16"]
    assert finding.status == "not here"
    slower = re.search(r"a matrix product takes (\S+) times as long as in fp32", finding.detail)
    assert slower
    assert float(slower[1]) > 0


def test_the_table_shows_commands_whole():
    finding = doctor.Finding("torchao", "missing", "for float8", "pip install 'lightning-fasttrain[ao]'")
    assert "pip install 'lightning-fasttrain[ao]'" in doctor.as_table([finding]).as_text(120)


def test_hardware_and_versions_are_filled_in():
    machine = hardware()
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["ram_gib"] > 0
    assert {"python", "torch", "lightning"} <= set(versions())
