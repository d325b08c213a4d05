"""Averages of weights in shards, on two processes (see test_sharded_averages.py)."""

import gc
import os

import lightning as L
import torch
from torch.distributed.tensor import DTensor

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
from lightning_fasttrain.strategy.zero.zero_strategy import ZeROStrategy
from tests.strategy.tensor_scenarios import Net, batches_of
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights

RANK = int(os.environ.get("RANK", 0))
RANKS = [lm_batches(3, size=6, seed=3), lm_batches(3, size=4, seed=4)]  # 17 rows of the embedding divide unevenly
DECAY = 0.5


class Validated(ShallowLM):
    """Its validation losses are kept, and those that a validation of the trained weights would have."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.loss(batch).item())


def averaged_by_hand(epochs):
    """Train in one process on the mean of both ranks' losses; return model, average and this rank's validation loss."""
    module, average, validated = Validated(), {}, []
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for first, second in zip(*RANKS, strict=True):
            optimizer.zero_grad()
            ((module.loss(first) + module.loss(second)) / 2).backward()
            optimizer.step()
            for name, value in weights(module).items():
                average[name] = DECAY * average.get(name, value) + (1 - DECAY) * value
        at_average = Validated()
        at_average.load_state_dict(average)
        validated.append(at_average.loss(RANKS[RANK][0]).item())
    return module, average, validated


def whole(tensors):
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in tensors.items()}


def named(average):
    """Averages under all names of tied weights, as in a state_dict."""
    found = whole(average)
    if "embed.weight" in found:
        found["head.weight"] = found["embed.weight"]
    return found


class SaveFirstEpoch(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit(strategy, callbacks, path=None, net=Validated, train=None, **settings):
    gc.freeze()
    torch.manual_seed(21 + RANK)
    module, t = net(), trainer(callbacks, devices=2, strategy=strategy, **{"max_epochs": 2, **settings})
    batches = RANKS[RANK] if train is None else train
    t.fit(module, as_loader(batches), as_loader(batches[:1]), ckpt_path=path)
    return module, t


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def averages_in_shards(found, folder):
    expected, average, validated = averaged_by_hand(2)
    ema = ft.optim.WeightEMA(DECAY)
    strategy = FSDP2Strategy(async_checkpoints=True)
    module, t = fit(strategy, [ema, SaveFirstEpoch(folder / "half")], num_sanity_val_steps=0)
    end = whole(module.state_dict())
    found["weights"] = largest_difference(weights(expected), end)
    found["average"] = largest_difference(average, named(ema.average))
    found["moved"] = largest_difference(average, weights(expected))
    found["validated"] = max(abs(a - b) for a, b in zip(validated, module.validated, strict=True))
    held = [value.to_local().numel() for value in ema.average.values()]
    found["held"] = [sum(held), sum(value.numel() for value in ema.average.values())]
    for name, options in (("same", {}), ("hybrid", {"replicas": 2})):
        resumed = ft.optim.WeightEMA(DECAY)
        again, _ = fit(FSDP2Strategy(**options), [resumed], folder / "half", num_sanity_val_steps=0)
        found[f"resumed {name}"] = [
            largest_difference(end, whole(again.state_dict())),
            largest_difference(named(ema.average), named(resumed.average)),
        ]
    evaluated = Validated()
    t = trainer([ft.optim.WeightEMA(DECAY)], devices=2, strategy=FSDP2Strategy())
    t.validate(evaluated, as_loader(RANKS[RANK][:1]), ckpt_path=folder / "half", verbose=False)
    found["validated checkpoint"] = abs(evaluated.validated[0] - validated[0])


def average_of_one_process(found, folder):
    """Resume the checkpoint of one process, which has trained on rank zero's batches, in shards."""
    settings = {"train": RANKS[0], "num_sanity_val_steps": 0}
    ema = ft.optim.WeightEMA(DECAY)
    module, t = fit(FSDP2Strategy(), [ema], folder / "one.ckpt", **settings)
    t.save_checkpoint(folder / "from one")
    with torch.no_grad():
        found["from one"] = whole(module.state_dict())["head.weight"].tolist()
        found["average from one"] = named(ema.average)["head.weight"].tolist()


class Gpt(Net):
    def __init__(self):
        super().__init__("short gpt")


def averages_in_a_tensor_group(found, folder):
    train = batches_of("gpt", 0, 3)
    expected = ft.optim.WeightEMA(DECAY)
    trainer([expected]).fit(Gpt(), as_loader(train))
    ema, settings = ft.optim.WeightEMA(DECAY), {"net": Gpt, "train": train, "max_epochs": 1}
    _, t = fit(FSDP2Strategy(tensor_parallel=2), [ema], **settings)
    found["tensor group"] = largest_difference(expected.average, whole(ema.average))
    t.save_checkpoint(folder / "tensor")
    again = ft.optim.WeightEMA(DECAY)
    fit(FSDP2Strategy(), [again], folder / "tensor", **settings)  # an epoch that has ended: nothing is trained
    found["tensor group to shards"] = largest_difference(whole(ema.average), whole(again.average))


def averages_in_fabric(found, folder):
    _, average, validated = averaged_by_hand(1)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy())
    fabric.launch()

    def set_up():
        module = Validated()
        model = fabric.setup_module(module)
        model.mark_forward_method("loss")
        return module, model, fabric.setup_optimizers(module.configure_optimizers()), ft.optim.WeightEMA(DECAY)

    module, model, optimizer, ema = set_up()
    for number, batch in enumerate(RANKS[RANK]):
        optimizer.zero_grad()
        fabric.backward(model.loss(batch))
        optimizer.step()
        ema.update(model)
        if number == 0:
            with ema.in_use(model), torch.no_grad():
                model.loss(batch)  # leaves the root gathered
    with ema.in_use(model), torch.no_grad():
        found["fabric validated"] = abs(model.loss(RANKS[RANK][0]).item() - validated[0])
    found["fabric average"] = largest_difference(average, named(ema.average))
    fabric.save(folder / "fabric", {"model": model, "ema": ema})
    _, model, _, again = set_up()
    fabric.load(folder / "fabric", {"model": model, "ema": again})
    found["fabric resumed"] = largest_difference(named(ema.average), named(again.average))
    with again.in_use(model), torch.no_grad():
        found["fabric resumed validated"] = abs(model.loss(RANKS[RANK][0]).item() - validated[0])


def averages_under_zero(found, folder):
    _, average, validated = averaged_by_hand(1)
    ema = ft.optim.WeightEMA(DECAY)
    module, t = fit(ZeROStrategy(stage=2), [ema], max_epochs=1, num_sanity_val_steps=0)
    t.save_checkpoint(folder / "zero")
    again = ft.optim.WeightEMA(DECAY)
    fit(ZeROStrategy(stage=2), [again], folder / "zero", max_epochs=1)  # an epoch that has ended
    found["zero resumed"] = largest_difference(ema.average, again.average)
    found["zero average"] = largest_difference(average, named(ema.average))
    found["zero validated"] = abs(module.validated[0] - validated[0])
    found["zero 3"] = refusal(lambda: fit(ZeROStrategy(stage=3), [ft.optim.WeightEMA()]))


SCENARIOS = (
    averages_in_shards,
    average_of_one_process,
    averages_in_a_tensor_group,
    averages_in_fabric,
    averages_under_zero,
)
