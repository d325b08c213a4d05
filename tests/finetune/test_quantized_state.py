import copy
import io
import json
import pickle

import lightning as L
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from lightning_fasttrain.finetune import QuantizedBase, dequantized_weight, keep_quantized_, quantize_base_
from lightning_fasttrain.finetune.quantized.quantized_layer import KINDS, quantization_of
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_code

HOW = [("nf4", True), ("nf4", False), ("fp4", True), ("int8", True)]
each_way = pytest.mark.parametrize(("kind", "double_quant"), HOW, ids=lambda value: str(value))
each_kind = pytest.mark.parametrize("kind", KINDS)


def net(seed=0, inputs=128, quantized=True, kind="nf4", double_quant=True):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(inputs, 96), nn.LayerNorm(96), nn.Linear(96, 5))
    if quantized:
        quantize_base_(made, kind, double_quant=double_quant)
    return made


X = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# --- saved and loaded


@each_way
@pytest.mark.parametrize("used", ["no", "forward", "eval"])
def test_loading_a_state_dict_is_bitwise_exact(kind, double_quant, used):
    one, two = (net(seed, kind=kind, double_quant=double_quant) for seed in (0, 1))
    assert not torch.equal(one(X), two(X))
    if used == "no":
        two = net(1, kind=kind, double_quant=double_quant)
    if used == "eval":
        with torch.no_grad():
            one.eval()(X), two.eval()(X)
    two.load_state_dict(one.state_dict())
    assert same(one, two)
    assert torch.equal(one.train()(X), two.train()(X))


def test_state_dict_loads_in_another_process(tmp_path):
    saved = [net(kind=kind, double_quant=double_quant) for kind, double_quant in HOW]
    torch.save({"x": X, "each": [(one.state_dict(), one(X).detach()) for one in saved]}, tmp_path / "file.ckpt")
    code = f"""
import sys, torch
from torch import nn
from lightning_fasttrain.finetune import quantize_base_
file = torch.load(sys.argv[1], weights_only=True)
for (kind, double_quant), (state, y) in zip({HOW}, file["each"], strict=True):
    net = nn.Sequential(nn.Linear(128, 96), nn.LayerNorm(96), nn.Linear(96, 5))
    quantize_base_(net, kind, double_quant=double_quant)
    net.load_state_dict(state)
    assert torch.equal(net(file["x"]), y)
"""
    run_code(code, tmp_path / "file.ckpt", folder=tmp_path)


@each_way
def test_plain_checkpoint_is_quantised_on_loading(kind, double_quant):
    plain, direct = net(0, quantized=False), net(0, kind=kind, double_quant=double_quant)
    loaded = net(1, kind=kind, double_quant=double_quant)
    loaded.load_state_dict(plain.state_dict())
    assert same(direct, loaded)
    assert torch.equal(direct(X), loaded(X))
    assert plain.state_dict()["0.weight"].dtype is torch.float32


@each_kind
def test_loading_with_assign_is_exact(kind):
    one, two = net(0, kind=kind), net(1, kind=kind)
    classes = type(two[0].weight)
    two.load_state_dict(copy.deepcopy(one.state_dict()), assign=True)
    assert torch.equal(one(X), two(X))
    assert type(two[0].weight) is classes
    assert same(one, two)


@each_kind
def test_loaded_tensors_are_copies(kind):
    one, two = net(0, kind=kind), net(1, kind=kind)
    state = one.state_dict()
    two.load_state_dict(state)
    expected = two(X)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(two(X), expected)


@each_kind
def test_checkpoint_without_the_base_keeps_it(kind):
    one = net(kind=kind)
    expected = weights(one)
    trained = {name: torch.ones(5, 96) for name in ("2.weight",)}
    missing = one.load_state_dict(trained, strict=False).missing_keys
    assert "0.weight" in missing
    assert all(torch.equal(expected[name], value) for name, value in weights(one).items() if name != "2.weight")


def test_checkpoint_loads_into_a_model_quantised_by_hugging_face(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99)).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    loaded, ids = [], torch.arange(6)[None]
    for _ in range(2):
        loaded.append(LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map={"": "cpu"}))
        quantize_base_(loaded[-1])
    with torch.no_grad():
        loaded[0].model.layers[0].mlp.up_proj.weight.data.bitwise_not_()
        loaded[1].load_state_dict(loaded[0].state_dict())
        assert torch.equal(loaded[0](ids).logits, loaded[1](ids).logits)


