"""Adapters train in float32 on a low-precision base, however they were created, as PEFT's own do."""

import copy

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from tests.finetune.test_merge import awake
from tests.finetune.test_targets import llama
from tests.support.nets import TinyLM, as_loader, fit, lm_batches, trainer, untied

peft = pytest.importorskip("peft")
IDS = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))
KINDS = {
    "lora": lambda: ft.LoRA(rank=2),
    "dora": lambda: ft.LoRA(rank=2, variant="dora"),
    "ia3": lambda: ft.finetune.IA3(["up"]),
    "embedding": lambda: ft.LoRA(rank=2, targets=["up", "embed"]),
    "qlora": lambda: ft.QLoRA(rank=2, skip="head"),
}


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def dtypes(module):
    return {p.dtype for p in trained(module).values()}


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_change_every_adapter_weight_in_a_bf16_run(kind):
    module = untied(lr=1e-4, weight_decay=0.0)
    ft.apply(module, [KINDS[kind]()])
    before = {name: p.detach().clone() for name, p in trained(awake(module)).items()}
    module = fit(module, lm_batches(8), [KINDS[kind]()], precision="bf16-true")
    assert dtypes(module) == {torch.float32}
    assert module.blocks[0].norm.weight.dtype == torch.bfloat16
    for name, parameter in trained(module).items():
        moved = parameter.detach() != before[name]
        if "embedding_A" in name:  # tokens that do not occur have no gradient
            continue
        assert moved.float().mean() > 0.99, name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_forward_on_a_bf16_base_equals_pefts(settings):
    base = llama().bfloat16()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **settings)
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    ours = base
    ft.finetune.add_adapter_(ours, config)
    awake(ours)
    for parameter, value in zip(theirs.parameters(), ours.parameters(), strict=True):
        parameter.data.copy_(value)
    assert dtypes(ours) == dtypes(theirs) == {torch.float32}
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    assert ours(IDS).logits.dtype == torch.bfloat16


def test_moving_and_casting_the_model_does_not_round_adapters():
    module = untied()
    ft.apply(module, [ft.LoRA(rank=2)])
    before = {name: p.detach().clone() for name, p in trained(awake(module)).items()}
    other = copy.deepcopy(module)
    fabric = L.Fabric(accelerator="cpu", precision="bf16-true")
    for moved in (module.to(torch.bfloat16), module.half(), fabric.setup(other).module):
        assert moved.blocks[0].norm.weight.dtype != torch.float32
        assert all(torch.equal(p, before[name]) for name, p in trained(moved).items())
    assert {p.dtype for p in trained(module.double()).values()} == {torch.float64}  # this conversion loses nothing


def test_loaded_adapter_keeps_its_values_on_a_bf16_base(tmp_path):
    first, second = untied(), untied().bfloat16()
    ft.apply(first, [ft.LoRA(rank=2)])
    folder = ft.finetune.save_adapter(awake(first), tmp_path / "adapter")
    ft.finetune.load_adapter_(second, folder, trainable=True)
    stored = dict(trained(first))
    assert all(torch.equal(p, stored[name]) for name, p in trained(second).items())
    assert trained(second).keys() == stored.keys()


def test_resumed_bf16_run_has_the_same_float32_adapters(tmp_path):
    path = tmp_path / "run.ckpt"
    module, t = untied(), trainer([ft.LoRA(rank=2)], precision="bf16-true", max_steps=2)
    t.fit(module, as_loader(lm_batches(4)))
    t.save_checkpoint(path)
    again = untied()
    trainer([ft.LoRA(rank=2)], precision="bf16-true", max_steps=2).fit(again, as_loader(lm_batches(4)), ckpt_path=path)
    assert dtypes(again) == {torch.float32}
    assert all(torch.equal(p, trained(module)[name]) for name, p in trained(again).items())


def test_virtual_tokens_stay_in_float32_too():
    model = torch.nn.ModuleDict({"lm": llama()})
    ft.finetune.add_prompt_(model, peft.PromptTuningConfig(num_virtual_tokens=3))
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    assert model.bfloat16()["lm"](IDS).logits.dtype == torch.bfloat16
    assert all(torch.equal(p, before[name]) for name, p in trained(model).items())


# A head that trains in full beside adapters. (IA)³ draws no random numbers, so every host starts the same.


def with_head():
    return ft.finetune.IA3(["up"], train=["head"])


def trained_head(module):
    return trained(module)["head.modules_to_save.default.weight"]


def head_by_hand():
    """The weight of a head in float32 after the run; each forward sees it rounded, by hand."""
    module = untied()
    ft.apply(module, [ft.finetune.IA3(["up"])])
    weight = module.bfloat16().head.weight.requires_grad_(True)
    kept = torch.nn.Parameter(untied().head.weight.detach().clone())
    factors = [parameter for name, parameter in trained(module).items() if name != "head.weight"]
    optimizer = torch.optim.AdamW([*factors, kept], lr=1e-4, weight_decay=0.0)
    for batch in lm_batches(8):
        weight.data = kept.detach().bfloat16()
        module.loss(batch).backward()
        kept.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
    return kept


