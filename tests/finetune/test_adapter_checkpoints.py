"""Lightning's checkpoints hold what trains, resume bit for bit, and are refused by other runs."""

import re
import sys
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fasttrain import LoRA
from lightning_fasttrain.finetune import Adapter, freeze_except_, trained_names, trained_state
from tests.finetune.test_base_fingerprint import altered, deeper, renamed
from tests.support.nets import TinyLM, _Listed, as_loader, lm_batches, trainer, weights

peft = pytest.importorskip("peft")
BATCHES = lm_batches(5)
REFUSAL = "blocks.0.up.weight"  # the entry that a model without the adapter refuses
ADAPTER = {f"blocks.{i}.{layer}.lora_{ab}.default.weight" for i in range(3) for layer in ("up", "down") for ab in "AB"}


def lora(**settings):
    return LoRA(rank=2, dropout=0.1, **settings)


def rows(shuffled):
    """Return a loader of the same rows, one by one, shuffled in each epoch if asked."""
    single = [{key: value[i] for key, value in batch.items()} for batch in BATCHES for i in range(6)]
    return DataLoader(_Listed(single), batch_size=6, shuffle=shuffled)


def fit(callbacks, module=None, loader=None, epochs=3, **resume):
    module = TinyLM() if module is None else module
    torch.manual_seed(11)
    if resume:
        torch.manual_seed(99)  # another process has another RNG state
        resume["weights_only"] = True
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    t = trainer(callbacks, max_epochs=epochs, enable_checkpointing=checkpointing, logger=False)
    t.fit(module, as_loader(BATCHES) if loader is None else loader, **resume)
    return module


def every(tmp_path, **settings):
    """Return a ModelCheckpoint that saves often and deletes nothing."""
    return ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, **settings)


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


class Rest(torch.utils.data.Sampler):
    """Sampler of the remaining rows of an epoch."""

    at = 0

    def __len__(self):
        return len(BATCHES)

    def __iter__(self):
        self.at %= len(BATCHES)
        while self.at < len(BATCHES):
            self.at += 1
            yield self.at - 1


class Resumable(DataLoader):
    """A loader that can resume in mid-epoch, like torchdata's; with others Lightning restarts the epoch."""

    def __init__(self):
        super().__init__(_Listed(BATCHES), batch_size=None, sampler=Rest())

    def state_dict(self):
        return {"at": self.sampler.at}

    def load_state_dict(self, state):
        self.sampler.at = state["at"]


@pytest.mark.parametrize(
    ("loader", "saves", "file"),
    [
        (lambda: rows(False), {"every_n_epochs": 1}, "epoch=0-step=5.ckpt"),
        (lambda: rows(True), {"every_n_epochs": 1}, "epoch=0-step=5.ckpt"),
        (lambda: rows(True), {"every_n_epochs": 1}, "epoch=1-step=10.ckpt"),
        (lambda: rows(True), {"every_n_train_steps": 5}, "epoch=1-step=10.ckpt"),  # in mid-epoch
        (Resumable, {"every_n_train_steps": 3}, "epoch=0-step=3.ckpt"),
        (Resumable, {"every_n_train_steps": 4}, "epoch=1-step=8.ckpt"),
        (Resumable, {"every_n_train_steps": 5}, "epoch=1-step=10.ckpt"),
    ],
)
def test_resumed_equals_uninterrupted_with_dropout(loader, saves, file, tmp_path):
    whole = fit([lora(), every(tmp_path, **saves)], loader=loader())
    resumed = fit([lora()], loader=loader(), ckpt_path=tmp_path / file)
    assert equal(weights(resumed), weights(whole))
    other = fit([lora()], loader=loader(), ckpt_path=tmp_path / file, module=Wound())  # negative control
    assert not equal(weights(other), weights(whole))


class Wound(TinyLM):
    """Draws one more random number at the start of training."""

    def on_train_start(self):
        torch.rand(1)

    def on_train_epoch_start(self):
        torch.rand(1)


