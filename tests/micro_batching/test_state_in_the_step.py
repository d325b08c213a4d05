"""A step that changes its own state does so once a batch: in micro-batches as in the unsplit run, or it is refused."""

import collections
import copy
import dataclasses
import functools
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from tests.support.nets import heard, trainer


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Step(L.LightningModule):
    """Distils a student from what ``target`` returns; subclasses hold the state."""

    def __init__(self):
        super().__init__()
        self.student = build()
        self.double()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.student(batch[0]), self.target(batch[1]))

    def target(self, x):
        return x[:, :4] * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), 0.5)


class Teacher(Step):
    """The teacher is written at the start of a step, as in BYOL; at first it equals the student."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    def target(self, x):
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.write(one, other)
        return self.teacher(x).detach()

    def write(self, one, other):
        one.lerp_(other, 0.1)


class TeacherByData(Teacher):
    def write(self, one, other):
        one.data = one.data * 0.9 + other.data * 0.1


class Queue(Step):
    """The oldest targets leave a queue in an attribute, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.queue = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()

    def target(self, x):
        target = x[:, :4] + self.queue.mean(0)
        self.queue = torch.cat([self.student(x).detach(), self.queue])[:12]
        return target


class WarmUp(Step):
    """An own counter scales the targets."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def target(self, x):
        self.count += 1
        return x[:, :4] * min(1.0, self.count / 4)


@dataclasses.dataclass
class Running:
    mean: float = 0.0
    seen: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class RunningMean(Step):
    """A mean in a dataclass, of numbers that are no tensors."""

    def __init__(self):
        super().__init__()
        self.running = Running()

    def target(self, x):
        self.running.mean = 0.9 * self.running.mean + 0.1 * float(x.mean())
        self.running.seen["steps"] += 1
        return x[:, :4] - self.running.mean


class Recent(Step):
    """A deque of what the last steps returned."""

    def __init__(self):
        super().__init__()
        self.recent = collections.deque(maxlen=3)

    def target(self, x):
        target = x[:, :4] + sum(self.recent, torch.zeros(4).double())
        self.recent.append(x[:, :4].mean(0))
        return target


class Centre(Step):
    """A running centre in a buffer, as in DINO."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4).double())

    def target(self, x):
        self.centre.lerp_(x[:, :4].mean(0), 0.1)
        return x[:, :4] - self.centre


class Carried(Step):
    """A hidden state on a submodule, from step to step."""

    def target(self, x):
        hidden = getattr(self.student[0], "hidden", 0.0)
        self.student[0].hidden = x[:, :4].mean(0).detach() + 0.5 * hidden
        return x[:, :4] + hidden


STATEFUL = (Teacher, TeacherByData, Queue, WarmUp, RunningMean, Recent, Centre, Carried)
DATA = torch.randn(2, 32, 6, generator=torch.Generator().manual_seed(0)).double()
LOADER = DataLoader(TensorDataset(*DATA), 8)


def train(kind, callbacks):
    torch.manual_seed(0)
    module = kind()
    trainer(callbacks).fit(module, LOADER)
    return module


def train_in_a_loop(kind, n):
    torch.manual_seed(0)
    module = kind()
    optimizer = module.configure_optimizers()
    for batch in LOADER:
        ft.accumulate_gradients(lambda part: module.training_step(part, 0), batch, n)
        optimizer.step()
        optimizer.zero_grad()
    return module


def differ(one, other):
    """The largest difference of weights and buffers, relative to one."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("n", [2, 4, "auto"])
@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_the_state_advances_once_a_batch(kind, n):
    plain, ours = train(kind, []), train(kind, [ft.MicroBatching(n)])
    assert differ(plain, ours) < 1e-12
    without = [value for name, value in train(Step, []).state_dict().items() if name.startswith("student.")]
    trained = [value for name, value in ours.state_dict().items() if name.startswith("student.")]
    assert max(float((a - b).abs().max()) for a, b in zip(without, trained, strict=True)) > 1e-4  # it acts


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_the_state_advances_once_a_batch_in_a_loop(kind):
    assert differ(train_in_a_loop(kind, 1), train_in_a_loop(kind, 2)) < 1e-12


@pytest.mark.parametrize("kind", [Teacher, Queue, WarmUp], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("technique", [ft.TokenWeightedAccumulation, ft.loaders.GlobalBatch], ids=["window", "global"])
def test_a_trial_of_whole_batches_leaves_no_trace(kind, technique):
    size = 1 if technique is ft.TokenWeightedAccumulation else 8
    assert differ(train(kind, []), train(kind, [technique(size)])) < 1e-12


class Scratch(Step):
    """What a step writes before it reads it is no state: a cached output, a value to log, a lazy flag."""

    def target(self, x):
        self.student[0].output, self.last = x.mean(), float(x.mean())
        self.is_ready = True
        self.cache = getattr(self, "cache", torch.arange(4.0).double())
        return x[:, :4] + self.cache


class Filled(Step):
    """A list that gets an entry a step, as for the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.detach())
        return loss


def test_what_a_step_only_writes_costs_nothing():
    with heard() as said:
        assert differ(train(Scratch, []), train(Scratch, [ft.MicroBatching(2)])) < 1e-12
    assert "recomputation" not in " ".join(said)


