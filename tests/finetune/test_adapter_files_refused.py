"""Files that are damaged, hostile or for another model are refused, before any change and without running code."""

import copy
import json
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fasttrain.finetune import add_adapter_, load_adapter_, save_adapter
from tests.finetune.test_adapter_files import CONFIG, WEIGHTS, adapted, output, trained
from tests.finetune.test_base_fingerprint import altered, deeper, renamed
from tests.finetune.test_targets import bert, llama
from tests.support.nets import TinyLM, weights
from tests.support.ranks import run_code

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks


BASE = "base_model.model."


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a valid adapter for a TinyLM."""
    return save_adapter(adapted("plain")[1], tmp_path / "adapter")


@pytest.fixture
def pefts(tmp_path):
    """Return the folder of an adapter without this package's metadata."""
    model = TinyLM()
    add_adapter_(model, peft.LoraConfig(r=2), "up")
    folder = save_adapter(model, tmp_path / "pefts")
    safetensors.save_file(safetensors.load_file(folder / WEIGHTS), folder / WEIGHTS, {"format": "pt"})
    return folder


def settings(folder, **changed):
    """Write other settings, and remove their copy from the tensor file."""
    tensors = safetensors.load_file(folder / WEIGHTS)
    safetensors.save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **changed}))
    return folder


def refused(folder, message, error=ValueError, make=TinyLM, **kwargs):
    model = make()
    before = [(type(m), m.training) for m in model.modules()], {n: p.requires_grad for n, p in model.named_parameters()}
    values, own = weights(model), list(vars(model))
    with pytest.raises(error, match=message):
        load_adapter_(model, folder, **kwargs)
    after = [(type(m), m.training) for m in model.modules()], {n: p.requires_grad for n, p in model.named_parameters()}
    assert before == after
    assert list(vars(model)) == own
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def wider():
    model = TinyLM()
    for block in model.blocks:
        block.up, block.down = nn.Linear(8, 20), nn.Linear(20, 8)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deeper, "trained with another base model than TinyLM: the base model lacked 'blocks.3.down.bias', "),
        (
            lambda: TinyLM(depth=2),
            "trained with another base model than TinyLM: this model lacks 'blocks.2.down.bias', ",
        ),
        (renamed, "another base model than TinyLM: this model lacks 'blocks.0.down.bias', "),
        (altered, "another base model than TinyLM: the values differ in 'blocks.1.up.bias', "),
        (wider, "another base model than TinyLM: the values differ in 'blocks.0.down.bias', "),
        (llama, "another base model than LlamaForCausalLM: this model lacks 'blocks.0.down.bias', "),
    ],
)
def test_another_base_is_refused_naming_what_differs_first(folder, make, message):
    refused(folder, message, make=make)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deeper, "for another model: it has no tensors for 'blocks.3.up', which its settings include"),
        (lambda: TinyLM(depth=2), "for another model: TinyLM has no 'blocks.2.up'"),
        (renamed, "for another model: TinyLM has no 'blocks.0.up', 'blocks.1.up', 'blocks.2.up'"),
        (wider, r"for another model: 'blocks.0.up.lora_B.weight' is \[16, 2\], expected \[20, 2\]"),
        (bert, "for another model: BertForSequenceClassification has no 'blocks.0.up'"),
    ],
)
def test_without_a_fingerprint_names_and_shapes_are_compared(pefts, make, message, caplog):
    refused(pefts, message, make=make)
    refused(pefts, message, make=make, check_base=False)
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        load_adapter_(TinyLM(), pefts)
    assert "names and shapes are checked, the base's weights cannot be" in caplog.text


