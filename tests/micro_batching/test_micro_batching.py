"""MicroBatching in the Trainer: the step, the logs and the schedule of the unsplit batch."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning_utilities.core.rank_zero import WarningCache
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

import lightning_fasttrain as ft
from lightning_fasttrain.technique.run_summary import describe_acting
from tests.support.nets import (
    DIM,
    VOCAB,
    Gradients,
    TinyLM,
    as_loader,
    fit,
    largest_difference,
    lm_batches,
    sgd,
    trainer,
    weights,
)

CLIP = {"gradient_clip_val": 0.01}


def steps(callbacks=(), net=TinyLM, batches=None, **settings):
    """Return the gradient of every optimizer step, the module and the trainer of one run."""
    seen, module, t = Gradients(), net(optimizer=sgd), None
    torch.manual_seed(5)
    t = trainer([*callbacks, seen], **settings)
    t.fit(module, as_loader(batches or lm_batches(5)))
    return seen.seen, module, t


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, CLIP, {**CLIP, "gradient_clip_algorithm": "value"}],
    ids=["plain", "accumulation", "clip by norm", "clip by value"],
)  # fmt: skip
def test_every_gradient_is_that_of_the_unsplit_run(n, settings):
    expected, _, t = steps(**settings)
    seen, _, split = steps([ft.MicroBatching(n)], **settings)
    assert split.global_step == t.global_step == len(expected) == len(seen)
    assert max(map(largest_difference, expected, seen)) < 2e-6


def split_strictly(batch, n):
    """A user's function that refuses more micro-batches than there are samples."""
    size = len(batch["labels"])
    if n > size:
        raise ValueError(f"{size} samples in {n} micro-batches")
    return [{name: value.tensor_split(n)[i] for name, value in batch.items()} for i in range(n)]


@pytest.mark.parametrize("n", [2, 3, 6])
def test_a_split_that_refuses_more_parts_than_samples_is_tried_with_fewer(n):
    expected, _, _ = steps()
    seen, _, _ = steps([ft.MicroBatching(n, split=split_strictly)])
    assert max(map(largest_difference, expected, seen)) < 2e-6


def split_loosely(batch, n):
    """A user's function that returns fewer micro-batches where there are fewer samples."""
    return split_strictly(batch, min(n, len(batch["labels"])))


class Contrastive(TinyLM):
    def training_step(self, batch):
        hidden = F.normalize(self.embed(batch["input_ids"]).mean(1), dim=1)
        return F.cross_entropy(hidden @ hidden.T / 0.1, torch.arange(len(hidden)))


@pytest.mark.parametrize(
    ("split", "n"),
    [(split_strictly, 2), (split_strictly, 6), (split_loosely, 5), (split_loosely, 6), (split_loosely, 12)],
)
def test_samples_that_depend_on_another_are_refused_also_one_by_one(split, n):
    """A micro-batch of one sample shows nothing: two are tried."""
    with pytest.raises(ValueError, match="cannot split this loss exactly"):
        steps([ft.MicroBatching(n, split=split)], net=Contrastive)


def test_bf16_mixed_is_as_accurate_as_the_plain_run():
    truth, _, _ = steps()
    plain, _, _ = steps(precision="bf16-mixed")
    split, _, _ = steps([ft.MicroBatching(3)], precision="bf16-mixed")
    error = max(map(largest_difference, truth[:1], plain[:1]))
    assert max(map(largest_difference, truth[:1], split[:1])) < max(2 * error, 1.6e-2)


def test_negative_control_the_same_run_with_a_wrong_count_differs():
    expected, _, _ = steps()
    seen, _, _ = steps([ft.MicroBatching(2, count=lambda part: 1, check=False)])
    assert max(map(largest_difference, expected, seen)) > 1e-2


class LoggingLM(TinyLM):
    """Logs every kind of value that a step can log."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        logits = self(batch["input_ids"])
        self.accuracy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["labels"]))
        self.log_dict({"tokens": (batch["labels"] >= 0).sum().float()}, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", batch["labels"].max().float(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": batch["labels"][:, 0], "twice": 2 * loss.detach(), "name": "x"}


class Watch(L.Callback):
    def __init__(self):
        self.steps, self.outputs, self.calls = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({key: float(value) for key, value in trainer.callback_metrics.items() if "epoch" not in key})
        self.outputs.append(outputs)
        self.calls.append((batch_idx, len(batch["labels"])))


def test_logs_and_outputs_are_those_of_the_unsplit_step():
    plain, split = Watch(), Watch()
    _, _, t = steps([plain], net=LoggingLM)
    _, _, s = steps([split, ft.MicroBatching(4)], net=LoggingLM)
    assert split.calls == plain.calls
    for a, b in zip(plain.steps, split.steps, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert {k: float(v) for k, v in s.callback_metrics.items()} == pytest.approx(
        {k: float(v) for k, v in t.callback_metrics.items()}, rel=1e-5
    )
    for a, b in zip(plain.outputs, split.outputs, strict=True):
        assert b["loss"].item() == pytest.approx(a["loss"].item(), rel=1e-5)
        assert b["twice"].item() == pytest.approx(a["twice"].item(), rel=1e-5)
        assert torch.equal(b["rows"], a["rows"])
        assert b["name"] == "x"


class MeanId(Metric):
    """The mean of token ids, with equal weight for each update."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, ids):
        self.mean = ids.float().mean()

    def compute(self):
        return self.mean


