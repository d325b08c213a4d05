"""Values logged in micro-batches equal those of the unsplit step, for each name and batch.

Names in the rows: s one call of training_step, z logits (B, T, V), y labels (B, T), kept the labels that count (B, T).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import Running

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.micro_batching import micro_batch_closure
from lightning_fasttrain.micro_batching.micro_batch_logging import LogCall
from tests.support.nets import VOCAB, TinyLM, as_loader, heard, largest_difference, sgd, trainer, weights

SIZES = (6, 7, 4, 5)  # 3 micro-batches are ragged in all but the first
LENGTH = 5


def batches(hiding: bool) -> list[dict[str, Tensor]]:
    """Return rows with different numbers of targets and marked tokens; with ``hiding``, batch 0 is full."""
    g = torch.Generator().manual_seed(3)
    found = []
    for number, size in enumerate(SIZES):
        ids, labels = (torch.randint(VOCAB, (size, LENGTH), generator=g) for _ in range(2))
        kept = torch.randint(1, LENGTH + 1, (size,), generator=g)
        marked = torch.rand(size, LENGTH, generator=g) < 0.4
        marked[:, 0] = True
        if hiding and number == 0:
            kept[:], marked[:] = LENGTH, True
        labels[torch.arange(LENGTH)[None] >= kept[:, None]] = -100
        found.append({"input_ids": ids, "labels": labels, "marked": marked})
    return found


@dataclass
class Step:
    """One call of ``training_step``."""

    net: Any
    batch: dict[str, Tensor]
    z: Tensor
    loss: Tensor

    @property
    def y(self) -> Tensor:
        return self.batch["labels"]

    @property
    def kept(self) -> Tensor:
        return self.y != -100

    @property
    def began(self) -> int:
        """1 after the first batch."""
        return int(self.net.global_step > 0)

    @property
    def marked(self) -> Tensor:
        return self.batch["marked"]

    @property
    def right(self) -> Tensor:
        """Whether a label is among the six likeliest."""
        return (self.z.topk(6).indices == self.y[..., None]).any(-1).double()

    @property
    def each(self) -> Tensor:
        """The loss of each token."""
        return F.cross_entropy(self.z.flatten(0, 1), self.y.flatten(), reduction="none").view(self.y.shape)

    def log(self, name: str, value: Any, **settings: Any) -> None:
        self.net.log(name, value, **settings)


class Logging(TinyLM):
    def __init__(self, write: Callable[[Step], Any]) -> None:
        super().__init__(depth=1, optimizer=sgd, lr=0.5)
        self.write = write
        metrics = {"accuracy": accuracy("micro"), "mean": MeanMetric()}
        self.accuracy, self.collection = accuracy("micro"), MetricCollection(metrics)
        self.f1 = MulticlassF1Score(VOCAB, average="macro", ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        z = self(batch["input_ids"])
        loss = F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten())
        returned = self.write(Step(self, batch, z, loss))
        return {"loss": loss, **returned} if isinstance(returned, dict) else loss


def accuracy(average: Any) -> Metric:
    return MulticlassAccuracy(VOCAB, average=average, ignore_index=-100)


class Watch(L.Callback):
    """Records the logged values after each batch, and the output of the step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.outputs.append(outputs)


def run(write: Callable[[Step], Any], given: list[dict[str, Tensor]], n: int | None, **settings: Any) -> Watch:
    """Train in float64; the last entry of ``steps`` holds the values of the epoch."""
    torch.manual_seed(5)
    watch = Watch()
    t = trainer([watch, *([] if n is None else [ft.MicroBatching(n)])], precision="64-true", **settings)
    t.fit(Logging(write), as_loader(given))
    watch.steps.append({name: float(value) for name, value in t.callback_metrics.items()})
    return watch


def check(write: Callable[[Step], Any], hiding: bool, n: int = 3) -> None:
    expected, seen = (run(write, batches(hiding), parts).steps for parts in (None, n))
    assert any(values for values in expected)
    for step, (one, other) in enumerate(zip(expected, seen, strict=True)):
        assert other == pytest.approx(one, rel=1e-6, abs=1e-12), f"after batch {step}"