def test_checkpoint_holds_only_trained_parameters(tmp_path):
    module = fit([lora(), every(tmp_path, every_n_epochs=1)])
    checkpoint = torch.load(tmp_path / "epoch=2-step=15.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) - {REFUSAL} == set(trained_names(module)) == ADAPTER
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(ADAPTER)
    assert all(torch.equal(checkpoint["state_dict"][name], module.state_dict()[name]) for name in ADAPTER)
    fit([lora(checkpoint="full"), every(tmp_path / "full", every_n_epochs=1)])
    full = torch.load(tmp_path / "full" / "epoch=2-step=15.ckpt", weights_only=True)
    assert set(full["state_dict"]) - {REFUSAL} == set(module.state_dict())


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, FSDPStrategy])
def test_strategies_with_their_own_file_format_are_unchanged(strategy):
    """DeepSpeed's strategy is a subclass of DDP's, whose checkpoints are one file, written by one process."""
    t = SimpleNamespace(strategy=strategy(), world_size=2, callbacks=[])
    LoRA(rank=2).attach(t, TinyLM())
    assert not {"lightning_module_state_dict", "load_model_state_dict"} & vars(t.strategy).keys()


def test_a_checkpoint_that_is_saved_after_the_run_is_small_too_and_is_resumed(tmp_path):
    torch.manual_seed(11)
    module, t = TinyLM(), trainer([lora()], max_epochs=1, logger=False)
    t.fit(module, as_loader(BATCHES))
    t.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert set(saved["state_dict"]) - {REFUSAL} == ADAPTER
    resumed = fit([lora()], epochs=1, ckpt_path=tmp_path / "after.ckpt")
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in trained_state(resumed).items())
    with pytest.raises(ValueError, match="base"):
        fit([lora()], altered(), epochs=2, ckpt_path=tmp_path / "after.ckpt")


def test_checkpoint_size_does_not_depend_on_the_base(tmp_path):
    class Wide(TinyLM):
        def __init__(self):
            super().__init__()
            self.ballast = nn.Linear(500, 500)

    sizes = []
    for net in (TinyLM, Wide):
        fit([LoRA(rank=2, targets="up"), every(tmp_path / net.__name__, every_n_epochs=3)], module=net(), epochs=3)
        sizes.append((tmp_path / net.__name__ / "epoch=2-step=15.ckpt").stat().st_size)
    assert sizes[1] - sizes[0] < 1000  # the base is a megabyte larger


def test_checkpoint_holds_fully_trained_modules_and_their_statistics():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    LoRA(rank=2, targets="0", train=["3"]).apply(net)
    adapter = {"0.lora_A.default.weight", "0.lora_B.default.weight"}
    norm = {f"3.modules_to_save.default.{name}" for name in nn.BatchNorm1d(2).state_dict()}
    assert set(trained_state(net)) == adapter | norm


def test_weights_only_checkpoints_can_be_validated(tmp_path):
    module = fit([lora(), every(tmp_path, every_n_epochs=3, save_weights_only=True)])
    path = tmp_path / "epoch=2-step=15.ckpt"
    assert set(torch.load(path, weights_only=True)["state_dict"]) - {REFUSAL} == ADAPTER
    losses = []
    for net, given in ((module, {}), (TinyLM(), {"ckpt_path": path, "weights_only": True}), (TinyLM(), {})):
        t = trainer([lora()])
        t.validate(net, as_loader(BATCHES), verbose=False, **given)
        losses.append(t.callback_metrics["val_loss"])
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_what_was_unfrozen_beside_the_adapter_is_resumed_too(tmp_path):
    class Unfreezes(TinyLM):
        def configure_optimizers(self):
            self.blocks[1].norm.requires_grad_(True)
            return super().configure_optimizers()

    whole = fit([lora(), every(tmp_path, every_n_epochs=1)], module=Unfreezes())
    path = tmp_path / "epoch=0-step=5.ckpt"
    assert set(torch.load(path, weights_only=True)["state_dict"]) - {REFUSAL} - ADAPTER == {
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
    }
    assert not torch.equal(whole.blocks[1].norm.weight, TinyLM().blocks[1].norm.weight)
    assert equal(weights(fit([lora()], module=Unfreezes(), ckpt_path=path)), weights(whole))


