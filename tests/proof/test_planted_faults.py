"""Faults that a technique could have, planted one by one: ``verify`` finds each, some only with a named option."""

import random
import re

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.proof.verification import verify as batches_of_a_proof
from lightning_fasttrain.proof.verification.digest import take_digest
from tests.support.nets import TinyLM, lm_batches


class Victim(L.LightningModule):
    """Has everything that faults affect: dropout, batch norm, frozen weights, an average, a schedule, all hooks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 80), nn.BatchNorm1d(80), nn.Dropout(0.1)
        self.wide, self.scale, self.last = nn.Linear(80, 80), nn.LayerNorm(80), nn.Linear(80, 3)
        self.frozen = nn.Linear(80, 80).requires_grad_(False)
        self.register_buffer("average", self.last.weight.detach().clone())

    def forward(self, x):
        hidden = self.drop(F.gelu(self.norm(self.first(x))))
        return self.last(self.scale(self.wide(hidden) + self.frozen(hidden)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(self.last.weight.detach(), 0.1)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_average", self.average.norm())

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self):
        decayed = [*self.first.parameters(), *self.wide.parameters(), *self.last.parameters()]
        norms = [*self.norm.parameters(), *self.scale.parameters()]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batch_of_rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def fault(**hooks):
    """Return a technique that claims to be exact, with these hooks as methods without ``self``."""
    return type("Fault", (ft.Technique,), {name: staticmethod(hook) for name, hook in hooks.items()})


def before_steps(act):
    """Call act(optimizer, index of the step) before each optimizer step."""
    return fault(on_before_optimizer_step=lambda trainer, module, optimizer: act(optimizer, trainer.global_step))


def on_gradients(act):
    """Call act(module, index of the step) on the gradients of each step."""
    return fault(on_after_backward=lambda trainer, module: act(module, trainer.global_step))


def after_steps(act):
    """Call act(module, its optimizer) after each step."""
    return fault(on_train_batch_end=lambda trainer, module, *_: act(module, trainer.optimizers[0]))


def at_start(act):
    """Call act(trainer, module) at the start of training."""
    return fault(on_train_start=act)


def attached(act):
    return fault(attach=lambda trainer, module: act(module) and None)


def in_training_step(alter):
    """Replace the batch of each training step by alter(batch)."""

    def act(module):
        own = module.training_step
        module.training_step = lambda batch, batch_idx: own(alter(batch), batch_idx)

    return attached(act)


def returning(name, alter):
    def act(module):
        own = getattr(module, name)
        setattr(module, name, lambda *arguments: alter(own(*arguments)))

    return attached(act)


def set_groups(optimizer, **values):
    for group in optimizer.param_groups:
        group.update(values)


def scale_gradients(module, factor):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def round_gradients(module, step):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.half().float())


def round_states(module, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].copy_(state["exp_avg"].bfloat16().float())


def round_weights(module, optimizer):
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data.bfloat16().float())


def count_no_steps(module, optimizer):
    for state in optimizer.state.values():
        state["step"].zero_()


def draw(generator):
    return after_steps(lambda *_: generator() and None)


def lose_last_layer(trainer, module):
    group = trainer.optimizers[0].param_groups[0]
    group["params"] = group["params"][:-2]


def forget_first_batch():
    kept = []

    def alter(batch):
        kept.append(batch)
        return kept[0]

    return in_training_step(alter)


def late_average():
    def act(module):
        seen = [module.last.weight.detach().clone()]

        def on_train_batch_end(outputs, batch, batch_idx):
            module.average.lerp_(seen[-1], 0.1)
            seen.append(module.last.weight.detach().clone())

        module.on_train_batch_end = on_train_batch_end

    return attached(act)


def see_twice(trainer, module, batch, batch_idx):
    module.norm(module.first(batch[0]))


def no_zeroing(trainer, module):
    trainer.optimizers[0].zero_grad = lambda *_, **__: None


def one_entry(module, optimizer):
    module.wide.weight.data[3, 5] += 1e-4


def without_last(batch):
    return batch[0][:-1], batch[1][:-1]


FAULTS = {
    "frozen weights are updated": after_steps(lambda module, _: module.frozen.weight.data.mul_(1.001)),
    "rows of frozen weights are swapped": after_steps(
        lambda module, _: module.frozen.weight.data.copy_(module.frozen.weight.data.roll(1, 0))
    ),
    "the first rate is kept": before_steps(lambda optimizer, _: set_groups(optimizer, lr=0.01)),
    "the rate is doubled": before_steps(lambda optimizer, step: set_groups(optimizer, lr=0.02 / (1 + step))),
    "the momentum is altered": at_start(lambda trainer, _: set_groups(trainer.optimizers[0], betas=(0.8, 0.95))),
    "the second moment is altered": at_start(lambda trainer, _: set_groups(trainer.optimizers[0], betas=(0.9, 0.99))),
    "epsilon is altered": at_start(lambda trainer, _: set_groups(trainer.optimizers[0], eps=1e-4)),
    "no decay": at_start(lambda trainer, _: set_groups(trainer.optimizers[0], weight_decay=0.0)),
    "decay on norms": at_start(lambda trainer, _: trainer.optimizers[0].param_groups[1].update(weight_decay=0.1)),
    "wrong from step 2 on": on_gradients(lambda module, step: scale_gradients(module, 1.5 if step == 1 else 1.0)),
    "optimizer state in bfloat16": after_steps(round_states),
    "optimizer state is lost": after_steps(lambda _, optimizer: optimizer.state.clear()),
    "steps are not counted": after_steps(count_no_steps),
    "a layer is not optimized": at_start(lose_last_layer),
    "gradients are not zeroed": at_start(no_zeroing),
    "weights are rounded to bfloat16": after_steps(round_weights),
    "gradient × (1 + 1e-4)": on_gradients(lambda module, _: scale_gradients(module, 1 + 1e-4)),
    "gradient × (1 + 1e-3) from step 2 on": on_gradients(lambda m, step: scale_gradients(m, 1.001 if step else 1.0)),
    "gradients are rounded to float16": on_gradients(round_gradients),
    "one layer without gradient": on_gradients(lambda module, _: setattr(module.wide.weight, "grad", None)),
    "one entry of a gradient is wrong": on_gradients(lambda module, _: module.wide.weight.grad[3, 5].add_(0.01)),
    "the last row is dropped": in_training_step(without_last),
    "labels are turned round": in_training_step(lambda batch: (batch[0], batch[1].flip(0))),
    "the second step sees the first batch": forget_first_batch,
    "the loss is doubled": returning("training_step", lambda loss: 2 * loss),
    "buffers are not updated": at_start(lambda _, module: setattr(module.norm, "momentum", 0.0)),
    "buffers are updated twice": fault(on_train_batch_start=see_twice),
    "the average is a step late": late_average,
    "dropout is off in training": fault(on_train_batch_start=lambda _, module, *args: module.drop.eval() and None),
    "dropout is on in validation": fault(on_validation_start=lambda _, module: module.drop.train() and None),
    "validation in training mode": fault(on_validation_batch_start=lambda _, m, *args, **kw: m.train() and None),
    "validation sees fewer rows": attached(
        lambda m: setattr(
            m, "validation_step", lambda batch, batch_idx: Victim.validation_step(m, without_last(batch), 0)
        )
    ),
    "a hook of validation is not called": attached(lambda m: setattr(m, "on_validation_epoch_end", lambda: None)),
    "prediction is altered": returning("predict_step", lambda output: 1.001 * output),
    "state_dict has another entry": attached(
        lambda m: m.register_state_dict_post_hook(lambda _, state, *args: state.update(more=torch.zeros(1)))
    ),
    "state_dict gives half precision": attached(
        lambda m: m.register_state_dict_post_hook(
            lambda _, state, *args: state.update({k: v.half() for k, v in state.items() if v.is_floating_point()})
        )
    ),
    "a hook is left behind": at_start(
        lambda _, module: module.first.register_forward_hook(lambda *args: None) and None
    ),
    "a forward is left behind": at_start(lambda _, module: setattr(module.first, "forward", module.first.forward)),
    "torch's numbers are drawn": draw(lambda: torch.rand(1)),
    "Python's numbers are drawn": draw(random.random),
    "NumPy's numbers are drawn": draw(np.random.rand),
}
SAID = {
    "frozen weights are updated": "frozen.weight are frozen, but were changed",
    "rows of frozen weights are swapped": "frozen.weight are frozen, but were changed",
    "dropout is off in training": "In training drop are in evaluation mode",
    "dropout is on in validation": "In validation drop are in training mode",
    "validation in training mode": "In validation the module, .* are in training mode",
    "a hook of validation is not called": r"returns different results: val_average",
    "state_dict has another entry": "state_dict has different entries: more",
    "state_dict gives half precision": "state_dict has different entries: average",
    "a hook is left behind": "first are left with different hooks",
    "a forward is left behind": "first are left with different hooks",
    "torch's numbers are drawn": "The random state after a step differs",
    "Python's numbers are drawn": "The random state after a step differs",
    "NumPy's numbers are drawn": "The random state after a step differs",
}
WHERE = {
    "buffers are not updated": "buffers",
    "buffers are updated twice": "buffers",
    "the average is a step late": "buffers",
    "validation sees fewer rows": "validation",
    "prediction is altered": "validation",
    "gradient × (1 + 1e-4)": "gradients",
    "gradient × (1 + 1e-3) from step 2 on": "gradients",
    "one entry of a gradient is wrong": "gradients",
    "the rate is doubled": "updates",
    "the first rate is kept": "updates",
    "decay on norms": "updates",
}
BY_OPTION = {
    "wrong from step 3 on": (
        on_gradients(lambda module, step: scale_gradients(module, 1.5 if step == 2 else 1.0)),
        {"steps": 3},
    ),
    "one entry of a large weight moves a little": (after_steps(one_entry), {"full": True}),
    "clipping is left out": (
        at_start(lambda trainer, _: setattr(trainer, "gradient_clip_val", None)),
        {"gradient_clip_val": 0.01},
    ),
}


def verify(technique, **settings):
    return ft.verify(Victim(), batch_of_rows(), [technique], accelerator="cpu", **settings)


def test_without_a_fault_training_is_bitwise_the_same():
    for options in ({}, {"full": True, "steps": 3, "gradient_clip_val": 0.01}):
        verified = verify(fault()(), **options)
        assert verified, str(verified)
        assert verified.rows[0].bitwise
        quantities = {distance.what for distance in verified.rows[0].distances}
        assert quantities == {"loss", "gradients", "updates", "buffers", "evaluation", "validation"}


# Each is much like another one, which stays in the usual run.
ALIKE = {
    *(
        "the rate is doubled",
        "the second moment is altered",
        "no decay",
        "steps are not counted",
        "the loss is doubled",
    ),
    *("weights are rounded to bfloat16", "gradient × (1 + 1e-3) from step 2 on", "labels are turned round"),
    "buffers are updated twice",
}
USUAL = [name for name in FAULTS if name not in ALIKE]
EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.benchmark) for name in FAULTS if name in ALIKE]


@pytest.mark.parametrize("name", [*USUAL, *EXHAUSTIVE])
def test_a_planted_fault_is_found_by_default(name):
    technique = FAULTS[name]() if isinstance(FAULTS[name], type) else FAULTS[name]()()
    verified = verify(technique)
    assert not verified, str(verified)
    assert verified.guilty == (str(technique),)
    assert not verified.rows[0].failure
    assert re.search(SAID.get(name, ""), " ".join(verified.problems))
    assert name not in WHERE or WHERE[name] in {d.what for d in verified.rows[0].distances if not d.is_within}


@pytest.mark.parametrize("name", BY_OPTION)
def test_a_planted_fault_is_found_by_an_option(name):
    technique, options = BY_OPTION[name]
    verified = verify(technique(), **options)
    assert not verified
    assert not verified.rows[0].failure


def test_the_number_of_faults_matches_the_documentation():
    assert len(FAULTS) + len(BY_OPTION) >= 40


def spoil(name, act):
    """Replace the output of a module by act(output) in training."""

    def patch(module):
        part = module.get_submodule(name)
        own = part.forward
        part.forward = lambda *args, **kw: act(own(*args, **kw)) if module.training else own(*args, **kw)

    return attached(patch)()


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


@pytest.mark.parametrize(
    ("technique", "step", "name", "what"),
    [
        (spoil("wide", lambda output: output * 1.001), 1, "wide (Linear)", "returns"),
        (spoil("norm", lambda output: output + 1e-3), 1, "norm (BatchNorm1d)", "returns"),
        (spoil("wide", HalfGradient.apply), 1, "drop (Dropout)", "receives the gradient"),
        (FAULTS["the rate is doubled"](), 1, "first.weight", "has the value"),
        (FAULTS["wrong from step 2 on"](), 2, "first.weight", "has the gradient"),
        (FAULTS["one entry of a gradient is wrong"](), 1, "wide.weight", "has the gradient"),
        (FAULTS["labels are turned round"](), 1, "last (Linear)", "receives the gradient"),
    ],
)
def test_the_first_difference_is_located(technique, step, name, what):
    verified = verify(technique)
    begins = verified.begins
    assert (begins.step, begins.what) == (step, what)
    assert begins.name == name
    assert begins.value != begins.plain
    assert f"First difference in step {step}: {begins.name} {what}" in str(verified)
    assert verified.as_dict()["begins"]["name"] == begins.name


def test_the_first_difference_is_located_in_micro_batches_and_recomputed_blocks():
    class Wrong(ft.ActivationCheckpointing):
        def apply(self, model):
            block = model.blocks[1].up
            own = block.forward
            block.forward = lambda x: own(x) * 1.01
            return super().apply(model)

    verified = ft.verify(TinyLM(), lm_batches(1)[0], [ft.MicroBatching(3), Wrong()], accelerator="cpu")
    assert verified.guilty == ("Wrong()",)
    assert (verified.begins.step, verified.begins.name) == (1, "blocks.1.up (Linear)")
    wrong = ft.MicroBatching(3, count="samples", check=False)
    verified = ft.verify(TinyLM(), lm_batches(1)[0], [wrong], accelerator="cpu")
    assert verified.begins.what == "receives the gradient"
    assert verified.begins.name.startswith("head")


class Activated(nn.Module):
    """Calls functions between its submodules."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.approximate = nn.Linear(6, 6), nn.Linear(6, 6), "none"

    def forward(self, x):
        x = torch.nn.functional.gelu(self.inner(x), approximate=self.approximate)
        return self.outer(x * 2)


