"""Blocks are compiled once per kind, keep plain keys, and fall back with a warning."""

import copy
import gc
import logging
import sys
import weakref

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain import compile_blocks_
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, replaced_forward
from lightning_fasttrain.model import CompileWatch
from lightning_fasttrain.model.compile import compiled_forward
from tests.support.nets import TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A compiler backend that counts its graphs and runs them unchanged."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    "block",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
        lambda: nn.Linear(4, 4),
    ],
    ids=["Sequential", "TransformerEncoderLayer", "Linear"],
)
def test_torch_modules_compile_and_equal_blocks_compile_once(block):
    net, backend = nn.Sequential(*[block() for _ in range(4)]), Counting()
    x = torch.randn(2, 3, 4, requires_grad=True)  # as the inputs of all blocks but the first do
    expected = net(x)
    compiled = compile_blocks_(net, backend=backend)
    assert torch.allclose(net(x), expected, atol=1e-6)
    assert len(compiled) == 4
    assert backend.graphs == 1
    assert all(forward.failure is None for forward in compiled.values())


def test_blocks_of_different_shapes_do_not_share_the_recompile_limit():
    sizes = [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13]  # eleven shapes, limit is eight
    net = nn.ModuleList([nn.Sequential(nn.Linear(n, n), nn.Tanh()) for n in sizes])
    backend, watch = Counting(), CompileWatch()
    compile_blocks_(net, backend=backend)
    for n, block in zip(sizes, net, strict=True):
        block(torch.randn(2, n))
    assert backend.graphs == 11
    assert watch.report().recompiles == 0


class Scaled(WrappedForward):
    def __init__(self, module, factor):
        super().__init__(module)
        self.factor = factor

    def __call__(self, x):
        return self.inner(x) * self.factor


@pytest.mark.parametrize(
    ("factors", "graphs"), [([2] * 10, 1), ([2, 2, 2, 2, 2, 3, 3, 3, 3, 3], 2), (list(map(str, range(10))), 10)]
)
def test_blocks_with_replaced_layers_share_code_unless_these_differ(factors, graphs):
    net, backend = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)]), Counting()
    for block, factor in zip(net, factors, strict=True):
        Scaled(block[0], float(factor) if isinstance(factor, str) else factor).install()
    x = torch.randn(2, 4, requires_grad=True)
    expected = net(x)
    compile_blocks_(net, backend=backend, dynamic=False)
    torch.testing.assert_close(net(x), expected)
    assert backend.graphs == graphs


class Rated(nn.Module):
    """A block with stochastic depth, whose rate grows from layer to layer, as in vision transformers."""

    def __init__(self, rate):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rate = rate

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.training and self.rate > 0:
            y = y * torch.empty(x.size(0), 1).bernoulli_(1 - self.rate) / (1 - self.rate)
        return x + y


@pytest.mark.parametrize("evaluated_first", [False, True])
def test_blocks_that_differ_in_a_value_are_all_compiled(evaluated_first, recwarn):
    net, backend = nn.Sequential(*[Rated(layer / 20) for layer in range(12)]), Counting()
    x = torch.randn(2, 4, requires_grad=True)
    plain = copy.deepcopy(net)
    technique = ft.CompileBlocks(backend=backend, check=False)
    technique.apply(net)
    if evaluated_first:
        with torch.no_grad():
            torch.testing.assert_close(net.eval()(x.detach()), plain.eval()(x.detach()))
        assert backend.graphs == 1
    before = backend.graphs
    for module in (net, plain):
        module.train()
        torch.manual_seed(0)
        module.result = module(x)
    torch.testing.assert_close(net.result, plain.result)
    assert backend.graphs == before + 12
    net(x)
    assert backend.graphs == before + 12
    technique.on_fit_end(trainer(), net)
    assert technique.report.others == 9
    assert technique.report.recompiles == 0
    assert "9 blocks compiled separately, since they differ in a value" in str(technique.report)
    assert not [w for w in recwarn if "recompilations" in str(w.message)]