@pytest.mark.parametrize("config", [peft.LoraConfig(r=2, init_lora_weights="pissa"), peft.LoKrConfig(r=2)])
def test_other_kinds_resume_on_a_fresh_base(config, tmp_path):
    whole = fit([Adapter(config, "up"), every(tmp_path, every_n_epochs=1)])
    resumed = fit([Adapter(config, "up")], ckpt_path=tmp_path / "epoch=0-step=5.ckpt")
    assert equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            deeper,
            "the base model lacked 'blocks.3.down.bias', 'blocks.3.down.weight', 'blocks.3.norm.bias' and 3 more.",
        ),
        (lambda: TinyLM(depth=2), "this model lacks 'blocks.2.down.bias', "),
        (altered, "the values differ in 'blocks.1.up.bias', 'blocks.1.up.weight', 'blocks.2.up.bias' and 1 more."),
    ],
)
def test_another_base_is_refused_naming_what_differs(make, message, tmp_path):
    fit([lora(), every(tmp_path, every_n_epochs=1)])
    expected = f"the checkpoint was trained with another base model than {make().__class__.__name__}: {message}"
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        fit([lora()], module=make(), ckpt_path=tmp_path / "epoch=0-step=5.ckpt")
    assert "check_base" not in str(raised.value)  # this function has no such argument


def test_a_base_with_other_names_is_refused(tmp_path):
    class Renamed(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inside = renamed()

        def training_step(self, batch, batch_idx):
            raise AssertionError("it was not refused")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit([lora(), every(tmp_path, every_n_epochs=1)])
    with pytest.raises(ValueError, match="another base model than Renamed: this model lacks 'blocks.0.down.bias', "):
        fit([lora()], module=Renamed(), ckpt_path=tmp_path / "epoch=0-step=5.ckpt")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: LoRA(rank=2, targets="up"),
            "other trained parameters than this run: this run has no ['blocks.0.down.",
        ),
        (lambda: LoRA(rank=2, name="two"), "it lacks ['blocks.0.up.lora_A.two.weight', "),
        (lambda: Adapter(peft.LoHaConfig(r=2), ["up", "down"]), "it lacks ['blocks.0.up.hada_w1_a.default', "),
    ],
)
def test_another_adapter_is_refused_naming_what_differs(other, message, tmp_path):
    fit([lora(), every(tmp_path, every_n_epochs=1)])
    with pytest.raises(ValueError, match=re.escape(message)):
        fit([other()], ckpt_path=tmp_path / "epoch=0-step=5.ckpt")


def test_checkpoint_from_before_the_adapter_is_refused(tmp_path):
    plain = fit([every(tmp_path, every_n_epochs=1)], epochs=1)
    with pytest.raises(ValueError, match="the checkpoint holds no adapter: it was saved before the adapter was added"):
        fit([lora()], ckpt_path=tmp_path / "epoch=0-step=5.ckpt")
    module = TinyLM()  # follow the advice of the message
    module.load_state_dict(torch.load(tmp_path / "epoch=0-step=5.ckpt", weights_only=True)["state_dict"])
    fit([lora()], module=module)
    assert torch.equal(module.embed.weight, plain.embed.weight)


def test_full_checkpoint_restores_its_own_base(tmp_path):
    whole = fit([lora(checkpoint="full"), every(tmp_path, every_n_epochs=1)])
    resumed = fit([lora()], module=altered(), ckpt_path=tmp_path / "epoch=0-step=5.ckpt")
    assert equal(weights(resumed), weights(whole))


def test_trained_names_work_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model = TinyLM()
    freeze_except_(model, "blocks.2")
    assert list(trained_state(model)) == [name for name in model.state_dict() if name.startswith("blocks.2.")]
