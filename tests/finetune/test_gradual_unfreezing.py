"""Gradual unfreezing from the top down: in a loop, in a Trainer, resumed, and in two processes."""

import copy
import json
import logging
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune.selection.freezing import freeze_
from lightning_fasttrain.finetune.selection.gradual_unfreezing import GradualUnfreezing, Unfreezing
from lightning_fasttrain.technique import Exactness
from tests.support.families import built
from tests.support.nets import HeadFirst, TinyLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_ranks

BATCHES = lm_batches(4)


class Untied(TinyLM):
    """A model with an untied head, so that the head can train while the embedding is frozen."""

    def build(self):
        super().build()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


GROUPS = [["head"], ["blocks.2"], ["blocks.1"], ["blocks.0"], ["embed"]]


def by_hand(epochs, unfrozen_at, optimizer=torch.optim.AdamW):
    """Reference in plain PyTorch, which sets ``requires_grad_`` by the prefixes of names."""
    net, step = Untied(), 0
    opt = optimizer(net.parameters(), lr=0.01)
    for epoch in range(epochs):
        for batch in BATCHES:
            k = unfrozen_at(epoch, step)
            for i, (group,) in enumerate(GROUPS):
                for name, parameter in net.named_parameters():
                    if name.startswith(group):
                        parameter.requires_grad_(i < k)
            opt.zero_grad()
            net.loss(batch).backward()
            opt.step()
            step += 1
    return net


def fit(callbacks, epochs=1, net=None, batches=BATCHES, ckpt_path=None, **settings):
    net = net or Untied()
    t = trainer(callbacks, max_epochs=epochs, **settings)
    t.fit(net, as_loader(batches), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return net, t


def trains(net):
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


class Watch(L.Callback):
    """Records which parameters train in each step, and which have optimizer state."""

    def __init__(self):
        self.trains, self.states = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.trains.append({name.split(".weight")[0].split(".bias")[0] for name in trains(pl_module)})
        self.states.append({names[parameter] for parameter in trainer.optimizers[0].state})


# --- the groups


def test_default_groups_are_the_head_each_block_and_the_stem():
    groups = Unfreezing(Untied()).groups
    assert [
        {name.rpartition(".")[0].split(".norm")[0].split(".up")[0].split(".down")[0] for name in g} for g in groups
    ] == [
        {"head"},
        {"blocks.2"},
        {"blocks.1"},
        {"blocks.0"},
        {"embed"},
    ]


def test_modules_between_two_blocks_belong_to_the_lower_block():
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    groups = Unfreezing(nn.Sequential(*layers)).groups
    assert groups == [
        ["4.weight", "4.bias"],
        ["2.weight", "2.bias", "3.weight", "3.bias"],
        ["0.weight", "0.bias", "1.weight", "1.bias"],
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_registered_first_is_unfrozen_first(tied):
    groups = ft.finetune.Unfreezing(HeadFirst(tied=tied)).groups
    assert sorted(groups[0]) == ["lm_head.weight", "transformer.ln_f.bias", "transformer.ln_f.weight"]
    assert groups[1][0] == "transformer.h.1.norm.weight"
    assert groups[3:] == ([] if tied else [["transformer.wte.weight"]])


@pytest.mark.parametrize("family", ["BartForConditionalGeneration", "Whisper", "FromTorch"])
def test_a_decoder_is_unfrozen_layer_by_layer_and_before_the_encoder(family):
    groups = ft.finetune.Unfreezing(copy.deepcopy(built(family))).groups
    layers = [{re.sub(r"(coder\.(?:layers\.)?\d).*", r"\1", name) for name in group} for group in groups]
    kinds = [{name.split(".")[-3] for name in names if name[-1].isdigit()} for names in layers]
    assert kinds == [set(), *[{"decoder"}] * 3, *[{"encoder"}] * 2, *kinds[6:]]
    assert not any(kinds[6:])


def test_unnamed_parameters_form_the_last_group():
    unfreezing = Unfreezing(Untied(), ["head", ["blocks.*"]])
    assert unfreezing.groups[2] == ["embed.weight"]
    assert len(unfreezing.groups[1]) == 18


def test_tied_parameter_belongs_to_the_topmost_module(caplog):
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        unfreezing = Unfreezing(TinyLM())
    assert [len(group) for group in unfreezing.groups] == [1, 6, 6, 6]  # the stem is tied to the head
    assert unfreezing.groups[0] == ["head.weight"]
    assert "embed.weight is unfrozen as head.weight, to which it is tied" in caplog.text


def test_previously_frozen_parameters_stay_frozen():
    net = Untied()
    freeze_(net.blocks[1])
    net.blocks[0].up.bias.requires_grad_(False)
    unfreezing = Unfreezing(net)
    assert [len(group) for group in unfreezing.groups] == [1, 6, 5, 1]
    unfreezing.unfreeze_to(2)
    unfreezing.unfreeze_to(9)
    assert {name for name, _ in net.named_parameters()} - trains(net) == {
        "blocks.0.up.bias",
        *(f"blocks.1.{name}" for name, _ in net.blocks[1].named_parameters()),
    }


# --- unfreezing


def test_unfreeze_to_names_what_it_changed_and_goes_both_ways():
    net = Untied()
    unfreezing = Unfreezing(net, GROUPS)
    assert len(unfreezing.unfreeze_to(1)) == 19
    assert trains(net) == {"head.weight"}
    assert unfreezing.unfreeze_to(2) == unfreezing.groups[1]
    assert unfreezing.unfreeze_to(2) == []
    assert unfreezing.unfreeze_to(1) == unfreezing.groups[1]
    unfreezing.undo()
    assert trains(net) == set(dict(net.named_parameters()))


def test_norms_are_in_eval_until_their_group_is_unfrozen():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)], nn.Linear(4, 2))
    net[2][1].eval()  # set by the user
    unfreezing = Unfreezing(net)
    unfreezing.unfreeze_to(1)
    modes = [[net[i][1].training for i in range(3)]]
    for k in (2, 3, 4):
        unfreezing.unfreeze_to(k)
        modes.append([net[i][1].training for i in range(3)])
    assert modes == [[False] * 3, [False] * 3, [False, True, False], [True, True, False]]
    net.train()
    unfreezing.unfreeze_to(1)
    assert not any(net.train()[i][1].training for i in range(3))
    unfreezing.undo()
    assert all(net[i][1].training for i in range(3))


