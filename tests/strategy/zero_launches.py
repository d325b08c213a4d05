"""One launch of one process and one of two, side by side, for all tests of ZeRO and of its checkpoints."""

import json
from pathlib import Path
from typing import Any

from tests.support.ranks import Ranks, launch_once

Found = dict[int, list[dict[str, Any]]]
COUNTS = (1, 2)
DEPTH = 2  # blocks of the models: what stage 3 costs goes by the number of parameters


def launched(factory: Any) -> tuple[Found, Path]:
    """What was found: number of processes → of each rank; and the folder with the checkpoints they left."""
    folder = launch_once(factory, "zero", _launch)
    return {count: json.loads((folder / f"found-{count}.json").read_text()) for count in COUNTS}, folder


def _launch(folder: Path) -> None:
    launches = [
        Ranks("tests.strategy.zero_scenarios", folder, log=folder / f"log-{count}", count=count) for count in COUNTS
    ]
    try:
        for ranks in launches:
            ranks.wait(timeout_s=420)
    finally:
        for ranks in launches:
            ranks.stop()
