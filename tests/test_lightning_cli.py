"""Techniques and strategies out of YAML, by LightningCLI and jsonargparse."""

import importlib
import inspect
import io
import sys
from contextlib import redirect_stdout

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

import lightning_fasttrain as ft
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.planner.candidates import known_techniques, public_path
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from tests.support.run_example import ROOT


@pytest.fixture(autouse=True)
def _only_our_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])  # Lightning warns where pytest's own are beside them


def build(tmp_path, **trainer):
    """What LightningCLI makes of these settings of the trainer, from a file."""
    path = tmp_path / "config.yaml"
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    path.write_text(
        yaml.safe_dump({"seed_everything": 0, "trainer": {**quiet, "enable_model_summary": False, **trainer}})
    )
    cli = LightningCLI(BoringModel, run=False, args=["--config", str(path)], save_config_callback=None)
    # As --print_config shows it, and as Lightning writes it beside the logs of a run; and back.
    printed = cli.parser.dump(cli.config, skip_none=False)
    again = cli.parser.instantiate_classes(cli.parser.parse_string(printed)).trainer
    techniques = [callback for callback in cli.trainer.callbacks if isinstance(callback, ft.Technique)]
    assert [repr(callback) for callback in again.callbacks or [] if isinstance(callback, ft.Technique)] == [
        repr(technique) for technique in techniques
    ]
    assert again.strategy == "auto" or type(again.strategy) is type(cli.trainer.strategy)
    return cli.trainer


class Larger(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)


def yaml_on_its_card(technique):
    with redirect_stdout(io.StringIO()) as said:
        assert main(["techniques", technique.__name__]) == 0
    lines = [line for line in said.getvalue().splitlines() if line.startswith("YAML")]
    return yaml.safe_load(lines[0].removeprefix("YAML").strip())["trainer"]["callbacks"][0] if lines else None


@pytest.fixture(scope="module")
def cards():
    """What the cards of all techniques say in YAML, by technique; None where a card has none."""
    return {technique: yaml_on_its_card(technique) for technique in known_techniques()}


