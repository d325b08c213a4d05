import gc
import os
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.profiling import MemoryMeter, PeakMemory, StepMeter
from lightning_fasttrain.proof.verification.short_run import PeakObserver
from tests.profiling.test_step_meter import ListLogger

DIM, ROWS = 256, 512
WEIGHT, ACTIVATION = 4 * DIM * DIM, 4 * ROWS * DIM  # bytes; float32 has 4
SCALARS = 2000  # the loss, Adam's step counters, factors that torch wraps as tensors


def near(nbytes: int):
    return pytest.approx(nbytes, abs=SCALARS)


def test_only_simultaneous_allocations_add_up():
    with PeakMemory("cpu") as peak:
        a = torch.empty(1000)
        b = a + a
        del a
        c = b + b  # 8000 bytes again: `a` is freed
    assert (peak.added_bytes, peak.peak_bytes) == (8000, 8000)
    assert c.numel() == 1000


def test_the_peak_within_an_operation_is_measured():
    logits = torch.randn(64, 1000)
    with PeakMemory("cpu", logits) as peak:
        nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long))  # log_softmax exists inside
    assert peak.peak_bytes == near(2 * 4 * 64 * 1000)


def test_peaks_are_measured_between_marks():
    held = torch.empty(1000)
    with PeakMemory("cpu", held) as peak:
        a = torch.empty(1000)
        del a
        peak.mark()
        b = torch.empty(500)
        peak.mark()
        peak.mark()
        c = b + b
        del b
    assert peak.segments == [8000, 6000, 6000, 8000]
    assert peak.peak_bytes == 8000
    assert c.numel() == 500


@pytest.mark.gpu
def test_cuda_segments_and_nested_blocks():
    before = torch.cuda.memory_allocated()
    with PeakMemory("cuda") as outer:
        a = torch.empty(2**20, device="cuda")
        del a
        with PeakMemory("cuda") as inner:
            b = torch.empty(2**18, device="cuda")
            inner.mark()
            del b
            c = torch.empty(2**17, device="cuda")
    assert outer.peak_bytes - before == 2**22
    assert inner.segments == [before + 2**20, before + 2**20]
    assert c.numel() == 2**17


@pytest.mark.gpu
def test_on_a_gpu_private_pools_count_whole():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.empty(2**24, device="cuda")
    del a
    with PeakMemory("cuda") as peak:
        b = torch.empty(2**20, device="cuda")
    assert peak.added_bytes == b.nbytes
    assert peak.peak_bytes == torch.cuda.memory_allocated() + 2**26
    del pool


def test_existing_storages_count_once_and_only_on_their_device():
    net = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    net["b"].weight = net["a"].weight  # tied
    net.register_buffer("buffer", torch.zeros(5))
    net["meta"] = nn.Linear(8, 8, device="meta")
    batch = {"x": [torch.zeros(10)], "view": net["a"].weight[2:4], "name": "b"}
    with PeakMemory("cpu", net, batch) as peak:
        pass
    assert peak.peak_bytes == 4 * (64 + 5 + 10)


def test_optimizer_state_and_sparse_gradients_are_counted():
    net = nn.Embedding(100, 4, sparse=True)
    net(torch.tensor([1, 2, 3])).sum().backward()
    other = nn.Linear(8, 8, bias=False)
    adam = torch.optim.Adam(other.parameters())
    other(torch.zeros(1, 8)).sum().backward()
    adam.step()
    with PeakMemory("cpu", net, adam) as peak:
        pass
    sparse = 3 * 8 + 3 * 4 * 4  # indices (1, 3) of int64, values (3, 4)
    assert peak.peak_bytes == 4 * 400 + sparse + 2 * 4 * 64 + 4


def step(net, optimizer, batch, release_first: bool) -> None:
    """Run a step with two activations in the forward and one in the backward; Adam needs two more weights."""
    x, factor = batch
    if release_first:
        optimizer.zero_grad()
    loss = (net(x) * factor).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("release_first", [True, False])
