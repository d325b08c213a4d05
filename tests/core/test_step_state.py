"""What a training step can change is seen by name and restored to the last bit, on a model that holds all of it."""

import collections
import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_fasttrain.core.state import step_state
from lightning_fasttrain.core.state.step_state import StepState, copy_value, same_values


@dataclasses.dataclass
class History:
    steps: int = 0
    values: list = dataclasses.field(default_factory=list)


class Holder:
    def __init__(self):
        self.count, self.tensor = 0, torch.zeros(3)


class Slotted:
    __slots__ = ("__hidden", "count", "values")

    def __init__(self):
        self.count, self.values, self.__hidden = 0, [], 0

    def hide(self):
        self.__hidden += 1


class Everything(nn.Module):
    """A model with one piece of state of every kind."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.net).requires_grad_(requires_grad=False)
        self.norm, self.deep = nn.BatchNorm1d(6), nn.Sequential(nn.Linear(2, 2))
        self.register_buffer("buffer", torch.zeros(2))
        self.metric = torchmetrics.MeanMetric()
        self.queue, self.big, self.step = torch.zeros(4, 4), torch.zeros(400), 0
        self.losses, self.recent = [], collections.deque(maxlen=3)
        self.counts, self.lists = collections.Counter(a=2), collections.defaultdict(list)
        self.history, self.holder, self.slotted = History(), Holder(), Slotted()
        self.pair = ([0], {"deep": [torch.zeros(2)]})
        self.array, self.seen = np.zeros(3), {1}
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.numpy, self.older = np.random.default_rng(0), np.random.RandomState(0)


def lerp(teacher, student):
    for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
        one.lerp_(other, 0.1)


def lerp_data(teacher, student):
    for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)


@pytest.fixture(autouse=True)
def _few_bytes_are_large(monkeypatch):
    monkeypatch.setattr(step_state, "_LARGE", 1000)


# What a step does → the names that must be reported.
CHANGES = {
    "a teacher by lerp_": (lambda m: lerp(m.teacher, m.net), "teacher.0.weight"),
    "a teacher by .data": (lambda m: lerp_data(m.teacher, m.net), "teacher.2.bias"),
    "a teacher in lists": (
        lambda m: torch._foreach_lerp_(list(m.teacher.parameters()), list(m.net.parameters()), 0.1),
        "teacher.0.bias",
    ),
    "rows of a weight": (lambda m: m.teacher[0].weight[:2].mul_(0.5), "teacher.0.weight"),
    "load_state_dict": (
        lambda m: m.teacher.load_state_dict({name: 2 * value for name, value in m.net.state_dict().items()}),
        "teacher.0.weight",
    ),
    "other data": (lambda m: setattr(m.teacher[0].weight, "data", m.net[0].weight.data * 2), "teacher.0.weight"),
    "set_": (lambda m: m.teacher[0].weight.set_(torch.ones(16, 6)), "teacher.0.weight"),
    "another teacher": (lambda m: setattr(m, "teacher", copy.deepcopy(m.net)), "teacher"),
    "another parameter": (lambda m: setattr(m.net[0], "bias", nn.Parameter(torch.ones(16))), "net.0.bias"),
    "a frozen parameter": (lambda m: m.net[0].weight.requires_grad_(requires_grad=False), "net.0.weight"),
    "a late parameter": (lambda m: m.register_parameter("late", nn.Parameter(torch.ones(2))), "late"),
    "a late submodule": (lambda m: m.deep.append(nn.Linear(2, 2)), "deep.1"),
    "another tensor": (lambda m: setattr(m, "queue", m.queue + 1), "queue"),
    "a tensor in place": (lambda m: m.queue.add_(1), "queue"),
    "a tensor by .data": (lambda m: m.queue.data.add_(1), "queue"),
    "a row of a large tensor": (lambda m: m.big[3:4].add_(1), "big"),
    "a number": (lambda m: setattr(m, "step", m.step + 1), "step"),
    "a new attribute": (lambda m: setattr(m, "hidden", torch.ones(2)), "hidden"),
    "a deleted attribute": (lambda m: delattr(m, "step"), "step"),
    "a list": (lambda m: m.losses.append(1), "losses"),
    "a deque": (lambda m: m.recent.append(2), "recent"),
    "a list of a dataclass": (lambda m: m.history.values.append(m), "history.values"),
    "a dataclass": (lambda m: setattr(m.history, "steps", 4), "history.steps"),
    "a Counter": (lambda m: m.counts.update("ab"), "counts['a']"),
    "a defaultdict": (lambda m: m.lists["x"].append(1), "lists['x']"),
    "an object": (lambda m: setattr(m.holder, "count", 2), "holder.count"),
    "the tensor of an object": (lambda m: m.holder.tensor.add_(1), "holder.tensor"),
    "a slot": (lambda m: setattr(m.slotted, "count", 3), "slotted.count"),
    "a private slot": (lambda m: m.slotted.hide(), "slotted._Slotted__hidden"),
    "the list of a slot": (lambda m: m.slotted.values.append(3), "slotted.values"),
    "a list in a tuple": (lambda m: m.pair[0].append(1), "pair[0]"),
    "a tensor deep inside": (lambda m: m.pair[1]["deep"][0].add_(1), "pair[1]['deep'][0]"),
    "a set": (lambda m: m.seen.add(5), "seen"),
    "an array": (lambda m: m.array.__iadd__(1), "array"),
    "a buffer": (lambda m: m.buffer.add_(1), "buffer"),
    "a buffer by .data": (lambda m: m.buffer.data.add_(1), "buffer"),
    "another buffer": (lambda m: setattr(m, "buffer", m.buffer + 1), "buffer"),
    "batch normalization": (lambda m: m.norm(torch.randn(4, 6)), "norm.running_mean"),
    "a metric": (lambda m: m.metric.update(3.0), "metric.weight"),
    "a generator of torch": (lambda m: torch.rand(3, generator=m.generator), "generator"),
    "a generator of Python": (lambda m: m.python.random(), "python"),
    "a generator of NumPy": (lambda m: m.numpy.random(), "numpy"),
    "an older generator of NumPy": (lambda m: m.older.rand(), "older"),
    "an attribute of a submodule": (lambda m: setattr(m.deep[0], "calls", 1), "deep.0.calls"),
    "the training mode": (lambda m: m.net.eval(), "net.1.training"),
}


def contents(value, depth=0):
    """All that hangs on a value, by value: independent of the walk that is tested."""
    if isinstance(value, torch.Tensor):
        shown = value.detach().double()
        return shown.tolist() if value.numel() < 500 else float(shown.sum()), value.requires_grad
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random | np.random.RandomState):
        return str((value.getstate if isinstance(value, random.Random) else value.get_state)())
    if isinstance(value, dict):
        return {str(key): contents(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | collections.deque | set):
        return [contents(item, depth + 1) for item in value]
    if isinstance(value, Slotted):
        return contents([value.count, value.values, value._Slotted__hidden])
    if isinstance(value, Everything | nn.Module | Holder | History) and depth < 9:
        return contents(vars(value), depth + 1)
    return str(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_named_and_restored(what):
    change, name = CHANGES[what]
    model = Everything()
    with torch.no_grad():
        lerp(model.teacher, Everything().net)
    before, identities = contents(model), [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    state = StepState([model])
    for _ in range(2):  # it can be restored several times
        with state.watch(), torch.no_grad():
            change(model)
        assert name in state.changed()
        assert contents(model) != before
        state.restore()
        assert state.changed() == []
        assert contents(model) == before
        assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == identities


def test_reading_alone_changes_nothing_and_copies_no_parameter():
    model = Everything().eval()
    state = StepState([model])
    with state.watch():
        model.net(torch.ones(2, 6)).sum().backward()
    assert state.changed() == []
    assert all(held.copy is None for held in state._tensors if isinstance(held.tensor, nn.Parameter))
    versions = [parameter._version for parameter in model.parameters()]
    state.restore()
    assert [parameter._version for parameter in model.parameters()] == versions


def test_random_states_are_those_of_before():
    state = StepState([])
    drawn = torch.rand(2), random.random(), np.random.rand()
    state.restore()
    assert torch.equal(torch.rand(2), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]


def test_what_cannot_be_restored_is_named():
    model = nn.Linear(1, 1)
    model.samples, model.numbers = iter([1, 2]), (number for number in range(3))
    assert StepState([model]).unknown == ["samples", "numbers"]


def test_several_modules_are_told_apart_and_shared_ones_are_visited_once():
    first, second = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    second.append(first)
    first.calls = 0
    state = StepState([first, second])
    first.calls += 1
    assert state.changed() == ["Linear0.calls"]


def test_objects_that_refer_to_one_another_end():
    model = nn.Linear(1, 1)
    model.holder = Holder()
    model.holder.owner, model.holder.itself = model, model.holder
    model.holder.deep = [model.holder]
    state = StepState([model])
    model.holder.count += 1
    assert state.changed() == ["holder.count"]


def test_a_hidden_state_with_a_graph_is_restored_and_its_graph_is_freed():
    model = nn.Linear(2, 2)
    model.hidden = model(torch.ones(1, 2))
    state = StepState([model])
    before = model.hidden
    model.hidden, model.other = model(model.hidden), model(torch.ones(1, 2))
    assert state.changed() == ["hidden", "other"]
    state.restore()
    assert model.hidden is before
    assert not hasattr(model, "other")


def test_parameters_that_a_strategy_moves_are_left_alone():
    model = nn.Linear(2, 2)
    model.step, moved = 0, nn.Parameter(torch.ones(2, 2))
    state = StepState([model], parameters=False)
    model.weight, model.step = moved, 1
    assert state.changed() == ["step"]
    state.restore()
    assert model.weight is moved
    assert model.step == 0


def test_scripted_modules_are_watched():
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    state = StepState([model])
    with state.watch():
        model(torch.randn(4, 2))
    assert "0.running_mean" in state.changed()
    state.restore()
    assert state.changed() == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.ones(3), torch.ones(3) * (1 + 1e-6), True),
        (torch.ones(3), torch.ones(3) * 1.01, False),
        (torch.ones(3), torch.ones(4), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        ([1, {"a": 2.0}], [1, {"a": 2.0 + 1e-9}], True),
        ([1, {"a": 2}], [1, {"a": 3}], False),
        ({1, 2}, {2, 1}, True),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (np.array([1.0]), np.array([2.0]), False),
    ],
)
def test_values_are_compared_within_a_tolerance(one, other, same):
    assert same_values(copy_value(one), copy_value(other), tolerance=1e-5) is same


def test_hooks_that_a_first_forward_installs_are_removed_with_the_flag_that_says_so():
    model, ran = nn.Linear(1, 1), []

    def forward(x):
        if not getattr(model, "is_ready", False):
            model.register_forward_hook(lambda *_: ran.append(1))
            model.is_ready = True
        return x

    model.forward = forward
    state = StepState([model])
    for _ in range(2):
        model(torch.ones(1))
        assert state.changed() == ["is_ready"]
        state.restore()
    model(torch.ones(1))
    ran.clear()
    model(torch.ones(1))
    assert ran == [1]


WRITES = {
    "in place": lambda p: p.mul_(1.5),
    "by its data": lambda p: p.data.mul_(1.5),
    "by a view": lambda p: p.data.view(-1)[:1].add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_that_nothing_watched_are_named_and_those_to_copies_are_restored(write):
    net = nn.Linear(2, 2)
    before = net.weight.detach().clone()
    for copied in ([], ["weight"]):
        state = StepState([net])
        state.copy(copied)
        state.note_sizes()
        with torch.no_grad():
            write(net.weight)
        assert state.list_lost() == ([] if copied else ["weight"])
        state.restore()
        assert torch.equal(net.weight, before) is bool(copied)
        with torch.no_grad():
            net.weight.copy_(before)


class Flat(nn.Module):
    """Its parameters are parts of one storage, as those of an LSTM on a GPU."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(8)
        self.first, self.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])


