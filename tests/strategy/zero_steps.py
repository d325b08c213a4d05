"""Under ZeRO an optimizer takes exactly the requested steps, whatever its groups: compared with plain PyTorch.

Part of the launch of one process in zero_scenarios.py.
"""

import lightning as L
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from lightning_fasttrain.optim.build_schedule import build_schedule
from lightning_fasttrain.strategy.zero.zero_strategy import FabricZeROStrategy, ZeROStrategy
from tests.support.nets import as_loader, trainer

STAGES = (0, 1, 2, 3, "2+offload")
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
BATCHES = 4


class Grouped(L.LightningModule):
    """Trained and frozen layers, with various optimizer groups and a learning rate for each group in its scheduler."""

    def __init__(self, kind, shape):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.shape = kind, shape
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        return self.trained(self.frozen(batch.to(self.frozen.weight.dtype))).float().pow(2).mean()

    def optimizer_and_schedule(self):
        weights = [p for p in self.trained.parameters() if p.ndim > 1]
        biases = [p for p in self.trained.parameters() if p.ndim == 1]
        frozen = list(self.frozen.parameters())
        others = {"params": biases, "weight_decay": 0.0, "lr": 0.02}
        groups = {
            "one": [{"params": weights + biases}],
            "empty": [{"params": weights}, {"params": []}, others],
            "frozen": [{"params": weights + frozen}, others],
            "all": [{"params": []}, {"params": weights + frozen}, {"params": frozen[:0]}, {"params": []}, others],
            "idle": [{"params": weights}, {"params": frozen}, others],
        }[self.shape]
        if self.kind == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if self.shape == "idle":
            return optimizer, build_schedule(optimizer, "cosine", warmup=2, total=8)
        slower = [lambda step, i=i: (0.9 - 0.1 * i) ** step for i in range(len(groups))]
        parts = [LambdaLR(optimizer, slower), LambdaLR(optimizer, slower)]
        return optimizer, SequentialLR(optimizer, parts, milestones=[2])

    def configure_optimizers(self):
        optimizer, schedule = self.optimizer_and_schedule()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(BATCHES)]


def by_hand(kind, shape, dtype):
    """Reference in plain PyTorch; in 16 bits the optimizer steps float32 copies, and the model has rounded values."""
    module = Grouped(kind, shape)
    optimizer, schedule = module.optimizer_and_schedule()
    module.to(dtype)
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in trained]
    for batch in inputs():
        gradients = torch.autograd.grad(module.training_step(batch, 0), trained)
        for p, master, gradient in zip(trained, masters, gradients, strict=True):
            p.data, p.grad = master, gradient.float()
        optimizer.step()
        schedule.step()
        for i, p in enumerate(trained):
            masters[i], p.grad = p.data, None
            p.data = masters[i].to(dtype)
    return module, [group["lr"] for group in optimizer.param_groups]


def fitted(kind, shape, stage, precision, epochs=1, path=None):
    module = Grouped(kind, shape)
    t = trainer(strategy=ZeROStrategy(stage=stage), precision=precision, max_epochs=epochs)
    t.fit(module, as_loader(inputs()), ckpt_path=path)
    return module, t


def whole(module):
    """Return the weights of a module, gathered if they are sharded."""
    import deepspeed

    sharded = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded):
        return {name: value.detach().clone().float() for name, value in module.state_dict().items()}


def compare(expected, rates, module, engine, schedule):
    """Return differences to plain training: the largest weight, Adam's step counts, learning rates of all groups."""
    found, right = whole(module), whole(expected)
    counts = {float(s["step"]) for s in engine.deepspeed.optimizer.state.values() if "step" in s}
    known = [group["lr"] for group in schedule.optimizer.param_groups]
    return {
        "weights": max((found[name] - right[name]).abs().max().item() for name in right),
        "moved": (right["trained.0.weight"] - Grouped("sgd", "one").trained[0].weight).abs().max().item(),
        "counts": sorted(counts),
        "rates": max(abs(a - b) for a, b in zip(known, rates, strict=True)),
        "named": schedule.optimizer.__class__.__name__,
    }


