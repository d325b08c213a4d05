"""What is published: the source distribution is complete, and the wheel made of it trains without any extra."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"lightning_fasttrain-{PROJECT['version']}"
FOLDERS = ("lightning_fasttrain", "tests", "examples", "notebooks", "docs")
FILES = (
    *("pyproject.toml", "MANIFEST.in", "mkdocs.yml", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"),
)
LARGEST = 2**20  # bytes
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
EXTRAS = ("peft", "bitsandbytes", "deepspeed", "torchao", "transformers", "schedulefree", "matplotlib")
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints", "tokens", "lightning_logs", "checkpoints")


def run_python(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(kind, source, out):
    """Build by setuptools' PEP 517 backend, as pip and build do."""
    out.mkdir(exist_ok=True)
    return out / run_python("-c", BUILD, f"build_{kind}", out, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is in the repository, without the lists of files that earlier builds leave beside it."""
    copy = tmp_path_factory.mktemp("source") / NAME
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=CACHES)
    for file in FILES:
        shutil.copy2(ROOT / file, copy / file)
    for rubbish in ("tests/__pycache__/x.cpython-311.pyc", "notebooks/.ipynb_checkpoints/x.ipynb"):
        (copy / rubbish).parent.mkdir()
        (copy / rubbish).write_bytes(b"")
    return copy


@pytest.fixture(scope="module")
def sdist(source):
    return build("sdist", source, source.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist):
    """The wheel that is made of the source distribution, as an installation from it does."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return build("wheel", sdist.parent / NAME, sdist.parent / "wheel")


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def is_rubbish(name):
    return name.endswith(".pyc") or ".ipynb_checkpoints" in name


def test_the_source_distribution_has_every_file_and_no_rubbish(source, sdist):
    assert sdist.name == f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        members = {member.name.removeprefix(f"{NAME}/"): member.size for member in archive if member.isfile()}
    wanted = {name for name in files_below(source) if not name.startswith("lightning_fasttrain.egg-info")}
    assert {name for name in wanted if is_rubbish(name)}  # which is there to be left out
    assert {name for name in wanted if not is_rubbish(name)} - members.keys() == set()
    assert {name for name in members if is_rubbish(name)} == set()
    assert {name: size for name, size in members.items() if size > LARGEST} == {}


def test_the_wheel_has_every_package_its_types_and_no_tests(source, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
    package = {f"lightning_fasttrain/{name}" for name in files_below(source / "lightning_fasttrain")}
    assert {"lightning_fasttrain/py.typed", "lightning_fasttrain/__init__.pyi"} <= names
    assert package - names == set()
    assert {name.partition("/")[0] for name in names} == {"lightning_fasttrain", f"{NAME}.dist-info"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "Provides-Extra: docs" in metadata


def test_an_editable_installation_is_a_path_that_type_checkers_follow(source):
    wheel = build("editable", source, source.parent / "editable")
    with zipfile.ZipFile(wheel) as archive:
        hooks = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert [Path(name).suffix for name in hooks] == [".pth"]
        assert archive.read(hooks[0]).decode().split() == [str(source)]


TRAIN = f"""
import importlib.abc, importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from_name = importlib.metadata.Distribution.from_name
def not_installed(name):  # other packages ask this before they import one of them
    if name in {EXTRAS!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)
importlib.metadata.Distribution.from_name = not_installed

import lightning as L
import torch
from torch import nn
import lightning_fasttrain as ft

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
        self.rows = []
    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        self.rows.append(len(tokens))
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

torch.manual_seed(0)
tokens = torch.randint(11, (8, 5))
targets = torch.randint(11, (8, 5))
targets[::4, 1:] = -100  # so that the mean of the parts' means is another number
begin = {{key: value.clone() for key, value in Net().state_dict().items()}}

def train(*callbacks):
    net = Net()
    net.load_state_dict(begin)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, targets), batch_size=4)
    L.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
              enable_model_summary=False, callbacks=list(callbacks)).fit(net, loader)
    return net

plain, split = train(), train(ft.MicroBatching(2))
assert plain.rows == [4, 4] and split.rows[-2:] == [2, 2], (plain.rows, split.rows)
for key, value in plain.state_dict().items():
    assert not torch.equal(value, begin[key]), key
    torch.testing.assert_close(split.state_dict()[key], value, rtol=1e-5, atol=1e-6)
for name in {EXTRAS!r}:
    assert name not in sys.modules, name
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{{name}} can be imported")
for room in [getattr(ft, name) for name in dir(ft)]:
    if type(room) is type(sys):
        for name in dir(room):
            getattr(room, name)
batch = tokens, targets
fine = ft.finetune
uses = {{
    "finetune": [
        lambda: train(ft.LoRA()),
        lambda: train(ft.QLoRA()),
        lambda: train(ft.finetune.QuantizedBase()),
        lambda: train(fine.PromptTuning(4)),
        lambda: fine.add_adapter_(Net(), None, "net.1"),
        lambda: fine.add_prompt_(Net(), 4),
        lambda: fine.quantize_base_(Net()),
        lambda: fine.load_quantized(Net, "."),
        lambda: ft.build_optimizer(Net(), "adamw8bit", lr=1e-3),
        lambda: ft.planner.why_not(Net(), batch, techniques=[ft.LoRA()]),
        lambda: ft.predict_memory(Net(), batch, techniques=[ft.LoRA()]),
    ],
    "deepspeed": [lambda: ft.ZeROStrategy(2), lambda: ft.strategy.FabricZeROStrategy(2)],
    "ao": [lambda: ft.build_optimizer(Net(), "adamw4bit", lr=1e-3)],
    "schedule-free": [lambda: ft.build_optimizer(Net(), "schedule-free", lr=1e-3)],
}}
for extra, calls in uses.items():
    for number, call in enumerate(calls):
        try:
            call()
        except ModuleNotFoundError as error:
            assert f"pip install 'lightning-fasttrain[{{extra}}]'" in str(error), error
        else:
            raise AssertionError(f"use {{number}} of {{extra}} needs nothing")
ft.make_plan(Net(), batch, seconds=0.1)
ft.planner.why_not(Net(), batch)
print(ft.__version__, ft.__file__)
"""


def test_the_wheel_trains_alone_where_no_extra_is_installed(wheel, tmp_path):
    site = tmp_path / "site"
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    version, file = run_python("-I", "-c", TRAIN, site, cwd=tmp_path).split()[-2:]
    assert version == PROJECT["version"]
    assert Path(file) == site / "lightning_fasttrain" / "__init__.py"


@pytest.mark.benchmark
def test_the_ladder_climbs_from_the_wheel(wheel, tmp_path):
    """The README's main job, as far as two rungs, by what is published alone."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    climb = "from lightning_fasttrain.cli.main import main; import lightning_fasttrain as ft, sys; print(ft.__file__)"
    options = (
        "--size",
        "nano",
        "--minutes",
        "0",
        "--turns",
        "3",
        "--rungs",
        "prefetch,micro-batches",
        "--out",
        tmp_path,
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", f"{climb}; sys.exit(main(['ladder', *sys.argv[1:]]))", *map(str, options)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(site))
    found = json.loads((tmp_path / "ladder.json").read_text())
    assert {"prefetch", "micro-batches"} <= {rung["name"] for rung in found["rungs"]}
