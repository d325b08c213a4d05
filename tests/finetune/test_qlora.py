"""QLoRA is bitwise quantisation plus LoRA, and combines with techniques that save other memory."""

import copy

import lightning as L
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import BitsAndBytesConfig

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import QLoRA, QuantizedBase, dequantized_weight, quantize_base_
from tests.finetune.test_merge import awake
from tests.finetune.test_merge_quantized import WideLM
from tests.finetune.test_targets import TINY, llama
from tests.support.nets import (
    Gradients,
    ShallowLM,
    as_loader,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    trainer,
    untied,
    weights,
)
from tests.support.ranks import run_code

BATCHES = lm_batches(4)
KINDS = ("nf4", "fp4", "int8")


def same(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def trained(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [[], ["head", "blocks.1.down"]])
def test_qlora_is_bitwise_quantised_base_plus_lora(kind, train):
    adapter = {"rank": 2, "targets": ["0.up", "1.up", "0.down"], "dropout": 0.1, "train": train}
    two = [ft.LoRA(**adapter), QuantizedBase(kind, skip=["blocks.2", *train])]  # in any order
    one = fit(untied(), BATCHES, [QLoRA(**adapter, kind=kind, skip="blocks.2")])
    same(weights(fit(untied(), BATCHES, two)), weights(one))
    assert type(one.blocks[0].up).__module__ == "peft.tuners.lora.bnb"
    assert type(one.blocks[2].up) is nn.Linear
    assert len(trained(one)) == 2 * 3 + 3 * bool(train)


@pytest.mark.parametrize("kind", KINDS)
def test_qlora_trains(kind):
    batches = lm_batches(1) * 40
    module = fit(ShallowLM(lr=0.05), batches, [QLoRA(rank=4, kind=kind)])
    assert float(module.losses[-1]) < 0.7 * float(module.losses[0])


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_gradients_equal_those_with_dequantised_weights(kind, double_quant):
    model = ShallowLM()
    ft.apply(model, [QLoRA(rank=2, alpha=6, kind=kind, double_quant=double_quant)])
    awake(model).loss(BATCHES[0]).backward()
    dense, scale = ShallowLM(), 6 / 2
    expected = {}
    for i, block in enumerate(model.blocks):
        for end in ("up", "down"):
            layer, old = getattr(block, end), getattr(dense.blocks[i], end)
            a = layer.lora_A["default"].weight.detach().clone().requires_grad_()
            b = layer.lora_B["default"].weight.detach().clone().requires_grad_()
            w = dequantized_weight(layer.base_layer)
            old.forward = lambda x, w=w, a=a, b=b, bias=old.bias: x @ (w + scale * b @ a).T + bias
            expected |= {f"blocks.{i}.{end}.lora_{n}.default.weight": p for n, p in (("A", a), ("B", b))}
    dense.loss(BATCHES[0]).backward()
    expected = {name: parameter.grad for name, parameter in expected.items()}
    assert largest_difference(expected, gradients(model)) < 1e-5


def gradients_with(*techniques, adapter=None, **settings):
    seen = Gradients()
    fit(ShallowLM(dropout=0.1), BATCHES, [adapter or QLoRA(rank=2), *techniques, seen], **settings)
    return seen.seen


def test_activation_checkpointing_does_not_change_gradients():
    for expected, found in zip(gradients_with(), gradients_with(ft.ActivationCheckpointing()), strict=True):
        same(expected, found)
        assert float(found["blocks.0.up.lora_B.default.weight"].abs().max()) > 0


ADAPTERS = {"qlora": lambda: QLoRA(rank=2), "lora": lambda: ft.LoRA(rank=2)}
each_adapter = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)


@each_adapter
@pytest.mark.parametrize(
    "other",
    [lambda: ft.MicroBatching(3), lambda: ft.CompileBlocks(backend="aot_eager"), lambda: ft.OptimizerInBackward()],
    ids=["micro", "compiled", "in backward"],
)
def test_other_techniques_do_not_change_training(adapter, other):
    torch._dynamo.reset()
    expected = weights(fit(ShallowLM(), BATCHES, [adapter()]))
    found = weights(fit(ShallowLM(), BATCHES, [adapter(), other()]))
    assert largest_difference(expected, found) < 1e-5


@each_adapter
def test_autocast_is_close_to_float32(adapter):
    wide, narrow = (fit(ShallowLM(), BATCHES, [adapter()], precision=p) for p in ("32-true", "bf16-mixed"))
    for a, b in zip(wide.losses, narrow.losses, strict=True):
        assert float(a) == pytest.approx(float(b), rel=2e-2)
    assert {p.dtype for p in trained(narrow).values()} == {torch.float32}
    assert all(float(p.abs().max()) > 0 for p in trained(narrow).values())


PROGRAM = """
import sys, torch, lightning_fasttrain as ft
from lightning_fasttrain.finetune import QLoRA
from tests.support.nets import ShallowLM, as_loader, lm_batches, trainer
torch.manual_seed(99)
module, t = ShallowLM(), trainer([QLoRA(rank=2, kind=sys.argv[1], dropout=0.1)], max_epochs=2)
t.fit(module, as_loader(lm_batches(4)), ckpt_path=sys.argv[2], weights_only=True)
torch.save(module.state_dict(), sys.argv[3])
"""


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_checkpoint_resumes_bitwise_in_another_process(kind, tmp_path):
    class Save(ft.Technique):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = fit(ShallowLM(), BATCHES, [QLoRA(rank=2, kind=kind, dropout=0.1), Save()], max_epochs=2)
    held = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name for name, value in held.items() if isinstance(value, torch.Tensor))
    run_code(PROGRAM, kind, tmp_path / "half.ckpt", tmp_path / "end.pt", folder=tmp_path)
    same(weights(whole), torch.load(tmp_path / "end.pt", weights_only=False))