def test_check_base_false_accepts_other_weights_of_equal_shapes(folder):
    refused(folder, "or pass check_base=False if you know that it matches", make=altered)
    assert len(load_adapter_(altered(), folder, check_base=False)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("base_model.model.blocks.1.up.lora_B.weight"), "it lacks 'blocks.1.up.lora_B.weight'"),
        (
            lambda t: t.update({f"{BASE}blocks.1.up.lora_C": torch.ones(2)}),
            "does not have 'blocks.1.up.lora_C'",
        ),
        (
            lambda t: t.update({"base_model.model.other.weight": torch.ones(2)}),
            "no 'blocks.0.down.lora_A|TinyLM has no",
        ),
        (
            lambda t: t.update({"lora_A": torch.ones(2)}),
            "it has 'lora_A', but names must begin with 'base_model.model.'",
        ),
        (lambda t: t.clear(), "is not an adapter file: it is empty"),
        (
            lambda t: t.update({f"{BASE}blocks.0.up.lora_A.weight": torch.ones(2, 8, dtype=torch.int32)}),
            "'blocks.0.up.lora_A.weight' is in I32, expected torch.float32",
        ),
        (
            lambda t: [t.pop(key) for key in list(t) if "norm" not in key],
            "it has no tensors of a LORA adapter",
        ),
        (
            lambda t: t.update({f"{BASE}blocks.1.norm.weight": torch.ones(9)}),
            r"'blocks.1.norm.weight' is \[9\], expected \[8\]",
        ),
    ],
)
def test_missing_and_unexpected_tensors_are_named(folder, change, message):
    tensors = safetensors.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.save_file(tensors, folder / WEIGHTS)
    refused(folder, message)


def test_truncated_file_is_named(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for end in (0, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:end])
        refused(folder, rf"{WEIGHTS} cannot be read: it is cut short")


def test_headers_with_too_large_sizes_are_refused(folder):
    for size in (2**63, 10**12, 200 * 2**20):
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + b"{}")
        refused(folder, "cannot be read")
    header = json.dumps({"base_model.model.a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}})
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header.encode())
    refused(folder, "cannot be read")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "NEWER"}, "peft_type='NEWER': PEFT .* has no such adapter .* Install a newer PEFT"),
        ({"peft_type": 3}, "peft_type='3'"),
        ({"peft_type": None}, "peft_type='None'"),
        ({"use_new_thing": "yes"}, "has 'use_new_thing': LoraConfig of PEFT .* has no such setting. Install the PEFT"),
        ({"r": "2"}, "has 'r': '2': expected int"),
        ({"r": 0}, "PEFT cannot create it|PEFT rejects the settings"),
        ({"r": 2.5}, "has 'r': 2.5: expected int"),
        ({"r": 10**12}, "r=1000000000000 is more than 16, the size of the largest target layer"),
        ({"lora_alpha": "x"}, "has 'lora_alpha': 'x'"),
        ({"lora_alpha": 10**400}, "PEFT cannot create it|PEFT rejects"),
        ({"lora_dropout": True}, "has 'lora_dropout': True"),
        ({"lora_dropout": 3}, "PEFT cannot create it"),
        ({"target_modules": {"up": 1}}, "has 'target_modules'"),
        ({"modules_to_save": [3]}, r"has 'modules_to_save': \[3\]"),
        ({"modules_to_save": ["(a+)+$"]}, "only layer names are accepted from files"),
        ({"rank_pattern": {"(.*)*x": 2}}, "only layer names are accepted from files"),
        ({"layers_pattern": "(b+)+"}, "only layer names are accepted from files"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "it imports a module that the file names"),
        ({"layer_replication": [[0, 2]]}, "it changes the model's layers|expected"),
        ({"loftq_config": {"loftq_bits": 4}}, "its initialization changed the base weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "was initialized with init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "x" * 300}, "expected|was initialized with|characters long"),
        ({"init_lora_weights": {"a": 1}}, "has 'init_lora_weights'"),
        ({"task_type": "COOKING"}, "has 'task_type'|PEFT rejects the settings"),
        ({"use_dora": True}, "it lacks 'blocks.0.down.lora_magnitude_vector'"),
        ({"peft_type": "IA3"}, "has 'alpha_pattern'|no such setting"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "no such setting"),
    ],
)
def test_settings_are_checked_one_by_one(folder, changed, message):
    refused(settings(folder, **changed), message)


def test_disabled_settings_of_newer_versions_are_accepted(folder):
    model = TinyLM()
    newer = settings(folder, use_new_thing=False, other_config=None, peft_version="99.0", new_list=[])
    assert len(load_adapter_(model, newer)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        '{"peft_type": "LORA", "r": NaN}',
        "[" * 100_000,
        "\0\1",
        '{"a": 1e999}',
        "1" * 5000,
        "\ud800",
    ],
)
def test_settings_that_are_not_a_json_object_are_refused(folder, text):
    (folder / CONFIG).write_bytes(text.encode(errors="surrogatepass"))
    refused(folder, "cannot be read|has peft_type|was not saved with the tensors")


