"""Models of other families than the reference models, from Hugging Face and by hand, each with a batch."""

import torch
import torch.nn.functional as F
import transformers as hf
from reference_models import Supervised
from torch import nn

from lightning_fasttrain.bench.gpt import Specimen

BATCH, LENGTH, WORDS, WIDTH = 8, 128, 4096, 128
LAYERED = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}


def tokens(*shape, most=WORDS):
    return torch.randint(3, most, shape)


def of_text():
    ids = tokens(BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def of_pairs():
    return {"input_ids": tokens(BATCH, LENGTH), "labels": tokens(BATCH, LENGTH)}


def of_speech():
    return {"input_features": torch.randn(BATCH, 80, 256), "labels": tokens(BATCH, LENGTH)}


def of_images():
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": tokens(BATCH, most=10)}


def of_masks():
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": tokens(BATCH, 64, 64, most=10)}


def own_loss(net, batch):
    return net(**batch).loss


def hugging_face(kind, config, batch, **settings):
    def module():
        made = getattr(hf, config)(**settings)
        made.use_cache = False
        return Supervised(getattr(hf, kind)(made), own_loss)

    return Specimen(module, batch)


class Recurrent(nn.Module):
    """An LSTM of two layers that reads words."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, 2, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


class UNet(nn.Module):
    """Two levels down, two up, and what is passed across."""

    def __init__(self, width=32):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([self.level(width, 2 * width), self.level(2 * width, 4 * width)])
        self.up = nn.ModuleList([self.level(6 * width, 2 * width), self.level(3 * width, width)])
        self.leave = nn.Conv2d(width, 10, 1)

    @staticmethod
    def level(before, after):
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(8, after), nn.SiLU(), second, nn.GroupNorm(8, after), nn.SiLU())

    def forward(self, x):
        passed = [self.enter(x)]
        for level in self.down:
            passed.append(level(F.avg_pool2d(passed[-1], 2)))
        x = passed.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), passed.pop()], dim=1))
        return self.leave(x)


def by_hand(make, batch):
    def loss(net, parts):
        inputs, labels = parts.values()
        logits = net(inputs)
        classes_last = logits.movedim(1, -1) if logits.ndim == 4 else logits
        return F.cross_entropy(classes_last.flatten(0, -2), labels.flatten())

    return Specimen(lambda: Supervised(make(), loss), batch)


HALVES = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": WORDS} | {
    f"{half}_{what}": size
    for half in ("encoder", "decoder")
    for what, size in (("attention_heads", 4), ("ffn_dim", 4 * WIDTH))
}
FAMILIES = {
    "GPT-2": hugging_face(
        "GPT2LMHeadModel", "GPT2Config", of_text, n_embd=WIDTH, n_layer=4, n_head=4, vocab_size=WORDS
    ),
    "Qwen3": hugging_face(
        "Qwen3ForCausalLM", "Qwen3Config", of_text, **LAYERED, num_key_value_heads=2, head_dim=32, vocab_size=WORDS
    ),
    "Mixtral": hugging_face(
        "MixtralForCausalLM", "MixtralConfig", of_text, **LAYERED, num_key_value_heads=2, vocab_size=WORDS
    ),
    "BART": hugging_face("BartForConditionalGeneration", "BartConfig", of_pairs, **HALVES),
    "T5": hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        of_pairs,
        d_model=WIDTH,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
    "Whisper": hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        of_speech,
        **HALVES,
        max_source_positions=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "ViT": hugging_face("ViTForImageClassification", "ViTConfig", of_images, **LAYERED, image_size=64, num_labels=10),
    "Swin": hugging_face(
        "SwinForImageClassification",
        "SwinConfig",
        of_images,
        image_size=64,
        embed_dim=48,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=4,
        num_labels=10,
    ),
    "ConvNeXt": hugging_face(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        of_images,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        num_labels=10,
    ),
    "SegFormer": hugging_face("SegformerForSemanticSegmentation", "SegformerConfig", of_masks, num_labels=10),
    "U-Net": by_hand(UNet, of_masks),
    "LSTM": by_hand(Recurrent, of_text),
}
