"""Recomputing activations keeps training bitwise the same."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_fasttrain as ft
from lightning_fasttrain import checkpoint_activations_
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.core.modules.wrapped_forward import replaced_forward
from tests.support.nets import Block, TinyLM, as_loader, fit, gradients, lm_batches, same, trainer, weights


def run(net, x):
    """Return the loss, all gradients, buffers afterwards, and the next random number of each generator."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    x = x.clone().requires_grad_(x.is_floating_point())
    loss = net(x).float().pow(2).mean()
    loss.backward()
    result = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    result |= {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    for name, module in net.named_modules():
        for key in ("value", "scores", "counts", "seen", "factor"):
            numbers = getattr(module, key, 0.0)
            held = list(numbers.values()) if isinstance(numbers, dict) else numbers
            result[f"{name}.{key}"] = torch.tensor(sorted(held) if isinstance(held, set) else held).double()
    result |= {"loss": loss.detach(), "input": x.grad if x.grad is not None else torch.zeros(())}
    result["rng"] = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
    return result


class NumpyNoise(nn.Module):
    """Draws with NumPy and Python's random: torch's own checkpoint would recompute different values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.5).to(x.dtype)
        return torch.tanh(self.linear(x)) * mask * random.random()


LIBRARIES = {"random": random, "numpy": np.random}  # by name: a copy of a method would draw from a copied generator


class LateNoise(nn.Module):
    """Draws from one of the host's generators from its third call on."""

    def __init__(self, library, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.library, self.function, self.calls = library, function, 0

    def forward(self, x):
        self.calls += 1
        factor = getattr(LIBRARIES[self.library], self.function)() if self.calls > 2 else 1.0
        return torch.tanh(self.linear(x) * factor)


@pytest.mark.parametrize(("library", "function"), [("random", "random"), ("numpy", "rand"), ("numpy", "randn")])
def test_blocks_that_begin_to_draw_later_are_recomputed_with_what_they_drew(library, function):
    net = nn.Sequential(*[LateNoise(library, function) for _ in range(3)])
    plain, x = copy.deepcopy(net), torch.randn(2, 4)
    checkpoint_activations_(net)
    results = [(run(plain, x), run(net, x)) for _ in range(4)]
    assert all(same(expected, seen) for expected, seen in results)
    assert not same(results[1][0], results[2][0])


class Counter(nn.Module):
    """Its output depends on a buffer that its own forward changes, like the power iteration of a spectral norm."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x) * self.calls)


class Temperature(nn.Module):
    """Lowers an attribute of a submodule at each forward, sets a flag at the first, and keeps the last scores."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.scores = nn.Linear(4, 4), nn.Identity(), []
        self.scale.value = 2.0

    def forward(self, x):
        self.scale.value = max(0.5, self.scale.value * 0.9)
        if not hasattr(self, "is_ready"):
            x, self.is_ready = x * 3, True
        y = torch.tanh(self.linear(x) / self.scale.value) * (1 + len(self.scores))
        self.scores.append(float(y.detach().sum()))
        return y


class Hooked(nn.Module):
    """Installs a hook at its first forward, and an attribute says so, as in models of transformers."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_ready = nn.Linear(4, 4), False

    def forward(self, x):
        if not self.is_ready:
            self.linear.register_forward_hook(lambda module, inputs, output: torch.tanh(output))
            self.is_ready = True
        return self.linear(x)


class WarmUp(nn.Module):
    """Sets an attribute from its third forward on, through ``setattr``, and fills a dict and a set."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.counts, self.factor = nn.Linear(4, 4), set(), {"calls": 0}, 1.0

    def forward(self, x):
        self.counts["calls"] += 1
        self.seen.add(self.counts["calls"])
        if self.counts["calls"] > 2:
            setattr(self, "factor", self.factor * 0.5)  # noqa: B010
        return torch.tanh(self.linear(x) * self.factor) * len(self.seen)


def stack(kind):
    make = {
        "attributes": Temperature,
        "hooks": Hooked,
        "late attributes": WarmUp,
        "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()),
        "batchnorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()),
        "numpy and random": NumpyNoise,
        "own buffer": Counter,
        "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
        "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    }[kind]
    return nn.Sequential(*[make() for _ in range(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        *("dropout", "batchnorm", "numpy and random", "own buffer", "spectral norm", "transformer"),
        *("attributes", "late attributes", "hooks"),
    ],
)
def test_checkpointing_is_bitwise_equal(kind, dtype):
    plain = stack(kind).to(dtype)
    ours = copy.deepcopy(plain)
    shape = (6, 3, 4) if kind == "transformer" else (6, 4)
    assert len(checkpoint_activations_(ours)) == 3
    for seed in range(3):  # from the second forward on, only buffers known to change are copied
        torch.manual_seed(seed)
        x = torch.randn(shape, dtype=dtype)
        plain.zero_grad()
        ours.zero_grad()
        assert same(run(plain, x), run(ours, x))


@pytest.mark.parametrize("kind", ["numpy and random", "own buffer", "batchnorm", "attributes", "late attributes"])
def test_negative_control_torch_checkpoint_differs_in_these(kind):
    plain = stack(kind)
    theirs = copy.deepcopy(plain)
    for block in theirs:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    x = torch.randn(6, 4)
    assert not same(run(plain, x), run(theirs, x))


def test_the_recomputation_has_the_default_dtype_of_the_forward():
    """Lightning's precision plugins set it around the forward, and the backward comes later."""

    class Masks(nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x)) * (torch.rand(len(x), 1) < 0.5)

    plain = nn.Sequential(Masks(4, 4), Masks(4, 4)).double()
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours, blocks=Masks)
    for net in (plain, ours):
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        try:
            loss = net(torch.ones(8, 4)).sum()
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
    assert same(gradients(plain), gradients(ours))


def test_a_kept_result_that_is_changed_in_place_is_refused():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(2)])
    checkpoint_activations_(net, ft.model.SelectiveOps(), blocks="*")
    with pytest.raises(RuntimeError, match=r"recomputation of Sequential: it changes the result .* in place"):
        net(torch.ones(2, 4)).sum().backward()


