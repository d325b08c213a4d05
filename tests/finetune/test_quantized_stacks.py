"""Experts in one 4-bit tensor: the same values as with the dequantised tensor, in less memory."""

import copy
import gc
import pickle

import lightning as L
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import load_quantized, quantize_base_, trained_names, trained_state
from lightning_fasttrain.finetune.quantized.quantized_tensor import dequantize_tensor, held_tensors
from lightning_fasttrain.finetune.selection.base_fingerprint import base_fingerprint
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import as_loader, largest_difference, trainer

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 90}
MODELS = {
    "Mixtral": {**SIZE, "intermediate_size": 96, "num_local_experts": 4},
    "Qwen3Moe": {
        **SIZE, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    },
    "GptOss": {
        **SIZE, "intermediate_size": 96, "num_local_experts": 4, "head_dim": 32,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
each = pytest.mark.parametrize("kind", MODELS)
EXPERTS = 2 * 2  # layers, and tensors in each


def build(kind="Mixtral", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**MODELS[kind], **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch(rows=2, seed=1):
    ids = torch.randint(0, 90, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def owners(model):
    return [module for module in model.modules() if held_tensors(module)]


def dequantized(kind, quantized):
    """Return the plain model with the dequantised weights."""
    model = build(kind)
    for name, module in quantized.named_modules():
        for key, holder in held_tensors(module).items():
            model.get_submodule(name)._parameters[key].data.copy_(dequantize_tensor(holder))
    return model


def step(model, given=None):
    model.zero_grad()
    loss = model(**(given or batch())).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@each
@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_loss_and_gradients_equal_those_of_dequantised_experts_bitwise(kind, way):
    model = build(kind)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    report = quantize_base_(model, skip=linear)
    assert len(report.stacks) == EXPERTS
    assert report.quantized == ()
    plain = dequantized(kind, model)
    for one in (model, plain):
        one.set_experts_implementation(way)
    (loss, grads), (expected, all_grads) = step(model), step(plain)
    assert loss == expected
    assert set(all_grads) - set(grads) == set(report.stacks)
    assert all(torch.equal(grads[name], all_grads[name]) for name in grads)


def test_a_forward_without_a_backward_leaves_nothing_in_memory():
    model = build("GptOss")  # whose gates save their own output
    quantize_base_(model)
    given = batch()
    rows = given["input_ids"].numel()

    def count_activations():
        gc.collect()
        return sum(type(one) is torch.Tensor and one.shape[:1] == (rows,) for one in gc.get_objects())

    model(**given)
    before = count_activations()
    model(**given)
    assert count_activations() == before


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
def test_packed_stack_equals_bitsandbytes_result(quantization, double):
    import bitsandbytes.functional as F

    model = build()
    before = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    quantize_base_(model, quantization, double_quant=double)
    packed, state = F.quantize_4bit(
        before.view(-1, before.shape[-1]), blocksize=64, compress_statistics=double, quant_type=quantization
    )
    expected = F.dequantize_4bit(packed, state).view(before.shape)
    assert torch.equal(dequantize_tensor(model.model.layers[0].mlp.experts.gate_up_proj), expected)
    assert (expected - before).norm() / before.norm() < 0.15


@each
def test_memory_shrinks_as_reported(kind):
    model = build(kind)
    before = sum(p.nbytes for name, p in model.named_parameters() if p.ndim == 3)
    report = quantize_base_(model)
    assert report.bytes_before > before
    assert report.bytes_after < 0.16 * report.bytes_before
    assert f"and {EXPERTS} stacks of matrices in nf4" in str(report)
    assert not any(name in report.left for name in report.stacks)
    again = quantize_base_(model)
    assert set(report.stacks) <= set(again.already)
    assert again.stacks == ()


@each
def test_keys_and_files_are_those_of_the_plain_model(kind, tmp_path):
    plain, model = build(kind), build(kind)
    names = list(plain.state_dict())
    quantize_base_(model)
    state = model.state_dict()
    assert set(names) <= set(state)
    assert all(any(name.startswith(f"{own}.") for own in names) for name in set(state) - set(names))
    assert set(base_fingerprint(model)) == set(base_fingerprint(plain))
    other = build(kind, initializer_range=0.1)
    quantize_base_(other)
    for source in (state, plain.state_dict()):
        other.load_state_dict(source)
        assert step(other)[0] == step(model)[0]
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}, tmp_path / "model.safetensors"
    )
    streamed = load_quantized(lambda: build(kind), tmp_path / "model.safetensors")
    assert step(streamed)[0] == step(model)[0]


def test_a_checkpoint_of_other_experts_is_refused():
    model, other = build(), build(num_local_experts=2)
    quantize_base_(model)
    quantize_base_(other)
    with pytest.raises(RuntimeError, match="experts"):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="is neither a plain weight nor quantised to 4 bits"):
        model.load_state_dict(build(num_local_experts=2).state_dict())


def test_copies_and_pickles_are_independent():
    model = build()
    quantize_base_(model)
    expected = step(model)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert step(other)[0] == expected
        nn.init.zeros_(other.lm_head.weight)
    assert step(model)[0] == expected


def test_forward_leaves_no_temporary_tensors():
    model = build()
    quantize_base_(model)
    step(model)
    for owner in owners(model):
        assert not any(isinstance(value, torch.Tensor) for value in vars(owner).values())
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10_000]]))
    assert len(owners(model)) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_casting_to_half_precision_after_quantising_works(autocast):
    model = build()
    quantize_base_(model, compute_dtype=torch.bfloat16)
    full = step(model)[0]
    if not autocast:
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert step(model)[0] == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize(
    "technique",
    [
        ft.ActivationCheckpointing,
        lambda: ft.ActivationOffload(min_mib=0),
        lambda: ft.CompileBlocks(backend="aot_eager"),
        lambda: ft.ActivationCheckpointing(ft.model.SelectiveOps()),
    ],
)
def test_other_techniques_do_not_change_gradients(technique):
    torch._dynamo.reset()
    model = build(num_hidden_layers=1)
    with ft.apply(model, [ft.QLoRA(rank=2)]):
        expected = step(model)
        with ft.apply(model, [technique()]):
            found = step(model)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert largest_difference(expected[1], found[1]) < 1e-6


