import dataclasses
import gc
import json
import threading

import bitsandbytes
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import lightning_fasttrain as ft
from examples import reference_models
from lightning_fasttrain import predict_memory
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.finetune import QuantizedBase, quantize_base_, quantized_bytes
from lightning_fasttrain.memory import MemoryReport, count_flops
from lightning_fasttrain.memory.fake_step import fake_model
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.profiling import PeakMemory
from lightning_fasttrain.profiling.memory_record import CATEGORIES
from lightning_fasttrain.step_time.record_step import StepRecorder
from lightning_fasttrain.technique import Technique
from tests.support.nets import LazyLM, TinyLM, as_loader, fit, lm_batches, trainer

MIB = 2**20


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def of_chain(*layers, batch, loss=lambda net, batch: net(batch).sum(), optimizer=sgd, device="cpu", **settings):
    return predict_memory(
        lambda: nn.Sequential(*[layer() for layer in layers]),
        batch,
        loss=loss,
        optimizer=optimizer,
        device=device,
        **settings,
    )


def linear(inputs=256, outputs=256):
    return lambda: nn.Linear(inputs, outputs, bias=False)


# --- closed form


def test_every_category_of_two_layers_in_closed_form():
    square = 256 * 256 * 4  # bytes of a weight, of the batch and of every activation
    report = of_chain(linear(), nn.Tanh, linear(), batch=torch.zeros(256, 256))
    assert tuple(report.at_peak) == tuple(report.peaks) == CATEGORIES
    assert report.peaks["parameters"] == report.peaks["gradients"] == report.peaks["optimizer state"] == 2 * square
    assert report.peaks["inputs"] == square
    scalar = 4
    assert report.peaks["activations"] == square + scalar  # the tanh, which two layers share, and the loss
    # In the backward, when the last layer has its gradient and that of the tanh is passed to its input.
    assert report.op == "tanh_backward"
    assert report.peak_bytes == (2 + 1 + 2 + 1 + 1 + 2) * square + 2 * scalar
    assert report.at_peak["gradients"] == square
    assert report.at_peak["temporaries"] == 2 * square + scalar
    assert sum(report.at_peak.values()) == report.peak_bytes


def test_gradients_released_early_do_not_exist_in_the_forward():
    square, scalar = 256 * 256 * 4, 4
    half = square // 2  # of the batch and every activation
    layers = (linear(), nn.Tanh, linear())
    kept = of_chain(*layers, batch=torch.zeros(128, 256))
    released = of_chain(*layers, batch=torch.zeros(128, 256), techniques=[ft.EagerGradientRelease()])
    assert (kept.phase, kept.at_peak["gradients"]) == ("forward", 2 * square)
    assert kept.peak_bytes == (2 + 2 + 2) * square + 3 * half + scalar
    assert (released.phase, released.at_peak["gradients"]) == ("backward", square)
    assert released.peak_bytes == (2 + 1 + 2) * square + 4 * half + 2 * scalar


def test_tied_parameters_count_once():
    def tied():
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        net[1].weight = net[0].weight
        return net

    report = predict_memory(tied, torch.zeros(1, 64), loss=lambda net, x: net(x).sum(), optimizer=sgd, device="cpu")
    assert report.peaks["parameters"] == report.peaks["gradients"] == 64 * 64 * 4


def test_bf16_true_halves_everything():
    batch = torch.zeros(512, 256)
    full, half = (of_chain(linear(), nn.Tanh, linear(), batch=batch, precision=p) for p in ("32-true", "bf16-true"))
    assert {c: half.peaks[c] * 2 - full.peaks[c] for c in CATEGORIES if c != "temporaries"} == dict.fromkeys(
        [c for c in CATEGORIES if c != "temporaries"], 0
    )


def test_a_model_larger_than_any_machine_is_predicted():
    width = 2**21
    report = of_chain(linear(width, width), batch=torch.zeros(1, width), optimizer=torch.optim.AdamW)
    assert report.at_peak["parameters"] == 16 * 2**40
    assert report.peak_bytes >= 4 * 16 * 2**40


# --- compared with measurements