def test_norm_without_parameters_belongs_to_the_group_below():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    unfreezing = Unfreezing(net, ["2", "0"])
    unfreezing.unfreeze_to(1)
    assert not net[1].training
    unfreezing.unfreeze_to(2)
    assert net[1].training


def test_copied_model_is_frozen_independently():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    unfreezing = Unfreezing(net, [["2"]])
    unfreezing.unfreeze_to(1)
    twin, unfreezing_twin = copy.deepcopy((net, unfreezing))
    unfreezing.undo()
    assert trains(twin) == {"2.weight", "2.bias"}
    unfreezing_twin.undo()
    assert twin[1].training
    assert trains(twin) == trains(net)


def test_state_holds_the_number_of_trained_groups():
    net = Untied()
    unfreezing = Unfreezing(net, GROUPS)
    unfreezing.unfreeze_to(1)
    state = {"unfrozen": 3, "groups": [list(group) for group in unfreezing.groups]}
    unfreezing.load_state_dict(state)
    assert unfreezing.state_dict() == state
    unfreezing.load_state_dict({"thawed": 2, "groups": state["groups"]})  # of an earlier version
    assert unfreezing.unfrozen == 2
    unfreezing.load_state_dict(state)
    assert "blocks.1.up.weight" in trains(net)
    with pytest.raises(ValueError, match="a state of 5 groups for the 2 of this model"):
        Unfreezing(Untied(), ["head"]).load_state_dict(state)


# --- in a Trainer


