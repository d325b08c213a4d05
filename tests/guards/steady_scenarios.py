"""Two processes, one of which has NaN, spikes, bad samples, or fewer batches; see ``test_steady_ranks.py``."""

import os
import sys
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset

import lightning_fasttrain as ft
from lightning_fasttrain.loaders import EvenEpochs, SampleGuard, even_epochs
from lightning_fasttrain.profiling import step_meter
from tests.loaders.test_sample_guard import Rows
from tests.support.clock import Clock
from tests.support.end_of_rank import write_findings
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights

RANK = int(os.environ.get("RANK", "0"))
BATCHES = [{**batch, "plus": torch.zeros(6), "times": torch.ones(6)} for batch in lm_batches(8, seed=3 + RANK)]
NAN, INF = float("nan"), float("inf")


class Spoilt(ShallowLM):
    """Adds a constant to its loss, and multiplies it."""

    def loss(self, batch):
        return super().loss(batch) * batch["times"].mean() + batch["plus"].mean()


def spoil(place, rank=1, **entries):
    batches = [dict(batch) for batch in BATCHES]
    for name, value in entries.items():
        if rank == RANK:
            batches[place][name] = torch.full((6,), value)
    return batches


def run(batches, callbacks=(), net=Spoilt, strategy=None, loader=as_loader, **settings):
    """Return the module, its trainer, and the warnings."""
    module = net()
    t = trainer(callbacks, devices=2, strategy=strategy or DDPStrategy(process_group_backend="gloo"), **settings)
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ft.FastTrainWarning)
        t.fit(module, loader(batches))
    said = [str(one.message) for one in told if issubclass(one.category, ft.FastTrainWarning)]
    return module, t, said


def without(place):
    return [*BATCHES[:place], *BATCHES[place + 1 :]]


def apart(one, other):
    return largest_difference(weights(one), weights(other))


def finite_guard(found):
    for name, fused in (("plain", False), ("fused", True)):
        net = lambda fused=fused: Spoilt(fused=fused)  # noqa: E731
        guard = ft.FiniteGuard()
        module, _, said = run(spoil(4, times=NAN), [guard], net)
        other, *_ = run(without(4), (), net)
        found[f"nan, {name}"] = [apart(other, module), guard.skipped, said]
    module, _, said = run(spoil(4, plus=INF), [ft.FiniteGuard()])
    found["loss alone"] = [apart(run(without(4))[0], module), said]
    try:
        run(spoil(4, times=NAN), [ft.FiniteGuard(stop_after=1)])
    except FloatingPointError as error:
        found["stopped"] = str(error)
    module, _, said = run(spoil(4, times=NAN), [ft.FiniteGuard()], strategy=sharded())
    found["sharded"] = [apart(run(without(4), strategy=sharded())[0], module), said]


def sharded():
    return ft.FSDP2Strategy(process_group_backend="gloo")


def spike_guard(found, folder):
    guard = ft.guards.SpikeGuard(after=3)
    module, _, said = run(spoil(5, times=200.0), [guard])
    found["spike"] = [apart(run(without(5))[0], module), guard.skipped, said]
    module, _, said = run(spoil(5, times=200.0), [ft.guards.SpikeGuard(after=3)], strategy=sharded())
    found["sharded spike"] = [apart(run(without(5), strategy=sharded())[0], module), len(said)]
    guard, saved = ft.guards.SpikeGuard("rewind", after=3), ModelCheckpoint(folder, every_n_train_steps=3)
    module, _, said = run(spoil(5, times=200.0), [guard, saved], enable_checkpointing=True)
    expected, *_ = run([*BATCHES[:3], *BATCHES[6:]])
    found["rewound"] = [apart(expected, module), guard.rewinds, len(said)]


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


def streamed(batches):
    return DataLoader(Stream(batches), batch_size=None)


