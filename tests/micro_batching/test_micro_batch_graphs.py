"""Micro-batches that are replayed as one CUDA graph train as those that run, and what cannot be repeated is refused."""

import random
import re

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.loaders import prefetch_to_device
from lightning_fasttrain.micro_batching.micro_batch_graphs import MicroBatchGraphs, refuse_graphs
from lightning_fasttrain.micro_batching.normalizer.count_targets import CountRule
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit
from lightning_fasttrain.planner import auto_batch_size
from tests.support.device_calls import STAND_IN, DeviceCalls
from tests.support.nets import TinyLM, fit, lm_batches

pytestmark = pytest.mark.filterwarnings("ignore:Total length of")

BATCHES, STEP = 10, 6  # graphs are recorded in the fourth batch
on_a_card = pytest.mark.skipif(STAND_IN, reason="a simulated driver computes no values")


class Net(L.LightningModule):
    def __init__(self, fused=True):
        super().__init__()
        self.net, self.fused, self.seen = GPT(GPTConfig(context=32, layers=2, heads=2, width=32)), fused, []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "half": loss.detach() / 2}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"].clone(), outputs["half"].clone()))

    def on_before_optimizer_step(self, optimizer):
        self.gradients = [parameter.grad.clone() for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)


def batches_of(count=BATCHES, rows=8, length=32):
    made = []
    for seed in range(count):
        ids = torch.randint(0, 200, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
        labels = ids[:, 1:].clone()
        labels[: rows // 2, length - seed % 5 :] = -100
        made.append({"input_ids": ids[:, :-1].contiguous().pin_memory(), "labels": labels.pin_memory()})
    return made


def micro(cuda_graph=True, n=4, **settings):
    return ft.MicroBatching(n, count="targets", check=False, trim_padding=False, cuda_graph=cuda_graph, **settings)


def trained(techniques, batches=None, module=None, **settings):
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # put back by fixtures.py
    module = Net() if module is None else module
    batches = batches_of() if batches is None else batches
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=len(batches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=techniques,
        **settings,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


@pytest.fixture
def replays(monkeypatch):
    """The graphs of a run, to count what they replayed."""
    found = []

    def note(self, *args, make=MicroBatchGraphs.__init__):
        found.append(self)
        make(self, *args)

    monkeypatch.setattr(MicroBatchGraphs, "__init__", note)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "most"), [(4, 60), (8, 90)])
def test_a_step_launches_one_graph_a_micro_batch_and_waits_for_nothing(n, most):
    calls = DeviceCalls(STEP)  # a wait is an error
    trained([micro(n=n), ft.DevicePrefetch(), calls])
    assert calls.allocations == 0
    if STAND_IN:
        assert calls.launches <= most


def test_none_does_nothing_and_true_is_refused_on_a_cpu():
    assert not ft.MicroBatching(2).cuda_graph
    fit(TinyLM(), lm_batches(2), [ft.MicroBatching(2, cuda_graph=None)])
    message = "cuda_graph=True on cpu: only a CUDA device replays graphs. Leave cuda_graph out."
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(TinyLM(), lm_batches(2), [ft.MicroBatching(2, cuda_graph=True)])
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        ft.accumulate_gradients(lambda x: net(x).mean(), torch.ones(4, 2), 2, cuda_graph=True)


def test_the_search_for_a_fitting_number_is_refused():
    with pytest.raises(ValueError, match="cuda_graph=True with n='auto'"):
        ft.MicroBatching("auto", cuda_graph=True)


@pytest.mark.parametrize("other", [ft.ActivationOffload(), ft.profiling.GradientNoiseScale()])
def test_techniques_that_act_in_the_backward_are_refused(other):
    with pytest.raises(ValueError, match="a replayed CUDA graph leaves it out. Leave cuda_graph out"):
        fit(TinyLM(), lm_batches(2), [micro(), other])


def hooked_weight():
    net = nn.Linear(2, 2)
    net.weight.register_hook(lambda gradient: gradient)
    return net


def hooked_module():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda *_: None)
    return net


