"""Windows of batches of any kind give the gradient of the sum of all terms, divided by their number.

The right weights are those of a plain loop that adds up the terms of a window itself.
"""

import datetime
import itertools
import json
import logging
import platform
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_fasttrain as ft
from tests.support.nets import largest_difference, trainer, weights
from tests.support.ranks import run_ranks

ROWS, DIM = 6, 4


@dataclass
class Rows:
    """A batch that nothing of this package can take apart."""

    x: torch.Tensor
    mask: torch.Tensor
    edges: list[tuple[int, int]]

    def __len__(self):
        raise AssertionError("a batch is not asked for its length")


def squares(net, x):
    return net(x).squeeze(-1).square()


# name → (what the step returns, the sum of the terms, their number); `mask` marks the targets.
LOSSES = {}


def loss(needs_targets=False):
    def add(function):
        LOSSES[function.__name__] = function, needs_targets
        return function

    return add


@loss(needs_targets=True)
def masked_mean(net, x, mask):
    terms = (squares(net, x) * mask).sum()
    return terms / mask.sum(), terms, mask.sum()


@loss()
def clamped(net, x, mask):
    terms = (squares(net, x) * mask).sum()
    return terms / mask.sum().clamp(min=1), terms, mask.sum()


@loss()
def selected_or_zero(net, x, mask):
    chosen = squares(net, x)[mask]
    step = chosen.mean() if len(chosen) else 0 * net(x).sum()
    return step, chosen.sum(), len(chosen)


@loss()
def masked_or_a_leaf(net, x, mask):
    terms = (squares(net, x) * mask).sum()
    step = terms / mask.sum() if mask.any() else torch.zeros((), dtype=x.dtype, requires_grad=True)
    return step, terms, mask.sum()


@loss()
def divided_by_a_python_number(net, x, mask):
    terms = squares(net, x)[mask].sum()
    return terms / max(1, int(mask.sum())), terms, mask.sum()


@loss(needs_targets=True)
def fractional_weights(net, x, mask):
    weight = mask * torch.linspace(0.02, 0.3, len(mask), dtype=x.dtype)
    terms = (squares(net, x) * weight).sum()
    return terms / weight.sum(), terms, weight.sum()


@loss()
def hinge_of_active_triplets(net, x, mask):
    y = net(x).squeeze(-1)
    terms = F.relu(y[0::2] - y[1::2] + 0.1) * mask[0::2]
    return terms.sum() / (terms > 0).sum().clamp(min=1), terms.sum(), (terms > 0).sum()


@loss(needs_targets=True)
def pairs(net, x, mask):
    """As of DPO and reward models: neighbouring rows belong together."""
    y = net(x).squeeze(-1)
    terms = -F.logsigmoid(y[0::2] - y[1::2])[mask[0::2]]
    return terms.mean(), terms.sum(), len(terms)


@loss()
def summed(net, x, mask):
    terms = squares(net, x)[mask].sum()
    return terms, terms, None


@loss(needs_targets=True)
def a_size_is_asserted(net, x, mask):
    assert len(x) == ROWS, "the buffers of this model hold six rows"
    terms = squares(net, x)[mask]
    return terms.mean(), terms.sum(), len(terms)


@loss(needs_targets=True)
def each_row_by_itself(net, x, mask):
    terms = [squares(net, row[None])[0] for row in x[mask]]
    return torch.stack(terms).mean(), sum(terms), len(terms)


TARGETS = {  # of each batch
    "full": (6, 6, 6, 6, 6),
    "different": (6, 1, 4, 2, 6, 3, 1),
    "without": (3, 0, 5, 1, 0, 0, 2),
    "without at first": (0, 4, 2, 0, 0, 1),
}
FACTORS = {"two": 2, "three": 3, "a schedule": {0: 1, 1: 3, 2: 2}}


def list_batches(targets, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in targets:
        x = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
        # Pairs are marked by their first rows, so targets are there too.
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[torch.tensor([0, 2, 4, 1, 3, 5])[:number]] = True
        found.append((x, mask))
    return found


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 1)).double()


class Lit(L.LightningModule):
    def __init__(self, function):
        super().__init__()
        self.net, self.function = make_net(), function

    def training_step(self, batch, batch_idx):
        x, mask = (batch.x, batch.mask) if isinstance(batch, Rows) else batch
        return self.function(self.net, x, mask)[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)


def list_windows(batches, factor):
    schedule = factor if isinstance(factor, dict) else {0: factor}
    windows, step, batches = [], 0, list(batches)
    while batches:
        size = [value for start, value in schedule.items() if start <= step][-1]
        windows.append(batches[:size])
        batches, step = batches[size:], step + 1
    return windows


def train_in_closed_form(function, batches, factor):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    # Of one epoch, or several.
    epochs = batches if isinstance(batches[0], list) else [batches]
    for window in [window for epoch in epochs for window in list_windows(epoch, factor)]:
        optimizer.zero_grad()
        results = [function(net, x, mask) for x, mask in window]
        total = sum(terms for _, terms, _ in results)
        counts = [count for *_, count in results]
        divisor = 1 if counts[0] is None else sum(float(count) for count in counts)
        if divisor:
            (total / divisor).backward()
            optimizer.step()
    return weights(net)


