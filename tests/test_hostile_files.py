"""Files that are damaged, or made to harm: each ends in an error of ours or a right load, and nothing else happens.

A case is a way to read, and what was done to a good file before. It may run nothing, change nothing on the disk beside
what it is to write, and take no more than a bounded amount of memory and of the processor's time.
"""

import io
import json
import os
import pickle
import re
import resource
import shutil
import struct
import time
import zipfile
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST, _sum, checkpoint_folder, verify_checkpoint
from lightning_fasttrain.core.safe_load import CorruptCheckpoint
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import INDEX, REST
from lightning_fasttrain.strategy.fsdp2.sharded_optimizer import named_state

safetensors = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft")

MEMORY_MIB, SECONDS = 300, 20
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX"),
]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # a checkpoint of an adapter names the base that it belongs to
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, batch):
        return self.net(batch)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(*callbacks, steps=2):
    return L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip


def rows():
    return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)


class Ran:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One good thing of each kind."""
    folder = tmp_path_factory.mktemp("good")
    for name, callbacks in (("atomic", [ft.AtomicCheckpoints()]), ("exact", [ft.ExactResume()]),
                            ("lora", [ft.LoRA(rank=2, targets="0")])):  # fmt: skip
        t = trainer(*callbacks, steps=1)
        t.fit(Net(), rows())
        (folder / name).mkdir()
        t.save_checkpoint(folder / name / "a.ckpt")
    net = Net()
    ft.strategy.save_sharded(folder / "shards" / "a.ckpt", net.state_dict(), _optimizer(net), {"global_step": 3})
    (folder / "zero" / "a.ckpt" / "checkpoint").mkdir(parents=True)
    _write_zero(folder / "zero" / "a.ckpt" / "checkpoint")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), "0")
    ft.finetune.save_adapter(model, folder / "adapter" / "a.ckpt")
    (folder / "model" / "a.ckpt").mkdir(parents=True)
    safetensors.save_file(_linear().state_dict(), folder / "model" / "a.ckpt" / "model.safetensors")
    with checkpoint_folder(folder / "whole" / "a.ckpt") as whole:
        (whole / "weights").write_bytes(bytes(1000))
    return folder


def _linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def _optimizer(net):
    optimizer = net.configure_optimizers()
    net.net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"o": named_state(net, optimizer)}


def _write_zero(folder):
    """As DeepSpeed writes stage 1 with one rank."""
    flat = torch.arange(6.0)
    shapes = [{"weight": torch.Size([2, 2]), "bias": torch.Size([2])}]
    module = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    torch.save({"module": module, "param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
    piece = {"zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [flat]}
    torch.save({"optimizer_state_dict": piece}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def resume(callback):
    return lambda path: trainer(callback).fit(Net(), rows(), ckpt_path=path)


def load_shards(path):
    net = Net()
    optimizer = net.configure_optimizers()
    return ft.strategy.load_sharded_(path, net, {"o": optimizer})


def load_adapter(path):
    return ft.finetune.load_adapter_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), path, check_base=False)


def load_quantized(path):
    pytest.importorskip("bitsandbytes")
    return ft.finetune.load_quantized(_linear, path, device="cpu")


# What reads: the good thing it is given, and which file of it is spoiled.
FILES = {
    "newest_checkpoint": ("atomic", "", lambda path: ft.newest_checkpoint(path.parent)),
    "verify_checkpoint": ("atomic", "", verify_checkpoint),
    "AtomicCheckpointIO": ("atomic", "", lambda path: ft.checkpoint.AtomicCheckpointIO().load_checkpoint(path)),
    "fit, AtomicCheckpoints": ("atomic", "", lambda path: resume(ft.AtomicCheckpoints())(path)),
    "fit, ExactResume": ("exact", "", lambda path: resume(ft.ExactResume())(path)),
    "fit, LoRA": ("lora", "", lambda path: resume(ft.LoRA(rank=2, targets="0"))(path)),
    "rest of shards": ("shards", REST, load_shards),
    "piece of shards": ("shards", "__0_0.distcp", load_shards),
    "index of shards": ("shards", INDEX, load_shards),
    "full_checkpoint": ("shards", INDEX, ft.strategy.full_checkpoint),
    "manifest": ("whole", MANIFEST, verify_checkpoint),
    "ZeRO's model": ("zero", "checkpoint/mp_rank_00_model_states.pt",
                     lambda path: ft.strategy.consolidate(path, path.parent.parent / "out.safetensors")),
    "consolidate": ("zero", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                    lambda path: ft.strategy.consolidate(path, path.parent.parent / "out.safetensors")),
    "load_adapter_": ("adapter", WEIGHTS, load_adapter),
    "adapter's settings": ("adapter", CONFIG, load_adapter),
    "load_quantized": ("model", "model.safetensors", load_quantized),
}  # fmt: skip


def archive(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def zipped(pickled, compress=zipfile.ZIP_STORED, **more):
    """An archive as torch.save's, around a pickle that it would not write."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compress) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        for name, data in more.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def header(entries, data=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape, dtype="F32", size=None):
    size = 4 if size is None else size
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + (10**11).to_bytes(6, "little") + b"\x85R."
BUILD_ON_CLASS = b"\x80\x04cpathlib\nPosixPath\n}(X\x06\x00\x00\x00existsX\x01\x00\x00\x00xu\x86b."
CALLS_SYSTEM = b"cposix\nsystem\n(X\x08\x00\x00\x00touch rantR."
DEEP = b"[" * 100_000
LONG_NAME = "base_model.model." + ".".join(["a"] * 200_000) + ".lora_A.weight"

