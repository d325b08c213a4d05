"""8-bit products equal those of manually rounded rows, within the documented bound, in every kind of use."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.core.modules.wrapped_forward import without_rounding
from lightning_fasttrain.finetune import QuantizedBase
from lightning_fasttrain.model.kernels import low_precision_products
from lightning_fasttrain.model.kernels.low_precision_products import linear_in_8_bits, multiply_rows
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import TinyLM, fit, gradients, largest_difference, lm_batches, weights

KINDS = ("int8", "float8")
TOPS = {"int8": 127, "float8": 448}
BATCHES = lm_batches(5)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def e4m3_numbers():
    """Return all finite float8 values in the order of their codes, by the format's definition."""
    found = []
    for sign in (1, -1):
        for code in range(127):
            exponent, mantissa = divmod(code, 8)
            size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            found.append(sign * size)
    return torch.tensor(found, dtype=torch.float64)


def by_hand(matrix, kind):
    """Round rows as documented, and return them in float64."""
    scale = (matrix.abs().amax(1, keepdim=True) / TOPS[kind]).double()
    scaled = (matrix / scale.float()).double()
    if kind == "int8":
        return scaled.round() * scale
    numbers = e4m3_numbers()
    return numbers[(scaled[..., None] - numbers).abs().argmin(-1)] * scale


def factors(m=20, n=48, k=32, seed=0):
    torch.manual_seed(seed)
    first, second = torch.randn(m, n), torch.randn(k, n)
    first[0, 0], second[1] = 30.0, second[1] * 1e-3  # an outlier, and a row of small numbers
    return first, second


