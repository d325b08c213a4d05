"""``verify`` accepts equal training, and finds each silent error that was ever found in this project."""

import json
import logging
import math

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.wrapped_forward import without_dropout
from lightning_fasttrain.finetune.adapters import add_adapter, base_model
from lightning_fasttrain.finetune.selection import float32_adapters
from lightning_fasttrain.proof.verification.digest import draw_signs, take_digest
from lightning_fasttrain.proof.verification.short_run import quietly
from tests.support.nets import ShallowLM, as_loader, lm_batches, weights

BATCHES = lm_batches(3)
BATCH = BATCHES[0]


def verify(techniques, module=None, batch=BATCH, **settings):
    return ft.verify(module or ShallowLM(), batch, techniques, accelerator="cpu", **settings)


class Classifier(L.LightningModule):
    """Any network with a loss: (net, batch) → loss."""

    def __init__(self, net, loss, lr=0.01):
        super().__init__()
        self.net, self.loss, self.lr = net, loss, lr

    def training_step(self, batch, batch_idx):
        return self.loss(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def rows_of_numbers(rows=8, width=6):
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=g), torch.randint(3, (rows,), generator=g)


def tail(verified):
    return "\n".join([*verified.problems, *verified.notes])


# Equal training


def test_exact_techniques_are_the_same_and_leave_no_changes():
    net, numbers = ShallowLM(dropout=0.1), torch.get_rng_state()
    before = weights(net)
    verified = verify([ft.MicroBatching(3), ft.ActivationCheckpointing(), ft.EagerGradientRelease()], net, steps=2)
    assert verified.ok, str(verified)
    assert verified.rows[0].verdict == "the same"
    assert {distance.what for distance in verified.rows[0].distances} == {
        "loss", "gradients", "updates", "evaluation", "validation"
    }  # fmt: skip
    assert any("Dropout is off" in note for note in verified.notes)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.blocks[0].dropout.p == 0.1
    assert torch.equal(torch.get_rng_state(), numbers)


def test_dropout_masks_are_the_same_if_a_technique_promises_it():
    verified = verify([ft.ActivationCheckpointing()], ShallowLM(dropout=0.3))
    assert verified.ok
    assert not verified.notes
    assert all(distance.error == 0.0 for distance in verified.rows[0].distances)


class WithSGD(Classifier):
    """AdamW's epsilon of 1e-8 is 0 in float16."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class WeightedBySize(ft.MicroBatching):
    """Weights each micro-batch by its number of samples, whatever the normalizer of its loss."""

    def __init__(self):
        super().__init__(2, count="samples", check=False)


def masked_error(net, batch):
    rows, mask = batch
    return (net(rows).square() * mask).sum() / mask.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_module_and_a_batch_of_another_dtype(dtype):
    torch.manual_seed(0)
    net = WithSGD(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), masked_error, lr=0.1).to(dtype)
    batch = torch.randn(8, 6, dtype=dtype), torch.tensor([[1], [1], [1], [0], [1], [0], [0], [0]], dtype=dtype)
    verified = verify([ft.MicroBatching(2)], net, batch)
    assert verified
    assert net.net[0].weight.dtype is dtype
    if dtype is torch.float64:
        assert max(distance.error for distance in verified.rows[0].distances) < 1e-12
    assert not verify([WeightedBySize()], net, batch)


def test_low_precision_and_techniques_with_a_tolerance_are_verified():
    techniques = [ft.MicroBatching(3), ft.model.LowPrecisionProducts("int8", min_features=8)]
    verified = verify(techniques, precision="bf16-mixed")
    assert verified.ok, str(verified)
    found = [(row.precision, len(row.techniques), row.verdict) for row in verified.rows]
    expected = []
    for precision in ("32-true", "bf16-mixed"):
        expected += [(precision, 1, "the same"), (precision, 2, "within its bound")]
    assert found == expected


def test_a_change_of_training_is_reported_and_others_are_compared_with_it():
    verified = verify([ft.LoRA(rank=2), ft.MicroBatching(3)])
    assert verified.ok, str(verified)
    changes, rest = verified.rows
    assert changes.verdict == "changes training, as declared"
    assert changes.techniques == ("LoRA(rank=2)",)
    assert rest.verdict == "the same"


def test_quantized_kernels_may_round_differently_in_evaluation():
    verified = verify([ft.finetune.QuantizedBase("int8")], ShallowLM(lr=1e-3))
    assert verified.ok, str(verified)


def test_a_window_of_batches_is_compared_with_one_large_batch():
    verified = verify([ft.TokenWeightedAccumulation(2)])
    assert verified.ok, str(verified)
    assert {distance.what for distance in verified.rows[0].distances} == {"gradients", "updates", "validation"}


def test_a_plain_module_a_factory_and_a_module_with_its_own_techniques():
    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    batch = rows_of_numbers()
    for module in (nn.Linear(6, 3), lambda: nn.Linear(6, 3)):
        verified = verify([ft.MicroBatching(2)], module, batch, loss=loss, optimizer=torch.optim.AdamW)
        assert verified.ok
        assert verified.model == "Linear"

    class Net(ft.FastTrainMixin, ShallowLM):
        techniques = [ft.MicroBatching(2)]

    assert verify(None, Net()).rows[0].techniques == ("MicroBatching(n=2)",)


class Masking(ShallowLM):
    """With a mask of minus infinity, as attention has it, of more entries than a digest keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((80, 80), -torch.inf).triu(1))


