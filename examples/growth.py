"""How the time of everything that the suite does itself grows: over blocks, parameters and ranks.

    python -m examples.growth [techniques] [widths] [functions] [--only NAME] [--turns 2] [--out RESULTS.json]

Each technique trains a small language model for a few steps, as in ``tests/cases.py``, with its trial and whatever else
it does at the start; the planner, ``verify`` and the predictions are called once. An exponent is the slope of log(time)
over log(size): 1 is in proportion. Times are CPU time of this process on one thread, the least of several turns, since
other work of a machine only adds time; a row above the limit is measured in more turns. Files are in memory where the
system has such a folder, since a disk has a growth of its own. ``tests/test_contracts.py`` counts calls of functions.
"""

import argparse
import datetime
import gc
import json
import logging
import math
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.core.messages import ReportTable
from lightning_fasttrain.estimate import estimate_training
from lightning_fasttrain.memory import count_flops, predict_memory
from lightning_fasttrain.planner import why_not
from tests import cases
from tests.support.nets import VOCAB, Block, TinyLM, as_loader, lm_batches, trainer

LIMIT = 1.1
MORE_TURNS = 4  # for a row above the limit
FEWEST_SIZES, ENOUGH_SECONDS = 3, 0.6  # larger sizes are left out where three are measured and one takes so long
GROUPS = ("techniques", "widths", "functions")
WIDTH = 32
BATCH = lm_batches(1)[0]


class SizedLM(TinyLM):
    """The language model of the tests, in any width."""

    def __init__(self, depth: int = 3, width: int = WIDTH, **settings: Any) -> None:
        self.width = width
        super().__init__(depth, **settings)

    def build(self) -> None:
        if self.embed is None:
            self.embed = nn.Embedding(VOCAB, self.width).requires_grad_(not self.frozen)
            self.blocks = nn.ModuleList([Block(self.width, self.p) for _ in range(self.depth)])
            self.head = nn.Linear(self.width, VOCAB, bias=False)
            self.head.weight = self.embed.weight


@dataclass
class Row:
    """What is measured: ``prepare(size)`` returns the work that is timed.

    Attributes:
        name: what does the work.
        over: what the size is.
        sizes: values of the argument of ``prepare``, growing.
        measure_of: argument → the size; by default the argument itself.
        seconds: CPU time of each size.
        turns: turns of which these are the least.
    """

    name: str
    over: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Callable[[], object]]
    measure_of: Callable[[int], int] = lambda size: size
    seconds: list[float] = field(default_factory=list)
    turns: int = 0

    def take_turn(self) -> None:
        """Measure each size once more."""
        times: list[float] = []
        for size in self.sizes:
            work = self.prepare(size)
            gc.collect()
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
            if self.turns == 0 and len(times) >= FEWEST_SIZES and times[-1] > ENOUGH_SECONDS:
                self.sizes = self.sizes[: len(times)]
                break
        self.seconds = list(map(min, self.seconds, times)) if self.turns else times
        self.turns += 1

    @property
    def exponent(self) -> float:
        """The slope of the least squares."""
        return _slope(list(map(self.measure_of, self.sizes)), self.seconds)

    def read(self, earlier: Sequence[dict[str, Any]]) -> bool:
        """Take the times of an earlier run, if it has them."""
        for row in earlier:
            if (row["what"], row["over"]) == (self.name, self.over):
                self.sizes = self.sizes[: len(row["sizes"])]
                self.seconds, self.turns = row["cpu_seconds"], row["turns"]
                return True
        return False

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.name,
            "over": self.over,
            "sizes": list(map(self.measure_of, self.sizes)),
            "cpu_seconds": [round(seconds, 4) for seconds in self.seconds],
            "turns": self.turns,
            "exponent": round(self.exponent, 3),
        }


def _slope(sizes: list[int], values: list[Any]) -> float:
    logs, logs_of_values = list(map(math.log, sizes)), list(map(math.log, values))
    middle, middle_of_values = sum(logs) / len(logs), sum(logs_of_values) / len(logs)
    products = [(x - middle) * (y - middle_of_values) for x, y in zip(logs, logs_of_values, strict=True)]
    return sum(products) / sum((x - middle) ** 2 for x in logs)


