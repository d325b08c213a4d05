import re
import sys
import weakref

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.siglip.modeling_siglip import SiglipMLP

import lightning_fasttrain as ft
from lightning_fasttrain import FastTrainWarning
from lightning_fasttrain.finetune import (
    QuantizedBase,
    dequantized_weight,
    keep_quantized_,
    quantize_base_,
    quantized_bytes,
)
from lightning_fasttrain.finetune.quantized.quantized_layer import KINDS, quantization_of
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import LazyLM, TinyLM, as_loader, fit, lm_batches, trainer, weights

each_kind = pytest.mark.parametrize("kind", KINDS)
BLOCKS = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]


def linear(inputs=96, outputs=40, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))


def llama(**settings):
    return LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            **settings,
        }
    )


# --- the values

# Dettmers et al. 2023, appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip


@pytest.mark.parametrize("inputs", [96, 77, 128, 16, 3])  # blocks that continue in the next row, and that do not
def test_nf4_rounds_to_the_nearest_of_16_values_scaled_by_block_maximum(inputs):
    net = linear(inputs, 41)
    weight = net[0].weight.detach().flatten()
    quantize_base_(net, double_quant=False)
    expected = []
    for block in weight.split(64):
        table = torch.tensor(NF4) * block.abs().max()
        expected.append(table[(block[:, None] - table).abs().argmin(dim=1)])
    weight = torch.cat(expected).view(41, inputs)
    assert torch.allclose(dequantized_weight(net[0]), weight, atol=1e-6)
    x = torch.randn(5, inputs)
    assert torch.allclose(net(x), F.linear(x, weight, net[0].bias), atol=1e-4)


def test_int8_rounds_to_the_nearest_127th_of_the_row_maximum():
    net = linear()
    weight = net[0].weight.detach().clone()
    quantize_base_(net, "int8")
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    steps = dequantized_weight(net[0]) / step
    assert torch.allclose(steps, steps.round(), atol=0.07)  # weights are rounded to float16 first
    assert ((steps - weight / step).abs() < 0.57).all()
    assert torch.equal(steps.abs().amax(dim=1).round(), torch.full((40,), 127.0))


# nf4 and fp4: of a normal distribution in blocks of 64. int8: the largest of 512 is 3.25 on average, and rounding to a
# 127th of it makes an error of 1/√12 of that.
@pytest.mark.parametrize(("kind", "expected"), [("nf4", 0.092), ("fp4", 0.122), ("int8", 3.25 / 127 / 12**0.5)])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relative_error_of_normal_weights_is_as_expected(kind, expected, double_quant, dtype):
    net = linear(512, 256)
    nn.init.normal_(net[0].weight, std=0.02)
    net.to(dtype)  # cast after drawing: drawn in bfloat16, the tails are shorter in some versions of torch
    before = net[0].weight.detach().float()
    quantize_base_(net, kind, double_quant=double_quant)
    error = (dequantized_weight(net[0]).float() - before).norm() / before.norm()
    assert float(error) == pytest.approx(expected, rel=0.03)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96)])
def test_output_and_gradient_equal_those_of_the_dequantised_weight(kind, dtype, shape):
    net = linear(dtype=dtype)
    quantize_base_(net, kind)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = net(x)
    upstream = torch.randn_like(y)
    (got,) = torch.autograd.grad(y, x, upstream)
    weight = dequantized_weight(net[0]).to(dtype)
    expected = F.linear(x, weight, net[0].bias)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    assert y.dtype == got.dtype == dtype
    assert torch.allclose(y, expected, **tolerance)
    assert torch.allclose(got, upstream @ weight, **tolerance)


