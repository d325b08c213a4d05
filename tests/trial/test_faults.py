"""Each technique trains each model with a planted fault as the plain run does, or refuses it by its cause."""

import random
import re

import pytest
import torch

import lightning_fasttrain as ft
from tests.support.nets import as_loader, largest_difference, trainer, weights
from tests.trial import faults
from tests.trial.faults import FAULTS, Fails, Plain, list_batches

TECHNIQUES = {
    "MicroBatching": lambda: [ft.MicroBatching(3)],
    "MicroBatching of blocks": lambda: [ft.MicroBatching(3, through="blocks.*")],
    "micro-batches in a window": lambda: [ft.TokenWeightedAccumulation(1), ft.MicroBatching(2)],
    "PaddingFree": lambda: [ft.data.PaddingFree()],
    "TiledMLP": lambda: [ft.model.TiledMLP(tokens=4)],
    "CompileBlocks": lambda: [ft.CompileBlocks(backend="eager")],
    "AttentionBackend": lambda: [ft.model.AttentionBackend("math")],
    "FusedLossHead": lambda: [ft.FusedLossHead()],
    "ActivationCheckpointing": lambda: [ft.ActivationCheckpointing()],
    "ActivationOffload": lambda: [ft.ActivationOffload(min_mib=0)],
    "MemoryBudget": lambda: [ft.ActivationCheckpointing(ft.model.MemoryBudget(1.0))],
    "StochasticDepth": lambda: [ft.architecture.StochasticDepth(1e-12)],  # skips nothing
}
STATE = {  # what the step changes → the name that a refusal gives
    faults.Counter: "'count'",
    faults.Counts: r"counts\['steps'\]",
    faults.InDataclass: "'progress.steps'",
    faults.CounterInBuffer: "'steps'",
    faults.Hidden: "'state'",
    faults.Queue: "'queue'",
    faults.Teacher: "'teacher.",
    faults.OwnGenerator: "'generator'",
    faults.StateOfBlock: "'blocks.0.temperature'",
}
PADDED = (faults.Convolves, faults.Pools, faults.Unmasked, faults.Fourier, faults.NormalizesTokens)
MIXING = (faults.ZeroConvolution, faults.ZeroGate, faults.ZeroRows)
REFUSED = {
    **{("micro-batches in a window", fault): name for fault, name in STATE.items()},
    ("MicroBatching of blocks", faults.StateOfBlock): "its gradient differs",
    ("StochasticDepth", faults.StateOfBlock): "is not residual",
    ("micro-batches in a window", faults.Contrasts): "samples of several batches are never in memory together",
    ("micro-batches in a window", faults.HookOnParameter): "samples of several batches are never in memory together",
    ("micro-batches in a window", faults.ZeroRows): "samples of several batches are never in memory together",
    ("MicroBatching", faults.ZeroRows): "samples do not depend on one another",
    ("MicroBatching of blocks", faults.ZeroRows): "its gradient differs",
    **{
        ("PaddingFree", fault): "padded entries take part|connect tokens|mask of the padded batch"
        for fault in (*PADDED, *MIXING)
    },
    **{("TiledMLP", fault): "depends on other tokens" for fault in MIXING},
}
# Each micro-batch draws its own numbers, as documented.
LEFT_OUT = {(name, faults.SkipsItself) for name in TECHNIQUES if "icro" in name}
# These look at neither rows nor tokens.
WHOLE = ("CompileBlocks", "AttentionBackend", "FusedLossHead", "ActivationOffload", "MemoryBudget", "StochasticDepth")
LEFT_OUT |= {(name, fault) for name in WHOLE for fault in (*PADDED, *MIXING, faults.PositionsFromTheEnd)}


def run(fault, techniques):
    random.seed(3)
    torch.manual_seed(5)
    module = fault()
    trainer(techniques).fit(module, as_loader(list_batches()))
    return weights(module)


@pytest.mark.filterwarnings(
    "ignore"
)  # steps that skip a batch, logits that are used otherwise, blocks that run eagerly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_run_is_the_plain_one_or_refused_by_its_cause(fault):
    plain = run(fault, [])
    outcomes: dict[str, str] = {}
    for name, make in TECHNIQUES.items():
        if (name, fault) in LEFT_OUT:
            continue
        torch._dynamo.reset()
        try:
            apart = largest_difference(plain, run(fault, make()))
        except (ValueError, TypeError) as error:
            cause = REFUSED.get((name, fault))
            outcomes[name] = "" if cause and re.search(cause, str(error)) else f"refused: {error}"
            continue
        if (name, fault) in REFUSED:
            outcomes[name] = "not refused"
        elif apart > 1e-9:
            outcomes[name] = f"silently different by {apart:.1g}"
    assert {name: outcome for name, outcome in outcomes.items() if outcome} == {}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_an_error_of_the_step_is_shown_as_it_is(name):
    with pytest.raises(KeyError, match="attention_mask"):
        run(Fails, TECHNIQUES[name]())


@pytest.mark.parametrize("fault", [Plain, faults.AsksTrainer, faults.Counter, faults.Teacher, faults.LazyBlock])
def test_predictions_and_plans_run_the_step_and_leave_no_trace(fault):
    module, batch = fault(), list_batches(1)[0]
    before, attributes = weights(module), dict(vars(module))
    assert ft.predict_memory(module, batch, device="cpu").peak_bytes > 0
    ft.make_plan(module, batch)
    assert largest_difference(before, weights(module)) == 0
    assert all(vars(module)[name] is value for name, value in attributes.items())


@pytest.mark.filterwarnings("ignore")
def test_negative_control_the_faults_change_the_training():
    """What a technique leaves out of a trial would be seen: without the fault, the run is another one."""
    plain = run(Plain, [])
    alike = [fault.__name__ for fault in FAULTS if fault is not Plain and is_alike(plain, run(fault, []))]
    assert alike == []


def is_alike(plain, other):
    shared = plain.keys() & other.keys()
    return largest_difference({n: plain[n] for n in shared}, {n: other[n] for n in shared}) < 1e-6


@pytest.mark.parametrize("count", ["targets", lambda batch: (batch["labels"] != -100).sum()], ids=["named", "function"])
def test_a_given_count_holds_on_further_samples_and_a_clipping_hook_shows(count):
    """Of the rows that are tried first, one has targets."""
    technique = ft.MicroBatching(3, count=count)
    assert largest_difference(run(Plain, []), run(Plain, [technique])) < 1e-12
    with pytest.raises(ValueError, match="count= does not split this loss exactly|depend on one another"):
        run(faults.HookOnParameter, [ft.MicroBatching(3, count=count)])