def test_a_training_step_matches_hand_computed_bytes(release_first):
    net = nn.Linear(DIM, DIM, bias=False)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    batch = (torch.randn(ROWS, DIM), torch.randn(ROWS, DIM))
    step(net, optimizer, batch, release_first)
    with PeakMemory("cpu", net, optimizer, batch) as peak:
        step(net, optimizer, batch, release_first)
    weight_and_state, gradient = 3 * WEIGHT, 0 if release_first else WEIGHT
    assert peak.peak_bytes == near(weight_and_state + gradient + 2 * ACTIVATION + 2 * ACTIVATION)


def test_accumulated_gradients_count_once():
    net = nn.Linear(DIM, DIM, bias=False)
    batch = (torch.randn(4, DIM), torch.ones(4, DIM))
    sgd = torch.optim.SGD(net.parameters(), foreach=False)
    step(net, sgd, batch, release_first=False)
    with PeakMemory("cpu", net) as peak:
        net(batch[0]).sum().backward()  # accumulates into the existing gradient: one more during the addition
    assert peak.peak_bytes == pytest.approx(3 * WEIGHT, abs=3 * 4 * 4 * DIM + SCALARS)


def test_a_failing_block_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError), PeakMemory("cpu") as peak:
        kept = torch.empty(250)
        raise ZeroDivisionError
    assert not torch.autograd._profiler_enabled()
    assert peak.peak_bytes == kept.nbytes


def test_memory_of_an_earlier_block_is_freed_once_if_held_and_else_ignored():
    with PeakMemory("cpu"):
        held, other = torch.empty(1000), torch.empty(9000)
    with PeakMemory("cpu", held) as peak:
        del held, other
        kept = torch.empty(3000)
    assert peak.peak_bytes == 12_000
    assert peak.added_bytes == kept.nbytes - 4000


def test_no_tensor_is_kept_alive():
    tensor = torch.empty(1000)
    with PeakMemory("cpu", tensor) as peak:
        del tensor
        again = torch.empty(1000)
    assert peak.added_bytes == 0
    assert again.nbytes == peak.peak_bytes


def test_invalid_use_is_refused():
    with pytest.raises(ValueError, match="meta"):
        PeakMemory("meta")
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="one at a time"):
        PeakMemory("cpu").__enter__()
    with pytest.raises(ValueError, match="every_n_steps=-1"):
        MemoryMeter(every_n_steps=-1)
    with pytest.raises(TypeError, match="PeakMemory"):
        ft.apply(nn.Linear(1, 1), [MemoryMeter()])


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(DIM, DIM, bias=False)

    def training_step(self, batch, batch_idx):
        x, factor = batch
        return (self.net(x) * factor).sum()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), foreach=False)

    def train_dataloader(self):
        return DataLoader([(torch.randn(ROWS, DIM), torch.randn(ROWS, DIM))] * 8, batch_size=None)