class WritesIntoInput(nn.Linear):
    def forward(self, x):
        return x.add_(super().forward(x.clone()).tanh())


@pytest.mark.parametrize("policy", [ft.model.EveryBlock(), ft.model.SelectiveOps()], ids=repr)
def test_a_block_that_writes_into_its_input_is_refused_at_its_first_forward(policy):
    net = nn.Sequential(WritesIntoInput(4, 4))
    net(torch.randn(6, 4) * torch.ones(4, requires_grad=True)).sum().backward()  # it could be trained
    checkpoint_activations_(net, policy, blocks="*")
    with pytest.raises(RuntimeError, match=r"WritesIntoInput, which is recomputed .* writes into its input in place"):
        net(torch.randn(6, 4) * torch.ones(4, requires_grad=True))


def test_a_block_that_writes_into_a_buffer_it_gets_is_refused_too():
    class Counts(nn.Linear):
        def forward(self, x, counts):
            counts.add_(1)
            return super().forward(x)

    net = nn.ModuleList([Counts(4, 4), Counts(4, 4)])
    checkpoint_activations_(net, blocks=Counts)
    with pytest.raises(RuntimeError, match="writes into its input in place"):
        net[0](torch.randn(3, 4), torch.zeros(1))


def test_rrelu_is_refused_only_inside_of_blocks():
    class Function(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside, self.linear = inside, nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            return nn.functional.rrelu(x, training=self.training) if self.inside else x.tanh()

    nets = [nn.Sequential(*[Function(inside) for _ in range(2)]) for inside in (True, False)]
    for net in nets:
        checkpoint_activations_(net)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rrelu in Function, which is recomputed.*Use another activation"):
            nets[0](torch.randn(6, 4))
    before = nn.functional.rrelu(nn.Linear(4, 4)(torch.randn(6, 4)), training=True)  # nodes before the blocks' inputs
    nn.functional.rrelu(nets[1](before), training=True).sum().backward()
    nets[0].eval()
    nets[0](torch.randn(6, 4)).sum().backward()


def test_batchnorm_counts_each_batch_once():
    net = stack("batchnorm")
    checkpoint_activations_(net)
    run(net, torch.randn(6, 4))
    assert [block[1].num_batches_tracked.item() for block in net] == [1, 1, 1]


def test_a_retained_graph_can_be_used_again():
    plain = stack("dropout")
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours)
    x = torch.randn(6, 4)
    for net in (plain, ours):
        torch.manual_seed(5)
        loss = net(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_keyword_and_nested_tensors_are_visible_to_saved_tensor_hooks():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *, x, more):
            return torch.tanh(self.linear(x) + more["bias"][0])

    seen = []
    block = nn.ModuleList([Named(), Named()])
    checkpoint_activations_(block)
    x, bias = torch.randn(3, 4), torch.randn(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        block[0](x=x, more={"bias": [bias]}).sum().backward()
    assert {x.data_ptr(), bias.data_ptr()} <= set(seen)


def test_fewer_bytes_are_saved_for_the_backward():
    def saved_bytes(net):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net(torch.randn(64, 16, 4))
        return total

    plain = stack("transformer")
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours)
    half = copy.deepcopy(plain)
    checkpoint_activations_(half, ft.model.EveryBlock(2))
    assert saved_bytes(ours) < saved_bytes(half) < saved_bytes(plain)
    assert saved_bytes(ours) < saved_bytes(plain) / 8


