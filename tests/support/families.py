"""Small models of many families, each with a batch and a loss: what a user may bring, as it comes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, VOCAB, DIM = 4, 8, 32, 16


@dataclass(frozen=True)
class Family:
    """One model.

    Attributes:
        name: how the tests call it.
        make: a fresh model, the same weights each time.
        batch: what goes in.
        loss: (model, batch) → scalar.
        blocks: class name → how many of them :func:`find_blocks` is to find; empty if it is to refuse.
        no_adapter: why adapters on "all-linear" are refused; empty if they are not.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    blocks: dict[str, int]
    no_adapter: str = ""


IDS = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([0, 1, 1, 0])
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
PAIRS = {**TEXT, "decoder_input_ids": IDS.flip(1), "labels": IDS.flip(0)}


def mixture_of_experts(layers: int) -> Any:
    """A Mixtral whose loss has an auxiliary part, of the router logits that transformers collects by hooks."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def run_experts(net: Any) -> tuple[int, list[Tensor]]:
    """Run a forward and backward; return the number of router logits, and the losses with one gradient."""
    output = net(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return len(output.router_logits), [output.loss, output.aux_loss, net.model.embed_tokens.weight.grad]


NO_LINEAR = "no linear layer besides heads"
LARGE = {"initializer_range": 0.3}  # weights that show in the loss of a classifier
SMALL = {"hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 2 * DIM}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Hugging Face's models compute it themselves."""
    return model(**batch).loss


def of_classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    out = model(*inputs.values())
    return F.cross_entropy(out.flatten(0, -2), batch["labels"].flatten())


def hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, config)(**settings))

    return make


def decoder(kind: str, config: str, blocks: dict[str, int], **settings: Any) -> Family:
    batch = {**TEXT, "labels": IDS}
    return Family(kind, hugging_face(kind, config, **{**TOKENS, **settings}), batch, own_loss, blocks)


def classifier(kind: str, config: str, blocks: dict[str, int], **settings: Any) -> Family:
    batch = {**TEXT, "labels": CLASSES}
    return Family(kind, hugging_face(kind, config, **{**TOKENS, **settings}), batch, own_loss, blocks)


def translator(kind: str, config: str, blocks: dict[str, int], **settings: Any) -> Family:
    settings = {**TOKENS, "decoder_start_token_id": 1, **settings}
    return Family(kind, hugging_face(kind, config, **settings), PAIRS, own_loss, blocks)


def vision(kind: str, config: str, blocks: dict[str, int], **settings: Any) -> Family:
    batch = {"pixel_values": IMAGES, "labels": CLASSES}
    no_adapter = NO_LINEAR if kind.startswith("ResNet") else ""
    return Family(kind, hugging_face(kind, config, **settings), batch, own_loss, blocks, no_adapter)


def by_hand(make: type[nn.Module], batch: dict[str, Tensor], blocks: dict[str, int], no_adapter: str = "") -> Family:
    return Family(make.__name__, make, batch, of_classes, blocks, no_adapter)


FEATURES = {"x": torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(3)), "labels": CLASSES}
SEQUENCE = {"input_ids": IDS, "labels": IDS.flip(1)}
PICTURES = {"x": IMAGES, "labels": CLASSES}
PIXELS = {"x": IMAGES, "labels": (IMAGES[:, 0] > 0).long()}


class FromTorch(nn.Module):
    """``nn.Transformer``, with an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.body = nn.Transformer(DIM, 2, 2, 3, 2 * DIM, dropout=0.1, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids), self.embed(ids.flip(1))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([nn.LSTM(DIM, DIM, batch_first=True) for _ in range(3)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        return self.head(x)


class OneLSTM(nn.Module):
    """Two layers inside one call of cuDNN's: nothing that repeats can be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.body = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


