"""Is what ``fasttrain tune`` advises right? Ten scripts as other people write them, each tuned, changed and measured.

    python examples/tune_foreign.py [--scripts gan,ddp] [--minutes 3] [--turns 5] [--check nanogpt,gan] [--out FILE]

Each script of ``examples/foreign/`` is tuned in a folder of its own. What is advised is then applied, by ``--apply``
or, where a program cannot change the script, by its own command line, and run in turn with the script as it is: the
time of a step without its wait for data, the quickest of each turn. A row says whether that is within 10% of what tune
said. A script ends in an answer if tune prints one and no traceback. With ``--check``, each single technique that tune
left out is also measured in three turns with what it advises, and the best of them in nine more: the last column is
the most that any of these gains, with an interval. Rows of other scripts in the file that is written are kept.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import lightning as L

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.cli.rehearsal.rehearsed_script import end_script
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, end_process, run_script
from lightning_fasttrain.cli.tuning.tune import TUNE, Advice
from lightning_fasttrain.cli.tuning.tuned_script import TuneAndEnd
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.planner.candidates import find_axes
from lightning_fasttrain.planner.timing import Stopwatch, compare_times
from lightning_fasttrain.proof.rehearsal.context import read_batches
from lightning_fasttrain.proof.rehearsal.rehearsal import is_rehearsing
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import facts_of_machine

FOLDER = Path(__file__).parent / "foreign"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py"))
PRECISION = {"hydra_template": "+trainer.precision={}"}  # the command line of a script that makes no call of Trainer
ADDED = "FASTTRAIN_FOREIGN"  # in the environment: Python that makes the techniques
WARMUP, FEWEST, MOST, SECONDS = 4, 5, 60, 3.0
TURNS, FINAL_TURNS, FINALISTS = 3, 9, 3  # of single techniques


class TimeSteps(L.Callback):
    """Times steps of whole batches, without the wait for them, and ends the process."""

    def __init__(self):
        self.times, self.began, self.size = [], 0.0, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        took_ms = 1e3 * (time.perf_counter() - self.began)
        self.size = self.size or batch_size(batch)
        if batch_size(batch) == self.size:
            self.times.append(took_ms)
        timed = self.times[WARMUP:]
        # Several ranks end after the same batch.
        enough = trainer.world_size > 1 or sum(timed) > 1e3 * SECONDS or len(timed) >= MOST
        if enough and len(timed) >= FEWEST:
            if trainer.is_global_zero:
                end_script(True, {"ok": True, "ms": min(timed)})
            end_process(0)


def make_timer():
    return [] if RESULT not in os.environ else [*eval(os.environ.get(ADDED, "[]"), {"ft": ft}), TimeSteps()]


def time_script(script, arguments, techniques=()):
    """The quickest step of one run of a script, in ms."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        orders = {RESULT: str(result), ADDED: f"[{', '.join(techniques)}]"}
        run_script(str(script), arguments, "tune_foreign:make_timer", orders, quiet=True)
        return json.loads(result.read_text())["ms"]


def tune(script, minutes, *options):
    """What tune says of a script, and how that ended."""
    command = [sys.executable, "-m", "lightning_fasttrain.cli", "tune", "--json", "--minutes", str(minutes), *options]
    began = time.monotonic()
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, cwd=script.parent)
    found = {"seconds": time.monotonic() - began, "code": done.returncode, "traceback": "Traceback" in done.stderr}
    if done.returncode:  # what cannot be applied is said all the same
        found["error"] = done.stderr.strip().splitlines()[-1]
    if not done.stdout:
        return found, None
    said = json.loads(done.stdout)
    said.pop("is_worth_it")
    return found, Advice(**said)


def apply_and_measure(script, advice, turns):
    """The gain of the applied advice, in turn with the script as it is, and how it was applied."""
    copy = script.with_name(f"{script.stem}_tuned.py")
    changed, arguments, techniques = copy, [], []
    if not copy.exists():
        changed, techniques = script, advice.techniques
        arguments = [PRECISION[script.stem].format(advice.precision)] if advice.precision else []
    before, after = [], []
    for _ in range(turns):
        before.append(time_script(script, []))
        after.append(time_script(changed, arguments, techniques))
    gain = compare_times(after, before)
    said = advice.gain[0]
    return {
        "applied": "by --apply" if changed is copy else "on the command line",
        "before_ms": min(before),
        "after_ms": min(after),
        "gain": [gain.value, gain.low, gain.high],
        "within_10_percent": abs(gain.value / said - 1) <= 0.1,
    }