def measured(specimen, techniques=(), parts=1, precision="32-true"):
    """Return the peak of the third step, in a bare loop with the Trainer's order."""
    module, batch = specimen.module(), specimen.batch()
    ft.apply(module, techniques)
    optimizer = module.configure_optimizers()

    def step():
        if parts > 1:
            optimizer.zero_grad()
        for part in ft.micro_batching.split_batch(batch, parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
                loss = module.loss(part) / parts
            if parts == 1:
                optimizer.zero_grad()
            loss.backward()
            del loss
        optimizer.step()

    step()
    step()
    with PeakMemory("cpu", module, optimizer, batch) as peak:
        step()
    return peak.peak_bytes


def tokens():
    return torch.randint(256, (2, 256))


SMALL = {
    "gpt": reference_models.Specimen(lambda: GPTModule(GPTConfig(context=256, layers=2)), lambda: (tokens(), tokens())),
    "llama": reference_models.llama(layers=2, batch=2, length=128),
    "encoder": reference_models.encoder(layers=2, batch=4),
    "resnet": reference_models.resnet(layers=2, batch=8, pixels=32),
    "uneven": reference_models.uneven(layers=4, batch=4),
}


@pytest.mark.parametrize(
    ("name", "checkpointing", "parts", "precision"),
    [
        *[(name, name in ("llama", "resnet"), 1, "32-true") for name in SMALL],
        ("gpt", True, 2, "32-true"),
        ("resnet", False, 4, "32-true"),
        ("gpt", False, 1, "bf16-mixed"),
        ("encoder", True, 2, "bf16-mixed"),
    ],
)
def test_within_five_percent_of_the_measured_peak(name, checkpointing, parts, precision):
    techniques = [ft.ActivationCheckpointing()] if checkpointing else []
    specimen = SMALL[name]
    report = predict_memory(
        specimen.module,
        specimen.batch(),
        techniques=[*techniques, ft.MicroBatching(parts)],
        precision=precision,
        device="cpu",
    )
    assert report.peak_bytes == pytest.approx(measured(specimen, techniques, parts, precision), rel=0.05)


def test_predicts_a_recurrent_network_and_transposed_convolutions():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 4, 2, stride=2)
            self.rows = nn.LSTM(4 * 32, 64, batch_first=True)

        def forward(self, x):
            rows = self.up(self.down(x).relu()).transpose(1, 2).flatten(2)
            return self.rows(rows)[0]

    torch.manual_seed(0)
    agrees(Odd(), torch.randn(32, 3, 32, 32))


class Mixing(nn.Module):
    """As in ConvNeXt: grouped convolutions on inputs transposed by a norm over the channels."""

    def __init__(self, side, groups):
        super().__init__()
        self.mix = nn.Conv2d(128, 128, side, padding=side // 2, groups=groups)
        self.norm, self.out = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x):
        return x + self.out(self.norm(self.mix(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))


@pytest.mark.parametrize(
    ("side", "groups", "image", "precision"),
    [
        (7, 128, 8, "32-true"),
        (3, 128, 8, "bf16-mixed"),
        (3, 128, 2, "32-true"),
        (3, 32, 8, "32-true"),
        (3, 32, 8, "bf16-mixed"),
    ],
)
def test_predicts_convolutions_in_channels_last(side, groups, image, precision):
    agrees(nn.Sequential(Mixing(side, groups), Mixing(side, groups)), torch.randn(4, image, image, 128), precision)


@pytest.mark.parametrize("side", [14, 16])
def test_predicts_convolutions_over_patches(side):
    agrees(nn.Conv2d(3, 128, side, stride=side), torch.randn(4, 3, 4 * side, 4 * side))


def agrees(net, batch, precision="32-true"):
    """Compare the prediction with the third step of a plain training."""

    def loss(net, x):
        return net(x).float().pow(2).mean()

    report = predict_memory(net, batch, loss=loss, optimizer=sgd, precision=precision, device="cpu")
    optimizer = sgd(net.parameters())
    for _ in range(3):
        with PeakMemory("cpu", net, optimizer, batch) as peak:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
                value = loss(net, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert report.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)


def test_optimizer_in_backward_matches_the_measured_peak():
    specimen = SMALL["uneven"]
    module, batch = specimen.module(), specimen.batch()
    ft.checkpoint_activations_(module)
    optimizer = module.configure_optimizers()
    ft.optim.optimize_in_backward_(optimizer)
    for _ in range(3):
        with PeakMemory("cpu", module, optimizer, batch) as peak:
            loss = module.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = predict_memory(
        specimen.module,
        batch,
        techniques=[ft.ActivationCheckpointing(), ft.OptimizerInBackward()],
        device="cpu",
    )
    assert report.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)
    largest = max(p.nbytes for p in module.parameters())
    assert report.peaks["gradients"] < 3 * largest


@pytest.mark.parametrize(
    "techniques", [[], [ft.MicroBatching(3)], [ft.EagerGradientRelease()]], ids=["plain", "parts", "release"]
)
def test_matches_the_peak_of_the_trainer(techniques):
    batches = lm_batches(4, size=60, length=50)
    meter = ft.MemoryMeter()
    fit(TinyLM(), batches, [*techniques, meter])
    predicted = predict_memory(TinyLM, batches[0], techniques=techniques, device="cpu")
    assert predicted.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.05)


