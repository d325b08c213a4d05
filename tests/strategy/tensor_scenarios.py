"""Run by two and by four processes (see test_tensor_parallel.py): each scenario writes its results."""

import faulthandler
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.support.nets import as_loader, largest_difference, trainer, weights

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, ROWS, VOCABULARY, CLASSES = 20, 4, 32, 5
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


class Net(L.LightningModule):
    """One of the models, with its loss; the weights are the same in every process."""

    def __init__(self, kind, **settings):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = MODELS[kind](**settings)
        self.kind, self.losses = kind, []

    def loss(self, batch):
        if self.kind in ("bert", "vit"):
            return self.net(batch["inputs"], labels=batch["labels"]).loss
        logits = self.net(batch["inputs"])
        logits = getattr(logits, "logits", logits)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        if self.kind == "llama":
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
        # Adam would divide the gradient of keys' biases, which is rounding alone, by its own size.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _llama(**settings):
    config = LlamaConfig(**{**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 2, **settings})
    return LlamaForCausalLM(config)


def _bert(**settings):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, vocab_size=VOCABULARY, num_labels=CLASSES, **off))


def _vit(**settings):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=CLASSES, **off))


def _gpt(**settings):
    return GPT(GPTConfig(**{"vocabulary": VOCABULARY, "context": 8, "layers": 2, "heads": 4, "width": 16, **settings}))


MODELS = {"gpt": _gpt, "llama": _llama, "bert": _bert, "vit": _vit}


def batches_of(kind, data_rank, count=STEPS):
    g = torch.Generator().manual_seed(100 + data_rank)
    made = []
    for _ in range(count):
        inputs = torch.randint(VOCABULARY, (ROWS, 8), generator=g)
        if kind == "vit":
            inputs = torch.randn(ROWS, 3, 8, 8, generator=g)
        labels = torch.randint(CLASSES, (ROWS,), generator=g)
        targets = torch.randint(VOCABULARY, (ROWS, 8), generator=g)
        made.append({"inputs": inputs, "labels": labels, "targets": targets})
    return made


def one_process(kind, data_ranks, clip=None, count=STEPS, **settings):
    """Train in one process with plain PyTorch; return the module, and the losses of each data rank."""
    module = Net(kind, **settings)
    module.train()
    stepper = module.configure_optimizers()
    data = [batches_of(kind, rank, count) for rank in range(data_ranks)]
    losses = []
    for step in zip(*data, strict=True):
        several = [module.loss(batch) for batch in step]
        (sum(several) / data_ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        stepper.step()
        stepper.zero_grad()
        losses.append([loss.item() for loss in several])
    return module, losses


def fit(kind, tensor, callbacks=(), settings=None, count=STEPS, module=None, strategy=None, **options):
    gc.freeze()
    torch.manual_seed(21 + RANK)  # so that ranks do not agree by chance
    module = module or Net(kind, **(settings or {}))
    resume = {"ckpt_path": options.pop("resume")} if "resume" in options else {}
    strategy = strategy or FSDP2Strategy(tensor_parallel=tensor)
    t = trainer(callbacks, devices=WORLD, strategy=strategy, **options)
    t.fit(module, as_loader(batches_of(kind, RANK // tensor, count)), **resume)
    return module, t


def whole(module):
    found = {}
    for name, value in module.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.detach().clone()
    return found


def equal_to_one_process(found):
    """Compare the losses of 20 steps with clipping, and the weights after them."""
    for kind in MODELS:
        began = time.time()
        tensor = 2
        expected, losses = one_process(kind, WORLD // tensor, clip=0.5)
        module, _ = fit(kind, tensor, gradient_clip_val=0.5)
        mine = [row[RANK // tensor] for row in losses]
        found[f"{kind} losses"] = max(abs(a - b.item()) for a, b in zip(mine, module.losses, strict=True))
        found[f"{kind} moved"] = largest_difference(weights(Net(kind)), weights(expected))
        found[f"{kind} weights"] = largest_difference(weights(expected), whole(module))
        found.setdefault("seconds", {})[kind] = time.time() - began


def main(path, folder):
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs prints its stack
    warnings.simplefilter("ignore")
    found = {}
    for scenario in (equal_to_one_process,):
        scenario(found)
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, found)
    if RANK == 0:
        Path(path).write_text(json.dumps(gathered))
    time.sleep(1)  # the other rank may still be reading the gathered tensors; see ddp_scenarios.py
    os._exit(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank must not wait for this one
