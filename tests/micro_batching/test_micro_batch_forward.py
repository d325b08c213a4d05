"""A backbone that runs in micro-batches: gradients, random numbers, outputs, memory, and combinations."""

import copy
import json
import random
import weakref
from collections import UserList, namedtuple
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import lightning_fasttrain as ft
from lightning_fasttrain.core.batch.leaves import split_sizes
from lightning_fasttrain.micro_batching import accumulate_gradients, micro_batch_forward_
from tests.micro_batching.losses_hugging_face import LOSSES_HUGGING_FACE
from tests.micro_batching.losses_of_batches import info_nce
from tests.support.nets import DIM, Block, Gradients, as_loader, gradients, heard, largest_difference, trainer, weights
from tests.support.ranks import run_ranks

LENGTH = 4


class Encoder(nn.Module):
    """Map (B, T, D) to (B, D)."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(DIM, dropout) for _ in range(depth)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.mean(1) if mask is None else (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def encoder(**settings: Any) -> Encoder:
    torch.manual_seed(7)  # identical weights each time
    return Encoder(**settings).double()


def pairs(size: int = 7, length: int = LENGTH, seed: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, length, DIM, generator=g, dtype=torch.float64) for name in ("a", "b")}


def contrast(net: Any, batch: dict[str, Tensor], **settings: Any) -> Tensor:
    """A loss in which all samples of a batch depend on one another."""
    return info_nce(net(batch["a"], **settings), net(batch["b"], **settings))


def gradients_of(net: nn.Module, make_loss: Any) -> dict[str, Tensor]:
    net.zero_grad()
    make_loss().backward()
    return gradients(net)


def difference(net: nn.Module, make_loss: Any, n: int, backbone: nn.Module | None = None) -> float:
    """Return the difference of gradients with the backbone (default: the whole net) in ``n`` micro-batches."""
    expected = gradients_of(net, make_loss)
    restore = micro_batch_forward_(backbone or net, n)
    seen = gradients_of(net, make_loss)
    restore()
    return largest_difference(expected, seen)


# The gradient


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 9])
def test_the_gradient_is_that_of_the_unsplit_step(n):
    net, batch = encoder(), pairs(size=7)
    assert difference(net, lambda: contrast(net, batch), n) < 1e-10


def test_the_backbone_runs_in_n_micro_batches():
    net, rows = encoder(), []
    net.blocks[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    micro_batch_forward_(net, 3)
    net(pairs(size=7)["a"])
    assert rows == [3, 2, 2]


def test_the_input_gets_its_gradient():
    net, x = encoder(), pairs()["a"].requires_grad_()
    (expected,) = torch.autograd.grad(net(x).logsumexp(0).sum(), x)
    micro_batch_forward_(net, 3)
    (seen,) = torch.autograd.grad(net(x).logsumexp(0).sum(), x)
    assert torch.allclose(seen, expected, atol=1e-12)


def test_negative_control_averaging_micro_batch_losses_gives_another_gradient():
    net, batch = encoder(), pairs(size=8)
    expected = gradients_of(net, lambda: contrast(net, batch))
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
    assert largest_difference(expected, gradients_of(net, lambda: sum(contrast(net, h) / 2 for h in halves))) > 1e-2


def test_gradients_of_16_bit_parameters_are_rounded_once():
    whole, rounded = encoder(), encoder().bfloat16()
    whole.load_state_dict(rounded.state_dict())
    batch = {name: x.bfloat16() for name, x in pairs(size=64).items()}
    truth = gradients_of(whole, lambda: contrast(whole, {name: x.double() for name, x in batch.items()}))
    plain = gradients_of(rounded, lambda: contrast(rounded, batch).float())
    micro_batch_forward_(rounded, 64)
    seen = gradients_of(rounded, lambda: contrast(rounded, batch).float())
    assert largest_difference(truth, seen) < 1.5 * largest_difference(truth, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_failed_backward_leaves_no_state_behind(dtype):
    """This happens when memory runs out in a recomputation, and the batch is repeated."""
    net, batch = encoder().to(dtype), {name: x.to(dtype) for name, x in pairs(size=8).items()}
    micro_batch_forward_(net, 4)
    expected = gradients_of(net, lambda: contrast(net, batch).float())
    net.zero_grad()
    loss, calls = contrast(net, batch).float(), []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")

    handle = net.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    handle.remove()
    assert largest_difference(expected, gradients_of(net, lambda: contrast(net, batch).float())) == 0


# Random numbers and buffers


def chunk_by_chunk(net: Any, x: Tensor, n: int) -> Tensor:
    return torch.cat([net(rows) for rows in x.split(split_sizes(len(x), n))])


@pytest.mark.parametrize("n", [2, 3])
def test_dropout_has_the_same_masks_in_the_recomputation(n):
    net, x = encoder(dropout=0.3), pairs()["a"]
    torch.manual_seed(1)
    expected = gradients_of(net, lambda: chunk_by_chunk(net, x, n).logsumexp(0).sum())
    after = torch.rand(1)
    micro_batch_forward_(net, n)
    torch.manual_seed(1)
    seen = gradients_of(net, lambda: net(x).logsumexp(0).sum())
    assert largest_difference(expected, seen) < 1e-14
    assert torch.equal(torch.rand(1), after)


class Drawing(nn.Module):
    """Scales by random values of Python and NumPy, and by its number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x)) * (random.random() + np.random.rand() + self.calls)


