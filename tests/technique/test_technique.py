"""One technique: applied once, in the suite's order, at the right moment, and undone."""

import copy
import importlib.metadata
import pickle
import re

import lightning as L
import peft
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain import Technique
from lightning_fasttrain.core.checks import list_untested
from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.technique import Capability, Conflict, Surgery, check_together
from tests.support.nets import VOCAB, LazyLM, TinyLM, as_loader, fit, heard, lm_batches, lm_loss, trainer

pytestmark = pytest.mark.quick


class Recorder(Technique):
    """Writes down when it operated, and on a complete model."""

    seen: list

    def __init__(self, log):
        self.seen = log

    def apply(self, model):
        assert model.embed is not None
        self.seen.append(type(self).__name__)
        return lambda: self.seen.append(f"undo {type(self).__name__}")


class Early(Recorder):
    surgery = Surgery.QUANTIZE


class Late(Recorder):
    surgery = Surgery.COMPILE


@pytest.mark.parametrize("others", [[], [ft.MicroBatching(2)]], ids=["alone", "beside another"])
def test_a_class_among_the_callbacks_is_refused(others):
    with pytest.raises(TypeError, match=r"callbacks=\[LoRA\]: expected objects, got classes. Use LoRA\(...\)"):
        fit(TinyLM(), lm_batches(1), [*others, ft.LoRA])


def test_an_untested_version_is_said_once_and_not_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "99.0", "lightning": "2.6.6"}.__getitem__)
    list_untested.cache_clear()
    say_once.cache_clear()
    with heard() as said:
        for _ in range(2):
            ft.apply(TinyLM(), [ft.ActivationCheckpointing()])
    list_untested.cache_clear()
    assert sum("torch 99.0 is not among the tested versions" in line for line in said) == 1


class ListsNone(ft.FastTrainMixin, TinyLM):
    techniques = ft.MicroBatching(2)


