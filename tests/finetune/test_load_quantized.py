import json
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fasttrain.finetune import load_quantized, quantize_base_
from lightning_fasttrain.finetune.quantized.load_quantized import INDEX, find_tensors
from lightning_fasttrain.finetune.quantized.quantized_layer import KINDS
from tests.support.nets import ShallowLM, lm_batches
from tests.support.ranks import run_code

each_kind = pytest.mark.parametrize("kind", KINDS)


def llama(tied=False):
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
        tie_word_embeddings=tied,
    )


class Odd(nn.Module):
    """A model with biases, a tied pair, a buffer that is saved and one that is not."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(width) / width, persistent=False)

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def saved(model, path):
    save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path


@pytest.fixture
def odd(tmp_path):
    torch.manual_seed(0)
    model = Odd()
    saved(model, tmp_path / "odd.safetensors")
    return model, tmp_path / "odd.safetensors"


def same(a, b):
    a, b = ({**dict(m.state_dict()), **dict(m.named_buffers())} for m in (a, b))
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


# --- the same model


@each_kind
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_shards_equals_quantising_the_loaded_model(kind, tied, dtype, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(llama(tied)).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / INDEX).exists()
    model = load_quantized(lambda: LlamaForCausalLM(llama(tied)), tmp_path, kind)
    reference = LlamaForCausalLM.from_pretrained(tmp_path).train()
    quantize_base_(reference, kind)
    assert same(reference, model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    ids = torch.arange(7)[None]
    assert torch.equal(reference(ids).logits, model(ids).logits)


def test_one_file_several_files_and_a_folder_load(odd, tmp_path):
    model, file = odd
    state = {name: value.clone() for name, value in model.state_dict().items()}
    half = {name for name in state if "layers" in name}
    (tmp_path / "folder").mkdir()
    save_file({n: v for n, v in state.items() if n in half}, tmp_path / "a.safetensors")
    save_file({n: v for n, v in state.items() if n not in half}, tmp_path / "b.safetensors")
    save_file(state, tmp_path / "folder" / "model.safetensors")
    quantize_base_(model)
    for files in (file, str(file), [tmp_path / "b.safetensors", tmp_path / "a.safetensors"], tmp_path / "folder"):
        assert same(model, load_quantized(Odd, files))


def test_settings_equal_those_of_quantize_base(odd):
    model, file = odd
    settings = {"double_quant": False, "compute_dtype": torch.bfloat16, "skip": "layers.1"}
    quantize_base_(model, "fp4", **settings)
    loaded = load_quantized(Odd, file, "fp4", **settings)
    assert same(model, loaded)
    assert loaded.layers[0].compute_dtype is loaded.layers[0].bias.dtype is torch.bfloat16
    assert type(loaded.layers[1]) is nn.Linear


def test_dtype_is_applied_before_quantising(odd):
    model, file = odd
    loaded = load_quantized(Odd, file, dtype=torch.bfloat16)
    assert loaded.norm.weight.dtype is loaded.embed.weight.dtype is torch.bfloat16
    assert loaded.norm.num_batches_tracked.dtype is torch.long
    quantize_base_(model.to(torch.bfloat16))
    assert torch.equal(model.layers[0].weight, loaded.layers[0].weight)


def test_tied_weights_may_be_stored_once(odd, tmp_path):
    model, _ = odd
    state = {n: v.clone() for n, v in model.state_dict().items() if n != "embed.weight"}
    save_file(state, tmp_path / "one.safetensors")
    loaded = load_quantized(Odd, tmp_path / "one.safetensors")
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.embed.weight, model.embed.weight)


def test_shared_parameter_stays_shared():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(4, 4))
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.a.weight, self.b.weight = weight, weight

    from lightning_fasttrain.finetune.quantized.load_quantized import _build_empty

    model = _build_empty(Shared)
    assert model.a.weight is model.b.weight
    assert model.a.weight.is_meta


def test_loaded_model_trains(tmp_path):
    torch.manual_seed(0)
    module = load_quantized(ShallowLM, saved(ShallowLM(), tmp_path / "lm.safetensors"))
    optimizer = module.configure_optimizers()
    for batch in lm_batches(3):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    assert module.embed.weight.grad is not None
    assert module.blocks[0].up.weight.grad is None


# --- memory

MEASURE = """
import ctypes, sys, threading, torch
from torch import nn
from lightning_fasttrain.finetune import load_quantized, quantize_base_
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: the C library gives back at once what is freed
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
def make():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)], nn.Linear(1024, 2))
quantize_base_(nn.Sequential(nn.Linear(64, 64)))  # what the first use of a library takes is not the model's
torch.zeros(2**22).sum()
def peak(make_quantized):
    before, seen, done = anonymous(), [], threading.Event()
    def watch():
        while not done.wait(0.0005):
            seen.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = make_quantized()
    done.set()
    watcher.join()
    return max(seen) - before
def make_whole():
    model = make()
    quantize_base_(model)
    return model
