"""Models of other families than the reference models, from Hugging Face and by hand, each with a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import small_nets
import torch
import torch.nn.functional as F
import transformers as hf
from reference_models import Supervised

from lightning_fasttrain.bench.gpt import Specimen


@dataclass(frozen=True)
class Size:
    """How large the models and their batches are."""

    batch: int = 8
    length: int = 128
    words: int = 4096
    width: int = 128
    pixels: int = 64

    @property
    def layered(self) -> dict[str, int]:
        shape = {"hidden_size": self.width, "num_hidden_layers": 4, "num_attention_heads": 4}
        return {**shape, "intermediate_size": 4 * self.width}

    @property
    def halves(self) -> dict[str, int]:
        """Encoder and decoder, in the words of BART and Whisper."""
        settings = {"d_model": self.width, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": self.words}
        for half in ("encoder", "decoder"):
            settings |= {f"{half}_attention_heads": 4, f"{half}_ffn_dim": 4 * self.width}
        return settings

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, self.words, shape or (self.batch, self.length))

    def classes(self, *shape: int) -> torch.Tensor:
        return torch.randint(10, (self.batch, *shape))

    def images(self) -> torch.Tensor:
        return torch.randn(self.batch, 3, self.pixels, self.pixels)

    def of_text(self) -> dict[str, torch.Tensor]:
        ids = self.tokens()
        return {"input_ids": ids, "labels": ids}

    def of_short_text(self) -> dict[str, torch.Tensor]:
        ids = self.tokens(self.batch, self.length // 4)
        return {"input_ids": ids, "labels": ids}

    def of_pairs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens(), "labels": self.tokens()}

    def of_speech(self) -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(self.batch, 80, 2 * self.length), "labels": self.tokens()}

    def of_sound(self) -> dict[str, torch.Tensor]:
        return {"input_values": torch.randn(self.batch, 320 * self.length), "labels": self.tokens(self.batch, 16) % 32}

    def of_images(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images(), "labels": self.classes()}

    def of_masks(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images(), "labels": self.classes(self.pixels, self.pixels)}

    def of_noise(self) -> dict[str, torch.Tensor]:
        return {"pixels": self.images(), "time": torch.rand(self.batch, 1)}


SMALL = Size()
# Large enough that a card's memory is theirs, and not the workspace of its libraries.
SIZE_ON_CUDA = Size(length=512, words=16_384, width=512, pixels=224)


def families(size: Size = SMALL) -> dict[str, Specimen]:
    """The models of this size by name, each with the function that makes a batch for it."""
    layered, words, width = size.layered, size.words, size.width
    shared_keys = {**layered, "num_key_value_heads": 2, "vocab_size": words}
    return {
        "GPT-2": hugging_face("GPT2LMHeadModel", size.of_text, n_embd=width, n_layer=4, n_head=4, vocab_size=words),
        "Llama": hugging_face("LlamaForCausalLM", size.of_text, **shared_keys),
        "Qwen3": hugging_face("Qwen3ForCausalLM", size.of_text, **shared_keys, head_dim=width // 4),
        "Mixtral": hugging_face("MixtralForCausalLM", size.of_text, **shared_keys),
        "biased attention": by_hand(
            lambda: small_nets.BiasedAttention(words, width, size.length), size.of_text, classify
        ),
        "BERT": hugging_face("BertForMaskedLM", size.of_text, **layered, vocab_size=words),
        "ModernBERT": hugging_face("ModernBertForMaskedLM", size.of_text, **layered, vocab_size=words, pad_token_id=0),
        "Mamba": hugging_face(
            "MambaForCausalLM", size.of_short_text, hidden_size=width, num_hidden_layers=2, vocab_size=words
        ),
        "BART": hugging_face("BartForConditionalGeneration", size.of_pairs, **size.halves),
        "T5": hugging_face(
            "T5ForConditionalGeneration",
            size.of_pairs,
            d_model=width,
            num_layers=2,
            num_heads=4,
            vocab_size=words,
            decoder_start_token_id=0,
        ),
        "Whisper": hugging_face(
            "WhisperForConditionalGeneration",
            size.of_speech,
            **size.halves,
            max_source_positions=size.length,
            max_target_positions=max(size.length, 448),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        "wav2vec2": hugging_face(
            "Wav2Vec2ForCTC", size.of_sound, **layered, vocab_size=32, **SOUND, conv_dim=(width // 2,) * 7
        ),
        "ViT": hugging_face("ViTForImageClassification", size.of_images, **layered, image_size=size.pixels),
        "Swin": hugging_face(
            "SwinForImageClassification",
            size.of_images,
            image_size=size.pixels,
            embed_dim=48,
            depths=[2, 2],
            num_heads=[3, 6],
            window_size=4,
        ),
        "ConvNeXt": hugging_face("ConvNextForImageClassification", size.of_images, **STAGES),
        "ConvNeXtV2": hugging_face("ConvNextV2ForImageClassification", size.of_images, **STAGES),
        "EfficientNet": hugging_face(
            "EfficientNetForImageClassification",
            size.of_images,
            width_coefficient=1.0,
            depth_coefficient=1.0,
            hidden_dim=1280,
        ),
        "SegFormer": hugging_face("SegformerForSemanticSegmentation", size.of_masks),
        "U-Net": by_hand(small_nets.UNet, size.of_masks, classify),
        "diffusion": by_hand(lambda: small_nets.DiffusionUNet(width // 4), size.of_noise, denoise),
        "LSTM": by_hand(lambda: small_nets.Recurrent(words, width), size.of_text, classify),
    }


# Those that the table of CUDA has: one of each kind of kernels.
KINDS_ON_CUDA = (
    "GPT-2",
    "Llama",
    "biased attention",
    "T5",
    "BERT",
    "ModernBERT",
    "Mixtral",
    "Mamba",
    "ViT",
    "ConvNeXtV2",
    "SegFormer",
    "EfficientNet",
    "Whisper",
    "wav2vec2",
    "diffusion",
    "LSTM",
)
SOUND = {"layerdrop": 0.0}  # or the memory is another in each step
STAGES: dict[str, Any] = {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2]}


def hugging_face(kind: str, batch: Callable[[], Any], **settings: Any) -> Specimen:
    """A model of transformers with random weights, which computes its own loss."""

    def module() -> Supervised:
        model_class = getattr(hf, kind)
        images = {"num_labels": 10} if "Classification" in kind or "Segmentation" in kind else {}
        config = model_class.config_class(**settings, **images)
        config.use_cache = False
        return Supervised(model_class(config).train(), own_loss)

    return Specimen(module, batch)


def by_hand(make: Callable[[], torch.nn.Module], batch: Callable[[], Any], loss: Callable[..., Any]) -> Specimen:
    return Specimen(lambda: Supervised(make(), loss), batch)


def own_loss(net, batch):
    return net(**batch).loss


def classify(net, batch):
    inputs, labels = batch.values()
    logits = net(inputs)
    classes_last = logits.movedim(1, -1) if logits.ndim == 4 else logits
    return F.cross_entropy(classes_last.flatten(0, -2), labels.flatten())


def denoise(net, batch):
    pixels, time = batch.values()
    noise = torch.randn_like(pixels)
    return F.mse_loss(net(pixels + noise * time[..., None, None], time), noise)