MISTAKES = {
    "ActivationCheckpointing: got an unexpected keyword argument 'every'. Its arguments are policy, blocks.": (
        lambda: ft.ActivationCheckpointing(every=2)
    ),
    "MemoryTimeline: missing a required argument: 'folder'. Its arguments are folder, ": (
        lambda: ft.profiling.MemoryTimeline()
    ),
    "expected a list, got one technique. Use [MicroBatching(n=2)]": lambda: fit(ListsNone(), lm_batches(1)),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistaken_argument_is_answered_at_once(said):
    with pytest.raises(TypeError, match=re.escape(said)):
        MISTAKES[said]()


@pytest.mark.parametrize("net", [TinyLM, LazyLM])
@pytest.mark.parametrize("turned", [False, True])
def test_surgery_runs_once_in_our_order_and_is_undone(net, turned):
    log = []
    techniques = [Early(log), Late(log)]
    module = net(optimizer=lambda *args, **kwargs: log.append("optimizer") or torch.optim.SGD(*args, **kwargs))
    fit(module, lm_batches(2), reversed(techniques) if turned else techniques)
    assert log == ["Early", "Late", "optimizer", "undo Late", "undo Early"]


def test_surgery_follows_layers_that_are_built_in_setup():
    class BuiltInSetup(TinyLM):
        def __init__(self):
            super().__init__(lazy=True)

        def setup(self, stage):
            self.build()

    log = []
    fit(BuiltInSetup(), lm_batches(1), [Early(log)])
    assert log[0] == "Early"


@pytest.mark.parametrize("net", [TinyLM, LazyLM])
def test_second_fit_and_validate_alone_operate_again(net):
    log, module, loader = [], net(), as_loader(lm_batches(1))
    t = trainer([Early(log)])
    t.fit(module, loader)
    t.fit_loop.max_epochs = 2
    t.fit(module, loader)
    t.validate(module, loader, verbose=False)
    assert log == ["Early", "undo Early"] * 3
    assert "configure_model" not in vars(module)


def test_a_failed_run_is_undone_too():
    class Broken(TinyLM):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("as planned")

    log, module = [], Broken()
    with pytest.raises(RuntimeError, match="as planned"):
        fit(module, lm_batches(1), [Early(log)])
    assert log == ["Early", "undo Early"]


def test_apply_sorts_and_undoes():
    log, module = [], TinyLM()
    with ft.apply(module, [Late(log), Early(log)]):
        assert log == ["Early", "Late"]
    assert log[2:] == ["undo Late", "undo Early"]


def test_apply_undoes_what_it_did_when_a_later_one_fails():
    class Failing(Recorder):
        surgery = Surgery.SHARD

        def apply(self, model):
            raise RuntimeError("as planned")

    log = []
    with pytest.raises(RuntimeError, match="as planned"):
        ft.apply(TinyLM(), [Early(log), Failing(log)])
    assert log == ["Early", "undo Early"]


def test_listed_twice_is_refused_in_both_hosts():
    message = "MicroBatching is listed twice: .* Remove one of them"
    with pytest.raises(ValueError, match=message):
        fit(TinyLM(), lm_batches(1), [ft.MicroBatching(2), ft.MicroBatching(4)])
    with pytest.raises(ValueError, match="ActivationCheckpointing is listed twice"):
        ft.apply(TinyLM(), [ft.ActivationCheckpointing(), ft.ActivationCheckpointing(ft.model.EveryBlock(2))])


class Enemy(Early):
    @classmethod
    def conflicts(cls):
        return (Conflict(Late, "they were born enemies", "Use one of them", lambda _, late: late.seen == []),)


class LateToo(Late):
    pass


@pytest.mark.parametrize("other", [Late, LateToo])
@pytest.mark.parametrize("turned", [False, True])
def test_what_a_class_conflicts_with_is_refused_subclasses_too(other, turned):
    both = [Enemy([]), other([])]
    with pytest.raises(ValueError, match=rf"Enemy \+ {other.__name__}: they were born enemies. Use one of them."):
        ft.apply(TinyLM(), both[::-1] if turned else both)


def test_a_conflict_may_depend_on_settings_and_on_no_name():
    class LoRA(Technique):
        """A stranger's, that has nothing to do with ours."""

        surgery = Surgery.ARCHITECTURE

        def apply(self, model):
            return None

    late, stranger = Late(["another"]), LoRA()
    ft.apply(TinyLM(), [Enemy([]), late])
    assert late.seen == ["another", "Late"]
    ft.apply(TinyLM(), [ft.finetune.QuantizedBase("int8"), stranger, ft.finetune.IA3("up")])
    assert stranger.acting


class SplitsBatches(Technique):
    """A stranger's, that does what MicroBatching does."""

    capabilities = frozenset({Capability.SPLITS_BATCHES})


def test_a_strangers_technique_is_refused_by_what_it_does():
    with pytest.raises(ValueError, match=r"OptimizerInBackward \+ SplitsBatches: .* cannot be summed"):
        fit(TinyLM(), lm_batches(1), [SplitsBatches(), ft.OptimizerInBackward()])


def test_what_a_technique_does_depends_on_its_settings():
    assert ft.MicroBatching("auto").does(Capability.SPLITS_BATCHES)
    assert ft.MicroBatching(2).does(Capability.SPLITS_BATCHES)
    assert not ft.MicroBatching(1).does(Capability.SPLITS_BATCHES)
    fit(TinyLM(), lm_batches(1), [ft.MicroBatching(1), ft.OptimizerInBackward()])


def test_a_technique_and_its_own_kind_are_one():
    with pytest.raises(ValueError, match=r"LateToo \+ Late, which it is a kind of: .* Remove one of them"):
        ft.apply(TinyLM(), [Late([]), LateToo([])])


def test_a_strategy_is_refused_as_a_technique_is():
    class AloneOnly(Technique):
        @classmethod
        def conflicts(cls):
            return (ft.technique.Conflict(SingleDeviceStrategy, "it hates to be alone", "Use two"),)

    with pytest.raises(ValueError, match=r"AloneOnly \+ SingleDeviceStrategy: it hates to be alone. Use two."):
        fit(TinyLM(), lm_batches(1), [AloneOnly()])


def test_cuda_graphs_are_refused_where_parameters_are_gathered(monkeypatch):
    monkeypatch.setattr(ft.CompileBlocks, "uses_cuda_graphs", property(lambda self: self.mode == "max-autotune"))
    with pytest.raises(ValueError, match=r"CompileBlocks \+ FSDP2Strategy: .*other memory.*no-cudagraphs"):
        check_together([ft.CompileBlocks("max-autotune")], ft.strategy.FSDP2Strategy())
    check_together([ft.CompileBlocks("max-autotune"), ft.MicroBatching(2)], SingleDeviceStrategy())


class Forgetful(Technique):
    def apply(self, model):
        raise AssertionError


def test_a_technique_whose_apply_nothing_would_call_is_refused():
    with pytest.raises(TypeError, match=r"Forgetful has apply\(\), but neither surgery.*surgery = Surgery.ADAPT"):
        Forgetful()


def test_a_loop_technique_says_which_function_to_call():
    with pytest.raises(TypeError, match=r"acts in the training loop.*accumulate_gradients\(step, batch, n\)"):
        ft.apply(TinyLM(), [ft.MicroBatching(2)])


def test_objects_of_pytorch_lightning_are_explained():
    import pytorch_lightning

    with pytest.raises(TypeError, match="comes from `pytorch_lightning`.*Import from `lightning`"):
        fit(TinyLM(), lm_batches(1), [ft.MicroBatching(2), pytorch_lightning.Callback()])
    with pytest.raises(TypeError, match="comes from `pytorch_lightning`"):
        ft.MicroBatching(2).setup(pytorch_lightning.Trainer(accelerator="cpu", logger=False), TinyLM(), "fit")


def test_compromised_releases_are_refused(monkeypatch):

    from lightning_fasttrain.core.checks import arguments

    monkeypatch.setattr(arguments.importlib.metadata, "version", lambda package: "2.6.3")
    with pytest.raises(ImportError, match="lightning 2.6.3: .*credential stealer"):
        arguments.refuse_compromised_hosts()


class WithOwnCallbacks(ft.FastTrainMixin, TinyLM):
    techniques = (ft.MicroBatching(2),)

    def configure_callbacks(self):
        return L.pytorch.callbacks.Timer()


class WithSuper(ft.FastTrainMixin, TinyLM):
    def configure_techniques(self):
        return [ft.MicroBatching(2)]

    def configure_callbacks(self):
        return [*super().configure_callbacks(), L.pytorch.callbacks.Timer()]


@pytest.mark.parametrize("net", [WithOwnCallbacks, WithSuper])
def test_mixin_cooperates_with_own_callbacks(net):
    t = trainer()
    t.fit(net(), as_loader(lm_batches(1)))
    kinds = [type(callback).__name__ for callback in t.callbacks]
    assert kinds.count("MicroBatching") == 1
    assert kinds.count("Timer") == 1


def test_mixin_cooperates_with_own_configure_model_and_optimizers():
    class Net(ft.FastTrainMixin, LazyLM):
        def configure_techniques(self):
            return [ft.ActivationCheckpointing()]

        def configure_optimizers(self):
            assert all("forward" in vars(block) for block in self.blocks)  # surgery is done by then
            return super().configure_optimizers()

    module = fit(Net(), lm_batches(2))
    assert len(module.losses) == 2


def test_all_parameters_frozen_says_what_to_do():
    module = TinyLM()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient.*requires_grad_"):
        fit(module, lm_batches(1), [ft.MicroBatching(2)])


def test_order_of_surgery_is_total():
    assert list(Surgery) == sorted(Surgery)
    assert len(set(Surgery)) == 9


def test_empty_hooks_cost_nothing_while_a_run_lasts_and_subclasses_keep_theirs():
    class Counting(ft.DevicePrefetch):
        calls = 0

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            assert self.on_train_batch_start is None
            type(self).calls += 1

    technique = Counting()
    fit(TinyLM(), lm_batches(3), [technique])
    assert Counting.calls == 3
    assert callable(technique.on_train_batch_start)


def lora_loop(optimizer_first, *, fabric=None, other=False):
    """Ten steps of a loop in which the optimizer is made before or after the adapters."""
    model = TinyLM()
    make = lambda: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)  # noqa: E731
    first, optimizer = (make(), None) if optimizer_first else (None, None)
    wrapped, first = fabric.setup(model, first) if fabric is not None else (model, first)
    with ft.apply(wrapped, [ft.LoRA(rank=2)]):
        optimizer = make() if other or first is None else first
        for _ in range(10):
            model.loss(lm_batches(1)[0]).backward()
            (first or optimizer).step()
            optimizer.step()
        return [p for name, p in model.named_parameters() if "lora_B" in name]


