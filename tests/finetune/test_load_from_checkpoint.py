"""Checkpoints of runs with adapters in Lightning's own ways: loaded without a Trainer, evaluated, refused, deployed."""

import copy
import importlib.util
import pickle
import re
import subprocess
import sys

import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import IA3, Adapter, PromptTuning, load_trained_state_, unload_adapters_
from tests.finetune.test_adapter_checkpoints import ADAPTER, BATCHES, TinyLM, altered
from tests.finetune.test_quantized_stacks import Net, batch
from tests.support.nets import WideLM, as_loader, trainer, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*stay in full precision"),
]


class Wide(WideLM):
    """The same weights whenever it is built, without a change of the random state."""

    def build(self):
        with torch.random.fork_rng():
            super().build()


CASES = {
    "LoRA": (TinyLM, lambda **mode: [ft.LoRA(rank=2, **mode)]),
    "LoRA with a head": (Wide, lambda **mode: [ft.LoRA(rank=2, train="head", **mode)]),
    "PiSSA": (TinyLM, lambda **mode: [ft.LoRA(rank=2, variant="pissa", **mode)]),
    "IA3": (TinyLM, lambda **mode: [IA3("up", **mode)]),
    "LoHa": (TinyLM, lambda **mode: [Adapter(peft.LoHaConfig(r=2), ["up"], **mode)]),
    "QLoRA": (Wide, lambda **mode: [ft.QLoRA(rank=2, **mode)]),
    "4 bits and LoRA": (Wide, lambda **mode: [ft.LoRA(rank=2, **mode), ft.finetune.QuantizedBase()]),
    "prompt": (Net, lambda **mode: [PromptTuning(3, **mode)]),
}


def run(tmp_path, net, techniques, **settings):
    """Train, save in the run, and return the module and the path."""
    save = ModelCheckpoint(tmp_path, "run", enable_version_counter=False)
    t = trainer([*techniques, save], **{"enable_checkpointing": True, **settings})
    module = net()
    t.fit(module, as_loader([batch(), batch()] if net is Net else BATCHES))
    return module, tmp_path / "run.ckpt"


def outputs(module):
    with torch.no_grad():
        if isinstance(module, Net):
            return module.eval().lm(**batch()).logits
        return module.eval()(BATCHES[0]["input_ids"])


def with_mixin(net, techniques):
    return type(net.__name__, (ft.FastTrainMixin, net), {"configure_techniques": lambda self: techniques()})


@pytest.mark.parametrize("mode", ["adapter", "full"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_loaded_by_the_mixin_and_by_the_lines_that_a_plain_class_answers_with(name, mode, tmp_path):
    net, techniques = CASES[name]
    trained, path = run(tmp_path, net, techniques(checkpoint=mode))
    assert not torch.equal(outputs(trained), outputs(net()))
    loaded = with_mixin(net, techniques).load_from_checkpoint(path, weights_only=True)
    assert torch.equal(outputs(loaded), outputs(trained))
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"Add it, then load:(.|\n)*load_trained_state_\(model, path\)"
        ) as raised:
            net.load_from_checkpoint(path, strict=strict, weights_only=True)
    made, *lines = [line.strip() for line in str(raised.value).splitlines() if line.startswith("    ")]
    assert made == f"model = {net.__name__}(...)"
    there = {"ft": ft, "path": path, "model": net()}
    if name == "LoHa":  # its configuration is an object
        assert lines[0] == "ft.apply(model, [ft.finetune.Adapter(...)])"
        lines[0], there["techniques"] = "ft.apply(model, techniques)", techniques()
    exec("\n".join(lines), there)
    assert torch.equal(outputs(there["model"]), outputs(trained))
    assert all(torch.equal(value, weights(trained)[key]) for key, value in weights(there["model"]).items())


@pytest.mark.parametrize("mode", ["adapter", "full"])
@pytest.mark.parametrize("name", ["LoRA", "LoRA with a head", "QLoRA", "prompt"])
def test_weights_that_are_saved_after_the_run_never_load_as_the_base(name, mode, tmp_path):
    """Of a module and its copies, by the Trainer of the run and by another one without the technique."""
    net, techniques = CASES[name]
    trained, t = net(), trainer(techniques(checkpoint=mode))
    t.fit(trained, as_loader([batch(), batch()] if net is Net else BATCHES))
    other = trainer()
    other.strategy.connect(pickle.loads(pickle.dumps(copy.deepcopy(trained))))
    other.lightning_module.trainer = other
    for number, saving in enumerate((t, other)):
        path = tmp_path / f"{number}.ckpt"
        saving.save_checkpoint(path, weights_only=True)
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"Add it, then load:(.|\n)*ft.apply\(model, \[ft\."):
                net.load_from_checkpoint(path, strict=strict, weights_only=True)
            loaded = with_mixin(net, techniques).load_from_checkpoint(path, strict=strict, weights_only=True)
            assert torch.equal(outputs(loaded), outputs(trained))
        model = net()
        ft.apply(model, techniques())
        load_trained_state_(model, path)
        assert torch.equal(outputs(model), outputs(trained))