@pytest.mark.parametrize("every", ["epoch", 3])
def test_weights_are_bitwise_those_of_a_manual_loop(every):
    net, _ = fit([GradualUnfreezing(every)], epochs=3)
    expected = by_hand(3, lambda epoch, step: 1 + (epoch if every == "epoch" else step // every))
    assert largest_difference(weights(expected), weights(net)) == 0
    assert largest_difference(weights(expected), weights(by_hand(3, lambda *_: 9))) > 1e-2  # not plain training


def test_frozen_parameters_are_not_decayed_and_have_no_optimizer_state():
    watch, before = Watch(), weights(Untied())
    net, _ = fit([GradualUnfreezing(every=2, groups=GROUPS), watch], net=Untied(weight_decay=0.5))
    changed = {name for name, value in weights(net).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(("head", "blocks.2"))}
    assert watch.states[0] == {"head.weight"}
    assert watch.states[-1] == changed


def test_optimizer_of_trainable_parameters_gets_all_parameters():
    class Filters(Untied):
        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    net, t = fit([GradualUnfreezing()], epochs=3, net=Filters())
    assert len(t.optimizers[0].param_groups[0]["params"]) == 20
    assert largest_difference(weights(by_hand(3, lambda epoch, _: 1 + epoch)), weights(net)) == 0


def test_equal_layer_norms_are_all_trained():
    """Those of two blocks have equal values when they are new, but must not be treated as one."""
    before = weights(Untied())
    net, _ = fit([GradualUnfreezing()], epochs=5)
    assert all(not torch.equal(value, before[name]) for name, value in weights(net).items())


@pytest.mark.parametrize("every", ["epoch", 3])
@pytest.mark.parametrize("saved_after", [4, 5, 6])  # steps: at the end of an epoch, and within one
def test_resumed_equals_uninterrupted_bit_for_bit(every, saved_after, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == saved_after:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    # The same batch each time: a plain loader restarts its epoch, and the order of the data is not tested here.
    whole, resumed, batches = Watch(), Watch(), BATCHES[:1] * 4
    expected, _ = fit([GradualUnfreezing(every), Save(), whole], epochs=3, batches=batches)
    net, _ = fit([GradualUnfreezing(every), resumed], epochs=3, batches=batches, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.trains == whole.trains[saved_after:]
    assert resumed.states == whole.states[saved_after:]
    assert largest_difference(weights(expected), weights(net)) == 0


def test_groups_are_unfrozen_between_windows_of_accumulation():
    watch = Watch()
    fit([GradualUnfreezing(1), watch], epochs=2, accumulate_grad_batches=2)
    assert [len(names) for names in watch.trains] == [1, 1, 4, 4, 7, 7, 10, 10]  # modules with parameters that train


def test_second_fit_repeats_the_first_and_everything_trains_afterwards():
    technique = GradualUnfreezing()
    first, _ = fit([technique], epochs=2)
    again, t = fit([copy.deepcopy(technique)], epochs=2)
    assert largest_difference(weights(first), weights(again)) == 0
    assert trains(again) == set(dict(again.named_parameters()))
    t.validate(again, as_loader(BATCHES), verbose=False)


def test_copy_during_a_run_holds_no_model():
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            self.copied = copy.deepcopy(trainer.callbacks[0])

    copies = Copies()
    fit([GradualUnfreezing(), copies])
    assert copies.copied._unfreezing is None
    assert (
        largest_difference(*(weights(fit([made], epochs=2)[0]) for made in (copies.copied, GradualUnfreezing()))) == 0
    )


def test_everything_is_restored_after_a_failure():
    class Fails(Untied):
        def training_step(self, batch, batch_idx):
            self.trained = trains(self)
            raise RuntimeError("no")

    net = Fails()
    net.blocks[0].up.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no"):
        fit([GradualUnfreezing()], net=net)
    assert net.trained == {"head.weight"}
    assert {name for name, _ in net.named_parameters()} - trains(net) == {"blocks.0.up.bias"}


def test_frozen_norms_keep_their_statistics():
    class WithNorm(Untied):
        def build(self):
            super().build()
            self.blocks[0].down = nn.Sequential(self.blocks[0].down, nn.Flatten(0, 1), nn.BatchNorm1d(8), Unflatten())

        def on_train_epoch_end(self):
            self.modes = [*getattr(self, "modes", []), (self.blocks[0].down[2].training, self.head.training)]
            self.counts = [*getattr(self, "counts", []), int(self.blocks[0].down[2].num_batches_tracked)]

    net = WithNorm()
    trainer([GradualUnfreezing()], max_epochs=5).fit(net, as_loader(BATCHES), as_loader(BATCHES))
    assert net.modes == [(False, True)] * 3 + [(True, True)] * 2
    assert net.counts == [0, 0, 0, 4, 8]


class Unflatten(nn.Module):
    def forward(self, x):
        return x.unflatten(0, (-1, 5))


@pytest.mark.parametrize(
    "others",
    [
        lambda: [ft.ActivationCheckpointing()],
        lambda: [ft.MicroBatching(1)],
        lambda: [ft.OptimizerInBackward()],
        lambda: [ft.EagerGradientRelease(), ft.ActivationCheckpointing(ft.model.SelectiveOps())],
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_combination_with_other_techniques_is_bitwise_equal(others, turned):
    techniques = [GradualUnfreezing(3), *others()]
    net, _ = fit(techniques[::-1] if turned else techniques, epochs=3)
    expected = by_hand(3, lambda epoch, step: 1 + step // 3)
    assert largest_difference(weights(expected), weights(net)) == 0


def test_micro_batches_and_compiled_blocks_give_close_weights():
    torch._dynamo.reset()
    net, _ = fit([ft.MicroBatching(3), GradualUnfreezing(3), ft.CompileBlocks(backend="aot_eager")], epochs=3)
    expected = by_hand(3, lambda epoch, step: 1 + step // 3)
    assert largest_difference(weights(expected), weights(net)) <= 1e-5


def test_steps_without_a_change_cost_one_comparison(monkeypatch):
    calls = []
    original = Unfreezing.unfreeze_to
    monkeypatch.setattr(Unfreezing, "unfreeze_to", lambda self, k: (calls.append(k), original(self, k))[1])
    fit([GradualUnfreezing(3)], epochs=3)
    assert calls == [1, 2, 3, 4, 5]  # the last for teardown, which unfreezes all


def test_log_line_reports_the_number_of_trained_groups(caplog):
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        fit([GradualUnfreezing()], epochs=2)
    assert [m for m in caplog.messages if "Unfreezing" in m] == [
        "GradualUnfreezing: 1 of 5 groups train",
        "GradualUnfreezing: 2 of 5 groups train",
    ]


def test_single_group_equals_plain_training():
    net, _ = fit([GradualUnfreezing(groups=["*"])], epochs=2)
    assert largest_difference(weights(by_hand(2, lambda *_: 9)), weights(net)) == 0
    assert GradualUnfreezing().exactness is Exactness.CHANGES_TRAINING


def test_parameters_in_no_optimizer_are_warned_about():
    class HeadOnly(Untied):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.head.parameters(), lr=0.01)

    with pytest.warns(ft.FastTrainWarning, match=r"19 parameters such as blocks.2.norm.weight are in no optimizer"):
        fit([GradualUnfreezing()], net=HeadOnly())


# --- refusals


class OnCPU(FSDPStrategy):
    """Lightning refuses the class itself if there is no CUDA."""


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, OnCPU])
def test_sharding_strategies_are_refused(strategy):
    t = trainer(strategy=strategy(), devices=1)
    t.state.fn = "fit"
    with pytest.raises(
        ValueError, match=f"GradualUnfreezing with {strategy.__name__}: the strategy shards the parameters"
    ):
        GradualUnfreezing().attach(t, Untied())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 1.5}, TypeError, "every=1.5"),
        ({"every": "step"}, ValueError, "every='step'.*expected a whole number or 'epoch'"),
        ({"groups": "head"}, TypeError, r"groups='head'\): expected a list"),
        ({"groups": []}, ValueError, r"groups=\[\]: a group is empty"),
        ({"groups": ["head", []]}, ValueError, "a group is empty"),
        ({"groups": ["head"], "blocks": "blocks.*"}, ValueError, "Give one of them"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        GradualUnfreezing(**arguments)


def test_group_in_an_earlier_group_or_frozen_is_refused():
    with pytest.raises(ValueError, match="group 1 of 2: its 6 parameters are frozen already, or in an earlier group"):
        Unfreezing(Untied(), ["blocks.*", "blocks.1"])


def test_pattern_without_a_match_is_refused_with_similar_names():
    net = Untied()
    with pytest.raises(ValueError, match="'haed' matches nothing in Untied.*Similar names: head"):
        fit([GradualUnfreezing(groups=["haed"])], net=net)
    assert trains(net) == set(dict(net.named_parameters()))


def test_model_without_trainable_parameters_is_refused():
    net = Untied()
    freeze_(net)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        Unfreezing(net)


@pytest.mark.parametrize("k", [0, True, 1.0])
def test_invalid_number_of_groups_is_refused(k):
    with pytest.raises((TypeError, ValueError), match=f"k={k}"):
        Unfreezing(Untied()).unfreeze_to(k)


# --- two processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ddp") / "found.json"
    run_ranks("tests.finetune.ddp_unfreezing", path, log=path.parent / "log", timeout_s=120)
    return json.loads(path.read_text())


@pytest.mark.parametrize("run", ["epoch", "steps", "views", "unused", "static", "micro"])
def test_ddp_equals_one_process_with_the_joint_batch(found, run):
    assert max(rank[run]["difference"] for rank in found) < 2e-6
    assert max(rank[run]["between ranks"] for rank in found) == 0
    assert {tuple(rank[run]["trains"]) for rank in found} == {(1, 7, 13)}  # parameters, in each epoch


def test_ddp_wraps_the_model_again_at_each_change_and_frees_the_old_wrapper(found):
    assert {rank["epoch"]["wrappers"] for rank in found} == {3}
    assert {rank["epoch"]["alive"] for rank in found} == {1}


def test_ddp_keeps_rank_local_buffers(found):
    assert [rank["steps"]["own buffer"] for rank in found] == [0.0, 1.0]
