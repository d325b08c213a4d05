"""How often the ladder's judge is wrong, on simulated machines whose true times are known.

    python examples/judge_simulation.py [--ladders 2000] [--out RESULTS.json]

A ladder has eight rungs. Each changes memory by a known factor, and takes 5% to 30% less or more time than it may for
that (or, in three of ten rungs, less than 5%, which is not counted). The steps of a simulated machine vary by 1.5%,
and in addition by what its name says:

- drift: all steps become up to 0.4% slower or faster from one to the next;
- bursts: a neighbour begins in 3% of the steps, stays for 2 to 15, and makes each take 1.2 to 2.4 times as long;
- frequency: in 5% of the steps the speed of the machine jumps to 0.75 to 1.3 times its usual time;
- tails: steps are late by the absolute value of Student's t with two degrees of freedom, in units of 2%;
- all of these at once.

"In turn" is the rule of `fasttrain ladder`, with its own code; "one after another" is the rule before it: a rung is run
once, by itself, and its median of two steps compared with that of the rung below, up to four times if they are near.
Wrong is a rung that was decided by its time against the truth. Everything is drawn from a seed, so that the figures are
the same on each machine.
"""

import argparse
import json
import math
import random
import statistics
from pathlib import Path

from lightning_fasttrain.bench.ladder.results import TIME_WORTH, Row, judge_row
from lightning_fasttrain.bench.ladder.turns import TimeLeft, Turns
from lightning_fasttrain.core.atomic_write import write_atomic

MACHINES = ("quiet", "drift", "bursts", "frequency", "tails", "all")
RUNGS = 8
COUNTED = 0.05
MOST_TURNS = 12


class Machine:
    """Times of steps, one after the other, of programs whose true time is known."""

    def __init__(self, kind, draw):
        self.has = {name: kind in (name, "all") for name in MACHINES}
        self.draw = draw
        self.drift = draw.uniform(-0.004, 0.004) if self.has["drift"] else 0.0
        self.steps = self.burst = 0
        self.level = 1.0

    def step(self, true_ms):
        draw = self.draw
        self.steps += 1
        slowness = self.drift * self.steps + draw.gauss(0, 0.015)
        if self.has["tails"]:
            chi_squared = draw.expovariate(0.5)  # of two degrees of freedom
            slowness += 0.02 * min(50.0, abs(draw.gauss(0, 1)) / math.sqrt(chi_squared / 2))
        if self.has["frequency"] and draw.random() < 0.05:
            self.level = draw.uniform(0.75, 1.3)
        return true_ms * math.exp(slowness) * self.level * self.burst_factor()

    def burst_factor(self):
        if not self.has["bursts"]:
            return 1.0
        if self.burst:
            self.burst -= 1
        elif self.draw.random() < 0.03:
            self.burst = self.draw.randint(2, 15)
        return self.draw.uniform(1.2, 2.4) if self.burst else 1.0


class Program:
    """Stands for the process of a row: a turn takes a step of the machine."""

    def __init__(self, row, machine, true_ms):
        self.row, self.machine, self.true_ms = row, machine, true_ms

    def turn(self):
        return self.machine.step(self.true_ms)


def draw_rung(draw):
    """Factors of time and memory of a rung."""
    memory = 1.0 if draw.random() < 0.5 else draw.uniform(0.5, 0.95)
    size = draw.uniform(COUNTED, 0.3) if draw.random() < 0.7 else draw.uniform(0, COUNTED)
    return math.exp(draw.choice((-1, 1)) * size) * break_even(memory), memory


def break_even(memory):
    """The factor of time up to which the ladder carries a rung with this factor of memory."""
    saved = 1 / memory
    return saved if saved <= 1 + TIME_WORTH else math.sqrt(saved)