def test_siglips_mlp_in_4_bits_is_exact_on_the_cpu():
    """The MLP of SigLIP so400m is 4,304 wide; on AVX-512, bitsandbytes itself is off by 2% of the output."""
    config = SiglipVisionConfig(hidden_size=1152, intermediate_size=4304)
    mlp, x = SiglipMLP(config), torch.randn(3, 1152)
    quantize_base_(nn.Sequential(mlp, nn.Linear(1152, 2)), "nf4")
    hidden = mlp.activation_fn(F.linear(x, dequantized_weight(mlp.fc1), mlp.fc1.bias))
    expected = F.linear(hidden, dequantized_weight(mlp.fc2), mlp.fc2.bias)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_autocast_keeps_gradients_and_dtypes(kind):
    net = linear()
    quantize_base_(net, kind, compute_dtype=torch.bfloat16 if kind == "nf4" else "auto")
    before = {name: value.dtype for name, value in net.state_dict().items()}
    x = torch.randn(4, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().sum().backward()
    expected = F.linear(x, dequantized_weight(net[0]), net[0].bias.float())
    assert torch.allclose(y.float(), expected, atol=2e-2)
    assert x.grad.dtype == torch.float32
    assert before == {name: value.dtype for name, value in net.state_dict().items()}


def test_weights_of_zeros_stay_zeros():
    for kind in KINDS:
        net = linear(bias=False)
        nn.init.zeros_(net[0].weight)
        quantize_base_(net, kind)
        assert torch.equal(net(torch.randn(3, 96)), torch.zeros(3, 40))


# --- which layers


def test_the_blocks_are_quantised_and_frozen_and_the_rest_trains():
    net = TinyLM()
    report = quantize_base_(net)
    assert list(report.quantized) == BLOCKS
    assert report.left == {"head": "a head"}
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {"embed.weight"} | {f"blocks.{i}.norm.{p}" for i in range(3) for p in ("weight", "bias")}


def test_heads_of_hugging_face_models_are_not_quantised():
    net = LlamaForCausalLM(llama())
    report = quantize_base_(net, "int8")
    assert (len(report.quantized), report.left) == (14, {"lm_head": "a head"})
    assert type(net.lm_head) is nn.Linear


def test_modules_kept_in_float32_by_hugging_face_are_not_quantised():
    config = T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=2, d_kv=32, vocab_size=50)
    model = T5ForConditionalGeneration(config)
    left = quantize_base_(model).left
    assert {name.rpartition(".")[2] for name in left} == {"wo", "lm_head"}
    assert torch.isfinite(
        model(input_ids=torch.ones(1, 3).long(), decoder_input_ids=torch.ones(1, 2).long()).logits
    ).all()


def test_skip_accepts_names_patterns_and_classes():
    def left(skip):
        return {name for name, why in quantize_base_(TinyLM(), skip=skip).left.items() if why == "skip"}

    assert left("blocks.1.up") == left(["blocks.1.up"]) == {"blocks.1.up"}
    assert left("**.down") == {f"blocks.{i}.down" for i in range(3)}
    assert left(["blocks.0", "blocks.2.*"]) == {n for n in BLOCKS if ".1." not in n}
    assert left(["blocks.0", nn.Embedding]) == {"blocks.0.up", "blocks.0.down"}


def test_matrices_that_cannot_be_quantised_are_listed_with_the_reason():
    class Mine(nn.Linear):
        pass

    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], Mine(64, 64), nn.Linear(64, 64).double())
    net.append(nn.Linear(9, 9))
    net[3].weight = net[2].weight
    left = quantize_base_(net).left
    assert left["2"] == "it shares its weight with 3"
    assert left["3"] == "it shares its weight with 2"
    assert left["4"] == "it is a Mine, not a plain nn.Linear"
    assert left["5"] == "its weight is in torch.float64"
    assert left["6"] == "a head"