@pytest.mark.quick
def test_masks_of_minus_infinity_are_compared():
    assert verify([ft.EagerGradientRelease()], Masking()).rows[0].verdict == "the same"
    plain, moved = Masking().mask, Masking().mask
    moved[1:, 0] = 1e-3
    assert (take_digest(moved) - take_digest(plain)).norm() == pytest.approx((79 * 1e-6) ** 0.5, rel=0.5)
    moved[:, 3] = torch.nan
    assert math.isnan((take_digest(moved) - take_digest(plain)).norm())
    assert (take_digest(moved) - take_digest(moved)).norm() == 0


class TwoTowers(L.LightningModule):
    """Compares each row with each other one, in weights of more entries than a digest keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 8)) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        one, other = (tower(batch) for tower in self.towers)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_digests_are_no_draws_of_the_step_that_micro_batching_tries():
    # Otherwise a step that draws is not compared in micro-batches, and these rows depend on one another.
    draw_signs.cache_clear()
    verified = verify([ft.MicroBatching(2)], TwoTowers(), torch.randn(6, 80))
    assert verified.rows[0].verdict == "the same"


def test_a_difference_in_float32_alone_is_to_be_looked_at_in_double_precision():
    hint = "Verify with precision='64-true' too"
    halved = [ft.MicroBatching(2, count=lambda batch: 1.0 + len(batch["labels"]) ** 2, check=False)]
    verified = verify(halved)
    assert hint in str(verified)
    assert not verified.ok
    in_both = verify(halved, precision="64-true")
    assert hint not in str(in_both)
    assert not in_both.ok
    assert hint not in str(verify([ft.EagerGradientRelease()]))


def test_batch_norm_and_a_batch_without_rows():
    norm = Classifier(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        lambda net, b: F.cross_entropy(net(b[0]), b[1]),
    )
    assert verify([ft.EagerGradientRelease()], norm, rows_of_numbers()).ok
    verified = verify([ft.MicroBatching(2, check=False)], norm, rows_of_numbers())
    assert not verified.ok
    assert {"buffers", "gradients"} <= {d.what for d in verified.rows[0].distances if not d.is_within}
    scalar = Classifier(nn.Linear(1, 1), lambda net, batch: net(batch.reshape(1, 1)).square().sum())
    assert verify([ft.EagerGradientRelease()], scalar, torch.tensor(2.0)).ok


def test_the_report_can_be_serialized():
    verified = verify([ft.MicroBatching(2)])
    read = json.loads(json.dumps(verified.as_dict()))
    assert read["ok"] is True
    assert read["rows"][0]["verdict"] == "the same"


def test_dropout_is_found_in_layers_and_in_attributes():
    class Attention(nn.Module):
        attn_dropout, other = 0.1, 0.5

        def __init__(self):
            super().__init__()
            self.attn_dropout, self.other = 0.1, 0.5

    net = nn.ModuleList([nn.Dropout(0.2), nn.MultiheadAttention(4, 2, dropout=0.3), Attention()])
    undo = without_dropout(net)
    assert (net[0].p, net[1].dropout, net[2].attn_dropout, net[2].other) == (0.0, 0.0, 0.0, 0.5)
    undo()
    assert (net[0].p, net[1].dropout, net[2].attn_dropout, net[2].other) == (0.2, 0.3, 0.1, 0.5)


# Invalid input, and meaningless comparisons


@pytest.mark.parametrize(
    ("techniques", "settings", "error"),
    [
        ([], {}, "techniques=\\[\\]: expected at least one technique"),
        ([ft.MicroBatching(2)], {"steps": 0}, "steps=0"),
        ([ft.MicroBatching(2)], {"module": nn.Linear(1, 1)}, "Linear without loss="),
        ([ft.MicroBatching(2)], {"module": lambda: 3}, "expected an nn.Module, got int"),
        (
            [ft.EagerGradientRelease()],
            {"module": ShallowLM().requires_grad_(False)},
            "no parameter requires a gradient",
        ),
        ([ft.MicroBatching(2)], {"batch": as_loader(BATCHES), "steps": 4}, "steps=4: the loader has 3 batches"),
    ],
)
def test_bad_input_is_refused_at_once(techniques, settings, error):
    with pytest.raises((TypeError, ValueError), match=error):
        verify(techniques, **settings)


def test_a_module_that_cannot_be_copied_is_refused():
    net = ShallowLM()
    net.lock = (x for x in ())
    with pytest.raises(TypeError, match=r"ShallowLM cannot be copied: .*generator.* Pass a function that builds it"):
        verify([ft.MicroBatching(2)], net)


def empty(change):
    net = ShallowLM()
    change(net)
    return tail(verify([ft.EagerGradientRelease()], net))


def test_vacuous_comparisons_are_reported():
    ignored = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    assert "The loss is nan" in tail(verify([ft.EagerGradientRelease()], batch=ignored))
    assert "No weight moved in 2 steps" in empty(lambda net: net.settings.update(lr=0.0, weight_decay=0.0))

    class Flat(ShallowLM):
        def training_step(self, batch, batch_idx):
            return 0.0 * super().training_step(batch, batch_idx)

    assert "The gradient is zero everywhere" in tail(verify([ft.EagerGradientRelease()], Flat()))


def test_random_draws_other_than_dropout_are_reported():
    class Noisy(ShallowLM):
        def loss(self, batch):
            return super().loss(batch) * torch.rand(len(batch["labels"])).mean()

    verified = verify([ft.MicroBatching(2, check=False), ft.ActivationCheckpointing()], Noisy())
    assert "MicroBatching cannot be compared" in tail(verified)
    assert verified.rows[0].techniques == ("ActivationCheckpointing()",)
    assert verified.rows[0].ok
    assert verify([ft.LoRA(rank=2)], Noisy()).ok  # evaluations draw the same numbers with and without adapters


def test_averaged_weights_are_not_compared_in_validation():
    verified = verify([ft.optim.WeightEMA(0.5)], ShallowLM())
    assert verified.ok, str(verified)
    assert "validation" not in {distance.what for distance in verified.rows[0].distances}


def test_the_error_of_a_technique_is_its_verdict():
    def contrastive(net, batch):
        x = F.normalize(net(batch[0]), dim=1)
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))

    verified = verify([ft.MicroBatching(2)], Classifier(nn.Linear(6, 4), contrastive), rows_of_numbers())
    assert not verified.ok
    assert "CannotSplitError" in verified.rows[0].failure


# Silent errors that were once found in this project, reproduced


def test_wrongly_weighted_micro_batches_are_found():
    wrong = ft.MicroBatching(3, count="samples", check=False)
    verified = verify([wrong, ft.ActivationCheckpointing()])
    assert verified.guilty == (str(wrong),)
    assert verified.rows[-1].techniques == ("ActivationCheckpointing()",)
    assert verified.rows[-1].ok
    summed = Classifier(nn.Linear(6, 3), lambda net, b: F.cross_entropy(net(b[0]), b[1], reduction="sum"))
    assert not verify([ft.MicroBatching(2, count="samples", check=False)], summed, rows_of_numbers()).ok


def test_a_small_error_that_low_precision_would_hide_is_found():
    class OnePercent(ft.EagerGradientRelease):
        def on_after_backward(self, trainer, pl_module):
            for parameter in pl_module.parameters():
                parameter.grad.mul_(1.0001)

    verified = verify([OnePercent()], precision="bf16-mixed")
    exact, rounded = verified.rows
    assert not exact.ok
    assert rounded.ok


def test_adapters_missing_in_evaluation_are_found(monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(6, 6), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 3))

    def loss(net, batch):
        return F.cross_entropy(net(batch[0][:, None]).mean(1), batch[1])

    lora = ft.LoRA(rank=2, targets=["linear1"])
    assert verify([lora], Classifier(net, loss), rows_of_numbers()).ok
    monkeypatch.setattr(add_adapter.SlowPath, "__call__", lambda self, *a, **k: self.inner(*a, **k))
    verified = verify([lora], Classifier(net, loss), rows_of_numbers())
    assert "Training and evaluation see different models" in tail(verified)


def test_stuck_adapters_in_half_precision_are_found(monkeypatch):
    settings = {"precision": "bf16-true", "module": ShallowLM(lr=1e-4), "steps": 2}
    assert verify([ft.LoRA(rank=2)], **settings).ok
    monkeypatch.setattr(float32_adapters, "keep_in_float32_", lambda module: None)
    assert "did not move: in bfloat16 small updates are rounded away" in tail(verify([ft.LoRA(rank=2)], **settings))


def test_an_additional_optimizer_step_is_found():
    class Phantom(ft.EagerGradientRelease):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 0:
                with torch.no_grad():
                    kept = [p.clone() for p in pl_module.parameters()]
                    optimizer.optimizer.step() if hasattr(optimizer, "optimizer") else optimizer.step()
                    for p, before in zip(pl_module.parameters(), kept, strict=True):
                        p.copy_(before)

    net = ShallowLM(weight_decay=0.1)
    verified = verify([Phantom()], net, batch=as_loader(BATCHES), steps=2)
    assert {"updates"} <= {d.what for d in verified.rows[0].distances if not d.is_within}


def test_parameters_without_an_optimizer_are_found():
    class Replaces(ft.Technique):
        def on_fit_start(self, trainer, pl_module):
            layer = pl_module.blocks[0].up
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())

    assert "no optimizer holds them" in tail(verify([Replaces()], ShallowLM()))


def test_an_adapter_that_comes_after_the_optimizer_is_refused():
    class Early(ShallowLM):
        def __init__(self):
            super().__init__()
            self.held = list(self.parameters())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.held, lr=0.01)

    with pytest.raises(RuntimeError, match=r"an optimizer was made before apply\(model, \[LoRA\]\)"):
        verify([ft.LoRA(rank=2)], Early())


def hollow(kind):
    acts = [name for name in dir(kind) if name in ("apply", "attach") or name.startswith("on_")]
    return type(kind.__name__, (kind,), {name: lambda self, *_: None for name in acts})


@pytest.mark.parametrize(
    "technique",
    [
        hollow(ft.ActivationCheckpointing)(),
        hollow(ft.FusedLossHead)("head"),
        hollow(ft.LoRA)(rank=2),
        hollow(ft.MicroBatching)(2),
    ],
    ids=lambda technique: type(technique).__name__,
)
def test_a_technique_that_does_nothing_is_found(technique):
    verified = verify([technique])
    assert not verified.ok
    assert "changed nothing" in tail(verified) or "did nothing" in tail(verified)


def test_a_changed_base_model_below_adapters_is_found(monkeypatch):
    monkeypatch.setattr(base_model, "changes_base", lambda config: False)
    net = ShallowLM()
    verified = verify([ft.LoRA(rank=2, variant="pissa")], net)
    assert "With adapters disabled the model differs from the plain one" in tail(verified)


class SquaredSubspace(torch.optim.SGD):
    """Steps along directions computed in float32 from the gradient's square, whose condition number is squared."""

    def step(self, closure=None):
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.ndim == 2:
                    directions = torch.linalg.eigh(p.grad @ p.grad.T)[1][:, :2]
                    p.grad.copy_(directions @ (directions.T @ p.grad))
                    p.grad.div_(p.grad.norm())
        super().step()
        return loss


