"""Beside the rivals, in one run: the same Hugging Face model in Hugging Face's Trainer, Lightning's, a loop, and ours.

    python examples/against.py [--model llama|bert|vit|gpt2] [--sides hf,ours-fast] [--rounds 3] [--out RESULTS.json]
    python examples/against.py --table RESULTS.json      # the stored figures as a Markdown table
    python examples/against.py --table ONE.json OTHER.json ...      # ours beside the best rivals, a line for each file

All sides have the same initial weights, batches, AdamW (fused, constant learning rate, no weight decay) and precision;
nobody clips, drops out, logs or saves. Each side and round is a process of its own, and the sides take turns. Time is
the fastest step of a process, from the beginning of one step to that of the next; of the rounds the median, the
smallest and the largest are shown. Memory is PeakMemory's, of one step before the timed ones, for all sides. Losses are
compared with those of the first side, step by step. "products" is no training, but a step's matrix products and
attention alone, which no side can do without: each is shown as a share of their speed. Rows are kept as they come, so
Ctrl-C leaves what is there.
"""

import argparse
import datetime
import json
import logging
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rivals import DEFAULT_SIDES, PARTS, SHAPES, SIDES, WARMUP, attention_of, build_model
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fasttrain.bench.ladder.results import refuse_non_finite
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.bench.ladder.worker import Recorder
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.device import Neighbours, fast_mixed_precision, hardware, package_version, versions
from lightning_fasttrain.core.messages import explain

EQUAL = ("settings", "attention", "optimizer", "precision")  # of sides that are compared
BEST = {"fast": ("fastest", "step_ms"), "lean": ("leanest", "peak_mib")}