def close(found, expected):
    return (found.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


@each_kind
def test_products_equal_those_of_manually_rounded_rows(kind):
    first, second = factors()
    assert close(multiply_rows(first, second, kind), by_hand(first, kind) @ by_hand(second, kind).t())


def test_integer_products_are_exact():
    first, second = factors()
    left, left_scale = low_precision_products.round_rows(first, "int8")
    right, right_scale = low_precision_products.round_rows(second, "int8")
    exact = (left.long() @ right.long().t()).double() * left_scale.double() * right_scale.double().t()
    assert (multiply_rows(first, second, "int8").double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    assert 127**2 * low_precision_products._LONGEST < 2**31


@each_kind
@pytest.mark.parametrize("tokens", [(3, 11), (16,), (2, 64)])
def test_output_and_gradients_equal_manually_rounded_ones(kind, tokens):
    torch.manual_seed(1)
    input, bias = torch.randn(*tokens, 32, requires_grad=True), torch.randn(48, requires_grad=True)
    weight, gradient = torch.randn(48, 32, requires_grad=True), torch.randn(*tokens, 48)
    output = linear_in_8_bits(input, weight, bias, kind)
    output.backward(gradient)
    x, w, g = input.detach().reshape(-1, 32), weight.detach(), gradient.reshape(-1, 48)
    assert close(output.detach().reshape(-1, 48), by_hand(x, kind) @ by_hand(w, kind).t() + bias.detach())
    assert close(input.grad.reshape(-1, 32), by_hand(g, kind) @ by_hand(w.t(), kind).t())
    assert close(weight.grad, by_hand(g.t(), kind) @ by_hand(x.t(), kind).t())
    assert close(bias.grad, g.double().sum(0))


@each_kind
def test_a_second_derivative_is_refused(kind):
    input, weight = factors()
    output = linear_in_8_bits(input.requires_grad_(), weight.requires_grad_(), None, kind)
    with pytest.raises(RuntimeError, match="create_graph=True.*Remove LowPrecisionProducts"):
        torch.autograd.grad(output.square().sum(), input, create_graph=True)


@each_kind
def test_a_16_bit_default_dtype_changes_nothing(kind):
    input, weight = factors()
    expected = multiply_rows(input, weight, kind)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(multiply_rows(input, weight, kind), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def stated_bound(first, second, kind):
    """Return the documented bound for each entry of the product."""
    a, b = first.double().abs(), second.double().abs()
    a_top, b_top = a.amax(1, keepdim=True), b.amax(1, keepdim=True)
    if kind == "int8":
        sums = a.sum(1, keepdim=True) * b_top.t() + a_top * b.sum(1, keepdim=True).t()
        return sums / 254 + first.shape[1] * a_top * b_top.t() / 254**2
    a_off, b_off = (torch.maximum(x / 16, top / 448 / 1024) for x, top in ((a, a_top), (b, b_top)))
    return a @ b_off.t() + a_off @ b.t() + a_off @ b_off.t()


@each_kind
@pytest.mark.parametrize("seed", range(5))
def test_errors_against_float64_stay_within_the_documented_bound(kind, seed):
    first, second = factors(seed=seed)
    exact = first.double() @ second.double().t()
    errors = (multiply_rows(first, second, kind).double() - exact).abs()
    assert (errors <= stated_bound(first, second, kind) + 1e-6 * exact.abs().max()).all()
    assert errors.max() > 1e-4 * exact.abs().max()  # so they are rounded


@each_kind
def test_the_error_for_normal_values_is_as_documented(kind):
    torch.manual_seed(0)
    first, second = torch.randn(256, 512), torch.randn(256, 512)
    exact = first.double() @ second.double().t()
    error = (multiply_rows(first, second, kind).double() - exact).norm() / exact.norm()
    assert float(error) == pytest.approx({"int8": 0.01, "float8": 0.037}[kind], abs=0.002)


def test_rows_too_long_for_int32_are_summed_in_chunks(monkeypatch):
    first, second = factors(n=80)
    monkeypatch.setattr(low_precision_products, "_LONGEST", 32)
    chunks = [slice(0, 32), slice(32, 64), slice(64, 80)]
    expected = sum(by_hand(first[:, chunk], "int8") @ by_hand(second[:, chunk], "int8").t() for chunk in chunks)
    assert close(multiply_rows(first, second, "int8"), expected)


@each_kind
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_are_propagated(kind, bad):
    first, second = factors()
    first[3, 5] = bad
    product = multiply_rows(first, second, kind)
    assert not product[3].isfinite().any()
    assert product[4:].isfinite().all()


@each_kind
def test_products_of_zeros_are_zero(kind):
    assert not multiply_rows(torch.zeros(20, 48), torch.zeros(32, 48), kind).any()


def net_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.Linear(64, 3))


def wide():
    return net_of(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False))


def kept_bytes(net, input, autocast=None):
    """Return the bytes kept for the backward, by storage, without the parameters."""
    own, storages = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            output = net(input)
    output.float().sum().backward()
    return output.dtype, sum(size for pointer, size in storages.items() if pointer not in own)


@each_kind
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_dtypes_and_saved_bytes_equal_those_of_the_plain_layer(kind, dtype, autocast):
    plain, input = wide().to(dtype), torch.randn(40, 64, dtype=dtype)
    ours = copy.deepcopy(plain)
    ft.model.multiply_in_low_precision_(ours, kind, min_features=16)
    (plain_type, plain_bytes), (type_, kept) = kept_bytes(plain, input, autocast), kept_bytes(ours, input, autocast)
    assert type_ == plain_type
    assert kept <= plain_bytes
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert one.grad.dtype == other.grad.dtype
        assert (one.grad.float() - other.grad.float()).norm() < 0.2 * one.grad.float().norm()


class Replaced(nn.Linear):
    pass


def test_skipped_layers_are_reported_with_reasons():
    net = nn.ModuleDict({"wide": nn.Linear(64, 64), "kept": nn.Linear(64, 64), "odd": nn.Linear(64, 60)})
    net.update({"small": nn.Linear(64, 32), "mine": Replaced(64, 64), "patched": nn.Linear(64, 64)})
    net.update({"long": nn.Linear(64, 64).double(), "attention": nn.MultiheadAttention(64, 2)})
    net["head"] = nn.Linear(64, 64)
    net["patched"].forward = lambda x: x
    report = ft.model.multiply_in_low_precision_(net, "int8", skip="kept", min_features=64)
    assert report.layers == ("wide",)
    assert report.left == {
        "kept": "skip",
        "odd": "int8 needs sizes that are multiples of 8",
        "small": "fewer than 64 inputs or outputs",
        "mine": "it is a Replaced, not a plain nn.Linear",
        "patched": "its forward was replaced",
        "long": "its weight is in torch.float64",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "head": "a head",
    }
    assert "1 linear layers multiply in int8; skipped: kept (skip)" in str(report)


def test_quantized_layers_are_skipped_and_refused_if_no_layer_is_left():
    products = ft.model.LowPrecisionProducts("int8", min_features=8)
    with pytest.raises(ValueError, match="QuantizedBase.*LowPrecisionProducts.*bitsandbytes computes"):
        fit(TinyLM(), BATCHES, [QuantizedBase("int8"), products])
    fit(TinyLM(), BATCHES, [QuantizedBase("int8", skip="blocks.2"), products])
    assert products.report.layers == ("blocks.2.up", "blocks.2.down")
    assert products.report.left["blocks.0.up"] == "it is a Linear8bitLt, not a plain nn.Linear"


def test_only_the_frozen_layer_under_an_adapter_is_rounded():
    net, products = TinyLM(), ft.model.LowPrecisionProducts("int8", min_features=8)
    with ft.apply(net, [ft.LoRA(rank=8), products]):
        adapted = net.blocks[0].up
        assert "forward" in vars(adapted.base_layer)
        assert "forward" not in vars(adapted.lora_A["default"])
    assert "blocks.0.up" in products.report.layers


@pytest.mark.parametrize(
    "make", [ft.model.LowPrecisionProducts, lambda kind: ft.model.multiply_in_low_precision_(wide(), kind)]
)
def test_an_unknown_kind_lists_the_known_ones(make):
    with pytest.raises(ValueError, match=r"kind='fp8'.*Use one of 'float8', 'int8'"):
        make("fp8")


def test_a_model_without_suitable_layers_is_refused_with_reasons():
    with pytest.raises(ValueError, match=r"all are skipped: 0, 2 \(fewer than 1024 inputs or outputs\), 3 \(a head\)"):
        ft.model.multiply_in_low_precision_(wide(), "int8")
    with pytest.raises(ValueError, match="it has no nn.Linear"):
        ft.model.multiply_in_low_precision_(nn.Conv2d(64, 64, 1), "int8")


def test_float8_skips_by_default_what_is_not_known_to_gain():
    net = net_of(nn.Linear(1600, 4096, device="meta"), nn.Linear(4096, 4096, device="meta"))
    report = ft.model.multiply_in_low_precision_(net, "float8")
    assert report.layers == ("1",)
    assert report.left["0"] == "fewer than 4096 inputs or outputs"
    report.undo()
    assert ft.model.multiply_in_low_precision_(net, "int8").layers == ("0", "1")


@pytest.mark.parametrize(("others", "notes"), [([], 1), ([ft.CompileBlocks()], 0)])
def test_uncompiled_products_on_a_gpu_are_noted(monkeypatch, others, notes):
    said = []
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer = SimpleNamespace(strategy=strategy, callbacks=[ft.model.LowPrecisionProducts("int8"), *others])
    monkeypatch.setattr(low_precision_products, "trainer_of", lambda model: trainer)
    monkeypatch.setattr(low_precision_products, "note_once", said.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ft.model.LowPrecisionProducts("int8", min_features=16).apply(wide())
    assert len(said) == notes
    assert all("Add CompileBlocks" in note for note in said)


def test_other_invalid_input_is_refused():
    with pytest.raises(ValueError, match="skip='nothing' matches nothing"):
        ft.model.multiply_in_low_precision_(wide(), "int8", skip="nothing")
    with pytest.raises(TypeError, match="min_features='8'"):
        ft.model.LowPrecisionProducts("int8", min_features="8")


def test_a_gpu_without_8_bit_tensor_cores_is_refused_before_training(monkeypatch):
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    monkeypatch.setattr(low_precision_products, "trainer_of", lambda model: trainer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match="products in float8: A100 has no tensor cores for it, .* capability 8.9"):
        ft.model.multiply_in_low_precision_(wide(), "float8", min_features=16)
    assert ft.model.multiply_in_low_precision_(wide(), "int8", min_features=16).layers == ("0", "2")


def test_int8_is_refused_where_it_was_measured_slower_unless_a_width_is_given(monkeypatch):
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), callbacks=[])
    monkeypatch.setattr(low_precision_products, "trainer_of", lambda model: trainer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 5))
    with pytest.raises(ValueError, match='products in int8 on H200: .* 1.7 times as long as in bf16 .* Use "float8"'):
        ft.model.multiply_in_low_precision_(net, "int8")
    assert "forward" not in vars(net[0])
    assert ft.model.multiply_in_low_precision_(net, "int8", min_features=1024).layers == ("0",)


