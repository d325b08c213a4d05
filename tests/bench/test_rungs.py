import json

import pytest

from lightning_fasttrain._technique import Exactness
from lightning_fasttrain.bench.hosts import callbacks_of
from lightning_fasttrain.bench.judge import judge, loss_parity, ratios, refuse_non_finite, time_noise
from lightning_fasttrain.bench.process import without_paths
from lightning_fasttrain.bench.rungs import NAIVE, chosen, least_exact, on_top_of, rungs, strong_baseline


def row(step_ms, peak_mib, error=None):
    return {"step_ms": step_ms, "peak_mib": peak_mib, "error": error}


def test_the_ladder_has_the_documented_rungs_in_order():
    names = " ".join(rung.name for rung in rungs())
    assert names == (
        "release optimizer-in-backward micro-batches prefetch tf32 bf16 chunked-loss selective checkpointing budget "
        "offload compile fused max-autotune"
    )


def test_every_rung_is_plain_json_and_names_callbacks_that_exist():
    state = NAIVE
    for rung in rungs():
        state = rung.on({"state": state, "peak_mib": 512.0})
        assert json.loads(json.dumps(state)) == state
        assert len(callbacks_of(state)) == len(state["callbacks"])
    assert "OptimizerInBackward" not in state["callbacks"]
    assert len(state["callbacks"]) == 8


def test_a_policy_is_made_from_its_name():
    checkpointing = {rung.name: rung for rung in rungs()}["checkpointing"]
    below = {"state": NAIVE, "peak_mib": 512.0}
    (callback,) = callbacks_of(checkpointing.on(below))
    assert repr(callback.policy) == "EveryBlock(k=1)"


def test_the_budget_is_the_peak_of_a_checkpointed_state_and_less_than_another():
    named = {rung.name: rung for rung in rungs()}
    below = {"state": NAIVE, "peak_mib": 512.0}
    checkpointed = {"state": named["checkpointing"].on(below), "peak_mib": 256.0}
    for row, gib in [(below, 0.375), (checkpointed, 0.25 * 1.005), ({**below, "peak_mib": None}, "fit")]:
        (callback,) = callbacks_of(named["budget"].on(row))
        assert callback.policy.budget_gib == gib


@pytest.mark.parametrize("rung", rungs(), ids=lambda rung: rung.name)
def test_no_rung_promises_more_than_its_techniques(rung):
    for callback in callbacks_of(rung.on({"state": {**NAIVE, "callbacks": {}}, "peak_mib": 512.0})):
        assert least_exact(rung.exactness, callback.exactness) is rung.exactness


def test_an_unknown_callback_is_refused():
    with pytest.raises(ValueError, match="'Nonsense': this package has none"):
        callbacks_of({"callbacks": {"Nonsense": {}}})


def test_states_are_added_without_altering_what_is_below():
    changed = on_top_of(NAIVE, {"callbacks": {"MicroBatching": {"n": 4}}})
    again = on_top_of(changed, {"callbacks": {"MicroBatching": {"n": 8}}})
    assert NAIVE["callbacks"] == {}
    assert changed["callbacks"] == {"MicroBatching": {"n": 4}}
    assert again["callbacks"] == {"MicroBatching": {"n": 8}}


def test_unknown_rungs_are_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"rung 'warp': there is none of this name. Use release, optimizer-in-backward"
    ):
        chosen(rungs(), ["bf16", "warp"])


def test_the_strong_baseline_depends_on_the_device():
    assert strong_baseline("cuda").change["trainer"]["precision"] == "bf16-mixed"
    assert strong_baseline("cpu").change["trainer"]["precision"] == "32-true"
    assert strong_baseline("cpu").change["optimizer"] == {"fused": True}


@pytest.mark.parametrize(
    ("now", "carried", "says"),
    [
        (row(100, 200), True, "memory ÷4.0"),
        (row(70, 800), True, "time −30%"),
        (row(101, 790), True, "memory −1.2%"),
        (row(130, 400), True, "slower here (time +30%)"),
        (row(98, 800), False, "no clear gain here: not carried"),
        (row(250, 400), False, "slower here (time ×2.5): not carried"),
        (row(100, 900), False, "more memory here (+12%): not carried"),
        (row(None, None, "boom"), False, "failed"),
    ],
)
def test_a_rung_is_carried_if_time_and_memory_together_win(now, carried, says):
    verdict = judge(now, row(100, 800))
    assert verdict[0] is carried
    assert says in verdict[1]


def test_a_noisy_machine_calls_more_times_equal():
    def noise_of(*runs, device="cpu"):
        return time_noise({"step_ms_of_runs": list(runs)}, device)

    assert noise_of(100, 128) == pytest.approx(0.28)
    assert judge(row(80, 800), row(100, 800), 0.28) == (False, "no clear gain here: not carried")
    assert noise_of(100, 100.1, device="cuda") == 0.03
    assert noise_of(100, 1000) == 0.30
    assert noise_of() == noise_of(100) == 0.25


def test_only_what_goes_beyond_the_noise_counts():
    assert judge(row(160, 570), row(100, 800), 0.25) == (True, "memory −29%, slower here (time ×1.6)")
    assert judge(row(160, 570), row(100, 800), 0.03)[0] is False


def test_nothing_is_carried_onto_a_failed_baseline():
    assert judge(row(1, 1), row(None, None, "boom")) == (False, "nothing to compare with")
    assert ratios(row(1, 1), row(None, None, "boom"))["speedup"] is None


def test_parity_is_that_of_the_worst_step():
    naive = {"losses": [5.0, 4.0, 3.0], "error": None}
    assert loss_parity({"losses": [5.0, 4.5, 3.0]}, naive) == 0.5
    assert loss_parity({"error": "boom"}, naive) is None
    assert loss_parity({"losses": [5.0]}, {"error": "boom"}) is None


def test_a_loss_that_is_no_number_is_a_failure():
    assert "from step 1 on" in refuse_non_finite({"losses": [float("inf")]})["error"]
    assert refuse_non_finite({"losses": [1.0]}) == {"losses": [1.0]}


def test_exactness_of_several_is_the_least_exact():
    assert least_exact(Exactness.TOLERANCE, Exactness.EXACT, Exactness.CHANGES_TRAINING) is Exactness.CHANGES_TRAINING


def test_paths_are_cut_from_messages():
    assert without_paths("cannot open '/home/me/x/y.npy' now") == "cannot open '…/y.npy' now"
    assert without_paths("1/2 of a/b") == "1/2 of a/b"