def test_the_cache_of_a_language_model_is_off_while_its_blocks_are_compiled():
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(
        n_embd=8, n_layer=3, n_head=2, vocab_size=9, n_positions=8, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    net, backend = hf.GPT2LMHeadModel(config), Counting()
    tokens = torch.randint(9, (2, 4))
    expected = net(tokens, labels=tokens).loss
    compiled = compile_blocks_(net, backend=backend, check=False)
    assert config.use_cache is False
    torch.testing.assert_close(net(tokens, labels=tokens).loss, expected)
    assert backend.graphs == 1
    for one in compiled.values():
        one.undo()
    assert config.use_cache is True
    assert not any("forward" in vars(module) for module in net.modules())


def test_keys_classes_and_weights_are_kept_and_load_into_a_plain_model():
    plain = TinyLM()
    net = copy.deepcopy(plain)
    compile_blocks_(net, backend="eager")
    net(lm_batches(1)[0]["input_ids"])
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in net.modules()] == [type(m) for m in plain.modules()]
    TinyLM().load_state_dict(net.state_dict())


def test_applying_twice_has_no_further_effect_and_can_be_undone():
    net = TinyLM()
    with ft.apply(net, [ft.CompileBlocks(backend="eager")]), ft.apply(net, [ft.CompileBlocks(backend="eager")]):
        assert all(replaced_forward(block).previous is None for block in net.blocks)
    assert all("forward" not in vars(block) for block in net.blocks)


def broken_backend(graph, inputs):
    raise RuntimeError("no such instruction")


def test_a_block_that_fails_to_compile_runs_eagerly_after_one_warning():
    batches, plain = lm_batches(3), TinyLM()
    net = TinyLM()
    fit(plain, batches)
    technique = ft.CompileBlocks(backend=broken_backend)
    with pytest.warns(ft.FastTrainWarning, match="could not be compiled and runs eagerly") as caught:
        fit(net, batches, [technique])
    assert len([w for w in caught if w.category is ft.FastTrainWarning]) == 3  # one for each block
    assert set(technique.report.fallbacks) == {"blocks.0", "blocks.1", "blocks.2"}
    assert "no such instruction" in technique.report.fallbacks["blocks.0"]
    assert largest_difference(weights(plain), weights(net)) == 0


def test_without_fallback_the_compilers_error_is_raised():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"):
        fit(TinyLM(), lm_batches(1), [ft.CompileBlocks(backend=broken_backend, fallback=False)])


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)


def test_graph_breaks_and_recompilations_are_counted():
    net, watch = nn.Sequential(Breaking(), Breaking()), CompileWatch()
    compile_blocks_(net, backend="eager", dynamic=False)
    net(torch.randn(2, 4, requires_grad=True))
    report = watch.report()
    assert sum(report.graph_breaks.values()) == 1
    assert report.recompiles == 0
    net(torch.randn(3, 4, requires_grad=True))
    report = watch.report()
    assert report.recompiles > 0
    assert "graph breaks" in str(report)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken = nn.Sequential(Breaking(), Breaking())
        compile_blocks_(broken, backend="eager", fullgraph=True, fallback=False)
        broken(torch.randn(2, 4))


def test_no_recompilation_on_fixed_shapes_and_a_report_at_the_end_of_fit(caplog):
    technique = ft.CompileBlocks(backend="aot_eager")
    plain, net = fit(TinyLM(), lm_batches(4)), TinyLM()
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        fit(net, lm_batches(4), [technique])
    assert technique.report.recompiles == 0
    assert technique.report.graphs > 0
    assert technique.report.seconds > 0
    assert any("CompileBlocks: compiled" in record.message for record in caplog.records)
    assert largest_difference(weights(plain), weights(net)) < 1e-5