MOE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
EXPERTS = {
    "Mixtral": {**MOE, "num_local_experts": 4, "num_key_value_heads": 2},
    "Qwen3Moe": {
        **MOE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_unquantised_experts_are_named_with_their_share_of_bytes(kind, caplog):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**EXPERTS[kind]))
    technique = ft.QLoRA(rank=2, kind="int8")
    with pytest.warns(UserWarning, match=r"only nn.Linear is quantised.*experts\.gate_up_proj"):
        ft.apply(model, [technique])
    report = technique.base.report
    experts = {name: p for name, p in model.named_parameters() if p.ndim == 3}
    total = sum(p.nbytes for name, p in model.named_parameters() if "lora_" not in name)
    assert len(experts) == 4
    assert all(p.dtype is torch.float32 for p in experts.values())
    assert set(experts) <= set(report.left)
    share = sum(p.nbytes for p in experts.values()) / total
    assert sum(report.shares[name] for name in experts) == pytest.approx(share)
    assert f"{share:.0%} of all bytes" in str(report)
    assert re.search(
        r"without adapter, since not in a linear layer: .*experts\.gate_up_proj.* and \d more", caplog.text
    )


@pytest.mark.parametrize("kind", EXPERTS)
def test_missing_adapters_on_4_bit_experts_are_reported(kind, caplog):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**EXPERTS[kind]))
    ft.apply(model, [ft.QLoRA(rank=2)])
    assert re.search(
        r"without adapter, since not in a linear layer: .*experts\.gate_up_proj.* and \d more", caplog.text
    )


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1))


def conv1ds(model):
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}


IDS = torch.arange(12).view(1, 12) + 3


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_gpt2s_transposed_layers_compute_what_bitsandbytes_own_would(kind):
    """Compare each layer with a bitsandbytes layer of the transposed weight."""
    import bitsandbytes as bnb

    model, plain = gpt2().eval(), gpt2().eval()
    report = quantize_base_(model, kind)
    assert list(report.quantized) == list(conv1ds(plain))
    x = torch.randn(3, 64)
    for name, layer in conv1ds(plain).items():
        weight = layer.weight.detach().T.contiguous()
        if kind == "int8":
            by_hand = bnb.nn.Linear8bitLt(layer.nx, layer.nf, has_fp16_weights=False)
            by_hand.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            by_hand = bnb.nn.Linear4bit(layer.nx, layer.nf, compute_dtype=torch.float32, quant_type=kind)
            by_hand.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind)
        by_hand.bias = layer.bias
        by_hand = by_hand.to("cpu").train(kind != "int8")  # in eval its 4 bits become bfloat16 on some processors
        given = x.repeat(1, layer.nx // 64)
        assert torch.equal(model.get_submodule(name)(given), by_hand(given))
    assert (loss_of(model) - loss_of(plain)).abs() < 0.05


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gpt2_files_are_compatible_in_both_directions(kind, tmp_path):
    from safetensors.torch import save_model

    model, other, plain = gpt2(), gpt2(), gpt2()
    quantize_base_(model, kind)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    quantize_base_(other, kind)
    for state in (model.state_dict(), plain.state_dict()):
        other.load_state_dict(state)
        assert torch.equal(loss_of(other.eval()), loss_of(model.eval()))
    save_model(plain, tmp_path / "model.safetensors")
    streamed = ft.finetune.load_quantized(gpt2, tmp_path / "model.safetensors", kind)
    assert torch.equal(loss_of(streamed.eval()), loss_of(model))


@pytest.mark.parametrize("into", ["requantized", "dequantized", "original"])
def test_an_adapter_on_quantised_gpt2_trains_and_merges_into_gpt2s_own_layers(into, tmp_path):
    pytest.importorskip("peft")
    model, plain = gpt2(), gpt2().eval()
    ft.apply(model, [ft.QLoRA(rank=2)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.2
    ft.finetune.save_adapter(model, tmp_path / "adapter")
    trained = loss_of(model.eval())
    ft.finetune.load_adapter_(plain, tmp_path / "adapter")  # onto the plain one
    assert (loss_of(plain) - trained).abs() < 0.1
    original = {"original": gpt2()} if into == "original" else {}
    ft.finetune.unload_adapters_(model, into=into, **original)
    assert (loss_of(model) - trained).abs() < 0.1
    fresh = gpt2().eval()
    if into == "requantized":
        quantize_base_(fresh)
    else:
        assert set(conv1ds(model)) == set(conv1ds(fresh))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(loss_of(fresh), loss_of(model))


def test_layer_used_twice_stays_shared():
    layer = nn.Linear(64, 64)
    net = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Tanh()), "head": nn.Linear(64, 2)})
    quantize_base_(net)
    assert net["a"] is net["b"][0] is layer
    assert layer.weight.dtype is torch.uint8


