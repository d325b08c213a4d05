"""Run by two processes under torchrun (see test_distributed.py): each scenario writes what it found."""

import gc
import json
import os
import sys
import time

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

import lightning_fasttrain as ft
from tests.cases import TOGETHER, by_hand_of
from tests.support import by_hand
from tests.support.nets import (
    Gradients,
    TinyLM,
    as_loader,
    concatenate,
    gradients,
    heard,
    largest_difference,
    lm_batches,
    sgd,
    trainer,
)

RANK0 = lm_batches(5, size=6, seed=3)
RANK1 = lm_batches(5, size=4, seed=4)  # other rows, and other numbers of targets, than rank 0


def run(callbacks, batches, **settings):
    gc.freeze()  # a rehearsal collects garbage: not among what runs before have left
    seen = Gradients()
    module = settings.pop("kind", TinyLM)(optimizer=settings.pop("optimizer", sgd), **settings.pop("net", {}))
    t = trainer(
        [*callbacks, seen],
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        **settings,
    )
    reductions = []

    class Count(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            def hook(state, bucket):
                reductions.append(bucket.index())
                return torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)

            trainer.strategy.model.register_comm_hook(None, hook)

    t.callbacks.append(Count())
    t.fit(module, as_loader(batches))
    return module, seen.seen, t, reductions


def agree(module):
    """Largest difference of this module's weights between the ranks."""
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    gap = (flat - other).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def worst(expected, seen):
    assert len(expected) == len(seen), (len(expected), len(seen))
    return max(map(largest_difference, expected, seen))


def reference(windows, kind=TinyLM):
    """One process, plain PyTorch: the concatenation of all ranks' batches of a window is one step."""
    module, expected = kind(optimizer=sgd), []
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        module.loss(concatenate(window)).backward()
        expected.append(gradients(module))
        optimizer.step()
    return expected


class Drifts(L.Callback):
    """One rank's steps shrink with their number, so that its weights are not the other's."""

    steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.steps) ** trainer.global_rank


def noise_of(batches):
    """The estimate from the gradient of each rank's batches, computed by itself and stored."""
    model, parts = TinyLM(), []
    for batch in batches:
        gradients = torch.autograd.grad(model.loss(batch), list(model.parameters()))
        parts.append(torch.cat([gradient.flatten() for gradient in gradients]))
    sizes = torch.tensor([float(len(batch["labels"])) for batch in batches])
    norms, whole = torch.stack(parts).square().sum(1), torch.stack(parts).mean(0).square().sum()
    return [float(value) for value in ft.profiling.split_gradient_noise(norms, sizes, whole)]


