"""Compiled blocks recompute attention without a random state where it has no dropout, and with one where it has."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import lightning_fasttrain as ft
from lightning_fasttrain.model.compile import compiled_forward as compiled_code
from lightning_fasttrain.model.compile.compiled_forward import RecomputeWithoutRandomState, draws_nothing
from tests.support.ranks import run_code

KINDS = sorted(compiled_code._KINDS)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.project, self.dropout = nn.Linear(32, 96), dropout

    def forward(self, x):
        q, k, v = self.project(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 16, 32)
        return x + F.dropout(attended, self.dropout)


def recomputed(*techniques, dropout=0.0):
    """Two blocks after one step, and the code that was compiled for it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = nn.Sequential(Block(dropout), Block(dropout))
    x = torch.randn(2, 16, 32, requires_grad=True)
    with ft.apply(net, [ft.ActivationCheckpointing(), *techniques]):
        loss, code = run_fw_bw_and_get_code(lambda: net(x).square().sum())
    return net, x.grad, loss.item(), "\n".join(code)


def test_compiled_blocks_save_no_random_state_for_attention():
    eager, gradient, loss, _ = recomputed()
    net, compiled_gradient, compiled_loss, code = recomputed(ft.CompileBlocks(check=False))
    assert "scaled_dot_product_flash_attention_for_cpu" in code
    assert "rng_state" not in code
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(compiled_gradient, gradient, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_attention_is_still_recomputed():
    *_, code = recomputed(ft.CompileBlocks(check=False))
    assert code.count("scaled_dot_product_flash_attention_for_cpu.default(") == 2  # in the forward and in the backward


def test_dropout_in_the_block_is_drawn_again_as_it_was():
    """The gradient of a recomputed block is that of the masks of its forward."""
    _, gradient, loss, _ = recomputed(dropout=0.5)
    with torch._inductor.config.patch(fallback_random=True):  # the masks of eager code
        _, compiled_gradient, compiled_loss, _ = recomputed(ft.CompileBlocks(check=False), dropout=0.5)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(compiled_gradient, gradient, rtol=1e-5, atol=1e-5)


TWICE = """
import torch
import lightning_fasttrain as ft
from tests.model.test_recomputed_attention import recomputed
# In an empty cache, headers and a trial for each vector length would take longer to compile than the kernels do.
torch._inductor.config.cpp_cache_precompile_headers = torch._inductor.config.cpp.vec_isa_ok = False
*_, loss, code = recomputed(ft.CompileBlocks(check=False, fallback=False))
print(loss, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def test_code_from_the_compilers_cache_runs_in_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    first, second = (run_code(TWICE, folder=tmp_path).split()[-2:] for _ in range(2))
    assert (first[1], second[1]) == ("0", "2")  # the forward and the backward
    assert first[0] == second[0]


def node_of(kind, *args, recompute=CheckpointPolicy.PREFER_RECOMPUTE, **kwargs):
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    node = graph.call_function(getattr(torch.ops.aten, kind).default, (*inputs, *args), kwargs)
    node.meta["recompute"] = recompute
    return graph, node


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_found_wherever_it_is_given(kind):
    before = (None, True) if "efficient" in kind or "cudnn" in kind else ()
    assert draws_nothing(node_of(kind, *before)[1])
    assert draws_nothing(node_of(kind, *before, 0.0)[1])
    assert not draws_nothing(node_of(kind, *before, 0.1)[1])
    assert not draws_nothing(node_of(kind, *before, dropout_p=0.1)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_recomputed_and_draws_nothing_is_replaced(kind):
    before = (None, True) if "efficient" in kind or "cudnn" in kind else ()
    marked = getattr(torch.ops.aten, kind).default
    for graph, node in (node_of(kind, *before, recompute=None), node_of(kind, *before, 0.1)):
        RecomputeWithoutRandomState()(graph)
        assert node.target is marked
    graph, node = node_of(kind, *before)
    RecomputeWithoutRandomState()(graph)
    assert torch.Tag.nondeterministic_seeded not in node.target.tags
    assert str(node.target._schema).endswith(str(marked._schema).split(kind)[1])
    with FakeTensorMode():
        device = "cpu" if kind.endswith("cpu") else "cuda"
        q = torch.empty(2, 4, 64, 32, device=device, dtype=torch.bfloat16)
        found, expected = node.target(q, q, q, *before), marked(q, q, q, *before)
    assert [getattr(part, "shape", part) for part in found] == [getattr(part, "shape", part) for part in expected]


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_of_the_users_own_is_treated_alike():
    torch.manual_seed(0)
    net, own = (nn.Sequential(kind(), kind()) for kind in (Block, Checkpointed))
    own.load_state_dict(net.state_dict())
    x = torch.randn(2, 16, 32)
    with ft.apply(own, [ft.CompileBlocks(check=False)]):
        loss, code = run_fw_bw_and_get_code(lambda: own(x).square().sum())
    assert "rng_state" not in "\n".join(code)
    assert loss.item() == pytest.approx(net(x).square().sum().item(), rel=1e-6)


def test_a_pass_of_the_users_own_stays_in_force():
    graphs = []
    with torch._inductor.config.patch(joint_custom_pre_pass=graphs.append):
        recomputed(ft.CompileBlocks(check=False))
    assert len(graphs) == 1