def test_settings_of_another_size_or_another_save_are_refused(folder):
    good = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(good + " " * (4 * 2**20))
    refused(folder, "has more than 4194304 bytes")
    (folder / CONFIG).write_text(good.replace('"lora_alpha": 3', '"lora_alpha": 30'))
    refused(
        folder,
        "was not saved with the tensors: it differs in 'lora_alpha'. Save the adapter again, or delete this file",
    )
    (folder / CONFIG).write_text(good.replace('"base_model_name_or_path": null', '"base_model_name_or_path": "here"'))
    assert len(load_adapter_(TinyLM(), folder)) == 4
    (folder / CONFIG).unlink()
    assert len(load_adapter_(TinyLM(), folder)) == 4
    settings_free = safetensors.load_file(folder / WEIGHTS)
    safetensors.save_file(settings_free, folder / WEIGHTS)
    refused(folder, f"{CONFIG}: the file does not exist", FileNotFoundError)


def test_a_fingerprint_that_cannot_be_read_is_refused(folder):
    tensors = safetensors.load_file(folder / WEIGHTS)
    for text in ("[1]", "{", '{"a": 1}', "[" * 100_000):
        safetensors.save_file(tensors, folder / WEIGHTS, {"lightning_fasttrain.base": text})
        refused(folder, "the fingerprint in .* cannot be read")
    safetensors.save_file(tensors, folder / WEIGHTS, {"lightning_fasttrain.base": json.dumps({"x" * 10**6: "a"})})
    with pytest.raises(ValueError, match="this model lacks 'xxx") as raised:
        load_adapter_(TinyLM(), folder)
    assert len(str(raised.value)) < 1000


def test_patterns_in_files_are_never_evaluated(folder):
    hang = "(([a-z0-9._]+)+)+!"
    with pytest.raises(subprocess.TimeoutExpired):  # negative control: evaluating the pattern takes too long
        code = f"import re; re.fullmatch({hang!r}, 'blocks.0.up.blocks.0.up.blocks.0.up')"
        subprocess.run([sys.executable, "-c", code], timeout=0.5)
    assert len(load_adapter_(TinyLM(), settings(folder, target_modules=hang, exclude_modules=hang))) == 4


def test_folder_without_an_adapter_is_refused(folder, tmp_path):
    refused(tmp_path / "none", "the folder does not exist locally, and nothing is downloaded", FileNotFoundError)
    refused("meta-llama/Llama-3", "nothing is downloaded", FileNotFoundError)
    refused(folder / WEIGHTS, f"an adapter is a folder with two files. Use '{folder}'")
    refused(tmp_path, f"has no {WEIGHTS}: it holds 'adapter'", FileNotFoundError)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused(folder, "adapter_model.bin is a pickle: loading a pickle can execute code, so it was not opened")
    refused(folder / "adapter_model.bin", "adapter_model.bin is a pickle")
    (folder / WEIGHTS).mkdir()
    refused(folder, "has no adapter_model.safetensors", FileNotFoundError)


def test_renamed_pickle_is_refused(folder):
    torch.save({"base_model.model.blocks.0.up.lora_A.weight": torch.ones(2, 8)}, folder / WEIGHTS)
    refused(folder, "cannot be read: it is cut short, or no safetensors file")


