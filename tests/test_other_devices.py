"""Devices that are not at hand, simulated: GPUs before Ampere, and those of Apple, without float64."""

import ast
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.preflight import _why_not as why_not
from lightning_fasttrain.bench.ladder.results import Row
from lightning_fasttrain.bench.ladder.rungs import NAIVE, rungs, strong_baselines
from lightning_fasttrain.cli.doctor import examine
from lightning_fasttrain.core.device import fast_mixed_precision, is_out_of_memory
from lightning_fasttrain.core.state import values
from lightning_fasttrain.core.state.rng import keep_random_state, random_state, set_random_state, torch_generators
from lightning_fasttrain.core.state.values import to_float64, widest_float
from lightning_fasttrain.finetune.quantized.quantized_base import choose_compute_dtype
from lightning_fasttrain.micro_batching.out_of_memory import _shortfall
from lightning_fasttrain.planner.candidates import find_axes
from lightning_fasttrain.technique.declarations import facts_of_machine
from tests.support.nets import TinyLM, fit, lm_batches

PACKAGE = Path(ft.__file__).parent
# Where float64 is asked for on the CPU, or on devices that are known to have it.
HAVE_FLOAT64 = {
    "checkpoint/exact_resume.py": "restores the module of a run in 64-true",
    "core/state/values.py": "the one place that asks whether a device has it",
    "core/distributed.py": "between processes, which neither Apple's nor Intel's GPUs join",
    "proof/verification/digest.py": "entries are on the CPU unless they are on a GPU of NVIDIA",
    "strategy": "between processes",
    "trial/deterministic_step.py": "a trial in float64 that fails is made in the step's own precision",
    "trial/try_split.py": "the same trial",
}


@pytest.fixture
def card(request, monkeypatch):
    """A GPU of a compute capability, as far as torch is asked about it."""
    major, minor = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or major >= 8
    )
    return torch.device("cuda")


CARDS = {
    "P100": ((6, 0), None),
    "V100": ((7, 0), "16-mixed"),
    "T4": ((7, 5), "16-mixed"),
    "A100": ((8, 0), "bf16-mixed"),
}


@pytest.mark.parametrize(("card", "precision"), CARDS.values(), ids=CARDS, indirect=["card"])
def test_the_mixed_precision_is_one_that_the_card_multiplies(card, precision):
    assert fast_mixed_precision(card) == precision


@pytest.mark.parametrize(("card", "dtype"), [((7, 5), torch.float16), ((9, 0), torch.bfloat16)], indirect=["card"])
def test_layers_in_4_bits_compute_in_what_the_card_multiplies(card, dtype, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "device", card)
    assert choose_compute_dtype("auto", torch.nn.Linear(2, 2), torch.zeros(2)) is dtype


@pytest.mark.parametrize("mixed", ["bf16-mixed", "16-mixed", None])
def test_a_plan_considers_the_mixed_precision_of_the_device(mixed):
    tolerance = ft.technique.Exactness.TOLERANCE
    axes = find_axes(TinyLM(), lm_batches(1)[0], facts_of_machine(), tolerance, None, mixed)
    assert axes.words["precision"] == ["32-true", *([mixed] if mixed else [])]


def test_float16_is_predicted_as_large_as_bfloat16():
    of = {}
    for precision in ("16-mixed", "bf16-mixed", "32-true"):
        report = ft.predict_memory(TinyLM(), lm_batches(1)[0], precision=precision, device="cpu")
        of[precision] = report.peak_bytes
    assert of["16-mixed"] == of["bf16-mixed"] != of["32-true"]