def test_buffers_and_python_and_numpy_random_states_match_the_unsplit_run():
    runs = []
    for split in (False, True):
        torch.manual_seed(7)
        net, x = Drawing(), pairs()["a"]
        random.seed(1)
        np.random.seed(1)
        if split:
            micro_batch_forward_(net, 3)
        step = (lambda: net(x)) if split else (lambda: chunk_by_chunk(net, x, 3))  # noqa: B023
        steps = [gradients_of(net, lambda: step().logsumexp(0).sum()) for _ in range(2)]  # noqa: B023
        runs.append(({f"{name} {i}": g for i, step in enumerate(steps) for name, g in step.items()}, int(net.calls)))
    assert largest_difference(runs[0][0], runs[1][0]) < 1e-14
    assert runs[0][1] == runs[1][1] == 6


# Arguments and outputs


@dataclass
class Hidden:
    last: Tensor
    length: int
    nothing: None = None
    made: int = field(init=False, default=3)


Named = namedtuple("Named", ["last", "others"])
FORMS = {
    "dataclass": (lambda x: Hidden(x, x.shape[-1]), lambda out: out.last),
    "dict": (lambda x: {"last": x, "length": 4}, lambda out: out["last"]),
    "named tuple": (lambda x: Named(x, [x, None]), lambda out: out.last + out.others[0]),
    "nested tuple with None": (lambda x: (None, (x, (None, 2 * x))), lambda out: out[1][0] + out[1][1][1]),
    "ModelOutput": (
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x * x)),
        lambda out: out.last_hidden_state + out[1][1],
    ),
}


class Returning(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.net, self.form = encoder(), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.net(x))


@pytest.mark.parametrize("name", FORMS)
def test_outputs_keep_their_type_and_are_joined(name):
    form, read = FORMS[name]
    net, x = Returning(form), pairs()["a"]
    plain = net(x)
    assert difference(net, lambda: read(net(x)).logsumexp(0).sum(), 3) < 1e-10
    micro_batch_forward_(net, 3)
    seen = net(x)
    assert type(seen) is type(plain)
    assert torch.allclose(read(seen), read(plain))


def test_values_that_are_equal_are_passed_on():
    net = Returning(lambda x: Hidden(x, x.shape[-1]))
    micro_batch_forward_(net, 3)
    out = net(pairs()["a"])
    assert (out.length, out.nothing, out.made) == (DIM, None, 3)


def test_an_output_that_cannot_be_joined_is_an_error_where_it_is_used():
    net = Returning(lambda x: (x, iter([])))
    micro_batch_forward_(net, 3)
    _, cache = net(pairs()["a"])
    with pytest.raises(AttributeError, match=r"output\[1\], a list_iterator.*through="):
        cache.update()


def test_a_tensor_whose_first_axis_is_not_the_batch_is_refused():
    net = Returning(lambda x: x.T)
    micro_batch_forward_(net, 2)
    with pytest.raises(ValueError, match=r"output of Returning, of shape \(8, 4\).*first axis.*through="):
        net(pairs()["a"])


