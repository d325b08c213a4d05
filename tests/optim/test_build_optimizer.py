"""Every optimizer that has a name: how it is made, that it trains in every host, resumes, and keeps what it says."""

import io

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.optim import (
    HostOptimizer,
    optimizer_state_bytes,
)
from lightning_fasttrain.optim.named._known import KNOWN
from lightning_fasttrain.optim.named.state_bytes import tensors_in
from tests.nets import as_loader, fit, largest_difference, trainer, weights

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

CONFIG = GPTConfig(vocabulary=17, context=16, layers=2, heads=2, width=64)  # matrices large enough for 8 bits
SETTINGS = {"galore": {"rank": 2, "update_every": 2}}
OFFLOADED = tuple(name for name, known in KNOWN.items() if "offload" not in known.refuses and name != "adamw4bit")
LOW = ("sgd", "adamw", "adafactor", "lion", "muon", "adamw8bit")
NEEDS = {"adamw4bit": "torchao", "schedule-free": "schedulefree"}


def each_name(names):
    rows = []
    for name in names:
        skip = pytest.mark.skipif(not is_there(NEEDS.get(name)), reason=f"{NEEDS.get(name)} is not installed")
        rows.append(pytest.param(name, marks=skip))
    return rows


def is_there(package):
    if package is None:
        return True
    try:
        __import__(package)
    except ModuleNotFoundError:
        return False
    return True


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes a minute on a CPU
        yield


class NamedLM(ft.FastTrainMixin, GPTModule):
    """The reference GPT, small, with the optimizer of a name."""

    def __init__(self, name="adamw", **more):
        torch.manual_seed(7)
        super().__init__(CONFIG)
        self.optimizer = ft.NamedOptimizer(name, lr=0.01, settings=SETTINGS.get(name, {}), **more)


def tokens(count):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(17, (4, 9), generator=generator) for _ in range(count)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]


def loop(net, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        net.loss(batch).backward()
        optimizer.step()
    return net


BATCHES = tokens(3)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def held_bytes(optimizer):
    """Bytes of every tensor in the state, those that are shared once."""
    optimizer = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    return sum({id(t): t.nbytes for state in optimizer.state.values() for t in tensors_in(state)}.values())


# Each name, in each host


@pytest.mark.parametrize("name", each_name(KNOWN))
def test_it_trains_alike_in_trainer_mixin_and_loop_and_resumes_bit_for_bit(name, tmp_path):
    bare = NamedLM(name)
    optimizer = bare.optimizer(bare)
    before = weights(bare)
    loop(bare, optimizer, BATCHES)
    state = saved(optimizer), weights(bare)
    loop(bare, optimizer, BATCHES)
    assert largest_difference(before, weights(bare)) > 1e-3
    resumed = NamedLM(name)
    resumed.load_state_dict(state[1])
    optimizer = resumed.optimizer(resumed)
    optimizer.load_state_dict(state[0])
    loop(resumed, optimizer, BATCHES)
    assert largest_difference(weights(bare), weights(resumed)) == 0

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    in_trainer = fit(NamedLM(name), BATCHES, [Save()], max_epochs=2)
    assert largest_difference(weights(bare), weights(in_trainer)) == 0
    again = NamedLM(name)
    trainer(max_epochs=2).fit(again, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(bare), weights(again)) == 0


@pytest.mark.parametrize("name", each_name(KNOWN))
def test_its_state_has_the_bytes_that_were_predicted(name):
    net = NamedLM(name)
    optimizer = net.optimizer(net)
    predicted = optimizer_state_bytes(optimizer)
    assert not held_bytes(optimizer) or name in ("adagrad", "galore")
    loop(net, optimizer, BATCHES[:1])
    assert held_bytes(optimizer) == predicted > 0 or name == "sgd"
    report = ft.predict_memory(NamedLM(name), BATCHES[0], device="cpu")
    assert report.at_peak.get("optimizer state", 0) == predicted
