"""One launch of one process and one of two, side by side, for all tests of ZeRO and of its checkpoints."""

import json
from pathlib import Path
from typing import Any

from tests.support.ranks import Ranks, launch_once
from tests.support.s3_server import s3_server

Found = dict[int, list[dict[str, Any]]]
COUNTS = (1, 2)
DEPTH = 2  # blocks of the models: the time of stage 3 depends on the number of parameters
# Stages of a scenario by optimizer. SGD shows gradients of the wrong size, AdamW has a state.
EQUAL = {"sgd": (1, 3), "adamw": (0, 2, "2+offload", "3+offload")}
WEIGHED = {"sgd": (0, 3, "2+offload"), "adamw": (2,)}
IN_FABRIC = {"sgd": (0, 3), "adamw": (1, "2+offload", "3+offload")}


def launched(factory: Any) -> tuple[Found, Path]:
    """Return the results: number of processes → results of each rank; and the folder with their checkpoints."""
    folder = launch_once(factory, "zero", _launch)
    return {count: json.loads((folder / f"found-{count}.json").read_text()) for count in COUNTS}, folder


def _launch(folder: Path) -> None:
    with s3_server(folder):
        launches = [
            Ranks("tests.strategy.zero_scenarios", folder, log=folder / f"log-{count}", count=count) for count in COUNTS
        ]
        try:
            for ranks in launches:
                ranks.wait(timeout_s=420)
        finally:
            for ranks in launches:
                ranks.stop()
