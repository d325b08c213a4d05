"""One technique: applied once, in the suite's order, at the right moment, and undone."""

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain import CONFLICTS, Surgery, Technique
from lightning_fasttrain._technique import Conflict
from tests.nets import LazyLM, TinyLM, as_loader, fit, lm_batches, trainer


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
        ft.apply(TinyLM(), [ft.ActivationCheckpointing(), ft.ActivationCheckpointing(ft.EveryBlock(2))])


def test_conflicts_come_from_the_table(monkeypatch):
    table = (Conflict("Early", "Late", "they were born enemies", "Use one of them"),)
    monkeypatch.setattr("lightning_fasttrain._technique.CONFLICTS", table)
    with pytest.raises(ValueError, match="Early \\+ Late: they were born enemies. Use one of them."):
        ft.apply(TinyLM(), [Early([]), Late([])])


def test_every_conflict_names_techniques_that_exist():
    assert CONFLICTS
    for conflict in CONFLICTS:
        for name in (conflict.first, conflict.second):
            assert issubclass(getattr(ft, name), Technique)


def test_cuda_graphs_and_accumulation_are_refused_where_there_are_graphs(monkeypatch):
    monkeypatch.setattr(ft.CompileBlocks, "uses_cuda_graphs", property(lambda self: self.mode == "max-autotune"))
    with pytest.raises(ValueError, match=r"CompileBlocks \+ MicroBatching: CUDA graphs replay .*no-cudagraphs"):
        fit(TinyLM(), lm_batches(1), [ft.CompileBlocks("max-autotune"), ft.MicroBatching(2)])
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        fit(TinyLM(), lm_batches(1), [ft.CompileBlocks("max-autotune")], accumulate_grad_batches=2)


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
    from lightning_fasttrain import _checks

    monkeypatch.setattr(_checks.importlib.metadata, "version", lambda package: "2.6.3")
    with pytest.raises(ImportError, match="lightning 2.6.3: .*credential stealer"):
        _checks.refuse_compromised_hosts()


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
    assert len(set(Surgery)) == 7


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
