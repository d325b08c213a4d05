import importlib
import json
from dataclasses import replace

import lightning as L
import pytest

from lightning_fasttrain.bench.ladder.results import (
    Row,
    choose_stacks,
    judge,
    judge_row,
    judge_undecided,
    loss_parity,
    refuse_non_finite,
)
from lightning_fasttrain.bench.ladder.run_ladder import as_code
from lightning_fasttrain.bench.ladder.rungs import NAIVE, choose_rungs, on_top_of, padded_rungs, rungs, strong_baselines
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.bench.ladder.worker import callbacks_of
from lightning_fasttrain.planner.timing import Ratio
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import least_exact
from tests.support.run_example import ROOT


def row(step_ms, peak_mib):
    return Row(step_ms=step_ms, peak_mib=peak_mib)


FAILED = Row(error="boom")


def test_the_ladder_has_the_documented_rungs_in_order():
    names = " ".join(rung.name for rung in rungs())
    assert names == (
        "prefetch tf32 bf16 fused compile chunked-loss compiled-head optimizer-in-backward micro-batches release "
        "cuda-graphs selective checkpointing budget offload 8-bit bf16-alone"
    )
    trades = [rung.name for rung in rungs() if not rung.free]
    assert trades[:5] == ["chunked-loss", "micro-batches", "selective", "checkpointing", "budget"]


def test_every_rung_is_plain_json_and_names_callbacks_that_exist():
    state = NAIVE
    for rung in rungs():
        state = rung.on(Row(state=state, peak_mib=512.0))
        assert json.loads(json.dumps(state)) == state
        assert len(callbacks_of(state)) == len(state["callbacks"])
    assert "OptimizerInBackward" not in state["callbacks"]
    assert len(state["callbacks"]) == 8


def test_cuda_graphs_replay_what_is_compiled_below():
    named = {rung.name: rung for rung in rungs()}
    below = Row(state=named["compiled-head"].on(Row(state=NAIVE)))
    state = named["cuda-graphs"].on(below)
    assert state["callbacks"] == {"CompileBlocks": {"head": True, "mode": "reduce-overhead"}}
    assert named["offload"].on(Row(state=state))["callbacks"]["CompileBlocks"] == {"head": True}


@pytest.mark.parametrize("arguments", [{"mode": "reduce-overhead"}, {"mode": "default"}, {}])
def test_offloaded_activations_take_the_place_of_cuda_graphs(arguments):
    offload = {rung.name: rung for rung in rungs()}["offload"]
    state = offload.on(Row(state={**NAIVE, "callbacks": {"CompileBlocks": arguments}}))
    *_, compiled = sorted(callbacks_of(state), key=lambda callback: type(callback).__name__)
    assert set(state["callbacks"]) == {"ActivationOffload", "CompileBlocks"}
    assert compiled.mode == "default"  # graphs keep saved tensors in their own memory
    assert set(offload.on(Row(state=NAIVE))["callbacks"]) == {"ActivationOffload"}


def test_a_policy_is_made_from_its_name():
    checkpointing = {rung.name: rung for rung in rungs()}["checkpointing"]
    below = Row(state=NAIVE, peak_mib=512.0)
    (callback,) = callbacks_of(checkpointing.on(below))
    assert repr(callback.policy) == "EveryBlock(k=1)"


def test_the_budget_is_the_peak_of_a_checkpointed_state_and_less_than_another():
    named = {rung.name: rung for rung in rungs()}
    below = Row(state=NAIVE, peak_mib=512.0)
    checkpointed = Row(state=named["checkpointing"].on(below), peak_mib=256.0)
    compiled = replace(checkpointed, state=named["checkpointing"].on(replace(below, state=named["compile"].on(below))))
    failed = replace(below, error="boom")
    for row, gib in [(below, 0.4), (checkpointed, 0.25 * 1.005), (compiled, 0.25 * 1.05), (failed, "fit")]:
        *_, callback = callbacks_of(named["budget"].on(row))
        assert callback.policy.budget_gib == gib


@pytest.mark.parametrize("rung", rungs(), ids=lambda rung: rung.name)
def test_no_rung_promises_more_than_its_techniques(rung):
    for callback in callbacks_of(rung.on(Row(state=NAIVE, peak_mib=512.0))):
        assert least_exact(rung.exactness, callback.exactness) is rung.exactness


def test_an_unknown_callback_is_refused():
    with pytest.raises(ValueError, match="'Nonsense': this package has no class"):
        callbacks_of({"callbacks": {"Nonsense": {}}})


def test_states_are_added_without_altering_what_is_below():
    changed = on_top_of(NAIVE, {"callbacks": {"MicroBatching": {"n": 4}}})
    again = on_top_of(changed, {"callbacks": {"MicroBatching": {"n": 8}}})
    assert NAIVE["callbacks"] == {}
    assert changed["callbacks"] == {"MicroBatching": {"n": 4}}
    assert again["callbacks"] == {"MicroBatching": {"n": 8}}