def counts_steps(found, folder):
    """Dtype by optimizer and shape of the groups, each at one stage; each dtype at all stages."""
    shapes = ("one", "empty", "frozen", "idle")
    for offset, (precision, dtype) in enumerate(DTYPES.items()):
        for place, (kind, shape) in enumerate([*(("adamw", shape) for shape in shapes), ("sgd", "all")]):
            expected, rates = by_hand(kind, shape, dtype)
            stage = STAGES[(place + 2 * offset) % len(STAGES)]
            module, t = fitted(kind, shape, stage, precision)
            schedule = t.lr_scheduler_configs[0].scheduler
            found[f"steps {precision} {kind} {shape} {stage}"] = compare(
                expected, rates, module, t.strategy.engine, schedule
            )
    expected, rates = by_hand("adamw", "empty", torch.bfloat16)
    module, t = fitted("adamw", "empty", "auto", "bf16-mixed")
    schedule = t.lr_scheduler_configs[0].scheduler
    found["steps auto"] = compare(expected, rates, module, t.strategy.engine, schedule)
    found["stage of auto"] = t.strategy.stage


def resumes_in_16_bits(found, folder):
    for stage in (0, 2):
        path = folder / f"bf16-resumed-{stage}"
        _, t = fitted("adamw", "empty", stage, "bf16-true")
        t.save_checkpoint(path)
        resumed, t = fitted("adamw", "empty", stage, "bf16-true", epochs=2, path=path)
        through, other = fitted("adamw", "empty", stage, "bf16-true", epochs=2)
        a, b = whole(resumed), whole(through)
        rates = [[group["lr"] for group in one.optimizers[0].param_groups] for one in (t, other)]
        found[f"resumed in bf16 {stage}"] = [all(torch.equal(a[n], b[n]) for n in a), rates[0] == rates[1]]


def counts_steps_in_fabric(found, folder):
    expected, rates = by_hand("adamw", "empty", torch.bfloat16)
    for stage in (0, 2, 3):
        strategy = FabricZeROStrategy(stage=stage)
        fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-true", strategy=strategy)
        fabric.launch()
        module = Grouped("adamw", "empty")
        optimizer, schedule = module.optimizer_and_schedule()
        model, optimizer, schedule = fabric.setup(module, optimizer, scheduler=schedule)
        for batch in inputs():
            fabric.backward(model.module.training_step(batch, 0))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found[f"steps fabric {stage}"] = compare(expected, rates, module, fabric.strategy.engine, schedule)
    module = Grouped("adamw", "empty")
    optimizer, _ = module.optimizer_and_schedule()
    try:
        fabric.setup(module, optimizer)
        found["schedule unknown"] = "no error"
    except ValueError as error:
        found["schedule unknown"] = str(error)


def refuses_a_late_schedule(found, folder):
    """A scheduler created after DeepSpeed has sharded the optimizer would count each micro-batch as a step."""

    class Late(Grouped):
        def on_fit_start(self):
            build_schedule(self.trainer.optimizers[0].optimizer, "cosine", module=self)

    try:
        trainer(strategy=ZeROStrategy(stage=2)).fit(Late("adamw", "one"), as_loader(inputs()))
    except RuntimeError as error:
        found["late schedule"] = str(error)


def refuses_adagrad(found, folder):
    """Default settings in one group work; otherwise DeepSpeed would train something else."""

    class Plain(Grouped):
        def configure_optimizers(self):
            return torch.optim.Adagrad(self.trained.parameters(), lr=0.05)

    class Decayed(Plain):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    plain = Plain("adagrad", "one")
    optimizer = plain.configure_optimizers()
    for batch in inputs():
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        optimizer.step()
    for name, cls, stage in (("plain", Plain, 2), ("decayed at 0", Decayed, 0), ("decayed", Decayed, 2)):
        module = cls("adagrad", "one")
        try:
            trainer(strategy=ZeROStrategy(stage=stage)).fit(module, as_loader(inputs()))
            gaps = [
                (a - b).abs().max().item() for a, b in zip(whole(plain).values(), whole(module).values(), strict=True)
            ]
            found[f"adagrad {name}"] = max(gaps)
        except ValueError as error:
            found[f"adagrad {name}"] = str(error)
