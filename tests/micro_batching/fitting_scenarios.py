"""Run by two processes (see test_fitting.py): one of them runs out of memory, and each writes its results."""

import faulthandler
import json
import os
import random
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_fasttrain as ft
from tests.support.nets import DIM, VOCAB, TinyLM, as_loader, largest_difference, lm_batches, trainer, weights

RANK = int(os.environ.get("RANK", 0))
MINE = (lm_batches(4, size=6, seed=3), lm_batches(4, size=4, seed=4))[RANK]
FITS = {0: 4, 1: 2}  # rank that runs out of memory → the number of micro-batches that fits
# Which rank runs out of memory, where, and in which micro-batch of a step: each pair of the three.
SHORTAGES = ((0, "forward", "first"), (0, "backward", "last"), (1, "forward", "last"), (1, "backward", "first"))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory (staged)")


class Hungry(TinyLM):
    """Runs out of memory on one rank with more than two samples from the third batch on, at one point of a step.

    Everything that a step can change has been changed by then, and logged over ranks. The loss has a term over
    samples in addition to one over targets, so no count splits it exactly.
    """

    def __init__(self, short=None, place="forward", part="first", unused=False, **settings):
        self.unused = unused
        super().__init__(depth=2, dropout=0.3, **settings)
        self.short, self.place, self.part = short, place, part
        self.calls = 0
        self.norm = nn.BatchNorm1d(DIM, affine=False)
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)

    def build(self):
        super().build()
        if self.unused:
            self.never_used = nn.Linear(2, 2)

    def on_train_batch_start(self, batch, batch_idx):
        self.calls = 0

    def training_step(self, batch, batch_idx):
        rows = len(batch["labels"])
        whole = len(MINE[0]["labels"])
        last = self.calls == (whole + rows - 1) // rows - 1
        self.calls += 1
        hidden = self.embed(batch["input_ids"]).flatten(0, 1).float()
        noise = random.random() + np.random.rand()
        loss = self.loss(batch) + 0.01 * noise * self.norm(hidden).pow(2).mean()
        self.accuracy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, sync_dist=True)
        fails = self.short == RANK and batch_idx >= 2 and rows > 2 and (last or self.part == "first")
        if fails and self.place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return _Fails.apply(loss) if fails else loss


class Knows(Hungry):
    """A run that uses the known number from the batch on where it is needed."""

    def __init__(self, technique, n, **settings):
        super().__init__(**settings)
        self.technique, self.n = [technique], n

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.technique[0].n = 1 if batch_idx < 2 else self.n


def micro_batching(n="auto"):
    return ft.MicroBatching(n, count="targets", check=False)


def run(module, callbacks, strategy=None, batches=MINE, **settings):
    random.seed(5 + RANK)
    np.random.seed(5 + RANK)
    t = trainer(callbacks, devices=2, strategy=strategy or ddp(), **settings)
    torch.manual_seed(5 + RANK)
    t.fit(module, as_loader(batches))
    logged = {name: torch.as_tensor(value) for name, value in t.callback_metrics.items()}
    return {**weights(module), **logged, "random": torch.rand(1), "python": torch.tensor(random.random())}


def ddp(**settings):
    return DDPStrategy(process_group_backend="gloo", **settings)


def everywhere(found):
    expected = {}
    for short, n in FITS.items():
        technique = micro_batching(1)
        expected[short] = run(Knows(technique, n), [technique])
    for short, place, part in SHORTAGES:
        auto = micro_batching()
        seen = run(Hungry(short, place, part), [auto])
        found[f"{short} {place} {part}"] = [largest_difference(expected[short], seen), auto.n]
    plain = run(Hungry(), [])
    found["another training"] = largest_difference(plain, expected[0])


def settings_of_ddp(found):
    views = {"gradient_as_bucket_view": True}
    for name, net, strategy, settings in (
        ("window", {}, {}, {"accumulate_grad_batches": 2}),
        ("views", {}, views, {"gradient_clip_val": 0.1}),
        ("unused", {"unused": True}, {"find_unused_parameters": True}, {}),
    ):
        technique, auto = micro_batching(1), micro_batching()
        expected = run(Knows(technique, 2, **net), [technique], ddp(**strategy), **settings)
        seen = run(Hungry(1, "backward", **net), [auto], ddp(**strategy), **settings)
        found[name] = largest_difference(expected, seen)


class Starved(TinyLM):
    """Fits on one rank, from the third batch on, only with checkpointed blocks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if RANK == 1 and batch_idx >= 2 and "forward" not in vars(self.blocks[0]):
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return loss


def further_savings(found):
    auto = ft.MicroBatching("auto", then=[ft.ActivationCheckpointing()])
    expected, seen = run(TinyLM(dropout=0.3), []), run(Starved(dropout=0.3), [auto])
    found["recomputed"] = [largest_difference(expected, seen), auto.n, auto.savings.taken]


def broken_backend(graph, inputs):
    raise RuntimeError("no such instruction")


def compiler_fails_on_one_rank(found):
    plain = run(TinyLM(), [])
    compiled = ft.CompileBlocks(backend=broken_backend if RANK == 1 else "eager")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        seen = run(TinyLM(), [compiled])
    said = [f"{w.message}"[:60] for w in heard if issubclass(w.category, ft.FastTrainWarning)]
    found["compiler"] = [largest_difference(plain, seen), said, sorted(compiled.report.fallbacks)]


class Gathers(TinyLM):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0 * self.all_gather(torch.ones(1)).sum()


class Synchronises(TinyLM):
    def build(self):
        super().build()
        self.accuracy = MulticlassAccuracy(VOCAB, dist_sync_on_step=True)


class Wrong(TinyLM):
    def training_step(self, batch, batch_idx):
        if RANK == 1 and batch_idx == 1:
            raise ValueError("a mistake in the step")
        return super().training_step(batch, batch_idx)


class TooLarge(TinyLM):
    def training_step(self, batch, batch_idx):
        if RANK == 0 and batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return super().training_step(batch, batch_idx)


def refused(found):
    for net in (Gathers, Synchronises, Wrong, TooLarge):
        found[net.__name__] = error_of(lambda net=net: run(net(), [ft.MicroBatching("auto")]))
    for technique in (ft.MicroBatching(2), ft.TokenWeightedAccumulation(2)):
        name = f"{type(technique).__name__}, static"
        found[name] = error_of(lambda technique=technique: run(TinyLM(), [technique], ddp(static_graph=True)))


def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


class Leaves(TinyLM):
    def training_step(self, batch, batch_idx):
        if RANK == 1 and batch_idx == 1:
            os._exit(0)
        return super().training_step(batch, batch_idx)


def main(path):
    faulthandler.dump_traceback_later(100, exit=True)  # shows where a rank hangs
    found = {}
    for scenario in (
        everywhere,
        settings_of_ddp,
        further_savings,
        compiler_fails_on_one_rank,
        refused,
    ):
        began = time.time()
        scenario(found)
        found.setdefault("seconds", {})[scenario.__name__] = time.time() - began
    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    gone = error_of(lambda: run(Leaves(), [ft.MicroBatching("auto")]))  # rank 0 is alone from now on
    with open(path, "w") as file:
        json.dump([*gathered, gone], file)
    os._exit(0)  # without destructors: see ddp_scenarios.py


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