def climb_in_turn(machine, draw):
    """Yield (true time as a factor of what it may be, carried or None, steps) of each rung, by the ladder's rule."""
    turns = Turns({}, MOST_TURNS, TimeLeft(RUNGS, math.inf), lambda title, message: None)
    naive = Row(step_ms=math.inf)  # the limit of its time is not what is tried here
    below = Program(Row(step_ms=100.0, peak_mib=100.0), machine, 100.0)
    for _ in range(RUNGS):
        time, memory = draw_rung(draw)
        row = Row(peak_mib=below.row.peak_mib * memory)
        rising = Program(row, machine, below.true_ms * time)
        for _ in range(2):  # a warm-up, and a step for the memory
            rising.turn()
        turns.compare(rising, below, lambda row=row, below=below: judge_row(row, below.row, naive)[0] is not None)
        carried = judge_row(row, below.row, naive)[0]
        yield time / break_even(memory), carried, 2 + 2 * len(row.turns_ms)
        if carried:
            below = rising


def climb_one_after_another(machine, draw):
    """Yield the same by the rule before: runs of whole processes, each of two timed steps; time · memory falls."""

    def run(true_ms):
        times = [machine.step(true_ms) for _ in range(4)]  # a warm-up, two on the clock, one for the memory
        return statistics.median(times[1:3])

    naive_ms = [run(100.0), run(100.0)]
    spreads = [max(naive_ms) / min(naive_ms) - 1]
    below_ms, below_true_ms = naive_ms, 100.0
    for _ in range(RUNGS):
        time, memory = draw_rung(draw)
        runs_ms, begun = [run(below_true_ms * time)], machine.steps - 4
        carried = judge_as_before(below_ms, runs_ms, memory, statistics.median(spreads))
        while carried is None and len(runs_ms) <= 4:
            below_ms.append(run(below_true_ms))
            runs_ms.append(run(below_true_ms * time))
            spreads.append(max(runs_ms) / min(runs_ms) - 1)
            carried = judge_as_before(below_ms, runs_ms, memory, statistics.median(spreads))
        yield time * memory, carried, machine.steps - begun
        if carried:
            below_ms, below_true_ms = runs_ms, below_true_ms * time


def judge_as_before(below_ms, runs_ms, memory, spread):
    noise = spread / math.sqrt(min(len(below_ms), len(runs_ms)))
    time = statistics.median(runs_ms) / statistics.median(below_ms)
    least_gain = 1.0 if memory < 1 else 0.97
    if time * memory >= least_gain and (memory >= 1 or time / (1 + noise) * memory >= 1):
        return False
    return None if time * (1 + noise) * memory >= least_gain else True


RULES = {"in turn": climb_in_turn, "one after another": climb_one_after_another}


def simulate(rule, kind, ladders, seed=0):
    """A row of the table."""
    wrong = undecided = counted = steps = 0
    draw = random.Random(f"{kind} {seed}")
    for _ in range(ladders):
        for share, carried, taken in RULES[rule](Machine(kind, draw), draw):
            steps += taken
            if abs(math.log(share)) < COUNTED:
                continue
            counted += 1
            undecided += carried is None
            wrong += carried is not None and carried != (share < 1)
    rungs = RUNGS * ladders
    shares = {"wrong": wrong / counted, "not decided": undecided / counted}
    return {"rule": rule, "machine": kind, "ladders": ladders, **shares, "steps": steps / rungs}


def as_row(row):
    shares = [f"{row[name]:.2%}" for name in ("wrong", "not decided")]
    return f"| {row['machine']} | {row['rule']} | {' | '.join(shares)} | {row['steps']:.1f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ladders", type=int, default=2000, help="of each rule on each machine")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    print("| machine | rule | wrong | not decided | steps per rung |\n| --- | --- | --- | --- | --- |")
    rows = []
    for kind in MACHINES:
        for rule in RULES:
            rows.append(simulate(rule, kind, options.ladders))
            print(as_row(rows[-1]), flush=True)
    if options.out is not None:
        command = f"python examples/judge_simulation.py --ladders {options.ladders}"
        write_atomic(options.out, json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    worst = max(row["wrong"] for row in rows if row["rule"] == "in turn")
    print(f"wrong at most {worst:.2%} in turn")


if __name__ == "__main__":
    main()