@pytest.mark.parametrize("is_undone", [True, False])
def test_compiled_code_is_freed_after_the_run(is_undone):
    graphs = []

    def backend(graph, inputs):
        graphs.append(weakref.ref(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def run():
        if is_undone:
            fit(TinyLM(), lm_batches(2), [ft.CompileBlocks(backend=backend)])
        else:
            net = TinyLM()
            compile_blocks_(net, backend=backend)
            net.loss(lm_batches(1)[0]).backward()

    run()
    gc.collect()
    gc.collect()  # what is left refers to itself, and is garbage since the first has found the model to be
    assert graphs
    assert not [graph for graph in graphs if graph() is not None]


def test_compiled_save_eager_load_and_the_reverse(tmp_path):
    batches = lm_batches(3)
    t = trainer([ft.CompileBlocks(backend="eager")])
    net = TinyLM()
    t.fit(net, as_loader(batches))
    t.save_checkpoint(tmp_path / "compiled.ckpt")
    loaded = TinyLM()
    trainer(max_epochs=2).fit(loaded, as_loader(batches), ckpt_path=tmp_path / "compiled.ckpt", weights_only=True)
    again = TinyLM()
    trainer([ft.CompileBlocks(backend="eager")], max_epochs=2).fit(
        again, as_loader(batches), ckpt_path=tmp_path / "compiled.ckpt", weights_only=True
    )
    assert largest_difference(weights(loaded), weights(again)) < 1e-6


@pytest.mark.slow
def test_inductor_compiles_close_to_eager_and_torch_packs_its_code():
    plain, net, technique = fit(TinyLM(depth=1), lm_batches(2)), TinyLM(depth=1), ft.CompileBlocks(blocks="blocks.*")
    fit(net, lm_batches(2), [technique])
    assert not technique.report.fallbacks
    assert "1 kind of block compared with eager code" in str(technique.report)
    assert largest_difference(weights(plain), weights(net)) < 1e-5
    packed, _ = torch.compiler.save_cache_artifacts()
    assert torch.compiler.load_cache_artifacts(packed) is not None


@pytest.mark.slow
def test_inductor_draws_different_dropout_masks_of_the_same_rate():
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25))
    x = torch.randn(64, 64)
    with torch.no_grad():
        torch.manual_seed(0)
        plain = block(x) != 0
        compile_blocks_(block, blocks=nn.Sequential)
        torch.manual_seed(0)
        out = block(x)
    kept = out != 0
    assert ft.CompileBlocks.exactness is ft.technique.Exactness.TOLERANCE
    assert not torch.equal(plain, kept)
    assert abs(float(kept.float().mean()) - 0.75) < 0.05  # seven standard deviations
    assert torch.allclose(out[kept], block[0](x)[kept] / 0.75, atol=1e-6)


def test_an_unknown_back_end_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="backend='nope': torch.compile has no back end of this name.*'inductor'"):
        compile_blocks_(TinyLM(), backend="nope")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode='fastest'.*'max-autotune'"):
        ft.CompileBlocks(mode="fastest")


class IntoSameMemory(torch.autograd.Function):
    """A product whose backward writes the weight's gradient where it wrote the last one, as a CUDA graph does."""

    @staticmethod
    def forward(ctx, x, weight, memory):
        ctx.save_for_backward(x)
        ctx.memory = memory
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.memory.copy_(gradient * x)
        return None, ctx.memory.view(-1), None


class Replayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.memory = torch.zeros(3)

    def forward(self, x):
        return IntoSameMemory.apply(x, self.weight, self.memory)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_of_cuda_graphs_add_up_over_several_passes(is_frozen):
    block = Replayed()
    block.requires_grad_(not is_frozen)
    undo = compiled_forward.copy_graph_gradients(block)
    assert block.weight.requires_grad is not is_frozen
    block.requires_grad_(True)
    for step in range(2):
        for factor in (1.0, 2.0, 4.0):
            block(torch.full((3,), factor)).sum().backward()
        assert block.weight.grad.tolist() == [7.0] * 3, step
        block.weight.grad = None
    undo()
    for factor in (1.0, 2.0):
        block(torch.full((3,), factor)).sum().backward()
    assert block.weight.grad.tolist() == [4.0] * 3  # without copies the second pass has overwritten the first


def test_passes_without_gradients_run_without_cuda_graphs(monkeypatch):
    compiled_with = []

    def remember_graphs(function, *, options, **_):
        def run(*args, **kwargs):
            compiled_with.append((options["max_autotune"], options.get("triton.cudagraphs", False)))
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", remember_graphs)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = ft.compile_blocks_(net, "max-autotune", check=False)
    net(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        net(torch.ones(1, 4))
    for forward in compiled.values():
        forward.undo()
    assert compiled_with == [(True, True)] * 2 + [(True, False)] * 2
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())