def test_undo_restores_and_applying_twice_has_no_further_effect():
    net = wide()
    first = ft.model.multiply_in_low_precision_(net, "int8", min_features=16)
    second = ft.model.multiply_in_low_precision_(net, "int8", min_features=16)
    assert (second.layers, second.already) == ((), ("0", "2"))
    second.undo()
    assert "forward" in vars(net[0])
    first.undo()
    assert "forward" not in vars(net[0])


def test_only_eval_mode_without_gradients_uses_full_precision():
    net, input = wide(), torch.randn(20, 64)
    plain = net(input)
    ft.model.multiply_in_low_precision_(net, "int8", min_features=16)
    rounded = net(input)
    assert not torch.equal(rounded, plain)
    assert torch.equal(net.eval()(input), rounded)  # Hugging Face models start in eval mode, and Lightning keeps it
    with torch.no_grad():
        assert torch.equal(net(input), plain)


def test_exact_comparisons_run_without_8_bit_rounding():
    net, input = wide(), torch.randn(20, 64)
    plain = net(input)
    ft.model.multiply_in_low_precision_(net, "int8", min_features=16)
    with without_rounding([net]):
        assert torch.equal(net(input), plain)
    assert not torch.equal(net(input), plain)


def test_an_input_without_rows_gives_an_empty_output():
    net = wide()
    ft.model.multiply_in_low_precision_(net, "int8", min_features=16)
    assert net(torch.randn(0, 64)).shape == (0, 3)


