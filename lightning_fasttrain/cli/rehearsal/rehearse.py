"""The command ``fasttrain rehearse``: run a script, unchanged, up to its first step, or kill it repeatedly."""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fasttrain.cli.command import CommandError
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, SECONDS, run_script

ORDERS = "FASTTRAIN_KILL_ORDERS"  # in the environment: a JSON object, the fields of killed_script.Orders
BATCH, UPDATE, SAVE = "at the start of a batch", "between backward and update", "during a save"
PLACES = BATCH, UPDATE, SAVE
FOLDER = "{folder}"  # among the script's arguments: where it writes, and looks for what it wrote
_KILL_POINT = "lightning_fasttrain.cli.rehearsal.killed_script:make_callbacks"
_LONGEST_DELAY_S = 0.05
_KEEPING = "callbacks=[ft.ExactResume(), ft.AtomicCheckpoints()] and ckpt_path=ft.newest_checkpoint(folder)"


@dataclass
class Kills:
    """Result of a rehearsal with kills.

    Attributes:
        steps: optimizer steps of the uninterrupted run.
        moments: a sentence for each kill.
        differ: paths of what is another at the end.
        problem: why the script cannot be called safe; "" if it can.
        seconds: of all runs.
    """

    steps: int = 0
    moments: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problem

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}


class _ScriptError(Exception):
    """A run did not behave as required."""