COUNTED = LossSplit(None, CountRule("targets"))
REFUSED = {
    "a hook on 'weight'": (hooked_weight, COUNTED, True),
    "a hook on '0'": (hooked_module, COUNTED, True),
    "SGD: a step with a wrong weight": (lambda: nn.Linear(2, 2), COUNTED, False),
    "a loss that is a sum": (lambda: nn.Linear(2, 2), LossSplit(None, CountRule("sum")), True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_would_leave_out_is_refused_by_name(what):
    make, split, fused = REFUSED[what]
    net = make()
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.param_groups[0]["fused"] = fused
    with pytest.raises(ValueError, match=f"cuda_graph=True with {what}"):
        refuse_graphs([net], optimizer, split)


class ReadsIndex(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 0)["loss"] * (2 if batch_idx % 2 else 1)


class HasMetric(Net):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()


class ActsAfterBackward(Net):
    def on_after_backward(self):
        pass


class Draws(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, 0)
        return {**output, "loss": output["loss"] * random.random()}


class Meta:
    """What a batch may hold beside tensors, which nobody else can read."""


RUNS = {
    "a loss scaler": (Net, {"precision": "16-mixed"}),
    "accumulate_grad_batches": (Net, {"accumulate_grad_batches": 2}),
    "a training_step that reads batch_idx": (ReadsIndex, {}),
    "a torchmetrics object": (HasMetric, {}),
    "ActsAfterBackward": (ActsAfterBackward, {}),
    "AdamW": (lambda: Net(fused=False), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", RUNS)
def test_runs_that_a_graph_cannot_repeat_are_refused_by_name(what):
    make, settings = RUNS[what]
    with pytest.raises(ValueError, match=f"cuda_graph=True.* with {what}"):
        trained([micro()], module=make(), **settings)


@pytest.mark.gpu
def test_objects_in_a_batch_that_may_hold_tensors_are_refused():
    batches = [{**batch, "meta": Meta()} for batch in batches_of()]
    with pytest.raises(ValueError, match=re.escape("cuda_graph=True with batch['meta'], a Meta")):
        trained([micro()], batches)


@pytest.mark.gpu
def test_graphs_are_recorded_anew_where_the_model_has_changed(replays):
    class Unfreezes(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.net.head.requires_grad_(batch_idx != 6)

    trained([micro()], module=Unfreezes())
    # The first micro-batch after each change runs, and shows which parameters have a gradient.
    assert replays[0].replays == 4 * (BATCHES - 3) - 3


@pytest.mark.gpu
def test_random_numbers_of_the_host_are_refused():
    with pytest.raises(ValueError, match="draws random numbers on the host"):
        trained([micro()], module=Draws())


TOGETHER = {
    "recomputation": (lambda: [ft.ActivationCheckpointing()], {}),
    "bf16-mixed and clipping": (lambda: [ft.FusedClipping()], {"gradient_clip_val": 1.0, "precision": "bf16-mixed"}),
    "bf16-true": (list, {"precision": "bf16-true"}),
    "fused head": (lambda: [ft.FusedLossHead("net.head")], {}),
    "early release": (lambda: [ft.EagerGradientRelease(), ft.DevicePrefetch()], {}),
    "adapters": (lambda: [ft.LoRA(rank=2)], {}),
    "average": (lambda: [ft.optim.WeightEMA()], {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOGETHER)
def test_micro_batches_are_replayed_beside_other_techniques(name, replays):
    make, settings = TOGETHER[name]
    replayed = trained([*make(), micro()], **settings)
    assert replays[0].replays == 4 * (BATCHES - 4) + 3  # the first three batches, and one micro-batch, ran
    if not STAND_IN:
        plain = trained([*make(), micro(cuda_graph=None)], **settings)
        assert all(map(torch.equal, replayed.parameters(), plain.parameters()))


@pytest.mark.gpu
def test_the_mixin_alone_replays_them(replays):
    class Mixed(ft.FastTrainMixin, Net):
        def __init__(self):
            super().__init__()
            self.techniques = [micro()]

    trained([], module=Mixed())
    assert replays[0].replays == 4 * (BATCHES - 4) + 3


class Counted(ft.MicroBatching):
    """Split by a count that is named, since a simulated driver has no values to find it by."""

    def __init__(self, n, cuda_graph=None):
        super().__init__(n, count="targets", check=False, trim_padding=False, cuda_graph=cuda_graph)


@pytest.mark.gpu
def test_the_number_that_fits_is_replayed_and_a_batch_that_fits_whole_runs(replays, monkeypatch):
    monkeypatch.setattr(auto_batch_size, "MicroBatching", Counted)
    batches = batches_of(rows=1024)
    whole = ft.AutoBatchSize(4.0, cuda_graph=True)
    trained([whole], batches)
    assert (whole.parts, replays) == (1, [])
    auto = ft.AutoBatchSize(0.7 * whole.measured_bytes / 2**30, cuda_graph=True)
    trained([auto], batches)
    assert auto.parts > 1
    assert replays[-1].replays == auto.parts * (BATCHES - 3) - 1


@pytest.mark.gpu
def test_other_shapes_have_graphs_of_their_own_up_to_a_number(replays):
    lengths = [32, 32, 32, 32, *range(8, 28, 2), 32]
    batches = [batches_of(1, length=length)[0] for length in lengths]
    trained([micro()], batches)
    # One at length 32, seven at others; the others run, and the last batch is replayed again.
    assert replays[0].replays == 3 + 7 * 4 + 4


class Tuned(Net):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=200, use_cache=False, **sizes))

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        return {"loss": loss, "half": loss.detach() / 2}


@pytest.mark.gpu
def test_a_mask_that_hides_nothing_and_one_of_padding_have_a_graph_each(replays, monkeypatch):
    monkeypatch.setattr(MicroBatchGraphs, "close", lambda self: None)
    batches = batches_of()
    for place, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, 30:] = place not in (4, 7)
    trained([micro()], batches, Tuned())
    assert replays[0].replays == 4 * (BATCHES - 4) + 3
    graphs = [graph for alike in replays[0]._graphs.values() for graph in alike]
    assert [graph.facts for graph in graphs] == [
        {"batch['attention_mask']": (True, False)},
        {"batch['attention_mask']": (False, False)},
    ]


@pytest.mark.gpu
@on_a_card
def test_gradients_and_losses_are_those_of_micro_batches_that_run():
    graphs, plain = (trained([micro(cuda_graph)], batches_of(20)) for cuda_graph in (True, None))
    assert all(map(torch.equal, graphs.gradients, plain.gradients))
    for seen, expected in zip(graphs.seen, plain.seen, strict=True):
        assert all(map(torch.equal, seen, expected))


@pytest.mark.gpu
@on_a_card
def test_a_step_of_another_normalizer_is_left_out_and_reported():
    class Other(Net):
        def training_step(self, batch, batch_idx):
            counted = (batch["labels"] != -100) & (batch["input_ids"] < 1000)
            logits = self.net(batch["input_ids"]).flatten(0, 1)
            labels = torch.where(counted, batch["labels"], -100)
            return F.cross_entropy(logits, labels.flatten())

    batches = batches_of()
    module = Other()
    batches[STEP]["input_ids"][0, :2] = 1000  # none of the samples that were tried has such tokens
    with pytest.raises(RuntimeError, match="its update was left out"):
        trained([ft.MicroBatching(4, trim_padding=False, cuda_graph=True)], batches, module)


@pytest.mark.gpu
def test_accumulate_gradients_replays_graphs_and_waits_for_nothing(replays):
    torch.backends.cuda.enable_cudnn_sdp(False)
    net = GPT(GPTConfig(context=32, layers=2, heads=2, width=32)).cuda()

    def step(batch):
        return F.cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    for place, batch in enumerate(prefetch_to_device(batches_of(), "cuda")):
        torch.cuda.set_sync_debug_mode("error" if place == STEP else "default")
        ft.accumulate_gradients(step, batch, 4, count="targets", check=False, cuda_graph=True)
        if not STAND_IN:
            replayed = [parameter.grad.clone() for parameter in net.parameters()]
            net.zero_grad()
            ft.accumulate_gradients(step, batch, 4, count="targets", check=False)
            assert all(torch.equal(a, b.grad) for a, b in zip(replayed, net.parameters(), strict=True))
        net.zero_grad()
    assert replays[0].replays == 4 * (BATCHES - 4) + 3
