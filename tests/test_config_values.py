"""Settings in the classes of Hydra's configs and of NumPy: whatever users construct keeps them as plain Python."""

import ast
import inspect
import json
import typing

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, ListConfig, OmegaConf

import lightning_fasttrain as ft
from lightning_fasttrain.optim.named.build_optimizer import KNOWN
from lightning_fasttrain.planner.candidates import class_named, public_path
from lightning_fasttrain.technique.technique import describe
from tests.cases import CASES
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer
from tests.support.wrong_arguments import public_things, right_arguments

# A value in plain Python, and the same value as a config or a computation may bring it.
SAME = [
    (2, np.int64(2)),
    (0.5, np.float64(0.5)),
    (0.5, np.float32(0.5)),
    (True, np.bool_(True)),
    ("a", np.str_("a")),
    ((0.5, 0.25), ListConfig([0.5, 0.25])),
    ((0.5, 0.25), (np.float64(0.5), np.float32(0.25))),
    ([2, 15], ListConfig([2, 15])),
    ([["a"], "b"], ListConfig([["a"], "b"])),
    (["a", "b"], ListConfig(["a", "b"])),
    ({"a": "b"}, DictConfig({"a": "b"})),
    ({"a": {"b": [1]}}, DictConfig({"a": {"b": [1]}})),
    ({0: 1, 4: 2}, DictConfig({0: 1, 4: 2})),
    (torch.float32, "float32"),
    (torch.bfloat16, "torch.bfloat16"),
]
CONSTRUCTORS = {path: thing for path, thing in public_things().items() if inspect.isclass(thing)}
del CONSTRUCTORS["technique.Technique"]  # has no arguments


def construct(kind, arguments):
    """The object, or None where an argument is refused."""
    bound = inspect.signature(kind).bind_partial()
    bound.arguments.update(arguments)
    try:
        return kind(*bound.args, **bound.kwargs)
    except (TypeError, ValueError, RuntimeError):
        return None


def foreign_values(value, depth=6):
    """Values of OmegaConf's and NumPy's classes within an object of the package."""
    if isinstance(value, np.generic) or type(value).__module__.startswith("omegaconf"):
        return [value]
    inside = []
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, list | tuple | set):
        inside = value
    elif type(value).__module__.startswith("lightning_fasttrain"):
        inside = getattr(value, "__dict__", {}).values()
    return [found for one in inside if depth for found in foreign_values(one, depth - 1)]