class ReleasesEarly(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.zero_grad()


def fit(model, *callbacks, tmp_path, **kwargs):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {**quiet, "max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **kwargs}
    trainer = L.Trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model)
    return trainer


# Adam's weights and state, the gradient if it outlives its step, the batch of two and the forward's two activations.
@pytest.mark.parametrize(
    ("model", "settings", "gradient"),
    [
        (Net, {}, WEIGHT),
        (ReleasesEarly, {}, 0),
        (Net, {"accumulate_grad_batches": 2}, WEIGHT),
        (Net, {"precision": "64-true"}, WEIGHT),
    ],
)
def test_peak_in_the_trainer_matches_hand_computed_bytes(tmp_path, model, settings, gradient):
    meter = MemoryMeter()
    fit(model(), meter, tmp_path=tmp_path, **settings)
    width = 2 if "precision" in settings else 1
    assert meter.peak_bytes == pytest.approx(width * (3 * WEIGHT + gradient + 4 * ACTIVATION), rel=0.01)


def test_an_accumulating_step_is_measured_completely(tmp_path):
    class ReleasesAfterStep(Net):  # gradients exist during its second forward, but not during its first
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx % 2 == 1:
                self.zero_grad()

    meter = MemoryMeter()
    fit(ReleasesAfterStep(), meter, tmp_path=tmp_path, accumulate_grad_batches=2)
    assert meter.peak_bytes == pytest.approx(4 * WEIGHT + 4 * ACTIVATION, rel=0.01)


@pytest.mark.parametrize(("every_n_steps", "expected"), [(0, [2]), (2, [2, 4, 6])])
def test_measures_after_the_warmup_and_at_the_requested_interval(tmp_path, every_n_steps, expected):
    logger = ListLogger()
    meter = MemoryMeter(every_n_steps)
    fit(Net(), meter, tmp_path=tmp_path, logger=logger, log_every_n_steps=100)
    rows = [(step, row["memory_meter/peak_mib"]) for step, row in logger.rows if "memory_meter/peak_mib" in row]
    assert [step for step, _ in rows] == expected
    assert rows[-1][1] == meter.peak_bytes / 2**20


def test_validation_during_accumulation_is_not_measured(tmp_path):
    class Validates(Net):
        def val_dataloader(self):
            return self.train_dataloader()

        def validation_step(self, batch, batch_idx):
            torch.empty(100 * ACTIVATION)

    meter = MemoryMeter(warmup=1)
    fit(Validates(), meter, tmp_path=tmp_path, accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=0)
    assert meter.peak_bytes == pytest.approx(4 * WEIGHT + 4 * ACTIVATION, rel=0.01)


@pytest.mark.parametrize("callbacks", [[], [StepMeter()]])
def test_the_users_torch_profiler_has_priority(tmp_path, callbacks):
    meter = MemoryMeter()
    profiler = PyTorchProfiler(tmp_path, "mine", emit_nvtx=False, export_to_chrome=False)
    with pytest.warns(ft.FastTrainWarning, match="one profiler at a time"):
        fit(Net(), *callbacks, meter, tmp_path=tmp_path, profiler=profiler)
    assert meter.peak_bytes is None


def test_a_torch_profiler_around_the_fit_is_left_alone(tmp_path, caplog):
    meter = MemoryMeter()
    with torch.autograd.profiler.profile(use_kineto=True) as mine:
        fit(Net(), meter, tmp_path=tmp_path)
    assert meter.peak_bytes is None
    assert "another torch profiler was active" in caplog.text
    assert len(mine.function_events) > 0


def test_a_step_that_another_profiler_watches_is_refused_in_a_sentence():
    observer = PeakObserver()
    with PeakMemory("cpu"), pytest.raises(RuntimeError, match="another torch profiler is active"):
        observer.begin_measuring(torch.device("cpu"))
    observer.on_exception(None, None, RuntimeError())  # as the Trainer calls it then
    assert observer.peak_bytes == 0


def test_a_fit_that_fails_while_measured_leaves_no_profiler_behind(tmp_path):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(Fails(), MemoryMeter(warmup=0), tmp_path=tmp_path)
    assert not torch.autograd._profiler_enabled()


def test_measuring_keeps_training_bitwise_the_same(tmp_path):
    weights = []
    for callbacks in ([], [MemoryMeter(every_n_steps=1)]):
        torch.manual_seed(0)
        fit(model := Net(), *callbacks, tmp_path=tmp_path)
        weights.append(model.net.weight)
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_matches_hand_computed_bytes_without_waiting():
    net = nn.Linear(DIM, DIM, bias=False, device="cuda")
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    batch = (torch.randn(ROWS, DIM, device="cuda"), torch.randn(ROWS, DIM, device="cuda"))
    step(net, optimizer, batch, release_first=False)
    gc.collect()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with PeakMemory("cuda") as peak:
            step(net, optimizer, batch, release_first=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert peak.added_bytes == pytest.approx(2 * ACTIVATION, abs=SCALARS + 10 * 512)  # it rounds up to 512 bytes


def test_the_profiler_prints_nothing_and_the_environment_stays():
    program = (
        "import os, torch; import lightning_fasttrain as ft\n"
        "with ft.profiling.PeakMemory('cpu'): torch.ones(3)\n"
        "assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "profiler_start" not in ran.stderr