@pytest.mark.parametrize("write", [lambda net: net.second.data.zero_(), lambda net: net.second[1:].data.zero_()])
def test_of_several_tensors_in_one_storage_the_written_one_is_named_and_restored(write):
    net = Flat()
    before, state = copy.deepcopy(net.state_dict()), StepState([net])
    with state.watch():
        write(net)
    assert state.changed() == ["second"]
    state.restore()
    assert same_values(net.state_dict(), before)


def test_a_write_of_the_same_values_is_noted_for_the_written_tensor_alone():
    net = Flat()
    state = StepState([net])
    with state.watch():
        net.first.data.mul_(1.0)
    assert state.list_unchanged_writes() == ["first"]


@pytest.mark.parametrize("keep", [StepState.copy_all, StepState.copy_if_small], ids=["all", "small"])
def test_what_is_copied_at_once_is_restored(keep):
    net = Flat()
    before, state = copy.deepcopy(net.state_dict()), StepState([net])
    with state.watch():
        net.first.data.zero_()
        keep(state)
        net.second.data.zero_()
    assert state.changed() == ["first", "second"]
    state.restore()
    assert same_values(net.state_dict(), before)


def test_a_large_model_stays_watched():
    net = nn.Linear(2**11, 2**10, bias=False)
    state = StepState([net])
    with state.watch():
        state.copy_if_small()
        copied = [held.copy for held in state._tensors]
        net.weight.data.zero_()
    assert copied == [None]
    assert state.changed() == ["weight"]


def test_buffers_are_left_alone_where_only_attributes_are_asked_for():
    net = nn.BatchNorm1d(2)
    net.calls = torch.zeros(())
    state = StepState([net], parameters=False, buffers=False)
    net(torch.randn(4, 2))
    net.calls += 1
    assert state.changed() == ["calls"]
    state.restore()
    assert (net.num_batches_tracked, net.calls) == (1, 0)