class LogsAMean(TinyLM):
    def __init__(self):
        super().__init__()
        self.mean_id = MeanId()

    def training_step(self, batch, batch_idx):
        self.mean_id(batch["input_ids"])
        self.log("mean_id", self.mean_id, on_step=True, on_epoch=True)
        return self.loss(batch)


def test_metrics_whose_states_are_means_are_those_of_the_unsplit_step():
    plain, split = Watch(), Watch()
    runs = [trainer([plain]), trainer([split, ft.MicroBatching(3)])]
    for t in runs:
        t.fit(LogsAMean(), as_loader(lm_batches(4)))
    for a, b in zip(plain.steps, split.steps, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    epochs = [float(t.callback_metrics["mean_id_epoch"]) for t in runs]
    assert epochs[1] == pytest.approx(epochs[0], rel=1e-5)


def test_the_graph_is_freed_before_the_next_micro_batch():
    alive = []

    class Net(TinyLM):
        def training_step(self, batch, batch_idx):
            alive.append(sum(ref() is not None for ref in self.refs))
            hidden = self.embed(batch["input_ids"]) * 1.0
            import weakref

            self.refs.append(weakref.ref(hidden))
            return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())

        refs: list = []

    fit(Net(), lm_batches(1), [ft.MicroBatching(3)])
    assert len(alive) > 3  # the trial on the first batch, and three micro-batches
    assert not any(alive)


def test_a_schedule_steps_once_per_batch():
    class Net(TinyLM):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    _, module, t = steps([ft.MicroBatching(3)], net=Net)
    assert t.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 / 6)
    assert len(module.losses) == 15


class Skipping(TinyLM):
    """Skips batches in which a row is marked, as for a loss that is not finite; or all are."""

    def __init__(self, which=torch.any, **settings):
        super().__init__(**settings)
        self.which = which

    def training_step(self, batch, batch_idx):
        self.log("seen", 1.0)
        return None if self.which(batch["input_ids"][:, 0] == 99) else self.loss(batch)

    def forward(self, ids, *others):
        return super().forward(ids.clamp(max=VOCAB - 1), *others)


def with_marked(rows):
    first, second, third = lm_batches(3, size=6)
    second["input_ids"][rows, 0] = 99
    return [first, second, third]


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("place", [0, 2, 5], ids=["in the first part", "in the second", "in the last"])
@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW])
@pytest.mark.parametrize("techniques", [[ft.MicroBatching(3)], [ft.MicroBatching(3), ft.TokenWeightedAccumulation(1)]])
def test_a_batch_is_skipped_where_the_step_skips_a_micro_batch_and_so_the_batch(place, optimizer, techniques):
    ends = []
    for callbacks in ([], techniques):
        module = Skipping(optimizer=optimizer)
        trainer(callbacks).fit(module, as_loader(with_marked([place])))
        ends.append(weights(module))
    assert largest_difference(*ends) < 2e-6
    assert largest_difference(ends[0], weights(fit(Skipping(optimizer=optimizer), lm_batches(3, size=6)))) > 1e-4


@pytest.mark.parametrize("rows", [[0, 1], [2, 3], [4, 5]], ids=str)
def test_a_micro_batch_without_targets_that_the_step_skips_has_no_weight(rows):
    """The unsplit step skips no batch in which there are others."""
    batches = with_marked(rows)
    batches[1]["labels"][rows] = -100
    ends = []
    for callbacks in ([], [ft.MicroBatching(3)]):
        module = Skipping(torch.all, optimizer=sgd)
        trainer(callbacks).fit(module, as_loader(batches))
        ends.append(weights(module))
    assert largest_difference(*ends) < 2e-6


def test_a_skipped_batch_whose_gradients_are_in_a_sum_is_refused():
    with pytest.raises(RuntimeError, match="returned None .* inside an accumulation window.*skip the batch"):
        trainer([ft.MicroBatching(3)], accumulate_grad_batches=3).fit(Skipping(), as_loader(with_marked([5])))


def test_a_batch_without_any_loss_is_skipped_as_in_lightning(monkeypatch):
    # it warns once per process
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())

    class Skipping(TinyLM):
        def training_step(self, batch, batch_idx):
            return None

    before = weights(TinyLM())
    with pytest.warns(UserWarning, match="returned `None`"):
        module = fit(Skipping(), lm_batches(1), [ft.MicroBatching(2)])
    assert largest_difference(before, weights(module)) == 0


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (2.5, TypeError), ("4", TypeError)])
def test_invalid_numbers_of_micro_batches_are_refused(n, error):
    with pytest.raises(error, match="n="):
        ft.MicroBatching(n)


