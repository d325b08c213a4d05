"""Each technique trains each model with a planted fault as the plain run does, or refuses it by its cause."""

import contextlib
import functools
import random
import re

import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.architecture.residual_blocks import find_residual_form
from lightning_fasttrain.core.state.step_state import StepState
from tests.support.nets import as_loader, largest_difference, trainer, weights
from tests.trial import faults
from tests.trial.faults import FAULTS, Fails, Plain, list_batches

TECHNIQUES = {
    "MicroBatching": lambda: [ft.MicroBatching(3)],
    "MicroBatching of blocks": lambda: [ft.MicroBatching(3, through="blocks.*")],
    "micro-batches in a window": lambda: [ft.TokenWeightedAccumulation(1), ft.MicroBatching(2)],
    "PaddingFree": lambda: [ft.micro_batching.PaddingFree()],
    "TiledMLP": lambda: [ft.model.TiledMLP(tokens=4)],
    "CompileBlocks": lambda: [ft.CompileBlocks(backend="eager")],
    "AttentionBackend": lambda: [ft.model.AttentionBackend("math")],
    "FusedLossHead": lambda: [ft.FusedLossHead()],
    "ActivationCheckpointing": lambda: [ft.ActivationCheckpointing()],
    "ActivationOffload": lambda: [ft.ActivationOffload(min_mib=0)],
    "MemoryBudget": lambda: [ft.ActivationCheckpointing(ft.model.MemoryBudget(1.0))],
    "StochasticDepth": lambda: [ft.architecture.StochasticDepth(1e-12)],  # skips nothing
    "MicroBatching, out of memory": lambda: [ft.MicroBatching("auto")],
    "Auto": lambda: [ft.Auto(memory_gib=4)],
    "Doctor": lambda: [ft.Doctor(steps=6, warmup=1, show=False)],
    "Rehearsal": lambda: [ft.proof.Rehearsal()],
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
    faults.GeneratorOfBlock: "'blocks.0.noise'",
    faults.DeepStateOfBlock: "'blocks.0.progress.steps'",
}
OF_BLOCKS = (faults.StateOfBlock, faults.GeneratorOfBlock, faults.DeepStateOfBlock)
LOST_AT_A_RESUME = {  # what a checkpoint does not hold → the name that the rehearsal gives
    faults.Counter: "Counter.count ",
    faults.Counts: "Counts.counts.steps ",
    faults.InDataclass: "InDataclass.progress.steps ",
    faults.Hidden: "Hidden.state ",
    faults.Queue: "Queue.queue",
    faults.OwnGenerator: "OwnGenerator.generator ",
    faults.StateOfBlock: "StateOfBlock.blocks.0.temperature ",
    faults.GeneratorOfBlock: "GeneratorOfBlock.blocks.0.noise ",
    faults.DeepStateOfBlock: "DeepStateOfBlock.blocks.0.progress.steps ",
    faults.LazyBlock: "LazyBlock.blocks.0.is_ready ",
}
PADDED = (faults.Convolves, faults.Pools, faults.Unmasked, faults.Fourier, faults.NormalizesTokens)
MIXING = (faults.ZeroConvolution, faults.ZeroGate, faults.ZeroRows)
REFUSED = {
    **{("micro-batches in a window", fault): name for fault, name in STATE.items()},
    **{("MicroBatching of blocks", fault): "its gradient differs" for fault in OF_BLOCKS},
    **{("StochasticDepth", fault): "is not residual" for fault in OF_BLOCKS},
    # Neither the loss nor the blocks can be split, so what does not fit does not.
    **{("MicroBatching, out of memory", fault): "planted" for fault in OF_BLOCKS},
    ("MicroBatching, out of memory", faults.LazyBlock): "already written to blocks.0.out.weight",
    ("MicroBatching, out of memory", faults.ZeroRows): "samples do not depend on one another",
    **{("Rehearsal", fault): f"not in the checkpoint, perhaps {name}" for fault, name in LOST_AT_A_RESUME.items()},
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
WHOLE += ("Auto", "Doctor", "Rehearsal")
LEFT_OUT |= {(name, fault) for name in WHOLE for fault in (*PADDED, *MIXING, faults.PositionsFromTheEnd)}


def run(fault, techniques, most_rows=None):
    """The weights after two epochs, in which a layer runs out of memory with more than this many rows."""
    random.seed(3)
    torch.manual_seed(5)
    module = fault()
    if most_rows is not None:
        module.blocks[1].norm_mlp.register_forward_pre_hook(functools.partial(run_out_of_memory, most_rows))
    trainer(techniques, max_epochs=2).fit(module, as_loader(list_batches(2)))
    return weights(module)


def run_out_of_memory(most_rows, layer, args):
    if torch.is_grad_enabled() and len(args[0]) > most_rows:
        raise torch.OutOfMemoryError("planted")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where Auto keeps its plan


@pytest.mark.filterwarnings(
    "ignore"
)  # steps that skip a batch, logits that are used otherwise, blocks that run eagerly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_run_is_the_plain_one_or_refused_by_its_cause(fault, tmp_path):
    plain = run(fault, [])
    outcomes: dict[str, str] = {}
    for name, make in TECHNIQUES.items():
        if (name, fault) in LEFT_OUT:
            continue
        torch._dynamo.reset()
        (tmp_path / "fasttrain_plan.json").unlink(missing_ok=True)
        try:
            apart = largest_difference(plain, run(fault, make(), 3 if name.endswith("memory") else None))
        except (ValueError, TypeError, RuntimeError, ft.proof.RehearsalError) as error:
            cause, said = REFUSED.get((name, fault)), "\n".join([str(error), *getattr(error, "__notes__", ())])
            outcomes[name] = "" if cause and re.search(cause, said) else f"refused: {said}"
            continue
        if (name, fault) in REFUSED:
            outcomes[name] = "not refused"
        elif apart > 1e-9:
            outcomes[name] = f"silently different by {apart:.1g}"
    assert {name: outcome for name, outcome in outcomes.items() if outcome} == {}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_an_error_of_the_step_is_shown_as_it_is(name):
    with pytest.raises((KeyError, ft.proof.RehearsalError), match="attention_mask"):
        run(Fails, TECHNIQUES[name]())


def try_block(module, batch):
    """What MixtureOfDepths and StochasticDepth ask of a block."""
    x, mask = module.embed_tokens(batch), batch["mask"][:, None, None, :]
    find_residual_form(module.blocks[0], "blocks.0", "MixtureOfDepths", (x, mask), {})


def step_of(module):
    return lambda batch: module.training_step(batch, 0)


def check_documents(module, batch):
    """Rows of two documents, which these models do not keep apart."""
    places = torch.arange(faults.LENGTH).expand(faults.ROWS, -1) % 4
    packed = {"input_ids": batch["ids"], "position_ids": places, **batch}
    with pytest.raises(ValueError, match="documents of a packed row see one another"):
        ft.micro_batching.check_documents(lambda b: module.training_step({**b, "ids": b["input_ids"]}, 0), packed)


TOOLS = {
    "predict_memory": lambda module, batch: ft.predict_memory(module, batch, device="cpu"),
    "make_plan": ft.make_plan,
    "estimate_training": lambda module, batch: ft.estimate.estimate_training(module, batch, 1000.0),
    "count_step_flops": ft.estimate.count_step_flops,
    "verify": lambda module, batch: ft.verify(module, batch, [ft.ActivationCheckpointing()]),
    "find_count": lambda module, batch: ft.micro_batching.find_count(step_of(module), batch),
    "check_padding_free": lambda module, batch: ft.micro_batching.check_padding_free(step_of(module), batch),
    "check_documents": check_documents,
    "find_residual_form": try_block,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", [Plain, *STATE, faults.LazyBlock, faults.AsksTrainer], ids=lambda kind: kind.__name__)
def test_predictions_plans_and_checks_leave_no_trace(fault):
    batch = list_batches(1)[0]
    for name, tool in TOOLS.items():
        module = fault()
        if name.startswith(("check", "find")) and isinstance(module, faults.AsksTrainer):
            continue  # its step runs in a Trainer alone
        state = StepState([module])
        state.copy_all()
        may_refuse = name.startswith(("check", "find"))
        with contextlib.suppress(*([ValueError] if may_refuse else [])):
            tool(module, batch)
        assert (name, state.changed()) == (name, [])


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


class FarTeacher(faults.Teacher):
    """A teacher that differs from its student at the first step."""

    def begin(self):
        super().begin()
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)


@pytest.mark.parametrize("fault", [faults.Teacher, FarTeacher])
def test_a_teacher_written_before_memory_ran_out_is_restored_or_refused(fault):
    """The first batches show what a step writes; they themselves cannot be repeated then."""
    batches = list_batches(3)
    fits = [{name: value[:2] for name, value in batch.items()} for batch in batches]

    def train(batches, techniques, most_rows=None):
        module = fault()
        module.blocks[1].norm_mlp.register_forward_pre_hook(functools.partial(run_out_of_memory, most_rows or 99))
        trainer(techniques).fit(module, as_loader(batches))
        return weights(module)

    growing = [*fits, batches[2]]
    restored = train(growing, [ft.MicroBatching("auto")], most_rows=3)
    assert largest_difference(train(growing, []), restored) < 1e-12
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        train([fits[0], batches[1]] if fault is faults.Teacher else batches, [ft.MicroBatching("auto")], most_rows=3)
    assert "already written to teacher.weight" in "".join(caught.value.__notes__)