def test_transfer_hooks_change_batches_as_in_the_trainer():
    class Cut(TinyLM):
        """Takes the first half of each text, and its own labels."""

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {name: value[:, :25] for name, value in batch.items()}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {**batch, "labels": batch["labels"].clone()}

    batches = lm_batches(4, size=60, length=50)
    meter = ft.MemoryMeter()
    fit(Cut(), batches, [meter])
    predicted = predict_memory(Cut, batches[0], device="cpu")
    assert predicted.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.05)
    assert predicted.peak_bytes < 0.7 * predict_memory(TinyLM, batches[0], device="cpu").peak_bytes


def quantised(kind, precision="32-true"):
    """Return the model as a Trainer of this precision would quantize it."""
    in_bf16 = precision == "bf16-mixed" and kind != "int8"
    return QuantizedBase(kind, compute_dtype=torch.bfloat16 if in_bf16 else "auto")


@pytest.mark.parametrize(
    ("name", "kind", "checkpointing", "parts", "precision"),
    [  # layers of the Llama have 352 inputs, which is no multiple of 64
        ("llama", "nf4", False, 1, "32-true"),
        ("llama", "int8", False, 1, "32-true"),
        ("gpt", "nf4", True, 2, "bf16-mixed"),
    ],
)
def test_quantized_models_are_within_five_percent_of_the_measured_peak(name, kind, checkpointing, parts, precision):
    techniques, specimen = [ft.ActivationCheckpointing()] if checkpointing else [], SMALL[name]
    report = predict_memory(
        specimen.module,
        specimen.batch(),
        techniques=[*techniques, QuantizedBase(kind), ft.MicroBatching(parts)],
        precision=precision,
        device="cpu",
    )
    expected = measured(specimen, [*techniques, quantised(kind, precision)], parts, precision)
    assert report.peak_bytes == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantization_constants_count_as_parameters(kind):
    layers = [linear(96, 160), linear(160, 64), linear(64, 8)]
    report = of_chain(*layers, batch=torch.zeros(4, 96), techniques=[QuantizedBase(kind)])
    expected = quantized_bytes(160, 96, kind) + quantized_bytes(64, 160, kind) + 4 * 64 * 8
    assert report.peaks["parameters"] == expected


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_already_quantized_model_is_predicted(kind):
    specimen = SMALL["llama"]
    expected = predict_memory(specimen.module, specimen.batch(), techniques=[quantised(kind)], device="cpu")
    module = specimen.module()
    quantize_base_(module, kind)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert predict_memory(module, specimen.batch(), device="cpu").peak_bytes == expected.peak_bytes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_prediction_leaves_no_fake_tensors_in_bitsandbytes(monkeypatch):
    monkeypatch.setattr(bitsandbytes.functional, "name2qmap", {})
    of_chain(linear(), linear(), batch=torch.zeros(4, 256), techniques=[QuantizedBase()])
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
    quantize_base_(net)
    assert torch.isfinite(net(torch.ones(1, 256))).all()


def test_a_quantized_model_matches_the_peak_of_the_trainer():
    batches, meter = lm_batches(4, size=60, length=50), ft.MemoryMeter()
    fit(TinyLM(), batches, [QuantizedBase(), meter])
    predicted = predict_memory(TinyLM, batches[0], techniques=[QuantizedBase()], device="cpu")
    assert predicted.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "model",
    [lambda: reference_models.gpt("tiny", batch=16), lambda: reference_models.resnet(width=64)],
    ids=["gpt", "conv"],
)
def test_within_five_percent_of_the_caching_allocator(model, precision, checkpointing):
    specimen = model()
    techniques = [ft.ActivationCheckpointing()] if checkpointing else []
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's workspace is not predicted
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with torch.backends.cudnn.flags(enabled=False):
        module = specimen.module().cuda()
        batch = [tensor.cuda() for tensor in specimen.batch()]
        ft.apply(module, techniques)
        optimizer = module.configure_optimizers()
        for _ in range(3):
            with PeakMemory("cuda") as peak:
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
                    loss = module.loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                del loss
    report = predict_memory(specimen.module, batch, techniques=techniques, precision=precision, device="cuda")
    assert report.peak_bytes == pytest.approx(max(peak.segments) - before, rel=0.05)


# --- inputs


def test_a_model_with_configure_model_is_not_built():
    module = LazyLM()
    assert predict_memory(module, lm_batches(1)[0], device="cpu").peak_bytes > 0
    assert module.embed is None


def test_garbage_is_collected_as_before_after_a_prediction():
    before, during = gc.get_threshold(), []

    def fail(net, batch):
        during.append(gc.get_threshold())
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        of_chain(linear(), batch=torch.zeros(1, 256), loss=fail)
    assert during[0][0] > before[0]
    assert gc.get_threshold() == before