def test_adapters_that_come_after_the_optimizer_are_refused():
    with pytest.raises(RuntimeError, match=r"SGD was made before apply\(model, \[LoRA\]\).*are not in it.*then make"):
        lora_loop(optimizer_first=True)
    assert all(p.abs().sum() > 0 for p in lora_loop(optimizer_first=False))
    assert all(p.abs().sum() > 0 for p in lora_loop(optimizer_first=True, other=True))  # an old one may go on beside


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        # All parameters of the optimizer are frozen then, so one step may be that of an old one beside a new one.
        (lambda model: ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), ["up"]), 1),
        (lambda model: ft.finetune.swap_head_(model, VOCAB, "head"), 9),  # so many may belong to the critic of a GAN
    ],
    ids=["add_adapter_", "swap_head_"],
)
def test_functions_that_bring_parameters_notice_the_optimizer_too(change, allowed, request):
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change(model)
    model.loss(lm_batches(1)[0]).backward()
    for _ in range(allowed):
        optimizer.step()
    with pytest.raises(RuntimeError, match=rf"SGD was made before {request.node.callspec.id}: .*are not in it"):
        optimizer.step()
    change(model := TinyLM())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.loss(lm_batches(1)[0]).backward()
    optimizer.step()


def test_an_old_optimizer_may_go_on_and_others_be_left_out_on_purpose():
    model = TinyLM()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    with ft.apply(model, [ft.LoRA(rank=2), ft.ActivationCheckpointing()]):
        part = [p for name, p in model.named_parameters() if "lora_B" in name]
        optimizer = torch.optim.SGD(part, lr=0.1)
        model.loss(lm_batches(1)[0]).backward()
        optimizer.step()
    assert not old._optimizer_step_pre_hooks


