"""What CUDA's kernels keep, in closed form; with a GPU, predictions beside its allocator."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fasttrain import predict_memory
from lightning_fasttrain.profiling import PeakMemory

EXAMPLES = str(Path(__file__).parents[2] / "examples")
MIB = 2**20


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def predict(loss, batch, precision="32-true", net=None, device="cuda"):
    net = net or nn.Linear(64, 64)
    return predict_memory(net, batch, loss=loss, optimizer=sgd, precision=precision, device=device)


def kept(loss, batch, precision="32-true", net=None):
    """Return the bytes of activations beyond those of the linear layer, whose output in 32 bits is counted in."""
    return predict(loss, batch, precision, net).peaks["activations"]


class Biased(nn.Module):
    """Attention of 4 heads of width 16 over 512 positions, with a trained bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(1, 4, 512, 512))

    def forward(self, x):
        heads = self.layer(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)


def test_attention_with_a_trained_bias_keeps_no_scores():
    report = predict(lambda net, x: net(x).sum(), torch.zeros(8, 512, 64), net=Biased())
    scores, output, sums = 8 * 4 * 512 * 512 * 4, 8 * 512 * 64 * 4, 8 * 4 * 512 * 4
    assert report.peaks["activations"] == pytest.approx(2 * output + sums, rel=0.01)  # the layer's, too
    assert report.peaks["temporaries"] > scores  # the bias's gradient of each sample


def test_attention_pads_a_mask_to_aligned_rows():
    def attend(length):
        def loss(net, x):
            heads = net(x).unflatten(-1, (4, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=x.new_zeros(length, length)).sum()

        return kept(loss, torch.zeros(2, length, 64))

    assert attend(500) - attend(512) > 0.8 * 2 * 4 * 500 * 512 * 4  # a padded copy for every head, not a view


def test_interpolation_is_in_float32_under_autocast():
    def loss(net, x):
        return F.interpolate(net(x)[None], size=(1024, 64)).square().sum()

    batch = torch.zeros(1, 512, 64)
    assert kept(loss, batch, "bf16-mixed") >= 1024 * 64 * 4


def test_a_vector_norm_keeps_its_input_in_16_bits_under_autocast():
    def loss(net, x):
        return torch.linalg.vector_norm(net(x), dim=-1).sum()

    batch = torch.zeros(4096, 64)
    in_16_bits, norms = 4096 * 64 * 2, 4096 * 4
    assert kept(loss, batch, "bf16-mixed") == pytest.approx(2 * in_16_bits + norms, rel=0.05)  # the layer's input, too


def test_a_cross_entropy_under_autocast_keeps_scores_in_16_and_32_bits():
    def loss(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])

    batch = torch.zeros(8192, 64), torch.zeros(8192, dtype=torch.long)
    scores = 8192 * 64
    expected = scores * 2 + scores * (2 + 4)  # the layer's input in 16 bits, log-softmax and its copy
    assert kept(loss, batch, "bf16-mixed") == pytest.approx(expected, rel=0.05)


def test_an_embedding_sorts_many_indices():
    def loss(net, ids):
        return net(ids).sum()

    few, many = (
        predict(loss, torch.zeros(tokens, dtype=torch.long), net=nn.Embedding(8, 4096)) for tokens in (3072, 3080)
    )
    assert many.op == "embedding_dense_backward (workspace)" != few.op  # sums of rows, beside the gradient
    assert many.peaks["temporaries"] > 3080 * 4096 * 4


def test_gradients_of_one_tensor_are_summed_in_place():
    def loss(net, x):
        hidden = net(x)
        return sum(hidden[i].square().sum() for i in range(8))

    net, batch = nn.Linear(64, 64), torch.zeros(8, 512, 64)
    report = predict(loss, batch, net=net, device="cpu")
    optimizer = sgd(net.parameters())
    for _ in range(3):
        with PeakMemory("cpu", net, optimizer, batch) as peak:
            value = loss(net, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert report.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.01)


def test_an_lstm_without_cudnn_keeps_gates_of_every_step(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)

    def loss(net, x):
        return net(x)[0].sum()

    steps, rows, width = 32, 16, 64
    value = rows * width * 4
    report = predict(loss, torch.zeros(steps, rows, width), net=nn.LSTM(width, width))
    # Four gates of the input, of the hidden state and of both; a hidden state and a cell.
    assert report.peaks["activations"] == pytest.approx(steps * (3 * 4 + 1 + 1) * value, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "bf16-mixed", "lean"])
@pytest.mark.parametrize("model", ["GPT-2", "biased attention", "T5", "ViT", "ConvNeXtV2", "SegFormer"])
def test_predictions_are_within_five_percent_of_the_allocator(monkeypatch, model, way):
    monkeypatch.syspath_prepend(EXAMPLES)
    prediction, families = (importlib.import_module(name) for name in ("memory_prediction", "families"))
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        specimen = families.families(families.Size(length=256, words=8192, width=256, pixels=128))[model]
        report = prediction.predict(specimen, "cuda", prediction.WAYS[way])
        measured, reserved = prediction.measure(specimen, "cuda", prediction.WAYS[way])
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        for name in ("families", "memory_prediction", "small_nets", "reference_models"):
            sys.modules.pop(name, None)
    assert report.peak_bytes == pytest.approx(measured, rel=0.05)
    # Which free block is taken depends on the driver's addresses.
    assert report.reserved_bytes == pytest.approx(reserved, rel=0.3)
