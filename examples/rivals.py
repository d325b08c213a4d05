"""The sides of ``against.py``: one model and its batches, trained by Hugging Face, Lightning, a loop, and ours."""

import argparse
import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

import lightning_fasttrain as ft
from lightning_fasttrain.bench.text import Windows, encode_text, read_text

LEARNING_RATE = 3e-4
WARMUP = 3  # compilation falls into the first two
PARTS = 4
SHAPES = {
    "llama": {"layers": 6, "width": 384, "heads": 6, "vocabulary": 16_000, "batch": 16, "length": 256},
    "llama-1b": {"layers": 16, "width": 2048, "heads": 32, "vocabulary": 128_256, "batch": 8, "length": 1024},
    "bert": {"layers": 6, "width": 384, "heads": 6, "vocabulary": 16_000, "batch": 16, "length": 256},
    "vit": {"layers": 6, "width": 384, "heads": 6, "vocabulary": 1000, "batch": 64, "length": 64},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50_304, "batch": 32, "length": 1024},
    "gpt2-medium": {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50_304, "batch": 32, "length": 1024},
    "gpt2-xl": {"layers": 48, "width": 1600, "heads": 25, "vocabulary": 50_304, "batch": 16, "length": 1024},
}


PATCH = 16  # side of a patch of an image, in pixels
MASKED = 0.15  # share of tokens that a BERT predicts


class Tokens(Dataset):
    """Sequences of real text. The first label of each is none: it is never predicted, and some count it."""

    def __init__(self, tokens, length, count):
        self.windows = Windows(tokens, length, count)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        inputs, _ = self.windows[index]
        labels = inputs.clone()
        labels[0] = -100
        return {"input_ids": inputs, "labels": labels}


class MaskedTokens(Tokens):
    """Sequences of real text, of which equally many tokens are hidden and predicted."""

    def __getitem__(self, index):
        inputs, _ = self.windows[index]
        draws = torch.Generator().manual_seed(index)
        hidden = torch.randperm(len(inputs), generator=draws)[: int(MASKED * len(inputs))]
        labels = torch.full_like(inputs, -100)
        labels[hidden] = inputs[hidden]
        return {"input_ids": inputs.index_fill(0, hidden, 0), "labels": labels}


class Images(Dataset):
    """A few images of noise with random labels: what is in an image makes no difference to the time of a step."""

    def __init__(self, side, classes, count):
        self.count, draws = count, torch.Generator().manual_seed(0)
        self.pixels = torch.randn(16, 3, side, side, generator=draws)
        self.labels = torch.randint(classes, (count,), generator=draws)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index % len(self.pixels)], "labels": self.labels[index]}


def image_side(options):
    return PATCH * math.isqrt(options.length)


def build_encoder(options):
    """A BERT that predicts hidden tokens, or a ViT that classifies images."""
    import transformers

    shape = {
        "num_hidden_layers": options.layers,
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_attention_heads": options.heads,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if options.model == "bert":
        text = {"vocab_size": options.vocabulary, "max_position_embeddings": options.length}
        return transformers.BertForMaskedLM(transformers.BertConfig(**shape, **text)).train()
    image = {"image_size": image_side(options), "patch_size": PATCH, "num_labels": options.vocabulary}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, **image)).train()


def build_model(options):
    import transformers

    torch.manual_seed(0)
    if options.model in ("bert", "vit"):
        return build_encoder(options)
    if options.model.startswith("gpt2"):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=options.vocabulary,
                n_positions=options.length,
                n_layer=options.layers,
                n_embd=options.width,
                n_head=options.heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        ).train()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=options.vocabulary,
            max_position_embeddings=options.length,
            num_hidden_layers=options.layers,
            hidden_size=options.width,
            intermediate_size=-(-options.width * 8 // 3 // 256) * 256,  # kernels are slow where it is not aligned
            num_attention_heads=options.heads,
            num_key_value_heads=options.heads,
            use_cache=False,
        )
    ).train()