def test_a_list_that_is_filled_is_reported_by_name():
    with heard() as said:
        ours = train(Filled, [ft.MicroBatching(2)])
    assert differ(train(Filled, []), ours) < 1e-12
    assert len(ours.kept) == 8
    assert "'kept' gets an entry for each micro-batch" in " ".join(said)


class Everywhere(Step):
    """No submodule can run by itself: the state is inside the network."""

    def __init__(self):
        super().__init__()
        self.student = Counting().double()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 4), 0

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.inner.weight, self.inner.bias) / self.calls


def test_what_no_split_can_keep_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"the step changes 'student\.calls', and would do so in each micro-batch"):
        train(Everywhere, [ft.MicroBatching(2)])


class SlowTeacher(Teacher):
    """It moves by less than a hundred-thousandth of its size in a step."""

    def __init__(self):
        super().__init__()
        for parameter in self.teacher.parameters():
            parameter.data *= 1.01

    def write(self, one, other):
        one.lerp_(other, 1e-4)


def test_a_teacher_that_moves_by_a_millionth_is_updated_once_a_batch():
    plain, ours = train(SlowTeacher, []), train(SlowTeacher, [ft.MicroBatching(4)])
    moved = [value for name, value in plain.state_dict().items() if name.startswith("teacher.")]
    kept = [value for name, value in ours.state_dict().items() if name.startswith("teacher.")]
    assert max(float((a - b).abs().max()) for a, b in zip(moved, kept, strict=True)) < 1e-12


class Renewed(Step):
    """A codebook in a parameter, which is renewed only where few samples run together."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4).double(), requires_grad=False)

    def target(self, x):
        if len(x) < 4:
            self.codes.data.mul_(2)
        return x[:, :4]


def test_a_parameter_that_only_few_samples_write_is_restored_after_the_trial():
    module = Renewed()
    with pytest.raises(ValueError, match="the step changes 'codes'"):
        ft.micro_batching.find_count(lambda batch: module.training_step(batch, 0), next(iter(LOADER)))
    assert module.codes.tolist() == [1.0] * 4


class CountedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x).square().mean()


class Called:
    """A step that is an object, as one that logs or mixes in another loss."""

    def __init__(self, step):
        self.step = step

    def __call__(self, batch):
        return self.step(batch)


def from_list(model):
    models = [model]
    return lambda batch: models[0](batch)


def from_dict(model):
    models = {"generator": model}
    return lambda batch: models["generator"](batch)


def from_runner(model):
    runner = SimpleNamespace(model=model)
    return lambda batch: runner.model(batch)


HOLDERS = {
    "an object": Called,
    "an object in another": lambda model: Called(Called(model)),
    "a function in an object": lambda model: Called(lambda batch: model(batch)),
    "a list": from_list,
    "a dict": from_dict,
    "a runner": from_runner,
    "a partial function": lambda model: functools.partial(Called.__call__, Called(model)),
}


@pytest.mark.parametrize("holds", HOLDERS.values(), ids=HOLDERS)
def test_a_model_is_found_wherever_a_step_holds_it(holds):
    model = CountedLoss()
    with pytest.raises(ValueError, match="the step changes 'calls'"):
        ft.accumulate_gradients(holds(model), torch.ones(4, 6), 2)
    assert float(model.calls) == 0


def test_a_trial_leaves_no_trace_in_a_model_that_is_not_found():
    model = CountedLoss()
    models = SimpleNamespace(all=SimpleNamespace(first=SimpleNamespace(model=model)))
    ft.accumulate_gradients(lambda batch: models.all.first.model(batch), torch.ones(4, 6), 2)
    assert float(model.calls) == 2  # of the micro-batches


class SumOfSquares(nn.Linear):
    def __init__(self):
        super().__init__(6, 1)

    def forward(self, x):
        return super().forward(x).square().sum()


def test_steps_of_the_same_code_with_other_models_are_tried_each():
    ft.accumulate_gradients(from_list(SumOfSquares()), torch.ones(4, 6), 2)
    with pytest.raises(ValueError, match="the step changes 'calls'"):
        ft.accumulate_gradients(from_list(CountedLoss()), torch.ones(4, 6), 2)


def test_steps_of_the_same_code_with_other_flags_are_tried_each():
    model, batch = nn.Linear(6, 1), torch.arange(24.0).view(4, 6)

    def loss(is_mean, batch):
        return model(batch).square().sum() / (len(batch) if is_mean else 1)

    def make(is_mean):
        return lambda batch: loss(is_mean, batch)

    partials = (functools.partial(loss, is_mean) for is_mean in (False, True))
    for step in [make(is_mean=False), make(is_mean=True), *partials]:
        model.zero_grad()
        ft.accumulate_gradients(step, batch, 2)
        whole = torch.autograd.grad(step(batch), model.weight)[0]
        torch.testing.assert_close(model.weight.grad, whole)


def test_rounded_products_under_distillation_are_tried_without_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    distillation = ft.loss.Distillation(copy.deepcopy(model), alpha=0.5, head="2")
    with ft.apply(model, [distillation, ft.model.LowPrecisionProducts("int8", min_features=8)]):
        step = distillation.distil(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        batch = torch.randn(32, 64), torch.randint(8, (32,))
        ft.accumulate_gradients(step, batch, 4)
    assert all(parameter.grad is not None for parameter in model.parameters())