IN_GRAPHS = pytest.mark.filterwarnings(  # of the compiler
    "ignore:The CUDA Graph is empty", "ignore:TypedStorage is deprecated"
)


@pytest.mark.gpu
@IN_GRAPHS
@pytest.mark.parametrize("techniques", [(), (ft.ActivationCheckpointing,)], ids=["alone", "recomputed"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_cuda_graphs_keep_micro_batches_the_same(techniques, accumulated):
    settings = {"accelerator": "cuda", "devices": 1, "accumulate_grad_batches": accumulated}
    plain = fit(TinyLM(), lm_batches(6), **settings)
    used = [ft.MicroBatching(2), ft.CompileBlocks("reduce-overhead"), *(kind() for kind in techniques)]
    net = fit(TinyLM(), lm_batches(6), used, **settings)
    assert largest_difference(weights(plain), weights(net)) < 1e-4


@pytest.mark.gpu
@IN_GRAPHS
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_cuda_graphs_keep_a_bare_loop_the_same(is_recomputed):
    def run(*, in_graphs):
        net = TinyLM().cuda()
        if in_graphs and is_recomputed:
            ft.checkpoint_activations_(net)
        if in_graphs:
            ft.compile_blocks_(net, "reduce-overhead")
        optimizer = net.configure_optimizers()
        for batch in lm_batches(6):
            batch = {name: value.cuda() for name, value in batch.items()}
            # Its first call tries the split, with gradients of several passes at once.
            ft.accumulate_gradients(net.loss, batch, 2)
            optimizer.step()
            optimizer.zero_grad()
        return weights(net)

    assert largest_difference(run(in_graphs=False), run(in_graphs=True)) < 1e-4


@pytest.mark.gpu
@IN_GRAPHS
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graph_modes_keep_training_the_same(mode):
    plain = fit(TinyLM(), lm_batches(6), accelerator="cuda", devices=1)
    net = fit(TinyLM(), lm_batches(6), [ft.CompileBlocks(mode=mode)], accelerator="cuda", devices=1)
    assert largest_difference(weights(plain), weights(net)) < 1e-4


@pytest.mark.gpu
@IN_GRAPHS
def test_the_memory_of_cuda_graphs_is_freed_after_the_run():
    def reserved_after_a_run():
        fit(TinyLM(), lm_batches(6), [ft.CompileBlocks("reduce-overhead")], accelerator="cuda", devices=1)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first = reserved_after_a_run()
    assert all(reserved_after_a_run() <= first for _ in range(2))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.scale * x.square().mean(-1, keepdim=True).rsqrt()


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Embedding(5, 8)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))


class Speaker(nn.Module):
    """Embedding, blocks, norm, and a head with a layer before it."""

    def __init__(self):
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norms = nn.ModuleList([Norm()])
        self.top = nn.ModuleDict({"before": nn.Sequential(nn.Linear(8, 8), nn.GELU()), "head": nn.Linear(8, 16)})

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.top["head"](self.top["before"](self.norms[0](x)))

    def get_output_embeddings(self):
        return self.top["head"]


def speaker_and_loss():
    torch.manual_seed(0)
    net = Speaker()
    tokens = torch.randint(16, (4, 5))

    def loss_of(net):
        return nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())

    return net, loss_of


def gradients(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()))


def test_head_compiles_modules_beside_the_blocks_one_by_one():
    net, loss_of = speaker_and_loss()
    keys, expected = list(net.state_dict()), gradients(net, loss_of(net))
    backend = Counting()
    compiled = compile_blocks_(net, backend=backend, head=True)
    blocks = {"blocks.0", "blocks.1", "blocks.2"}
    assert set(compiled) == {*blocks, "embed", "norms.0", "top.before"}
    for a, b in zip(expected, gradients(net, loss_of(net)), strict=True):
        torch.testing.assert_close(a, b)
    assert backend.graphs >= 4
    assert list(net.state_dict()) == keys
    for forward in compiled.values():
        forward.undo()
    assert not any("forward" in vars(module) for module in net.modules())
    assert set(compile_blocks_(net, backend=backend)) == blocks