class Predicts(TinyLM):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("way", ["callbacks", "mixin"])
def test_a_trainer_evaluates_a_checkpoint(way, tmp_path):
    def lora():
        return ft.LoRA(rank=2)

    trained, path = run(tmp_path, Predicts, [lora()])
    net, callbacks = (with_mixin(Predicts, lambda: [lora()]), []) if way == "mixin" else (Predicts, [lora()])
    with torch.no_grad():
        expected = [trained.eval().loss(one) for one in BATCHES]
    t, given = trainer(callbacks), {"ckpt_path": path, "weights_only": True}
    assert torch.equal(torch.stack(t.predict(net(), as_loader(BATCHES), **given)), torch.stack(expected))
    for evaluate, key in ((t.test, "test_loss"), (t.validate, "val_loss")):
        assert evaluate(net(), as_loader(BATCHES), verbose=False, **given)[0][key] == pytest.approx(
            float(sum(expected) / len(expected))
        )
    # A Trainer without the adapter is refused as load_from_checkpoint is.
    with pytest.raises(RuntimeError, match=r"ft.apply\(model, \[ft.LoRA\(rank=2\)\]\)"):
        trainer().test(Predicts(), as_loader(BATCHES), verbose=False, **given)


@pytest.mark.parametrize("mode", ["adapter", "full"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 4}, "the checkpoint's adapter 'default' has r=2, and this run's has r=4"),
        ({"rank": 2, "alpha": 64}, "'default' has lora_alpha=32, and this run's has lora_alpha=64"),
        ({"rank": 2, "variant": "rslora"}, "'default' has use_rslora=False, and this run's has use_rslora=True"),
    ],
)
def test_other_settings_are_named_with_both_values(mode, other, message, tmp_path):
    _, path = run(tmp_path, TinyLM, [ft.LoRA(rank=2, checkpoint=mode)])
    t, fits = trainer([ft.LoRA(**other)], max_epochs=2), other["rank"] == 2
    with pytest.warns(ft.FastTrainWarning) if fits else pytest.raises(ValueError) as found:
        t.fit(TinyLM(), as_loader(BATCHES), ckpt_path=path, weights_only=True)
    assert message in str([str(one.message) for one in found] if fits else found.value)
    model = TinyLM()
    ft.apply(model, [ft.LoRA(**other)])
    before = weights(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_trained_state_(model, path)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_other_dropout_is_resumed(tmp_path):
    trained, path = run(tmp_path, TinyLM, [ft.LoRA(rank=2, dropout=0.1)])
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2)])
    assert set(load_trained_state_(model, path)) == ADAPTER
    assert torch.equal(outputs(model), outputs(trained))


