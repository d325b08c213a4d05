"""Seeded mutations of every file that the package reads: each ends in a load, or in an error that names the file.

Nothing of the file runs, no file outside of the folder is opened for writing, and memory and time are bounded. The
default suite reads 500 inputs; ``pytest -m benchmark tests/test_fuzzed_files.py`` reads 10,000 others, and with
``FUZZ_OUT=FILE.json`` writes down how they ended.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.results import Climbed
from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST, _sum, checkpoint_folder, verify_checkpoint
from lightning_fasttrain.checkpoint.newest_checkpoint import facts_of
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import versions
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import INDEX, REST
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state
from tests.support import mutations

safetensors = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX"),
]

ENOUGH, MANY = 500, 10_000
MEMORY_MIB, SECONDS = 300, 5
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LADDER = Path(__file__).parents[1] / "examples" / "results" / "ladder_cpu.json"


class Reader(NamedTuple):
    kind: str  # the folder with the good files
    file: str  # the one that is mutated
    ways: tuple
    read: object
    share: int = 10  # of the inputs


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wide_layers():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


def load_shards(folder):
    model = layers()
    ft.strategy.load_sharded_(folder / "a.ckpt", model, {"o": torch.optim.Adam(model.parameters())})


def load_adapter(folder):
    ft.finetune.load_adapter_(layers(), folder / "a.ckpt", check_base=False)


def load_four_bits(folder):
    """As a Trainer does: read the archive, and load it into a quantised model."""
    model = wide_layers()
    ft.finetune.quantize_base_(model)
    path = folder / "a.ckpt"
    state = ft.checkpoint.AtomicCheckpointIO().load_checkpoint(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        torchs = "in loading state_dict" in str(error) or "state_dict to be dict-like" in str(error)
        raise (ValueError(f"{path}: the weights do not fit. See {error}.") if torchs else error) from error


def consolidate(folder):
    ft.strategy.consolidate(folder / "a.ckpt", folder.parent / "out" / "weights.safetensors")


def full_checkpoint(folder):
    path = folder / "a.ckpt"
    manifest = json.loads((path / MANIFEST).read_text())
    if (path / INDEX).is_file():
        manifest["files"][INDEX] = _sum(path / INDEX)  # so that it is read rather than found to be changed
        (path / MANIFEST).write_text(json.dumps(manifest))
    ft.strategy.full_checkpoint(path)


def load_atomic(path):
    ft.checkpoint.AtomicCheckpointIO(True).load_checkpoint(path)


def read_ladder(folder):
    Climbed.read(folder / "a.ckpt")


READERS = {
    "AtomicCheckpointIO": Reader("archive", "", mutations.ARCHIVES,
                                 lambda folder: load_atomic(folder / "a.ckpt"), 30),
    "newest_checkpoint": Reader("archive", "", mutations.ARCHIVES, ft.newest_checkpoint),
    "facts of a file": Reader("archive", "", mutations.ARCHIVES, lambda folder: facts_of(folder / "a.ckpt")),
    "verify_checkpoint": Reader("whole", MANIFEST, mutations.JSON, lambda folder: verify_checkpoint(folder / "a.ckpt")),
    "newest folder": Reader("whole", MANIFEST, mutations.JSON, ft.newest_checkpoint),
    "facts of a folder": Reader("whole", MANIFEST, mutations.JSON, lambda folder: facts_of(folder / "a.ckpt")),
    "rest of shards": Reader("shards", REST, mutations.ARCHIVES, load_shards),
    "shard": Reader("shards", "__0_0.distcp", mutations.BYTES, load_shards),
    "index of shards": Reader("shards", INDEX, mutations.JSON, load_shards, 30),
    "full_checkpoint": Reader("shards", INDEX, mutations.JSON, full_checkpoint),
    "model of ZeRO": Reader("zero", "checkpoint/mp_rank_00_model_states.pt", mutations.ARCHIVES, consolidate),
    "shard of ZeRO": Reader("zero", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt", mutations.ARCHIVES,
                            consolidate),
    "adapter": Reader("adapter", WEIGHTS, mutations.SAFETENSORS, load_adapter, 30),
    "settings of an adapter": Reader("adapter", CONFIG, mutations.JSON, load_adapter, 30),
    "load_quantized": Reader("model", "model.safetensors", mutations.SAFETENSORS,
                             lambda folder: ft.finetune.load_quantized(layers, folder / "a.ckpt", device="cpu")),
    "index of load_quantized": Reader("index", "model.safetensors.index.json", mutations.JSON,
                             lambda folder: ft.finetune.load_quantized(layers, folder / "a.ckpt", device="cpu")),
    "four bits": Reader("four bits", "", mutations.ARCHIVES, load_four_bits, 20),
    "ladder": Reader("ladder", "", mutations.JSON, read_ladder),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A good thing of each kind, under the same name."""
    folder, model = tmp_path_factory.mktemp("good"), layers()
    for kind in ("archive", "zero/a.ckpt/checkpoint", "model/a.ckpt", "index/a.ckpt", "four bits", "ladder"):
        (folder / kind).mkdir(parents=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 3,
             "callbacks": {"a": {"best": [1.5, None, "x"]}}, "pytorch-lightning_version": "2.6.6"}  # fmt: skip
    ft.checkpoint.AtomicCheckpointIO().save_checkpoint(state, folder / "archive" / "a.ckpt")
    ft.strategy.save_sharded(
        folder / "shards" / "a.ckpt", model.state_dict(), {"o": named_state(model, optimizer)}, {"global_step": 3}
    )
    write_zero(folder / "zero" / "a.ckpt" / "checkpoint")
    adapted = layers()
    ft.finetune.add_adapter_(adapted, peft.LoraConfig(r=2), "0")
    ft.finetune.save_adapter(adapted, folder / "adapter" / "a.ckpt")
    for kind, name in (("model", "model.safetensors"), ("index", "part.safetensors")):
        safetensors.save_file(model.state_dict(), folder / kind / "a.ckpt" / name)
    listed = {"metadata": {"total_size": 100}, "weight_map": dict.fromkeys(model.state_dict(), "part.safetensors")}
    (folder / "index" / "a.ckpt" / "model.safetensors.index.json").write_text(json.dumps(listed))
    quantized = wide_layers()
    ft.finetune.quantize_base_(quantized)
    ft.checkpoint.AtomicCheckpointIO().save_checkpoint(dict(quantized.state_dict()), folder / "four bits" / "a.ckpt")
    shutil.copy(LADDER, folder / "ladder" / "a.ckpt")
    with checkpoint_folder(folder / "whole" / "a.ckpt", about={"step": 3, "run": "a", "saved_at": 1.0}) as whole:
        (whole / "weights").write_bytes(bytes(1000))
    return folder