def test_an_existing_model_is_neither_changed_nor_copied():
    specimen = SMALL["gpt"]
    module, batch = specimen.module(), specimen.batch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    with PeakMemory("cpu", module) as peak:
        report = predict_memory(module, batch, device="cpu")
    assert peak.added_bytes < 0.01 * sum(p.nbytes for p in module.parameters())
    assert report == predict_memory(specimen.module, batch, device="cpu")
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    assert torch.equal(random_state, torch.get_rng_state())


def test_meta_and_fake_models_and_batches_give_the_same_prediction():
    specimen = SMALL["uneven"]
    expected = predict_memory(specimen.module, specimen.batch(), device="cpu").peak_bytes
    with torch.device("meta"):
        on_meta = specimen.module()
    with FakeTensorMode():
        fake, fake_batch = specimen.module(), specimen.batch()
    meta_batch = tuple(tensor.to("meta") for tensor in specimen.batch())
    assert predict_memory(on_meta, meta_batch, device="cpu").peak_bytes == expected
    assert predict_memory(fake, fake_batch, device="cpu").peak_bytes == expected
    assert next(on_meta.parameters()).is_meta


def test_a_model_that_copies_its_layers_is_made_in_one_mode():
    # A copy of the mode frees the storages of its constants while these are in use.
    def make():
        made.append(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2))
        return made[0]

    made = []
    with fake_model(make):
        modes = {id(parameter.fake_mode) for parameter in made[0].parameters()}
    assert len(modes) == 1


def test_predicts_a_model_built_in_configure_model_that_logs():
    class Lazy(L.LightningModule):
        def configure_model(self):
            self.net = nn.Linear(8, 8, bias=False)

        def training_step(self, batch):
            loss = self.net(batch).sum()
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    report = predict_memory(Lazy, torch.zeros(2, 8), device="cpu")
    assert report.peaks["optimizer state"] == 2 * 8 * 8 * 4 + 4


def test_more_than_two_micro_batches_do_not_change_the_peak():
    specimen = SMALL["uneven"]
    batch = tuple(torch.cat([tensor] * 4) for tensor in specimen.batch())
    two, eight = (
        predict_memory(specimen.module, batch, techniques=[ft.MicroBatching(n)], device="cpu").at_peak["activations"]
        for n in (2, 8)
    )
    assert two == pytest.approx(4 * eight, rel=0.01)


@pytest.mark.parametrize(("strategy", "world"), [(None, 1), ("ddp", 4), (ft.FSDP2Strategy(), 4)])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_update_alone_warms_up_as_a_whole_step_does(strategy, world, parts):
    specimen = SMALL["uneven"]
    batch = tuple(torch.cat([tensor] * 4) for tensor in specimen.batch())
    techniques = [ft.MicroBatching(parts)] if parts > 1 else []
    recorders, reports = [StepRecorder(), StepRecorder()], []
    for recorder, warms_up in zip(recorders, (True, False), strict=True):
        settings = {"techniques": techniques, "world": world, "recorder": recorder, "warms_up": warms_up}
        reports += predict_strategies(specimen.module, batch, [strategy], device="cpu", **settings)
    whole, quick = reports
    assert whole.peaks["optimizer state"] > 0
    assert quick.peak_bytes == whole.peak_bytes
    assert quick.at_peak["optimizer state"] == whole.at_peak["optimizer state"]
    assert recorders[1].steps == recorders[0].steps


def test_a_value_read_from_a_tensor_is_assumed_with_a_note():
    def loss(net, batch):
        value = net(batch).sum()
        return value * value.item() if value > 0 else value

    report = of_chain(linear(), batch=torch.zeros(2, 256), loss=loss)
    assert any(".item()" in note for note in report.notes)


@pytest.mark.parametrize("needed", [True, False])
def test_checks_that_read_a_boolean_do_not_stop_a_prediction(needed):
    def loss(net, batch):
        if bool((batch > 0).all()) != needed:
            raise ValueError("bad batch")
        return net(batch).sum()

    assert of_chain(linear(), batch=torch.zeros(2, 256), loss=loss).peaks["inputs"] == 2 * 256 * 4


def test_a_layer_that_may_be_dropped_is_counted_in_the_peak():
    class Dropping(nn.Module):
        def __init__(self, layerdrop):
            super().__init__()
            self.layer, self.layerdrop = nn.Linear(64, 4096), layerdrop

        def forward(self, x):
            dropped = self.layerdrop is not None and torch.rand([]) < self.layerdrop
            return self.layer.bias.sum() if dropped else self.layer(x).exp().sum()

    def report_of(layerdrop):
        batch = torch.zeros(512, 64)
        return predict_memory(Dropping(layerdrop), batch, loss=lambda net, x: net(x), optimizer=sgd, device="cpu")

    report = report_of(0.0)
    assert report.peak_bytes == pytest.approx(report_of(None).peak_bytes, rel=1e-3)
    assert report.least_bytes < report.peak_bytes / 2


