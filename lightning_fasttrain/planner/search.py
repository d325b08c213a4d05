"""Search for the fastest choice that fits: predict memory, measure single techniques, then the best few in turn."""

import heapq
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.messages import describe_error, explain
from lightning_fasttrain.micro_batching.padding.trim_search import TrimSearch
from lightning_fasttrain.planner.candidates import Axes, Budget, Choice, Predictions, switch_of
from lightning_fasttrain.planner.plan import (
    TELLS,
    Tried,
    best_two_thirds,
    is_decided,
    simplest_of_equals_first,
    why_slower,
)
from lightning_fasttrain.planner.timing import Costs, Stopwatch, Switched, Timed

_ROUNDS, _MOST_ROUNDS = 3, 6  # in which finalists are run in turn
_FINALISTS, _CONSIDERED = 6, 2  # how many are run in turn; times as many are predicted, where the machine is known
_ALIKE = 1.1  # of those, by prediction: what is further from the fastest is not run
_FIRST = ("precision", "layout", "head", "compile")
_NEVER_FASTER = 1.08  # assumed cost of what recomputes or moves: where the plain step fits it is not measured
_SURELY_SLOWER = 1.1  # by prediction: of one model on one machine, two predictions are off in the same direction
_CONTRADICTS = 0.15  # a measured factor that is so far from the predicted one, which may be noise: it is measured again
_NEAR = 1.15  # by how much single switches may mislead about several


def _only_saves_memory(axis: str, word: str | Budget) -> bool:
    if axis == "precision":
        return False
    return isinstance(word, Budget) or switch_of(axis, word).setting.cost >= _NEVER_FASTER