def loss_and_gradients(techniques, autocast):
    torch.manual_seed(0)
    net, tokens = GPT(GPTConfig(context=32, layers=1, heads=2, width=32)), torch.arange(64).view(2, 32)
    with ft.apply(net, techniques), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten() + 1)
        loss.backward()
    return loss.detach(), gradients(net)


@each_kind
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_and_recomputed_models_give_the_same_result(kind, autocast):
    policy = ft.model.EveryBlock() if autocast is (kind == "int8") else None  # covers each pair of the three
    techniques = [ft.model.LowPrecisionProducts(kind, min_features=16)]
    if policy is not None:
        techniques.append(ft.ActivationCheckpointing(policy))
    loss, expected = loss_and_gradients(techniques[:1], autocast)
    compiled = ft.CompileBlocks(backend="eager" if autocast else "aot_eager", fullgraph=True, fallback=False)
    found, seen = loss_and_gradients([*techniques, compiled], autocast)
    assert found == pytest.approx(float(loss), rel=1e-5)
    assert largest_difference(expected, seen) < 1e-3


def distance(one, other):
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def test_weights_end_within_one_percent_of_their_total_change():
    """With SGD; AdamW makes steps of full size even for gradients that are only rounding noise."""
    settings = {"optimizer": torch.optim.SGD, "lr": 0.1}
    start, plain = weights(TinyLM()), weights(fit(TinyLM(**settings), BATCHES))
    ours = weights(fit(TinyLM(**settings), BATCHES, [ft.model.LowPrecisionProducts("int8", min_features=8)]))
    assert 0 < distance(plain, ours) < 0.01 * distance(plain, start)


def losses_of_a_fit(kind):
    """Return the losses of 100 steps on one batch; small, since a CPU emulates float8 slowly."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))
    batch, targets = torch.randn(32, 16), torch.randn(32, 3)
    if kind is not None:
        ft.model.multiply_in_low_precision_(net, kind, min_features=16)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for _ in range(100):
        loss = F.mse_loss(net(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_the_loss_over_a_hundred_steps_follows_full_precision():
    plain = losses_of_a_fit(None)
    assert plain[-10:].mean() < 0.5 * plain[0]
    for kind in KINDS:
        ours = losses_of_a_fit(kind)
        assert not torch.equal(ours, plain)
        assert float(ours[-10:].mean()) == pytest.approx(float(plain[-10:].mean()), rel=0.01)


def test_memory_of_8_bit_products_is_predicted():
    torch.manual_seed(0)
    batch = torch.randn(64, 256)
    blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2)]
    net, products = nn.Sequential(*blocks), ft.model.LowPrecisionProducts("int8", min_features=16)

    def loss_of(net, batch):
        return net(batch).square().mean()

    predicted = ft.predict_memory(
        net, batch, loss=loss_of, optimizer=torch.optim.AdamW, techniques=[products], device="cpu"
    )
    assert predicted.notes == ()
    ft.apply(net, [products])
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        peak = PeakMemory("cpu", net, optimizer)
        with peak:
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert predicted.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_kind
def test_gpu_values_equal_the_cpus_and_a_large_layer_is_timed(kind):
    if torch.cuda.get_device_capability() < low_precision_products.FORMATS[kind].capability:
        pytest.skip("this GPU has no such tensor cores")
    first, second = factors()
    on_gpu = multiply_rows(first.cuda(), second.cuda(), kind).cpu()
    expected = multiply_rows(first, second, kind)
    # Hopper's tensor cores add products of float8 values with fewer than 24 bits.
    rounding = 1e-3 if kind == "float8" else 1e-5
    assert (on_gpu - expected).abs().max() <= rounding * expected.abs().max()
    torch.manual_seed(0)
    layer, input = nn.Linear(4096, 4096).cuda().bfloat16(), torch.randn(8192, 4096).cuda().bfloat16()
    input.requires_grad_()

    def timed(step):
        for turn in range(8):
            if turn == 3:
                torch.cuda.synchronize()
                start = time.perf_counter()
            step(input).sum().backward()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 5 * 1e3

    plain, eager = timed(layer), timed(lambda x: linear_in_8_bits(x, layer.weight, layer.bias, kind))
    compiled = torch.compile(lambda x: linear_in_8_bits(x, layer.weight, layer.bias, kind))
    print(f"{kind}, 8192 × 4096 × 4096: bf16 {plain:.2f} ms, eager {eager:.2f} ms, compiled {timed(compiled):.2f} ms")