def test_code_that_no_assumed_value_satisfies_is_refused():
    def loss(net, batch):
        if batch.sum().item() != 7:
            raise ValueError("not seven")
        return net(batch).sum()

    with pytest.raises(ValueError, match="branches on values read from tensors.* not seven.* Pass loss="):
        of_chain(linear(), batch=torch.zeros(2, 256), loss=loss)


def test_initialization_and_optimizers_may_read_values():
    def made():
        layer = nn.Linear(256, 256, bias=False)
        return nn.init.trunc_normal_(layer.weight), layer

    report = of_chain(lambda: made()[1], batch=torch.zeros(2, 256), optimizer=bitsandbytes.optim.AdamW8bit)
    assert report.peaks["parameters"] == 256 * 256 * 4
    assert 2 * 256 * 256 <= report.peaks["optimizer state"] < 2.2 * 256 * 256


def test_predicts_grouped_expert_products_in_float32():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 64, 128))

        def forward(self, x):
            return torch.nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([8, 16, 24, 32], dtype=torch.int32))

    report = of_chain(Experts, batch=torch.zeros(32, 64))
    assert report.peaks["gradients"] == 4 * 64 * 128 * 4
    assert report.peaks["activations"] < 2 * 32 * 128 * 4


def test_a_head_that_is_found_by_its_loss_is_predicted_as_if_it_were_named():
    wide = {"input_ids": torch.zeros(64, 64, dtype=torch.long), "labels": torch.zeros(64, 64, dtype=torch.long)}
    peaks = [
        predict_memory(TinyLM(), wide, device="cpu", techniques=t).peak_bytes
        for t in ([], [ft.FusedLossHead()], [ft.FusedLossHead("head")])
    ]
    assert peaks[0] > peaks[1] == peaks[2]
    encoder = reference_models.encoder(layers=1, width=32, batch=2, length=16)
    report = predict_memory(encoder.module, encoder.batch(), device="cpu", techniques=[ft.FusedLossHead()])
    assert report.peak_bytes > 0


class HeadOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1024, 65_536, bias=False)

    def forward(self, batch):
        return F.cross_entropy(self.head(batch[0]), batch[1])


HEAD_BATCH = torch.zeros(8192, 1024), torch.zeros(8192, dtype=torch.long)


def bytes_added_by_a_fused_head():
    """What the loss of ``HeadOnly`` takes beside weight, batch and the last step's gradient, in bf16-mixed on CUDA."""
    tokens, width, classes, chunk = 8192, 1024, 65_536, 2048
    gradient, rounded = 4 * classes * width, 2 * (classes + tokens) * width  # products in bfloat16 need copies
    logits, in_float32 = 2 * chunk * classes, 2 * 4 * 2**26  # two tensors of 256 MiB, of the rows at hand
    return gradient + rounded + logits + in_float32


