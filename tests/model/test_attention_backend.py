"""The back end of attention is measured on the model's own shapes, or forced, and restored."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

import lightning_fasttrain as ft
from lightning_fasttrain.model import AttentionBackend, AttentionChoice, attention_backend_
from lightning_fasttrain.model.kernels import attention_backend as module
from lightning_fasttrain.model.kernels.attention_backend import (
    AttentionCall,
    AttentionCalls,
    choose_backends,
    why_refused,
)
from tests.support.nets import TinyLM, as_loader, fit, heard, largest_difference, lm_batches, trainer, weights


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class AttentionLM(TinyLM):
    def __init__(self, dropout=0.0, **settings):
        super().__init__(depth=2, **settings)
        torch.manual_seed(7)  # the same weights in every run
        self.attention = Attention(dropout)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.blocks[0](x + self.attention(x))[0])


def allowed():
    return {backend.name for backend in _cur_sdpa_kernel_backends()}


def kernel_of(net, x):
    """The operator that computed the attention, as autograd names it."""
    nodes, names = [net(x).grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [before for before, _ in node.next_functions if before is not None]
    return "flash" if any("FlashAttention" in name for name in names) else "math"


@pytest.mark.parametrize("name", ["flash", "math"])
def test_a_forced_back_end_runs_and_torchs_own_choice_is_restored(name):
    net, x, before = Attention(), torch.randn(2, 5, 8), allowed()
    undo = attention_backend_(net, name)
    assert kernel_of(net, x) == name
    undo()
    assert allowed() == before
    assert "forward" not in vars(net)
    assert kernel_of(net, x) == "flash"


@pytest.mark.parametrize("faster", ["flash", "math"])
def test_the_fastest_is_used_from_the_second_step_on(faster, monkeypatch):
    def timed(call, names):
        assert names == ["flash", "math"]
        return {name: 1.0 if name == faster else 2.0 for name in names}

    monkeypatch.setattr("lightning_fasttrain.model.kernels.attention_backend._time", timed)
    net, x = Attention(), torch.randn(2, 5, 8)
    undo = attention_backend_(net)
    with heard() as said:
        assert [kernel_of(net, x) for _ in range(3)] == ["flash", faster, faster]
    undo()
    assert any(f"AttentionBackend: {faster} (" in line and "cudnn is refused: it runs on CUDA" in line for line in said)


def test_times_are_measured_for_what_the_step_calls():
    q = torch.randn(2, 2, 64, 4, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool)
    with AttentionCalls() as calls:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, mask)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with torch.no_grad():
            F.scaled_dot_product_attention(q, q, q)
    assert sorted(calls.found.values()) == [1, 3]
    state = torch.get_rng_state()
    choice = choose_backends(calls.found)
    assert not torch.equal(state, torch.get_rng_state())  # whoever calls it keeps the state
    assert choice.step_ms.keys() == {"flash", "math"}
    assert "do not support non-zero dropout" in choice.refused["flash"]
    assert choice.order[-1] == "math"


def test_attention_inside_of_torchs_own_layers_is_recorded():
    layer, x = nn.TransformerEncoderLayer(8, 2, dropout=0.25, batch_first=True), torch.randn(3, 5, 8)
    with AttentionCalls() as calls:
        layer(x, src_key_padding_mask=torch.zeros(3, 5, dtype=torch.bool)).sum().backward()
    (call,) = calls.found
    assert [layout.shape for layout in call.tensors] == [(3, 2, 5, 4)] * 3
    assert call.mask is not None
    assert dict(call.settings) == {"dropout_p": 0.25, "is_causal": False}


@pytest.mark.parametrize(
    ("name", "dropout", "why"),
    [
        ("flash", 0.5, "Both fused kernels do not support non-zero dropout"),
        ("cudnn", 0.0, "runs on CUDA devices only, and this is cpu"),
    ],
)
def test_a_forced_back_end_that_cannot_run_is_refused_with_the_reason(name, dropout, why):
    message = rf"AttentionBackend\('{name}'\): .*{why}.*Use AttentionBackend\(\)"
    with pytest.raises(ValueError, match=message):
        fit(AttentionLM(dropout), lm_batches(2), [AttentionBackend(name)])
    net, before = Attention(dropout), allowed()
    with ft.apply(net, [AttentionBackend(name)]), pytest.raises(ValueError, match=message):
        net(torch.randn(2, 5, 8))
    assert allowed() == before
    holder = nn.ModuleDict({"net": net})  # as a LightningModule's training_step, in a loop that calls no forward
    with ft.apply(holder, [AttentionBackend(name)]), pytest.raises(ValueError, match=message):
        holder["net"](torch.randn(2, 5, 8))
    assert "forward" not in vars(net)


def test_tables_that_do_not_fit_are_not_tried():
    q = torch.randn(1, 1, 1, 4).expand(1, 1, 2**20, 4)
    assert "need 12288.0 GiB" in why_refused(AttentionCall.of(q, q, q), "math")


def test_another_error_of_the_step_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(AttentionLM(), lm_batches(1), [AttentionBackend("flash"), Breaks()])
    assert allowed() >= {"FLASH_ATTENTION", "MATH"}


class Breaks(ft.Technique):
    """Makes the first step fail."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.attention.qkv = nn.Linear(9, 24)


def test_a_run_chooses_saves_the_choice_and_restores(tmp_path, monkeypatch):
    times = iter([{"flash": 2.0, "math": 1.0}])
    monkeypatch.setattr("lightning_fasttrain.model.kernels.attention_backend._time", lambda call, names: next(times))
    before, technique = allowed(), AttentionBackend()
    t = trainer([technique])
    t.fit(AttentionLM(), as_loader(lm_batches(3)))
    assert technique.choice.order == ["math"]
    t.save_checkpoint(tmp_path / "half.ckpt")
    assert allowed() == before
    again, seen = AttentionBackend(), []
    net = AttentionLM()
    net.attention.register_forward_hook(lambda *_: seen.append(allowed()))
    t = trainer([again], max_epochs=2)
    t.fit(net, as_loader(lm_batches(3)), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert again.choice.order == ["math"]
    assert seen == [{"MATH"}] * 3  # from the first step on, without measuring
    assert allowed() == before


def test_training_is_the_same_up_to_rounding():
    def net():
        return AttentionLM(optimizer=torch.optim.SGD)

    plain = fit(net(), lm_batches(4))
    for technique in (AttentionBackend(), AttentionBackend("math")):
        assert largest_difference(weights(plain), weights(fit(net(), lm_batches(4), [technique]))) < 1e-5


def test_measured_beside_compiled_blocks_is_refused_and_forced_is_not():
    with pytest.raises(
        ValueError, match=r"AttentionBackend \+ CompileBlocks: compiled code keeps .*AttentionBackend\('fl"
    ):
        fit(AttentionLM(), lm_batches(1), [AttentionBackend(), ft.CompileBlocks(backend="eager")])
    fit(AttentionLM(), lm_batches(1), [AttentionBackend("math"), ft.CompileBlocks(backend="eager")])


def test_a_model_without_attention_is_said_to_have_none():
    technique = AttentionBackend()
    net = fit(TinyLM(), lm_batches(2), [technique])
    assert "scaled_dot_product_attention was not called" in technique.outcome(net)


def test_the_names_are_those_of_torch():
    assert {backend.name for backend in module.BACKENDS.values()} <= set(SDPBackend.__members__)
    assert str(AttentionChoice(["flash"])) == "flash (chosen earlier)."