@pytest.mark.parametrize("operators", [True, False])
def test_the_first_different_operator_is_named_on_request(operators):
    class Approximate(ft.ActivationCheckpointing):
        def apply(self, model):
            for block in (part for part in model.modules() if isinstance(part, Activated)):
                block.approximate = "tanh"
            return None if self.blocks is None else super().apply(model)

    for technique in (Approximate(), Approximate(blocks=Activated)):  # recomputes its forward in the backward
        verified = ft.verify(
            lambda: nn.Sequential(nn.Linear(6, 6), Activated(), Activated(), nn.Linear(6, 1)),
            (torch.randn(8, 6), torch.randn(8, 1)),
            [technique],
            loss=lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]),
            optimizer=torch.optim.SGD,
            accelerator="cpu",
            operators=operators,
        )
        assert verified.begins, str(verified)
        where = "torch.nn.functional.gelu in net.1 (Activated)" if operators else "net.1.outer (Linear)"
        assert (verified.begins.step, verified.begins.what, verified.begins.name) == (1, "returns", where)


def test_an_operator_outside_of_all_modules_is_attributed_to_the_step():
    def turn(module):
        own = module.loss
        module.loss = lambda net, batch: own(net, (batch[0], -batch[1]))

    verified = ft.verify(
        lambda: nn.Linear(6, 1),
        (torch.randn(8, 6), torch.randn(8, 1)),
        [attached(turn)()],
        loss=lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]),
        optimizer=torch.optim.SGD,
        accelerator="cpu",
        operators=True,
    )
    assert verified.begins.name == "torch.nn.functional.mse_loss in training_step"