def test_a_fused_head_on_cuda_takes_its_gradient_and_one_chunk():
    report = predict_memory(
        HeadOnly,
        HEAD_BATCH,
        loss=lambda net, batch: net(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        techniques=[ft.FusedLossHead("head")],
        precision="bf16-mixed",
        device="cuda",
    )
    weight, batch, workspace = 4 * 65_536 * 1024, 8192 * (4 * 1024 + 8), 2 * 32 * MIB
    expected = 2 * weight + batch + workspace + bytes_added_by_a_fused_head()
    assert report.peak_bytes == pytest.approx(expected, rel=2e-3)


@pytest.mark.gpu
def test_on_a_gpu_a_fused_head_takes_its_gradient_and_one_chunk():
    net, batch = HeadOnly().cuda(), [tensor.cuda() for tensor in HEAD_BATCH]
    ft.fuse_loss_head_(net, "head")
    for _ in range(2):
        with PeakMemory("cuda") as peak, torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            before = torch.cuda.memory_allocated()
            loss = net(batch)
        net.zero_grad()
        loss.backward()
        del loss
    assert max(peak.segments) - before == pytest.approx(bytes_added_by_a_fused_head(), rel=2e-3)


def test_an_unknown_technique_is_named_in_a_note():
    class AverageOfWeights(Technique):
        def attach(self, trainer, pl_module):
            self.average = [p.clone() for p in pl_module.parameters()]

    notes = of_chain(linear(), batch=torch.zeros(2, 256), techniques=[AverageOfWeights(), ft.StepMeter()]).notes
    assert len(notes) == 1
    assert "AverageOfWeights cannot be predicted" in notes[0]


@dataclasses.dataclass
class Rows:
    inputs: torch.Tensor
    name: str = "rows"


@pytest.mark.parametrize("wrap", [lambda x: {"a": [x], "b": 3}, Rows, lambda x: BatchEncoding({"input_ids": x})])
def test_batches_may_be_any_container(wrap):
    def loss(net, batch):
        return net(sole_tensor(batch)).sum()

    report = of_chain(linear(), batch=wrap(torch.zeros(16, 256)), loss=loss)
    assert report.peaks["inputs"] == 16 * 256 * 4


def sole_tensor(batch):
    if isinstance(batch, Rows):
        return batch.inputs
    return batch["a"][0] if "a" in batch else batch["input_ids"]


def test_predicts_sparse_gradients():
    report = of_chain(
        lambda: nn.Embedding(1000, 64, sparse=True),
        batch=torch.zeros(8, dtype=torch.long),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert report.peaks["parameters"] == 1000 * 64 * 4
    assert report.peak_bytes < 1000 * 64 * 4 * 1.2


# --- the report


def test_the_report_names_the_module_at_the_peak_and_the_largest_holders():
    class WithWideHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*[nn.Linear(32, 32) for _ in range(50)])
            self.head = nn.Linear(32, 4096)

        def forward(self, x):
            return self.head(self.blocks(x)).tanh()

    report = predict_memory(
        WithWideHead, torch.zeros(512, 32), loss=lambda net, x: net(x).sum(), optimizer=sgd, device="cpu"
    )
    assert (report.phase, report.module, report.op) == ("forward", "", "tanh")  # not a layer's, but the model's own
    wide = 512 * 4096 * 4
    assert {(h.category, h.module, h.op, h.nbytes) for h in report.holders[:2]} == {
        ("activations", "", "tanh", wide),
        ("temporaries", "head", "addmm", wide),
    }
    weight = next(holder for holder in report.holders if holder.module == "head.weight")
    assert weight.nbytes == 4096 * 32 * 4
    assert any(holder.module == "blocks.*.weight" and holder.count == 50 for holder in report.holders)


def test_backward_allocations_name_the_module_of_their_forward():
    report = of_chain(
        lambda: nn.Conv2d(16, 16, 3, stride=2, padding=1),
        lambda: nn.BatchNorm2d(16),  # starts with an operation without an autograd sequence number
        batch=torch.zeros(8, 16, 32, 32),
    )
    assert (report.phase, report.module) == ("backward", "0")
    assert report.op == "convolution_backward (workspace)"


def test_the_report_prints_and_serializes_to_json():
    report = of_chain(linear(), batch=torch.zeros(1024, 256))
    assert isinstance(report, MemoryReport)
    text = str(report)
    assert all(category in text for category in CATEGORIES)
    assert "MiB" in text
    assert json.loads(json.dumps(dataclasses.asdict(report)))["peak_bytes"] == report.peak_bytes


# --- CUDA's own behavior, in closed form


def test_cuda_rounds_every_allocation_up():
    report = of_chain(linear(3, 3), batch=torch.zeros(1, 3), device="cuda")
    assert report.peaks["parameters"] == report.peaks["gradients"] == report.peaks["inputs"] == 512


def test_cuda_counts_a_prefetched_batch():
    settings = {"batch": torch.zeros(512, 256), "techniques": [ft.DevicePrefetch()]}
    ahead, on_cpu = (of_chain(linear(), device=device, **settings).at_peak["inputs"] for device in ("cuda", "cpu"))
    assert (ahead, on_cpu) == (2 * 512 * 256 * 4, 512 * 256 * 4)


def test_cuda_keeps_dropout_masks_of_one_byte():
    batch = torch.zeros(1024, 1024)
    on_cpu, on_cuda = (
        of_chain(linear(1024, 1024), nn.Dropout, batch=batch, device=device).peaks["activations"]
        for device in ("cpu", "cuda")
    )
    loss = 4, 512
    assert (on_cpu, on_cuda) == (4 * MIB + loss[0], 1 * MIB + loss[1])


@pytest.mark.parametrize(("rows", "columns", "mib"), [(4096, 2048, 64), (4096, 512, 16), (2048, 768, 12)])
def test_cuda_counts_the_workspace_of_a_bias_gradient(rows, columns, mib):
    """Compare with the caching allocator's memory for this sum in torch 2.11 on 132 multiprocessors."""
    report = of_chain(
        lambda: nn.Linear(8, columns),
        batch=(torch.zeros(rows, 8), torch.zeros(rows, columns)),
        loss=lambda net, batch: (net(batch[0]) * batch[1]).sum(),
        device="cuda",
    )
    assert report.op == "sum (workspace)"
    of_cublas, of_output = 2 * 32 * MIB, rows * columns * 4  # workspaces of two threads, and a gradient
    held = report.at_peak["temporaries"] - of_cublas - of_output
    assert held == pytest.approx(mib * MIB, rel=0.02)


@pytest.mark.parametrize("policy", [ft.model.EveryBlock(), ft.model.SelectiveOps()], ids=["every block", "selective"])
def test_cuda_dropout_in_recomputed_blocks(policy):
    hidden = 16 * 128 * 64 * 4  # bytes

    def model():
        return reference_models.Supervised(
            GPT2LMHeadModel(config).train(), lambda net, tokens: net(tokens, labels=tokens).loss
        )

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=128, bos_token_id=0, eos_token_id=0)
    batch = torch.zeros(16, 128, dtype=torch.long)
    plain, recomputed = (
        predict_memory(model, batch, techniques=techniques).peaks["activations"]
        for techniques in ([], [ft.ActivationCheckpointing(policy)])
    )
    assert config.attn_pdrop > 0
    assert plain - recomputed > 2 * 3 * hidden