# What is done to a file: a function of what was in it, and of where something that runs would leave its mark.
DAMAGES = {
    "empty": lambda data, mark: b"",
    "half": lambda data, mark: data[: len(data) // 2],
    "one byte short": lambda data, mark: data[:-1],
    "seven bytes": lambda data, mark: data[:7],
    "zeros": lambda data, mark: bytes(len(data)),
    "first block zero": lambda data, mark: bytes(512) + data[512:],
    "a page": lambda data, mark: b"<html><body>502 Bad Gateway</body></html>",
    "its beginning again": lambda data, mark: data + data[:100],
    "a flip early": lambda data, mark: bytes([*data[:30], data[30] ^ 0x41, *data[31:]]),
    "a pickle that runs": lambda data, mark: pickle.dumps(Ran(mark)),
    "an archive that runs": lambda data, mark: archive({"state_dict": {}, "rest": Ran(mark), "module": Ran(mark)}),
    "something else": lambda data, mark: archive([1, 2, 3]),
    "deep": lambda data, mark: DEEP,
    "not text": lambda data, mark: b"\xff\xfe\x00\xd8",
}
OF_ARCHIVES = {
    "a bytearray": lambda data, mark: zipped(BYTEARRAY),
    "a compressed bomb": lambda data, mark: zipped(b"\x80\x02}.", zipfile.ZIP_DEFLATED, x=bytes(2**26)),
    "BUILD on a class": lambda data, mark: zipped(BUILD_ON_CLASS),
    "a call": lambda data, mark: zipped(b"\x80\x02" + CALLS_SYSTEM),
    "no pickle": lambda data, mark: zipped(b""),
    "nested": lambda data, mark: zipped(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
    "wrong parts": lambda data, mark: archive(
        {"rest": 3, "optimizers": [], "values": {}, "module": 1, "state_dict": 2}
    ),
}
OF_INDICES = {
    "deep entries": lambda data, mark: b'{"model.net.weight": ' + DEEP,
    "a tensor of a terabyte": lambda data, mark: data.replace(b'"size": [', b'"size": [1099511627776, '),
    "a shard of a terabyte": lambda data, mark: data.replace(b", [[[", b", [[[1099511627776, "),
    "another folder": lambda data, mark: data.replace(b"__0_0.distcp", b"../../../etc"),
    "an absolute name": lambda data, mark: data.replace(b"__0_0.distcp", b"/etc/passwd0"),
    "a missing file": lambda data, mark: data.replace(b"__0_0.distcp", b"__0_1.distcp"),
    "another type": lambda data, mark: data.replace(b"torch.float32", b"torch.float64"),
    "no type": lambda data, mark: data.replace(b"torch.float32", b"os.system"),
    "a name twice": lambda data, mark: data[:-1] + b", " + data[1:],
}
OF_SAFETENSORS = {
    "a header of 2^62": lambda data, mark: struct.pack("<Q", 2**62) + b"{}",
    "a header of 200 MiB": lambda data, mark: struct.pack("<Q", 200 * 2**20) + b"{}",
    "a tensor of a terabyte": lambda data, mark: header({"0.weight": tensor([2**38], size=2**40)}),
    "sizes that overflow": lambda data, mark: header({"0.weight": tensor([2**32, 2**32, 2**32])}, bytes(4)),
    "200,000 axes": lambda data, mark: header({"base_model.model.0.lora_A.weight": tensor([1] * 200_000)}, bytes(4)),
    "a name of 200,000 parts": lambda data, mark: header({LONG_NAME: tensor([1])}, bytes(4)),
    "a deep header": lambda data, mark: header(b'{"a":' * 50_000),
    "a name twice": lambda data, mark: header(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":1}', bytes(4)),
    "another type": lambda data, mark: header({"base_model.model.0.lora_A.weight": tensor([4], "C64", 32)}, bytes(32)),
    "no shapes": lambda data, mark: header({"0.weight": 3}),
    "a list": lambda data, mark: header([1, 2]),
    "NaN": lambda data, mark: data[: 8 + struct.unpack("<Q", data[:8])[0]] + b"\xff" * (4 * 100),
}
OF_SETTINGS = {
    "rank of a million": lambda data, mark: data.replace(b'"r": 2', b'"r": 1000000'),
    "rank of three millions, DoRA": lambda data, mark: data.replace(b'"r": 2', b'"r": 3000000').replace(
        b'"use_dora": false', b'"use_dora": true'
    ),
    "ranks by pattern": lambda data, mark: data.replace(b'"rank_pattern": {}', b'"rank_pattern": {"0": 3000000}'),
    "twice": lambda data, mark: data.replace(b'"r": 2', b'"r": 2, "r": 3000000'),
    "a pattern": lambda data, mark: data.replace(b'"modules_to_save": null', b'"modules_to_save": ["(a+)+$"]'),
    "another kind": lambda data, mark: data.replace(b'"LORA"', b'"LOHA"').replace(b'"r": 2', b'"r": 3000000'),
    "an import": lambda data, mark: data.replace(b'"megatron_config": null', b'"megatron_config": {"a": 1}'),
}  # fmt: skip


def damages(entry):
    """What is done to the file that this entry reads, by name."""
    kind, part, _ = FILES[entry]
    special = {
        INDEX: OF_INDICES,
        CONFIG: OF_SETTINGS,
        WEIGHTS: OF_SAFETENSORS,
        "model.safetensors": OF_SAFETENSORS,
        MANIFEST: {},
        "__0_0.distcp": {},
    }
    return {**DAMAGES, **special.get(part, OF_ARCHIVES)}


def listing(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def ending(read, path):
    """How reading ended: with ``loaded``, an error of ours, or a complaint about another."""
    began = time.process_time()
    try:
        read(path)
        ended = "loaded"
    except (ValueError, OSError) as error:
        ours = re.search(r": .*\. .*\.$", str(error), re.DOTALL)  # what, why, and a way out
        ended = "refused" if ours else f"not in our words: {error!r}"
    except Exception as error:
        ended = f"another error: {error!r}"
    return ended if time.process_time() - began < SECONDS else "it took too long"


@pytest.mark.parametrize("entry", FILES)
def test_it_ends_in_an_error_of_ours_or_a_right_load_and_nothing_else_happens(entry, good, tmp_path):
    kind, part, read = FILES[entry]
    mark, exists, wrong, refused = tmp_path / "ran", Path.exists, {}, 0
    before_all = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, damage in damages(entry).items():
        here = tmp_path / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good / kind, here)
        path = here / "a.ckpt"
        spoiled = path / part if part else path
        spoiled.write_bytes(damage(spoiled.read_bytes(), mark))
        if entry == "full_checkpoint":
            _sign(path)  # so that it is read rather than found to be changed
        before = listing(here)
        ended = ending(read, path)
        refused += ended == "refused"
        if ended not in ("loaded", "refused"):
            wrong[name] = ended
        if listing(here) != before or mark.exists() or Path.exists is not exists:
            wrong[name] = "something else happened"
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_all) / 1024
    assert wrong == {}
    assert refused >= 8
    assert taken < MEMORY_MIB


def test_there_are_enough_cases():
    assert sum(len(damages(entry)) for entry in FILES) > 200


def _sign(path):
    files = path / MANIFEST
    manifest = json.loads(files.read_text())
    manifest["files"] = {name: _sum(path / name) for name in manifest["files"]}
    files.write_text(json.dumps(manifest))


@pytest.mark.parametrize("entry", FILES)
def test_the_good_file_loads(entry, good, tmp_path):
    """The control: each reader can read."""
    kind, _, read = FILES[entry]
    shutil.copytree(good / kind, tmp_path / "here")
    read(tmp_path / "here" / "a.ckpt")


@pytest.mark.parametrize("entry", FILES)
@pytest.mark.parametrize("thing", ["a folder", "a dangling link", "nothing"])
def test_what_is_no_file_is_told(entry, thing, good, tmp_path):
    kind, part, read = FILES[entry]
    shutil.copytree(good / kind, tmp_path / "here")
    path = tmp_path / "here" / "a.ckpt" / part if part else tmp_path / "here" / "a.ckpt"
    path.unlink()
    if thing == "a folder":
        path.mkdir()
    elif thing == "a dangling link":
        path.symlink_to(tmp_path / "nowhere")
    if (entry, thing) == ("consolidate", "nothing"):
        pytest.skip("at stage 0 there is no such file")
    if entry == "newest_checkpoint" and thing != "a folder":
        assert read(tmp_path / "here" / "a.ckpt") is None
    elif entry == "adapter's settings":  # of which there is a copy beside the tensors
        read(tmp_path / "here" / "a.ckpt")
    else:
        with pytest.raises((CorruptCheckpoint, ValueError, FileNotFoundError), match=r"\. "):
            read(tmp_path / "here" / "a.ckpt")


def test_a_pickle_that_would_run_does_run_where_nobody_looks(tmp_path):
    """The control: what is refused above is harmful."""
    torch.save({"a": Ran(tmp_path / "ran")}, tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("technique", [ft.AtomicCheckpoints, ft.ExactResume, lambda: ft.LoRA(rank=2, targets="0")])
@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/a.ckpt", "https://127.0.0.1:9/a.ckpt", "zip://a.ckpt::http://127.0.0.1:9/a"]
)
def test_a_checkpoint_from_elsewhere_is_refused_before_it_is_fetched(technique, address):
    with pytest.raises(ValueError, match="files are read from this machine only. Download it first"):
        trainer(technique()).fit(Net(), rows(), ckpt_path=address)
    with pytest.raises(ValueError, match="files are read from this machine only. Download it first"):
        trainer(technique()).predict(Net(), rows(), ckpt_path=address)