def test_an_unstable_optimizer_is_found():
    net = Classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), None)
    net.loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    net.configure_optimizers = lambda: SquaredSubspace(net.parameters(), lr=0.1)
    verified = ft.verify(
        net.net, rows_of_numbers(), [ft.EagerGradientRelease()], accelerator="cpu", loss=net.loss,
        optimizer=lambda parameters: SquaredSubspace(parameters, lr=0.1),
    )  # fmt: skip
    assert "the optimizer computes a value that float32 cannot represent" in tail(verified)


def test_a_large_unquantized_weight_is_noted():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.stack = nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x):
            return torch.einsum("bi,eij->bj", self.up(x), self.stack)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Experts(), nn.Linear(8, 3))
    module = Classifier(net, lambda net, b: F.cross_entropy(net(b[0]), b[1]))
    verified = verify([ft.QLoRA(rank=2, targets=["up"], skip=["Experts"])], module, rows_of_numbers())
    assert any("Not quantized: net.1.stack" in note for note in verified.notes), tail(verified)


def test_different_dropout_masks_despite_a_promise_are_found():
    class Draws(ft.EagerGradientRelease):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            torch.rand(1)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.blocks[0].register_forward_pre_hook(lambda *_: torch.rand(1) and None)

    verified = verify([Draws()], ShallowLM(dropout=0.2))
    assert not verified.rows[0].ok