def logs(value: Callable[[Step], Any], **settings: Any) -> Callable[[Step], None]:
    return lambda s: s.log("value", value(s), **{"on_step": True, "on_epoch": True, **settings})


def with_size(value: Callable[[Step], Any], size: Callable[[Step], int]) -> Callable[[Step], None]:
    return lambda s: s.log("value", value(s), on_step=True, on_epoch=True, batch_size=size(s))


# Values whose rule every batch determines.
VALUES: dict[str, Callable[[Step], Any]] = {
    "the loss": logs(lambda s: s.loss),
    "the loss, detached": logs(lambda s: s.loss.detach()),
    "the loss, by item()": logs(lambda s: s.loss.item()),
    "twice the loss": logs(lambda s: 2 * s.loss),
    "accuracy of all entries": logs(lambda s: s.right.mean()),
    "accuracy of all entries, by item()": logs(lambda s: s.right.mean().item()),
    "mean of logits, with its graph": logs(lambda s: s.z.mean()),
    "mean over samples of their means": logs(lambda s: ((s.each * s.kept).sum(1) / s.kept.sum(1)).mean()),
    "another term, over what is marked": logs(lambda s: s.z[s.marked].square().mean()),
    "another term, sum / number of marked": logs(lambda s: (s.z.square().sum(-1) * s.marked).sum() / s.marked.sum()),
    "sum of targets": logs(lambda s: s.kept.sum().double(), reduce_fx="sum"),
    "sum of losses": logs(lambda s: s.each.sum(), reduce_fx="sum"),
    "sum, as a function": logs(lambda s: s.kept.sum().double(), reduce_fx=torch.sum),
    "sum, by position": lambda s: s.net.log("value", s.kept.sum().double(), False, True, True, True, "sum"),
    "minimum": logs(lambda s: s.z.min(), reduce_fx="min"),
    "maximum": logs(lambda s: s.z.max(), reduce_fx=torch.max),
    "maximum of Python's numbers": logs(lambda s: s.z.max().item(), reduce_fx="max"),
    "sum of Python's numbers": logs(lambda s: int(s.kept.sum()), reduce_fx="sum"),
    "a constant": logs(lambda s: 0.3),
    "a learning rate": logs(lambda s: s.net.optimizers().param_groups[0]["lr"]),
    "shape (1,)": logs(lambda s: s.right.mean().view(1)),
    "number of samples": with_size(lambda s: s.right.mean(), lambda s: len(s.y)),
    "by step only": logs(lambda s: s.right.mean(), on_epoch=False),
    "by epoch only": logs(lambda s: s.right.mean(), on_step=False),
    "in the progress bar": logs(lambda s: s.right.mean(), prog_bar=True),
    "log_dict": lambda s: s.net.log_dict({"a": s.loss, "b": s.right.mean()}, on_step=True, on_epoch=True),
    "logged twice a step": lambda s: [s.log(name, s.loss) for name in ("a", "b")],
}


@pytest.mark.parametrize(("name", "hiding"), list(zip(VALUES, itertools.cycle([True, False]), strict=False)))
def test_values_are_those_of_the_unsplit_step(name, hiding):
    check(VALUES[name], hiding)


# Values without a graph: without padding, altered labels distinguish means over targets from those over samples.
WITHOUT_GRAPH: dict[str, Callable[[Step], None]] = {
    "accuracy over targets": logs(lambda s: s.right[s.kept].mean()),
    "accuracy over targets, as a quotient": logs(lambda s: (s.right * s.kept).sum() / s.kept.sum()),
    "accuracy over targets, by item()": logs(lambda s: s.right[s.kept].mean().item()),
    "perplexity's exponent, detached": logs(lambda s: s.each.detach()[s.kept].mean()),
    "mean over samples of their means": logs(
        lambda s: ((s.each * s.kept).sum(1) / s.kept.sum(1)).mean().detach(),
    ),
    "0 before training, then over targets": logs(lambda s: s.right[s.kept].mean() * s.began),
    "0 before training, then over samples": logs(lambda s: s.right.mean() * s.began),
    "0 before training, then a sum": logs(lambda s: s.kept.sum().double() * s.began),
    "0 before training, then a constant": logs(lambda s: 0.3 * s.began),
    "0 before training, then over samples of their means": logs(
        lambda s: ((s.each * s.kept).sum(1) / s.kept.sum(1)).mean().item() * s.began
    ),
    "forward of a Metric": lambda s: s.log("value", s.net.accuracy(s.z.flatten(0, 1), s.y.flatten()), on_epoch=True),
}


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
@pytest.mark.parametrize("name", WITHOUT_GRAPH)
def test_values_without_a_graph_are_those_of_the_unsplit_step(name, hiding):
    check(WITHOUT_GRAPH[name], hiding)