def list_rows(groups: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of these groups, all for none."""
    groups = groups or GROUPS
    budget = replace(
        cases.BY_NAME["ActivationCheckpointing"],
        make=lambda: ft.ActivationCheckpointing(ft.MemoryBudget(1.0)),
        batches=5,
    )
    for name, case in {"plain training": None, **cases.BY_NAME, "MemoryBudget": budget}.items():
        if "techniques" in groups:
            yield Row(name, "blocks", (12, 24, 48, 96), partial(prepare_training, case))
        if "widths" in groups:
            yield Row(name, "parameters", (256, 512, 1024), partial(prepare_training, case, 3), parameters_of_width)
    if "functions" not in groups:
        return
    for name, run in FUNCTIONS.items():
        yield Row(name, "blocks", (3, 6, 12) if "plan" in name else (8, 16, 32), partial(partial, run))
        yield Row(name, "parameters", (64, 128, 256), partial(partial, run, 3), parameters_of_width)
    for name, run_on in ON_RANKS.items():
        yield Row(name, "ranks", (8, 64, 512), partial(partial, run_on))


def prepare_training(case: cases.Case | None, depth: int, width: int = WIDTH) -> Callable[[], object]:
    """Return a short training with a technique; None for none."""
    torch.manual_seed(11)
    if case is None:
        return partial(trainer().fit, SizedLM(depth, width), as_loader(lm_batches(3)))
    net = SizedLM(depth, width, **case.optimizer)
    return partial(trainer([case.make()], **case.settings).fit, net, as_loader(lm_batches(case.batches)))


def parameters_of_width(width: int) -> int:
    """Return the number of parameters of a model of three blocks."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in SizedLM(3, width).parameters())


def _factory(depth: int, width: int) -> Callable[[], SizedLM]:
    return partial(SizedLM, depth, width)


def _predict(depth: int, width: int = WIDTH, **settings: Any) -> None:
    predict_memory(_factory(depth, width), BATCH, **settings)


def _verify(depth: int, width: int = WIDTH) -> None:
    ft.verify(SizedLM(depth, width), BATCH, [ft.MicroBatching(2)], accelerator="cpu")


def _train_with_auto(depth: int, width: int = WIDTH) -> None:
    with tempfile.TemporaryDirectory(dir=cases.FOLDER) as folder:  # a plan of an earlier turn is not read
        run = trainer([ft.Auto(memory_gib=10)], default_root_dir=folder)
        run.fit(SizedLM(depth, width), as_loader(lm_batches(2)))


# Name → a function of blocks and width.
FUNCTIONS: dict[str, Callable[..., object]] = {
    "predict_memory on a CPU": partial(_predict, device="cpu"),
    "predict_memory on CUDA": _predict,
    "predict_memory, recomputed in micro-batches": partial(
        _predict, techniques=[ft.ActivationCheckpointing(), ft.MicroBatching(2)], precision="bf16-mixed"
    ),
    "predict_memory of FSDP2 on 8 ranks": partial(_predict, strategy=ft.FSDP2Strategy(), world=8),
    "predict_memory of ZeRO on 8 ranks": partial(_predict, strategy=ft.ZeROStrategy(stage=3), world=8),
    "count_flops": lambda depth, width=WIDTH: count_flops(_factory(depth, width), BATCH),
    "estimate_training": lambda depth, width=WIDTH: estimate_training(_factory(depth, width), BATCH, 1e9, gpu="H100:8"),
    "why_not": lambda depth, width=WIDTH: why_not(SizedLM(depth, width), BATCH),
    "choose_strategy on 8 ranks": lambda depth, width=WIDTH: ft.choose_strategy(
        _factory(depth, width), BATCH, 8, memory_gib=10
    ),
    "make_plan, the planner": lambda depth, width=WIDTH: ft.make_plan(_factory(depth, width), BATCH, 10, device="cuda"),
    "Auto, the planner in a run": _train_with_auto,
    "verify": _verify,
}

# Name → a function of the number of ranks.
ON_RANKS: dict[str, Callable[[int], object]] = {
    "predict_memory of DDP": lambda world: _predict(8, strategy="ddp", world=world),
    "predict_memory of FSDP2": lambda world: _predict(8, strategy=ft.FSDP2Strategy(), world=world),
    "predict_memory of ZeRO": lambda world: _predict(8, strategy=ft.ZeROStrategy(stage=3), world=world),
    "choose_strategy": lambda world: ft.choose_strategy(_factory(8, WIDTH), BATCH, world, memory_gib=10),
    "make_plan": lambda world: ft.make_plan(_factory(2, WIDTH), BATCH, 10, world, device="cuda"),
}


def measure(row: Row, turns: int) -> None:
    """Measure a row in so many turns, and in more while it is above the limit."""
    row.prepare(row.sizes[0])()  # what is imported and looked up once
    gc.collect()
    gc.freeze()  # collections before each run would pass over all that is imported
    for _ in range(turns):
        row.take_turn()
    while row.exponent > LIMIT and row.turns < turns + MORE_TURNS:
        row.take_turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures; a run that was cut short continues it")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [row for row in list_rows(options.groups) if options.only in row.name]
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    earlier = []
    if options.out is not None and options.out.exists():
        earlier = json.loads(options.out.read_text())["rows"]
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        cases.FOLDER = folder
        for place, row in enumerate(rows, start=1):
            if not row.read(earlier):
                measure(row, options.turns)
            print(f"[{place}/{len(rows)}] {row.name} over {row.over}: {row.exponent:.2f}", file=sys.stderr, flush=True)
            if options.out is not None:
                write_report(options.out, rows[:place])
    print_table(rows)


def print_table(rows: Sequence[Row]) -> None:
    """Print a row's sizes, the time at the largest one, and its exponent, and which are above the limit."""
    kinds = ("name", "name", "name", "number", "number")
    columns = dict(zip(("", "over", "sizes", "CPU s", "exponent"), kinds, strict=True))
    table = ReportTable("Growth: the slope of log(time) over log(size)", columns)
    for row in rows:
        sizes = f"{row.measure_of(row.sizes[0]):,} to {row.measure_of(row.sizes[-1]):,}"
        table.add(row.name, row.over, sizes, f"{row.seconds[-1]:.3f}", f"{row.exponent:.2f}")
    print(table)
    print(f"above {LIMIT}: {', '.join(list_above(rows)) or 'none'}")


def list_above(rows: Sequence[Row]) -> list[str]:
    """Return the rows above the limit."""
    return [f"{row.name} over {row.over}" for row in rows if row.exponent > LIMIT]


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows so far as JSON."""
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "command": without_paths(shlex.join(["python", "-m", "examples.growth", *sys.argv[1:]])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "times": "CPU time of the process on one thread, the least of the turns",
        "took_cpu_seconds": round(time.process_time()),
        "limit": LIMIT,
        "above_the_limit": list_above(rows),
        "rows": [row.as_dict() for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