def rehearse_kills(
    script: str,
    arguments: Sequence[str],
    kills: int,
    steps: int,
    seed: int,
    *,
    quiet: bool = False,
    start: Callable[..., int] = run_script,
) -> Kills:
    """Run a script whole, and again with kills from which it must resume by itself; compare the two results.

    Both run in new folders, up to ``steps`` optimizer steps of the first fit. Each kill is a SIGKILL at a moment that
    the seed gives: at the start of a batch, between backward and update, or during a save.

    Args:
        script: a file.
        arguments: of it; ``{folder}`` in them becomes the folder of a run, where the script must write its checkpoints
            and look for them when it starts.
        kills: how many.
        steps: see above; more than ``kills``.
        seed: for the moments.
        quiet: what the script prints goes to stderr.
        start: how a script is run.

    Returns:
        How it went; a script that fails is a problem there.
    """
    found, began = Kills(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fasttrain-kills-") as name:
        runs = _Runs(script, arguments, steps, Path(name), partial(start, quiet=quiet))
        try:
            _compare(runs, found, kills, random.Random(seed))
        except _ScriptError as error:
            found.problem = str(error)
    found.seconds = time.monotonic() - began
    return found


def _compare(runs: "_Runs", found: Kills, kills: int, draw: random.Random) -> None:
    whole = runs.to_the_end("whole")
    found.steps = int(whole["global step"])
    if found.steps <= kills:
        raise _ScriptError(f"{found.steps} steps are too few for {kills} kills. Use fewer kills, or more steps.")
    # Kills come after the first step, so that there may be a checkpoint, and before the last.
    after = sorted(draw.sample(range(1, found.steps), kills))
    for step, until in zip(after, [*after[1:], found.steps - 1], strict=True):
        place, delay = draw.choice(PLACES), draw.uniform(0, _LONGEST_DELAY_S)
        found.moments.append(runs.until_killed(place=place, step=step, until=max(step, until), delay_s=delay))
    end = runs.to_the_end("killed")
    found.differ = _find_differences(whole, end)
    # Only now, since one more run takes as long as the first.
    if found.differ and _find_differences(whole, runs.to_the_end("whole again")):
        raise _ScriptError(
            "two uninterrupted runs end differently too, so nothing can be said of kills. "
            "Make the script repeatable: L.seed_everything(0, workers=True)."
        )
    if not any(runs.went_on_from):
        raise _ScriptError(
            "it began from nothing after every kill: either no checkpoint was there yet, or it is not looked for. "
            f"Use more --steps or save more often; and {_KEEPING}."
        )
    if found.differ:
        some = ", ".join(found.differ[:3])
        raise _ScriptError(
            f"it does not end as the uninterrupted run: {len(found.differ)} of {len(whole)} differ ({some}). "
            f"Use {_KEEPING}."
        )


def _find_differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [path for path in dict.fromkeys([*one, *other]) if one.get(path) != other.get(path)]


class _Runs:
    """Starts the script, again and again in the same folder if it is killed."""

    def __init__(
        self, script: str, arguments: Sequence[str], steps: int, folder: Path, start: Callable[..., int]
    ) -> None:
        self.script, self.arguments, self.steps, self.folder, self.start = script, arguments, steps, folder, start
        self.went_on_from: list[int] = []

    def to_the_end(self, name: str) -> dict[str, str]:
        """Return the final state of a run without kills, as digests by path."""
        lines = self._run(name, {})
        end = next((line["end"] for line in lines if "end" in line), None)
        if end is None:
            raise _ScriptError("it ended before its first fit did")
        return end

    def until_killed(self, **orders: str | float) -> str:
        """Run until the kill, and describe its moment."""
        lines = self._run("killed", orders)
        killed = next((line for line in lines if "killed" in line), None)
        if killed is None:
            raise _ScriptError(f"it ended before it was killed, at step {orders['step']}")
        return f"{killed['killed']}, after step {killed['step']}"

    def _run(self, name: str, orders: Mapping[str, object]) -> list[dict[str, Any]]:
        # The record is beside the folder, since the script may list its files.
        folder, record = self.folder / name, self.folder / "record.jsonl"
        folder.mkdir(exist_ok=True)
        record.unlink(missing_ok=True)
        order = json.dumps({"record": str(record), "steps": self.steps, **orders})
        arguments = [argument.replace(FOLDER, str(folder)) for argument in self.arguments]
        _tell_progress(name, orders)
        code = self.start(self.script, arguments, _KILL_POINT, {ORDERS: order})
        lines = _read_lines(record)
        for line in lines:
            if "refused" in line:
                raise _ScriptError(f"it cannot be compared: {line['refused']}")
            if "from" in line and name == "killed":
                self.went_on_from.append(line["from"])
        if code != 0 and not any(line.keys() & {"killed", "end"} for line in lines):
            again = "when it was started again after a kill" if any(folder.iterdir()) else "by itself"
            raise _ScriptError(f"it failed {again}, with exit code {code}, see above")
        return lines


def _read_lines(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    return list(map(json.loads, record.read_text().splitlines()))


def _tell_progress(name: str, orders: Mapping[str, object]) -> None:
    what = f"to be killed {orders['place']}, from step {orders['step']} on" if orders else "to its end"
    print(f"fasttrain rehearse: the {name} run, {what}", file=sys.stderr, flush=True)


_POINT = "lightning_fasttrain.cli.rehearsal.rehearsed_script:make_callbacks"


def rehearse(options: argparse.Namespace) -> int:
    """Run ``fasttrain rehearse``: a script up to its first step, or killed and started again."""
    _refuse_bad_kills(options)
    if options.kill:
        return _rehearse_kills(options)
    return _rehearse(options)


def _refuse_bad_kills(options: argparse.Namespace) -> None:
    _refuse_missing(options.script)
    if options.kill < 0:
        raise CommandError(f"--kill {options.kill}: it is a number of kills. Use --kill 5.")
    if options.kill and not any(FOLDER in argument for argument in options.arguments):
        raise CommandError(
            f"--kill needs {FOLDER} among the script's arguments: the script writes real checkpoints, and every run "
            f"needs a folder of its own. Give it where the script takes its folder: {options.script} --out {FOLDER}"
        )
    if options.kill and options.kill >= options.steps:
        why = "there is a kill a step at most. Use more steps."
        raise CommandError(f"--kill {options.kill} with --steps {options.steps}: {why}")


def _refuse_missing(script: str) -> None:
    if not Path(script).is_file():
        raise CommandError(f"there is no script {script}. Give a Python file.")


def _rehearse(options: argparse.Namespace) -> int:
    result, code = rehearse_script(options.script, options.arguments, options.seconds, quiet=options.json)
    if result is None and code == 0:
        raise CommandError("the script ended without a Trainer.fit. Nothing was rehearsed.")
    if result is None:
        raise CommandError(f"the script ended with {code} before its first step, see above.", 1)
    if options.json:
        result.pop("table", None)
        print(json.dumps(result, indent=2))
    elif not result["ok"]:
        raise CommandError(result["error"], 1)
    else:
        print(result["table"])
    return int(not result["ok"])


def rehearse_script(
    script: str, arguments: Sequence[str], seconds: float, *, quiet: bool = False
) -> tuple[dict[str, Any] | None, int]:
    """Run a script with a rehearsal in each Trainer, in a process of its own.

    Args:
        script: a file.
        arguments: of it.
        seconds: see ``Rehearsal``.
        quiet: what the script prints goes to stderr.

    Returns:
        What was found, None if no fit began; and the exit code of the script.
    """
    return ask_script(script, arguments, {SECONDS: str(seconds)}, quiet=quiet)


def ask_script(
    script: str,
    arguments: Sequence[str],
    orders: Mapping[str, str],
    *,
    quiet: bool,
    point: str = _POINT,
    runner: str = "",
) -> tuple[dict[str, Any] | None, int]:
    """Run a script up to its first step.

    Args:
        script, arguments, orders, quiet, point: as in :func:`run_script`.
        runner: Python that runs the script, whose arguments it gets; "" for Python itself.

    Returns:
        What the callback found, None if no fit began; and the exit code.
    """
    _refuse_missing(script)
    program, given = ("-c", [runner, script, *arguments]) if runner else (script, arguments)
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        code = run_script(program, given, point, {RESULT: str(result), **orders}, quiet=quiet)
        if not result.exists():
            return None, code
        return json.loads(result.read_text()), code


def _rehearse_kills(options: argparse.Namespace) -> int:
    found = rehearse_kills(
        options.script, options.arguments, options.kill, options.steps, options.seed, quiet=options.json
    )
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
        return int(not found.ok)
    for number, moment in enumerate(found.moments, 1):
        print(f"kill {number}: {moment}")
    if found.ok:
        what = f"weights, buffers, optimizers and schedules after step {found.steps}"
        print(f"the end: {what} are the uninterrupted run's, bit for bit")
    print(f"Rehearsed in {found.seconds:.1f} s.")
    if not found.ok:
        raise CommandError(found.problem, 1)
    return 0