def head_in_fabric():
    module = untied()
    ft.apply(module, [with_head()])
    fabric = L.Fabric(accelerator="cpu", precision="bf16-true")
    optimizer = torch.optim.AdamW(trained(module).values(), lr=1e-4, weight_decay=0.0)
    wrapped, optimizer = fabric.setup(module, optimizer)
    wrapped.mark_forward_method("loss")
    for batch in lm_batches(8):
        fabric.backward(wrapped.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
    return module


def head_in_trainer(*callbacks, net=TinyLM, **settings):
    module = untied(net, lr=1e-4, weight_decay=0.0)
    return fit(module, lm_batches(8), callbacks, precision="bf16-true", **settings)


class WithHead(ft.FastTrainMixin, TinyLM):
    @property
    def techniques(self):
        return [with_head()]


HOSTS = {
    "Trainer": lambda: head_in_trainer(with_head()),
    "mixin": lambda: head_in_trainer(net=WithHead),
    "Fabric": head_in_fabric,
    "fused head": lambda: head_in_trainer(with_head(), ft.FusedLossHead("head.modules_to_save.default")),
    "optimizer in backward": lambda: head_in_trainer(with_head(), ft.OptimizerInBackward()),
}


@pytest.mark.parametrize("host", HOSTS)
def test_head_that_trains_in_full_has_float32_updates_and_a_bf16_forward(host):
    module = HOSTS[host]()
    assert trained_head(module).dtype == torch.float32
    assert module.head.original_module.weight.dtype == torch.bfloat16
    expected = head_by_hand()
    # The fused loss rounds its gradient at another place.
    assert (trained_head(module) - expected).abs().max() <= (1e-5 if host == "fused head" else 0)
    assert not torch.equal(expected, untied().head.weight)
    assert module.eval()(IDS).dtype == torch.bfloat16


def test_outputs_of_a_trained_head_survive_saving_and_merging(tmp_path):
    """Fresh processes load such adapters in ``test_round_trips.py``."""
    module = head_in_fabric().eval()
    expected = module(IDS)
    again = untied().bfloat16()
    ft.finetune.load_adapter_(again, ft.finetune.save_adapter(module, tmp_path / "adapter"))
    assert torch.equal(again.eval()(IDS), expected)
    assert torch.equal(again.head.modules_to_save["default"].weight, trained_head(module))
    weight = trained_head(module).detach().clone()
    ft.finetune.unload_adapters_(module)
    assert torch.equal(module(IDS), expected)
    assert torch.equal(module.head.weight, weight.bfloat16())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert "_apply" not in vars(module.head)
    assert not module.head._forward_pre_hooks


def test_buffers_of_a_trained_module_are_rounded_with_the_base():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    ft.finetune.add_adapter_(net, peft.IA3Config(feedforward_modules=[]), "0", train=["1"])
    norm = net.bfloat16()[1].modules_to_save["default"]
    net(torch.randn(8, 4, dtype=torch.bfloat16)).sum().backward()
    assert norm.weight.dtype == norm.weight.grad.dtype == torch.float32
    assert norm.running_mean.dtype == torch.bfloat16
    assert norm.running_mean.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_modules_that_train_in_full_stay_tied(dtype, tmp_path):
    base = TinyLM().to(dtype)
    model = copy.deepcopy(base)
    ft.finetune.add_adapter_(model, KINDS["ia3"]().config, ["up"], train=["embed", "head"])
    assert [name for name in trained(model) if "ia3" not in name] == ["embed.modules_to_save.default.weight"]
    model(IDS).float().square().sum().backward()
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.1 * parameter.grad)
    expected = model(IDS)
    folder = ft.finetune.save_adapter(model, tmp_path / "adapter")
    again = copy.deepcopy(base)
    ft.finetune.load_adapter_(again, folder, trainable=True)
    assert trained(again).keys() == trained(model).keys()
    assert torch.equal(again(IDS), expected)
    assert torch.equal(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)(IDS), expected)
    ft.finetune.unload_adapters_(model)
    assert model.embed.weight is model.head.weight


def test_a_file_in_which_tied_modules_differ_is_refused(tmp_path):
    theirs = peft.get_peft_model(
        untied(), peft.LoraConfig(r=2, target_modules=["up"], modules_to_save=["embed", "head"])
    )
    theirs.base_model.model.head.modules_to_save["default"].weight.data.add_(1)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    module = TinyLM()
    with pytest.raises(ValueError, match="'head.weight' and 'embed.weight' share their weight in this model"):
        ft.finetune.load_adapter_(module, tmp_path)
    assert not any("lora" in name for name, _ in module.named_parameters())


def test_a_head_whose_forward_fails_has_its_own_weights_again():
    module = untied()
    ft.apply(module, [with_head()])
    head = module.bfloat16().head.modules_to_save["default"]
    with pytest.raises(RuntimeError):
        head(torch.ones(3, 5, dtype=torch.bfloat16))
    assert head.weight is head._parameters["weight"]
    assert copy.deepcopy(module)(IDS).dtype == torch.bfloat16
