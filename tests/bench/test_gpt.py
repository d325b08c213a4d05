import lightning as L
import pytest
import torch

from lightning_fasttrain.bench.gpt import GPT, SIZES, GPTConfig, GPTModule, matrices_and_others, size_named

SMALL = {"vocabulary": 11, "context": 8, "layers": 2, "heads": 2, "width": 8}


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **changes})).eval()


def some_tokens(length=8, batch=3):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


def test_logits_do_not_look_ahead():
    net, idx = gpt(), some_tokens()
    changed = idx.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = net(idx), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_sdpa_and_naive_attention_give_the_same_logits_and_gradients():
    fused, naive, idx = gpt(), gpt(attention="naive"), some_tokens()
    naive.load_state_dict(fused.state_dict())
    for net in (fused, naive):
        net(idx).logsumexp(-1).mean().backward()
    torch.testing.assert_close(fused(idx), naive(idx), rtol=1e-5, atol=1e-6)
    for a, b in zip(fused.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_the_head_is_the_token_embedding():
    net = gpt()
    assert net.head.weight is net.tokens.weight
    assert len(list(net.parameters())) == len({id(p) for p in net.parameters()})


def test_parameters_counted_by_hand():
    v, t, d, blocks = 11, 8, 8, 2
    block = (2 * d) + (d * 3 * d + 3 * d) + (d * d + d) + (2 * d) + (d * 4 * d + 4 * d) + (4 * d * d + d)
    assert sum(p.numel() for p in gpt().parameters()) == v * d + t * d + blocks * block + 2 * d


def test_gpt2_small_has_the_published_124_million():
    with torch.device("meta"):
        net = GPT(SIZES["gpt2-small"].model)
    assert sum(p.numel() for p in net.parameters()) == 124_439_808 + (50_304 - 50_257) * 768


def test_sizes_are_the_documented_ones():
    tiny = size_named("tiny")
    assert (tiny.model.layers, tiny.model.width, tiny.model.heads, tiny.model.context, tiny.batch) == (
        4,
        256,
        4,
        512,
        32,
    )
    shapes = {name: (s.model.layers, s.model.width, s.model.heads) for name, s in SIZES.items()}
    assert shapes["gpt2-medium"] == (24, 1024, 16)
    assert shapes["gpt2-xl"] == (48, 1600, 25)


def test_matrices_decay_and_vectors_do_not():
    decayed, spared = matrices_and_others(gpt(), weight_decay=0.1)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(gpt().parameters()))


def test_initial_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    module = GPTModule(GPTConfig(vocabulary=256, context=32, layers=2, heads=2, width=32))
    idx = torch.randint(256, (8, 33))
    loss = module.loss((idx[:, :-1], idx[:, 1:]))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.05)


def test_it_learns_in_a_trainer(tmp_path):
    torch.manual_seed(0)
    module = GPTModule(GPTConfig(vocabulary=11, context=8, layers=1, heads=2, width=16), lr=1e-2)
    idx = some_tokens(length=9, batch=4)
    batch = (idx[:, :-1], idx[:, 1:])
    before = module.loss(batch).item()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader([(a, b) for a, b in zip(*batch, strict=True)] * 20, batch_size=4))
    assert module.loss(batch).item() < before / 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 3}, "heads=3 with width=8: .*share.* Use a width of 9"),
        ({"layers": 0}, "layers=0"),
        ({"attention": "fast"}, "attention='fast'.*'sdpa', 'naive'"),
    ],
)
def test_bad_shapes_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        GPTConfig(**{**SMALL, **changes})


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 tokens: the model has 8 learned positions"):
        gpt()(some_tokens(length=9))