def test_a_micro_batch_without_targets_settles_a_value_that_was_0():
    given = batches(hiding=True)[:2]
    given[1]["labels"][:3] = -100  # of the first micro-batch
    write = WITHOUT_GRAPH["0 before training, then over targets"]
    expected, seen = (run(write, given, parts).steps for parts in (None, 3))
    assert seen[1]["value_step"] == pytest.approx(expected[1]["value_step"], rel=1e-6)
    assert expected[1]["value_step"] == expected[1]["value_step"]  # it is not NaN


# z logits, y labels: over all rows, over rows with labels, and sums; each is 0 where no row is right.
OVER_ROWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all": lambda z, y: (z.argmax(-1) == y).float().mean(),
    "labelled": lambda z, y: (z.argmax(-1) == y)[y != -100].float().mean(),
    "clamped": lambda z, y: (z.argmax(-1) == y).sum() / (y != -100).sum().clamp(min=1),
    "hits": lambda z, y: (z.argmax(-1) == y).float().sum(),
    "labels": lambda z, y: float((y != -100).sum()),
}


class OverRows(L.LightningModule):
    """Logs accuracies of a model that is seldom right, beside a loss over the rows with labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.logged = torch.nn.Linear(4, 3), []

    def training_step(self, batch, batch_idx):
        x, labels = batch
        z = self.net(x)
        for name, write in OVER_ROWS.items():
            self.log(name, write(z, labels))
        return F.cross_entropy(z, labels, ignore_index=-100)

    def on_train_batch_end(self, *_):
        self.logged.append({name: self.trainer.callback_metrics[name].item() for name in OVER_ROWS})

    def configure_optimizers(self):
        return sgd(self.parameters())


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_values_over_all_rows_are_those_of_the_unsplit_step_where_rows_have_no_labels(seed, n):
    """Values are 0 in the rows that are tried at first, and rows that are tried later may have no finite loss."""
    g = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(3, 10, 4, generator=g), torch.randint(3, (3, 10), generator=g)
    labels[torch.rand(3, 10, generator=g) < 0.4] = -100
    plain, module = OverRows(), OverRows()
    for one, techniques in ((plain, []), (module, [ft.MicroBatching(n)])):
        trainer(techniques).fit(one, as_loader(list(zip(x, labels, strict=True))))
    for expected, seen in zip(plain.logged, module.logged, strict=True):
        assert seen == pytest.approx(expected, abs=1e-6)


def test_running_samples_once_more_leaves_the_training_as_it_was():
    torch.manual_seed(5)
    ends = []
    for write in (lambda s: None, WITHOUT_GRAPH["0 before training, then over targets"]):
        torch.manual_seed(5)
        net = Logging(write)
        trainer([ft.MicroBatching(3)], precision="64-true").fit(net, as_loader(batches(hiding=True)))
        ends.append((weights(net), torch.get_rng_state()))
    assert largest_difference(ends[0][0], ends[1][0]) == 0
    assert torch.equal(ends[0][1], ends[1][1])


def is_settled_in_time(**settings: Any) -> bool:
    """Return whether a value that was 0 in the first batch is logged correctly in the last one."""
    write, given = WITHOUT_GRAPH["0 before training, then over targets"], batches(hiding=True) * 4
    expected, seen = (run(write, given, parts, **settings).steps[-2]["value_step"] for parts in (None, 3))
    return seen == pytest.approx(expected, rel=1e-6)


class LateFlag(AsyncReading):
    """A flag that has not arrived yet when it is asked for the first time, as on a device."""

    asked = 0

    @property
    def is_done(self) -> bool:
        self.asked += 1
        return self.asked > 1


def test_values_on_a_device_are_compared_there_and_settled_in_a_later_batch(monkeypatch):
    monkeypatch.setattr(LogCall, "is_on_host", False)
    monkeypatch.setattr(micro_batch_closure, "AsyncReading", LateFlag)
    assert is_settled_in_time()


@pytest.mark.gpu
def test_values_on_a_gpu_are_settled_in_a_later_batch():
    assert is_settled_in_time(accelerator="cuda")


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
def test_batch_size_sets_the_weight_of_a_value(hiding):
    check(with_size(lambda s: s.right[s.kept].mean(), lambda s: int(s.kept.sum())), hiding)


def update(s: Step) -> None:
    s.net.accuracy.update(s.z.flatten(0, 1), s.y.flatten())
    s.log("value", s.net.accuracy, on_step=False, on_epoch=True)


def forward(s: Step) -> None:
    s.net.accuracy(s.z.flatten(0, 1), s.y.flatten())
    s.log("value", s.net.accuracy, on_step=True, on_epoch=True)


def nonlinear(s: Step) -> None:
    s.net.f1(s.z.flatten(0, 1), s.y.flatten())
    s.log("value", s.net.f1, on_step=True, on_epoch=True)


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
@pytest.mark.parametrize("write", [update, forward, nonlinear])
def test_metric_objects_accumulate_over_micro_batches(write, hiding):
    check(write, hiding)


def collected(s: Step) -> None:
    s.net.collection["accuracy"](s.z.flatten(0, 1), s.y.flatten())
    s.net.collection["mean"](s.z)
    s.net.log_dict(s.net.collection, on_step=False, on_epoch=True)


def tensors_of_a_collection(s: Step) -> None:
    metrics = MetricCollection([s.net.accuracy])
    s.net.log_dict(metrics(s.z.flatten(0, 1), s.y.flatten()), on_step=True, on_epoch=True)


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
def test_a_metric_collection_logs_the_epoch(hiding):
    check(collected, hiding)


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
def test_tensors_of_a_metric_collection_are_those_of_the_unsplit_step(hiding):
    check(tensors_of_a_collection, hiding)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_values_do_not_depend_on_the_number_of_micro_batches(n):
    check(VALUES["another term, over what is marked"], hiding=True, n=n)


def late(value: Callable[[Step], Any]) -> Callable[[Step], None]:
    return lambda s: s.log("late", value(s), on_step=True, on_epoch=True) if s.net.global_step > 0 else None


def test_a_value_with_a_graph_may_be_logged_from_a_later_batch_on():
    check(late(lambda s: s.z[s.marked].square().mean()), hiding=True)


def test_a_later_value_without_a_graph_is_right_or_reported():
    """The first batch did not log it, so no rule was found."""
    with heard() as said:
        expected, seen = (run(late(lambda s: s.right.mean()), batches(hiding=False), n).steps for n in (None, 3))
    same = all(other == pytest.approx(one, rel=1e-6) for one, other in zip(expected, seen, strict=True))
    assert same or any("self.log('late')" in line for line in said)


def outputs_of(write: Callable[[Step], Any], hiding: bool) -> list[list[dict[str, Any]]]:
    return [run(write, batches(hiding), n).outputs for n in (None, 3)]


RETURNED: dict[str, Callable[[Step], Any]] = {
    "mean over samples": lambda s: s.right.mean(),
    "mean over samples, as Python's number": lambda s: s.right.mean().item(),
    "mean over targets": lambda s: s.right[s.kept].mean(),
    "the loss, detached": lambda s: s.loss.detach(),
    "another term, over what is marked": lambda s: s.z[s.marked].square().mean(),
    "number of targets": lambda s: s.kept.sum(),
    "number of targets, in floating point": lambda s: s.kept.sum().double(),
    "number of targets, as Python's number": lambda s: int(s.kept.sum()),
}


@pytest.mark.parametrize("hiding", [True, False], ids=["hiding", "showing"])
@pytest.mark.parametrize("name", RETURNED)
def test_scalars_returned_beside_the_loss_are_those_of_the_unsplit_step(name, hiding):
    expected, seen = outputs_of(lambda s: {"value": RETURNED[name](s)}, hiding)
    for one, other in zip(expected, seen, strict=True):
        values = [float(torch.as_tensor(output["value"]).detach()) for output in (one, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-6)


def test_other_values_beside_the_loss_are_those_of_the_unsplit_step():
    expected, seen = outputs_of(lambda s: {"right": s.right, "name": "x", "none": None}, hiding=True)
    for one, other in zip(expected, seen, strict=True):
        assert torch.equal(other["right"], one["right"])
        assert (other["name"], other["none"]) == ("x", None)
        assert float(other["loss"]) == pytest.approx(float(one["loss"]))


def medians(s: Step) -> None:
    s.log("median", s.z.detach().median(), on_step=True, on_epoch=True)


def test_a_value_without_a_matching_rule_is_reported_once():
    with heard() as said:
        run(medians, batches(hiding=False), 3)
    lines = [line for line in said if "self.log('median')" in line]
    assert len(lines) == 1
    assert "Log a mean over samples, or a Metric object" in lines[0]


def test_negative_control_a_median_differs():
    with pytest.raises(AssertionError):
        check(medians, hiding=False)


def test_a_backbone_in_micro_batches_logs_what_the_step_logs():
    def write(s: Step) -> dict[str, Any]:
        medians(s)
        s.log("loss", s.loss)
        return {"loss": s.loss.sqrt()}  # no sum over samples, so the backbone is split

    check(write, hiding=True)


def test_a_metric_that_counts_batches_is_named_once_and_one_that_counts_targets_is_not():
    class Net(TinyLM):
        def __init__(self):
            super().__init__(optimizer=sgd)
            self.window, self.mean, self.weighted = Running(MeanMetric(), window=3), MeanMetric(), MeanMetric()
            self.right = MulticlassAccuracy(VOCAB, ignore_index=-100, average="micro")

        def training_step(self, batch, batch_idx):
            logits = self(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            self.window.update(loss.detach())
            self.mean.update(loss.detach())
            self.weighted.update(loss.detach(), weight=(batch["labels"] != -100).sum())
            self.right.update(logits.flatten(0, 1), batch["labels"].flatten())
            return loss

    plain, module = Net(), Net()
    given = batches(hiding=False)
    trainer().fit(plain, as_loader(given))
    with heard() as said:
        trainer([ft.MicroBatching(3)]).fit(module, as_loader(given))
    told = [line for line in said if "takes each micro-batch for a batch" in line]
    assert len(told) == 1
    assert "the metric 'mean', 'window' takes" in told[0]
    assert module.weighted.compute() == pytest.approx(float(plain.weighted.compute()), rel=1e-6)
    assert module.right.compute() == pytest.approx(float(plain.right.compute()), rel=1e-6)
    assert module.mean.compute() != pytest.approx(float(plain.mean.compute()), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_batch_leaves_what_a_metric_has_of_earlier_ones():
    class Net(TinyLM):
        def __init__(self):
            super().__init__(optimizer=sgd)
            self.right = MulticlassAccuracy(VOCAB, ignore_index=-100, average="micro")

        def training_step(self, batch, batch_idx):
            if (batch["labels"] == -100).all(1).any():
                return None
            logits = self(batch["input_ids"])
            self.right(logits.flatten(0, 1), batch["labels"].flatten())
            self.log("right", self.right, on_step=True, on_epoch=True)
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    seen, given = [], batches(hiding=False)
    given[2]["labels"][-1] = -100
    for techniques in ([], [ft.MicroBatching(2)]):
        module = Net()
        t = trainer(techniques)
        t.fit(module, as_loader(given))
        seen.append(t.callback_metrics["right_epoch"].item())
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
