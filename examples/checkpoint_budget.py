"""Peak memory and time of a step: a budget in GiB against every block, every k-th, selective, and torch's own budget.

    python examples/checkpoint_budget.py [--models gpt,llama,...] [--rounds N] [--no-compile] [--out RESULTS.json]

Five kinds of models, on the CPU. For each peak that checkpointing every k-th block comes to, the budget is given just
that, and for some between everything kept and everything recomputed. The variants of a model take turns, one step
each, in one process; a step's time is the fastest of all rounds, and given as a ratio to keeping everything in the same
round of variants. torch's `activation_memory_budget` lives in the compiler, so its rows are compared with the compiled
model that keeps everything; they are run one after the other, because compiled code is shared. The last lines say
whether what the budget promises held, with 10% for the noise of times on a CPU.
"""

import argparse
import json
import logging
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import reference_models
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import hardware, time_ms, versions

GIB, MIB = 2**30, 2**20
SETTLING = 5  # steps until a budget has measured, decided and checked
NOISE = 0.10  # of a step's time on a shared CPU


class Variant:
    """One model under one way of keeping its activations, trained step by step."""

    def __init__(self, specimen, title, policy=None, compiled=None):
        torch.manual_seed(0)
        self.title, self.policy = title, policy
        self.module, self.make_batch = specimen.module(), specimen.batch
        ft.apply(self.module, [ft.ActivationCheckpointing(policy)] if policy is not None else [])
        self.optimizer = self.module.configure_optimizers()
        if compiled is not None:
            torch._dynamo.reset()  # or code compiled under another budget would be used again
            getattr(self.module, "net", getattr(self.module, "gpt", None)).compile()
            with torch._functorch.config.patch(activation_memory_budget=compiled):
                self.step()
        for _ in range(SETTLING):
            self.step()
        with ft.profiling.PeakMemory("cpu", self.module, self.optimizer) as peak:
            self.step()
        self.peak_bytes, self.ms = peak.peak_bytes, float("inf")

    def step(self):
        batch = self.make_batch()  # a new one each step, as from a loader
        self.optimizer.zero_grad()
        self.module.loss(batch).backward()
        self.optimizer.step()

    def timed_step(self):
        self.ms = min(self.ms, time_ms(torch.device("cpu"), self.step))


def take_turns(variants, rounds):
    for _ in range(rounds):
        for variant in variants:
            variant.timed_step()


def climb(name, specimen, rounds, compile_too):
    """All variants of one model, printed and as rows."""
    kept = Variant(specimen, "everything kept")
    count = len(ft.model.find_blocks(kept.module))
    titles = {k: f"every {k}." if k > 1 else "every block" for k in range(1, count)}
    every = {k: Variant(specimen, title, ft.model.EveryBlock(k)) for k, title in titles.items()}
    selective = Variant(specimen, "selective", ft.model.SelectiveOps())
    lowest = every[1].peak_bytes
    limits = {variant.peak_bytes: f"budget: peak of {variant.title}" for variant in every.values()}
    limits |= {
        int(lowest + share * (kept.peak_bytes - lowest)): f"budget: {share:.0%} of the way"
        for share in (0.25, 0.5, 0.75)
    }
    budgets = [Variant(specimen, title, ft.MemoryBudget(limit / GIB)) for limit, title in sorted(limits.items())]
    eager = [kept, *every.values(), selective, *budgets]
    take_turns(eager, rounds)
    compiled = []
    for share in (1.0, 0.5, 0.2) if compile_too else ():
        compiled.append(Variant(specimen, f"torch's budget {share}", compiled=share))
        take_turns(compiled[-1:], rounds)
    rows = []
    print(f"\n{name}: {count} blocks\n{'':<30} {'peak MiB':>9} {'limit':>8} {'predicted':>9} {'time':>6}   plan")
    for variant in [*eager, *compiled]:
        base = compiled[0] if variant in compiled else kept
        plan = getattr(variant.policy, "plan", None)
        row = {
            "model": name,
            "variant": variant.title,
            "peak_mib": variant.peak_bytes / MIB,
            "time_ratio": variant.ms / base.ms,
            "memory_ratio": variant.peak_bytes / base.peak_bytes,
            "ms": variant.ms,
            "limit_mib": plan.limit_bytes / MIB if plan else None,
            "predicted_mib": plan.predicted_bytes / MIB if plan else None,
            "plan": [block.action for block in plan.blocks] if plan else None,
        }
        rows.append(row)
        figures = [f"{row[key]:.1f}" if row[key] else "" for key in ("peak_mib", "limit_mib", "predicted_mib")]
        letters = "".join(action[0] for action in row["plan"] or [])  # kept, selective, recomputed
        numbers = f"{figures[0]:>9} {figures[1]:>8} {figures[2]:>9} ×{row['time_ratio']:>5.2f}"
        print(f"{variant.title:<30} {numbers}   {letters}", flush=True)
    return rows


def verdicts(rows):
    """What the budget promises, each with whether it held in these rows."""
    budgets = [row for row in rows if row["limit_mib"] is not None]
    by_name = {(row["model"], row["variant"]): row for row in rows}
    rivals = [(row, by_name.get((row["model"], row["variant"].removeprefix("budget: peak of ")))) for row in budgets]
    fullest = max(row["peak_mib"] / row["limit_mib"] for row in budgets)
    error = max(abs(row["predicted_mib"] / row["peak_mib"] - 1) for row in budgets)
    to_all = max(row["ms"] / by_name[row["model"], "every block"]["ms"] for row in budgets)
    to_rival = max(row["ms"] / rival["ms"] for row, rival in rivals if rival is not None)
    return {
        f"peak within the limit (at most {fullest:.1%} of it)": fullest <= 1.0,
        f"peak within 10% of the prediction (at most {error:.1%} off)": error <= 0.10,
        f"not slower than recomputing every block (at most ×{to_all:.2f})": to_all <= 1 + NOISE,
        f"not slower than every k-th block at its peak (at most ×{to_rival:.2f})": to_rival <= 1 + NOISE,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(reference_models.ZOO))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    logging.getLogger("lightning_fasttrain").setLevel(logging.WARNING)
    rows = []
    for name in options.models.split(","):
        rows += climb(name, reference_models.ZOO[name](), options.rounds, not options.no_compile)
    held = verdicts(rows)
    if options.out:
        about = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "held": held,
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(about, indent=1) + "\n")
    print()
    for promise, result in held.items():
        print(f"{promise}: {'held' if result else 'MISSED'}")


if __name__ == "__main__":
    main()
