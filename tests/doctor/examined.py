"""Run a script as ``fasttrain doctor`` does, but in this process, which has imported everything."""

import importlib.metadata
import json
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import registry

from lightning_fasttrain.cli import examined_script
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, write_entry_point
from lightning_fasttrain.doctor.findings import operators
from lightning_fasttrain.doctor.observation import source_lines

MARK = "# <-"
POINT = "lightning_fasttrain.cli.examined_script:make_callbacks"


class EndedError(Exception):
    """Stands for the end of the script's process."""


@dataclass
class Examined:
    """What the doctor found in a script."""

    script: Path
    report: dict[str, Any]
    table: str

    @property
    def all(self) -> list[dict[str, Any]]:
        return [*self.report["findings"], *self.report["minor"]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [finding for finding in self.all if finding["kind"] == kind]

    def lines(self, kind: str) -> list[int]:
        """Lines of the script at which a kind of fault was found."""
        found = []
        for finding in self.of_kind(kind):
            assert finding["line"] is not None, finding
            assert Path(finding["line"]["file"]) == self.script
            found.append(finding["line"]["number"])
        return found

    @property
    def marked(self) -> list[int]:
        """Lines of the script that carry the mark."""
        return [number for number, line in enumerate(self.script.read_text().splitlines(), 1) if MARK in line]


def examine_script(code: str, folder: Path, monkeypatch, steps: int = 8, warmup: int = 1) -> Examined:
    script, points = folder / "train.py", folder / "points"
    script.write_text(code)
    points.mkdir()
    write_entry_point(points, POINT)
    orders = {"steps": steps, "warmup": warmup, "out": str(folder / "out")}
    monkeypatch.setenv(examined_script.DOCTOR, json.dumps(orders))
    monkeypatch.setenv(RESULT, str(folder / "result.json"))
    monkeypatch.setattr(sys, "argv", ["-c", str(script)])
    monkeypatch.setattr(sys, "path", ["", str(points), *sys.path])
    monkeypatch.setattr(examined_script, "end_process", _end)
    monkeypatch.setattr(examined_script, "_examinations", [])
    # The modules of other tests are not the user's.
    user_files = source_lines.user_files
    for module in (source_lines, operators):
        monkeypatch.setattr(module, "user_files", lambda: [one for one in user_files() if one == str(script)])
    # Other tests look through all that is installed once only.
    monkeypatch.setattr(registry, "entry_points", importlib.metadata.entry_points)
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(EndedError):
            examined_script.run_examined()
    result = json.loads((folder / "result.json").read_text())
    return Examined(script, result["report"], result["table"])


def _end(code: int) -> None:
    raise EndedError(code)