def test_a_module_beside_the_blocks_that_fails_to_compile_runs_eagerly():
    net, loss_of = speaker_and_loss()
    expected = loss_of(net)

    def backend(graph, inputs):
        if any(node.target is torch.nn.functional.embedding for node in graph.graph.nodes):
            raise RuntimeError("no tables here")
        return graph.forward

    compiled = compile_blocks_(net, backend=backend, head=True)
    with pytest.warns(ft.FastTrainWarning, match="'embed'.*no tables here"):
        torch.testing.assert_close(loss_of(net), expected)
    assert {name for name, forward in compiled.items() if forward.failure} == {"embed"}


@pytest.mark.slow
def test_head_compiles_the_fused_loss_with_a_fallback(monkeypatch):
    net, loss_of = speaker_and_loss()
    expected = gradients(net, loss_of(net))
    (fused,) = ft.fuse_loss_head_(net).values()
    compiled = compile_blocks_(net, head=True)
    assert fused.compiled
    watch = CompileWatch()
    for a, b in zip(expected, gradients(net, loss_of(net)), strict=True):
        torch.testing.assert_close(a, b)
    assert watch.report().graphs >= 5  # blocks, embedding, norm, what is before the head, and the loss
    compiled["top.head"].undo()
    assert not fused.compiled

    def broken(graph, inputs):
        raise RuntimeError("no loss here")

    use = sys.modules["lightning_fasttrain.loss.logit_losses"]
    monkeypatch.setattr(use, "_compiled_use", lambda: torch.compile(use._use_logits_in_two_passes, backend=broken))
    again = compile_blocks_(net, head=True)["top.head"]
    with pytest.warns(ft.FastTrainWarning, match="the loss of a head.*no loss here"):
        seen = gradients(net, loss_of(net))
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(a, b)
    assert "no loss here" in again.failure


def test_by_default_only_the_loss_of_a_large_head_is_compiled_beside_blocks():
    net, _ = speaker_and_loss()
    ft.fuse_loss_head_(net)
    blocks = {"blocks.0", "blocks.1", "blocks.2"}
    assert set(compile_blocks_(net)) == blocks  # of 16 outputs
    net, _ = speaker_and_loss()
    net.top.head = nn.Linear(net.top.head.in_features, 16_000)
    (fused,) = ft.fuse_loss_head_(net).values()
    technique = ft.CompileBlocks()
    undo = technique.apply(net)
    assert fused.compiled
    assert technique.describe_effect(net) == "3 blocks of Sequential compiled, and the loss at top.head"
    undo()
    assert not fused.compiled
    assert set(compile_blocks_(net, head=False)) == blocks


def test_a_loss_that_is_compiled_wrongly_runs_uncompiled(monkeypatch):
    net, loss_of = speaker_and_loss()
    expected = gradients(net, loss_of(net))
    (fused,) = ft.fuse_loss_head_(net).values()
    use = sys.modules["lightning_fasttrain.loss.logit_losses"]

    def miscompiled(logits, *others):
        losses = use._use_logits_in_two_passes(logits, *others)
        logits[3] *= 1.01  # the gradient
        return losses

    monkeypatch.setattr(use, "_compiled_use", lambda: miscompiled)
    monkeypatch.setattr(use, "_TRUSTED", set())
    fused.compiled = True
    with pytest.warns(ft.FastTrainWarning, match="the loss of a head.*another loss or gradient"):
        seen = gradients(net, loss_of(net))
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(a, b)
    assert "another loss or gradient" in fused.failure


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_second_derivative_is_refused_where_the_compiler_has_none(backend):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    x = torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    ft.compile_blocks_(net, backend=backend, check=False)
    loss = net(x).sum()
    if backend != "eager":
        with pytest.raises(RuntimeError, match=r"a block of CompileBlocks in a backward with create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)
        return
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.allclose(found, expected)