# --- copied, pickled, moved


@each_kind
def test_copies_are_independent_and_can_load_and_be_copied(kind):
    one = net(kind=kind)
    two = copy.deepcopy(copy.deepcopy(one))
    assert same(one, two)
    assert torch.equal(one(X), two(X))
    storages = [{t.untyped_storage().data_ptr() for t in quantization_of(m[0]).values()} for m in (one, two)]
    assert not storages[0] & storages[1]
    two.load_state_dict(net(1, kind=kind).state_dict())
    assert torch.equal(two(X), net(1, kind=kind)(X))
    assert torch.equal(one(X), net(0, kind=kind)(X))


@each_kind
@pytest.mark.parametrize("inputs", [128, 96])
def test_pickling_is_exact_and_the_result_trains(kind, inputs):
    one = net(inputs=inputs, kind=kind)
    two = pickle.loads(pickle.dumps(one))
    x = torch.randn(2, inputs, requires_grad=True)
    assert torch.equal(one(x), two(x))
    assert type(one[0].weight) is type(two[0].weight)
    two(x).sum().backward()
    assert same(one, two)
    two.load_state_dict(net(1, inputs, kind=kind).state_dict())
    assert torch.equal(two(x), net(1, inputs, kind=kind)(x))
    assert torch.equal(one(x), net(0, inputs, kind=kind)(x))
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(two)))(x), two(x))


def test_unpickled_in_a_fresh_process(tmp_path):
    one = nn.ModuleDict({kind: net(kind=kind) for kind in KINDS})
    (tmp_path / "net").write_bytes(pickle.dumps((one, X, [one[kind](X).detach() for kind in KINDS])))
    code = """
import pickle, sys, torch
for name in [name for name in sys.modules if name.split(".")[0] in ("lightning_fasttrain", "tests")]:
    del sys.modules[name]  # as if nothing of ours had been imported
net, x, expected = pickle.loads(open(sys.argv[1], "rb").read())
assert all(torch.equal(each(x), y) for each, y in zip(net.values(), expected, strict=True))
net.load_state_dict(net.state_dict())
"""
    run_code(code, tmp_path / "net", folder=tmp_path, timeout_s=120)


@each_kind
@pytest.mark.parametrize(
    "move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu"), lambda m: m.double().float()]
)
def test_moving_and_casting_keep_the_values(kind, move):
    one = net(kind=kind)
    before = dequantized_weight(one[0]).clone()
    packed = one[0].weight.detach().clone()
    move(one)
    dtype = one[1].weight.dtype
    y = one(X.to(dtype))
    assert y.dtype is dtype
    assert torch.equal(one[0].weight, packed)
    assert torch.equal(dequantized_weight(one[0]), before)
    assert torch.allclose(y.float(), net(kind=kind)(X), atol=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_kind
@pytest.mark.parametrize("used", [False, True])
def test_saving_and_loading_after_cuda_is_exact(kind, used):
    one, two = net(0, kind=kind), net(1, kind=kind)
    if used:
        one(X), two(X)
    one.cuda(), two.cuda()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(X.cuda()), two(X.cuda()))
    one.cpu()(X)  # the constants of int8 follow in the first forward
    assert same(one, net(0, kind=kind))


# --- resumed