def test_layer_hooks_are_kept():
    net, seen = linear(), []
    net[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    quantize_base_(net)
    net(torch.randn(2, 96))
    assert seen == [(2, 40)]


def test_layers_with_adapters_are_not_quantised_and_reported():
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["1"]), net)
    with pytest.warns(FastTrainWarning, match="Quantise first"):
        report = quantize_base_(net)
    assert report.quantized == ("0",)
    assert report.left["1.base_layer"] == "it has an adapter already"
    assert not [name for name in report.left if "lora" in name]


def test_layers_under_adapters_that_were_quantised_before_are_recognised():
    net = TinyLM()
    quantize_base_(net)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up"], r=2), net)
    report = quantize_base_(net)
    assert (len(report.already), report.quantized) == (6, ())


@each_kind
def test_quantising_twice_equals_once(kind):
    net = TinyLM()
    quantize_base_(net, kind)
    before, objects = weights(net), {name: id(p) for name, p in net.named_parameters()}
    report = quantize_base_(net, kind)
    assert (report.quantized, list(report.already)) == ((), BLOCKS)
    assert objects == {name: id(p) for name, p in net.named_parameters()}
    assert all(torch.equal(before[name], value) for name, value in weights(net).items())
    assert len(net.blocks[0].up._load_state_dict_pre_hooks) == len(net.blocks[0].up._forward_pre_hooks) == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_that_hugging_face_loaded_quantised_is_recognised(bits, tmp_path):
    LlamaForCausalLM(llama()).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    net = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map={"": "cpu"})
    ids = torch.arange(6)[None]
    expected = net.train()(ids).logits
    technique = QuantizedBase("nf4")
    technique.apply(net)
    assert (len(technique.report.already), technique.report.quantized) == (14, ())
    assert torch.equal(net(ids).logits, expected)
    assert net.load_state_dict(net.state_dict())


def test_bitsandbytes_layers_that_were_never_moved_are_quantised():
    import bitsandbytes as bnb

    for layer in (bnb.nn.Linear4bit(64, 64), bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)):
        report = quantize_base_(nn.Sequential(layer, nn.Linear(64, 2)))
        assert report.already == ("0",)
        assert not layer.weight.is_floating_point()


# --- memory


@pytest.mark.parametrize("shape", [(64, 64), (128, 256), (37, 100), (1, 64), (3, 65), (1000, 17)])
@pytest.mark.parametrize("double_quant", [False, True])
@each_kind
def test_quantized_bytes_equals_the_bytes_of_the_tensors(shape, kind, double_quant):
    net = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    report = quantize_base_(net, kind, double_quant=double_quant)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in quantization_of(net[0]).values()}
    assert sum(held.values()) == report.bytes_after == quantized_bytes(*shape, kind, double_quant=double_quant)
    assert report.bytes_before == 4 * shape[0] * shape[1]


def test_bits_per_weight_of_a_large_layer():
    numbers = 4096 * 4096
    assert quantized_bytes(4096, 4096) * 8 / numbers == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3)  # 4.127
    assert quantized_bytes(4096, 4096, double_quant=False) * 8 / numbers == pytest.approx(4.5, abs=1e-3)
    assert quantized_bytes(4096, 4096, "int8") * 8 / numbers == pytest.approx(8, abs=1e-2)