class Search:
    """A search for the fastest choice that fits.

    Args:
        axes: the possible choices.
        predictions: of the peak memory of a choice, and of its time where the machine is known.
        fits: (choice, predicted bytes) → whether a step is within the limit.
        limit_gib: the limit, for messages.
        watch: measures steps; None if nothing is to be measured, or the device is not in this machine.
        costs: assumed times, which measurements replace; in units of a plain step by default.
        steps: number of steps of the coming run, which share the time of compilation.
        seconds: approximate time limit for measurements.
        tell: called with a line on the current progress.
    """

    def __init__(
        self,
        axes: Axes,
        predictions: Predictions,
        fits: Callable[[Choice, float], bool],
        limit_gib: float,
        watch: Stopwatch | None,
        *,
        costs: Costs | None = None,
        steps: int,
        seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self.axes, self.predictions, self.fits, self.limit_gib, self.watch = axes, predictions, fits, limit_gib, watch
        self.steps, self.deadline, self.tell = steps, time.monotonic() + seconds, tell
        self.costs = costs or Costs()
        self.runs_s: list[float] = []
        self.tried: dict[Choice, Tried] = {}
        self.refused: set[Choice] = set()  # by a run, whatever was predicted
        self.notes: list[str] = []
        self.measured_base: tuple[Choice, float] | None = None  # with its ms
        self.plain_fits = False  # so that techniques which only save memory are of no use
        self.why_padded = ""  # why padding cannot be cut off

    def run(self) -> Tried:
        """Return the fastest choice that fits, with its measurements; all others are in ``tried``.

        Raises:
            ValueError: nothing fits.
        """
        self._drop_heads_that_cannot_be_fused()
        base = self._find_base()
        self.plain_fits = base == Choice(precision=self.axes.precision)
        switches = self._list_switches()
        self._predict_times(base, switches)
        if self.watch is None:
            return self._take_first(self._find_finalists())
        self._measure_switches(base, switches)
        chosen: Tried | None = None
        # A refused choice is no finalist again, so in the end a choice is found or none is left.
        while chosen is None:
            chosen = self._compare_in_turn(self._find_finalists())
        return chosen

    def _take_first(self, finalists: list[Tried]) -> Tried:
        for other in finalists[1:]:
            self._note(replace(other, why_not="a slower one, by estimate"))
        return self._note(finalists[0])

    def describe_plain(self) -> Tried:
        """Return what is known of the plain step."""
        choice = Choice(precision=self.axes.precision)
        return self.tried.get(choice) or self._describe(choice)

    def _describe(self, choice: Choice) -> Tried:
        return Tried(choice, self.predictions.predict(choice), self.estimate(choice))

    def estimate(self, choice: Choice) -> float:
        """Estimate the time of a step in ms. A budget takes its share of the time of recomputing all blocks."""
        least = self.costs.estimate(choice, self.steps)
        if not choice.has_budget:
            return least
        most = self.costs.estimate(replace(choice, recompute="all"), self.steps)
        return least + self._share_recomputed(choice) * (most - least)

    def _share_recomputed(self, choice: Choice) -> float:
        """Return the share of the blocks that a budget has to recompute."""
        low, high = self.predictions.most_recomputed(choice), self.predictions.least_recomputed(choice)
        return (high - self.predictions.predict(choice)) / max(high - low, 1.0)

    def _note(self, tried: Tried) -> Tried:
        self.tried[tried.choice] = tried
        return tried

    def _drop_heads_that_cannot_be_fused(self) -> None:
        """Drop fused heads if a prediction fails, as for a layer whose output is not used for a cross-entropy."""
        for word in self.axes.words["head"][1:]:
            choice = Choice(head=str(word), precision=self.axes.precision)
            self.predictions.predict(choice)
            if why := self.predictions.why_failed(choice):
                return self.axes.drop("head", why)
        return None

    def _find_base(self) -> Choice:
        """Return a choice that fits, with as few techniques as that takes."""
        leanest, least = Choice(), float("inf")
        precision = self.axes.precision
        for switched in self._yield_leaner():
            for parts in self.axes.parts:
                choice = replace(switched, parts=parts, precision=precision)
                # The optimizer would step in the backward of each micro-batch.
                if choice.gradients == "in backward" and parts > 1:
                    continue
                needed = self.predictions.predict(choice)
                if self.fits(choice, needed):
                    return choice
                if needed < least:
                    leanest, least = choice, needed
        way_out = "Give more memory, several devices, or a smaller batch"
        if not any(switch in self.axes.words["adapter"] for switch in ("lora", "qlora")):
            way_out += "; or keep='changes_training', with which adapters are trained instead of all weights"
        over = least / GIB - self.limit_gib
        why = f"the leanest choice ({leanest}) takes {least / GIB:.3f} GiB, {over:.3f} too much"
        raise ValueError(explain(f"memory_gib={self.limit_gib:.4g}", why, way_out))

    def _yield_leaner(self) -> Iterator[Choice]:
        """Yield ever leaner choices: plain, with recomputation, then also head, gradients, offload, and adapters."""
        choice = Choice()
        yield choice
        for axis in ("recompute", "head", "gradients", "offload", "adapter"):
            words = self.axes.words[axis]
            if len(words) > 1:
                if axis == "gradients":
                    yield replace(choice, gradients=words[-1])
                    words = words[:2]
                choice = replace(choice, **{axis: words[-1]})
                yield choice

    def _list_switches(self) -> list[Switched]:
        """Return the techniques that may make a step faster or, where it does not fit, leaner."""
        switches: list[Switched] = []
        for axis in sorted(self.axes.words, key=lambda axis: _FIRST.index(axis) if axis in _FIRST else len(_FIRST)):
            for word in self.axes.words[axis][1:]:
                if not (self.plain_fits and _only_saves_memory(axis, word)):
                    switches.append((axis, word))
        return switches

    def _predict_times(self, base: Choice, switches: list[Switched]) -> None:
        """Predict the time of a step and what each technique makes of it, where the machine is known."""
        base_ms = self.predictions.predict_ms(base)
        if base_ms is None:
            return
        for axis, word in switches:
            if axis == "compile":  # predicted as eager
                continue
            without = self.predictions.predict_ms(replace(base, **{axis: self.axes.words[axis][0]}))
            ms = self.predictions.predict_ms(replace(base, **{axis: word}))
            if ms is not None and without is not None:
                self.costs.predicted[axis, word] = ms / without
        if self.watch is None:
            self.costs.assume(base.parts, base_ms / self.costs.factor(base))

    def _measure_switches(self, base: Choice, switches: list[Switched]) -> None:
        first = self._measure(base, at_all_costs=True)
        # The loss cannot be split, and the reason is noted.
        if first is None and base.parts > 1:
            return
        if first is None:
            raise ValueError(explain(f"the plain step ({base})", "it fails", self.tried[base].why_not))
        ms = first.ms
        self.measured_base = base, ms
        # An assumed cost, for models whose batches are never measured in more micro-batches.
        self.costs.assume(base.parts, ms / self.costs.factor(base))
        self._measure_more_parts(base, ms)
        # What may gain most comes first, since the time may not suffice for all.
        for axis, word in sorted(switches, key=lambda switched: self.costs.factor_of(*switched)):
            self._measure_switch(base, ms, axis, word)
        if base.parts == self.axes.parts[-1] > 1:
            self._measure_fewer_parts(base, ms)

    def _measure_more_parts(self, base: Choice, ms: float) -> None:
        more = [parts for parts in self.axes.parts if parts > base.parts]
        if not more:
            return
        # The next but one, since noise matters less over more micro-batches.
        other = replace(base, parts=more[min(1, len(more) - 1)])
        timed = self._measure(other)
        if timed is not None:
            self._learn_cost_of_parts(base, ms, other.parts, timed.ms)
        elif base.parts == 1 and other in self.tried:
            self.axes.drop("parts", self.tried[other].why_not)

    def _measure_fewer_parts(self, base: Choice, ms: float) -> None:
        """Try a leaner choice with fewer micro-batches where the base has the most, to learn what they cost."""
        for switched in self._yield_leaner():
            for parts in self.axes.parts[:-1]:
                other = replace(switched, parts=parts, precision=base.precision)
                if self.fits(other, self.predictions.predict(other)):
                    timed = self._measure(other)
                    if timed is not None:
                        as_base = timed.ms * self.costs.factor(base) / self.costs.factor(other)
                        self._learn_cost_of_parts(base, ms, parts, as_base)
                    return

    def _learn_cost_of_parts(self, base: Choice, ms: float, parts: int, other_ms: float) -> None:
        """Derive the time of each micro-batch, and the rest, from two times that differ in their number alone."""
        factor = self.costs.factor(base)
        self.costs.learn(base.parts, ms / factor, parts, other_ms / factor)

    def _measure_switch(self, base: Choice, ms: float, axis: str, word: str | Budget) -> None:
        if getattr(base, axis) == word or isinstance(word, Budget) or (word == "in backward" and base.parts > 1):
            return
        choice = replace(base, **{axis: word})
        needed = self.predictions.predict(choice)
        if why := self.predictions.why_failed(choice):
            self._leave_out(axis, word, why)
        if not self.fits(choice, needed):
            return
        predicted = self.costs.predicted.get((axis, word), 0.0)
        if predicted and (predicted > _SURELY_SLOWER or _only_saves_memory(axis, word)):
            self._note(replace(self._describe(choice), why_not=f"{predicted - 1:+.0%} by prediction"))
            return
        timed = self._measure(choice)
        if timed is not None:
            factor = timed.ms / ms * self._factor_of(base, axis)
            if predicted and abs(factor / predicted - 1) > _CONTRADICTS:
                again = self._measure(choice)
                factor *= min(1.0, again.ms / timed.ms) if again is not None else 1.0
            if axis == "compile":
                self.costs.note_compilation(timed)
            # A difference within the noise counts as none, or noise would multiply over several techniques.
            self.costs.factors[axis, word] = 1.0 if abs(factor - 1) < TELLS else factor
        elif choice in self.tried:
            self._leave_out(axis, word, self.tried[choice].why_not)

    def _leave_out(self, axis: str, word: str | Budget, why: str) -> None:
        self.axes.left_out[f"{axis} {word}"] = why
        self.axes.words[axis].remove(word)

    def _factor_of(self, base: Choice, axis: str) -> float:
        """Return the factor of the technique that the base uses on an axis; 1 if it uses none."""
        word = getattr(base, axis)
        return self.costs.factor_of(axis, word) if (axis, word) in base.words else 1.0

    def _runs_left(self) -> int:
        """Return how many runs there is time for, but for the one that confirms the choice."""
        if not self.runs_s:
            return 0
        return int((self.deadline - time.monotonic()) / statistics.median(self.runs_s)) - 1

    def _measure(self, choice: Choice, *, at_all_costs: bool = False) -> Timed | None:
        """Time a choice; None if it fails, which is noted, or if there is no time left."""
        if self._runs_left() < 1 and not at_all_costs:
            self._note_lateness()
            return None
        tried = self._describe(choice)
        timed = self._time(tried, "measuring")
        if timed is not None:
            self._note(replace(tried, step_ms=(timed.ms,), why_not="slower by estimate than what was compared"))
            self._learn_padding(timed.trimming)
        return timed

    def _learn_padding(self, trimming: TrimSearch | None) -> None:
        """Note whether the run of a choice has cut off padding, and how much other choices would."""
        if trimming is None or self.costs.left or self.why_padded:
            return
        self.why_padded = trimming.why_not
        if trimming.saved:
            for parts in self.axes.parts[1:]:
                self.costs.left[parts] = trimming.share_left(self.predictions.batch, parts)

    def _time(self, tried: Tried, doing: str, *, peak: bool = False) -> Timed | None:
        """Run steps of a choice; None if they fail, which is noted and excludes it from the finalists."""
        assert self.watch is not None
        self.tell(f"{doing} {tried.choice}")
        began = time.monotonic()
        try:
            timed = self.watch.time(tried.choice, peak=peak)
            self.runs_s.append(time.monotonic() - began)
            return timed
        except Exception as error:
            self.refused.add(tried.choice)
            self._note(replace(tried, why_not=describe_error(error)))
            return None

    def _note_lateness(self) -> None:
        note = "There was no time to measure everything: what was not is estimated. Give more seconds."
        if note not in self.notes:
            self.notes.append(note)

    def _find_finalists(self) -> list[Tried]:
        """Return the fastest choices that fit, by estimate, as long as they may turn out to be the fastest."""
        finalists: list[Tried] = []
        most = _FINALISTS if time.monotonic() < self.deadline else 1  # without time there is nothing to compare
        if self.predictions.machine is not None:
            most *= _CONSIDERED
        for ms, choice in self._fastest_first():
            if finalists and (ms > finalists[0].estimated_ms * _NEAR or len(finalists) == most):
                break
            needed = self.predictions.predict(choice)
            if self.fits(choice, needed):
                # It takes a second each, so only for those that fit by the line.
                needed = self.predictions.predict(choice, exactly=True)
            if self.fits(choice, needed):
                finalists.append(Tried(choice, needed, ms))
            elif len(self.tried) < 40:  # rows of a table that can still be read
                known = self.tried.get(choice, Tried(choice, needed, ms))
                why = self.predictions.why_failed(choice) or f"does not fit: {needed / GIB:.3f} GiB"
                self._note(replace(known, why_not=why))
        if not finalists:
            why = "what should fit does not run, or takes more when it is measured"
            raise ValueError(explain(f"memory_gib={self.limit_gib:.4g}", why, "Give more memory, or a smaller batch"))
        return self._rank_by_prediction(finalists)

    def _rank_by_prediction(self, finalists: list[Tried]) -> list[Tried]:
        """Return those that are nearly the fastest by the time of all their techniques together, where it is known."""
        if self.predictions.machine is None:
            return finalists
        ranked: list[Tried] = []
        for tried in finalists:
            ms = self._estimate_together(tried.choice)
            ranked.append(tried if ms is None else replace(tried, estimated_ms=ms))
        ranked.sort(key=lambda tried: tried.estimated_ms)
        kept = [tried for tried in ranked if tried.estimated_ms <= ranked[0].estimated_ms * _ALIKE]
        for tried in ranked[len(kept) :]:
            why = f"{tried.estimated_ms / ranked[0].estimated_ms - 1:+.0%} by prediction"
            known = self.tried.get(tried.choice, tried)
            self._note(replace(known, why_not=why))
        return kept[:_FINALISTS]

    def _estimate_together(self, choice: Choice) -> float | None:
        """Return the predicted time of a choice, corrected by what was measured of the base and of each technique."""
        base, base_ms = self.measured_base or (Choice(precision=self.axes.precision), None)
        as_base, ms = self.predictions.predict_ms(base), self._predict_ms(choice)
        if as_base is None or ms is None:
            return None
        if base_ms is not None:
            left = self.costs.share_of(choice.parts) / self.costs.share_of(base.parts)  # without padding
            ms *= left * base_ms / as_base
        for switched in set(choice.words) - set(base.words):
            if switched[0] == "compile":
                ms *= self.costs.factor_of(*switched)
            elif switched in self.costs.factors and switched in self.costs.predicted:
                ms *= self.costs.factors[switched] / self.costs.predicted[switched]
        return ms + (self.costs.compile_ms / self.steps if choice.compile else 0.0)

    def _predict_ms(self, choice: Choice) -> float | None:
        """Return the predicted time of a choice, also of one with a budget."""
        if not choice.has_budget:
            return self.predictions.predict_ms(choice)
        least = self.predictions.predict_ms(replace(choice, recompute=""))
        most = self.predictions.predict_ms(replace(choice, recompute="all"))
        return None if least is None or most is None else least + self._share_recomputed(choice) * (most - least)

    def _saves_for_nothing(self, choice: Choice) -> bool:
        return self.plain_fits and any(_only_saves_memory(axis, word) for axis, word in choice.words)

    def _fastest_first(self) -> Iterator[tuple[float, Choice]]:
        """Yield (estimated ms, choice), the fastest first; of equal estimates the simpler choice first.

        Estimates of budgets need predictions of a second each, so they are made once their lower bound comes first.
        """
        queue: list[tuple[float, int, int, int, bool, Choice]] = []
        for number, choice in enumerate(self.axes.choices()):
            if choice not in self.refused and not self._saves_for_nothing(choice):
                # For a budget this is the time without any recomputation, a lower bound.
                bound = self.costs.estimate(choice, self.steps)
                # The number is unique, so the heap never compares two choices, which have no order.
                row = bound, len(choice.words), choice.parts, number, choice.has_budget, choice
                heapq.heappush(queue, row)
        while queue:
            ms, words, parts, number, is_bound, choice = heapq.heappop(queue)
            if not is_bound:
                yield ms, choice
            elif not self.fits(choice, self.predictions.least_recomputed(choice)):  # else nothing has to be recomputed
                heapq.heappush(queue, (self.estimate(choice), words, parts, number, False, choice))

    def _compare_in_turn(self, finalists: list[Tried]) -> Tried | None:
        """Return the fastest finalist; None if none of them runs within the limit."""
        racing, out = self._time_in_turn(finalists)
        # The time that compiling takes is not in the steps that were measured, but in the run that is planned.
        share = lambda tried: self.costs.compile_ms / self.steps if tried.choice.compile else 0.0  # noqa: E731
        racing.sort(key=lambda tried: tried.ms + share(tried))
        chosen: Tried | None = None
        for tried in [*simplest_of_equals_first(racing), *out]:
            if chosen is None:
                chosen = self._confirm(tried)
            else:
                self._note(replace(tried, why_not=why_slower(tried, chosen)))
        return chosen

    def _time_in_turn(self, finalists: list[Tried]) -> tuple[list[Tried], list[Tried]]:
        """Return the finalists that were run to the end, and those that were out before, the last first.

        They run in turn, so that other work of the machine affects all of them. What is clearly slower than the fastest
        after two turns is out, and after each turn the worse third, until two are left: these need the most turns.
        """
        if self._runs_left() < len(finalists):
            # A time of one run each could not tell them apart, so the estimates do.
            self._note_lateness()
            return finalists[:1], []
        out: list[Tried] = []
        racing, rounds, round_s = finalists, 0, 0.0
        # The last round says how long another takes: finalists that are compiled take longer than what was measured.
        while len(racing) > 1 and rounds < _MOST_ROUNDS and (not rounds or time.monotonic() + round_s < self.deadline):
            rounds += 1
            began = time.monotonic()
            racing = [replace(tried, step_ms=(*tried.step_ms, ms)) for tried, ms in self._run_each(racing)]
            round_s = time.monotonic() - began
            is_enough = rounds >= _ROUNDS and is_decided([tried.step_ms for tried in racing])
            if len(racing) < 2 or is_enough:
                break
            kept = best_two_thirds(racing)
            out = [*(tried for tried in racing if tried not in kept), *out]
            racing = kept
        return racing, out

    def _run_each(self, racing: list[Tried]) -> Iterator[tuple[Tried, float]]:
        """Run each once, and yield those that run with their times."""
        for tried in racing:
            timed = self._time(tried, "comparing")
            if timed is not None:
                yield tried, timed.ms

    def _confirm(self, tried: Tried) -> Tried | None:
        """Measure the peak of one step; None if it fails or does not fit, which is noted."""
        timed = self._time(tried, "measuring the memory of", peak=True)
        if timed is None:
            return None
        confirmed = replace(tried, step_ms=tried.step_ms or (timed.ms,), peak_bytes=timed.peak_bytes)
        if self.fits(tried.choice, timed.peak_bytes):
            return self._note(confirmed)
        self.refused.add(tried.choice)
        self._note(replace(confirmed, why_not=f"does not fit: measured {timed.peak_bytes / GIB:.3f} GiB"))
        return None
