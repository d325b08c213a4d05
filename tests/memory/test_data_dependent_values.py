import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fasttrain import predict_memory
from lightning_fasttrain.profiling import PeakMemory

ROWS, LENGTH, WIDTH = 32, 64, 256


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def predict(net, batch, loss, device="cpu"):
    return predict_memory(net, batch, loss=loss, optimizer=sgd, device=device)


def measure(net, batch, loss):
    optimizer = sgd(net.parameters())
    for _ in range(3):
        with PeakMemory("cpu", net, optimizer, batch) as peak:
            value = loss(net, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return peak.peak_bytes


def read_length(net, batch):
    values, lengths = batch
    return net(values[:, : lengths.max().item()]).square().mean()


def select_by_mask(net, batch):
    values, lengths = batch
    mask = torch.arange(LENGTH) < lengths[:, None]
    return net(values)[mask].square().mean()


def find_indices(net, batch):
    values, lengths = batch
    rows = (lengths > LENGTH // 2).nonzero().flatten()
    return net(values[rows]).square().sum()


def assign_by_mask(net, batch):
    values, lengths = batch
    outputs = net(values).clone()
    outputs[torch.arange(LENGTH) >= lengths[:, None]] = 0.0
    return outputs.square().mean()


@pytest.mark.parametrize("loss", [read_length, select_by_mask, find_indices])
@pytest.mark.parametrize("longest", [2, LENGTH])
def test_the_measured_peak_is_in_the_predicted_range(loss, longest):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(ROWS, LENGTH, WIDTH), torch.linspace(1, longest, ROWS).long()
    report = predict(net, batch, loss)
    measured = measure(net, batch, loss)
    assert report.least_bytes * 0.99 < measured < report.peak_bytes * 1.01
    assert report.least_bytes < 0.95 * report.peak_bytes
    assert any("upper bound" in note for note in report.notes)
    assert " to " in str(report).splitlines()[0]


def test_metrics_of_classes_in_a_step_can_be_predicted():
    class Counts(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.accuracy = nn.Linear(8, 4), MulticlassAccuracy(num_classes=4)

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.log("accuracy", self.accuracy(logits, batch[1]))
            self.logger.log_metrics({"loss": 0.0})
            return nn.functional.cross_entropy(logits, batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    assert predict_memory(Counts(), (torch.randn(16, 8), torch.arange(16) % 4), device="cpu").peak_bytes > 0


def test_the_upper_bound_is_the_peak_of_full_masks_and_lengths():
    net, batch = nn.Linear(WIDTH, WIDTH), (torch.randn(ROWS, LENGTH, WIDTH), torch.full((ROWS,), LENGTH))
    for loss in (select_by_mask, find_indices):
        assert predict(net, batch, loss).peak_bytes == pytest.approx(measure(net, batch, loss), rel=0.03)


def test_a_mask_that_decides_no_shape_gives_no_range():
    net, batch = nn.Linear(WIDTH, WIDTH), (torch.randn(ROWS, LENGTH, WIDTH), torch.arange(ROWS))
    report = predict(net, batch, assign_by_mask)
    assert report.least_bytes == report.peak_bytes == pytest.approx(measure(net, batch, assign_by_mask), rel=0.03)


@pytest.mark.parametrize("joined", [False, True])
def test_a_ctc_loss_is_predicted(joined):
    def loss(net, batch):
        sound, labels = batch
        scores = net(sound).log_softmax(-1).transpose(0, 1)
        known = labels >= 0
        targets = labels.masked_select(known) if joined else labels
        return F.ctc_loss(scores, targets, torch.full((8,), 200), known.sum(-1), blank=0)

    net, batch = nn.Linear(64, 128), (torch.randn(8, 200, 64), torch.randint(1, 128, (8, 40)))
    report = predict(net, batch, loss)
    assert report.peak_bytes == pytest.approx(measure(net, batch, loss), rel=0.03)
    # Forward variables of 2 · 40 + 1 states at each of 200 steps, in the loss and in its gradient.
    assert report.peaks["activations"] >= 8 * 200 * (81 + 128) * 4


class Matched(nn.Module):
    """Predicts boxes, each of which is matched with the nearest target in NumPy, as in DETR."""

    def __init__(self):
        super().__init__()
        self.boxes = nn.Linear(WIDTH, 4)

    def forward(self, queries, targets):
        boxes = self.boxes(queries)
        cost = torch.cdist(boxes.flatten(0, 1), targets.flatten(0, 1)).detach()
        nearest = torch.as_tensor(cost.cpu().numpy().argmin(1))
        counted = torch.as_tensor(float(len(targets))).clamp(min=1).item()
        return F.l1_loss(boxes.flatten(0, 1), targets.flatten(0, 1)[nearest], reduction="sum") / counted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_matching_outside_of_torch_is_predicted(device):
    batch = torch.randn(ROWS, 100, WIDTH), torch.rand(ROWS, 10, 4)
    report = predict(Matched(), batch, lambda net, batch: net(*batch), device)
    assert report.peaks["temporaries"] >= ROWS * 100 * ROWS * 10 * 4
    if device == "cpu":
        assert report.peak_bytes == pytest.approx(measure(Matched(), batch, lambda net, batch: net(*batch)), rel=0.03)


def test_unique_values_are_predicted():
    def loss(net, batch):
        values, lengths = batch
        groups, inverse = lengths.unique(return_inverse=True)
        sums = torch.zeros(len(groups), WIDTH).index_add(0, inverse, net(values).sum(1))
        return sums.square().mean()

    net, batch = nn.Linear(WIDTH, WIDTH), (torch.randn(ROWS, LENGTH, WIDTH), torch.arange(ROWS))
    assert predict(net, batch, loss).peak_bytes == pytest.approx(measure(net, batch, loss), rel=0.03)