def test_a_batch_overwritten_too_early_is_found():
    class Stale(ft.EagerGradientRelease):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            later = BATCHES[min(batch_idx + 1, 2)]
            batch["input_ids"].copy_(later["input_ids"])

    assert not verify([Stale()], batch=as_loader(BATCHES), steps=2).rows[0].ok


def test_a_halved_gradient_is_found():
    class Half(ft.MicroBatching):
        def attach(self, trainer, pl_module):
            own, calls = pl_module.training_step, []

            def training_step(batch, batch_idx):
                calls.append(1)
                return None if len(calls) % 2 == 0 else own(batch, batch_idx)

            pl_module.training_step = training_step
            return super().attach(trainer, pl_module)

    assert not verify([Half(2, count="samples", check=False)]).ok


@pytest.mark.gpu
def test_gpu_verifies_each_precision():
    batch = lm_batches(1)[0]
    for precision in ("32-true", "bf16-mixed"):
        verified = ft.verify(
            ShallowLM(), batch, [ft.MicroBatching(3), ft.DevicePrefetch()], precision=precision, accelerator="gpu"
        )
        assert verified.ok, str(verified)


@pytest.mark.gpu
def test_gpu_prefetched_batches_are_correct():
    assert ft.verify(ShallowLM(), as_loader(lm_batches(4)), [ft.DevicePrefetch()], steps=3, accelerator="gpu").ok


def test_notes_silenced_during_verification_are_logged_later(caplog):
    with quietly():
        note_once("a note of this test")
    assert not caplog.records
    with caplog.at_level(logging.INFO, "lightning_fasttrain"):
        for _ in range(2):
            note_once("a note of this test")
    assert [record.getMessage() for record in caplog.records] == ["a note of this test"]
