"""The page of a diagnosis: one HTML file without scripts or external resources."""

import json
from pathlib import Path

from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.doctor.diagnosis import Diagnosis


def save_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write ``doctor.json`` to a folder."""
    return [write_atomic(folder / "doctor.json", json.dumps(diagnosis.as_dict(), indent=2))]