def test_unknown_rungs_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"rung 'warp': there is none of this name. Use prefetch, tf32"):
        choose_rungs(rungs(), ["bf16", "warp"])


@pytest.mark.parametrize("mixed", ["bf16-mixed", None])
def test_the_strong_baselines_take_bf16_where_it_is_fast(mixed):
    strong, compiled = (rung.on(Row(state=NAIVE)) for rung in strong_baselines(mixed))
    assert strong["trainer"] == {"precision": mixed or "32-true"}
    assert strong["optimizer"] == {"fused": True}
    assert compiled == on_top_of(strong, {"loop": {"compile": {}}})


def known(step_ms, peak_mib, share=0.01, base_ms=100):
    """A row whose time is known to ± this share of that of a row of 100 ms."""
    ratio = step_ms / base_ms
    return Row(step_ms=step_ms, peak_mib=peak_mib, ratio=[ratio * (1 - share), ratio, ratio * (1 + share)])


@pytest.mark.parametrize(
    ("now", "carried", "says"),
    [
        (known(100, 200), True, "Needs 4.0 times less memory and about as much time."),
        (known(70, 800), True, "Needs as much memory and 30% less time."),
        (known(101, 770), True, "Needs 4% less memory and about as much time."),
        (known(130, 400), True, "Needs 2.0 times less memory and 30% more time."),
        (known(98, 800), False, "Needs as much memory and about as much time: not carried."),
        (known(250, 400), False, "and 2.5 times as much time"),
        (known(160, 200), False, "1.6 times as much time, over 1.5 times naive's: not carried."),
        (known(122, 787), False, "Needs 2% less memory and 22% more time: not carried."),
        (known(100, 900), False, "Needs 12% more memory and about as much time: not carried."),
        (known(80, 900), True, "Needs 12% more memory and 20% less time."),
        (FAILED, False, "Failed."),
    ],
)
def test_a_rung_is_carried_if_it_gains_more_in_one_than_it_costs_in_the_other(now, carried, says):
    naive = row(100, 800)
    verdict = judge_row(now, naive, naive)
    assert verdict[0] is carried
    assert says in verdict[1]


@pytest.mark.parametrize(
    ("time", "memory", "carried"),
    [
        (Ratio(0.80, 0.76, 0.84), 1.0, True),
        (Ratio(0.80, 0.60, 1.10), 1.0, None),
        (Ratio(0.98, 0.975, 0.99), 1.0, False),  # certain, and not worth a line of code
        (Ratio(1.00, 0.98, 1.02), 1.0, False),  # a gain of 3% is excluded
        (Ratio(1.00, 0.95, 1.05), 1.0, None),
        (Ratio(1.03, 0.98, 1.08), 0.85, True),  # wherever it lies, it costs less than it saves
        (Ratio(1.03, 0.98, 1.08), 0.9, None),
        (Ratio(1.47, 1.44, 1.50), 0.62, False),  # that much time can save more
        (Ratio(1.03, 0.90, 1.18), 0.9, None),
        (Ratio(1.40, 1.20, 1.60), 0.9, False),
        (Ratio(1.00, 0.99, 1.005), 0.99, True),  # a small saving, and no more than a small cost
    ],
)
def test_the_interval_decides_and_leaves_open_what_it_spans(time, memory, carried):
    assert judge(time, memory) is carried


@pytest.mark.parametrize(
    ("now", "carried"),
    [
        (known(95, 700), True),
        (known(102, 700, 0.005), True),
        (known(102, 700, 0.05), None),  # another turn may show whether it costs time
        (known(110, 400), False),  # a good trade, and not free
        (known(80, 820), True),  # graphs have memory of their own
    ],
)
def test_a_free_rung_is_carried_only_if_it_costs_no_time(now, carried):
    naive = row(100, 800)
    assert judge_row(replace(now, free=True), naive, naive)[0] is carried


def test_where_the_time_of_a_free_rung_is_not_decided_the_estimate_decides():
    for now, carried in [(known(92, 800, 0.1), True), (known(99, 800, 0.1), False), (known(108, 640, 0.1), False)]:
        assert judge_undecided(replace(now, free=True), row(100, 800))[0] is carried


def test_where_time_is_not_decided_a_clear_saving_of_memory_decides():
    below = row(100, 800)
    assert judge_undecided(known(80, 800, 0.3), below)[0] is False
    assert judge_undecided(known(110, 788, 0.2), below)[0] is False  # 1.5% of memory, for perhaps a third more time
    assert judge_undecided(known(150, 520, 0.1), below)[0] is False  # certainly slower, and perhaps not worth it
    carried, says = judge_undecided(known(103, 720, 0.2), below)
    assert carried
    assert says == "Needs 10% less memory; its time, ×0.82 to ×1.24, is not decided."


