"""A LightningModule that holds a PeftModel already, or is one: every function accepts it."""

import lightning as L
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from tests.support.nets import as_loader, trainer

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's own use
TOKENS = torch.arange(64).view(4, 16)


def plain_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


class Net(L.LightningModule):
    def __init__(self, **settings):
        super().__init__()
        model = plain_model()
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
        self.model = peft.get_peft_model(model, lora)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    @torch.no_grad()
    def logits(self):
        return self.model(input_ids=TOKENS).logits


@pytest.fixture
def net():
    return Net()


def test_adapter_of_a_peft_model_is_found_once(net):
    assert ft.finetune.adapter_names(net) == ft.finetune.adapter_names(net.model) == ["default"]
    assert len(ft.finetune.trained_names(net)) == 2 * 2 * 2


def test_base_of_a_peft_model_is_the_plain_model(net):
    expected = plain_model()(input_ids=TOKENS).logits
    with ft.finetune.base_model(net):
        assert torch.equal(net.logits(), expected)
    assert not torch.equal(net.logits(), expected)


def test_files_are_compatible_with_peft(net, tmp_path):
    ft.finetune.save_adapter(net, tmp_path / "ours")
    read = peft.PeftModel.from_pretrained(plain_model(), tmp_path / "ours")
    assert torch.equal(read(input_ids=TOKENS).logits, net.logits())

    net.model.save_pretrained(tmp_path / "theirs")
    other = Net()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    ft.finetune.load_adapter_(other, tmp_path / "theirs")
    assert torch.equal(other.logits(), net.logits())


def test_merging_and_unmerging_a_peft_model_restores_it(net):
    before = net.logits()
    ft.finetune.merge_adapters_(net)
    torch.testing.assert_close(net.logits(), before, atol=1e-5, rtol=1e-5)
    ft.finetune.unmerge_adapters_(net)
    assert torch.equal(net.logits(), before)


def test_unloading_gives_the_plain_model_with_merged_weights(net):
    before = net.logits()
    assert ft.finetune.unload_adapters_(net) is net
    assert type(net.model) is LlamaForCausalLM
    assert net.model.state_dict().keys() == plain_model().state_dict().keys()
    torch.testing.assert_close(net.logits(), before, atol=1e-5, rtol=1e-5)


def test_unloading_without_merging_gives_the_plain_model(net):
    ft.finetune.unload_adapters_(net, merge=False)
    for name, tensor in plain_model().state_dict().items():
        assert torch.equal(net.model.state_dict()[name], tensor)
    assert torch.equal(net.logits(), plain_model()(input_ids=TOKENS).logits)


def test_unloading_a_peft_model_returns_the_inner_model(net):
    before = net.logits()
    model = ft.finetune.unload_adapters_(net.model)
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(model(input_ids=TOKENS).logits, before, atol=1e-5, rtol=1e-5)


def test_techniques_do_not_change_training_of_a_peft_model():
    ended = []
    for techniques in ([], [ft.ActivationCheckpointing(), ft.MicroBatching(2), ft.FusedLossHead()]):
        net = Net()
        trainer(techniques, max_steps=3).fit(net, as_loader([TOKENS] * 3))
        ended.append(net)
    for (name, one), other in zip(ended[0].named_parameters(), ended[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)
    assert not torch.equal(ended[0].logits(), Net().logits())


def test_base_of_a_peft_model_can_be_quantised():
    plain = peft.get_peft_model(plain_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    report = ft.finetune.quantize_base_(plain, skip=["**.q_proj"])
    assert len(report.quantized) == 2 * 6
    assert plain(input_ids=TOKENS).logits.isfinite().all()


def test_what_a_peft_model_cannot_share_is_refused_when_it_is_saved_or_loaded(tmp_path):
    theirs = peft.get_peft_model(plain_model(), peft.VeraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="outside of the layers. Save it with the PeftModel's save_pretrained"):
        ft.finetune.save_adapter(theirs, tmp_path / "ours")
    prompt = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    peft.get_peft_model(plain_model(), prompt).save_pretrained(tmp_path / "theirs")
    with pytest.raises(TypeError, match="config=AdaptionPromptConfig: PEFT adds this kind to a whole"):
        ft.finetune.load_adapter_(plain_model(), tmp_path / "theirs")