def main(path):
    found = {}
    rank = int(os.environ["RANK"])
    mine = (RANK0, RANK1)[rank]

    plain, expected, t, plain_reductions = run([], mine)
    split, seen, u, reductions = run([ft.MicroBatching(3)], mine)
    found["micro"] = worst(expected, seen)
    found["micro agree"] = agree(split)
    trims = ft.micro_batching.TrimPadding(multiple_of=1)
    for name, how in {"trimmed": {"n": 3}, "token budget": {"max_tokens": 9}}.items():
        micro = ft.MicroBatching(**how, trim_padding=trims)
        module, seen, t, reductions = run([micro], mine)
        found[name] = [worst(expected, seen), agree(module), len(reductions), micro.trimming.saved]
    found["reductions a step"] = [len(plain_reductions), len(reductions)]
    free = ft.micro_batching.PaddingFree()
    module, seen, t, _ = run([free], mine)
    found["padding-free"] = [worst(expected, seen), agree(module), free.acts]

    plain, expected, t, plain_reductions = run([], mine, accumulate_grad_batches=2)
    split, seen, u, reductions = run([ft.MicroBatching(3)], mine, accumulate_grad_batches=2)
    found["micro+accumulation"] = worst(expected, seen)
    found["reductions a step, accumulating"] = [len(plain_reductions), len(reductions)]

    windows = [RANK0[i : i + 2] + RANK1[i : i + 2] for i in (0, 2, 4)]
    techniques = [ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)]
    with heard() as said:
        module, seen, t, reductions = run(techniques, mine, enable_model_summary=True)
    found["said"] = said
    found["window"] = worst(reference(windows), seen)
    found["window agree"] = agree(module)
    found["window reductions"] = len(reductions)

    dropout = {"net": {"depth": 2, "dropout": 0.2}}
    plain, with_dropout, *_ = seeded([], mine, **dropout)
    ours, seen, *_ = seeded([ft.ActivationCheckpointing()], mine, **dropout)
    found["checkpointing"] = worst(with_dropout, seen)
    shallow = {"net": {"depth": 2}}  # each block is compiled for itself
    ours, seen, *_ = seeded([ft.CompileBlocks(backend="eager"), ft.ActivationCheckpointing()], mine, **shallow)
    plain, expected, *_ = seeded([], mine, **shallow)
    found["compile+checkpointing"] = worst(expected, seen)
    ours, seen, *_ = seeded([ft.model.LowPrecisionProducts("int8", min_features=8)], mine, **shallow)
    found["low precision"] = worst(expected, seen)
    found["low precision agree"] = agree(ours)

    budget = ft.MemoryBudget(1.0)
    ours, seen, *_ = seeded([ft.ActivationCheckpointing(budget)], mine, **dropout)
    found["budget"] = worst(with_dropout, seen)
    chosen = budget.plan
    found["plan"] = [chosen.predicted_bytes, [[b.action, b.saved_bytes, b.forward_ms] for b in chosen.blocks]]
    found["plan checked"] = chosen.measured_bytes
    plain, expected, *_ = seeded([by_hand.LoRA()], mine)
    ours, seen, *_ = seeded([ft.LoRA(rank=2), ft.MicroBatching(2)], mine)
    found["adapter"] = worst(expected, seen)
    found["adapter agree"] = agree(ours)

    thirds = (RANK0, lm_batches(5, size=9, seed=4))[rank][:3]  # of one size, so that each rank compiles its tiles once
    plain, expected, *_ = seeded(by_hand_of(TOGETHER), thirds, **shallow)
    # CompileBlocks and TiledMLP together compile for ten seconds: test_contracts.py does so.
    kept = [case for case in TOGETHER if case.name != "CompileBlocks"]
    # The same batches a step as the plain run.
    ours, seen, *_ = seeded([case.make() for case in kept if case.regroup is list], thirds, **shallow)
    found["together"] = [worst(expected, seen), agree(ours)]

    rehearsal, mixed = ft.proof.Rehearsal(seconds=1), [*mine[:4], concatenate(mine[: 1 + 2 * rank])]
    plain, expected, *_ = seeded([ft.MicroBatching(2)], mixed, **dropout)
    ours, seen, *_ = seeded([ft.MicroBatching(2), rehearsal], mixed, **dropout)
    found["rehearsed"] = worst(expected, seen)
    found["rehearsal"] = rehearsal.report.lines
    try:
        seeded([Drifts(), ft.proof.Rehearsal(seconds=1)], mine, **shallow)
    except ft.proof.RehearsalError as error:
        found["drifts"] = str(error)

    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=L.fabric.strategies.DDPStrategy(process_group_backend="gloo")
    )
    fabric.launch()
    model = TinyLM(optimizer=sgd)
    wrapped = fabric.setup_module(model)
    wrapped.mark_forward_method("loss")
    got = []
    for i in (0, 2, 4):
        model.zero_grad()
        ft.accumulate_window(
            wrapped.loss, mine[i : i + 2], 2, backward=fabric.backward, no_sync=lambda: fabric.no_backward_sync(wrapped)
        )
        got.append(gradients(model))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    found["fabric window"] = worst(reference(windows), got)

    net = TinyLM()
    one_sample = {name: value[:1] for name, value in RANK0[0].items()}
    found["rule"] = str(ft.micro_batching.find_count(net.loss, (one_sample, RANK1[0])[rank]))

    def count(batch):  # a function that cannot be sent to other ranks
        return (batch["labels"] != -100).sum()

    found["own count"] = ft.micro_batching.find_count(net.loss, (one_sample, RANK1[0])[rank], count=count) is count

    rank_zero_has_one = [one_sample, *RANK0[1:3]] if rank == 0 else RANK1[:3]
    plain, expected, *_ = run([], rank_zero_has_one)
    split, seen, *_ = run([ft.MicroBatching(2)], rank_zero_has_one)
    found["one sample"] = worst(expected, seen)

    def in_batch(batch):
        z = torch.nn.functional.normalize(net(batch["input_ids"]).mean(1), dim=-1)
        return torch.nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))

    try:
        ft.micro_batching.find_count(in_batch, (one_sample, RANK1[0])[rank])
    except ValueError as error:
        found["refused"] = str(error)

    class Summed(TinyLM):
        def loss(self, batch):
            return super().loss(batch) * (batch["labels"] != -100).sum()

    windows = [RANK0[i : i + 2] + RANK1[i : i + 2] for i in (0, 2, 4)]
    module, seen, *_ = run([ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)], mine, kind=Summed)
    found["summed window"] = worst(reference(windows, Summed), seen)

    for batches in (1, 2):
        noise = ft.profiling.GradientNoiseScale(every_n_steps=1, decay=0.0)
        run([noise], mine[:batches], accumulate_grad_batches=batches)
        found[f"noise of {batches}"] = [noise.state_dict(), noise_of([*RANK0[:batches], *RANK1[:batches]])]

    class Silent(TinyLM):
        def training_step(self, batch, batch_idx):
            return None

    try:
        trainer([ft.MicroBatching(2)], devices=2, strategy=DDPStrategy(process_group_backend="gloo")).fit(
            Silent(), as_loader(mine)
        )
    except RuntimeError as error:
        found["none"] = str(error)

    gathered = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(gathered, file)
    # Leave without destructors. Where DDP's reducer is the last to hold the process group, its destructor joins a gloo
    # thread while it holds the interpreter lock, which that thread may be waiting for: seen to hang after all was done.
    time.sleep(1)  # the other rank may still be reading what was gathered
    os._exit(0)


def seeded(callbacks, batches, **settings):
    torch.manual_seed(21)
    torch._dynamo.reset()
    return run(callbacks, batches, **settings)


if __name__ == "__main__":
    main(sys.argv[1])