def build_loader(options, parts=1):
    """All steps' batches in order; ``parts`` to a step, each so much smaller."""
    count = options.batch * (WARMUP + options.steps + 1)
    if options.model == "vit":
        rows = Images(image_side(options), options.vocabulary, count)
    else:
        tokens = np.load(options.tokens, mmap_mode="r", allow_pickle=False) if options.tokens else own_text()
        kind = MaskedTokens if options.model == "bert" else Tokens
        rows = kind(tokens, options.length, count)
    return DataLoader(rows, options.batch // parts, pin_memory=options.device == "cuda")


def own_text():
    return encode_text(read_text(), "bytes", 256)


def train_in_hugging_face(options, recorder, gradient_accumulation_steps=1, **arguments):
    import transformers

    losses = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return build_loader(options, gradient_accumulation_steps)  # its own would shuffle

        def training_step(self, *args, **kwargs):
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model, optimizer, **_):
            recorder.begin(state.global_step, model, optimizer)

        def on_step_end(self, args, state, control, **_):
            recorder.end(state.global_step - 1, torch.stack(losses).sum())
            losses.clear()

    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=recorder.steps,
            per_device_train_batch_size=options.batch // gradient_accumulation_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=0.0,  # no clipping
            bf16=options.precision == "bf16-mixed",
            use_cpu=options.device == "cpu",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        )
        Trainer(build_model(options), settings, callbacks=[Watch()]).train()


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return adamw(self)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def train_in_lightning(options, recorder, techniques=list, precision=None):
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            max_steps=recorder.steps,
            precision=precision or options.precision,
            callbacks=[*suited(techniques(), options), recorder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(build_model(options)), build_loader(options))


def compile_layers(model, **settings):
    """Compile each layer. Masks are made outside of them, where Hugging Face sees that none is needed."""
    for layer in max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len):
        layer.compile(**settings)
    return model