class Attending(nn.Module):
    """Attention with a causal mask (1, T, T) and a padding mask (B, T), passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.seen = Block(DIM).double(), []

    def forward(self, *, x: Tensor, causal: Tensor, padding: Tensor, scale: float = 1.0) -> Tensor:
        self.seen.append((causal.shape[0], padding.shape[0], scale))
        scores = (x @ x.mT * scale).masked_fill(~(causal & padding[:, None]), -1e9)
        return self.block(scores.softmax(-1) @ x)[0].mean(1)


def test_per_sample_masks_are_split_and_shared_masks_are_not():
    net, batch = Attending(), pairs(size=7)
    causal = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    padding = torch.arange(LENGTH) < torch.tensor([4, 1, 2, 3, 4, 2, 1])[:, None]
    views = [{"x": batch[name], "causal": causal, "padding": padding} for name in ("a", "b")]
    assert difference(net, lambda: info_nce(*[net(**view, scale=0.5) for view in views]), 3) < 1e-10
    assert set(net.seen) == {(1, 7, 0.5), (1, 3, 0.5), (1, 2, 0.5)}


class Positions(nn.Module):
    """Passes a table of positions (T, D) to its backbone, which returns another one with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, DIM, dtype=torch.float64))
        self.backbone = Positioned()

    def forward(self, x: Tensor) -> Tensor:
        hidden, angles = self.backbone(x, self.table)
        return (hidden * angles[:, None]).mean(1)


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)).double()

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(x + table), torch.linspace(0, 1, x.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("size", [LENGTH, 2 * LENGTH, 7])
def test_an_automatic_backbone_keeps_a_table_as_long_as_the_batch(size):
    net, batch = Positions(), pairs(size)
    expected = gradients_of(net, lambda: contrast(net, batch))
    net.zero_grad()
    accumulate_gradients(lambda b: contrast(net, b), batch, 2)
    assert largest_difference(expected, gradients(net)) < 1e-10


@pytest.mark.parametrize("size", [2 * LENGTH, 7])
def test_a_named_backbone_keeps_a_table_of_another_length(size):
    net, batch = Positions(), pairs(size)
    assert difference(net, lambda: contrast(net, batch), 2, backbone=net.backbone) < 1e-10


# Combinations with other techniques


def test_checkpointed_blocks_run_twice_rather_than_three_times():
    net, batch, calls = encoder(depth=3), pairs(size=8), []
    ft.apply(net, [ft.ActivationCheckpointing()])
    net.blocks[1].up.register_forward_hook(lambda *given: calls.append(1))
    micro_batch_forward_(net, 4)
    contrast(net, batch).backward()
    assert len(calls) == 2 * 4 * 2  # forward and recomputation, of 4 micro-batches, of 2 views


def test_nothing_is_split_without_gradients_or_in_evaluation():
    net, x, rows = encoder(), pairs()["a"], []
    net.blocks[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    micro_batch_forward_(net, 3)
    net.eval()
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    assert rows == [7, 7]


def test_state_dict_keys_stay_and_the_module_is_restored():
    net = encoder()
    keys = list(net.state_dict())
    restore = micro_batch_forward_(net, 3)
    assert list(net.state_dict()) == keys
    restore()
    assert "forward" not in vars(net)


def test_a_copy_of_the_module_runs_by_itself():
    net, batch = encoder(), pairs()
    expected = gradients_of(net, lambda: contrast(net, batch))
    micro_batch_forward_(net, 3)
    copied = copy.deepcopy(net)
    net.zero_grad()
    assert largest_difference(expected, gradients_of(copied, lambda: contrast(copied, batch))) < 1e-10
    assert all(p.grad is None for p in net.parameters())


def bytes_saved(make_loss: Any) -> int:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = make_loss()
    assert loss.grad_fn is not None
    return sum(kept.values())


def test_a_backbone_of_six_layers_saves_little_more_than_its_input():
    net, batch = encoder(depth=6), pairs(size=64)
    held = sum(x.nbytes for x in (*net.parameters(), *batch.values()))
    unsplit = bytes_saved(lambda: contrast(net, batch)) - held
    micro_batch_forward_(net, 8)
    assert bytes_saved(lambda: contrast(net, batch)) - held < unsplit / 8


def test_the_recomputation_holds_one_micro_batch_at_a_time():
    net, batch, alive, most = encoder(depth=6), pairs(size=64), {}, 0
    micro_batch_forward_(net, 8)
    loss = contrast(net, batch)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal most
        alive[len(alive)] = weakref.ref(output)
        most = max(most, sum(ref() is not None for ref in alive.values()))

    for block in net.blocks:
        block.up.register_forward_hook(note)
    loss.backward()
    assert len(alive) == 2 * 8 * 6
    assert most <= 6


# BatchNorm


def test_batchnorm_in_training_mode_is_refused_by_name():
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.BatchNorm1d(DIM)))
    micro_batch_forward_(net, 2)
    with pytest.raises(ValueError, match=r"Sequential with BatchNorm in training mode \('1.0'\).*GroupNorm"):
        net(torch.randn(4, DIM))
    net[1].eval()
    net(torch.randn(4, DIM))