def test_corrupted_files_raise_a_known_error_or_load_correctly(folder):
    draw = random.Random(3)
    good = {name: (folder / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    outcomes = set()
    for name in [CONFIG] * 150 + [WEIGHTS] * 150:
        data = bytearray(good[name])
        end = min(len(data), 8 + struct.unpack("<Q", data[:8])[0]) if name == WEIGHTS else len(data)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(end)] = draw.choice(b'0123456789{}[]",:.\\nalse\xff\x00')
        (folder / name).write_bytes(bytes(data))
        try:
            load_adapter_(TinyLM(), folder, check_base=False)
            outcomes.add("loaded")
        except (ValueError, FileNotFoundError) as error:
            ours = re.search(r": .*\. .*\.$", str(error), re.DOTALL)
            outcomes.add("refused" if ours else str(error))
        (folder / name).write_bytes(good[name])
    assert outcomes == {"loaded", "refused"}


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


AUDIT = """
import json, os, sys
os.chdir(sys.path[0])  # where evil.py is
import huggingface_hub, torch, lightning_fasttrain, peft, transformers, safetensors.torch
os.environ["HF_HUB_OFFLINE"], huggingface_hub.constants.HF_HUB_OFFLINE = "0", False  # whoever would download tries to
from tests.support.nets import TinyLM
from lightning_fasttrain.finetune import load_adapter_
folders = json.loads(sys.argv[1])
load_adapter_(TinyLM(), folders.pop(0))  # what good ones import is imported
seen = []
def hook(event, args):
    bad = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pickle.", "compile", "exec",
           "os.remove", "os.rename", "os.mkdir", "shutil.", "ctypes.dlopen")
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if "libnvidia-ml" in str(args):  # torch's build for CUDA looks for a GPU
        return
    if writes or event.startswith(bad) or event == "import" and str(args[0]).partition(".")[0] == "evil":
        seen.append([event, str(args)[:200]])
sys.addaudithook(hook)
errors = []
for folder in folders:
    try:
        load_adapter_(TinyLM(), folder)
        errors.append("")
    except (ValueError, FileNotFoundError, TypeError) as error:
        errors.append(str(error))
found = {"seen": list(seen), "errors": errors, "ran": os.path.exists("ran")}
import evil  # negative control
print(json.dumps({**found, "noticed": sorted({event for event, _ in seen}), "it ran": os.path.exists("ran")}))
"""


def audited(tmp_path, folders):
    said = run_code(AUDIT, json.dumps([str(one) for one in folders]), folder=tmp_path, timeout_s=120)
    return json.loads(said.splitlines()[-1])


def test_hostile_files_run_no_code_and_open_no_other_file(folder, tmp_path):
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()")
    folders = [folder]
    hostile = {
        "named": {"auto_mapping": {"base_model_class": "run", "parent_library": "evil"}, "revision": "main"},
        "hub": {"base_model_name_or_path": "someone/model"},
        "megatron": {"megatron_config": {"hidden_size": 8}, "megatron_core": "evil"},
        "cache": {"init_lora_weights": "corda", "corda_config": {"cache_file": str(tmp_path / "payload.bin")}},
        "runtime": {"runtime_config": {"ephemeral_gpu_offload": True}},
    }
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    (tmp_path / "payload.bin").write_bytes(payload)
    for name, changed in hostile.items():
        folders.append(settings(shutil.copytree(folder, tmp_path / name), **changed))
    for name in ("adapter_model.bin", "adapter_model.pt", WEIGHTS, CONFIG):
        one = shutil.copytree(folder, tmp_path / f"pickle-{name}")
        if name not in (WEIGHTS, CONFIG):
            (one / WEIGHTS).unlink()
        (one / name).write_bytes(payload)
        folders.append(one)
    folders.append(tmp_path / "payload.bin")
    found = audited(tmp_path, folders)
    assert found["seen"] == []
    assert not found["ran"]
    assert {"import", "exec", "open"} <= set(found["noticed"])  # negative control
    assert found["it ran"]
    refusals = [
        "",
        "",
        "imports a module",
        "its initialization used data",
        "",
        "pickle",
        "pickle",
        "cut short",
        "cannot be",
    ]
    for error, expected in zip(found["errors"], [*refusals, "pickle"], strict=True):
        assert expected in error
        assert bool(expected) == bool(error)


def test_adapter_unsupported_on_quantised_layers_is_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    from lightning_fasttrain.finetune import quantize_base_

    base = llama()
    for config in (peft.LoraConfig(r=2, init_lora_weights="pissa"), peft.LoHaConfig(r=2)):
        model = copy.deepcopy(base)
        add_adapter_(model, config, ["q_proj"])
        folder = save_adapter(trained(model), tmp_path / config.peft_type.value)
        quantised = copy.deepcopy(base)
        quantize_base_(quantised)
        before = output(quantised)
        with pytest.raises(TypeError, match="which is quantised"):
            load_adapter_(quantised, folder)
        assert torch.equal(output(quantised), before)
        assert not any("lora" in name or "hada" in name for name, _ in quantised.named_modules())