def even_loaders(found):
    mine = BATCHES[: (7, 5)[RANK]]
    expected, *_ = run(BATCHES[:5], max_epochs=2)
    for name, loader in (("sized", as_loader), ("stream", streamed)):
        module, t, _ = run(mine, [EvenEpochs(), ft.FiniteGuard()], loader=loader, max_epochs=2)
        found[f"even, {name}"] = [apart(expected, module), t.global_step, t.current_epoch]
    module, t, _ = run(mine, [EvenEpochs(), ft.TokenWeightedAccumulation(2, count="targets")], loader=streamed)
    expected, *_ = run(BATCHES[:5], [ft.TokenWeightedAccumulation(2, count="targets")])
    found["even windows"] = [apart(expected, module), t.global_step]
    loader = even_epochs(streamed(mine))
    found["even, by hand"] = [sum(1 for _ in loader) for _ in range(2)] + [loader.left_out]
    loader.close()


def even_by_hand_and_resumed(found):
    def make(kind):
        data = list(range((7, 5)[RANK]))
        return even_epochs(ft.checkpoint.resumable(DataLoader(kind(data), batch_size=None)))

    def numbers_of(loader):
        return [int(number) for number in loader]

    for name, kind in (("sized", list), ("stream", Stream)):
        loader, states = make(kind), []
        for _ in loader:
            states.append(loader.state_dict())
        loaders = [loader]
        found[f"even by hand and resumed, {name}"] = []
        for state in [*states, loader.state_dict()]:
            loaders.append(make(kind))
            loaders[-1].load_state_dict(state)
            found[f"even by hand and resumed, {name}"].append([numbers_of(loaders[-1]) for _ in range(2)])
        for each in loaders:
            each.close()


def even_and_resumed(found, folder):
    mine, path = BATCHES[: (7, 5)[RANK]], f"{folder}/even.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    for name, loader in (("sized", as_loader), ("stream", streamed)):
        whole, *_ = run(mine, [EvenEpochs(), ft.ExactResume(), Save()], loader=loader, max_epochs=2)
        again, strategy = Spoilt(), DDPStrategy(process_group_backend="gloo")
        # the checkpoint describes the data of rank 0, which differ from those of rank 1
        lenient = ft.ExactResume(strict=False)
        t = trainer([EvenEpochs(), lenient], devices=2, strategy=strategy, max_epochs=2)
        t.fit(again, loader(mine), ckpt_path=path, weights_only=True)
        found[f"even and resumed, {name}"] = [apart(whole, again), t.global_step]


def bad_samples(found, folder):
    guard, path = SampleGuard(2), f"{folder}/bad.ckpt"
    saved = L.pytorch.callbacks.LambdaCallback(on_train_end=lambda t, _: t.save_checkpoint(path))
    rows = Rows(bad=[[], [3, 8]][RANK])
    _, t, said = run(rows, [guard, saved], ShallowLM, loader=lambda rows: DataLoader(rows, batch_size=4))
    found["bad samples"] = [guard.skipped, t.global_step, said]
    again = SampleGuard(2)
    u = trainer([again], devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    u.fit(ShallowLM(), DataLoader(rows, batch_size=4), ckpt_path=path, weights_only=True)
    found["bad samples, resumed"] = again.skipped


class Slow(Stream):
    """Takes 100 ms for each batch on rank 1, by the clock of the test."""

    clock: Clock

    def __iter__(self):
        for batch in self.batches:
            self.clock.passes(100 * RANK)
            yield batch


def slow_ranks(found):
    Slow.clock = step_meter.perf_counter = Clock()

    class Timed(Spoilt):
        def loss(self, batch):
            Slow.clock.passes(10)
            return super().loss(batch)

    def loader(batches):
        return DataLoader(Slow(batches), batch_size=None)

    *_, found["slow"] = run(BATCHES, [ft.StepMeter(warmup=1, compare_ranks_every=4)], net=Timed, loader=loader)
    *_, found["not asked"] = run(BATCHES, [ft.StepMeter(warmup=1)], net=Timed, loader=loader)


def main(path):
    found, folder = {}, os.path.dirname(path)
    finite_guard(found)
    spike_guard(found, f"{folder}/spike")
    even_loaders(found)
    even_by_hand_and_resumed(found)
    even_and_resumed(found, folder)
    bad_samples(found, folder)
    slow_ranks(found)
    write_findings(path, found)


if __name__ == "__main__":
    main(sys.argv[1])
