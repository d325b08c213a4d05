"""Losses that Hugging Face models compute themselves; the models are tiny and built from their configs."""

from collections.abc import Callable
from typing import Any

import torch

from tests.micro_batching.loss_models import (
    CLASSES,
    LENGTH,
    Draw,
    LossCase,
    Training,
    classes,
    labelled,
    normal,
    positives,
    prefixes,
    task,
)

VOCAB = 19
ROUNDS = 2e-6  # for models that compute their norms, logits or softmax in float32, whatever their weights are
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**TOKENS, **WIDTHS, **NO_DROPOUT, "max_position_embeddings": 12, "initializer_range": 0.3}
IMAGES = {**WIDTHS, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "initializer_range": 0.3}
LLAMA = {**TOKENS, **WIDTHS, "num_key_value_heads": 1, "initializer_range": 0.3}


def hugging_face(kind: str, config: Callable[[Any], Any], **fields: Any) -> Callable[[int], Training]:
    """A model of class ``kind``; ``config`` gets the package."""

    def make_net() -> Any:
        import transformers

        net = getattr(transformers, kind)(config(transformers))
        return net.train()

    return task(make_net, lambda net, b: net(**b), **fields)


def ids(*shape: int) -> Draw:
    return lambda g, number, size: torch.randint(3, VOCAB, (size, *shape), generator=g)


def ended(g: torch.Generator, number: int, size: int) -> torch.Tensor:
    """Return token ids that end with CLIP's pooling token."""
    drawn = ids(LENGTH)(g, number, size)
    drawn[:, -1] = 2
    return drawn


def clip(tf: Any) -> Any:
    text = {**TOKENS, **WIDTHS, "max_position_embeddings": LENGTH, "attention_dropout": 0.0}
    vision = {**WIDTHS, "image_size": 8, "patch_size": 4, "attention_dropout": 0.0}
    return tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)


def wav2vec2(tf: Any) -> Any:
    dropouts = ("hidden", "activation", "attention", "feat_proj", "final")
    return tf.Wav2Vec2Config(
        **{**WIDTHS, "vocab_size": 8, "pad_token_id": 0, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
        **{f"{name}_dropout": 0.0 for name in dropouts},
        conv_dim=(8, 8), conv_kernel=(4, 2), conv_stride=(4, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip


def segformer(tf: Any) -> Any:
    two = {"depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 8], "patch_sizes": [3, 3], "strides": [2, 2]}
    return tf.SegformerConfig(
        **two, **NO_DROPOUT,
        num_encoder_blocks=2, num_attention_heads=[1, 1], mlp_ratios=[1, 1], decoder_hidden_size=8,
        drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=CLASSES, initializer_range=0.3,
    )  # fmt: skip


def t5(tf: Any) -> Any:
    heads = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return tf.T5Config(vocab_size=VOCAB, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, **heads)


def gpt2(tf: Any) -> Any:
    widths = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tf.GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, initializer_range=0.3, **widths, **dropouts)


def distilbert(tf: Any) -> Any:
    widths = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 12}
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0}
    return tf.DistilBertConfig(vocab_size=VOCAB, pad_token_id=0, **widths, **dropouts)


def mixtral(tf: Any) -> Any:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 1, "output_router_logits": True}
    return tf.MixtralConfig(**{**LLAMA, **experts, "router_aux_loss_coef": 0.1}, experts_implementation="eager")


TEXT = {"input_ids": ids(LENGTH), "attention_mask": prefixes(LENGTH)}
WORDS = {**TEXT, "labels": labelled(-100, VOCAB, LENGTH)}
CHOICES = {"input_ids": ids(3, LENGTH), "labels": labelled(-100, 3)}
SPAN = {**TEXT, "start_positions": labelled(99, LENGTH), "end_positions": labelled(99, LENGTH, other=True)}
PIXELS = {"pixel_values": normal(3, 8, 8)}


def bert(kind: str, fields: dict[str, Draw], **settings: Any) -> LossCase:
    return LossCase(kind, hugging_face(kind, lambda tf: tf.BertConfig(**BERT, **settings), **fields))


LOSSES_HUGGING_FACE = [
    bert("BertForSequenceClassification", {**TEXT, "labels": labelled(-100)}, num_labels=CLASSES),
    bert("BertForTokenClassification", {**TEXT, "labels": labelled(-100, 4, LENGTH)}, num_labels=CLASSES),
    bert("BertForQuestionAnswering", SPAN),
    bert("BertForPreTraining", {**WORDS, "next_sentence_label": classes(2)}),
    bert("BertForMaskedLM", WORDS),
    bert("BertForMultipleChoice", CHOICES),
    LossCase(
        "RobertaForSequenceClassification, several labels",
        hugging_face(
            "RobertaForSequenceClassification",
            lambda tf: tf.RobertaConfig(**BERT, num_labels=CLASSES, problem_type="multi_label_classification"),
            **TEXT,
            labels=positives(CLASSES),
        ),
    ),
    LossCase(
        "RobertaForSequenceClassification, regression",
        hugging_face(
            "RobertaForSequenceClassification",
            lambda tf: tf.RobertaConfig(**BERT, num_labels=1),
            **TEXT,
            labels=normal(),
        ),
    ),
    LossCase("DistilBertForQuestionAnswering", hugging_face("DistilBertForQuestionAnswering", distilbert, **SPAN)),
    LossCase("GPT2LMHeadModel", hugging_face("GPT2LMHeadModel", gpt2, **WORDS), tolerance=ROUNDS),
    LossCase(
        "LlamaForCausalLM",
        hugging_face("LlamaForCausalLM", lambda tf: tf.LlamaConfig(**LLAMA), **WORDS),
        tolerance=ROUNDS,
    ),
    LossCase("MixtralForCausalLM, router loss", hugging_face("MixtralForCausalLM", mixtral, **WORDS), tolerance=ROUNDS),
    LossCase("T5ForConditionalGeneration", hugging_face("T5ForConditionalGeneration", t5, **WORDS), tolerance=ROUNDS),
    LossCase(
        "ViTForImageClassification",
        hugging_face(
            "ViTForImageClassification",
            lambda tf: tf.ViTConfig(**IMAGES, num_labels=CLASSES),
            **PIXELS,
            labels=labelled(-100),
        ),
    ),
    LossCase(
        "SegformerForSemanticSegmentation",
        hugging_face(
            "SegformerForSemanticSegmentation",
            segformer,
            pixel_values=normal(3, 16, 16),
            labels=labelled(255, 4, 16, 16),
        ),
    ),
    LossCase(
        "Wav2Vec2ForCTC",
        hugging_face("Wav2Vec2ForCTC", wav2vec2, input_values=normal(96), labels=labelled(-100, 8, 3)),
        tolerance=ROUNDS,
    ),
    LossCase(
        "CLIPModel",
        hugging_face(
            "CLIPModel",
            clip,
            **PIXELS,
            input_ids=ended,
            return_loss=lambda *how: True,
        ),
    ),
]