def settings_of(kind):
    """The names of a constructor's settings; arguments of any kind, such as a batch, are left as they are."""
    kinds = typing.get_type_hints(kind.__init__)
    names = [name for name in inspect.signature(kind).parameters if kinds.get(name) not in (None, object, typing.Any)]
    return [name for name in names if "Collection[typing.Any]" not in str(kinds[name])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", CONSTRUCTORS)
def test_constructors_keep_plain_values(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, wrong = CONSTRUCTORS[path], []
    for name in settings_of(kind):
        for plain, given in SAME:
            expected = construct(kind, {**right_arguments(path), name: plain})
            if expected is None:
                continue
            made = construct(kind, {**right_arguments(path), name: given})
            if describe(made) != describe(expected) or foreign_values(made):
                wrong.append((name, given, describe(made), foreign_values(made)))
    assert wrong == []


def as_config(node):
    """What an expression means, with ``_target_`` for calls, as Hydra reads it."""
    if isinstance(node, ast.Call):
        kind = class_named(node.func.id)
        named = {keyword.arg: as_config(keyword.value) for keyword in node.keywords}
        return {"_target_": f"lightning_fasttrain.{public_path(kind)}", **named}
    if isinstance(node, ast.List | ast.Tuple):
        return list(map(as_config, node.elts))
    return ast.literal_eval(node)


def out_of_config(case):
    """The technique of a row, instantiated from a config; as the row makes it where it has arguments in code."""
    made = case.make()
    try:
        config = OmegaConf.create(as_config(ast.parse(repr(made), mode="eval").body))
    except (SyntaxError, KeyError, ValueError):
        return made
    return instantiate(config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_techniques_of_a_config_are_the_same(case):
    made = out_of_config(case)
    assert describe(made) == describe(case.make())
    assert foreign_values(made) == []


def train_with(made, folder, epochs):
    """Fit with what a config has made, and save; continue with what is saved."""
    model = TinyLM(optimizer=lambda *_, **__: made["optimizer"](model))
    saves = ModelCheckpoint(folder, save_last=True)
    callbacks = [*made["techniques"], ft.ExactResume(), ft.AtomicCheckpoints(), saves]
    run = trainer(callbacks, enable_checkpointing=True, max_epochs=epochs)
    run.fit(model, as_loader(lm_batches(4)), ckpt_path=ft.newest_checkpoint(folder), weights_only=True)
    return run.global_step


def assert_saves_and_resumes(config, folder):
    """What is saved by a run of a config is resumed by a run of the same settings in plain Python."""
    config = OmegaConf.create({"_target_": "builtins.dict", **config})
    steps = train_with(instantiate(config), folder, epochs=1)
    assert train_with(instantiate(config, _convert_="all"), folder, epochs=2) == 2 * steps > 0


def named(name, **settings):
    return {"_target_": "lightning_fasttrain.optim.NamedOptimizer", "name": name, "lr": 0.001, "settings": settings}


OF_OPTIMIZERS = {
    **{"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9}, "adagrad": {}, "adafactor": {"eps": [1e-8, 1e-3]}},
    **{"galore": {"rank": 2, "betas": [0.9, 0.95], "blocks": ["blocks.0", "blocks.1"]}},
    **{"muon": {"betas": [0.9, 0.95], "blocks": ["blocks.*"]}},
}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", KNOWN)
def test_optimizers_of_a_config_save_and_resume(name, tmp_path):
    settings = OF_OPTIMIZERS.get(name, {"betas": [0.9, 0.95]})
    techniques = [{"_target_": "lightning_fasttrain.optim.ScheduleFreeEvaluation"}] * (name == "schedule-free")
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes a minute on a CPU
        assert_saves_and_resumes({"optimizer": named(name, **settings), "techniques": techniques}, tmp_path)


TECHNIQUES = [
    {"TokenWeightedAccumulation": {"factor": {0: 2, 4: 1}}, "Preemption": {"signals": [15]}},
    {"LoRA": {"rank": 2, "targets": ["up", "down"]}, "ActivationCheckpointing": {"blocks": ["blocks.*"]}},
    {
        "finetune.QuantizedBase": {"compute_dtype": "float32", "skip": ["blocks.*.up"]},
        "CompileBlocks": {"backend": "aot_eager"},
    },
    {"finetune.GradualUnfreezing": {"groups": [["blocks.0", "blocks.1"], "*"]}, "optim.WeightEMA": {"decay": 0.5}},
    {"architecture.StochasticDepth": {"rate": 0.5, "blocks": ["blocks.0"]}, "MicroBatching": {"n": 2}},
]


@pytest.mark.parametrize("listed", TECHNIQUES, ids=lambda listed: "-".join(listed))
def test_techniques_of_a_config_save_and_resume(listed, tmp_path):
    techniques = [{"_target_": f"lightning_fasttrain.{name}", **given} for name, given in listed.items()]
    assert_saves_and_resumes({"optimizer": named("sgd"), "techniques": techniques}, tmp_path)


def test_strategies_of_a_config_keep_plain_values():
    config = {"zero_optimization": {"stage": 1, "cpu_offload": False}, "betas": [0.9, 0.95]}
    for kind in (ft.ZeROStrategy, ft.strategy.FabricZeROStrategy):
        spec = {"_target_": f"lightning_fasttrain.{public_path(kind)}", "config": config}
        strategy = instantiate(OmegaConf.create(spec))
        assert json.loads(json.dumps(strategy.config)).items() >= config.items()
    strategy = ft.FSDP2Strategy(tensor_parallel=np.int64(2), tensor_plan=OmegaConf.create({"up": "column"}))
    assert foreign_values(strategy) == []


def test_an_adapter_of_a_config_is_saved(tmp_path):
    peft = {"_target_": "peft.LoraConfig", "target_modules": ["up"], "rank_pattern": {"up": 4}}
    technique = {"_target_": "lightning_fasttrain.finetune.Adapter", "config": peft}
    model = TinyLM()
    ft.apply(model, [instantiate(OmegaConf.create(technique))])
    ft.finetune.save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {"up": 4}


class Configured(TinyLM):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters()


def test_a_config_among_hyper_parameters_is_refused_before_the_first_step(tmp_path):
    model = Configured(OmegaConf.create({"widths": [1, 2]}))
    run = trainer([ft.AtomicCheckpoints(), ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(ValueError, match="'hyper_parameters'.*of class DictConfig.*OmegaConf.to_container"):
        run.fit(model, as_loader(lm_batches(1)))
    assert run.global_step == 0
    plain = Configured(OmegaConf.to_container(OmegaConf.create({"widths": [1, 2]})))
    trainer([ft.AtomicCheckpoints(), ModelCheckpoint(tmp_path)], enable_checkpointing=True).fit(
        plain, as_loader(lm_batches(1))
    )