def test_cuda_keeps_attention_scores_for_shared_keys_in_float32():
    def loss(net, x):
        query, key = net(x).view(2, 4, 256, 64), net(x)[..., :128].reshape(2, 2, 256, 64)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).sum()

    table = 2 * 4 * 256 * 256 * 4
    in_float32, in_bf16 = (
        of_chain(linear(256, 256), batch=torch.zeros(2, 256, 256), loss=loss, device="cuda", precision=precision).peaks[
            "activations"
        ]
        for precision in ("32-true", "bf16-mixed")
    )
    assert in_bf16 < table < in_float32


def test_cuda_attention_with_dropout_keeps_no_scores():
    def loss(net, x):
        heads = net(x).view(2, 4, 512, 16)
        return F.scaled_dot_product_attention(heads, heads, heads, None, 0.1, True).sum()

    on_cpu, on_cuda = (
        of_chain(linear(64, 64), batch=torch.zeros(2, 512, 64), loss=loss, device=device).peaks["activations"]
        for device in ("cpu", "cuda")
    )
    table = 2 * 4 * 512 * 512 * 4
    assert on_cuda < table / 4 < table < on_cpu


def test_cuda_runs_norms_in_float32_under_autocast():
    batch = torch.zeros(1024, 256)
    layers = linear(), lambda: nn.LayerNorm(256), linear()
    on_cpu, on_cuda = (
        of_chain(*layers, batch=batch, precision="bf16-mixed", device=device).peaks["activations"]
        for device in ("cpu", "cuda")
    )
    assert on_cuda - on_cpu == pytest.approx(1024 * 256 * 2, rel=0.2)  # its input is kept in twice the bytes


def test_cuda_updates_all_parameters_at_once():
    layers = [linear()] * 8
    on_cpu, on_cuda = (
        of_chain(*layers, batch=torch.zeros(1, 256), optimizer=torch.optim.AdamW, device=device).peaks["temporaries"]
        for device in ("cpu", "cuda")
    )
    assert on_cuda - 32 * MIB >= 8 * 256 * 256 * 4 > 2 * on_cpu


# --- refusals


def refusal(kind, *arguments, **settings):
    with pytest.raises(kind) as error:
        predict_memory(*arguments, **settings)
    return str(error.value)


def test_an_unknown_precision_or_device_is_refused():
    assert "precision='fp8'" in refusal(ValueError, TinyLM, {}, precision="fp8")
    assert "device='tpu'" in refusal(ValueError, TinyLM, {}, device="tpu")


def test_a_module_without_loss_or_optimizer_is_refused():
    net, x = nn.Linear(2, 2), torch.zeros(1, 2)
    assert "optimizer=" in refusal(TypeError, net, x, loss=lambda net, x: net(x).sum())
    assert "loss=" in refusal(TypeError, net, x, optimizer=sgd)
    assert "function without arguments" in refusal(TypeError, 3, x)


def test_an_existing_model_that_cannot_be_copied_is_refused():
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    message = refusal(TypeError, net, torch.zeros(1, 2), optimizer=sgd, loss=lambda net, x: net(x).sum())
    assert "Pass a function that builds it" in message


class Adversaries(L.LightningModule):
    """A GAN that steps two optimizers itself."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 256))
        self.critic = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        made = self.generator(batch[:, :16])
        for optimizer, loss in ((of_generator, -self.critic(made).mean()), (of_critic, None)):
            self.toggle_optimizer(optimizer)
            loss = self.critic(torch.cat([made.detach(), batch])).mean() if loss is None else loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(net.parameters()) for net in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9)]


class PeakOfStep(L.Callback):
    """Measures the peak of the second step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            self.peak = PeakMemory("cpu", module, trainer.optimizers, batch)
            self.peak.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.peak.__exit__(None, None, None)