def test_kwargs_tuple_outputs_tied_and_frozen_weights():
    plain = TinyLM(dropout=0.3)
    ours = TinyLM(dropout=0.3)
    for net in (plain, ours):
        net.embed.weight.requires_grad_(False)  # so the first block's input needs no gradient
        net.blocks[1].requires_grad_(False)
    checkpoint_activations_(ours)
    batch = lm_batches(1)[0]
    for net in (plain, ours):
        torch.manual_seed(2)
        net.loss(batch).backward()
    grads = [{n: p.grad for n, p in net.named_parameters() if p.grad is not None} for net in (plain, ours)]
    assert same(*grads)
    assert any(name.startswith("blocks.0") for name in grads[1])


def test_applying_twice_has_no_further_effect():
    net = TinyLM()
    first, second = checkpoint_activations_(net), checkpoint_activations_(net)
    assert list(first) == list(second) == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(replaced_forward(block).previous is None for block in net.blocks)


def test_nothing_is_recomputed_without_gradients():
    calls = []
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    net[0].register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations_(net)
    with torch.no_grad():
        net(torch.ones(1, 4))
    assert len(calls) == 1


@pytest.mark.parametrize("inside", [True, False], ids=["block compiled over it", "model compiled around it"])
def test_checkpointing_works_with_the_compiler(inside):
    plain = stack("dropout")
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours)
    if inside:
        compiled = ours
        ft.compile_blocks_(ours, backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(ours, backend="aot_eager")
    x = torch.randn(6, 4)
    for net in (plain, compiled):
        torch.manual_seed(3)
        net(x).pow(2).mean().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-7)


def test_a_hugging_face_model_with_its_cache_enabled():
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20,
        attention_dropout=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    plain = tf.LlamaForCausalLM(config).train()
    ours = copy.deepcopy(plain)
    assert ours.config.use_cache
    with ft.apply(ours, [ft.ActivationCheckpointing()]):
        assert not ours.config.use_cache
        ids = torch.randint(20, (2, 6))
        for net in (plain, ours):
            torch.manual_seed(4)
            net(ids, labels=ids).loss.backward()
        grads = [{n: p.grad for n, p in net.named_parameters()} for net in (plain, ours)]
        assert same(*grads)
    assert ours.config.use_cache


def test_trainer_training_is_bitwise_the_same():
    batches = lm_batches(4)
    plain, ours = fit(TinyLM(dropout=0.3), batches), TinyLM(dropout=0.3)
    torch.manual_seed(11)
    t = trainer([ft.ActivationCheckpointing()])
    t.fit(ours, as_loader(batches), as_loader(batches))
    assert same(weights(plain), weights(ours))
    assert all("forward" not in vars(block) for block in ours.blocks)


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (1.5, TypeError)])
def test_k_is_checked(k, error):
    with pytest.raises(error, match="k="):
        ft.model.EveryBlock(k)


def test_every_kth_block():
    assert list(checkpoint_activations_(TinyLM(depth=5), ft.model.EveryBlock(2))) == [
        "blocks.0",
        "blocks.2",
        "blocks.4",
    ]
    assert list(checkpoint_activations_(TinyLM(), blocks=Block)) == ["blocks.0", "blocks.1", "blocks.2"]


# --- selective by operation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dropout", "batchnorm", "numpy and random", "spectral norm", "transformer"])
def test_selective_is_bitwise_equal(kind, dtype):
    plain = stack(kind).to(dtype)
    ours = copy.deepcopy(plain)
    assert len(checkpoint_activations_(ours, ft.model.SelectiveOps())) == 3
    shape = (6, 3, 4) if kind == "transformer" else (6, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(shape, dtype=dtype)
        plain.zero_grad()
        ours.zero_grad()
        assert same(run(plain, x), run(ours, x))


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Fused attention between two projections, with an activation function that is cheap to recompute."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.inward, self.outward, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), dropout

    def forward(self, x):
        q, k, v = self.inward(x).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=self.dropout)
        return x + torch.tanh(self.outward(mixed[:, 0]))


