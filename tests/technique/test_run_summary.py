"""The summaries at the start and at the end of a run, and the hooks that print them."""

import copy
import logging
import re
import resource
import struct
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboardX.proto import event_pb2

import lightning_fasttrain as ft
from lightning_fasttrain.core.messages import format_bytes, log
from lightning_fasttrain.technique.run_summary import KEY
from tests.cases import CASES
from tests.support.nets import TinyLM, as_loader, heard, lm_batches, padded_batches, trainer

BATCHES = lm_batches(5)


class Probe(L.Callback):
    """Keeps what can be seen when the first batch is run, before its step."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append(self.look(pl_module))


def run(callbacks, net=TinyLM, batches=BATCHES, **settings):
    """What is said in a fit whose model summary is on, and the Trainer."""
    t = trainer(callbacks, **{"enable_model_summary": True, **settings})
    with heard() as said:
        t.fit(net(), as_loader(batches))
    return said, t


def start_of(said):
    return next(text for text in said if " technique" in text.partition("\n")[0])


def end_of(said):
    return next(text for text in said if text.partition("\n")[0].endswith(" steps"))


def test_the_summary_lists_techniques_in_the_order_in_which_they_change_the_model():
    techniques = [ft.MicroBatching(3), ft.EagerGradientRelease(), ft.ActivationCheckpointing(), ft.LoRA(rank=2)]
    lines = start_of(run(techniques, accumulate_grad_batches=2)[0]).splitlines()
    assert lines[:5] == [
        "4 techniques",
        "  LoRA                     rank 2 beside 6 layers",
        "  ActivationCheckpointing  3 blocks of Block recomputed",
        "  MicroBatching            each batch runs in 3 micro-batches",
        "  Also                     EagerGradientRelease()",
    ]
    trained, total = (sum(p.numel() for p in net.parameters()) for net in (lora_alone(), with_lora()))
    assert lines[5] == f"  Parameters               {trained:,} of {total:,} train ({trained / total:.2%})"
    assert lines[6] == "  Runs on                  cpu, SingleDeviceStrategy, precision 32-true"
    samples = "12 samples (60 tokens) = 6 samples × 2 accumulated batches"
    assert lines[7] == f"  Global batch             {samples}"
    assert lines[-1] == "  Exactness                changes training (LoRA)"


@pytest.mark.parametrize(
    "predicts", [lambda: ft.proof.Rehearsal(seconds=1), ft.AutoBatchSize], ids=["rehearsal", "auto"]
)
def test_a_predicted_peak_is_shown_beside_the_free_memory(predicts):
    callback, meter = predicts(), ft.MemoryMeter()
    said, _ = run([callback, ft.EagerGradientRelease(), meter])
    line = next(text for text in start_of(said).splitlines() if "  Memory " in text)
    assert f" a step is predicted to take {format_bytes(callback.predicted_bytes)}; " in line
    assert line.endswith(" free")
    assert callback.predicted_bytes == pytest.approx(meter.peak_bytes, rel=0.1)


def test_no_step_is_run_for_a_prediction():
    runs = []

    class Net(TinyLM):
        def training_step(self, batch, batch_idx):
            runs.append(batch_idx)
            return super().training_step(batch, batch_idx)

    said, _ = run([ft.ActivationCheckpointing()], Net, max_steps=1)
    assert "predicted" not in start_of(said)
    assert runs == [0]


def with_lora():
    net = TinyLM()
    ft.apply(net, [ft.LoRA(rank=2)])
    return net


def lora_alone():
    return torch.nn.ParameterList([p for name, p in with_lora().named_parameters() if "lora_" in name])


def test_the_summary_comes_before_the_first_step_and_once_a_fit():
    with heard() as said:
        probe = Probe(lambda net: list(said))
        t = trainer([ft.ActivationCheckpointing(), probe], enable_model_summary=True, max_epochs=2)
        net = TinyLM()
        t.fit(net, as_loader(BATCHES))
        t.fit_loop.max_epochs = 3
        t.fit(net, as_loader(BATCHES))
    assert probe.seen[0] == [start_of(said)]
    assert sum("1 technique" in text.partition("\n")[0] for text in said) == 2


@pytest.mark.filterwarnings("ignore:.*recompilations")  # trimmed to rows and lengths of 1, which are special shapes
@pytest.mark.parametrize("count", [1, 4, 5, 11])
def test_the_summary_has_at_most_twelve_lines(count):
    cases = [
        case
        for case in CASES
        if case.name
        not in ("MemoryTimeline", "PaddingFree", "QLoRA", "Adapter", "IA3", "QuantizedBase", "BatchSizeWarmup")
        # One would take the place of TokenWeightedAccumulation, the other compiles what is only listed here.
        and case.name not in ("GlobalBatch", "CompileBlocks")
    ]
    techniques = [case.make() for case in cases if not case.settings][:count]
    said = start_of(run(techniques)[0])
    assert said.count("\n") < 12
    assert all(type(technique).__name__ in said for technique in techniques)


@pytest.mark.filterwarnings("ignore:.*barebones")
@pytest.mark.parametrize("switch", ["enable_model_summary", "barebones", "level"])
def test_lightnings_switches_silence_the_summary(switch):
    settings = {"enable_model_summary": False} if switch != "level" else {}
    if switch == "barebones":
        settings = {"barebones": True, "enable_model_summary": None, "logger": None}
    before = log.level
    log.setLevel(logging.WARNING if switch == "level" else logging.INFO)
    try:
        assert run([ft.EagerGradientRelease()], **settings)[0] == []
    finally:
        log.setLevel(before)


OPERATE = [case for case in CASES if case.make().surgery and case.finds_layers]


@pytest.mark.parametrize("case", OPERATE, ids=lambda case: case.name)
def test_a_technique_describes_the_model_it_changed_and_no_other(case):
    technique = case.make()
    probe = Probe(technique.describe_effect)
    run([technique, probe], partial(TinyLM, **case.optimizer))
    assert probe.seen[0]
    assert technique.describe_effect(torch.nn.Linear(2, 2)) == ""


def test_no_hook_is_left_after_the_first_four_batches_or_after_the_run():
    technique = ft.ActivationCheckpointing()
    release = ft.EagerGradientRelease()  # has no on_train_batch_start of its own
    probe = Probe(lambda net: release.on_train_batch_start)
    run([release, technique, probe])
    assert set(probe.seen[4:]) == {None}
    assert not {name for name in vars(release) if name.startswith("on_")}


@pytest.mark.parametrize(
    ("techniques", "is_said"),
    [
        ([ft.EagerGradientRelease()], True),
        ([ft.MicroBatching(2, trim_padding=False)], True),
        ([ft.MicroBatching(1)], True),
        ([ft.MicroBatching(2)], False),
        ([ft.MicroBatching(1, trim_padding=True)], False),
    ],
    ids=str,
)
def test_the_padding_of_the_first_four_batches_is_said_once_if_nothing_cuts_it_off(techniques, is_said):
    batches = padded_batches([8, 8, 16, 8, 32, 32])
    said = [text for text in run(techniques, batches=batches)[0] if "seem to be padding" in text]
    rows = 3 * (32 + 7 * 8) + 32 + 7 * 16
    share = 1 - rows / (4 * 8 * 32)
    # In any number of micro-batches from two on, the long row runs alone, and the others together.
    expected = (
        f"{share:.0%} of the tokens of 4 batches seem to be padding (['input_ids'] = 0): MicroBatching(8) would run "
        f"×{1 - share:.2f} of them, where a trial shows that padding has no effect."
    )
    assert said == ([expected] if is_said else [])


def test_a_copy_made_during_a_run_reports_on_its_own_run():
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            self.copied = copy.deepcopy(next(one for one in trainer.callbacks if isinstance(one, ft.Technique)))

    copies = Copies()
    run([ft.ActivationCheckpointing(), copies])
    said, t = run([copies.copied], batches=lm_batches(2))
    assert (len(said), t.global_step) == (2, 2)
    assert end_of(said).startswith("2 steps\n")


def test_the_end_states_time_throughput_and_what_meters_measured():
    said = end_of(run([ft.StepMeter(warmup=0), ft.MemoryMeter(warmup=1)])[0])
    assert said.startswith("5 steps\n  Time         ")
    assert " ms/step (median)\n  Throughput   " in said
    assert " tokens/s on each rank\n  Peak memory  " in said
    said = end_of(run([ft.EagerGradientRelease()], accumulate_grad_batches=2)[0])
    assert said.startswith("3 steps\n")
    assert " ms/step, including data loading and callbacks" in said
    assert " tokens/s, assuming batches like the first\n" in said
    held = re.fullmatch(r"  Peak memory  ([\d.]+) (.)iB of this process, with .*", said.splitlines()[-1])
    peak_kib = float(held[1]) * {"M": 1024, "G": 1024**2}[held[2]]
    assert 50e3 < peak_kib <= 1.01 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_end_states_where_a_run_was_resumed(tmp_path):
    saving = {"enable_model_summary": True, "enable_checkpointing": True}
    callbacks = lambda: [ft.EagerGradientRelease(), ModelCheckpoint(tmp_path, save_last=True)]  # noqa: E731
    trainer(callbacks(), max_epochs=1, **saving).fit(TinyLM(), as_loader(lm_batches(3)))
    again = trainer(callbacks(), max_epochs=2, **saving)
    with heard() as said:
        again.fit(TinyLM(), as_loader(lm_batches(3)), ckpt_path=tmp_path / "last.ckpt")
    lines = end_of(said).splitlines()
    assert lines[:2] == ["3 steps", f"  Resumed      at step 3 from {tmp_path / 'last.ckpt'}"]


def test_the_end_states_what_fell_back_and_what_gained_nothing(recwarn):
    def broken(graph, inputs):
        raise RuntimeError("no such kernel")

    torch._dynamo.reset()
    techniques = [ft.CompileBlocks(backend=broken), ft.MicroBatching("auto"), ft.DevicePrefetch()]
    lines = end_of(run(techniques)[0]).splitlines()
    assert lines[-3].startswith("  CompileBlocks   3 of 3 blocks ran uncompiled: ")
    assert "no such kernel" in lines[-3]
    assert lines[-2] == "  MicroBatching   batches fit with 1 micro-batch"
    assert lines[-1] == "  DevicePrefetch  no effect: batches are already on the CPU"
    idle = end_of(run([ft.MicroBatching(4)], batches=lm_batches(3, size=1))[0])
    assert "MicroBatching  did nothing: batches of one sample cannot be split into 4 micro-batches" in idle


class WithSettings(TinyLM):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()


MADE = "MicroBatching(n=2), EagerGradientRelease()"


@pytest.mark.parametrize("net", [TinyLM, WithSettings])
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_techniques_are_logged_as_hyperparameters_beside_the_users_own(net, kind, tmp_path):
    logger = kind(tmp_path, name="", version="")
    run([ft.MicroBatching(2), ft.EagerGradientRelease()], net, logger=logger)
    users = {"width": 3} if net is WithSettings else {}
    assert (logger.hparams if kind is TensorBoardLogger else logger.experiment.hparams) == {KEY: MADE, **users}


def written_scalars(folder):
    """Names of the scalars in TensorBoard's files: records of (length, its checksum, an event, its checksum)."""
    names = set()
    for path in folder.rglob("events.out.tfevents*"):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
            names.update(value.tag for value in event.summary.value)
            place += 12 + length + 4
    return names


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_what_the_meters_measure_reaches_the_loggers(kind, tmp_path):
    logger = kind(tmp_path, name="", version="")
    settings = {"logger": logger, "log_every_n_steps": 1}
    run([ft.StepMeter(warmup=0), ft.MemoryMeter()], batches=lm_batches(3, size=4), **settings)
    logger.finalize("success")
    if kind is CSVLogger:
        found = set((tmp_path / "metrics.csv").read_text().splitlines()[0].split(","))
    else:
        found = written_scalars(tmp_path)
    assert {"step_meter/step_ms", "step_meter/tokens_per_s"} <= found
    assert any(name.startswith("memory_meter/") for name in found), found


class KeepsAll(CSVLogger):
    """Keeps the calls."""

    def __init__(self, folder):
        super().__init__(folder)
        self.calls = []

    def log_hyperparams(self, params=None):
        self.calls.append(params)


@pytest.mark.parametrize(
    ("net", "settings", "calls"),
    [
        (TinyLM, {}, [{KEY: MADE}]),
        (WithSettings, {}, [{"width": 3}, {KEY: MADE}]),
        (WithSettings, {"enable_autolog_hparams": False}, []),
    ],
    ids=["alone", "with the user's", "switched off"],
)
def test_hyperparameters_are_logged_after_the_users_own(net, settings, calls, tmp_path):
    logger = KeepsAll(tmp_path)
    run([ft.MicroBatching(2), ft.EagerGradientRelease()], net, logger=logger, **settings)
    assert logger.calls == calls
