import time

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.core.batch import count_batch
from lightning_fasttrain.profiling import StepMeter, StepTimer, step_meter
from lightning_fasttrain.profiling.step_meter import describe_slowest
from tests.support.clock import Clock

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(step_meter, "perf_counter", clock := Clock())
    return clock


def approx(**expected: float):
    zero = dict.fromkeys(("data_wait", "transfer", "forward", "backward", "optimizer", "other"), 0.0)
    rates = {name: expected.pop(name) for name in ("samples_per_s", "tokens_per_s") if name in expected}
    parts = {f"{name}_ms": value for name, value in {**zero, **expected}.items()}
    return pytest.approx({"step_ms": sum(parts.values()), **parts, **rates}, abs=1e-9)


def test_time_belongs_to_the_innermost_phase(clock):
    timer = StepTimer("cpu", warmup=0)
    with timer.phase("optimizer"):
        clock.passes(1)
        with timer.phase("forward"):
            clock.passes(10)
        with timer.phase("backward"):
            clock.passes(20)
        clock.passes(2)
    clock.passes(5)
    timer.end_step()
    assert timer.summary() == approx(forward=10, backward=20, optimizer=3, other=5)


def test_a_pause_is_not_counted_in_the_step(clock):
    timer = StepTimer("cpu", warmup=0)
    clock.passes(3)
    with timer.phase("pause"):
        clock.passes(1000)
    clock.passes(4)
    timer.end_step()
    assert timer.summary() == approx(other=7)


def test_medians_of_the_latest_steps_exclude_warmup(clock):
    timer = StepTimer("cpu", warmup=1)
    for ms in (900, 8, 2, 4, 6):
        with timer.phase("forward"):
            clock.passes(ms)
        timer.end_step(samples=12, tokens=24)
    assert timer.summary() == approx(forward=5, samples_per_s=(3000 + 2000) / 2, tokens_per_s=(6000 + 4000) / 2)
    assert timer.summary(last=1) == approx(forward=6, samples_per_s=2000, tokens_per_s=4000)


def test_the_summary_is_empty_without_measured_steps():
    timer = StepTimer("cpu", warmup=1)
    timer.end_step()
    assert timer.summary() == {}


@pytest.mark.parametrize("warmup", [-1, 1.5])
def test_bad_arguments_are_refused_at_once(warmup):
    for make in (StepMeter, lambda warmup: StepTimer("cpu", warmup=warmup)):
        with pytest.raises((TypeError, ValueError), match="warmup"):
            make(warmup)
    with pytest.raises(ValueError, match=r"phase='fwd'.*'forward'"):
        StepTimer("cpu").phase("fwd")


ids = torch.zeros(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(4, 2), (4, 0)),
        ((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)), (4, 0)),
        ({"weight": torch.tensor(1.0), "text": {"input_ids": ids, "mask": ids.bool()}}, (3, 15)),
        (["a", None], (0, 0)),
    ],
)
def test_samples_and_tokens_of_a_batch(batch, expected):
    assert count_batch(batch) == expected