def test_padded_texts_are_run_in_the_same_micro_batches_with_and_without_padding():
    with_padding, without = padded_rungs(None, micro_batches=4)
    below = with_padding.on(Row(state=NAIVE))
    assert below["callbacks"] == {"MicroBatching": {"n": 4, "trim_padding": False}}
    assert without.on(Row(state=below)) == {**below, "callbacks": {"MicroBatching": {"n": 4}}}


def test_the_three_stacks_of_a_ladder():
    naive = row(100, 800)
    rows = [row(60, 500), FAILED, row(90, 400), row(140, 50), row(149, 50.1), row(160, 20)]  # 20 take too long
    assert choose_stacks(naive, rows, 450) == {"fast": rows[2], "balanced": rows[0], "lean": rows[3]}
    assert choose_stacks(naive, rows, 500)["fast"] is rows[0]
    assert choose_stacks(naive, [*rows, row(60, 500)], 500)["fast"] is rows[0]  # no faster, with more techniques
    assert choose_stacks(FAILED, [row(1, 1)], 500) == choose_stacks(naive, [], 500) == {}
    assert "fast" not in choose_stacks(naive, rows[:1], 400)


def test_the_code_to_paste_makes_the_callbacks_that_were_measured(monkeypatch):
    state = NAIVE
    monkeypatch.setattr(L, "Trainer", dict)
    for rung in rungs():
        state = rung.on(Row(state=state, peak_mib=512.0))
        made: dict = {}
        exec(as_code(state), made)
        pasted, measured = made["trainer"].get("callbacks", []), callbacks_of(state)
        assert [type(callback) for callback in pasted] == [type(callback) for callback in measured]
        assert [settings_of(callback) for callback in pasted] == [settings_of(callback) for callback in measured]
        assert made["trainer"]["precision"] == state["trainer"]["precision"]


def settings_of(callback):
    """What a callback was made with: its plain values, and the text of a policy."""
    plain = {name: value for name, value in vars(callback).items() if isinstance(value, int | float | str | bool)}
    return {**plain, "policy": repr(getattr(callback, "policy", None))}


def test_what_changes_training_is_shown_and_never_carried():
    changed = replace(known(50, 100), exactness=Exactness.CHANGES_TRAINING)
    changed.own_exactness = changed.exactness
    naive = row(100, 800)
    says = "Needs 8.0 times less memory and 2.0 times less time, and changes training: not carried."
    assert judge_row(changed, naive, naive) == (False, says)
    assert choose_stacks(naive, [changed], 800) == {}


def test_nothing_is_carried_onto_a_failed_baseline():
    assert judge_row(row(1, 1), FAILED, FAILED) == (False, "There is nothing to compare it with.")


def test_parity_is_that_of_the_worst_step():
    naive = Row(losses=[5.0, 4.0, 3.0])
    assert loss_parity(Row(losses=[5.0, 4.5, 3.0]), naive) == 0.5
    assert loss_parity(Row(error="boom"), naive) is None
    assert loss_parity(Row(losses=[5.0]), Row(error="boom")) is None


def test_a_loss_that_is_no_number_is_a_failure():
    assert "from step 1 on" in refuse_non_finite({"losses": [float("inf")]})["error"]
    assert refuse_non_finite({"losses": [1.0]}) == {"losses": [1.0]}


def test_exactness_of_several_is_the_least_exact():
    assert least_exact(Exactness.TOLERANCE, Exactness.EXACT, Exactness.CHANGES_TRAINING) is Exactness.CHANGES_TRAINING


def test_paths_are_cut_from_messages():
    assert without_paths("cannot open '/home/me/x/y.npy' now") == "cannot open '…/y.npy' now"
    assert without_paths("1/2 of a/b") == "1/2 of a/b"


def test_the_judge_is_rarely_wrong_on_simulated_machines(monkeypatch):
    """The stored figures are of 2,000 ladders for each machine: here are few, on the one that has everything."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    simulate = importlib.import_module("judge_simulation").simulate
    in_turn, before = simulate("in turn", "all", ladders=150), simulate("one after another", "all", ladders=150)
    assert in_turn["wrong"] < 0.02
    assert before["wrong"] > 0.1


@pytest.mark.benchmark
def test_the_stored_simulation_is_what_the_example_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    simulate = importlib.import_module("judge_simulation").simulate
    stored = json.loads((ROOT / "examples" / "results" / "judge_simulation.json").read_text())["rows"]
    assert [simulate(row["rule"], row["machine"], row["ladders"]) for row in stored] == stored
