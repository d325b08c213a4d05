"""Guards under ZeRO: a step that one rank spoils is skipped on both, bitwise as if its batches had not been there.

Part of the launch of two processes in zero_scenarios.py.
"""

import functools
import gc
import os
import warnings

import lightning as L
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.guards.finite_guard import refuse_unfinite
from lightning_fasttrain.strategy.zero.zero_strategy import FabricZeROStrategy, ZeROStrategy
from tests.strategy.zero_steps import Grouped, whole
from tests.support.nets import as_loader, trainer

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NAN, SPOILT = float("nan"), 3
GOOD = torch.tensor([1.0, 0.0])


class Spoilt(Grouped):
    """The last two columns of a batch are a factor of its loss and a constant added to it."""

    def training_step(self, batch, batch_idx=0):
        factor, more = batch[0, 8:]
        return super().training_step(batch[:, :8], batch_idx) * factor + more


def batches(spoil=GOOD, without=()):
    """6 batches; of the last rank's, the fourth is spoilt."""
    generator = torch.Generator().manual_seed(1 + RANK)
    made = [torch.cat([torch.randn(4, 8, generator=generator), GOOD.expand(4, 2)], 1) for _ in range(6)]
    if RANK == RANKS - 1:
        made[SPOILT][:, 8:] = spoil
    return [batch for place, batch in enumerate(made) if place not in without]


def fit(data, stage, techniques=(), precision="32-true", **settings):
    gc.freeze()  # DeepSpeed collects garbage at each start of stage 3: skip objects of earlier fits
    torch.manual_seed(3)
    module = Spoilt("adamw", "idle")
    t = trainer(techniques, devices=RANKS, strategy=ZeROStrategy(stage=stage), precision=precision, **settings)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        t.fit(module, as_loader(data))
    return module, t, [str(w.message) for w in seen if "was skipped" in str(w.message)]


def end_of(module, t):
    """Weights, this rank's optimizer state, and learning rates."""
    optimizer = t.optimizers[0]
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    held = [torch.as_tensor(value) for state in states for value in state.values()]
    rates = [torch.as_tensor(group["lr"]) for group in optimizer.param_groups]
    return [*whole(module).values(), *held, *rates]


@functools.cache
def end_without(stage, without, **settings):
    return end_of(*fit(batches(without=without), stage, **settings)[:2])


def is_skipped(spoil, stage, technique, without=(SPOILT,), **settings):
    """Whether the end is that of a run without the batches, the number of skipped steps, and what was said."""
    module, t, said = fit(batches(spoil), stage, [technique], **settings)
    expected = end_without(stage, without, **settings)
    found = end_of(module, t)
    equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return [equal, technique.skipped, said]


def skips_bad_steps(found, folder):
    factor, constant = torch.tensor([NAN, 0.0]), torch.tensor([1.0, NAN])
    for stage in (2, 3):
        found[f"skipped, factor {stage}"] = is_skipped(factor, stage, ft.FiniteGuard())
    for stage in (0, "3+offload"):
        found[f"skipped, bf16 {stage}"] = is_skipped(factor, stage, ft.FiniteGuard(), precision="bf16-true")
    windows = {"without": (2, 3), "accumulate_grad_batches": 2}
    found["skipped, window 1"] = is_skipped(factor, 1, ft.FiniteGuard(), **windows)
    # The gradient of a constant is finite, so that DeepSpeed itself would make the step.
    found["skipped, constant 3"] = is_skipped(constant, 3, ft.FiniteGuard())
    found["skipped, spike 2"] = is_skipped(torch.tensor([200.0, 0.0]), 2, ft.guards.SpikeGuard(after=3))
    try:
        fit(batches(factor), 2, [ft.FiniteGuard(stop_after=1)])
        found["stopped"] = "no error"
    except FloatingPointError as error:
        found["stopped"] = str(error)


def ignores_padding(found, folder):
    """Shards of 8 and 16 values have no padding in two processes; of an odd number the last rank's has."""
    module = fit(batches()[:1], 3)[0]
    bias = module.trained[0].bias
    bias.ds_numel = 15
    if RANK == RANKS - 1:
        bias.ds_tensor[-1] = NAN
    refuse_unfinite(module)
    bias.ds_tensor[0] = NAN
    try:
        refuse_unfinite(module)
        found["padding"] = "no error"
    except FloatingPointError as error:
        found["padding"] = str(error)


def skips_in_fabric(found, folder):
    for stage in (2, 3):
        ends = []
        for data in (batches(torch.tensor([NAN, 0.0])), batches(without=(SPOILT,))):
            fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=FabricZeROStrategy(stage=stage))
            fabric.launch()
            module = Spoilt("adamw", "one")
            model, optimizer = fabric.setup(module, torch.optim.AdamW(module.trained.parameters()))
            steps = ft.guards.FiniteSteps()
            steps.guard_(optimizer, module)
            for batch in data:
                loss = model.module.training_step(batch)
                fabric.backward(loss)
                steps.note_loss(loss)
                optimizer.step()
                optimizer.zero_grad()
            ends.append([steps.skipped, whole(module)])
        (skipped, one), (_, other) = ends
        found[f"skipped in Fabric {stage}"] = [skipped, all(torch.equal(one[name], other[name]) for name in one)]