def test_hooks_of_others_on_an_old_optimizer_run_on():
    model, steps = TinyLM(), []
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    with ft.apply(model, [ft.LoRA(rank=2)]):
        other = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        old.register_step_pre_hook(lambda *_: steps.append(len(steps)))
        for _ in range(2):
            model.loss(lm_batches(1)[0]).backward()
            old.step()
            other.step()
    assert steps == [0, 1]


def test_fabric_that_has_set_the_model_up_refuses_new_parameters_at_once():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(RuntimeError, match=r"\[LoRA\]\) after fabric.setup: .* in no optimizer.*Call it first"):
        lora_loop(optimizer_first=True, fabric=fabric)
    model, _ = fabric.setup(net := TinyLM(), torch.optim.SGD(net.parameters(), lr=0.1))
    with ft.apply(model, [ft.ActivationCheckpointing()]):  # which has none
        assert "forward" in vars(net.blocks[0])


@pytest.mark.parametrize(
    ("technique", "way_out"),
    [(ft.MicroBatching(2), r"accumulate_gradients\(step, batch, n\)"), (ft.LoRA(), r"apply\(model, \[LoRA")],
)
def test_fabric_refuses_techniques_as_callbacks(technique, way_out):
    fabric = L.Fabric(accelerator="cpu", devices=1, callbacks=[technique])
    with pytest.raises(TypeError, match=rf"Fabric\(callbacks=\[{type(technique).__name__}\]\).*{way_out}"):
        fabric.setup(TinyLM())


