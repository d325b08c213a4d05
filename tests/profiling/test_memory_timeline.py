import json
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.profiling import (
    MemoryRecord,
    MemoryRecording,
    MemoryTimeline,
    PeakMemory,
    StepMeter,
    save_memory_record,
)
from lightning_fasttrain.profiling.memory_record import CATEGORIES, Allocation
from lightning_fasttrain.profiling.memory_timeline import Change, Events, Place, _allocations, _Seen
from tests.support.nets import TinyLM, as_loader, fit, lm_batches

DIM, ROWS = 64, 32
WEIGHT, ROW_BYTES = 4 * DIM * DIM, 4 * ROWS * DIM  # float32 has 4
SCALARS = 2 * 4  # the loss and its gradient


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Sigmoid(), nn.Linear(DIM, DIM, bias=False))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), foreach=False)


def record_step(net, optimizer, batch, forward=None) -> MemoryRecord:
    with MemoryRecording(net, optimizer, batch) as recording:
        optimizer.zero_grad()
        (forward or net)(batch).sum().backward()
        optimizer.step()
    assert recording.record is not None
    return recording.record


# The sigmoid's output serves its own backward and the layer after it; the layers' outputs are not needed.
@pytest.mark.parametrize(("make", "state"), [(sgd, 2 * WEIGHT), (adamw, 4 * WEIGHT + 2 * 4)])
@pytest.mark.parametrize("is_first", [True, False])
def test_every_category_matches_hand_computed_bytes(make, state, is_first):
    net = chain()
    optimizer, batch = make(net), torch.randn(ROWS, DIM)
    if not is_first:
        record_step(net, optimizer, batch)
    record = record_step(net, optimizer, batch)
    expected = {
        "parameters": 2 * WEIGHT,
        "gradients": 2 * WEIGHT,
        "optimizer state": state,
        "activations": ROW_BYTES + SCALARS,
        "inputs": ROW_BYTES,
    }
    assert {name: record.peaks[name] for name in expected} == expected
    assert list(record.peaks) == ["parameters", "gradients", "optimizer state", "activations", "temporaries", "inputs"]