def test_backward_saves_no_dequantised_experts():
    """If they were saved, they would be the full-precision model again."""
    model = build(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_local_experts=8)
    quantize_base_(model)
    experts = sum(4 * holder.stands_for[0] * holder.stands_for[1] * holder.stands_for[2]
                  for owner in owners(model) for holder in held_tensors(owner).values())  # fmt: skip
    given = batch(rows=1)
    peaks = []
    for keep in (False, True):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with PeakMemory(torch.device("cpu"), model, given) as memory:
            if keep:
                with hooks:  # other hooks handle activations, so these are not recreated
                    step(model, given)
            else:
                step(model, given)
        peaks.append(memory.peak_bytes)
        model.zero_grad(set_to_none=True)
    assert peaks[1] - peaks[0] > 0.6 * experts
    assert peaks[0] < 0.5 * peaks[1]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lm = build()

    def training_step(self, batch, _):
        return self.lm(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_qlora_trains_resumes_and_saves_only_adapters(tmp_path):
    batches = [batch(seed=seed) for seed in range(3)]
    half = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    through, resumed = Net(), Net()
    before = through.lm.lm_head.weight.detach().clone()
    trainer([ft.QLoRA(rank=2), half], max_epochs=2, enable_checkpointing=True).fit(through, as_loader(batches))
    path = tmp_path / "epoch=0.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {name for name in saved if isinstance(saved[name], torch.Tensor)} == set(trained_names(through))
    assert all("lora_" in name for name in trained_names(through))
    trainer([ft.QLoRA(rank=2)], max_epochs=2).fit(resumed, as_loader(batches), ckpt_path=path, weights_only=True)
    assert largest_difference(trained_state(through), trained_state(resumed)) == 0
    assert torch.equal(through.lm.lm_head.weight, before)
    ft.finetune.save_adapter(through, tmp_path / "adapter")
    fresh = build()
    quantize_base_(fresh)
    ft.finetune.load_adapter_(fresh, tmp_path / "adapter")
    assert fresh(**batches[0]).loss.item() == pytest.approx(through.lm(**batches[0]).loss.item(), abs=1e-6)


def test_an_adapter_on_the_tensor_itself_is_refused():
    model = build()
    quantize_base_(model)
    with pytest.raises(ValueError, match="matches nothing in MixtralForCausalLM"):
        ft.apply(model, [ft.LoRA(targets=["experts.gate_up_proj"])])


def test_int8_skips_stacks_and_reports_it():
    with pytest.warns(UserWarning, match=r"of the bytes of MixtralForCausalLM stay in full precision"):
        report = quantize_base_(build(), "int8")
    assert report.stacks == ()
    assert sum("experts" in name for name in report.left) == EXPERTS


def test_skipped_modules_and_other_tensors_are_not_quantised():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(8, 64, 64))
            self.positions = nn.Parameter(torch.randn(1, 8, 64))
            self.conv = nn.Conv1d(8, 8, 3)
            self.numbers = nn.Parameter(torch.ones(2, 2, 2, dtype=torch.float64))
            self.down = nn.Linear(64, 64)
            self.head = nn.Linear(64, 2)

    report = quantize_base_(Mine())
    assert report.stacks == ("experts",)
    assert set(report.left) == {"conv", "numbers", "head"}
    assert quantize_base_(nn.Sequential(Mine(), nn.Linear(64, 64), nn.Linear(64, 2)), skip=Mine).stacks == ()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_peak_memory_is_predicted(checkpointed):
    techniques = [ft.QLoRA(rank=2), *([ft.ActivationCheckpointing()] if checkpointed else [])]
    size = {"hidden_size": 128, "intermediate_size": 512, "num_local_experts": 8}
    given = batch(rows=4)

    class Sized(Net):
        def __init__(self):
            super().__init__()
            self.lm = build(**size)

    predicted = ft.predict_memory(Sized(), given, techniques=techniques, device="cpu").peak_bytes
    net = Sized()
    with ft.apply(net, techniques):
        optimizer = net.configure_optimizers()
        for _ in range(2):
            with PeakMemory(torch.device("cpu"), net, optimizer, given) as memory:
                net.training_step(given, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert predicted == pytest.approx(memory.peak_bytes, rel=0.05)


def test_a_convolution_with_weight_normalization_is_not_quantised():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
    report = quantize_base_(nn.Sequential(conv, nn.Linear(256, 256), nn.Linear(256, 2)))
    assert report.stacks == ()
    assert type(conv.parametrizations.weight.original1) is nn.Parameter