def test_under_manual_optimization_the_error_names_the_function_to_call():
    class Manual(TinyLM):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"automatic_optimization=False: .*accumulate_gradients"):
        fit(Manual(), lm_batches(1), [ft.MicroBatching(2)])


def test_an_empty_batch_is_an_error_that_names_it():
    empty = {key: value[:0] for key, value in lm_batches(1)[0].items()}
    with pytest.raises(ValueError, match=r"batch\['input_ids'\] has 0 samples"):
        fit(TinyLM(), [empty], [ft.MicroBatching(2)])


def test_batchnorm_in_training_mode_is_refused_with_its_name():
    class WithNorm(TinyLM):
        def build(self):
            super().build()
            self.unused_norm = torch.nn.BatchNorm1d(DIM)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(DIM, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, VOCAB)
            )

        def forward(self, ids):
            return self.net(self.embed(ids).mean(1))[:, None].expand(*ids.shape, VOCAB)

    for n in (2, "auto"):
        with pytest.raises(ValueError, match=r"BatchNorm in training mode .*'net.1'"):
            fit(WithNorm(), lm_batches(1), [ft.MicroBatching(n)])
    with pytest.warns(ft.FastTrainWarning, match="BatchNorm in training mode .*changes the training"):
        fit(WithNorm(), lm_batches(1), [ft.MicroBatching(2, check=False)])
    accepted = describe_acting([ft.MicroBatching(2, check=False)], WithNorm())
    assert accepted[0].exactness == "changes_training"
    frozen = WithNorm()
    frozen.unused_norm.eval()
    frozen.net[1].eval()
    assert describe_acting([ft.MicroBatching(2, check=False)], frozen)[0].exactness == "exact"
    fit(frozen, lm_batches(1), [ft.MicroBatching(2)])  # warnings are errors here


def test_all_patches_are_undone():
    module = TinyLM()
    t = trainer([ft.MicroBatching(2), ft.TokenWeightedAccumulation(2)])
    t.fit(module, as_loader(lm_batches(2)))
    assert "_make_closure" not in vars(t.fit_loop.epoch_loop.automatic_optimization)
    assert "_should_accumulate" not in vars(t.fit_loop.epoch_loop)
    assert not {"log", "configure_model", "optimizer_zero_grad"} & set(vars(module))
    assert t.accumulate_grad_batches == 1


@pytest.mark.gpu
def test_fp16_with_a_loss_scaler_on_cuda():
    expected, _, _ = steps(accelerator="cuda", devices=1, precision="16-mixed", gradient_clip_val=0.1)
    seen, _, _ = steps(
        [ft.MicroBatching(3)], accelerator="cuda", devices=1, precision="16-mixed", gradient_clip_val=0.1
    )
    assert max(map(largest_difference, expected, seen)) < 1e-2


def test_a_loss_scaler_sees_one_scaled_gradient(monkeypatch):
    from lightning.pytorch.plugins.precision import MixedPrecision

    def plugin():
        return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))

    expected, _, _ = steps(plugins=plugin(), gradient_clip_val=0.1)
    seen, _, t = steps([ft.MicroBatching(3)], plugins=plugin(), gradient_clip_val=0.1)
    assert t.precision_plugin.scaler.get_scale() == 64.0
    assert max(map(largest_difference, expected, seen)) < 1e-2


class Operations(TorchDispatchMode):
    """Counts operations that create or change a tensor: on a GPU, each is at least one launch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function.overloadpacket)
        nothing_is_done = function.is_view or name in {"aten.detach", "aten.promote_types", "aten.scalar_tensor"}
        if function.namespace == "aten" and not nothing_is_done:
            self.count += 1
        return function(*args, **kwargs or {})


class OperationsOfABatch(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.operations = Operations()
        self.operations.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.operations.__exit__(None, None, None)


def operations_in(n):
    watch = OperationsOfABatch()
    fit(TinyLM(), lm_batches(1, size=16), [ft.MicroBatching(n, count="targets", check=False), watch])
    return watch.operations.count


def operations_by_hand():
    """Count the operations of the forward and backward of one micro-batch whose gradients are accumulated."""
    module, batch = TinyLM(), lm_batches(1, size=2)[0]
    for _ in range(2):
        with Operations() as operations:
            module.loss(batch).backward()
    return operations.count


def test_a_micro_batch_costs_five_additional_small_operations():
    counting_two, weighing_three = 2, 3  # compare and sum; of the loss, and of its gradient
    four, eight = operations_in(4), operations_in(8)
    assert (eight - four) / 4 == operations_by_hand() + counting_two + weighing_three
    once_a_step = 30  # at most: the division, the returned loss and the logged one
    assert four - operations_in(1) <= 3 * operations_by_hand() + 4 * 5 + once_a_step


def test_a_loss_in_float32_of_a_model_in_float64_is_split():
    """As Hugging Face's is, whose logits are cast to float32 first."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5, dtype=torch.float64)
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(5, (8,))}

    def step(part):
        return F.cross_entropy(net(part["x"]).float(), part["y"])

    step(batch).backward()
    expected = net.weight.grad.clone()
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 4)
    assert torch.allclose(net.weight.grad, expected, rtol=1e-6)
