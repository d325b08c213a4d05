"""The doctor changes nothing, is silent afterwards, and leaves no trace in torch, Lightning or Python."""

import sys
import threading

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import lightning_fasttrain as ft
from lightning_fasttrain.doctor.observation import source_lines
from lightning_fasttrain.doctor.observation.source_lines import LineTracer


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = 0.1 * torch.randn_like(x)
        return nn.functional.cross_entropy(self.net(x + noise), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(96, 8), torch.randint(4, (96,))), batch_size=8, shuffle=True)


def fit(*callbacks, **settings):
    data = loader()
    torch.manual_seed(0)
    module = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, data, data)
    return module


def loop(net, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def what_is_patched():
    return {
        "next": _BaseDataLoaderIter.__next__,
        "iter": DataLoader.__iter__,
        "backward": torch.autograd.backward,
        "step": LRScheduler.step,
        "hooks": (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
        "module hooks": len(nn.modules.module._global_forward_pre_hooks),
        "interval": sys.getswitchinterval(),
        "threads": threading.active_count(),
        "trace": sys.gettrace(),
    }


def test_a_run_with_the_doctor_has_the_same_weights_bitwise(tmp_path):
    plain, doctor = fit(), ft.Doctor(steps=9, warmup=1, out=tmp_path, show=False)
    watched = fit(doctor)
    assert doctor.diagnosis.memory.peak_bytes > 0
    assert same(plain, watched)
    assert doctor.diagnosis.steps == 5


def test_a_loop_in_an_examination_has_the_same_weights_bitwise():
    nets = []
    for watches in (False, True):
        data = loader()
        torch.manual_seed(0)
        net = Net().net
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        examination = ft.doctor.examine(steps=6, warmup=1, device="cpu", report=lambda diagnosis: None)
        if watches:
            with examination:
                loop(net, optimizer, data)
        else:
            loop(net, optimizer, data)
        nets.append(net)
    assert same(*nets)
    assert examination.diagnosis.steps == 3


def test_nothing_stays_patched_after_a_run():
    before = what_is_patched()
    doctor = ft.Doctor(steps=6, warmup=1, show=False)
    module = fit(doctor)
    assert what_is_patched() == before
    assert not any(one._forward_pre_hooks for one in module.modules())
    assert "profiler" not in [name for name in vars(module.trainer) if "Watching" in repr(vars(module.trainer)[name])]


def test_nothing_stays_patched_after_a_run_that_failed():
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:  # while operators are looked at
                raise KeyError("fails")

    before = what_is_patched()
    doctor = ft.Doctor(steps=6, warmup=1, show=False)
    with pytest.raises(KeyError, match="fails"):
        fit(doctor, Fails())
    assert what_is_patched() == before
    assert doctor.diagnosis is None
    torch.ones(2).sum()  # no dispatch mode is left


def test_a_run_that_ends_early_is_examined_as_far_as_it_went():
    doctor = ft.Doctor(steps=20, warmup=3, show=False)
    fit(doctor, max_steps=8)
    assert doctor.diagnosis.steps == 3
    doctor = ft.Doctor(steps=20, warmup=3, show=False)
    fit(doctor, max_steps=2)
    assert doctor.diagnosis.steps == 0
    assert "within the warm-up" in doctor.diagnosis.notes[0]


def test_each_line_is_traced_with_what_it_calls_and_its_comprehensions(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(source_lines, "perf_counter", lambda: sum(slept))
    script = tmp_path / "items.py"
    script.write_text(
        "def wait(seconds):\n"
        "    sleep(seconds)\n"
        "def item():\n"
        "    wait(0.02)\n"
        "    return sum([sleep(0.01) or 1 for _ in range(3)])\n"
    )
    names = {"sleep": slept.append}
    exec(compile(script.read_text(), str(script), "exec"), names)
    tracer = LineTracer()
    tracer.active = True
    with tracer:
        assert names["item"]() == 3
    assert sys.gettrace() is None
    seconds = {line.number: one.seconds for line, one in tracer.found.items()}
    # The line that waits has the time, not the one that calls it; the last one has that of its comprehension.
    assert seconds == pytest.approx({1: 0.0, 2: 0.02, 3: 0.0, 4: 0.0, 5: 0.03})
    assert tracer.total_s == pytest.approx(0.05)


def test_it_prints_once_and_is_silent_afterwards(capsys):
    fit(ft.Doctor(steps=6, warmup=1))
    assert capsys.readouterr().out.count("fasttrain doctor: ") == 1


def test_phases_add_up_to_the_step():
    doctor = ft.Doctor(steps=8, warmup=1, show=False)
    fit(doctor)
    diagnosis = doctor.diagnosis
    assert sum(diagnosis.phase_ms.values()) == pytest.approx(diagnosis.step_ms, rel=1e-6)
    assert min(diagnosis.phase_ms[name] for name in ("data_wait", "forward", "backward", "optimizer")) > 0


def test_wrong_numbers_of_steps_are_refused():
    with pytest.raises(
        ValueError, match=r"steps=5\): it must be at least 6\. Use steps=6 or more: three are looked at"
    ):
        ft.Doctor(steps=5)
    with pytest.raises(ValueError, match="warmup=0"):
        ft.doctor.examine(warmup=0)