@pytest.fixture(scope="module")
def callbacks_of_cards(cards, tmp_path_factory):
    """The callbacks that Lightning's CLI makes of all of it at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py"])
        return build(tmp_path_factory.mktemp("cards"), callbacks=[spec for spec in cards.values() if spec]).callbacks


@pytest.mark.parametrize("technique", list(known_techniques()), ids=lambda technique: technique.__name__)
def test_the_yaml_of_its_card_makes_the_technique_with_its_settings(technique, cards, callbacks_of_cards):
    spec = cards[technique]
    if spec is None:  # it takes an object, such as a teacher, that YAML cannot make
        needed = [p for p in inspect.signature(technique).parameters.values() if p.default is p.empty]
        assert needed or technique in (ft.ActivationCheckpointing, ft.Preemption)
        return
    (made,) = [callback for callback in callbacks_of_cards if type(callback) is technique]
    by_hand = technique(**spec.get("init_args", {}))
    for name in inspect.signature(technique).parameters:
        if name in vars(by_hand):
            ours, theirs = getattr(by_hand, name), getattr(made, name)
            assert theirs == ours or repr(theirs) == repr(ours), name


@pytest.mark.parametrize("policy", [ft.model.EveryBlock, ft.model.SelectiveOps, ft.MemoryBudget])
def test_policies_are_settings_too(policy, tmp_path):
    spec = {"class_path": f"lightning_fasttrain.{public_path(policy)}"}
    callback = {"class_path": "lightning_fasttrain.ActivationCheckpointing", "init_args": {"policy": spec}}
    trainer = build(tmp_path, callbacks=[callback])
    (made,) = [one for one in trainer.callbacks if isinstance(one, ft.ActivationCheckpointing)]
    assert type(made.policy) is policy


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (
            "FSDP2Strategy",
            {
                **{"reshard_after_forward": 2, "offload": "cpu", "replicas": 2, "blocks": ["Linear"]},
                **{"reduce_dtype": "float32", "float32_residual": True, "broadcast_buffers": False},
                **{"reduce_once": False, "async_checkpoints": True, "process_group_backend": "gloo"},
            },
        ),
        ("ZeROStrategy", {"stage": 2}),
        ("ZeROStrategy", {"memory_gib": 8.0, "headroom": 0.2, "trusted": True, "universal": True}),
    ],
)
def test_strategies(strategy, settings, tmp_path):
    spec = {"class_path": f"lightning_fasttrain.{strategy}", "init_args": settings}
    made = build(tmp_path, devices=2, strategy=spec).strategy
    assert type(made) is getattr(ft, strategy)
    if strategy == "FSDP2Strategy":
        assert made.sharding == Sharding(2, "cpu", 2, ["Linear"], "float32", True)
        assert not made.broadcast_buffers
        assert made.async_checkpoints
    else:
        assert made.stage == settings.get("stage", made.stage)
        assert (made.options.memory_gib, made.trusted) == (settings.get("memory_gib"), "trusted" in settings)


def test_a_dtype_is_written_by_its_name(tmp_path):
    spec = {"class_path": "lightning_fasttrain.finetune.QuantizedBase", "init_args": {"compute_dtype": "bfloat16"}}
    (made,) = build(tmp_path, callbacks=[spec]).callbacks[:1]
    assert made.compute_dtype is torch.bfloat16


def test_settings_that_were_left_out_are_written_out_too(tmp_path):
    (made,) = build(tmp_path, callbacks=[{"class_path": "lightning_fasttrain.Preemption"}]).callbacks[:1]
    assert made.signals == (15,)


def test_what_was_built_fits(tmp_path):
    every = [
        {"class_path": "lightning_fasttrain.MicroBatching", "init_args": {"n": 2}},
        {"class_path": "lightning_fasttrain.EagerGradientRelease"},
        {"class_path": "lightning_fasttrain.DevicePrefetch"},
    ]
    trainer = build(tmp_path, max_steps=3, callbacks=every, limit_val_batches=0)
    model = Larger()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model)
    assert trainer.global_step == 3
    assert not all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    (micro,) = [callback for callback in trainer.callbacks if isinstance(callback, ft.MicroBatching)]
    assert micro.parts == 2


def test_the_example_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module("cli")
    cli = example.main(["fit", "--config", str(ROOT / "examples/config.yaml"), "--trainer.max_steps=4"])
    assert cli.trainer.global_step == 4
    assert [type(c) for c in cli.trainer.callbacks if isinstance(c, ft.Technique)] == [
        *(ft.ActivationCheckpointing, ft.MicroBatching, ft.DevicePrefetch),
        *(ft.EagerGradientRelease, ft.ExactResume, ft.AtomicCheckpoints),
    ]


class NamesItsOptimizer(ft.FastTrainMixin, Larger):
    def __init__(self, optimizer: ft.optim.NamedOptimizer | None = None):
        super().__init__()
        self.optimizer = optimizer


def test_the_optimizer_is_named_in_yaml(tmp_path):
    optimizer = {"name": "lion", "lr": 0.05, "weight_decay": 0.2, "settings": {"betas": [0.8, 0.9]}}
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "seed_everything": 0,
                "model": {"optimizer": optimizer},
                "trainer": {**quiet, "max_steps": 2, "limit_val_batches": 0},
            }
        )
    )
    cli = LightningCLI(NamesItsOptimizer, args=["fit", "--config", str(path)], save_config_callback=None)
    (made,) = cli.trainer.optimizers
    assert type(made) is ft.optim.Lion
    assert [group["weight_decay"] for group in made.param_groups] == [0.2, 0.0]
    assert {group["lr"] for group in made.param_groups} == {0.05}
    assert list(made.defaults["betas"]) == [0.8, 0.9]
    assert cli.trainer.global_step == 2


def test_an_unknown_optimizer_in_yaml_is_refused_before_anything_is_trained(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 0, "model": {"optimizer": {"name": "adamw9"}}}))
    with pytest.raises((SystemExit, ValueError)) as error:
        LightningCLI(NamesItsOptimizer, args=["fit", "--config", str(path)], save_config_callback=None)
    assert "adamw9" in f"{error.value}{capsys.readouterr().err}"