def compile_without_masks(model, **settings):
    """Compile the model, for which transformers' own registries answer that no position is masked.

    Without an answer transformers makes a mask of (B, 1, T, T) while it is traced, up to 5.24 at least (its issue
    48925), and attention with a mask computes both halves.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_masks", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa_without_masks", lambda *_, **__: None)
    model.set_attn_implementation("sdpa_without_masks")
    return torch.compile(model, **settings)


def train_in_a_compiled_loop(options, recorder, compile_it=torch.compile):
    model = build_model(options).to(options.device)
    optimizer, compiled = adamw(model), compile_it(model)
    for step, batch in enumerate(build_loader(options)):
        batch = {name: tensor.to(options.device, non_blocking=True) for name, tensor in batch.items()}
        recorder.begin(step, model, optimizer)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16-mixed"):
            loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.end(step, loss)


def multiply_alone(options, recorder):
    """Only the matrix products of a step, and attention: forward, and the gradients of inputs and weights."""
    dtype = torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32
    make = functools.partial(torch.randn, device=options.device, dtype=dtype)
    tokens, size = options.batch * options.length, options.width // options.heads
    with torch.device("meta"):
        layers = [one for name, one in build_model(options).named_modules() if name != "classifier"]  # of one token
        weights = [one.weight for one in layers if type(one).__name__ in ("Linear", "Conv1D")]
    # One set of matrices for each shape; a product takes no time by being the first of its kind.
    shapes = {tuple(weight.shape) for weight in weights}
    matrices = {(a, b): (make(tokens, b), make(tokens, a), make(a, b)) for a, b in shapes}
    heads = [make(options.batch, options.heads, options.length, size).requires_grad_() for _ in range(3)]
    is_causal = options.model not in ("bert", "vit")
    for step in range(recorder.steps):
        recorder.begin(step)
        for weight in weights:
            inputs, gradients, values = matrices[tuple(weight.shape)]
            inputs @ values.T, gradients @ values, gradients.T @ inputs
        for _ in range(options.layers):
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal)
            torch.autograd.grad(mixed, heads, mixed.detach())
        recorder.end(step, torch.zeros(()))


def suited(techniques, options):
    """Without the fused head for a ViT, whose head reads one token of each image."""
    return [one for one in techniques if options.model != "vit" or not isinstance(one, ft.FusedLossHead)]


def blocks(mode="default"):
    return [ft.CompileBlocks(mode, fallback=False)]  # what is called compiled is compiled, or has failed


def fast(mode="default"):
    return [ft.FusedLossHead(), ft.EagerGradientRelease(), *blocks(mode)]


def between():
    """Fast, with norms and element-wise operations computed again in the backward."""
    return [*fast(), ft.ActivationCheckpointing(ft.model.SelectiveOps())]


def lean(mode="default"):
    return [ft.MicroBatching(PARTS), *fast(mode), ft.ActivationCheckpointing()]


def lean_with_graphs():
    return lean("reduce-overhead")


def lean_in_one():
    return [ft.OptimizerInBackward(), ft.FusedLossHead(), ft.ActivationCheckpointing(), *blocks()]


@dataclass(frozen=True)
class Side:
    title: str
    train: Callable[..., None]  # takes the options and a Recorder
    kind: str = "rival"  # or ours: "fast", "lean" or "other"; or "limit", which is no training
    compiled: Callable[..., torch.nn.Module] | None = None  # what is compiled of the model


HF, LIGHTNING = train_in_hugging_face, train_in_lightning
ALL_THREE = {"gradient_accumulation_steps": PARTS, "gradient_checkpointing": True, "torch_compile": True}
SIDES = {
    "hf": Side("HF Trainer", HF),
    "hf-parts": Side(f"HF, accumulation ×{PARTS}", functools.partial(HF, gradient_accumulation_steps=PARTS)),
    "hf-recompute": Side("HF, gradient_checkpointing", functools.partial(HF, gradient_checkpointing=True)),
    "hf-compile": Side("HF, torch_compile", functools.partial(HF, torch_compile=True), compiled=torch.compile),
    "hf-liger": Side("HF, Liger kernels", functools.partial(HF, use_liger_kernel=True)),
    "hf-all": Side("HF, all three", functools.partial(HF, **ALL_THREE), compiled=torch.compile),
    "naive": Side("Lightning Trainer, float32", functools.partial(LIGHTNING, precision="32-true"), "other"),
    "lightning": Side("Lightning Trainer", LIGHTNING),
    **{
        name: Side(title, functools.partial(train_in_a_compiled_loop, compile_it=compile_it), compiled=compile_it)
        for name, title, compile_it in (
            ("loop", "a loop, torch.compile", torch.compile),
            ("loop-layers", "a loop, each layer compiled", compile_layers),
            ("loop-without-masks", "a loop, compiled, no masks", compile_without_masks),
        )
    },
    **{
        name: Side(title, functools.partial(LIGHTNING, techniques=techniques), kind, compile_layers)
        for name, title, techniques, kind in (
            ("ours-fast", "ours, fast", fast, "fast"),
            ("ours-between", "ours, fast, selective", between, "other"),
            ("ours-lean", f"ours, lean, {PARTS} parts", lean, "lean"),
            ("ours-lean-graphs", f"ours, lean, {PARTS} parts, CUDA graphs", lean_with_graphs, "lean"),
            ("ours-lean-in-one", "ours, lean, in one", lean_in_one, "lean"),
            ("ours-blocks", "ours, compiled blocks alone", blocks, "other"),
        )
    },
}
SIDES["products"] = Side("its matrix products alone", multiply_alone, "limit")
# Liger's kernels, CUDA graphs, and masks, which made no difference to the time on a CPU.
ON_A_GPU = ("hf-liger", "ours-lean-graphs", "loop-without-masks")
DEFAULT_SIDES = tuple(name for name, side in SIDES.items() if side.kind != "other" and name not in ON_A_GPU)
SMALL = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 256, "batch": 2, "length": 16}


def attention_of(side, options):
    """Return how a side attends, "causal", "full" or "masked", by a small model that is traced as the side's own is.

    "masked" is attention that is given a tensor, and computes all of the scores whatever it says.
    """
    small = argparse.Namespace(**(vars(options) | SMALL | {"steps": 1}))
    found = set()

    def note(settings):
        masked = settings.get("attn_mask") is not None
        found.add("masked" if masked else "causal" if settings.get("is_causal") else "full")

    def read_graph(graph, inputs):
        for node in graph.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                note(node.kwargs)
        return graph.forward

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                note(kwargs or {})
            return function(*args, **(kwargs or {}))

    model, batch = build_model(small), next(iter(build_loader(small)))
    if side.compiled is None:
        with Watch():
            model(**batch)
    else:
        side.compiled(model, backend=read_graph)(**batch)
    return ", ".join(sorted(found))