# In the Trainer


class Matching(L.LightningModule):
    """Matches the two views of each sample against those of its batch."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.05) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(7)
        self.encoder, self.head = Encoder(dropout=dropout), nn.Linear(DIM, DIM, bias=False)
        torch.set_rng_state(state)
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        a, b = (self.head(self.encoder(batch[name])) for name in ("a", "b"))
        loss = info_nce(a, b)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


SIZES = (8, 7, 5, 3)


def batches(dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    return [{name: x.to(dtype) for name, x in pairs(size, seed=i).items()} for i, size in enumerate(SIZES)]


def steps(callbacks: Any = (), make_net: Any = Matching, given: Any = None, **settings: Any) -> Any:
    """Return the gradient of every optimizer step, the module and the trainer of one run in float64."""
    seen, net = Gradients(), make_net()
    torch.manual_seed(5)
    settings = {"precision": "64-true", **settings} if "plugins" not in settings else settings
    t = trainer([*callbacks, seen], **settings)
    t.fit(net, as_loader(given or batches()))
    return seen.seen, net, t


def worst(expected: list[dict[str, Tensor]], seen: list[dict[str, Tensor]]) -> float:
    assert len(expected) == len(seen) > 0
    return max(map(largest_difference, expected, seen))


@pytest.mark.parametrize("through", [None, "encoder", Encoder, ["encoder", "head"], "encoder.blocks.*"])
@pytest.mark.parametrize("n", [3, 16])
def test_every_gradient_is_that_of_the_unsplit_run(through, n):
    expected, _, t = steps()
    seen, net, split = steps([ft.MicroBatching(n, through=through)])
    assert worst(expected, seen) < 1e-10
    assert float(split.callback_metrics["loss"]) == pytest.approx(float(t.callback_metrics["loss"]), rel=1e-10)
    assert not any("forward" in vars(module) for module in net.modules())


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}],
    ids=["accumulation", "clipping"],
)
def test_it_composes_with_trainer_settings(settings):
    expected, *_ = steps(**settings)
    for through in (None, "encoder"):
        seen, *_ = steps([ft.MicroBatching(3, through=through)], **settings)
        assert worst(expected, seen) < 1e-10


def test_the_backbone_is_reported_in_one_log_line():
    with heard() as said:
        steps([ft.MicroBatching(3)])
    line = next(line for line in said if "recomputation" in line)
    assert line.startswith("MicroBatching: 'encoder'")
    with heard() as said:
        steps([ft.MicroBatching(3, through="encoder")])
    assert any(line.startswith("MicroBatching: 'encoder' runs") and "through=" in line for line in said)


def test_a_loss_scaler_sees_the_scaled_loss():
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))

    given = batches(torch.float32)
    expected, *_ = steps(given=given, plugins=plugin(), gradient_clip_val=0.1)
    seen, _, t = steps([ft.MicroBatching(3, through="encoder")], given=given, plugins=plugin(), gradient_clip_val=0.1)
    assert t.precision_plugin.scaler.get_scale() == 64.0
    assert worst(expected, seen) < 1e-2


@pytest.mark.parametrize("adapter", [ft.LoRA(rank=2), ft.QLoRA(rank=2, kind="int8")], ids=["LoRA", "QLoRA"])
@pytest.mark.parametrize("through", [None, "encoder"])
def test_the_backbone_may_contain_adapters(adapter, through):
    settings = {"given": batches(torch.float32), "precision": "32-true"}
    expected, *_ = steps([copy.deepcopy(adapter)], **settings)
    seen, net, _ = steps([copy.deepcopy(adapter), ft.MicroBatching(3, through=through)], **settings)
    assert worst(expected, seen) < 1e-5
    assert any("lora" in name for name in seen[0])


@pytest.mark.parametrize(
    "technique",
    [lambda: ft.ActivationCheckpointing(), lambda: ft.CompileBlocks(backend="aot_eager")],
    ids=["checkpointing", "compiled"],
)
@pytest.mark.parametrize("through", [None, "encoder"])
def test_blocks_in_the_backbone_may_be_checkpointed_or_compiled(technique, through):
    torch._dynamo.reset()
    given = [pairs(size=6, seed=i) for i in range(3)]  # of one size, so that blocks are compiled once
    expected, *_ = steps(given=given)
    seen, *_ = steps([technique(), ft.MicroBatching(3, through=through)], given=given)
    assert worst(expected, seen) < 1e-10


def test_dropout_in_the_backbone_trains_as_the_chunks_by_hand():
    class ByHand(Matching):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            a, b = (self.head(chunk_by_chunk(self.encoder, batch[name], 3)) for name in ("a", "b"))
            return info_nce(a, b)

    expected, *_ = steps(make_net=lambda: ByHand(dropout=0.3))
    seen, *_ = steps([ft.MicroBatching(3, through="encoder")], make_net=lambda: Matching(dropout=0.3))
    assert worst(expected, seen) < 1e-12


class TwoTowers(Matching):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.left, self.right = Encoder(), Encoder(depth=2)
        del self.encoder
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return info_nce(self.left(batch["a"]) * self.scale, self.head(self.right(batch["b"])))


def test_two_backbones_are_found_and_both_are_split():
    expected, *_ = steps(make_net=TwoTowers)
    with heard() as said:
        seen, *_ = steps([ft.MicroBatching(3)], make_net=TwoTowers)
    assert worst(expected, seen) < 1e-10
    line = next(line for line in said if "recomputation" in line)
    assert "'left'" in line
    assert "'right'" in line


def test_the_backbone_of_bert_for_question_answering_is_bert():
    """The second batch has truncated spans, in different samples for starts and ends."""
    case = next(case for case in LOSSES_HUGGING_FACE if case.name == "BertForQuestionAnswering")
    training = case.make(1)
    assert isinstance(training.module, transformers.BertForQuestionAnswering)
    with heard() as said:
        accumulate_gradients(training.step, training.batches[1], 3)
    assert any("'bert' runs in micro-batches" in line for line in said)


class Normed(Matching):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.blocks[1].norm = nn.BatchNorm1d(LENGTH)


def test_a_named_backbone_with_batchnorm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"BatchNorm in training mode.*blocks.1.norm"):
        steps([ft.MicroBatching(3, through="encoder")], make_net=Normed)


def test_a_backbone_is_found_around_batchnorm():
    expected, *_ = steps(make_net=Normed)
    with heard() as said:
        seen, *_ = steps([ft.MicroBatching(3)], make_net=Normed)
    assert worst(expected, seen) < 1e-10
    assert any("'encoder.blocks.0', 'encoder.blocks.2' run" in line for line in said)


class Partners(Matching):
    """Mixes each sample with another one by its index, so the step fails on a few samples."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mixed = 0.7 * batch["a"] + 0.3 * batch["a"][batch["order"]]
        return super().training_step({"a": mixed, "b": batch["b"]}, batch_idx)