def run_side(options):
    """One side in this process, which is its own."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fasttrain", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    recorder, side = Recorder(torch.device(options.device), WARMUP, options.steps), SIDES[options.side]
    optimizers = set()
    watching = register_optimizer_step_post_hook(lambda one, *_: optimizers.add(describe_optimizer(one)))
    side.train(options, recorder)
    watching.remove()
    tokens = options.batch * options.length
    with torch.device("meta"):
        about = {"settings": settings_of(options), "parameters": build_model(options).num_parameters()}
    if side.kind != "limit":
        about |= {"attention": attention_of(side, options), "optimizer": ", ".join(sorted(optimizers))}
        about["precision"] = getattr(side.train, "keywords", {}).get("precision", options.precision)
    return refuse_non_finite({**recorder.result(tokens), "tokens_per_step": tokens, **about})


def describe_optimizer(optimizer):
    group = optimizer.param_groups[0]
    return f"{type(optimizer).__name__}, lr {group['lr']:g}, weight decay {group['weight_decay']:g}"


def settings_of(options):
    return {name: getattr(options, name) for name in ("model", *SHAPES["llama"], "device", "precision", "steps")}


def run_in_a_process(options, side, number):
    """A run of ``side`` as plain JSON; with ``error`` if it failed."""
    started, neighbours = time.perf_counter(), Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--out", str(out)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found = json.loads(out.read_text()) if out.exists() else {"error": last_words(process)}
    found["disturbed_cores"] = neighbours.cores()
    return {"side": side, "round": number, "error": None, "wall_s": time.perf_counter() - started, **found}


def last_words(process):
    lines = process.stderr.strip().splitlines() or [f"ended with exit code {process.returncode}"]
    return without_paths(lines[-1])


def summarise(runs):
    """A row for each side: of its processes' fastest steps the median; how far its losses are from the first side's."""
    rows = []
    good = [run for run in runs if run["error"] is None]
    first = next((run for run in good if SIDES[run["side"]].kind != "limit"), None)
    for name in dict.fromkeys(run["side"] for run in runs):
        own = [run for run in good if run["side"] == name]
        row = {"side": name, "title": SIDES[name].title, "kind": SIDES[name].kind, "rounds": len(own), "error": None}
        rows.append(row)
        if not own:
            row["error"] = next(run["error"] for run in runs if run["side"] == name)
            continue
        fastest = sorted(min(run["step_ms_all"]) for run in own)
        row["step_ms"] = statistics.median(fastest)
        row["step_ms_range"] = [fastest[0], fastest[-1]]
        row["tokens_per_s"] = 1e3 * own[0]["tokens_per_step"] / row["step_ms"]
        if row["kind"] == "limit":
            continue
        row["peak_mib"] = max(run["peak_mib"] for run in own)
        row |= {name: own[0].get(name) for name in EQUAL}
        if row["attention"] == "masked":
            row["title"] += " (masked attention)"
        row["first_loss"], row["last_loss"] = own[0]["losses"][0], own[0]["losses"][-1]
        row["loss_difference"] = max(largest_difference(run["losses"], first["losses"]) for run in own)
    limits = [row["step_ms"] for row in rows if row["kind"] == "limit" and row["error"] is None]
    for row in rows:
        if limits and row["error"] is None:
            row["share_of_limit"] = limits[0] / row["step_ms"]
    return rows


def differences(row, other):
    """Name what two sides do not have in common, though only what is equal can be compared."""
    return [name for name in EQUAL if row.get(name) != other.get(name)]


def largest_difference(losses, others):
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


def judge(rows):
    """Ours beside the best rival of its kind, a sentence each, also where we lose."""
    good = [row for row in rows if row["error"] is None]
    rivals = [row for row in good if row["kind"] == "rival"]
    sentences, unlike = [], {}
    for ours in good:
        if ours["kind"] not in BEST:
            continue
        fair = [rival for rival in rivals if not differences(ours, rival)]
        unlike |= {rival["title"]: differences(ours, rival) for rival in rivals if rival not in fair}
        if fair:
            word, key = BEST[ours["kind"]]
            sentences.append(compare(ours, word, min(fair, key=lambda row: row[key])))
    left_out = [f"{title}, with another {' and '.join(names)}, is not compared" for title, names in unlike.items()]
    return sentences + left_out


def compare(ours, best, rival):
    speed, memory = ours["tokens_per_s"] / rival["tokens_per_s"], ours["peak_mib"] / rival["peak_mib"]
    in_time, in_memory = "one round: not judged", who_wins([rival["peak_mib"]], [ours["peak_mib"]])
    if min(ours["rounds"], rival["rounds"]) > 1:
        in_time = who_wins(rival["step_ms_range"], ours["step_ms_range"])
    return (
        f"{ours['title']}, beside the {best} rival, {rival['title']}: {speed:.2f} times its tokens/s ({in_time}), "
        f"{memory:.2f} times its memory ({in_memory})"
    )


def who_wins(theirs, ours):
    """Less is better; what overlaps is undecided."""
    if max(ours) < min(theirs):
        return "we win"
    return "we lose" if min(ours) > max(theirs) else "no difference beyond the spread"


COLUMNS = ("side", "ms/step", "tokens/s", "peak MiB", "loss difference", "speed of the products alone")


def cells(row):
    if row["error"] is not None:
        return [row["title"], row["error"], "", "", "", ""]
    lowest, highest = row["step_ms_range"]
    memory = f"{row['peak_mib']:,.0f}" if "peak_mib" in row else ""
    difference = f"{row['loss_difference']:.0e}" if "loss_difference" in row else ""
    share = f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else ""
    time_ms = f"{row['step_ms']:,.0f} ({lowest:,.0f}–{highest:,.0f})"
    return [row["title"], time_ms, f"{row['tokens_per_s']:,.0f}", memory, difference, share]


def markdown_table(result):
    """The stored rows for the README."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in result["rows"])]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


BESIDE = (
    "model",
    "precision",
    "fastest rival",
    "ours, fast: speed, memory",
    "leanest rival",
    "our leanest",
    "its speed, memory",
    "speed of the products alone: rival, ours",
)