@pytest.mark.parametrize("technique", [lambda: QLoRA(rank=2), lambda: ft.LoRA(rank=2)], ids=["qlora", "lora"])
@pytest.mark.parametrize("bits", [4, 8])
def test_models_quantised_by_hugging_face_are_adapted(bits, technique, tmp_path):
    llama().save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, quantization_config=settings, device_map={"": "cpu"})
    packed = [p.detach().clone() for p in model.parameters() if not p.is_floating_point()]
    ft.apply(model, [technique()])
    ids = BATCHES[0]["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert {name.rpartition("lora_")[1] for name in trained(model)} == {"lora_"}
    assert all(
        torch.equal(a, b)
        for a, b in zip(packed, (p for p in model.parameters() if not p.is_floating_point()), strict=True)
    )


def test_adapters_are_in_float32_for_every_compute_dtype():
    for model, dtype in ((WideLM(), torch.float32), (WideLM().bfloat16(), torch.bfloat16)):
        ft.apply(model, [QLoRA(rank=2, compute_dtype=torch.bfloat16, variant="dora")])
        assert {p.dtype for p in trained(model).values()} == {torch.float32}
        assert model(BATCHES[0]["input_ids"]).dtype == dtype
        model.loss(BATCHES[0]).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_ia3_trains_on_quantised_weights(kind):
    model = ShallowLM()
    quantize_base_(model, kind)
    base = model.eval()(BATCHES[0]["input_ids"])
    ft.apply(model, [ft.finetune.IA3("up")])
    assert torch.equal(model(BATCHES[0]["input_ids"]), base)
    factors = model.blocks[0].up.ia3_l["default"]
    factors.data.mul_(2)
    x = torch.randn(3, 8)
    torch.testing.assert_close(model.blocks[0].up(x), 2 * model.blocks[0].up.base_layer(x))
    model.train().loss(BATCHES[0]).backward()
    assert float(factors.grad.abs().max()) > 0


def test_dora_on_int8_runs_more_than_once():
    model = ShallowLM()
    ft.apply(model, [QLoRA(rank=2, kind="int8", variant="dora")])
    outputs = [model(BATCHES[0]["input_ids"]) for _ in range(3)]
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert all(torch.isfinite(one).all() for one in outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_adapters_on_quantised_layers_are_refused(kind):
    with pytest.raises(ValueError, match=r"QLoRA\(variant='pissa'\): this initialization decomposes"):
        QLoRA(variant="pissa")
    model = ShallowLM()
    quantize_base_(model, kind)
    before, required = weights(model), list(trained(model))
    for config, message in [
        (peft.LoraConfig(r=2, init_lora_weights="pissa"), r"'pissa' on 'blocks.0.up', which is quantised"),
        (peft.LoHaConfig(r=2), r"LOHA on 'blocks.0.up', which is quantised: PEFT does not support this adapter"),
    ]:
        with pytest.raises(TypeError, match=message):
            ft.finetune.add_adapter_(model, config, "up")
        same(weights(model), before)
        assert list(trained(model)) == required


def test_copies_train_independently():
    model = ShallowLM()
    ft.apply(model, [QLoRA(rank=2)])
    other = copy.deepcopy(model)
    before = weights(model)
    trainer([QLoRA(rank=2)]).fit(other, as_loader(BATCHES))
    same(weights(model), before)
    assert largest_difference(trained(model), trained(other)) > 0


def test_dora_in_4_bits_on_the_cpu_is_refused():
    with pytest.raises(TypeError, match=r"DoRA on 'blocks.0.up'.*multiple of 64"):
        ft.apply(ShallowLM(), [QLoRA(rank=2, variant="dora")])


class Padded(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(**TINY | {"num_hidden_layers": 1, "vocab_size": 1000})
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-4)


class DtypesOf4Bits(TorchDispatchMode):
    """Collects the dtypes that bitsandbytes' kernels are given or asked for."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "bitsandbytes":
            self.seen |= {one.dtype for one in tree_iter((args, result)) if isinstance(one, torch.Tensor)}
        return result


def test_its_layers_are_not_asked_in_float64_for_which_they_have_no_kernels():
    """On a CPU they would answer with memory that nothing was written to; a trial that doubts its rounding asks so."""
    length = torch.tensor([3, 12, 5, 7])[:, None]
    ids, kept = torch.randint(1, 1000, (4, 12)), torch.arange(12) < length
    batch = {"input_ids": ids * kept, "attention_mask": kept.long(), "labels": ids.where(kept, -100)}
    with DtypesOf4Bits() as watch:
        fit(Padded(), [batch], [QLoRA(rank=16), ft.MicroBatching(4)], precision="bf16-mixed")
    assert torch.bfloat16 in watch.seen
    assert torch.float64 not in watch.seen
