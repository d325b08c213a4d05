"""What each technique adds to a training step on a GPU: no wait for the device, no call of the driver's allocator."""

import functools

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from tests.support.device_calls import STAND_IN, DeviceCalls, count_calls

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Total length of")]

STEP = 6  # by then every cache is warm: a MemoryBudget has measured, and the allocator has what it needs


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GPT(GPTConfig(context=32, layers=2, heads=2, width=32))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def calls_of(techniques, **settings):
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # put back by fixtures.py
    calls = DeviceCalls(STEP)
    tokens = [torch.randint(0, 200, (2, 8, 32)).pin_memory() for _ in range(STEP + 3)]
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=STEP + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, calls],
        **settings,
    )
    trainer.fit(Net(), DataLoader([tuple(pair) for pair in tokens], batch_size=None))
    return calls


def micro(n, count="targets"):
    return ft.MicroBatching(n, count=count, check=False)


def all_together():
    return [
        micro(4),
        ft.DevicePrefetch(),
        ft.ActivationCheckpointing(),
        ft.ActivationOffload(min_mib=0),
        ft.EagerGradientRelease(),
        ft.FusedClipping(),
        ft.ExactResume(),
        ft.guards.HangWatch(timeout_s=600),
        ft.StepMeter(),
        ft.MemoryMeter(),
    ]


CLIPPED = {"gradient_clip_val": 1.0, "precision": "bf16-mixed"}
# (techniques, settings of the Trainer, launches beyond those of a plain step without clipping). The number is that of
# the stand-in driver, where matrix products are no launch; None where another room's code decides it.
TABLE = {
    "MicroBatching(1)": (lambda: [micro(1)], {}, 0),
    "MicroBatching(4)": (lambda: [micro(4)], {}, 308),
    "MicroBatching(4) by samples": (lambda: [micro(4, "samples")], {}, 308),
    "TokenWeightedAccumulation": (lambda: [ft.TokenWeightedAccumulation(2, count="targets", check=False)], {}, 0),
    "DevicePrefetch": (lambda: [ft.DevicePrefetch()], {}, 0),
    "ActivationCheckpointing": (lambda: [ft.ActivationCheckpointing()], {}, 10),
    "EveryBlock(2)": (lambda: [ft.ActivationCheckpointing(ft.model.EveryBlock(2))], {}, 5),
    "SelectiveOps": (lambda: [ft.ActivationCheckpointing(ft.model.SelectiveOps())], {}, 8),
    "MemoryBudget": (lambda: [ft.ActivationCheckpointing(ft.MemoryBudget(budget_gib=1.0))], {}, 0),
    "ActivationOffload": (lambda: [ft.ActivationOffload(min_mib=0)], {}, 0),
    "FusedLossHead": (lambda: [ft.FusedLossHead("net.head")], {}, None),
    "LoRA": (lambda: [ft.LoRA(rank=2)], {}, None),
    "EagerGradientRelease": (lambda: [ft.EagerGradientRelease()], {}, 0),
    "FusedClipping": (lambda: [ft.FusedClipping()], CLIPPED, 10),
    "OptimizerInBackward": (lambda: [ft.OptimizerInBackward()], {}, 54),
    "ExactResume": (lambda: [ft.ExactResume()], {}, 0),
    "HangWatch": (lambda: [ft.guards.HangWatch(timeout_s=600)], {}, 0),
    "MatmulPrecision": (lambda: [ft.model.MatmulPrecision("tf32")], {}, 0),
    "LowPrecisionProducts": (lambda: [ft.model.LowPrecisionProducts("int8", min_features=32)], {}, None),
    "StepMeter": (lambda: [ft.StepMeter()], {}, 0),
    "GradientNoiseScale": (lambda: [ft.profiling.GradientNoiseScale(every_n_steps=1), micro(4)], {}, None),
    "MemoryMeter": (lambda: [ft.MemoryMeter()], {}, 0),
    "all together": (all_together, CLIPPED, 582),
    "all and FusedLossHead": (lambda: [*all_together(), ft.FusedLossHead("net.head")], CLIPPED, None),
}


@functools.cache
def launches_of_plain(precision):
    return calls_of([], precision=precision).launches


@pytest.mark.parametrize("name", TABLE)
def test_a_step_waits_for_nothing_allocates_nothing_and_launches_what_is_stated(name):
    make, settings, stated = TABLE[name]
    calls = calls_of(make(), **settings)  # a wait is an error
    assert calls.allocations == 0
    more = calls.launches - launches_of_plain(settings.get("precision", "32-true"))
    if STAND_IN and stated is not None:
        assert more == stated
    if stated == 0:  # products in TF32 need fewer kernels
        assert more <= 0


def test_the_counting_sees_a_wait_an_allocation_and_each_launch():
    x, calls = torch.zeros(4, device="cuda"), DeviceCalls(STEP)
    with count_calls(calls):
        for _ in range(5):
            x.add_(1)
        large = torch.empty(2**27, device="cuda")
    assert (calls.launches, calls.allocations) == (5, 1)
    assert large.nbytes > 0
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        with count_calls(calls):
            x.sum().item()