class Nothing(ft.ActivationCheckpointing):
    def apply(self, model):
        return None


def test_a_technique_without_effect_is_reported_as_such():
    verified = ft.verify(TinyLM(), lm_batches(1)[0], [Nothing()], accelerator="cpu")
    assert not verified
    assert verified.rows[0].verdict == "did nothing"
    assert verified.guilty == ("Nothing()",)


# Steps that do not fit into memory, and digests


def test_fewer_rows_are_compared_if_the_plain_step_is_predicted_not_to_fit(monkeypatch):
    one = ft.memory.predict_memory(TinyLM(), lm_batches(1)[0], device="cpu").peak_bytes
    monkeypatch.setattr(batches_of_a_proof, "free_bytes", lambda device: int(0.8 * one))
    verified = ft.verify(TinyLM(), lm_batches(1)[0], [ft.MicroBatching(2)], accelerator="cpu")
    assert verified, str(verified)
    assert "of the batch's 6 rows, chosen to differ: the plain step with all of them is predicted not to" in str(
        verified.notes
    )
    monkeypatch.setattr(batches_of_a_proof, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="a plain step of one row: it takes"):
        ft.verify(TinyLM(), lm_batches(1)[0], [ft.MicroBatching(2)], accelerator="cpu")


def test_fewer_rows_are_compared_if_the_plain_step_runs_out_of_memory():
    class Large(TinyLM):
        def training_step(self, batch, batch_idx):
            if len(batch["labels"]) > 3:
                raise torch.OutOfMemoryError("of this test")
            return super().training_step(batch, batch_idx)

    verified = ft.verify(Large(), lm_batches(1)[0], [ft.MicroBatching(2)], accelerator="cpu")
    assert verified, str(verified)
    assert "3 of the batch's 6 rows, chosen to differ: the plain step with all of them does not fit" in str(
        verified.notes
    )