@pytest.mark.parametrize("rows", [8, 2048])
def test_a_module_that_steps_two_optimizers_itself_is_predicted(rows):
    batch, measures = torch.randn(rows, 256), PeakOfStep()
    trainer([measures]).fit(Adversaries(), as_loader([batch] * 2))
    report = predict_memory(Adversaries, batch, device="cpu")
    weights = 4 * sum(parameter.numel() for parameter in Adversaries().parameters())
    assert report.peaks["gradients"] == weights
    assert report.peaks["optimizer state"] == pytest.approx(2 * weights, rel=1e-3)
    assert report.peak_bytes == pytest.approx(measures.peak.peak_bytes, rel=0.02)


def test_micro_batches_of_a_module_that_steps_itself_are_refused():
    message = refusal(ValueError, Adversaries, torch.zeros(8, 256), techniques=[ft.MicroBatching(2)])
    assert "accumulate_gradients(step, batch, n, backward=self.manual_backward)" in message


def test_a_loss_of_a_module_with_two_optimizers_is_refused():
    message = refusal(ValueError, Adversaries, torch.zeros(8, 256), loss=lambda net, x: net.critic(x).sum())
    assert "which of them steps" in message


def test_a_step_that_reads_its_trainer_has_the_peak_of_one_that_does_not():
    class AsksTrainer(TinyLM):
        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            rate = trainer.optimizers[0].param_groups[0]["lr"] + self.optimizers().param_groups[0]["lr"]
            seen = trainer.global_step + trainer.current_epoch + trainer.max_epochs + trainer.world_size
            assert trainer.training
            assert not trainer.sanity_checking
            assert trainer.num_training_batches == trainer.estimated_stepping_batches
            assert trainer.lightning_module is self
            assert trainer.callback_metrics == {}
            assert not trainer.is_last_batch
            assert self.global_rank == trainer.strategy.global_rank == 0
            self.log("rate", rate)
            return super().training_step(batch, batch_idx) * (rate / seen)

        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches > 0
            return super().configure_optimizers()

    class Scales(TinyLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0.5

    batch = lm_batches(1)[0]
    plain, asking = (predict_memory(net(), batch, device="cpu") for net in (Scales, AsksTrainer))
    assert asking.peak_bytes == plain.peak_bytes
    module = AsksTrainer()
    predict_memory(module, batch, device="cpu")
    assert module._trainer is None
    assert count_flops(module, batch) == count_flops(TinyLM(), batch)


SLURM = {"NTASKS": "8", "NTASKS_PER_NODE": "8", "PROCID": "3", "LOCALID": "3", "NODEID": "0", "JOB_ID": "1"}
LAUNCHED = {
    "SLURM": {**{f"SLURM_{name}": value for name, value in SLURM.items()}, "SLURM_JOB_NAME": "train"},
    "torchrun": {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_step_that_reads_its_trainer_is_predicted_in_each_rank_of_a_launch(launcher, monkeypatch):
    class AsksTrainer(TinyLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / self.trainer.world_size

    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    assert predict_memory(AsksTrainer(), lm_batches(1)[0], device="cpu").peak_bytes > 0


def test_a_step_of_unknown_shapes_is_refused():
    class NeedsValues(TinyLM):
        def training_step(self, batch, batch_idx):
            return self(batch["input_ids"]).sum() / batch["labels"].flatten().clamp(min=0).bincount().sum()

    batch = lm_batches(1)[0]
    assert "depends on tensor values" in refusal(ValueError, NeedsValues, batch)


def test_a_step_that_names_a_gpu_is_refused_before_torch_aborts():
    def loss(net, x):
        return (net(x) * torch.zeros(1, device="cuda")).sum()

    message = refusal(ValueError, nn.Linear(2, 2), torch.zeros(1, 2), loss=loss, optimizer=sgd)
    assert "on cuda" in message


def test_a_memory_budget_policy_is_refused():
    techniques = [ft.ActivationCheckpointing(ft.MemoryBudget(1.0))]
    assert "EveryBlock" in refusal(ValueError, TinyLM, lm_batches(1)[0], techniques=techniques)


def test_a_loader_is_accepted_in_place_of_a_batch_and_nothing_is_drawn():
    batches = lm_batches(2)
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    before = torch.get_rng_state()
    found = ft.predict_memory(TinyLM(), loader, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert found.peak_bytes in {ft.predict_memory(TinyLM(), batch, device="cpu").peak_bytes for batch in batches}
    with pytest.raises(ValueError, match="it has no batches"):
        ft.predict_memory(TinyLM(), DataLoader([]), device="cpu")