def write_zero(folder):
    """As DeepSpeed writes stage 1 with one rank."""
    shapes = [{"weight": torch.Size([2, 2]), "bias": torch.Size([2])}]
    module = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    torch.save({"module": module, "param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
    shard = {"zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [torch.arange(6.0)]}
    torch.save({"optimizer_state_dict": shard}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


class Watch:
    """Python's audit events of one read: code that a file could have run, and files opened for writing elsewhere."""

    RUNS = (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "subprocess.Popen",
        "socket.connect",
        "pickle.find_class",
    )
    CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree")

    def __init__(self):
        self.allowed = self.seen = None
        sys.addaudithook(self)  # it cannot be removed, and does nothing outside of `watching`

    def __call__(self, event, arguments):
        if self.seen is None:
            return
        if event in self.RUNS:
            self.seen.append(f"{event}{arguments}")
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in self.CHANGES) and isinstance(arguments[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(arguments[0])).absolute()
            if not path.is_relative_to(self.allowed):
                self.seen.append(f"{event}{arguments}")

    @contextlib.contextmanager
    def watching(self, allowed):
        self.allowed, self.seen = allowed, []
        try:
            yield self.seen
        finally:
            self.seen = None


@pytest.fixture(scope="module")
def watch():
    return Watch()


class Hangs(BaseException):
    """No reader may take it for damage."""


def hang(*_):
    raise Hangs


def ending(read, folder, file):
    """How reading ended: with ``loaded``, ``refused``, or a complaint."""
    began, outer = time.process_time(), signal.signal(signal.SIGALRM, hang)
    signal.alarm(4 * SECONDS)
    try:
        read(folder)
        ended = "loaded"
    except (ValueError, OSError) as error:
        text = str(error)
        ours = re.search(r": .*\. .*\.$", text, re.DOTALL)  # what, why, and a way out
        named = str(folder) in text or file in text
        ended = "refused" if ours and named else f"{'not in our words' if not ours else 'names no file'}: {error!r}"
    except (Exception, Hangs) as error:
        ended = f"another error: {error!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, outer)
    return ended if time.process_time() - began < SECONDS else "it took too long"


def spoil(folder, file, ways, outside, draw):
    """Mutate the good file; what a mutation of its structure cannot read any more is left to those of bytes."""
    path = folder / "a.ckpt" / file if file else folder / "a.ckpt"
    if draw.random() < 0.05:
        mutations.at_path(path, outside, draw)
        return
    data = draw.choice(ways)(path.read_bytes(), draw)
    if draw.random() < 0.2:
        data = draw.choice(mutations.BYTES[:4])(data, draw)
    path.write_bytes(data)


def fuzz(name, good, place, watch, numbers):
    """Read one input for each number, and return what went wrong, by number, and how often it was refused."""
    reader, wrong, refused = READERS[name], {}, 0
    here, outside, mark = place / "here", place / "outside", place / "ran"
    outside.mkdir()
    shutil.copy(good / "model" / "a.ckpt" / "model.safetensors", outside / "secret")
    os.environ["FUZZ_MARK"] = str(mark)
    for number in numbers:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good / reader.kind, here)
        spoil(here, reader.file, reader.ways, outside, random.Random(f"{name} {number}"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with watch.watching(place) as seen:
            ended = ending(reader.read, here, reader.file or "a.ckpt")
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        refused += ended == "refused"
        if ended not in ("loaded", "refused"):
            wrong[number] = ended
        if taken > MEMORY_MIB:
            wrong[number] = f"it took {taken:.0f} MiB"
        if seen or mark.exists() or sorted(p.name for p in outside.iterdir()) != ["secret"]:
            wrong[number] = f"it did something else: {seen}"
            mark.unlink(missing_ok=True)
    return wrong, refused


def numbers_of(name, total):
    shares = sum(reader.share for reader in READERS.values())
    return -(-total * READERS[name].share // shares)


@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_loaded_or_refused_by_name_and_does_nothing_else(name, good, tmp_path, watch):
    count = numbers_of(name, ENOUGH)
    wrong, _ = fuzz(name, good, tmp_path, watch, range(count))
    assert wrong == {}


@pytest.mark.parametrize("name", READERS)
def test_the_file_before_its_mutation_is_loaded(name, good, tmp_path):
    """The control: each reader can read."""
    shutil.copytree(good / READERS[name].kind, tmp_path / "here")
    READERS[name].read(tmp_path / "here")


def test_there_are_enough_inputs():
    assert sum(numbers_of(name, ENOUGH) for name in READERS) >= ENOUGH


def test_the_watch_sees_code_that_a_pickle_runs(tmp_path, watch):
    """The control: what is refused above is harmful."""
    torch.save({"a": mutations.Ran(tmp_path / "ran")}, tmp_path / "a.ckpt")
    with watch.watching(tmp_path / "elsewhere") as seen:
        torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()
    assert any("pickle.find_class" in event for event in seen)
    assert any(event.startswith("open") for event in seen)


@pytest.mark.benchmark
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_mutated_files(name, good, tmp_path, watch, capsys):
    count = numbers_of(name, MANY)
    with warnings.catch_warnings(action="ignore"):
        wrong, refused = fuzz(name, good, tmp_path, watch, range(1000, 1000 + count))
    with capsys.disabled():
        print(f"\n{name}: {count} inputs, {refused} refused, {len(wrong)} wrong")
    if "FUZZ_OUT" in os.environ:
        write_down(Path(os.environ["FUZZ_OUT"]), {"reader": name, "inputs": count, "refused": refused, "wrong": wrong})
    assert wrong == {}


def write_down(out, row):
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    command = "FUZZ_OUT=FILE pytest -m benchmark tests/test_fuzzed_files.py"
    about = {"command": command, "date": date.today().isoformat(), "versions": versions()}
    rows = [other for other in rows if other["reader"] != row["reader"]]
    write_atomic(out, json.dumps({**about, "rows": [*rows, row]}, indent=1) + "\n")