def test_checkpointed_activations_match_hand_computed_bytes():
    layers = [nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Sigmoid(), nn.Sigmoid()) for _ in range(3)]
    net = nn.Sequential(*layers)

    def forward(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x

    batch = torch.randn(ROWS, DIM)
    record, whole = (record_step(net, sgd(net), batch, step) for step in (forward, net))
    # The inputs of the last two, and the two recomputed sigmoids. The layers' inputs are freed one by one.
    assert record.peaks["activations"] == 4 * ROW_BYTES + SCALARS
    assert whole.peaks["activations"] == 6 * ROW_BYTES + SCALARS


@pytest.mark.parametrize("how", ["plain", "checkpointed", "micro-batches"])
def test_the_categories_add_up_to_the_measured_peak(how):
    peaks = {}
    for meter in (PeakMemory, MemoryRecording):
        net = TinyLM(depth=4)
        optimizer, batches = net.configure_optimizers(), lm_batches(2, size=32, length=32)
        if how == "checkpointed":
            ft.checkpoint_activations_(net)

        def step(batch, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            ft.accumulate_gradients(net.loss, batch, 3 if how == "micro-batches" else 1)
            optimizer.step()

        step(batches[0])
        with meter(*(["cpu"] if meter is PeakMemory else []), net, optimizer, batches[1]) as measured:
            step(batches[1])
        if isinstance(measured, MemoryRecording):
            record = measured.record
            assert sum(record.at_peak.values()) == record.peak_bytes
            peaks["recorded"] = record.peak_bytes
        else:
            peaks["measured"] = measured.peak_bytes
    assert peaks["recorded"] == pytest.approx(peaks["measured"], rel=0.01)


def test_an_accumulated_gradient_counts_in_addition_to_the_existing_one():
    net, batch = nn.Linear(DIM, DIM, bias=False), torch.randn(ROWS, DIM)
    with MemoryRecording(net) as recording:
        for _ in range(3):
            net(batch).sum().backward()
    assert recording.record.peaks["gradients"] == 2 * WEIGHT
    assert net.weight.grad.untyped_storage().nbytes() == WEIGHT


def test_gradients_freed_in_the_backward_count_as_gradients():
    net, batch = chain(), torch.randn(ROWS, DIM)
    optimizer = sgd(net)
    stop = ft.optim.optimize_in_backward_(optimizer)
    record = record_step(net, optimizer, batch)
    stop()
    assert WEIGHT <= record.peaks["gradients"] < 2 * WEIGHT
    assert record.peaks["optimizer state"] == 2 * WEIGHT


def test_memory_from_before_the_recording_counts_until_it_is_freed():
    net, batch = nn.Linear(DIM, DIM, bias=False), torch.randn(ROWS, DIM)
    optimizer = sgd(net)
    record_step(net, optimizer, batch)
    with MemoryRecording(net, optimizer, batch) as recording:
        del batch
        optimizer.zero_grad()
    points = recording.record.points
    assert points[0].nbytes == (WEIGHT, WEIGHT, WEIGHT, 0, 0, ROW_BYTES)
    assert points[-1].nbytes == (WEIGHT, 0, WEIGHT, 0, 0, 0)


def test_later_batches_count_as_inputs():
    net = chain()
    optimizer = sgd(net)
    loader = DataLoader(torch.randn(3 * ROWS, DIM), batch_size=ROWS)
    with MemoryRecording(net, optimizer) as recording:
        for batch in loader:
            recording.next_step(batch)
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
            recording.see_batch(other := torch.zeros(7 * DIM))
            del other
    record = recording.record
    kept = [a for a in record.allocations if a.category == "inputs" and a.nbytes == ROW_BYTES]
    assert len(kept) == 3
    assert len(record.steps_ms) == 4  # entering the block begins one, too
    assert any(a.category == "inputs" and a.nbytes == 4 * 7 * DIM for a in record.allocations)
    assert record.peaks["activations"] == ROW_BYTES + SCALARS


def test_the_largest_layer_is_at_the_peak():
    net = nn.ModuleDict({"small": nn.Linear(8, 8), "giant": nn.Sequential(nn.Linear(8, 10_000), nn.Softplus())})
    with MemoryRecording(net, (), batch := torch.randn(64, 8)) as recording:
        net["giant"](net["small"](batch)).sum()
    climb = recording.record.climb
    assert (climb.module, climb.op, climb.nbytes) == ("giant.1", "aten::softplus", 4 * 64 * 10_000)
    assert recording.record.peak.change.op == "aten::sum"  # adds four bytes
    assert "aten::softplus of giant.1" in str(recording.record)


def test_backward_allocations_name_their_node_and_forward_module():
    net = nn.Sequential(nn.Embedding(50_000, 8), nn.Linear(8, 8))
    record = record_step(net, sgd(net), torch.tensor([1, 2, 3]), lambda ids: net(ids))
    gradient = next(a for a in record.allocations if a.name == "0.weight" and a.category == "gradients")
    assert (gradient.module, gradient.op, gradient.nbytes) == ("0", "EmbeddingBackward0", 4 * 8 * 50_000)
    state = next(a for a in record.allocations if a.category == "optimizer state" and a.name == "0.weight")
    assert state.module == "SGD.step"


def test_recomputed_allocations_name_their_module():
    net, batch = TinyLM(depth=2), lm_batches(1)[0]
    ft.checkpoint_activations_(net)
    with MemoryRecording(net, (), batch) as recording:
        net.loss(batch).backward()
    again = [a for a in recording.record.allocations if a.op == "aten::gelu" and a.category == "activations"]
    assert [a.module for a in again] == ["blocks.1", "blocks.0"]


@pytest.mark.parametrize(
    "compiles",
    [
        lambda net: net[0].compile(backend="eager"),
        lambda net: ft.compile_blocks_(net, blocks=["0"], backend="eager"),
    ],
    ids=["module.compile", "compile_blocks_"],
)
def test_a_compiled_block_is_one_module_and_is_not_recompiled(compiles):
    torch._dynamo.reset()
    net, batch = nn.Sequential(chain(), nn.Linear(DIM, 1)), torch.randn(ROWS, DIM)
    compiles(net)
    net(batch).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        record = record_step(net, sgd(net), batch)
        net(batch)
    assert {a.module for a in record.allocations if a.category == "activations"} >= {"0"}
    assert "0.0" not in {a.module for a in record.allocations}


class RunsOut(nn.Module):
    def forward(self, x):
        return torch.empty(2**50)


class Net(L.LightningModule):
    """Its only weight takes 8 MB, a batch 2 MB, and the sigmoid's output 4 MB."""

    def __init__(self, runs_out: bool = True) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Sigmoid())
        self.last = RunsOut() if runs_out else nn.Identity()

    def forward(self, x):
        return self.last(self.wide(x)).sum()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCH = torch.ones(500, 1000)
HOLDERS = "7.63 MiB parameters of wide.0.weight, 3.81 MiB activations of wide.1, 1.91 MiB inputs of batch"


def left_behind(net: nn.Module) -> list[str]:
    hooks = [name for name, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return hooks + [name for name, module in net.named_modules() if "forward" in vars(module)]


def test_running_out_of_memory_names_the_largest_holders(tmp_path):
    net = Net()
    recording = MemoryRecording(net, (), BATCH, save_to=tmp_path)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as caught, recording:
        net(BATCH)
    lines = str(caught.value).splitlines()
    assert lines[-2] == f"Out of memory in aten::empty of last, with 13.35 MiB in use. Largest: {HOLDERS}."
    assert lines[-1] == f"See {tmp_path / 'memory_timeline.html'}"
    assert left_behind(net) == []
    assert not torch.autograd._profiler_enabled()
    saved = MemoryRecord.from_json((tmp_path / "memory_timeline.json").read_text())
    assert saved == recording.record
    assert saved.failed_ms is not None
    assert "out of memory" in (tmp_path / "memory_timeline.html").read_text()


@pytest.mark.parametrize("first", [[], [StepMeter()]])
def test_running_out_of_memory_in_the_trainer(tmp_path, first):
    net, timeline = Net(), MemoryTimeline(tmp_path, first_step=0)
    with pytest.raises(RuntimeError, match=f"Largest: {HOLDERS}"):
        fit(net, [BATCH], [*first, timeline])
    assert left_behind(net) == []
    assert timeline.record.failed_ms is not None
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".json"}


def test_other_errors_are_not_changed(tmp_path):
    net = chain()
    recording = MemoryRecording(net, (), save_to=tmp_path)
    with pytest.raises(RuntimeError) as caught, recording:
        net(torch.ones(1, DIM + 1))
    assert "Largest" not in str(caught.value)
    assert (recording.record, left_behind(net), list(tmp_path.iterdir())) == (None, [], [])


def test_an_unwritable_folder_does_not_stop_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(ft.FastTrainWarning, match="not saved"), MemoryRecording(chain(), save_to=tmp_path / "file"):
        pass


def test_a_record_survives_json():
    record = record_step(net := chain(), adamw(net), torch.randn(ROWS, DIM))
    text = record.to_json()
    back = MemoryRecord.from_json(text)
    assert back == record
    assert back.points == record.points
    assert json.loads(text)["at_peak"] == record.at_peak


def test_the_page_needs_no_external_resources(tmp_path):
    net = nn.ModuleDict({"</script><b>": nn.Linear(DIM, DIM)})
    record = record_step(net, sgd(net), torch.randn(ROWS, DIM), net["</script><b>"])
    (file,) = save_memory_record(record, tmp_path, ["html"])
    page = file.read_text()
    assert not re.search(r"https?:|src=|url\(|@import|<link|%\w+%", page)
    assert page.count("</script>") == 1
    assert "<b>:" not in page
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    assert data["categories"] == list(CATEGORIES)
    assert max(sum(point[1:7]) for point in data["points"]) == data["peak"][1] == record.peak_bytes
    assert any(module == "</script><b>" for _, _, module, _ in data["places"])


def test_all_kinds_of_files_are_written(tmp_path):
    record = record_step(net := chain(), sgd(net), torch.randn(ROWS, DIM))
    files = save_memory_record(record, tmp_path, ("png", "txt", "html", "json"), name="mine")
    assert [file.name for file in files] == ["mine.png", "mine.txt", "mine.html", "mine.json"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert all(category in files[1].read_text() for category in CATEGORIES)


def test_a_sample_keeps_the_peak_and_the_end():
    allocations = [Allocation(n % 977, float(n), n + 1.5, op=str(n)) for n in range(1, 20_000)]
    record = MemoryRecord("cpu", allocations, end_ms=20_001.0)
    sample = record.sample(400)
    assert len(sample) <= 402
    assert record.peak in sample
    assert sample[-1] == record.points[-1]
    assert [point.ms for point in sample] == sorted(point.ms for point in sample)


def test_an_empty_record_can_be_shown(tmp_path):
    files = save_memory_record(MemoryRecord("cpu", []), tmp_path, ("html", "json", "png", "txt"))
    assert len(files) == 4


class Watch(L.Callback):
    def __init__(self) -> None:
        self.recorded: list[bool] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.recorded.append(bool(left_behind(pl_module)))


def test_only_the_requested_steps_are_recorded(tmp_path):
    net, watch = Net(runs_out=False), Watch()
    timeline = MemoryTimeline(tmp_path, first_step=1, steps=2)
    fit(net, [BATCH] * 5, [timeline, watch])
    assert watch.recorded == [False, True, True, False, False]
    assert len(timeline.record.steps_ms) == 2
    assert timeline.record.peaks["gradients"] == 8_000_000
    assert MemoryRecord.from_json((tmp_path / "memory_timeline.json").read_text()) == timeline.record


def test_accumulated_batches_make_one_step(tmp_path):
    timeline = MemoryTimeline(tmp_path, first_step=1, steps=1)
    fit(Net(runs_out=False), [BATCH.clone() for _ in range(6)], [timeline], accumulate_grad_batches=3)
    assert len(timeline.record.steps_ms) == 1
    assert timeline.record.peaks["gradients"] == 2 * 8_000_000
    assert timeline.record.at_peak["inputs"] >= 2_000_000


@pytest.mark.parametrize(("accumulate", "every", "kept"), [(1, 1, 1), (1, 2, 2), (2, 3, 1)])
def test_validation_ends_the_recording_after_a_step_or_restarts_it_within_one(tmp_path, accumulate, every, kept):
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            torch.empty(100_000_000)

        def val_dataloader(self):
            return as_loader([BATCH])

    timeline = MemoryTimeline(tmp_path, first_step=0, steps=3)
    settings = {"accumulate_grad_batches": accumulate, "val_check_interval": every, "num_sanity_val_steps": 0}
    fit(Validates(False), [BATCH] * 8, [timeline], **settings)
    assert len(timeline.record.steps_ms) == kept
    assert timeline.record.peak_bytes < 100_000_000


def test_a_fit_that_is_too_short_is_reported(tmp_path, caplog):
    caplog.set_level("INFO", "lightning_fasttrain")
    timeline = MemoryTimeline(tmp_path, first_step=4)
    fit(Net(runs_out=False), [BATCH] * 3, [timeline])
    assert "nothing was recorded" in caplog.text
    assert (timeline.record, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize("callbacks", [[], [StepMeter()]])
def test_the_users_torch_profiler_has_priority(tmp_path, callbacks):
    timeline = MemoryTimeline(tmp_path, first_step=0)
    profiler = PyTorchProfiler(tmp_path, "mine", emit_nvtx=False, export_to_chrome=False)
    with pytest.warns(ft.FastTrainWarning, match="one profiler at a time"):
        fit(Net(runs_out=False), [BATCH] * 8, [*callbacks, timeline], profiler=profiler)
    assert timeline.record is None


def test_it_waits_for_another_torch_profiler(tmp_path):
    class Profiles(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                self.mine = torch.autograd.profiler.profile(use_kineto=True).__enter__()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                self.mine.__exit__(None, None, None)

    timeline = MemoryTimeline(tmp_path, first_step=0, steps=5)
    fit(Net(runs_out=False), [BATCH] * 5, [Profiles(), timeline])
    assert len(timeline.record.steps_ms) == 3


def test_invalid_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind='svg'"):
        MemoryTimeline(tmp_path, kinds=["svg"])
    with pytest.raises(ValueError, match="steps=0"):
        MemoryTimeline(tmp_path, steps=0)
    with pytest.raises(TypeError, match="first_step"):
        MemoryTimeline(tmp_path, first_step=1.5)
    with pytest.raises(ValueError, match="MemoryRecording on meta"):
        MemoryRecording(nn.Linear(1, 1, device="meta"))
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="one at a time"):
        MemoryRecording(chain()).__enter__()
    with pytest.raises(TypeError, match="MemoryRecording"):
        ft.apply(chain(), [MemoryTimeline(tmp_path)])


def test_fabric_names_are_those_of_the_unwrapped_model():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    net = chain()
    model, optimizer = fabric.setup(net, sgd(net))
    batch = torch.randn(ROWS, DIM)
    with MemoryRecording(model, optimizer, batch) as recording:
        optimizer.zero_grad()
        fabric.backward(model(batch).sum())
        optimizer.step()
    record = recording.record
    assert record.peaks["activations"] == ROW_BYTES + SCALARS
    assert {a.name for a in record.allocations if a.category == "optimizer state"} == {"0.weight", "2.weight"}
    assert left_behind(net) == []


def test_memory_allocated_before_counts_with_and_without_a_name():
    """As on CUDA, which knows the total, rounds up to 512 bytes, and reports every free."""
    forward, before = Place("forward", "0", "aten::mm"), 512 + 1024 + 2048
    events = Events([Change(10, 7, 4096, forward), Change(20, 5, -1024, Place()), Change(30, 7, -4096, forward)])
    weight = _Seen(0, 3, 500, "parameters", "weight", watched=True)
    allocations = _allocations(events, [weight], lambda ns: float(ns), before, failed_ms=float("inf"))
    points = MemoryRecord("cuda:0", allocations, end_ms=40.0).points
    assert [(point.ms, point.total) for point in points] == [(0, 3584), (10, 7680), (20, 6656), (30, 2560)]
    assert points[0].nbytes == (512, 0, 0, 0, 3072, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_categories_add_up_to_the_allocators_peak():
    net = TinyLM(depth=4).cuda()
    optimizer = net.configure_optimizers()
    batch = {key: value.cuda() for key, value in lm_batches(1, size=256, length=64)[0].items()}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with MemoryRecording(net, optimizer, batch) as recording:
            optimizer.zero_grad()
            net.loss(batch).backward()
            optimizer.step()
        measured = torch.cuda.max_memory_allocated()
    record = recording.record
    assert record.peak_bytes == pytest.approx(measured, rel=0.05)
    blocks = sum(-(-p.nbytes // 512) * 512 for p in net.parameters())
    assert record.peaks["gradients"] == pytest.approx(blocks, rel=0.1)
    assert {a.module for a in record.allocations if a.category == "activations"} >= {"blocks.0.up", "blocks.3.up"}
