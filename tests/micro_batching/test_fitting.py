"""When a step runs out of memory, all ranks use the same fallback, and the training stays the same."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

import lightning_fasttrain as ft
from lightning_fasttrain.micro_batching.out_of_memory import fitting_search_of
from tests.micro_batching.fitting_scenarios import FITS, SHORTAGES
from tests.support.nets import TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_ranks


class Starved(TinyLM):
    """Fits from the third batch on only with checkpointed blocks, and then three samples at a time."""

    def __init__(self, **settings):
        super().__init__(dropout=0.3, **settings)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        recomputed = "forward" in vars(self.blocks[0])
        if batch_idx >= 2 and not (recomputed and len(batch["labels"]) <= 3):
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return loss


class Knows(TinyLM):
    """A run that uses the known number of micro-batches from the batch on where it is needed."""

    def __init__(self, technique):
        super().__init__(dropout=0.3)
        self.technique = [technique]

    def on_train_batch_start(self, batch, batch_idx):
        self.technique[0].n = 1 if batch_idx < 2 else 2


def ladder(**settings):
    return ft.MicroBatching("auto", then=[ft.ActivationCheckpointing(), ft.ActivationOffload()], **settings)


def steps(net, technique, **settings):
    torch.manual_seed(5)
    t = trainer([technique], **settings)
    t.fit(net, as_loader(lm_batches(4)))
    return {**weights(net), "random": torch.rand(1)}, t


def test_checkpointing_starts_when_single_samples_do_not_fit(caplog):
    known, auto = ft.MicroBatching(1), ladder()
    expected, _ = steps(Knows(known), known)
    net = Starved()
    seen, _ = steps(net, auto)
    assert largest_difference(expected, seen) == 0
    assert (auto.n, auto.savings.taken) == (2, 1)
    assert "forward" not in vars(net.blocks[0])  # undone at the end
    said = [message for message in caplog.messages if "Out of memory" in message]
    assert [message.split(":")[1] for message in said] == [
        " repeating the batch with 2",
        " repeating the batch with 4",
        " repeating the batch with 6",
        " applying ActivationCheckpointing() from now on, and repeating the batch unsplit",
        " repeating the batch with 2",
    ]


def test_a_resumed_run_starts_with_the_number_found(tmp_path):
    _, t = steps(Starved(), ladder())
    t.save_checkpoint(tmp_path / "a.ckpt")

    class Looks(TinyLM):
        def training_step(self, batch, batch_idx):
            assert "forward" in vars(self.blocks[0])
            assert len(batch["labels"]) == 3
            return super().training_step(batch, batch_idx)

    again = ladder(count="targets", check=False)
    trainer([again], max_epochs=2).fit(Looks(), as_loader(lm_batches(4)), ckpt_path=tmp_path / "a.ckpt")
    assert (again.n, again.savings.taken) == (2, 1)


def test_the_final_error_names_the_missing_memory_and_further_options():
    class Never(TinyLM):
        def training_step(self, batch, batch_idx):
            where = "GPU 0 has a total capacity of 10.00 GiB of which 256.00 MiB is free. Including non-PyTorch memory"
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.50 GiB. {where}, ...")

    auto = ladder(count="targets", check=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Never(), lm_batches(1), [auto])
    assert "of one sample each: at least 1280 MiB more are needed" in caught.value.__notes__[0]
    assert auto.savings.taken == 2


def test_compiled_blocks_can_be_checkpointed_later():
    torch._dynamo.reset()
    plain, _ = steps(Knows(known := ft.MicroBatching(1)), known)
    torch.manual_seed(5)
    net = Starved()
    trainer([ladder(), ft.CompileBlocks(backend="eager")]).fit(net, as_loader(lm_batches(4)))
    assert largest_difference({k: plain[k] for k in weights(net)}, weights(net)) < 1e-5
    assert "forward" not in vars(net.blocks[0])


@pytest.mark.parametrize(
    ("then", "n", "error", "match"),
    [
        ([ft.LoRA(rank=2)], "auto", ValueError, "techniques that change nothing but how activations are stored"),
        ([ft.ActivationCheckpointing(ft.MemoryBudget(1.0))], "auto", ValueError, "a few complete steps to measure"),
        (["recompute"], "auto", TypeError, "expected a Technique, got"),
        ([ft.ActivationCheckpointing()], 4, ValueError, "only n='auto' uses them"),
    ],
    ids=["adapter", "budget", "word", "number"],
)
def test_techniques_that_cannot_start_during_a_run_are_refused(then, n, error, match):
    with pytest.raises(error, match=match):
        ft.MicroBatching(n, then=then)


def test_inapplicable_techniques_are_refused_before_they_are_needed():
    twice = [ft.MicroBatching("auto", then=[ft.ActivationCheckpointing()]), ft.ActivationCheckpointing()]
    with pytest.raises(ValueError, match="ActivationCheckpointing is listed twice"):
        fit(TinyLM(), lm_batches(1), twice)
    nothing_like_it = ft.MicroBatching("auto", then=[ft.ActivationCheckpointing(blocks="layers.*")])
    with pytest.raises(ValueError, match="matches nothing"):
        fit(TinyLM(), lm_batches(1), [nothing_like_it])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("fitting") / "found.json"
    run_ranks("tests.micro_batching.fitting_scenarios", path, log=path.parent / "log", timeout_s=120)
    *ranks, gone = json.loads(path.read_text())
    ranks[0]["gone"] = gone
    return ranks


@pytest.mark.parametrize(("short", "place", "part"), SHORTAGES)
def test_all_ranks_use_the_number_that_fits_on_the_smallest(found, short, place, part):
    for rank in found:
        assert rank[f"{short} {place} {part}"] == [0.0, FITS[short]]
        assert rank["another training"] > 1e-2  # the comparison can fail


@pytest.mark.parametrize("setting", ["window", "views", "unused"])
def test_ranks_agree_under_other_ddp_settings(found, setting):
    assert {rank[setting] for rank in found} == {0.0}


def test_checkpointing_starts_on_all_ranks_if_one_needs_it(found):
    assert [rank["recomputed"] for rank in found] == [[0.0, 1, 1]] * 2


def test_an_error_on_one_rank_stops_all_and_is_reported_on_its_rank(found):
    assert found[1]["Wrong"] == "ValueError: a mistake in the step"
    assert found[0]["Wrong"].startswith("RuntimeError: rank 1 failed in this step: no rank can continue alone.")


def test_a_sample_that_does_not_fit_on_one_rank_stops_all(found):
    assert found[0]["TooLarge"] == "OutOfMemoryError: CUDA out of memory (staged)"
    assert found[1]["TooLarge"].startswith("OutOfMemoryError: rank 0, with 6 micro-batches: its samples do not fit")


def test_an_exited_rank_is_an_error_at_once(found):
    assert found[0]["gone"].startswith("RuntimeError: a rank has exited or did not answer in time:")


@pytest.mark.parametrize(
    ("net", "match"),
    [
        ("Gathers", "a training_step that communicates (all_gather, all_reduce): the other ranks would wait there"),
        ("Synchronises", "MulticlassAccuracy 'accuracy': it synchronizes inside the step"),
        ("MicroBatching, static", "MicroBatching with static_graph=True: DDP's first step"),
        ("TokenWeightedAccumulation, static", "TokenWeightedAccumulation with static_graph=True: DDP's first step"),
    ],
)
def test_steps_that_wait_for_other_ranks_are_refused_on_all_ranks(found, net, match):
    for rank in found:
        assert match in rank[net]


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, ft.ZeROStrategy])
def test_strategies_that_gather_in_a_forward_are_refused(strategy):
    """DeepSpeed's strategies are subclasses of DDP's, and unsuitable as well."""
    trainer = SimpleNamespace(world_size=2, strategy=strategy())
    with pytest.raises(ValueError, match=rf"'auto'\) with {strategy.__name__} on 2 processes: .*Give a number"):
        fitting_search_of(trainer)


def test_under_fsdp2_a_number_is_asked_for():
    with pytest.raises(ValueError, match=r"MicroBatching \+ FSDP2Strategy: 'auto' repeats .*Give a number"):
        fit(TinyLM(), lm_batches(1), [ft.MicroBatching("auto")], strategy=ft.FSDP2Strategy())
    fit(TinyLM(), lm_batches(1), [ft.MicroBatching(2)], strategy=ft.FSDP2Strategy())


def test_blocks_that_fail_to_compile_on_one_rank_run_uncompiled_there(found):
    assert found[0]["compiler"] == [0.0, [], []]
    blocks = [f"blocks.{i}" for i in range(3)]
    said = [f"rank 1: block '{block}' (Block) could not be compiled and runs eagerly"[:60] for block in blocks]
    assert found[1]["compiler"] == [0.0, said, blocks]