print(peak(lambda: load_quantized(make, sys.argv[1])), peak(make_whole))
"""


def test_full_precision_model_is_never_completely_in_memory(tmp_path):
    layers = {f"{i}.weight": torch.randn(1024, 1024) for i in range(16)}
    head = {"16.weight": torch.zeros(2, 1024), "16.bias": torch.zeros(2)}
    save_file({**layers, **head}, tmp_path / "model.safetensors")
    one = 1024 * 1024 * 4 / 2**20  # MiB
    whole, quantised = 16 * one, 16 * one * 4.127 / 32
    said = run_code(MEASURE, tmp_path / "model.safetensors", folder=tmp_path, timeout_s=120)
    streamed, made_whole = map(float, said.splitlines()[-1].split())
    assert made_whole > whole  # the measurement detects a full-precision model
    assert quantised < streamed < quantised + 5 * one < whole / 2


def test_building_takes_no_memory_and_does_not_affect_other_threads():
    from lightning_fasttrain.finetune.quantized.load_quantized import _build_empty

    others, ready, go = [], threading.Event(), threading.Event()

    def other():
        ready.wait()
        others.append(nn.Linear(4, 4))
        go.set()

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.big = nn.Linear(10**6, 10**6)  # four terabytes if allocated
            ready.set()
            go.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match="alloc"):
        _build_empty(Slow)
    ready.set()
    thread.join()
    assert not others[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


# --- refusals


def refusal(kind, *arguments, **settings):
    with pytest.raises(kind) as error:
        load_quantized(*arguments, **settings)
    return str(error.value)


def test_mismatched_names_and_shapes_are_named_before_reading(odd, tmp_path):
    model, _ = odd
    state = {n: v.clone() for n, v in model.state_dict().items() if n != "layers.1.weight"}
    state["layers.7.weight"], state["norm.bias"] = torch.zeros(3), torch.zeros(2)
    save_file(state, tmp_path / "other.safetensors")
    message = refusal(ValueError, Odd, tmp_path / "other.safetensors")
    assert "missing in the files: layers.1.weight;" in message
    assert "unknown to the model: layers.7.weight;" in message
    assert "norm.bias is [2] in the file and [64] in the model" in message


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file_is_refused(odd, keep):
    _, file = odd
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} cannot be read" in refusal(ValueError, Odd, file)


def test_missing_and_invalid_files_are_refused(tmp_path):
    assert "no such file" in refusal(FileNotFoundError, Odd, tmp_path / "none.safetensors")
    assert "model.safetensors" in refusal(FileNotFoundError, Odd, tmp_path)
    assert "no such file" in refusal(FileNotFoundError, Odd, tmp_path / "x.index.json")
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04\x95")
    assert "no safetensors file" in refusal(ValueError, Odd, tmp_path / "pickle.safetensors")


def with_index(folder, names):
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize(
    "file", ["../odd.safetensors", "/etc/passwd", "link.safetensors", "a/b.safetensors", "odd.bin"]
)
def test_index_with_a_path_outside_its_folder_is_refused(odd, tmp_path, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(tmp_path / "odd.safetensors")
    assert "Do not use this model" in refusal(ValueError, Odd, with_index(folder, {"head.weight": file}))


def test_links_in_hugging_faces_cache_are_followed(odd, tmp_path):
    model, file = odd
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    file.rename(blobs / "0123")
    (snapshot / "model-1.safetensors").symlink_to(blobs / "0123")
    with_index(snapshot, dict.fromkeys(model.state_dict(), "model-1.safetensors"))
    quantize_base_(model)
    assert same(model, load_quantized(Odd, snapshot))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 10**5])
def test_invalid_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert "not an index of shards" in refusal(ValueError, Odd, tmp_path)


def test_index_with_missing_tensors_is_refused(odd, tmp_path):
    with_index(tmp_path, {"more": "odd.safetensors"})
    assert "names more in odd.safetensors" in refusal(ValueError, Odd, tmp_path)


def test_tensor_in_two_files_is_refused(odd, tmp_path):
    _, file = odd
    assert "only one can be loaded" in refusal(ValueError, Odd, [file, file])


def test_non_modules_and_meta_buffers_are_refused(odd):
    _, file = odd

    def on_meta():
        with torch.device("meta"):
            return Odd()

    assert "buffer scale is on the meta device" in refusal(ValueError, on_meta, file)
    assert "expected an nn.Module, got int" in refusal(TypeError, lambda: 3, file)
    with pytest.raises(ZeroDivisionError):
        load_quantized(lambda: 1 / 0, file)
    assert not nn.Linear(2, 2).weight.is_meta


def test_dtypes_that_cannot_be_quantised_are_refused(odd, tmp_path):
    model, file = odd
    saved(model.double(), file)
    assert "Give dtype=" in refusal(ValueError, Odd, file)
    assert load_quantized(Odd, file, dtype=torch.float32).layers[0].weight.dtype is torch.uint8
    assert "dtype=torch.int8" in refusal(ValueError, Odd, file, dtype=torch.int8)
    assert "nf3" in refusal(ValueError, Odd, file, "nf3")


def test_missing_packages_are_named(odd, monkeypatch):
    _, file = odd
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "lightning-fasttrain[finetune]" in refusal(ModuleNotFoundError, Odd, file)


def test_listing_tensors_reads_only_headers(odd):
    model, file = odd
    found = find_tensors(file)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()
    }