class Timed(BoringModel):
    """Every phase of a step takes a distinct time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def train_dataloader(self):
        return DataLoader(range(4), batch_size=None, collate_fn=self.collate)

    val_dataloader = train_dataloader

    def collate(self, i):
        self.clock.passes(7)
        return torch.ones(8, 32)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.clock.passes(1)
        return batch

    def training_step(self, batch, batch_idx):
        self.clock.passes(30)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        self.clock.passes(50)
        super().backward(loss)

    def validation_step(self, batch, batch_idx):
        self.clock.passes(1000)

    def on_before_optimizer_step(self, optimizer):
        self.clock.passes(2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clock.passes(4)


def fit(model, *callbacks, tmp_path, **kwargs):
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(callbacks=list(callbacks), default_root_dir=tmp_path, **{**settings, **kwargs})
    trainer.fit(model)
    return trainer


@pytest.mark.parametrize("validation", [{}, {"val_check_interval": 1}, {"limit_val_batches": 0}])
def test_each_phase_of_a_trainer_step_is_timed_without_validation(clock, tmp_path, validation):
    meter = StepMeter(warmup=0)
    fit(Timed(clock), meter, tmp_path=tmp_path, **validation)
    step_ms = 7 + 1 + 30 + 50 + 2 + 4
    assert meter.summary() == approx(
        data_wait=7, transfer=1, forward=30, backward=50, optimizer=2, other=4, samples_per_s=8 / step_ms * 1e3
    )


def test_a_step_includes_all_accumulated_batches(clock, tmp_path):
    meter = StepMeter(warmup=0)
    fit(Timed(clock), meter, tmp_path=tmp_path, accumulate_grad_batches=2)
    assert meter.summary()["forward_ms"] == pytest.approx(2 * 30)
    assert meter.summary()["optimizer_ms"] == pytest.approx(2)
    assert meter.summary()["samples_per_s"] == pytest.approx(16 / (2 * (7 + 1 + 30 + 50 + 4) + 2) * 1e3)


def test_prefetched_batches_are_counted_in_their_own_step(clock, tmp_path):
    class Endless(torch.utils.data.IterableDataset):  # without a length Lightning prefetches one batch
        def __iter__(self):
            for _ in range(4):
                clock.passes(7)
                yield torch.ones(8, 32)

    model = Timed(clock)
    model.train_dataloader = lambda: DataLoader(Endless(), batch_size=None)
    meter = StepMeter(warmup=0)
    trainer = fit(model, meter, Spy(seen := []), tmp_path=tmp_path)
    assert len(seen[-1]) == trainer.global_step == 8
    assert {round(step["forward"] * 1e3) for step, *_ in seen[-1]} == {30}


class Spy(L.Callback):
    def __init__(self, seen: list) -> None:
        self.seen = seen

    def on_train_end(self, trainer, pl_module):
        self.seen.append(list(trainer.profiler.timer._steps))


def test_phases_add_up_to_the_step_with_the_real_clock(tmp_path):
    meter = StepMeter(warmup=0)
    fit(BoringModel(), meter, tmp_path=tmp_path, max_epochs=1)
    found = meter.summary()
    parts = [found[f"{name}_ms"] for name in (*step_meter.PHASES[:-1], "other")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found["step_ms"])


class Recorder(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def start(self, action_name: str) -> None:
        self.seen.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.seen.append(f"stop {action_name}")

    def summary(self) -> str:
        return "mine"


def test_the_users_profiler_receives_the_same_actions(tmp_path):
    seen = []
    for callbacks in ([], [StepMeter()]):
        trainer = fit(BoringModel(), *callbacks, tmp_path=tmp_path, fast_dev_run=2, profiler=Recorder())
        ours = ("[Callback]StepMeter", "configure_model")  # the second is wrapped by every technique
        seen.append([action for action in trainer.profiler.seen if not any(name in action for name in ours)])
    assert seen[0] == seen[1]


def test_the_users_profiler_is_wrapped_and_restored_at_the_end(tmp_path):
    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            assert trainer.profiler is not recorder
            assert trainer.profiler.seen is recorder.seen
            assert trainer.profiler.summary() == "mine"

    recorder = Recorder()
    trainer = fit(BoringModel(), Look(), StepMeter(), tmp_path=tmp_path, fast_dev_run=1, profiler=recorder)
    assert trainer.profiler is recorder


def test_the_users_profiler_is_restored_after_a_failure(tmp_path):
    class Fails(BoringModel):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    meter = StepMeter()
    trainer = L.Trainer(
        callbacks=[meter], fast_dev_run=1, accelerator="cpu", profiler=(recorder := Recorder()), logger=False
    )
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(Fails())
    assert trainer.profiler is recorder
    assert meter.summary() == {}


def test_other_entry_points_are_not_timed(tmp_path):
    meter = StepMeter()
    trainer = fit(BoringModel(), meter, tmp_path=tmp_path, max_epochs=1)
    before = meter.summary()
    trainer.validate(BoringModel())
    assert meter.summary() == before


class ListLogger(Logger):
    name, version = "list", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs): ...


def test_logs_at_lightnings_logging_interval(tmp_path):
    class Logs(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("mine", 1.0)
            return super().training_step(batch, batch_idx)

    logger = ListLogger()
    fit(Logs(), StepMeter(warmup=0), tmp_path=tmp_path, max_steps=9, max_epochs=-1, logger=logger, log_every_n_steps=3)
    steps = [[step for step, row in logger.rows if name in row] for name in ("step_meter/step_ms", "mine")]
    assert steps == [[2, 5, 8]] * 2
    assert all(name.startswith("step_meter/") for _, row in logger.rows for name in row if "_ms" in name)


def test_logs_one_line_at_the_end(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        fit(BoringModel(), StepMeter(), tmp_path=tmp_path, max_epochs=1)
    lines = [record.message for record in caplog.records if record.message.startswith("StepMeter")]
    assert len(lines) == 1
    assert lines[0].startswith("StepMeter: ")
    assert " ms/step: " in lines[0]


def test_the_line_names_the_longest_phase_first_and_leaves_out_what_takes_no_time():
    phases = {"data_wait_ms": 30.25, "transfer_ms": 0.5, "forward_ms": 45.0, "backward_ms": 1234.5, "other_ms": 2.0}
    line = step_meter._describe({"step_ms": 1312.25, **phases, "samples_per_s": 6.1, "tokens_per_s": 4321.0})
    assert line == "1,312 ms/step: backward 1,234, forward 45, waiting for data 30.2; 6 samples/s; 4,321 tokens/s"
    assert step_meter._describe({}) == ""


def test_apply_names_the_function_for_a_bare_loop():
    with pytest.raises(TypeError, match=r"StepTimer\(device\)"):
        ft.apply(torch.nn.Linear(1, 1), [StepMeter()])


class FakeEvent:
    """A CUDA event on a device that finishes only when the test says so."""

    passed: bool
    reads: int

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream) -> None:
        self.at_ms = stream

    def query(self) -> bool:
        return FakeEvent.passed

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert FakeEvent.passed, "CUDA refuses this on an event that has not been passed"
        return other.at_ms - self.at_ms


def test_cuda_times_come_from_events_that_have_passed(clock, monkeypatch):
    device = Clock()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.now_ms)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(FakeEvent, "passed", True))
    FakeEvent.passed = False
    timer = StepTimer("cuda", warmup=0)
    for _ in range(2):
        with timer.phase("data_wait"):
            clock.passes(7)
        with timer.phase("forward"):
            clock.passes(1)  # the host only queues it
            device.passes(60)
        with timer.phase("pause"):
            device.passes(500)
        timer.end_step()
    assert timer.summary(wait=False) == {}
    expected = {**approx(data_wait=7, forward=60).expected, "step_ms": 60}
    assert timer.summary() == pytest.approx(expected)


@pytest.mark.gpu
@gpu
def test_cuda_does_not_wait_within_a_step():
    timer, x = StepTimer("cuda", warmup=0), torch.ones(2048, 2048, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            with timer.phase("forward"):
                x = x @ x
            timer.end_step(samples=1)
            timer.summary(wait=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = timer.summary()
    assert 0 < found["forward_ms"] <= found["step_ms"]


def test_a_rank_is_named_only_if_it_costs_time():
    usual = {"host": "a", "data_wait": 2.0, "transfer": 1.0, "forward": 10.0, "step": 40.0}
    phases = ("data_wait", "transfer", "forward")
    slow = {**usual, "host": "b", "forward": 20.0}
    said = describe_slowest([usual, usual, slow, usual], phases, 1.2)
    assert said.startswith("rank 2 (b) takes 23 ms until its backward where the others take 13 (1.77 times as long")
    assert said.endswith("most of it forward); they wait for it 10 ms of a step of 40 ms")
    assert describe_slowest([usual, usual, {**usual, "forward": 12.0}], phases, 1.2) == ""  # not much slower
    assert describe_slowest([usual, {**slow, "step": 400.0}], phases, 1.2) == ""  # and only little of the step is lost
    with pytest.raises(ValueError, match="compare_ranks_every=-1"):
        ft.StepMeter(compare_ranks_every=-1)


def test_mfu_is_the_flops_of_a_step_over_the_peak(capsys):
    class Net(BoringModel):
        def train_dataloader(self):
            return DataLoader(torch.zeros(64, 32), batch_size=8)

    flops = ft.memory.count_flops(Net(), torch.zeros(8, 32))
    assert flops == 2 * 8 * 32 * 2 * 2  # forward, and the gradient of the weight
    meter = StepMeter(warmup=1, flops=flops)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[meter], logger=False, enable_checkpointing=False)
    trainer.fit(Net())
    found = meter.summary()
    expected = flops / (found["step_ms"] / 1e3) / meter._peak_flops
    assert found["mfu"] == pytest.approx(expected)
    assert 0 < found["mfu"] < 1
    assert meter.measurements()["mfu"] == found["mfu"]


def test_peak_flops_is_the_speed_of_a_matrix_product(clock, monkeypatch):
    def mm(one, other):
        clock.passes(4)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(torch, "mm", mm)
    assert ft.profiling.peak_flops(torch.device("cpu"), torch.float32) == pytest.approx(2 * 1024**3 / 4e-3)


def test_zero_flops_are_refused():
    with pytest.raises(ValueError, match=r"flops=0\): it must be greater than 0\. Use ft\.memory\.count_flops"):
        StepMeter(flops=0)


@pytest.mark.gpu
@gpu
def test_gpu_peak_flops_is_reproducible():
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32):
        fastest, again = (ft.profiling.peak_flops(device, dtype) for _ in range(2))
        assert 0.5 < fastest / again < 2
        assert fastest > 1e12