def test_files_of_a_copying_plugin_and_of_another_base(tmp_path):
    """AsyncCheckpointIO copies what it saves, and the refusal loses its words: it is one all the same."""
    trained, path = run(tmp_path, TinyLM, [ft.LoRA(rank=2)], plugins=[AsyncCheckpointIO()])
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="blocks.0.up.weight"):
            TinyLM.load_from_checkpoint(path, strict=strict, weights_only=True)
    own = with_mixin(TinyLM, lambda: [ft.LoRA(rank=2)])
    assert torch.equal(outputs(own.load_from_checkpoint(path, weights_only=True)), outputs(trained))
    other = altered()
    ft.apply(other, [ft.LoRA(rank=2)])
    with pytest.raises(ValueError, match="another base model than TinyLM: the values differ in"):
        load_trained_state_(other, path)


def test_a_class_with_the_mixin_still_starts_from_a_plain_checkpoint(tmp_path):
    plain, path = run(tmp_path, TinyLM, [])
    loaded = with_mixin(TinyLM, lambda: [ft.LoRA(rank=2)]).load_from_checkpoint(path, weights_only=True)
    assert set(loaded.state_dict()) == set(TinyLM().state_dict())
    assert torch.equal(outputs(loaded), outputs(plain))


def test_mistakes_are_named(tmp_path):
    _, path = run(tmp_path, TinyLM, [ft.LoRA(rank=2)])
    message = r"TinyLM has no adapter: the checkpoint holds one. Add the one of the run first: apply\(model, "
    with pytest.raises(ValueError, match=message):
        load_trained_state_(TinyLM(), path)
    with pytest.raises(ValueError, match="expected a checkpoint of a Trainer, which has a state_dict"):
        load_trained_state_(TinyLM(), {"model": {}})
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="expected a checkpoint of a Trainer, which has a state_dict"):
        load_trained_state_(TinyLM(), tmp_path / "list.ckpt")
    content, model = torch.load(path, weights_only=True), TinyLM()
    ft.apply(model, [ft.LoRA(rank=2)])
    for key in ("lightning_fasttrain.adapters", "lightning_fasttrain.base", "state_dict"):
        with pytest.raises(ValueError, match="damaged. Use an older checkpoint"):
            load_trained_state_(model, {**content, key: [1]})


DEPLOYED = """
import lightning as L, torch

class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.body, self.head = torch.nn.Linear(4, width), torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())

    def training_step(self, batch, _):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
"""
SERVE = """
import sys
sys.modules["lightning_fasttrain"] = sys.modules["peft"] = None  # as if they were not installed
import torch
from deployed import Net
torch.save(Net.load_from_checkpoint("plain.ckpt", weights_only=True)(torch.ones(3, 4)), "out.pt")
try:
    Net.load_from_checkpoint("adapter.ckpt", strict=False, weights_only=True)
except RuntimeError as error:
    print(error)
"""


def test_a_merged_module_is_deployed_without_this_package(tmp_path):
    (tmp_path / "deployed.py").write_text(DEPLOYED)
    spec = importlib.util.spec_from_file_location("deployed", tmp_path / "deployed.py")
    deployed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deployed)
    module, t = deployed.Net(width=8), trainer([ft.LoRA(rank=2, targets="body")])
    base = deployed.Net(width=8)(torch.ones(3, 4))
    t.fit(module, torch.utils.data.DataLoader(torch.ones(6, 3, 4), batch_size=None))
    t.save_checkpoint(tmp_path / "adapter.ckpt")
    expected = module(torch.ones(3, 4))
    unload_adapters_(module)
    t.save_checkpoint(tmp_path / "plain.ckpt")
    served = subprocess.run([sys.executable, "-c", SERVE], cwd=tmp_path, capture_output=True, text=True, check=True)
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(out, expected)
    assert (out - base).abs().max() > 0.01
    assert "ft.apply(model, [ft.LoRA(rank=2, targets='body')])\n    ft.finetune.load_trained" in served.stdout