def test_a_mixin_behind_the_module_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"class Net\(TinyLM, FastTrainMixin\): .*class Net\(FastTrainMixin, TinyLM\)"):

        class Net(TinyLM, ft.FastTrainMixin):
            techniques = (ft.MicroBatching(2),)

    class Bundle(ft.FastTrainMixin):  # a mixin of techniques alone, to be used before a module
        techniques = (ft.MicroBatching(2),)

    class Right(Bundle, TinyLM):
        pass

    assert len(Right().configure_callbacks()) == 1


def _ours(told):
    return [one for one in told if one.category is ft.FastTrainWarning]


class SomeWithoutLoss(TinyLM):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # Lightning's, of any such step
def test_a_step_without_a_loss_inside_a_window_of_lightnings_is_told_once():
    with pytest.warns(
        ft.FastTrainWarning, match=r"None for batch 1, with accumulate_grad_batches=2: .*too small"
    ) as told:
        fit(SomeWithoutLoss(), lm_batches(4), [ft.DevicePrefetch()], accumulate_grad_batches=2)
    assert len(_ours(told)) == 1
    fit(TinyLM(), lm_batches(4), [ft.DevicePrefetch()], accumulate_grad_batches=2)  # a warning would be an error
    fit(SomeWithoutLoss(), lm_batches(4), [ft.TokenWeightedAccumulation(2)])


