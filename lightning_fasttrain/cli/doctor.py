"""Check what this machine offers for fast training, and give the command to install what is missing."""

import platform
import shutil
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_fasttrain.core.checks import read_bounds
from lightning_fasttrain.core.device import (
    GIB,
    bf16_slowdown,
    bf16_units,
    package_version,
    processor_name,
    usable_cores,
)
from lightning_fasttrain.core.messages import ReportTable
from lightning_fasttrain.technique.declarations import find_compiler, has_python_headers

Status = Literal["ok", "missing", "not here"]

# package → (the extra that brings it, what it is for)
_PACKAGES = {
    "peft": ("finetune", "LoRA and its relatives"),
    "bitsandbytes": ("finetune", "8-bit optimizers, 4-bit and 8-bit base models"),
    "transformers": ("finetune", "Hugging Face models"),
    "tokenizers": ("finetune", "BPE for the GPT-2 sizes of the ladder"),
    "safetensors": ("finetune", "weights that are safe to load"),
    "deepspeed": ("deepspeed", "ZeRO"),
    "torchao": ("ao", "low-bit optimizers, float8"),
    "matplotlib": ("plots", "ladder.png"),
}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        name: name of the check.
        status: ``"ok"``; ``"missing"``, which ``fix`` mends; ``"not here"``, which no installation mends.
        detail: what was found, or what it would be for.
        fix: the command or step that brings it, or an empty string.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Check this machine. Nothing is compiled, downloaded or changed, and no optional package is imported.

    Returns:
        Findings in the order in which they matter.

    Example:
        >>> examine()[0].name
        'Python'
    """
    return [
        Finding("Python", "ok", platform.python_version()),
        _package("torch"),
        _package("lightning"),
        Finding("processor", "ok", f"{processor_name()}, {usable_cores()} cores"),
        _gpu(),
        _bf16(),
        _fp8(),
        _attention(),
        _compiler(),
        _triton(),
        *(_package(name, extra, purpose) for name, (extra, purpose) in _PACKAGES.items()),
    ]


def as_table(findings: list[Finding]) -> ReportTable:
    """Return the findings as a table for the terminal."""
    table = ReportTable(
        "fasttrain doctor", {"": "name", "status": "name", "what was found, and how to get it": "prose"}
    )
    styles = {"ok": "", "missing": "yellow", "not here": "dim"}
    for finding in findings:
        found = f"{finding.detail}: {finding.fix}" if finding.fix else finding.detail
        table.add(finding.name, finding.status, found, style=styles[finding.status])
    return table


def _gpu() -> Finding:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        several = f"{count} × " if count > 1 else ""
        capability = f"compute capability {properties.major}.{properties.minor}"
        return Finding(
            "GPU", "ok", f"{several}{properties.name}, {properties.total_memory / GIB:.0f} GiB, {capability}"
        )
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        fix = "reinstall torch with CUDA: pytorch.org, Get Started, gives the command for your driver"
        return Finding("GPU", "missing", "there is an NVIDIA driver, but this torch is built for the CPU only", fix)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found = f"{kind}; torch does not count memory there, which Auto, AutoBatchSize and MemoryBudget need"
        return Finding("GPU", "ok", found)
    return Finding("GPU", "not here", "none that torch can use: training runs on the CPU")


def _bf16() -> Finding:
    if torch.cuda.is_available():
        # Old GPUs only emulate it, slowly.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Finding("bf16", "ok", "on the GPU")
        return Finding("bf16", "not here", "this GPU has none: use precision='16-mixed'")
    units = bf16_units()
    if units:
        return Finding("bf16", "ok", f"the processor multiplies it itself: {', '.join(units)}")
    slower = f"a matrix product takes {bf16_slowdown():.2g} times as long as in fp32"
    return Finding("bf16", "not here", f"the processor has no units for it: {slower}")


def _fp8() -> Finding:
    if not torch.cuda.is_available():
        return Finding("fp8", "not here", "needs a GPU of compute capability 8.9 or more")
    if torch.cuda.get_device_capability() >= (8, 9):
        return Finding("fp8", "ok", "on the GPU")
    return Finding("fp8", "not here", "this GPU is older than compute capability 8.9")


def _attention() -> Finding:
    if not torch.cuda.is_available():
        return Finding("attention back ends", "ok", "scaled_dot_product_attention with its flash kernel for the CPU")
    backends = torch.backends.cuda
    found = {
        "flash": backends.is_flash_attention_available() and backends.flash_sdp_enabled(),
        "memory-efficient": backends.mem_efficient_sdp_enabled(),
        "cuDNN": backends.cudnn_sdp_enabled(),
    }
    names = ", ".join(name for name, there in found.items() if there)
    if found["flash"]:
        return Finding("attention back ends", "ok", names)
    return Finding("attention back ends", "not here", f"no flash attention in this build of torch; there is: {names}")


def _compiler() -> Finding:
    found = find_compiler()
    if found is None:
        return Finding(
            "C++ compiler",
            "missing",
            "torch.compile needs one on the CPU",
            "apt-get install g++   (macOS: xcode-select --install)",
        )
    if not has_python_headers():
        return Finding(
            "C++ compiler", "missing", f"{found} is there, but Python.h is not", "apt-get install python3-dev"
        )
    return Finding("C++ compiler", "ok", f"{found}, with the headers of Python: torch.compile can work")


def _triton() -> Finding:
    version = package_version("triton")
    if version:
        return Finding("triton", "ok", version)
    if torch.cuda.is_available():
        return Finding("triton", "missing", "torch.compile needs it on a GPU", "pip install triton")
    return Finding("triton", "not here", "torch.compile uses it on a GPU only")


def _package(name: str, extra: str = "", purpose: str = "") -> Finding:
    version = package_version(name)
    if version is None:
        return Finding(name, "missing", f"for {purpose}", f"pip install 'lightning-fasttrain[{extra}]'")
    bounds = read_bounds()[name]
    if bounds.contains(version, prereleases=True):
        return Finding(name, "ok", version)
    return Finding(name, "missing", f"{version}, which is not supported", f"pip install '{name}{bounds}'")
