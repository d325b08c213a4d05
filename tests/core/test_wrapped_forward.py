"""Finding the repeated blocks of any model, and wrapping a forward without a trace."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrapper_on
from lightning_fasttrain.model import find_blocks


def hugging_face(name):
    import transformers as tf

    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    ids = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=3, n_embd=16, n_head=2, **ids))
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**small, **ids))
    if name == "bert":
        return tf.BertModel(tf.BertConfig(**small, vocab_size=20))
    if name == "vit":
        return tf.ViTModel(tf.ViTConfig(**small, image_size=8, patch_size=4))
    return tf.ResNetModel(tf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8, 8, 8], depths=[3, 4, 6, 3]))


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("gpt2", "GPT2Block", 3),
        ("llama", "LlamaDecoderLayer", 3),
        ("bert", "BertLayer", 3),
        ("vit", "ViTLayer", 3),
        ("resnet", "ResNetBottleNeckLayer", 16),
    ],
)
def test_blocks_of_hugging_face_models(name, kind, count):
    blocks = find_blocks(hugging_face(name))
    assert len(blocks) == count
    assert {type(block).__name__ for block in blocks.values()} == {kind}


def test_embeddings_that_outweigh_the_only_layer_are_no_blocks():
    tf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    assert list(find_blocks(tf.BertModel(tf.BertConfig(**sizes)))) == ["encoder.layer.0"]
    assert list(find_blocks(tf.GPT2Model(tf.GPT2Config(n_embd=8, n_head=2, n_layer=1)))) == ["h.0"]


def test_blocks_of_torch_models():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 4)
    assert list(find_blocks(encoder)) == [f"layers.{i}" for i in range(4)]
    stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    assert list(find_blocks(stack)) == ["0", "1", "2"]
    mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(find_blocks(mlp)) == ["0", "2", "4"]


def test_blocks_in_stages_are_found_rather_than_the_stages():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return x + self.inner(x)

    stages = nn.Sequential(*[nn.Sequential(Residual(), Residual()) for _ in range(4)])
    assert list(find_blocks(stages)) == [f"{stage}.{i}" for stage in range(4) for i in range(2)]


def test_blocks_inside_a_lightning_module():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)

    assert list(find_blocks(Net())) == ["inner.layers.0", "inner.layers.1"]


@pytest.mark.parametrize("blocks", [nn.MultiheadAttention, "MultiheadAttention", "layers.*.self_attn", "**.self_attn"])
def test_blocks_named_by_class_name_or_pattern(blocks):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    assert list(find_blocks(encoder, blocks)) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_a_block_never_lies_inside_another():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    assert list(find_blocks(encoder, ["layers.*", nn.Linear])) == ["layers.0", "layers.1"]


def test_none_found_lists_the_candidates():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    with pytest.raises(ValueError, match=r"no repeated blocks in Sequential: candidates are Linear ×1, LayerNorm ×1"):
        find_blocks(net)
    with pytest.raises(ValueError, match=r"blocks='layers.\*' matches nothing"):
        find_blocks(net, "layers.*")


class Doubled(WrappedForward):
    def __call__(self, *args, **kwargs):
        return 2 * self.inner(*args, **kwargs)


class Negated(WrappedForward):
    def __call__(self, *args, **kwargs):
        return -self.inner(*args, **kwargs)


def test_wrappers_stack_and_come_off_in_any_order():
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = net(x)
    undo_first = Doubled(net).install()
    undo_second = Negated(net).install()
    assert torch.equal(net(x), -2 * plain)
    assert wrapper_on(net, Doubled)
    undo_first()  # from the middle of the stack
    assert torch.equal(net(x), -plain)
    assert not wrapper_on(net, Doubled)
    undo_second()
    assert "forward" not in vars(net)


def test_a_deep_copy_runs_on_its_own_weights():
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    Doubled(net).install()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    assert net(x).abs().sum() == 0
    assert twin(x).abs().sum() > 0


def test_what_lies_outside_of_the_blocks_is_named_with_its_share(caplog):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)])
            self.head = nn.Linear(8, 8)

    net = Net()
    share = 2 * 64 / sum(p.numel() for p in net.parameters())
    with caplog.at_level("INFO"):
        find_blocks(net)
    assert (
        f"blocks TransformerEncoderLayer ×2; outside of them are 'stem' ({share:.0%} of the parameters)" in caplog.text
    )


def test_a_stack_of_blocks_is_searched_and_a_block_with_experts_is_not():
    layers = lambda: nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)])  # noqa: E731

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            self.layers = layers()

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Tower(), Tower()

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.experts = layers()

        def forward(self, x):
            return sum(expert(self.attention(x, x, x)[0]) for expert in self.experts)

    assert list(find_blocks(Towers())) == ["left.layers.0", "left.layers.1", "right.layers.0", "right.layers.1"]
    assert list(find_blocks(nn.ModuleList([Routed() for _ in range(2)]))) == ["0", "1"]


class Mixer(nn.Module):
    """A model as that of x-transformers: its list holds lists, of which it calls the members."""

    def __init__(self, width=4):
        super().__init__()
        attention = lambda: nn.MultiheadAttention(width, 2, batch_first=True)  # noqa: E731
        feed_forward = lambda: Feed(width)  # noqa: E731
        self.layers = nn.ModuleList()
        for make in (attention, feed_forward) * 3:
            self.layers.append(nn.ModuleList([nn.ModuleList([nn.LayerNorm(width), None]), make(), nn.Identity()]))

    def forward(self, x):
        for norms, part, _ in self.layers:
            hidden = norms[0](x)
            x = x + (part(hidden, hidden, hidden)[0] if isinstance(part, nn.MultiheadAttention) else part(hidden))
        return x


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_blocks_in_lists_of_lists_are_what_the_model_calls():
    net, x = Mixer(), torch.randn(2, 3, 4)
    expected = net(x)
    found = find_blocks(net)
    assert list(found) == [f"layers.{layer}.1" for layer in range(6)]
    wrappers = [Negated(block) for name, block in found.items() if isinstance(block, Feed)]
    for wrapper in wrappers:
        wrapper.install()
    assert len(wrappers) == 3
    assert not torch.allclose(net(x), expected)


def test_two_small_heads_are_no_blocks_beside_the_body():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)])
            self.boxes, self.labels = Head(), Head()

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 4), nn.Linear(4, 4)

    assert list(find_blocks(Net())) == ["body.0", "body.1"]
