"""The memory of compiled blocks is predicted by the compiler's own graphs, and is that of the code which it makes."""

import functools
import json

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_fasttrain as ft
from examples.predict_compiled import MEASURED, list_lines, list_measured, predict_row
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.memory.fake_step import fake_model
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.profiling import PeakMemory
from lightning_fasttrain.step_time.record_step import ATTENTION, StepRecorder
from lightning_fasttrain.technique.declarations import PredictedStep
from tests.memory.test_predict_memory import SMALL

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    """A gated MLP with a norm; ``rate`` scales what it adds."""

    def __init__(self, rate=1.0, reads=False):
        super().__init__()
        self.norm, self.rate, self.reads = nn.LayerNorm(WIDTH), rate, reads
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        if self.reads and y.sum().item() > 1e9:
            return x
        return x + self.rate * self.down(nn.functional.gelu(self.gate(y)) * self.up(y))


def chain(*blocks):
    return nn.Sequential(*(blocks or (Block(), Block(), Block())))


def bytes_saved(run, held):
    """Bytes that autograd keeps for the backward of ``run``, without parameters and inputs."""
    known = {tensor.untyped_storage()._cdata for tensor in held}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage, storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(nbytes for _, nbytes in found.values())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_as_many_bytes_are_kept_as_the_compilers_own_code_keeps(precision):
    net, x = chain(), torch.randn(ROWS, WIDTH, requires_grad=True)
    mixed = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    torch._dynamo.reset()
    for block in net:
        block.compile(backend="aot_eager_decomp_partition")

    def run(net, x):
        with mixed():
            return net(x)

    run(net, x)  # compiles
    expected = bytes_saved(lambda: run(net, x), [*net.parameters(), x])
    mode, step = FakeMode(), PredictedStep()
    with fake_model(chain, [ft.CompileBlocks().predict(step)], None, mode) as fake, mode:
        y = torch.empty(ROWS, WIDTH, requires_grad=True)
        run(fake, y)  # traced before anything is counted
        assert bytes_saved(lambda: run(fake, y), [*fake.parameters(), y]) == expected
    eager = bytes_saved(lambda: run(chain(), x), [*net.parameters(), x])
    assert 0 < expected < eager
    assert step.notes == []


def predicted(net, *techniques, device="cpu"):
    settings = {"loss": lambda net, x: net(x).square().mean(), "optimizer": torch.optim.SGD, "device": device}
    return ft.predict_memory(net, torch.zeros(ROWS, WIDTH), techniques=techniques, **settings)


def test_values_in_registers_take_no_memory():
    """Between two products of the same size, a chain of element-wise operations is one kernel."""

    class Chain(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.count, self.first, self.last = count, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            for _ in range(self.count):
                x = x.sin()
            return self.last(x)

    few, many = (predicted(lambda n=count: chain(Chain(n), Chain(n)), ft.CompileBlocks()) for count in (2, 8))
    assert few.peak_bytes == many.peak_bytes
    plain = [predicted(lambda n=count: chain(Chain(n), Chain(n))).peak_bytes for count in (2, 8)]
    assert plain[1] - plain[0] == 2 * 6 * ROWS * WIDTH * 4


def test_equal_blocks_share_their_graphs_and_others_do_not():
    def count(*blocks):
        step = PredictedStep()
        surgery = ft.CompileBlocks().predict(step)
        mode = FakeMode()
        with fake_model(lambda: chain(*blocks), [surgery], None, mode) as net, mode:
            net(torch.empty(ROWS, WIDTH, requires_grad=True))
            (known,) = {id(block.forward.__self__.known): block.forward.__self__.known for block in net}.values()
            return len(known)

    assert count(Block(), Block(), Block()) == 1
    assert count(Block(), Block(), Block(0.5)) == 2


def test_a_block_that_cannot_be_traced_is_predicted_as_it_runs_which_is_noted():
    reads = lambda: chain(*(Block(reads=True) for _ in range(3)))  # noqa: E731
    found, plain = predicted(reads, ft.CompileBlocks()), predicted(reads)
    assert found.peak_bytes == plain.peak_bytes
    (note,) = [note for note in found.notes if "upper bound" in note]
    assert note.startswith("Block is predicted uncompiled, an upper bound, as the compiler's graphs are unknown")


def test_what_is_not_predicted_is_noted():
    found, plain = predicted(chain, ft.CompileBlocks(backend="eager")), predicted(chain)
    assert found.peak_bytes == plain.peak_bytes
    (note,) = found.notes
    assert "what backend='eager' keeps for the backward is unknown" in note
    (note,) = predicted(chain, ft.CompileBlocks("reduce-overhead"), device="cuda").notes
    assert note == "The memory that CUDA graphs keep, by mode='reduce-overhead', is not counted."


def language_model():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=64))


