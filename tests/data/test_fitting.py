"""When a step runs out of memory: what is tried next, by all ranks alike, and that it is the same training."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

import lightning_fasttrain as ft
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import together_of
from tests.nets import TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights
from tests.ranks import run_ranks


class Starved(TinyLM):
    """Fits from the third batch on only where its blocks are recomputed, and then three samples at a time."""

    def __init__(self, **settings):
        super().__init__(dropout=0.3, **settings)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        recomputed = "forward" in vars(self.blocks[0])
        if batch_idx >= 2 and not (recomputed and len(batch["labels"]) <= 3):
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return loss


class Knows(TinyLM):
    """A run that was given the number of parts, from the batch on where it is needed."""

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


def test_blocks_are_recomputed_where_single_samples_do_not_fit_and_nothing_else_changes(caplog):
    known, auto = ft.MicroBatching(1), ladder()
    expected, _ = steps(Knows(known), known)
    net = Starved()
    seen, _ = steps(net, auto)
    assert largest_difference(expected, seen) == 0
    assert (auto.n, auto.savings.taken) == (2, 1)
    assert "forward" not in vars(net.blocks[0])  # undone at the end
    said = [message for message in caplog.messages if "Out of memory" in message]
    assert [message.split(":")[1] for message in said] == [
        " the same batch again with 2",
        " the same batch again with 4",
        " the same batch again with 6",
        " from here on with ActivationCheckpointing(), and the same batch again in one",
        " the same batch again with 2",
    ]


def test_a_resumed_run_begins_with_what_was_found(tmp_path):
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


def test_where_nothing_is_left_the_error_has_the_shortfall_and_what_is_left():
    class Never(TinyLM):
        def training_step(self, batch, batch_idx):
            where = "GPU 0 has a total capacity of 10.00 GiB of which 256.00 MiB is free. Including non-PyTorch memory"
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.50 GiB. {where}, ...")

    auto = ladder(count="targets", check=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Never(), lm_batches(1), [auto])
    assert "of one sample each: at least 1280 MiB more are needed" in caught.value.__notes__[0]
    assert auto.savings.taken == 2


def test_compiled_blocks_can_be_recomputed_later():
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
def test_what_cannot_wait_until_it_is_needed_is_refused(then, n, error, match):
    with pytest.raises(error, match=match):
        ft.MicroBatching(n, then=then)


def test_what_could_not_be_applied_is_refused_before_it_is_needed():
    twice = [ft.MicroBatching("auto", then=[ft.ActivationCheckpointing()]), ft.ActivationCheckpointing()]
    with pytest.raises(ValueError, match="ActivationCheckpointing is listed twice"):
        fit(TinyLM(), lm_batches(1), twice)
    nothing_like_it = ft.MicroBatching("auto", then=[ft.ActivationCheckpointing(blocks="layers.*")])
    with pytest.raises(ValueError, match="matches nothing"):
        fit(TinyLM(), lm_batches(1), [nothing_like_it])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("fitting") / "found.json"
    run_ranks("tests.data.fitting_scenarios", path, log=path.parent / "log", timeout_s=120)
    *ranks, gone = json.loads(path.read_text())
    ranks[0]["gone"] = gone
    return ranks


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("part", ["first", "last"])
def test_one_rank_that_is_out_of_memory_leads_all_to_the_number_that_fits(found, short, place, part):
    for rank in found:
        assert rank[f"{short} {place} {part}"] == [0.0, {0: 4, 1: 2}[short]]
        assert rank["another training"] > 1e-2  # the comparison can fail


@pytest.mark.parametrize("setting", ["window", "views", "unused"])
def test_so_it_is_with_other_settings_of_ddp(found, setting):
    assert {rank[setting] for rank in found} == {0.0}


def test_blocks_are_recomputed_on_all_ranks_where_one_needs_it(found):
    assert [rank["recomputed"] for rank in found] == [[0.0, 1, 1]] * 2


def test_an_error_on_one_rank_ends_all_and_is_shown_on_its_own(found):
    assert found[1]["Wrong"] == "ValueError: a mistake in the step"
    assert found[0]["Wrong"].startswith("RuntimeError: rank 1 failed in this step: no rank can go on alone.")


def test_single_samples_that_do_not_fit_on_one_rank_end_all(found):
    assert found[0]["TooLarge"] == "OutOfMemoryError: CUDA out of memory (staged)"
    assert found[1]["TooLarge"].startswith("OutOfMemoryError: rank 0, with 6 micro-batches: its samples do not fit")


def test_a_rank_that_is_gone_is_an_error_at_once(found):
    assert found[0]["gone"].startswith("RuntimeError: a rank is gone, or did not answer in time:")


@pytest.mark.parametrize(
    ("net", "match"),
    [
        ("Gathers", "a training_step that communicates (all_gather, all_reduce): a rank that runs out of memory"),
        ("Synchronises", "MulticlassAccuracy 'accuracy': it synchronises inside of the step"),
        ("static", "static_graph=True: DDP's first step"),
    ],
)
def test_what_would_leave_ranks_waiting_is_refused_on_all(found, net, match):
    for rank in found:
        assert match in rank[net]


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, ft.ZeROStrategy])
def test_strategies_that_gather_in_a_forward_are_refused(strategy):
    """DeepSpeed's are subclasses of DDP's, and as unfit."""
    trainer = SimpleNamespace(world_size=2, strategy=strategy())
    with pytest.raises(ValueError, match=rf"'auto'\) with {strategy.__name__} on 2 processes: .*Give a number"):
        together_of(trainer)


def test_blocks_that_one_rank_cannot_compile_run_as_they_are_there_alone_which_it_says(found):
    assert found[0]["compiler"] == [0.0, [], []]
    blocks = [f"blocks.{i}" for i in range(3)]
    said = [f"rank 1: block '{block}' (Block) could not be compiled and runs as it is"[:60] for block in blocks]
    assert found[1]["compiler"] == [0.0, said, blocks]


@pytest.mark.parametrize(
    "where", ["0 forward first", "0 backward last", "1 forward last", "1 backward first", "window", "half"]
)
def test_so_it_is_where_parameters_are_sharded_and_ranks_meet_in_every_block(found, where):
    for rank in found:
        assert rank[f"sharded {where}"] == [0.0, 2 if where.startswith("1") else 4]


def test_a_rank_with_fewer_parts_takes_its_part_in_gathering(found):
    assert max(rank["unequal"] for rank in found) < 1e-5


def test_sharded_blocks_are_recomputed_on_all_ranks_where_one_needs_it(found):
    assert [rank["sharded recomputed"] for rank in found] == [[0.0, 1, 1]] * 2


def test_errors_on_one_rank_end_all_where_parameters_are_sharded(found):
    assert found[1]["sharded Wrong"] == "ValueError: a mistake in the step"
    assert found[0]["sharded Wrong"].startswith("RuntimeError: rank 1 failed in this step")
    assert found[0]["sharded TooLarge"] == "OutOfMemoryError: CUDA out of memory (staged)"
    assert found[1]["sharded TooLarge"].startswith("OutOfMemoryError: rank 0, with 6 micro-batches")
    assert "FSDP2Strategy(reduce_once=False)" in found[0]["each"]