class MixingEncoder(Encoder):
    def forward(self, x: Tensor, order: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x[order] + 0.5 * x)


class PartnersInside(Matching):
    """Mixes samples inside the encoder, whose blocks are the backbone."""

    def __init__(self) -> None:
        super().__init__()
        blocks, self.encoder = self.encoder.blocks, MixingEncoder()
        self.encoder.blocks = blocks

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return info_nce(*[self.head(self.encoder(batch[name], batch["order"])) for name in ("a", "b")])


def batches_with_partners() -> list[dict[str, Tensor]]:
    return [{**batch, "order": torch.arange(len(batch["a"])).flip(0)} for batch in batches()]


@pytest.mark.parametrize(
    ("make_net", "through", "backbone"),
    [
        (Partners, None, "'encoder' runs"),
        (Partners, "encoder", "'encoder' runs"),
        (PartnersInside, None, "'encoder.blocks.0', 'encoder.blocks.1'"),
        (PartnersInside, "encoder.blocks.*", "'encoder.blocks.0', 'encoder.blocks.1'"),
    ],
)
def test_a_step_that_fails_on_a_few_samples_is_tried_on_the_whole_batch(make_net, through, backbone):
    expected, *_ = steps(make_net=make_net, given=batches_with_partners())
    with heard() as said:
        seen, *_ = steps([ft.MicroBatching(3, through=through)], make_net=make_net, given=batches_with_partners())
    assert worst(expected, seen) < 1e-10
    assert any(backbone in line for line in said)


