"""What type checkers make of the package as people install it: every public name has a type, and wrong use is seen."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_fasttrain as ft
from tests.support.run_example import ROOT

ROOMS = (
    "architecture",
    "checkpoint",
    "estimate",
    "finetune",
    "guards",
    "loaders",
    "loss",
    "memory",
    "micro_batching",
    "model",
    "optim",
    "planner",
    "profiling",
    "proof",
    "strategy",
    "technique",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what an installed copy consists of: modules, and what pyproject.toml says beside them."""
    site = tmp_path_factory.mktemp("site")
    package = ROOT / "lightning_fasttrain"
    beside = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [*package.rglob("*.py")]
    for pattern in beside["lightning_fasttrain"]:
        files += package.glob(pattern)
    for file in files:
        to = site / file.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    return site


def check(installed, folder, code):
    """What pyright says of a user's file, in strict terms about what is exported."""
    (folder / "user.py").write_text(code)
    settings = {"include": ["user.py"], "extraPaths": [str(installed)], "reportPrivateImportUsage": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", folder],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return [
        (one["range"]["start"]["line"] + 1, one["message"]) for one in json.loads(done.stdout)["generalDiagnostics"]
    ]


@pytest.mark.slow
def test_every_public_name_has_a_type_and_wrong_use_is_seen(installed, tmp_path):
    names = [*ft.__all__, *(f"{room}.{name}" for room in ROOMS for name in public_names(getattr(ft, room)))]
    used = ["import lightning_fasttrain as ft", *(f"print(ft.{name})" for name in names)]
    wrong = ["ft.MicroBatching(4, chek=True)", 'ft.LoRA(rank="16")', "ft.Nonsense()", "ft.ZeROStrategy().stages"]
    said = check(installed, tmp_path, "\n".join([*used, *wrong]) + "\n")
    assert [message for line, message in said if line <= len(used)] == []
    assert sorted({line for line, _ in said}) == [len(used) + 1 + place for place in range(len(wrong))]


def public_names(room):
    """What a room's ``__init__`` imports, without its sub-rooms and files."""
    return [name for name in room.__all__ if callable(getattr(room, name))]