def train_in_a_trainer(function, batches, factor, wrap):
    module = Lit(function)
    loader = DataLoader([wrap(batch) for batch in batches], batch_size=None, collate_fn=lambda batch: batch)
    by = {"by": "step"} if isinstance(factor, dict) else {}
    trainer([ft.TokenWeightedAccumulation(factor, **by)]).fit(module, loader)
    return weights(module.net)


def train_in_a_loop(function, batches, factor, wrap):
    module = Lit(function)
    optimizer = module.configure_optimizers()
    for window in list_windows([wrap(batch) for batch in batches], factor):
        optimizer.zero_grad()
        ft.accumulate_window(lambda batch: module.training_step(batch, 0), window)
        optimizer.step()
    return weights(module.net)


def train_in_global_batches(function, batches, factor, wrap):
    module = Lit(function)
    rows = TensorDataset(*map(torch.cat, zip(*batches, strict=True)))
    trainer([ft.loaders.GlobalBatch(ROWS * factor)]).fit(module, DataLoader(rows, ROWS))
    return weights(module.net)


HOSTS = {"trainer": train_in_a_trainer, "loop": train_in_a_loop, "global batches": train_in_global_batches}
WRAPS = {"tensors": lambda batch: batch, "an object": lambda batch: Rows(*batch, [(0, 1), (1, 2)])}


def list_settings():
    """All combinations that have a closed form."""
    found = []
    for name, targets, factor, host, wrap in itertools.product(LOSSES, TARGETS, FACTORS, HOSTS, WRAPS):
        has_none = LOSSES[name][1] and 0 in TARGETS[targets]  # whose plain loss is not a number
        is_divisible = host != "global batches" or (wrap == "tensors" and factor != "a schedule")
        if is_divisible and not has_none:
            found.append((name, targets, factor, host, wrap))
    return found


SETTINGS = list_settings()


def misses(setting):
    name, targets, factor, host, wrap = setting
    function, batches = LOSSES[name][0], list_batches(TARGETS[targets], seed=len(name))
    trained = HOSTS[host](function, batches, FACTORS[factor], WRAPS[wrap])
    return largest_difference(train_in_closed_form(function, batches, FACTORS[factor]), trained)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", random.Random(2).sample(SETTINGS, 60), ids=", ".join)
def test_a_window_has_the_gradient_of_all_its_terms(setting):
    assert misses(setting) < 1e-12


class SumThenMean(Lit):
    def training_step(self, batch, batch_idx):
        terms = squares(self.net, batch[0])
        return terms.sum() if batch_idx == 0 else terms.mean()


def test_a_window_of_a_sum_and_a_mean_has_no_common_unit():
    loader = DataLoader(list_batches((6, 6), seed=0), batch_size=None)
    with pytest.raises(
        ValueError, match="TokenWeightedAccumulation inside an accumulation window: this batch is split"
    ):
        trainer([ft.TokenWeightedAccumulation(2)]).fit(SumThenMean(None), loader)


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


class Declared(Stream):
    length = 0

    def __len__(self):
        return self.length


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.filterwarnings("ignore:.*has `__len__` defined")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("length", [4, 5, 6, 9, None])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_a_stream_that_ends_before_its_length_has_a_last_window(factor, length, resumed, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    def fit(callbacks, path=None):
        stream = Stream(batches) if length is None else Declared(batches)
        stream.length = length
        module = Lit(masked_mean)
        fitted = trainer([ft.TokenWeightedAccumulation(factor), *callbacks], max_epochs=2)
        fitted.fit(module, DataLoader(stream, batch_size=None), ckpt_path=path)
        return fitted.global_step, weights(module.net)

    batches = list_batches((3, 5, 1, 4, 2), seed=1)
    read = batches[:length]
    steps, found = fit([ft.ExactResume(), Save()] if resumed else [])
    if resumed:
        assert largest_difference(fit([ft.ExactResume()], tmp_path / "saved.ckpt")[1], found) == 0
    assert steps == 2 * len(list_windows(read, factor))
    assert largest_difference(train_in_closed_form(masked_mean, [read, read], factor), found) < 1e-12


@pytest.mark.slow
def test_a_window_of_two_ranks_has_the_gradient_of_all_their_terms(tmp_path):
    found = tmp_path / "found.json"
    run_ranks("tests.micro_batching.windows_on_ranks", found, log=tmp_path / "log")
    for rank in json.loads(found.read_text()):
        assert len(rank) >= 30
        assert {setting: missed for setting, missed in rank.items() if not missed < 1e-12} == {}


def test_negative_control_lightnings_window_differs():
    batches = list_batches(TARGETS["different"], seed=1)
    module = Lit(masked_mean)
    loader = DataLoader(batches, batch_size=None)
    trainer(accumulate_grad_batches=2).fit(module, loader)
    assert largest_difference(train_in_closed_form(masked_mean, batches, 2), weights(module.net)) > 1e-3


def sweep(path=None):
    """Try all settings, and write what was found to a file."""
    differing = {}
    for setting in SETTINGS:
        try:
            missed = misses(setting)
        except Exception as error:
            missed = f"{type(error).__name__}: {error}"
        if isinstance(missed, str) or not missed < 1e-12:
            differing[", ".join(setting)] = missed
    found = {
        "command": "python -m tests.micro_batching.test_windows examples/results/windows_cpu.json",
        "date": f"{datetime.date.today()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "settings": len(SETTINGS),
        "differing": differing,
    }
    print(json.dumps(found, indent=1))
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    sweep(*sys.argv[1:])