def test_a_backbone_that_mixes_samples_by_index_is_refused():
    with pytest.raises(ValueError, match="through= names 'encoder', but"):
        steps([ft.MicroBatching(3, through="encoder")], make_net=PartnersInside, given=batches_with_partners())


def test_an_error_of_a_step_in_a_loop_is_raised_as_it_is():
    def fail(x: Tensor) -> Tensor:
        raise IndexError(f"no row of {len(x)}")

    with pytest.raises(IndexError, match="no row of 6") as raised:
        accumulate_gradients(fail, torch.ones(6, 2), n=2)
    assert raised.value.__notes__ == [
        "The step raised this on unsplit samples, in a trial before the step that counts."
    ]


@pytest.mark.parametrize("through", ["enkoder", nn.LSTM, ["enkoder", nn.LSTM], UserList(["enkoder"])])
def test_unknown_names_list_the_candidates(through):
    with pytest.raises(ValueError, match=r"through=.* matches nothing: candidates are .*Block.*pattern or a class"):
        steps([ft.MicroBatching(3, through=through)])


@pytest.mark.parametrize("through", [3, ["encoder", 3], []])
def test_invalid_through_arguments_are_refused(through):
    with pytest.raises((TypeError, ValueError), match="through="):
        ft.MicroBatching(3, through=through)


class Starved(Matching):
    """A backbone that fits three samples at most."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.blocks[1].register_forward_pre_hook(self.look)
        self.starved = 0

    def look(self, module: nn.Module, args: Any) -> None:
        if len(args[0]) > 3:
            self.starved += 1
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")


@pytest.mark.parametrize("through", [None, "encoder"])
def test_auto_runs_the_backbone_in_more_micro_batches_when_memory_runs_out(through):
    expected, *_ = steps()
    auto = ft.MicroBatching("auto", through=through)
    seen, net, _ = steps([auto], make_net=Starved)
    assert worst(expected, seen) < 1e-10
    assert auto.n == 4


@pytest.mark.parametrize("through", [None, "encoder"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, through):
    def run(epochs: int, **settings: Any) -> Any:
        net, technique = Matching(dropout=0.2), ft.MicroBatching(3, through=through)
        t = trainer([technique, Seeded()], max_epochs=epochs)
        t.fit(net, as_loader(batches(torch.float32)), **settings)
        return net, t

    whole, _ = run(2)
    _, t = run(1)
    t.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = run(2, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0


class Seeded(L.Callback):
    """Draws the same random numbers in each epoch, whatever came before it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.global_step)


def test_a_window_of_several_batches_is_refused_with_a_solution():
    """Samples of several batches are never in memory together, so naming the backbone would not help."""
    for through in (None, "encoder"):
        techniques = [ft.MicroBatching(4, through=through), ft.TokenWeightedAccumulation(2)]
        with pytest.raises(ValueError, match="TokenWeightedAccumulation") as caught:
            steps(techniques)
        assert "with through=" not in str(caught.value)


# Two real processes with gloo; one launch serves all tests


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone") / "found.json"
    run_ranks("tests.micro_batching.backbone_scenarios", path, log=path.parent / "log", timeout_s=240)
    return json.loads(path.read_text())


RUNS = {
    "ddp": ("plain", "through", "blocks", "checkpointed", "found", "weighted"),
    "fsdp2": ("checkpointed", "found"),
    "zero3": ("checkpointed", "weighted"),
}


@pytest.mark.parametrize("run", [*(f"{name} {run}" for name, runs in RUNS.items() for run in runs), "ddp starved"])
def test_two_ranks_train_as_one_process_that_sees_both_batches(found, run):
    for rank in found:
        difference_of_weights, between_ranks = rank[run]
        assert difference_of_weights < 1e-6
        assert between_ranks == 0


def test_a_sharded_backbone_with_dependent_samples_is_refused(found):
    for rank in found:
        assert "through= names 'encoder', but" in rank["mixed"]


def test_all_ranks_use_more_micro_batches_when_one_runs_out_of_memory(found):
    assert [rank["starved n"] for rank in found] == [4, 4]


def test_one_rank_may_recheck_a_batch_while_the_other_does_not(found):
    assert all(rank["loop"] < 1e-6 for rank in found)
