"""The times that a plan predicts are those of ``predict_time``; they say what is measured, and in which order."""

import time
from dataclasses import replace

import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.planner.candidates import Budget, Choice, Predictions, find_axes
from lightning_fasttrain.planner.make_plan import _find_machine
from lightning_fasttrain.planner.search import Search
from lightning_fasttrain.planner.timing import Costs, Stopwatch, Timed
from lightning_fasttrain.step_time import read_machine
from lightning_fasttrain.technique.declarations import facts_of_machine
from tests.support.nets import TinyLM, lm_batches

BATCH = lm_batches(1, size=8, length=16)[0]
GIB = 2**30
RATES = {"peak_flops": {"float32": 1e11, "bfloat16": 2e11}, "product_share": {"float32": 0.8, "bfloat16": 0.8}}
HOST = replace(read_machine("H100"), name="a host", runs_ahead=False, gb_per_s=20, host_us=3.0, **RATES)


class TwoBlocks(TinyLM):
    def __init__(self):
        super().__init__(depth=2)


CHOICES = [
    Choice(),
    Choice(precision="bf16-mixed"),
    Choice(recompute="all", head="fused"),
    Choice(parts=4),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("machine", [HOST, "H100"], ids=["host", "H100"])
def test_a_time_is_what_predict_time_says_and_memory_is_the_same(choice, machine):
    known = read_machine(machine)
    device = "cuda" if known.runs_ahead else "cpu"
    predictions = Predictions(TwoBlocks(), BATCH, device, [1, 2, 4, 8], machine=known)
    step = {"techniques": choice.techniques(), "precision": choice.precision, "machine": known}
    expected = ft.predict_time(TwoBlocks(), BATCH, **step)
    assert predictions.predict_ms(choice) == pytest.approx(1e3 * expected.seconds)
    unknown = Predictions(TwoBlocks(), BATCH, device, [1, 2, 4, 8])
    assert choice in predictions.known  # of the same trace
    assert predictions.predict_ms(replace(choice, compile="blocks")) == predictions.predict_ms(choice)
    assert predictions.predict(choice) == unknown.predict(choice)
    assert unknown.predict_ms(choice) is None


def test_what_no_machine_tells_has_no_time_and_its_memory_all_the_same():
    only_bf16 = replace(HOST, peak_flops={"bfloat16": 2e11}, product_share={"bfloat16": 0.8})
    predictions = Predictions(TwoBlocks(), BATCH, "cpu", [1], 1.0, machine=only_bf16)
    for choice in (Choice(), Choice(offload="activations"), Choice(recompute=Budget.within(0.5))):
        assert predictions.predict_ms(choice) is None
        assert predictions.predict(choice) > 0
    with_both = Predictions(TwoBlocks(), BATCH, "cpu", [1], machine=HOST)
    assert with_both.predict_ms(Choice(offload="activations")) is None  # copies to memory of the host
    assert with_both.predict_ms(Choice()) > 0


FACTORS = {  # of single techniques on a machine; those that the search does not know take 1
    ("compile", "blocks"): 0.7,
    ("precision", "bf16-mixed"): 0.6,
    ("head", "fused"): 1.2,
    ("recompute", "selective"): 1.05,
    ("recompute", "half"): 1.15,
    ("recompute", "all"): 1.3,
}


def ms_of(choice):
    ms = 100.0 + choice.parts
    for switched in choice.words:
        ms *= FACTORS.get(switched, 1.0)
    return ms


class KnownTimes(Predictions):
    """Predicts what the machine really takes, times a constant: a profile is wrong about a model as a whole."""

    def predict_ms(self, choice):
        return None if self.machine is None or choice.has_budget else 3 * ms_of(replace(choice, compile=""))


class KnownMachine(Stopwatch):
    """A machine whose times are known, and which has run each choice for a moment."""

    def __init__(self, predictions):
        self.predictions, self.runs = predictions, []

    def time(self, choice, *, peak=False):
        self.runs.append(choice)
        time.sleep(1e-3)
        bytes_at_peak = int(self.predictions.predict(choice, exactly=True)) if peak else 0
        return Timed([ms_of(choice)], ms_of(choice), bytes_at_peak)


KNOWN = {}  # memory, which is the same in each search


def search(share, machine):
    """A search with this share of the memory of the plain step; the choice, and what was run."""
    module = TwoBlocks()
    predictions = KnownTimes(module, BATCH, "cpu", [1, 2, 4], machine=machine)
    predictions.known = KNOWN
    limit = share * predictions.predict(Choice())
    axes = find_axes(module, BATCH, facts_of_machine(), ft.technique.Exactness.TOLERANCE, None, "bf16-mixed")
    axes.parts = [1, 2, 4]
    watch = KnownMachine(predictions)
    settings = {"steps": 1000, "seconds": 600.0, "tell": lambda what: None, "costs": Costs(whole=100.0)}
    found = Search(axes, predictions, lambda choice, needed: needed <= limit, limit / GIB, watch, **settings)
    return found.run(), watch.runs, found


def switched_alone(runs, base):
    """The techniques that were measured alone beside the base, in their order."""
    found = [set(choice.words) - set(base.words) for choice in runs if choice.parts == base.parts]
    return [next(iter(words)) for words in found if len(words) == 1]


def test_what_is_predicted_to_be_slow_is_not_measured_and_the_fastest_comes_first():
    plain, plain_runs, _ = search(1.1, None)
    chosen, runs, found = search(1.1, HOST)
    assert chosen.choice == plain.choice
    assert {("compile", "blocks"), ("precision", "bf16-mixed")} <= set(chosen.choice.words)
    alone = switched_alone(runs, Choice())
    assert alone[:2] == [("precision", "bf16-mixed"), ("compile", "blocks")]
    assert ("head", "fused") not in alone
    assert ("head", "fused") in switched_alone(plain_runs, Choice())
    assert found.tried[Choice(head="fused")].why_not == "+20% by prediction"


def test_where_memory_is_short_what_saves_it_is_chosen_by_prediction():
    plain, plain_runs, _ = search(0.6, None)
    chosen, runs, found = search(0.6, HOST)
    assert chosen.choice == plain.choice
    assert len(runs) < len(plain_runs)
    assert found.costs.predicted["recompute", "all"] == pytest.approx(1.3)
    assert all(axis != "recompute" for axis, _ in found.costs.factors)
    assert found.costs.describe_source(("recompute", "all")) == ", as is predicted"
    assert found.costs.describe_source(("recompute", "unknown")) == ", as is assumed"


def test_techniques_are_judged_together_where_one_alone_misleads(monkeypatch):
    """In micro-batches, which the base needs, recomputation is slow; on whole batches, which fit with it, it is not."""
    plain_ms = ms_of

    def ms_where_recomputation_likes_whole_batches(choice):
        alone = plain_ms(replace(choice, recompute=""))
        if not choice.recompute:
            return alone
        return alone * (0.7 if choice.parts == 1 else 1.09)

    monkeypatch.setitem(globals(), "ms_of", ms_where_recomputation_likes_whole_batches)
    blind, _, _ = search(0.6, None)
    chosen, _, found = search(0.6, HOST)
    base, _ = found.measured_base
    assert base.parts > 1
    assert chosen.choice.parts == 1
    assert chosen.ms == pytest.approx(0.7 * plain_ms(replace(chosen.choice, recompute="")))
    assert blind.ms > chosen.ms


def test_a_time_that_contradicts_its_prediction_is_measured_again():
    class Disturbed(KnownMachine):
        """Other work doubles the time of the first run in bf16."""

        def time(self, choice, *, peak=False):
            timed = super().time(choice, peak=peak)
            is_first = self.runs.count(choice) == 1 and choice == Choice(precision="bf16-mixed")
            return Timed([timed.ms * 2], timed.first_ms) if is_first else timed

    _, _, found = search(1.1, HOST)
    found.watch, found.costs.factors = Disturbed(found.predictions), {}
    found._measure_switch(Choice(), 101.0, "precision", "bf16-mixed")
    assert found.watch.runs == [Choice(precision="bf16-mixed")] * 2
    assert found.costs.factors["precision", "bf16-mixed"] == pytest.approx(0.6)


def test_in_a_comparison_what_is_clearly_slower_runs_twice():
    _, _, found = search(1.1, None)
    finalists = list(map(found._describe, (Choice(), Choice(head="fused"))))
    racing, out = found._time_in_turn(finalists)
    assert [(tried.choice.head, len(tried.step_ms)) for tried in (*racing, *out)] == [("", 2), ("fused", 2)]


def test_after_each_turn_the_worse_third_is_out_the_fastest_and_simpler_equals_stay():
    _, _, found = search(1.1, None)
    words = {"precision": "bf16-mixed", "head": "fused", "gradients": "released", "offload": "activations"}
    choices = [Choice(**dict(list(words.items())[:count])) for count in range(5)]
    choices.append(replace(choices[-1], recompute="all"))
    times = dict(zip(choices, (103.0, 102.0, 101.0, 100.0, 101.5, 112.0), strict=True))

    class Known(KnownMachine):
        def time(self, choice, *, peak=False):
            return Timed([times[choice]], times[choice], int(self.predictions.predict(choice)))

    found.watch = Known(found.predictions)
    racing, out = found._time_in_turn([found._describe(choice) for choice in choices])
    turns = {len(tried.choice.words): len(tried.step_ms) for tried in (*racing, *out)}
    assert turns == {0: 3, 1: 3, 3: 3, 2: 2, 4: 1, 5: 1}
    assert {len(tried.choice.words) for tried in racing} == {0, 1, 3}
    found.fits = lambda choice, needed: True
    assert found._compare_in_turn(racing).choice == Choice()


def test_where_no_finalist_runs_none_is_chosen():
    _, _, found = search(1.1, None)
    finalists = list(map(found._describe, (Choice(), Choice(head="fused"))))

    class Broken(KnownMachine):
        def time(self, choice, *, peak=False):
            raise RuntimeError("no memory")

    found.watch = Broken(found.predictions)
    assert found._compare_in_turn(finalists) is None
    assert found.refused >= {tried.choice for tried in finalists}


def test_a_plan_for_a_gpu_that_is_not_here_predicts_its_times():
    plan = ft.make_plan(TwoBlocks(), BATCH, 1.0, device="cuda", machine="H100", keep="exact")
    expected = ft.predict_time(TwoBlocks(), BATCH, gpu="H100", precision="32-true")
    assert plan.plain.ms == pytest.approx(1e3 * expected.seconds, rel=1e-6)
    assert "There is no cuda here: times are predicted for H100-SXM, and nothing was measured." in plan.notes
    assert not plan.measured


def test_an_unknown_machine_is_refused_at_once():
    with pytest.raises(ValueError, match="gpu='H1000': it is not in the table"):
        ft.make_plan(TwoBlocks(), BATCH, 1.0, machine="H1000")


def test_only_a_gpu_that_is_here_is_known_without_being_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert _find_machine(None, "cuda", here="cuda").name == "H100-SXM"
    assert _find_machine(None, "cuda", here="cpu") is None
    assert _find_machine(None, "cpu", here="cpu") is None
    assert _find_machine("A100", "cuda", here="cpu").name.startswith("A100")
