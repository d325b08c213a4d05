"""Twelve architectures of Hugging Face: padding is cut off with the same gradient, or stays for a true reason."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_fasttrain as ft
from tests.support.families import BART, LLAMA, SMALL, T5, TOKENS, VOCAB

ROWS, LONGEST = 6, 32
LENGTHS = torch.tensor([5, 32, 9, 3, 17, 12])
WIDTH = {"max_position_embeddings": LONGEST}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(side: str = "right", length: int = LONGEST, lengths: Tensor = LENGTHS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(length)[None]
    kept = places < lengths[:, None] if side == "right" else places >= length - lengths[:, None]
    return torch.randint(3, VOCAB, (len(lengths), length), generator=generator) * kept, kept.long()


def words(side: str = "right") -> dict[str, Tensor]:
    ids, mask = text(side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classes() -> dict[str, Tensor]:
    ids, mask = text()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0, 1, 0])}


def pairs() -> dict[str, Tensor]:
    target, kept = text(length=12, lengths=torch.tensor([4, 1, 12, 7, 2, 9]))
    return {**words(), "labels": target.masked_fill(kept == 0, -100)}


def sound() -> dict[str, Tensor]:
    mask = (torch.arange(800)[None] < LENGTHS[:, None] * 25).long()
    values = torch.randn(ROWS, 800, generator=torch.Generator().manual_seed(1)) * mask
    return {"input_values": values, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0, 1, 0])}


def spectrogram() -> dict[str, Tensor]:
    mel = torch.randn(ROWS, 4, 64, generator=torch.Generator().manual_seed(2))
    return {"input_features": mel, "labels": words()["labels"]}


WAVES = {
    **{**SMALL, "conv_dim": (8, 8), "conv_stride": (5, 5), "conv_kernel": (10, 5), "vocab_size": VOCAB},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16},
    **{"mask_time_prob": 0.0, "layerdrop": 0.0},
}
WHISPER = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 4, "max_source_positions": 32},
    **{"max_target_positions": LONGEST, "decoder_start_token_id": 1},
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LONGEST}
MODERN = {**SMALL, **WIDTH, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}

EXACT = [
    ("BertForMaskedLM", "BertConfig", {**SMALL, **WIDTH}, words()),
    ("RobertaForSequenceClassification", "RobertaConfig", {**SMALL, "max_position_embeddings": 40}, classes()),
    ("DebertaV2ForMaskedLM", "DebertaV2Config", {**SMALL, **WIDTH, "relative_attention": True}, words()),
    ("ModernBertForMaskedLM", "ModernBertConfig", MODERN, words()),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, words()),
    ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, **WIDTH}, words()),
    ("MistralForCausalLM", "MistralConfig", {**LLAMA, **WIDTH, "sliding_window": 8}, words()),
    ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}, pairs()),
    (
        "BartForConditionalGeneration",
        "BartConfig",
        {**BART, **WIDTH, "decoder_start_token_id": 1},
        pairs(),
    ),
    ("MambaForCausalLM", "MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, words()),
    ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {**WAVES, "feat_extract_norm": "layer"}, sound()),
    # The encoder takes no other length than its own, so that the decoder's labels alone are cut.
    ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, spectrogram()),
]


def make(kind: str, config: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**TOKENS, **settings}))
    return model.eval()  # dropout draws other masks in micro-batches


def compare(model: torch.nn.Module, batch: dict[str, Tensor], **how: Any) -> float:
    """Return the largest error of a parameter's gradient, relative to the norm of the whole gradient."""

    def step(rows: dict[str, Tensor]) -> Tensor:
        return model(**rows).loss

    step(batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ft.accumulate_gradients(step, batch, 3, **how)
    size = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    errors = [(p.grad - expected[name]).norm() / size for name, p in model.named_parameters() if name in expected]
    return float(max(errors))


@pytest.mark.parametrize(("kind", "config", "settings", "batch"), EXACT, ids=[kind for kind, *_ in EXACT])
def test_padding_is_cut_off_with_the_same_gradient(kind, config, settings, batch):
    model = make(kind, config, settings)
    seen: list[int] = []
    cut = next(name for name in ("input_ids", "input_values", "labels") if name in batch)
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs[cut].numel()), with_kwargs=True)
    assert compare(model, batch, trim_padding=True) < 1e-5
    assert sum(seen[-3:]) < 0.85 * seen[0]


REFUSED = [
    ("GPT2LMHeadModel", "GPT2Config", GPT2, words("left"), "'transformer.wpe' is the first module that differs"),
    (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        WAVES,
        sound(),
        "layer_norm' is the first module that differs",
    ),
]


@pytest.mark.parametrize(
    ("kind", "config", "settings", "batch", "why"), REFUSED, ids=["GPT-2 left", "wav2vec2 group norm"]
)
def test_padding_that_takes_part_is_refused(kind, config, settings, batch, why):
    assert compare(make(kind, config, settings), batch) < 1e-5
    with pytest.raises(ValueError, match=why):
        compare(make(kind, config, settings), batch, trim_padding=True)