class MessagePassing(nn.Module):
    """One round over the edges of a graph: each node adds up what its neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU(), nn.Dropout(0.1))
        self.update = nn.GRUCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.shape[1]
        pairs = torch.cat([x[:, :, None].expand(-1, -1, nodes, -1), x[:, None].expand(-1, nodes, -1, -1)], -1)
        heard = self.message(pairs).sum(2)
        return self.update(heard.flatten(0, 1), x.flatten(0, 1)).view_as(x)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rounds = nn.ModuleList([MessagePassing() for _ in range(3)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for one in self.rounds:
            x = one(x)
        return self.head(x)


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1))]
        super().__init__(*hidden, nn.Linear(DIM, 2))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, LENGTH))
        self.channels = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(x.mT).mT
        return x + self.channels(x)


class Mixer(nn.Module):
    """An MLP-mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(*[Mixing() for _ in range(3)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Convolving(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        super().__init__(conv, nn.GroupNorm(2, channels), nn.ReLU(), nn.Dropout(0.1))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.layers = nn.Sequential(*[Convolving(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Level(nn.Module):
    """Two convolutions of a U-Net, after its halving or doubling of the picture."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(Convolving(channels_in, channels), Convolving(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x)


class Down(Level):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.max_pool2d(x, 2))


class Up(Level):
    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return super().forward(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))


class Attending(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2).mT
        return x + self.attention(flat, flat, flat)[0].mT.view_as(x)


class UNet(nn.Module):
    """Levels as attributes, as most write it, and two attentions at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Level(3, 8)
        self.down1, self.down2 = Down(8, 8), Down(8, 16)
        self.attention1, self.attention2 = Attending(16), Attending(16)
        self.up1, self.up2 = Up(24, 8), Up(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.stem(x)
        middle = self.down1(top)
        x = self.attention2(self.attention1(self.down2(middle)))
        return self.head(self.up2(self.up1(x, middle), top)).permute(0, 2, 3, 1)


class SharedByHand(nn.Module):
    """One layer, in a list of its own as ALBERT's, that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)] * 3)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, DIM))


class Routing(nn.Module):
    """A block whose experts outnumber the blocks, and hold nearly all the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.gate = nn.Linear(DIM, 6)
        self.experts = nn.ModuleList([Expert() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Routing() for _ in range(3)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def whisper() -> Family:
    settings = {"d_model": DIM, "encoder_layers": 2, "decoder_layers": 3, "num_mel_bins": 4}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    limits = {"max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 1, **TOKENS}
    make = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **settings, **heads, **limits)
    mel = torch.randn(BATCH, 4, 16, generator=torch.Generator().manual_seed(4))
    batch = {"input_features": mel, "decoder_input_ids": IDS, "labels": IDS}
    return Family("Whisper", make, batch, own_loss, {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 3})


def wav2vec2() -> Family:
    convolutions = {"conv_dim": (8, 8, 8), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
    more = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": DIM}
    no_masks = {"mask_time_prob": 0.0, "layerdrop": 0.0, "vocab_size": VOCAB}
    config = {**SMALL, **LARGE, **convolutions, **more, **no_masks}
    make = hugging_face("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **config)
    sound = torch.randn(BATCH, 400, generator=torch.Generator().manual_seed(5))
    batch = {"input_values": sound, "labels": CLASSES}
    return Family("Wav2Vec2", make, batch, own_loss, {"Wav2Vec2EncoderLayer": 3})


BART = {
    **{"d_model": DIM, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16},
    "forced_eos_token_id": None,
}
T5 = {"d_model": DIM, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
LLAMA = {**SMALL, "num_key_value_heads": 1, "attention_dropout": 0.1}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 2, 2, 1]}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
SEG = {
    **{"hidden_sizes": [8, 8, 16, 16], "depths": [1, 2, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    **{"decoder_hidden_size": 16, "num_labels": 2, **LARGE},
}

FAMILIES = [
    # decoders
    decoder("GPT2LMHeadModel", "GPT2Config", {"GPT2Block": 3}, n_embd=DIM, n_layer=3, n_head=2, n_positions=16),
    decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", {"GPTNeoXLayer": 3}, **SMALL, hidden_dropout=0.1),
    decoder("LlamaForCausalLM", "LlamaConfig", {"LlamaDecoderLayer": 3}, **LLAMA),
    decoder("Qwen3ForCausalLM", "Qwen3Config", {"Qwen3DecoderLayer": 3}, **LLAMA, head_dim=8),
    decoder(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"MixtralDecoderLayer": 3},
        **LLAMA,
        num_local_experts=4,
        output_router_logits=True,
    ),
    decoder("MambaForCausalLM", "MambaConfig", {"MambaBlock": 3}, hidden_size=DIM, num_hidden_layers=3, state_size=4),
    decoder("RwkvForCausalLM", "RwkvConfig", {"RwkvBlock": 3}, hidden_size=DIM, num_hidden_layers=3, context_length=16),
    by_hand(Experts, SEQUENCE, {"Routing": 3}),
    # encoders
    classifier("BertForSequenceClassification", "BertConfig", {"BertLayer": 3}, **SMALL),
    classifier("AlbertForSequenceClassification", "AlbertConfig", {"AlbertLayer": 1}, **SMALL, embedding_size=8),
    classifier("DebertaV2ForSequenceClassification", "DebertaV2Config", {"DebertaV2Layer": 3}, **SMALL, **LARGE),
    by_hand(SharedByHand, SEQUENCE, {"TransformerEncoderLayer": 1}),
    # encoders with decoders
    translator("BartForConditionalGeneration", "BartConfig", {"BartEncoderLayer": 2, "BartDecoderLayer": 3}, **BART),
    translator("T5ForConditionalGeneration", "T5Config", {"T5Block": 4}, **T5),
    whisper(),
    by_hand(FromTorch, SEQUENCE, {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3}),
    # vision
    vision("ViTForImageClassification", "ViTConfig", {"ViTLayer": 3}, **SMALL, image_size=32, patch_size=8),
    vision("SwinForImageClassification", "SwinConfig", {"SwinLayer": 4}, **SWIN),
    vision("ConvNextForImageClassification", "ConvNextConfig", {"ConvNextLayer": 6}, **STAGES, patch_size=2),
    vision(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"ResNetBasicLayer": 6},
        **STAGES,
        embedding_size=8,
        layer_type="basic",
    ),
    Family(
        "Segformer",
        hugging_face("SegformerForSemanticSegmentation", "SegformerConfig", **SEG),
        {"pixel_values": IMAGES, "labels": PIXELS["labels"]},
        own_loss,
        {"SegformerLayer": 5},
    ),
    by_hand(UNet, PIXELS, {"Down": 2, "Up": 2, "Attending": 2}, NO_LINEAR),
    by_hand(ConvNet, PICTURES, {"Convolving": 3}, NO_LINEAR),
    # audio
    wav2vec2(),
    # the rest
    by_hand(Recurrent, SEQUENCE, {"LSTM": 3}, NO_LINEAR),
    by_hand(OneLSTM, SEQUENCE, {}),
    by_hand(Graph, SEQUENCE, {"MessagePassing": 3}),
    by_hand(Perceptron, FEATURES, {"Linear": 4}),
    by_hand(Mixer, SEQUENCE, {"Mixing": 3}),
]


@cache
def built(family: str) -> nn.Module:
    """The model in training mode, made once in a session; what changes it must put it back."""
    torch.manual_seed(5)
    return next(one for one in FAMILIES if one.name == family).make().train()
