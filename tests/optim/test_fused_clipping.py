"""Clipping with a fused optimizer in bfloat16 is allowed, correct, and limited to the run."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_fasttrain as ft
from tests.support.nets import Gradients, TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights

SETTINGS = {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}


def test_lightning_still_refuses_fused_clipping():
    """If this fails, Lightning has fixed it and the technique can be removed."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(TinyLM(fused=True), lm_batches(1), **SETTINGS)


def test_fused_equals_unfused_with_clipping():
    plain = fit(TinyLM(fused=False), lm_batches(4), **SETTINGS)
    fused = fit(TinyLM(fused=True), lm_batches(4), [ft.FusedClipping()], **SETTINGS)
    assert largest_difference(weights(plain), weights(fused)) < 1e-5


def test_the_gradient_is_clipped():
    class AfterClipping(TinyLM):
        norms: list = []

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    net = fit(
        AfterClipping(fused=True), lm_batches(2), [ft.FusedClipping()], gradient_clip_val=1e-3, precision="bf16-mixed"
    )
    assert net.norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_the_change_is_undone_after_the_run():
    t = trainer([ft.FusedClipping(), Gradients()], **SETTINGS)
    t.fit(TinyLM(fused=True), as_loader(lm_batches(1)))
    assert "clip_gradients" not in vars(t.precision_plugin)


def test_float16_is_left_unchanged():
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    assert ft.optim.allow_fused_clipping_(plugin) is None