class CheckSingles(TuneAndEnd):
    """Measures each single technique that was left out, beside what was advised."""

    def _advise(self, trainer, pl_module, tuning):
        said = json.loads(os.environ[ADDED])
        run = self._run
        batch = read_batches(trainer, 2, seconds=0.0)[0].first[0]
        with run.module_with_transfer_hooks() as module:
            axes = find_axes(module, batch, facts_of_machine(), Exactness.TOLERANCE, None, "bf16-mixed")
            advised = next(one for one in axes.choices() if is_advised(one, said))
            watch = Stopwatch(module, batch, {"accelerator": "cpu"})
            others = [replace(advised, **{axis: word}) for axis, words in axes.words.items() for word in words[1:]]
            others += [replace(advised, parts=parts) for parts in axes.parts[1:4]]
            others = [one for one in dict.fromkeys(others) if isinstance(one.recompute, str) and one != advised]
            first = gains_beside(advised, others, watch, TURNS, tuning)
            best = sorted(first, key=lambda one: first[one][0], reverse=True)[:FINALISTS]
            final = gains_beside(advised, best, watch, FINAL_TURNS, tuning)
        gains, finals = ({str(one): gain for one, gain in found.items()} for found in (first, final))
        end_script(True, {"ok": True, "gains": {"first": gains, "final": finals}})


def gains_beside(advised, others, watch, turns, tuning):
    """How many times as fast each of the others is, from so many turns: the value, and its interval."""
    times = {one: [] for one in (advised, *others)}
    for _ in range(turns):
        for one in list(times):
            tuning.progress.say(str(one))
            try:
                times[one].append(watch.time(one).ms)
            except Exception:
                del times[one]  # it cannot be used beside the others
    ratios = {one: compare_times(times[one], times[advised]) for one in others if one in times}
    return {one: (ratio.value, ratio.low, ratio.high) for one, ratio in ratios.items()}


def is_advised(choice, said):
    return choice.code() == said["techniques"] and choice.precision == (said["precision"] or "32-true")


def make_check():
    if is_rehearsing() or RESULT not in os.environ:
        return []
    return [CheckSingles(**json.loads(os.environ[TUNE]))]


def check_singles(script, advice):
    """Each single technique beside the advised ones → how many times as fast."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        worth = advice.is_worth_it
        said = {"techniques": advice.techniques if worth else [], "precision": advice.precision if worth else None}
        tuning = {"memory": "fit", "keep": "tolerance", "seconds": 60.0}
        orders = {RESULT: str(result), ADDED: json.dumps(said), TUNE: json.dumps(tuning)}
        run_script(str(script), [], "tune_foreign:make_check", orders, quiet=True)
        if not result.exists():  # a loop, which has no Trainer to be taken over
            return {}
        return json.loads(result.read_text()).get("gains", {})


def describe(row):
    parts = [row["script"], row["advised"] or row.get("error", "nothing")]
    if "measured" in row:
        value, low, high = row["said"]
        applied = row["measured"]
        parts.append(f"said {value:.2f} ({low:.2f} to {high:.2f}), applied {applied['gain'][0]:.2f}")
        parts.append("within 10%" if applied["within_10_percent"] else "not within 10%")
    if row.get("singles", {}).get("final"):
        value, low, high = max(row["singles"]["final"].values())
        parts.append(f"the best that was left out gains {value:.2f} ({low:.2f} to {high:.2f})")
    return "; ".join([*parts, f"{row['seconds']:.0f} s"])


def try_script(name, options):
    """The row of a script."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(shutil.copy(FOLDER / f"{name}.py", folder))
        found, advice = tune(script, options.minutes, "--apply")
        left = sorted(one.name for one in Path(folder).iterdir() if one.stem not in (name, f"{name}_tuned"))
        row = {"script": name, "advised": "", "files_left": left, **found}
        if advice is None:
            return row
        row["costs"] = {what: round(share, 3) for what, share in advice.list_shares()}
        row["findings"], row["notes"] = advice.findings, advice.notes
        if advice.is_worth_it:
            row["advised"] = ", ".join([*filter(None, [advice.precision]), *advice.techniques])
            row |= {"said": advice.gain, "verdict": advice.verdict, "before_ms": advice.before_ms}
            row |= {"after_ms": advice.after_ms, "before_bytes": advice.before_bytes, "after_bytes": advice.after_bytes}
            row["measured"] = apply_and_measure(script, advice, options.turns)
        if name in options.check.split(","):
            row["singles"] = check_singles(script, advice)
        return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="names with commas between them")
    parser.add_argument("--minutes", type=float, default=3.0, help="for tune; default: 3")
    parser.add_argument("--turns", type=int, default=5, help="of the script as it is and as advised; default: 5")
    parser.add_argument("--check", default="", help="scripts of which single techniques are measured")
    parser.add_argument("--out", default="tune_foreign_cpu.json")
    options = parser.parse_args()
    # For the processes of the scripts, in which callbacks of this file act.
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = {}
    if Path(options.out).exists():
        rows = {row["script"]: row for row in json.loads(Path(options.out).read_text())["rows"]}
    command = without_paths(shlex.join(["examples/tune_foreign.py", *sys.argv[1:]]))
    for name in options.scripts.split(","):
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows[name] = {**try_script(name, options), "date": date, "command": command}
        print(describe(rows[name]), flush=True)
        about = {"hardware": hardware(), "versions": versions()}
        write_atomic(options.out, json.dumps({**about, "rows": list(rows.values())}, indent=2))


if __name__ == "__main__":
    main()