@each_kind
def test_old_weights_are_freed_layer_by_layer(kind):
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)])
    one = 256 * 256 * 4
    old = [weakref.ref(layer.weight) for layer in net[:-1]]
    with PeakMemory("cpu", net) as quantising:
        report = quantize_base_(net, kind)
    assert not any(weight() is not None for weight in old)
    assert quantising.added_bytes < 7 * one  # the temporaries of fp4
    with PeakMemory("cpu", net) as after:
        pass
    assert after.peak_bytes == report.bytes_after + one  # the last one, a head


# --- in training


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_still_flow_after_a_validation(kind):
    net = linear(64, 64)
    quantize_base_(net, kind)
    with torch.no_grad():
        net.eval()(torch.randn(2, 64))
    x = torch.randn(2, 64, requires_grad=True)
    before = weights(net)
    net.train()(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(torch.equal(before[name], value) for name, value in weights(net).items())


def test_validation_works_for_any_number_of_outputs():
    net = linear(64, 37)
    quantize_base_(net)
    with torch.no_grad():
        assert torch.equal(net.eval()(torch.ones(1, 64)), net.train()(torch.ones(1, 64)))


@pytest.mark.filterwarnings("ignore:64% of the bytes")  # of attention's own tensors, which are not quantised
@pytest.mark.parametrize("masked", [False, True])
def test_torch_encoders_have_equal_outputs_in_eval(masked):
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2)
    quantize_base_(net)
    x = torch.randn(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    expected = net.train()(x, src_key_padding_mask=mask)
    with torch.no_grad():
        got = net.eval()(x, src_key_padding_mask=mask)
    kept = torch.ones(2, 5, dtype=torch.bool) if mask is None else ~mask
    assert torch.allclose(got[kept], expected[kept], atol=1e-5)


@each_kind
def test_second_fit_continues_training_of_other_parameters(kind):
    module, technique = TinyLM(), QuantizedBase(kind)
    first = fit(module, lm_batches(3), [technique])
    base = {name: value for name, value in weights(first).items() if ".up." in name or ".down." in name}
    losses = float(module.losses[0]), float(module.losses[-1])
    fit(module, lm_batches(3), [technique], max_epochs=8)
    assert float(module.losses[-1]) < min(losses)
    assert all(torch.equal(value, weights(module)[name]) for name, value in base.items())
    assert len(technique.report.already) == 6


def test_trainer_lazy_model_and_bare_loop_agree():
    runs = [fit(net(), lm_batches(3), [QuantizedBase()]) for net in (TinyLM, LazyLM)]
    torch.manual_seed(11)
    bare = TinyLM()
    ft.apply(bare, [QuantizedBase()])
    optimizer = bare.configure_optimizers()
    for batch in lm_batches(3):
        optimizer.zero_grad()
        bare.loss(batch).backward()
        optimizer.step()
    expected = weights(bare)
    assert all(torch.equal(expected[name], value) for run in runs for name, value in weights(run).items())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16)],
)
def test_compute_dtype_follows_the_trainers_precision(precision, dtype):
    module = fit(TinyLM(), lm_batches(2), [QuantizedBase()], precision=precision)
    assert module.blocks[0].up.compute_dtype is dtype
    assert torch.isfinite(module.losses[-1])


def test_compute_dtype_is_the_weights_dtype_or_as_given():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        net = linear(dtype=dtype)
        quantize_base_(net)
        assert net[0].compute_dtype is dtype
    net = linear()
    quantize_base_(net, compute_dtype=torch.bfloat16)
    assert net[0].compute_dtype is net[0].bias.dtype is torch.bfloat16


def test_bitsandbytes_reports_a_cast_of_inputs_once(caplog):
    net = linear().eval()
    quantize_base_(net, "int8")
    for _ in range(3):
        net(torch.randn(2, 96))
    assert sum("inputs will be cast" in message for message in caplog.messages) <= 1  # in this process


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_activation_checkpointing_and_compiled_blocks_work(kind):
    plain = fit(TinyLM(), lm_batches(3), [QuantizedBase(kind)])
    torch._dynamo.reset()
    techniques = [ft.CompileBlocks(backend="aot_eager"), QuantizedBase(kind), ft.ActivationCheckpointing()]
    module = fit(TinyLM(), lm_batches(3), techniques)
    for name, value in weights(plain).items():
        assert torch.allclose(value.float(), weights(module)[name].float(), atol=1e-5), name