def operations_in_backward(policy, net, x):
    checkpoint_activations_(net, policy)
    loss = net(x).sum()
    with Operations() as mode:
        loss.backward()
    return mode.counts


def test_matmuls_and_attention_are_not_recomputed_but_the_rest_is():
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    x = torch.randn(2, 5, 8)
    plain = operations_in_backward(ft.model.EveryBlock(), nn.Sequential(*[Attention() for _ in range(3)]), x)
    lean = operations_in_backward(ft.model.SelectiveOps(), nn.Sequential(*[Attention() for _ in range(3)]), x)
    assert (plain[attention], plain[aten.addmm.default]) == (3, 6)
    assert attention not in lean
    assert aten.addmm.default not in lean
    assert plain[aten.tanh.default] == lean[aten.tanh.default] == 3


def test_random_attention_is_recomputed_so_that_later_draws_stay_the_same():
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(Attention(0.4), nn.Dropout(0.5)) for _ in range(3)])
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours, ft.model.SelectiveOps())
    x = torch.randn(2, 5, 8)
    assert same(run(plain, x), run(ours, x))
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    policy = ft.model.SelectiveOps()
    assert "MUST_SAVE" in str(policy.keeps(None, op, x, x, x))
    assert "MUST_SAVE" in str(policy.keeps(None, op, x, x, x, 0.0))
    assert "RECOMPUTE" in str(policy.keeps(None, op, x, x, x, 0.1))
    assert "RECOMPUTE" in str(policy.keeps(None, op, x, x, x, dropout_p=0.1))


def test_operations_listed_by_the_user_are_kept_too():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(torch.tanh(torch.bmm(x, x)))

    aten, x = torch.ops.aten, torch.randn(2, 4, 4)
    net = nn.Sequential(Table(), Table())
    assert operations_in_backward(ft.model.SelectiveOps(), copy.deepcopy(net), x)[aten.bmm.default] > 2
    kept = operations_in_backward(ft.model.SelectiveOps(also=[aten.bmm.default]), copy.deepcopy(net), x)
    plain = operations_in_backward(ft.model.EveryBlock(), copy.deepcopy(net), x)
    assert plain[aten.bmm.default] - kept[aten.bmm.default] == 2


@pytest.mark.parametrize(
    ("op", "error", "message"),
    [
        (torch.ops.aten.bmm, TypeError, r"Use operator overloads, such as torch\.ops\.aten\.bmm\.default"),
        ("bmm", TypeError, "expected an OpOverload, got a string"),
        (torch.ops.aten.native_dropout.default, ValueError, "draws random numbers"),
    ],
)
def test_invalid_listed_operations_are_refused(op, error, message):
    with pytest.raises(error, match=message):
        ft.model.SelectiveOps(also=[op])


def test_selective_memory_lies_between_kept_and_recomputed():
    def added(policy):
        torch.manual_seed(0)
        net = GPT(GPTConfig(vocabulary=8, context=64, layers=4, heads=2, width=32))
        if policy is not None:
            checkpoint_activations_(net, policy)
        tokens = torch.randint(8, (8, 64))
        with ft.profiling.PeakMemory("cpu", net, tokens) as peak:
            net(tokens).sum().backward()
        return peak.added_bytes

    kept, selective, recomputed = added(None), added(ft.model.SelectiveOps()), added(ft.model.EveryBlock())
    assert recomputed < 0.6 * selective
    assert selective < 0.85 * kept


@pytest.mark.parametrize("inside", [True, False], ids=["block compiled over it", "model compiled around it"])
def test_selective_checkpointing_works_with_the_compiler(inside):
    plain = nn.Sequential(*[Attention() for _ in range(3)])
    ours = copy.deepcopy(plain)
    checkpoint_activations_(ours, ft.model.SelectiveOps())
    if inside:
        compiled = ours
        ft.compile_blocks_(ours, backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 8)
    for net in (plain, compiled):
        net(x).pow(2).mean().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", [3, "all"])
def test_an_invalid_policy_is_refused(policy):
    with pytest.raises(TypeError, match="policy=.*expected a CheckpointPolicy or None.*Use EveryBlock"):
        ft.ActivationCheckpointing(policy)