@pytest.mark.parametrize(
    ("further", "is_masked"),
    [({}, False), ({"attention_mask": torch.ones(4, 64).tril()}, True)],
    ids=["none", "that hides"],
)
def test_masks_of_hugging_face_are_those_of_the_batch(further, is_masked):
    ids = torch.zeros(4, 64, dtype=torch.long)
    settings = {"loss": lambda net, batch: net(**batch).loss, "optimizer": torch.optim.SGD, "precision": "bf16-mixed"}
    batch, recorder = {"input_ids": ids, "labels": ids, **further}, StepRecorder()
    predict_strategies(language_model, batch, [None], recorder=recorder, **settings)
    kernels = {kernel.op for step in recorder.steps for kernel in step.kernels if kernel.kind == ATTENTION}
    assert any("_efficient_" in kernel for kernel in kernels) is is_masked


def test_recomputed_blocks_keep_their_inputs_alone():
    step, mode = PredictedStep(), FakeMode()
    techniques = [ft.ActivationCheckpointing(), ft.CompileBlocks().predict(step)]
    with fake_model(chain, techniques, None, mode) as net, mode:
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        assert bytes_saved(lambda: net(x), [*net.parameters(), x]) <= 3 * (ROWS + 1) * WIDTH * 4
    found = predicted(chain, ft.CompileBlocks(), ft.ActivationCheckpointing())
    assert found.at_peak["activations"] < predicted(chain, ft.CompileBlocks()).at_peak["activations"]


@pytest.mark.parametrize(("piece", "side"), [("gpt2 ours-fast 1", "fast"), ("gpt2 ours-lean 1", "lean")])
def test_the_peak_on_an_h200_is_predicted_within_four_percent(piece, side):
    row = next(row for row in list_measured() if row["piece"] == piece)
    assert row["side"] == side
    assert predict_row(row) == pytest.approx(row["measured_bytes"], rel=0.04)


def test_the_table_is_what_the_file_says():
    results = MEASURED.parent.parent
    found = json.loads((results / "memory_compiled_h200.json").read_text())
    assert [row["measured_bytes"] for row in found["rows"]] == [row["measured_bytes"] for row in list_measured()]
    _, table = (results / "README.md").read_text().split("<!-- compiled predictions -->\n")
    assert table.split("\n<!-- /")[0].splitlines() == list_lines(found["rows"])
    assert found["mean_error"] < 0.02


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["uneven", "gpt", "llama", "encoder"])
def test_the_peak_on_a_cpu_is_predicted_within_five_percent(name):
    specimen = SMALL[name]
    module, batch = specimen.module(), specimen.batch()
    ft.compile_blocks_(module)
    optimizer = module.configure_optimizers()
    for _ in range(4):
        with PeakMemory("cpu", module, optimizer, batch) as peak:
            loss = module.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = ft.predict_memory(specimen.module, specimen.batch(), techniques=[ft.CompileBlocks()], device="cpu")
    assert found.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)