def test_validation_in_between_changes_nothing():
    runs = []
    for validated in (False, True):
        torch.manual_seed(11)
        module = TinyLM()
        loaders = {"val_dataloaders": as_loader(lm_batches(1))} if validated else {}
        trainer([QuantizedBase()], max_epochs=2).fit(module, as_loader(lm_batches(3)), **loaders)
        runs.append(weights(module))
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_kind
def test_quantised_model_moves_to_cuda_and_back(kind):
    net = linear(128, 64)
    quantize_base_(net, kind)
    x = torch.randn(4, 128)
    expected = net(x)
    net.cuda()
    assert torch.allclose(net(x.cuda()).cpu(), expected, atol=0.05)
    net.cpu()
    assert torch.equal(net(x), expected)


# --- refusals


def refusal(kind, *arguments, **settings):
    with pytest.raises(kind) as error:
        quantize_base_(*arguments, **settings)
    return str(error.value)


def test_unknown_kinds_and_dtypes_are_refused():
    assert "'nf4', 'fp4', 'int8'" in refusal(ValueError, TinyLM(), "nf3")
    assert "compute_dtype=torch.float64" in refusal(ValueError, TinyLM(), compute_dtype=torch.float64)
    assert "Remove it" in refusal(ValueError, TinyLM(), "int8", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="nf3"):
        QuantizedBase("nf3")


def test_skip_without_a_match_is_refused():
    message = refusal(ValueError, TinyLM(), skip=["**.up", "**.router"])
    assert "skip='**.router' matches nothing" in message
    assert "Block ×3" in message
    message = refusal(ValueError, TinyLM(), skip="up")
    assert "a name is given in full, and blocks.0.up, blocks.1.up, blocks.2.up only end in it" in message
    assert message.endswith("Give one of these, or the pattern '**.up'.")
    assert "skip=[3]" in refusal(TypeError, TinyLM(), skip=[3])
    assert "skip=int" in refusal(TypeError, TinyLM(), skip=int)


def test_model_without_quantisable_layers_is_refused():
    assert "not an nn.Linear" in refusal(ValueError, nn.Sequential(nn.Conv2d(3, 3, 3)))
    assert "lm_head (a head)" in refusal(ValueError, GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=0, n_head=2)))
    adapted = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"]), adapted)
    with pytest.raises(ValueError, match="Quantise before adapters"):
        quantize_base_(adapted)


def test_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        net = linear()
    assert "load_quantized" in refusal(ValueError, net)


def test_missing_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "lightning-fasttrain[finetune]" in refusal(ModuleNotFoundError, TinyLM())


def test_refusal_changes_nothing():
    net = TinyLM()
    before = weights(net)
    refusal(ValueError, net, skip="router")
    assert all(torch.equal(before[name], value) for name, value in weights(net).items())


def test_unquantised_layers_are_refused_by_readers():
    with pytest.raises(TypeError, match="quantize_base_"):
        keep_quantized_(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="no quantised weight"):
        dequantized_weight(nn.Linear(2, 2))


def test_a_model_may_write_into_what_a_layer_of_4_bits_returns():
    """As wav2vec2 does, which masks spans of its projected features."""

    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.head = nn.Linear(30, 30), nn.Linear(30, 3)

        def forward(self, x):
            hidden = self.project(x)
            hidden[:, 0] = 0.0
            return self.head(hidden)

    net, x = Masks(), torch.randn(2, 3, 30)
    QuantizedBase().apply(net)
    with torch.no_grad():
        expected = net(x)
    inputs = x.clone().requires_grad_()
    found = net(inputs)
    found.sum().backward()
    assert torch.equal(found.detach(), expected)
    assert not inputs.grad[:, 0].any()
    assert inputs.grad[:, 1:].all()