@each_way
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resumed_equals_uninterrupted_bit_for_bit(kind, double_quant, precision, tmp_path):
    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(callbacks, seed=11, **settings):
        torch.manual_seed(seed)
        module = ShallowLM()
        if seed != 11:
            with torch.no_grad():
                module.blocks[0].up.weight.normal_()
        technique = QuantizedBase(kind, double_quant=double_quant)
        t = trainer([technique, *callbacks], max_epochs=2, precision=precision)
        t.fit(module, as_loader(lm_batches(3)), as_loader(lm_batches(1)), **settings)
        return module

    whole = run([Save()])
    resumed = run([], seed=5, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0
    assert torch.equal(whole.losses[-1], resumed.losses[-1])


def test_plain_checkpoint_can_start_a_quantised_run(tmp_path):
    module, plain = ShallowLM(), ShallowLM()
    with torch.no_grad():
        plain.blocks[0].up.weight.normal_()
    t = trainer([])
    t.strategy.connect(plain)
    t.save_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    technique = QuantizedBase()
    trainer([technique]).validate(module, as_loader(lm_batches(1)), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    quantize_base_(plain)
    assert same(module, plain)


# --- refusals


def refusal(into, state):
    before = weights(into)
    with pytest.raises(RuntimeError) as error:
        into.load_state_dict(state)
    assert torch.equal(before["0.weight"], into[0].weight)
    assert torch.isfinite(into(X)).all()
    return str(error.value)


def test_another_kind_is_refused():
    assert "quantised as fp4, and the layer as nf4" in refusal(net(), net(kind="fp4").state_dict())
    assert "'0.weight' in the checkpoint" in refusal(net(), net(kind="int8").state_dict())
    assert "the layer is a Linear8bitLt" in refusal(net(kind="int8"), net().state_dict())


def test_another_shape_is_refused():
    assert "has shape=[96, 64]" in refusal(net(), {**net().state_dict(), **renamed(net(inputs=64))})
    assert "neither a plain weight" in refusal(net(kind="int8"), net(inputs=64, quantized=False).state_dict())


def renamed(other):
    """Return the tensors of another layer's shape, which the kernels would not check."""
    state = other.state_dict()
    return {name: value for name, value in state.items() if "quant_state" in name}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("absmax", lambda t: t[:-1], "no absmax of 192 values"),
        ("absmax", lambda t: t.float(), "no absmax of 192 values"),
        ("nested_absmax", lambda t: t[:0], "no nested_absmax of 1 values"),
        ("nested_quant_map", lambda t: t[:255], "no nested_quant_map of 256"),
        ("quant_map", lambda t: t[:3], "no quant_map of 16"),
        ("quant_state.bitsandbytes__nf4", lambda t: t[: len(t) // 2], "settings that cannot be read"),
        ("quant_state.bitsandbytes__nf4", lambda t: t.repeat(100), "settings that cannot be read"),
        ("quant_state.bitsandbytes__nf4", lambda t: packed({"shape": 3}), "settings that cannot be read"),
    ],
)
def test_damaged_tensors_are_refused_before_a_kernel_reads_them(part, change, message):
    state = net().state_dict()
    name = f"0.weight.{part}"
    state[name] = change(state[name])
    assert message in refusal(net(1), state)


def packed(settings):
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("key", ["blocksize", "dtype", "nested_blocksize", "nested_dtype", "nested_offset"])
def test_mismatched_settings_are_refused(key):
    state = net().state_dict()
    name = "0.weight.quant_state.bitsandbytes__nf4"
    settings = json.loads(bytes(state[name].tolist()))
    state[name] = packed({**settings, key: "load"})
    message = refusal(net(1), state)
    assert "settings that cannot be read" in message if key == "nested_offset" else f"{key}=load" in message


def test_missing_and_unknown_entries_are_refused():
    state = net().state_dict()
    assert "unknown parts" in refusal(net(1), {**state, "0.weight.more": torch.zeros(1)})
    assert "no absmax" in refusal(net(1), {n: v for n, v in state.items() if not n.endswith("weight.absmax")})
    eight = {n: v for n, v in net(kind="int8").state_dict().items() if not n.endswith("SCB")}
    assert "neither a plain weight" in refusal(net(1, kind="int8"), eight)
    other = {**net(kind="int8").state_dict(), "0.weight_format": torch.tensor(2, dtype=torch.uint8)}
    assert "weight_format=2" in refusal(net(1, kind="int8"), other)


def test_keep_quantized_twice_equals_once():
    one = net()
    for _ in range(2):
        keep_quantized_(one[0])
    assert len(one[0]._load_state_dict_pre_hooks) == len(one[0]._forward_pre_hooks) == 1
    buffer = io.BytesIO()
    torch.save(one, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    keep_quantized_(again[0])
    assert len(again[0]._load_state_dict_pre_hooks) == len(again[0]._forward_pre_hooks) == 1