class PastItsBlocks(TinyLM):
    """Computes with the blocks' layers without calling the blocks, as fused kernels and unused towers do."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block.down(block.up(block.norm(x)))
        return self.head(x)


class PastItsHead(TinyLM):
    def forward(self, ids):
        return self.embed(ids) @ self.head.weight.T


@pytest.mark.parametrize(
    ("technique", "net", "rows", "why"),
    [
        (ft.ActivationCheckpointing(), PastItsBlocks, 4, r"none of its 3 blocks \(Block\) was called"),
        (ft.CompileBlocks(backend="eager"), PastItsBlocks, 4, r"none of its 3 blocks \(Block\) was called"),
        (ft.ActivationOffload(), PastItsBlocks, 4, r"none of its 3 blocks \(Block\) was called"),
        (ft.FusedLossHead("head"), PastItsHead, 4, "did not reach cross_entropy"),
        (ft.MicroBatching(4), TinyLM, 1, "batches of one sample cannot be split into 4 micro-batches"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Technique) else "",
)
def test_a_technique_that_does_nothing_says_so_after_the_first_batch_and_only_once(technique, net, rows, why):
    name = type(technique).__name__
    batches = lm_batches(3, size=rows)
    with pytest.warns(ft.FastTrainWarning, match=rf"{name} did nothing in the first batch: .*{why}") as told:
        fit(net(), batches, [technique], accumulate_grad_batches=2)
    assert len(_ours(told)) == 1
    fit(TinyLM(), lm_batches(3), [technique], accumulate_grad_batches=2)  # a warning would be an error


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_first_batch_without_a_loss_is_not_judged():
    class Late(TinyLM):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    fit(Late(), lm_batches(2), [ft.FusedLossHead("head")])  # a warning would be an error


class Bringing(ft.FastTrainMixin, TinyLM):
    techniques = (ft.ActivationCheckpointing(), ft.MicroBatching(2))


UNUSED = r"techniques of Bringing do nothing here: only a Trainer that fits Bringing .*accumulate_gradients\(step"


def _in_fabric(net):
    model = L.Fabric(accelerator="cpu", devices=1).setup_module(net)
    for batch in lm_batches(2):
        lm_loss(model(batch["input_ids"]), batch).backward()


def _bare(net):
    for batch in lm_batches(2):
        net.loss(batch).backward()


def _nested(net):
    class Outer(TinyLM):
        def build(self):
            self.embed, self.inner = net.embed, net

        def forward(self, ids):
            return self.inner(ids)

    fit(Outer(), lm_batches(2))


@pytest.mark.parametrize("train", [_in_fabric, _bare, _nested])
def test_a_module_that_brings_techniques_warns_once_where_nobody_asks_it_for_them(train):
    with pytest.warns(ft.FastTrainWarning, match=UNUSED) as told:
        train(Bringing())
    assert len(_ours(told)) == 1
    net = Bringing()
    ft.apply(net, Bringing.techniques[:1])
    train(net)  # a warning would be an error


def test_a_module_that_brings_techniques_is_copied_saved_and_compiled_as_without_them(tmp_path):
    net = copy.deepcopy(Bringing())
    assert net.state_dict().keys() == TinyLM().state_dict().keys()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    ids = lm_batches(1)[0]["input_ids"]
    assert torch.equal(compiled(ids), TinyLM()(ids))
    fit(net, lm_batches(1))  # its own Trainer: a warning would be an error


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ft.MicroBatching(4), "MicroBatching(n=4)"),
        (lambda: ft.QLoRA(8, variant="dora", train=["head"]), "QLoRA(rank=8, variant='dora', train=['head'])"),
        (lambda: ft.DevicePrefetch(), "DevicePrefetch()"),
        (lambda: ft.loss.Distillation(nn.Linear(1, 1)), "Distillation(teacher=Linear)"),
        (lambda: copy.deepcopy(ft.MicroBatching("auto")), "MicroBatching(n='auto')"),
        (lambda: pickle.loads(pickle.dumps(ft.guards.HangWatch(timeout_s=300))), "HangWatch(timeout_s=300)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_technique_says_how_it_was_made(made, said):
    assert repr(made()) == said


def test_how_it_was_made_keeps_nothing_alive_and_copies_nothing():
    teacher = nn.Linear(1, 1)
    distillation = ft.loss.Distillation(teacher)
    assert not [value for value in vars(distillation).values() if isinstance(value, tuple) and teacher in value]
    assert all(isinstance(words, str) for words in distillation._settings.values())


def test_a_generator_of_techniques_is_applied():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with ft.apply(net, (one for one in [ft.ActivationCheckpointing(blocks=nn.Linear)])):
        assert "forward" in vars(net[0])


@pytest.mark.parametrize(
    ("techniques", "says"),
    [
        (ft.MicroBatching(4), "expected a list of Technique objects, got a MicroBatching. Put it into a list"),
        (None, r"\(techniques=None\): expected a list of Technique objects, got None"),
        (["LoRA"], "entry 0: expected a Technique, got a string"),
        ([ft.LoRA], r"Make an object of it: LoRA\(\.\.\.\)"),
    ],
    ids=["one", "none", "word", "class"],
)
def test_what_is_no_list_of_techniques_is_refused_everywhere(techniques, says):
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=says):
        ft.apply(net, techniques)
    with pytest.raises(TypeError, match=says):
        ft.predict_memory(net, torch.ones(1, 2), techniques=techniques, loss=lambda net, x: net(x).sum())


@pytest.mark.parametrize(
    ("name", "ours"), [("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets"), ("use_dora", "variant")]
)
@pytest.mark.parametrize("technique", [ft.LoRA, ft.QLoRA])
def test_names_of_peft_are_answered_with_ours(technique, name, ours):
    with pytest.raises(TypeError, match=rf"{technique.__name__}\({name}=\.\.\.\).*Use {ours}="):
        technique(**{name: 8})