def beside_rivals(results):
    """A line for each stored run: ours beside the fastest and the leanest rival."""
    lines = [BESIDE, ["---"] * len(BESIDE)]
    for result in results:
        rows = {row["side"]: row for row in result["rows"] if row["error"] is None}
        fast = rows["ours-fast"]
        rivals = [row for row in rows.values() if row["kind"] == "rival" and not differences(fast, row)]
        fastest = min(rivals, key=lambda row: row["step_ms"])
        leanest = min(rivals, key=lambda row: row["peak_mib"])
        lean = min((row for row in rows.values() if row["kind"] == "lean"), key=lambda row: row["peak_mib"])
        shares = f"{fastest['share_of_limit']:.0%}, {fast['share_of_limit']:.0%}"
        settings = result["settings"]
        line = [settings["model"], settings["precision"], fastest["title"], factors(fast, fastest)]
        lines.append([*line, leanest["title"], lean["title"], factors(lean, leanest), shares])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def factors(ours, rival):
    return f"×{rival['step_ms'] / ours['step_ms']:.2f}, ×{ours['peak_mib'] / rival['peak_mib']:.2f}"


def show(console, rows):
    if not console.is_terminal:  # its lines were printed as they came
        return
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def describe(run):
    name = f"round {run['round']}  {SIDES[run['side']].title:<28}"
    if run["error"] is not None:
        return f"{name} {run['error']}"
    losses = f"loss {run['losses'][0]:.4f} → {run['losses'][-1]:.4f}"
    return f"{name} {min(run['step_ms_all']):9,.1f} ms  {run['peak_mib']:9,.1f} MiB  {losses}  in {run['wall_s']:.0f} s"


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="llama", help=f"{', '.join(SHAPES)}; gpt2 is that of 124M parameters. Default: llama"
    )
    for name in SHAPES["llama"]:
        parser.add_argument(f"--{name}", type=int, help="default: the model's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument(
        "--precision", help="bf16-mixed or 32-true; default: bf16-mixed where the device is quick at it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes a side")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a process")
    parser.add_argument("--sides", default=",".join(DEFAULT_SIDES), help=f"some of {', '.join(SIDES)}")
    parser.add_argument(
        "--tokens", type=Path, help="token numbers, an .npy file; default: bytes of Python's own source"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print the figures of such files as a Markdown table, and end"
    )
    parser.add_argument("--side", help="one of them, once, in this process")
    options = parser.parse_args()
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check(options):
    """Fill in what depends on model and device; refuse what cannot work."""
    shape = SHAPES[one_of("model", options.model, tuple(SHAPES))]
    for name, value in shape.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    one_of("device", options.device, ("cuda", "cpu"))
    options.precision = options.precision or fast_mixed_precision(torch.device(options.device)) or "32-true"
    one_of("precision", options.precision, ("bf16-mixed", "16-mixed", "32-true"))
    for name in (*shape, "rounds", "steps"):
        positive_int(name, getattr(options, name))
    for name in options.sides.split(","):
        one_of("side", name, tuple(SIDES))
    if options.batch % PARTS:
        reason = f"some sides split a batch into {PARTS} equal parts"
        raise ValueError(explain(f"batch={options.batch}", reason, f"Use a multiple of {PARTS}"))


def main():
    options = parse_options()
    if options.table is not None:
        results = [json.loads(file.read_text()) for file in options.table]
        print(markdown_table(*results) if len(results) == 1 else beside_rivals(results))
        return
    if options.side is not None:
        found = json.dumps(run_side(options))
        print(found if options.out is None else write_atomic(options.out, found))
        return
    settings = settings_of(options)
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    result = {
        "hardware": hardware(),
        "versions": versions() | {name: package_version(name) for name in ("transformers", "accelerate")},
        "command": without_paths(shlex.join(["python", "examples/against.py", *sys.argv[1:]])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "rows": [],
        "judgement": [],
        "runs": [],
    }
    interrupted = False
    try:
        for number in range(1, options.rounds + 1):
            for side in options.sides.split(","):
                result["runs"].append(run_in_a_process(options, side, number))
                result["rows"] = summarise(result["runs"])
                result["judgement"] = judge(result["rows"])
                print(describe(result["runs"][-1]), flush=True)
                if options.out is not None:
                    write_atomic(options.out, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    show(Console(), result["rows"])
    print(". ".join(result["judgement"]) or "nothing to compare")
    sys.exit(130 if interrupted else 0)


if __name__ == "__main__":
    main()