def test_a_batch_whose_first_half_has_no_loss_is_used_twice_with_a_note():
    batch = lm_batches(1)[0]
    labels = batch["labels"].clone()
    labels[:3] = -100
    verified = ft.verify(TinyLM(), {**batch, "labels": labels}, [ft.MicroBatching(2)], accelerator="cpu")
    assert verified, str(verified)
    assert "All steps see the same batch" in str(verified.notes)


def test_a_validation_that_fails_on_a_training_batch_is_left_out_with_a_note():
    class Other(TinyLM):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch["other"]))

    batch = lm_batches(1)[0]
    verified = ft.verify(Other(), batch, [ft.MicroBatching(2)], accelerator="cpu")
    assert verified
    assert "Pass validation= a batch" in str(verified.notes)
    verified = ft.verify(Other(), batch, [ft.MicroBatching(2)], accelerator="cpu", validation={"other": batch})
    assert verified
    assert "validation" in {distance.what for distance in verified.rows[0].distances}
    with pytest.raises(KeyError):
        ft.verify(Other(), batch, [ft.MicroBatching(2)], accelerator="cpu", validation=batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_digests_estimate_the_distance_of_tensors(dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    one = (4 * torch.randn(300, 1000, generator=generator)).to(dtype)
    low_rank = torch.randn(300, 1, generator=generator) @ torch.randn(1, 1000, generator=generator)
    for other in (one.roll(1, 0), (one.double() + 0.5 * low_rank).to(dtype)):
        exact = float((one.double() - other.double()).norm())
        sampled = (take_digest(one) - take_digest(other)).norm()
        whole = (take_digest(one, tmp_path / "one") - take_digest(other, tmp_path / "other")).norm()
        assert sampled == pytest.approx(exact, rel=0.2)
        assert whole == pytest.approx(exact, rel=1e-9)
        assert take_digest(one).is_same(take_digest(other)) == torch.equal(one, other)
    # A strided slice, an expanded value and an empty tensor have digests too.
    for part in (one.flatten()[1:], one[:1, :1].expand(1, 3), one[:1, 0].expand(5)[:1], one[:0]):
        assert take_digest(part).is_same(take_digest(part.clone()))
    # A permutation has the same checksum, and a single changed value the same sample.
    assert take_digest(one).is_same(take_digest(one.clone()))
    changed = one.clone()
    changed[7, 7] = not changed[7, 7] if dtype is torch.bool else changed[7, 7] + 1
    assert not take_digest(one).is_same(take_digest(changed))