@pytest.fixture
def apple(monkeypatch):
    """An Apple GPU, as far as generators are asked for; its draws are those of a generator on the CPU."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)
    return generator


def test_the_generator_of_an_apple_gpu_is_saved_and_restored(apple):
    before = random_state()
    assert len(torch_generators(before)) == 2
    first = torch.rand(3, generator=apple)
    with keep_random_state():
        torch.rand(3, generator=apple)
    second = torch.rand(3, generator=apple)
    set_random_state(before)
    assert torch.equal(torch.rand(3, generator=apple), first)
    assert torch.equal(torch.rand(3, generator=apple), second)


def test_a_state_of_an_apple_gpu_is_read_without_one(apple, monkeypatch):
    state = random_state()
    drawn = torch.rand(3)
    monkeypatch.undo()
    set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_float64_is_on_the_cpu_where_the_device_has_none(monkeypatch):
    assert widest_float(torch.device("mps")) is torch.float32
    monkeypatch.setattr(values, "_WITHOUT_FLOAT64", ("meta",))
    with pytest.raises(NotImplementedError, match="meta tensor"):  # it is copied to the CPU, which needs values
        to_float64(torch.zeros(2, device="meta"))
    assert to_float64(torch.ones(2)).dtype is torch.float64


OF_APPLE = (
    "MPS backend out of memory (MPS allocated: 12.74 GiB, other allocations: 4.39 GiB, max allowed: 18.13 GiB). "
    "Tried to allocate 2.00 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
    "memory allocations (may cause system failure)."
)


def test_an_allocator_without_memory_is_recognized_on_any_device():
    with pytest.raises(RuntimeError) as of_cpu:
        torch.empty(2**58)
    assert is_out_of_memory(of_cpu.value)
    assert is_out_of_memory(RuntimeError(OF_APPLE))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("the queue is out of memory slots"))
    assert not is_out_of_memory(ValueError(OF_APPLE))


class SmallDevice(TinyLM):
    """Has memory for two samples; its allocator says so as Apple's or the CPU's does."""

    def __init__(self, fail):
        super().__init__()
        self.fail, self.sizes = fail, []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch["input_ids"]))
        if len(batch["input_ids"]) > 2:
            self.fail()
        return super().training_step(batch, batch_idx)


def fail_as_apple():
    raise RuntimeError(OF_APPLE)


@pytest.mark.parametrize("fail", [fail_as_apple, lambda: torch.empty(2**58)], ids=["apple", "cpu"])
def test_a_batch_that_does_not_fit_is_repeated_in_micro_batches(fail):
    batches = lm_batches(1)
    model, plain = SmallDevice(fail), TinyLM()
    plain.load_state_dict(model.state_dict())
    for module, callbacks in ((model, [ft.MicroBatching("auto")]), (plain, [])):
        fit(module, batches, callbacks=callbacks)
    assert 0 < max(model.sizes) <= 2 < len(batches[0]["input_ids"])
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_single_samples_that_do_not_fit_say_how_much_is_missing():
    assert _shortfall(RuntimeError(OF_APPLE)) == ": at least 1024 MiB more are needed"


def test_the_doctor_says_what_an_apple_gpu_lacks(apple):
    found = next(finding for finding in examine() if finding.name == "GPU")
    assert found.status == "ok"
    assert found.detail.startswith("mps; torch does not count memory there")


def on_apple(name):
    return pytest.raises(ValueError, match=rf"{name}.* on mps: .*\. (Train|Use) ")


def test_what_needs_counted_memory_is_refused_on_an_apple_gpu(monkeypatch):
    device = torch.device("mps")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.FITTING
    monkeypatch.setattr(type(trainer.strategy), "root_device", device)
    for callback in (ft.Auto(), ft.AutoBatchSize()):
        with on_apple(type(callback).__name__):
            callback.setup(trainer, TinyLM(), "fit")
    model = TinyLM()
    monkeypatch.setattr(torch.Tensor, "device", device)
    with on_apple("MemoryBudget"):
        ft.MemoryBudget(1).wrap(model, dict(model.named_children()))
    with on_apple("MemoryRecording"):
        ft.profiling.MemoryRecording(model)
    with on_apple("'adamw8bit'"):
        ft.build_optimizer(model, "adamw8bit")


def asks_for_float64(node):
    """Whether a node converts to float64 without a question: ``x.double()``, and float64 as the dtype of a call."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr == "double":
        return not ast.unparse(node.func.value).endswith(".cpu()")
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    on = ast.unparse(given.get("device", ast.Constant("cpu")))
    return "torch.float64" in map(ast.unparse, [*node.args, given.get("dtype", ast.Constant(None))]) and on != "'cpu'"


def test_no_code_asks_any_device_for_float64():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).as_posix()
        if place in HAVE_FLOAT64 or place.partition("/")[0] in HAVE_FLOAT64:
            continue
        found += [f"{place}:{node.lineno}" for node in ast.walk(ast.parse(file.read_text())) if asks_for_float64(node)]
    assert found == []


@pytest.mark.parametrize("mixed", ["16-mixed", "bf16-mixed", None])
def test_the_ladder_climbs_in_the_mixed_precision_of_the_device(mixed):
    naive = Row(state=NAIVE)
    by_name = {rung.name: rung for rung in rungs(4, mixed)}
    expected = mixed or "bf16-mixed"
    assert by_name["bf16"].on(naive)["trainer"] == {"precision": expected}
    for strong in strong_baselines(mixed):
        assert strong.on(naive)["trainer"] == {"precision": mixed or "32-true"}
    missing = {name for name, rung in by_name.items() if why_not(rung, "cuda", mixed)}
    assert {"bf16", "bf16-alone"} & missing == {None: {"bf16", "bf16-alone"}, "16-mixed": {"bf16-alone"}}.get(
        mixed, set()
    )
