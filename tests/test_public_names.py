"""The package and its command import nothing heavy, and whatever the package offers can be reached all the same."""

import importlib
import json
import operator
import pickle
import re
import subprocess
import sys
import types

import jsonargparse
import pytest
from lightning.pytorch.callbacks import Callback

import lightning_fasttrain as ft
from lightning_fasttrain.core import package

HEAVY = {"torch", "lightning", "numpy", "rich"}
COMMANDS = (
    "ladder",
    "memory",
    "estimate",
    "verify",
    "plan",
    "rehearse",
    "why-not",
    "schedule",
    "shard",
    "consolidate",
    "doctor",
    "machine",
    "techniques",
)


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


ANSWER_ALL = """
import contextlib, io, json, sys
from lightning_fasttrain.cli.main import main
answers = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    answers.append([code, said.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(answers))
"""


def run_command(*arguments):
    """The real command in a fresh process: its exit code, what it printed, and the packages that it imported."""
    done = run_python("-X", "importtime", "-m", "lightning_fasttrain.cli", *arguments)
    lines = done.stderr.splitlines()
    timed = [line.rpartition("|")[2] for line in lines if line.startswith("import time:")]
    said = [line for line in lines if not line.startswith("import time:")]
    return done.returncode, done.stdout + "\n".join(said), {name.strip().partition(".")[0] for name in timed}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HangWatch", "lightning_fasttrain.guards.HangWatch"),
        ("NamedOptimizer", "lightning_fasttrain.optim.NamedOptimizer"),
        ("WeightClipping", "lightning_fasttrain.optim.WeightClipping"),
        ("MicroBatchin", "MicroBatching"),
    ],
)
def test_a_name_that_the_top_lacks_is_hinted_at(name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Did you mean '{meant}'"):
        getattr(ft, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'$"):
        _ = ft.nothing_like_it


ANSWERS = [
    (["--help"], 0, "Train Lightning models faster"),
    (["--version"], 0, f"fasttrain {ft.__version__}"),
    ([], 2, "COMMAND"),
    (["nonsense"], 2, "invalid choice: 'nonsense'"),
    (["ladder", "--steps", "many"], 2, "argument --steps: invalid int value: 'many'"),
    (["memory", "--batch", "many"], 2, "argument --batch: invalid int value: 'many'"),
    (["shard", "--devices", "8"], 2, "give --gpu, as H100:8, or --devices and --memory"),
    (["consolidate"], 2, "the following arguments are required: DIR"),
    *(([command, "--help"], 0, f"usage: fasttrain {command}") for command in COMMANDS),
    (["doctor", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
    (["techniques", "--for"], 2, "argument --for: expected one argument"),
]


@pytest.fixture(scope="module")
def answers():
    """What the parser answers, in one fresh process: the code, what it printed and the packages imported by then."""
    done = run_python("-c", ANSWER_ALL, json.dumps([arguments for arguments, _, _ in ANSWERS]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=lambda number: " ".join(ANSWERS[number][0]))
def test_what_the_parser_answers_imports_nothing_heavy(answers, number):
    _, code, says = ANSWERS[number]
    returned, printed, imported = answers[number]
    assert (returned, says in printed) == (code, True)
    assert "argparse" in imported  # so the list is one of imports
    assert not HEAVY & set(imported)


def test_the_command_answers_from_a_fresh_process():
    returned, printed, imported = run_command("--help")
    assert (returned, "Train Lightning models faster" in printed) == (0, True)
    assert not imported & HEAVY


def test_a_schedule_is_drawn_without_torch():
    returned, printed, imported = run_command("schedule", "cosine", "--warmup", "100", "--total", "1000")
    assert (returned, "cosine: 1,000 steps" in printed) == (0, True)
    assert not imported & (HEAVY - {"rich"})


@pytest.mark.parametrize("name", ft.__all__)
def test_a_public_name_is_what_its_room_holds(name):
    room = importlib.import_module(package.SUBPACKAGES[name])
    assert getattr(ft, name) is getattr(room, name)
    assert not isinstance(getattr(ft, name), types.ModuleType)


def test_the_top_level_keeps_what_is_typed_daily():
    assert len(ft.__all__) <= 42  # the rest is in the subpackages


def test_help_is_a_guide_of_twelve_lines_whose_names_exist():
    lines = ft.__doc__.strip().splitlines()
    assert len(lines) == 12
    for name in re.findall(r"\bft\.([\w.]+)", ft.__doc__):
        assert operator.attrgetter(name)(ft)


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lightning_fasttrain' has no attribute 'Nonsense'"):
        _ = ft.Nonsense
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from lightning_fasttrain import Nonsense  # noqa: F401


def test_things_are_pickled_by_their_own_name():
    assert pickle.loads(pickle.dumps(ft.model.EveryBlock)) is ft.model.EveryBlock
    assert pickle.loads(pickle.dumps(ft.micro_batching.split_batch)) is ft.micro_batching.split_batch


PROGRAM = """
import json, os, sys
seen = []
def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes and str(args[0]).endswith((".pyc", os.devnull)) or writes and "__pycache__" in str(args[0]):
        return
    if writes or event.startswith(("socket.connect", "socket.bind", "subprocess.", "os.system", "os.exec", "os.fork",
                                   "os.posix_spawn", "os.remove", "os.rename", "os.mkdir", "os.rmdir")):
        seen.append([event, str(args)[:200]])
import torch  # what these do when imported is theirs
import lightning as L
before = set(sys.modules)
sys.addaudithook(hook)
import lightning_fasttrain
result = {"seen": list(seen), "new": sorted(set(sys.modules) - before)}
import subprocess; subprocess.run(["true"])  # negative control
print(json.dumps({**result, "would be seen": seen}))

import lightning_fasttrain.memory.predict_memory
import lightning_fasttrain as ft
from lightning_fasttrain.memory import predict_memory
assert callable(predict_memory) and predict_memory is ft.memory.predict_memory is ft.predict_memory
assert ft.optim.named.__name__ == "lightning_fasttrain.optim.named"
assert "TYPE_CHECKING" not in dir(ft.optim) and set(ft.optim.__all__) <= set(dir(ft.optim))
assert "MicroBatching" not in vars(ft)
from lightning_fasttrain import *
assert MicroBatching is ft.MicroBatching is ft.micro_batching.MicroBatching and "__version__" not in ft.__all__
from lightning_fasttrain import LoRA, model
assert LoRA.__module__ == "lightning_fasttrain.finetune.adapters.lora" and model.CompileBlocks is CompileBlocks
assert {"loaders", "mixin", "MicroBatching", "__version__"} <= set(dir(ft)) and "core" not in dir(ft)
assert "MicroBatching" in vars(ft)
"""


@pytest.fixture(scope="module")
def done():
    return run_python("-c", PROGRAM)


def test_each_access_works_and_a_function_is_not_replaced_by_the_file_of_its_name(done):
    assert done.returncode == 0, done.stderr


def test_importing_starts_nothing_opens_nothing_writes_nothing(done):
    result = json.loads(done.stdout.splitlines()[0])
    assert result["seen"] == []
    assert result["would be seen"]
    heavy = {"transformers", "deepspeed", "bitsandbytes", "peft", "torchao", "matplotlib", "torch._inductor"}
    assert not heavy & set(result["new"])


@pytest.mark.parametrize(
    ("old", "answer"),
    [
        (
            "data.EvenEpochs",
            "lightning_fasttrain.data.EvenEpochs was moved: use lightning_fasttrain.loaders.EvenEpochs",
        ),
        ("data.pack", "use lightning_fasttrain.micro_batching.pack"),
        ("run.StepMeter", "use lightning_fasttrain.profiling.StepMeter"),
        ("run.SpikeGuard", "use lightning_fasttrain.guards.SpikeGuard"),
        ("dry_run.verify", "use lightning_fasttrain.proof.verify"),
        ("predict.count_flops", "use lightning_fasttrain.memory.count_flops"),
        ("run.PeerSnapshots", "was removed. It gained nothing where it was measured"),
        ("run.Nonsense", "was moved to lightning_fasttrain.checkpoint or lightning_fasttrain.guards or"),
    ],
)
def test_a_name_that_was_moved_is_answered_with_its_new_place(old, answer):
    room, name = old.split(".")
    with pytest.raises(AttributeError, match=answer):
        getattr(getattr(ft, room), name)
    with pytest.raises(ImportError, match=f"'{name}' from 'lightning_fasttrain.{room}' .moved to lightning_fasttrain"):
        exec(f"from lightning_fasttrain.{room} import {name}")


def test_a_moved_class_path_of_a_config_is_answered_with_its_new_place():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    with pytest.raises(jsonargparse.ArgumentError, match="use lightning_fasttrain.loaders.EvenEpochs"):
        parser.parse_args(["--callback", "lightning_fasttrain.data.EvenEpochs"])
    assert parser.parse_args(["--callback", "lightning_fasttrain.loaders.EvenEpochs"]).callback
