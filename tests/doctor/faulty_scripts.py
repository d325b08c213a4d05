"""Small scripts, each with one planted fault; the line to find carries a mark. One row for each fault."""

from dataclasses import dataclass, field

LOOP = """
import time
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64))
        self.head = nn.Linear(64, 10)
        {layers}

    def forward(self, x):
        return self.head(self.body(x))

{classes}

def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * 40, 64), torch.randint(10, (32 * 40,)))
    loader = DataLoader(data, batch_size=32)
    net, running, kept = Net(), 0.0, []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    {before}
    for step, (x, y) in enumerate(loader):
        {begin}
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y)
        {loss}
        {zero}
        loss.backward()
        optimizer.step()
        {end}

if __name__ == "__main__":
    main()
"""

TRAINER = """
import time
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.kept = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)
        {loss}
        return loss

    {methods}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        {scheduler}
        return optimizer

{classes}

def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * 40, 64), torch.randint(10, (32 * 40,)))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, enable_progress_bar=False, enable_model_summary=False,
        {settings}
    )
    trainer.fit(Net(), DataLoader(data, batch_size=32), {validation})

if __name__ == "__main__":
    main()
"""

ITEMS = """
class Items(Dataset):
    def __len__(self):
        return 32 * 40

    def __getitem__(self, index):
        x = torch.full((64,), float(index))
        {item}
        return x, index % 10
"""

COLLATE = """
def collate(samples):
    time.sleep(0.02)  # <-
    return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])
"""

SLOW_CALLBACK = """
class Slow(L.Callback):
    def on_train_batch_end(self, *args):  # <-
        time.sleep(0.01)
"""

VALIDATE = """
def validate(net, x):
    with torch.no_grad():
        return net(x)  # <-
"""


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, the host that it is planted in, and the code at each place of that host's script.

    Attributes:
        cured: code of the same places without the fault, where its cost can be measured by that.
    """

    name: str
    kind: str
    host: str = LOOP
    code: dict[str, str] = field(default_factory=dict)
    cured: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> str:
        return self._fill(self.code)

    @property
    def cured_script(self) -> str:
        return self._fill({**self.code, **self.cured})

    def _fill(self, own: dict[str, str]) -> str:
        places = dict.fromkeys(("layers", "classes", "before", "begin", "loss", "end"), "pass")
        places |= {"classes": "", "zero": "optimizer.zero_grad()", "methods": "", "scheduler": "pass"}
        places |= {"settings": "logger=False, enable_checkpointing=False", "validation": ""}
        script = self.host
        for place, code in {**places, **own}.items():
            script = script.replace(f"{{{place}}}", code)
        return script


def in_loop(name: str, kind: str, **code: str) -> Fault:
    return Fault(name, kind, LOOP, code, CURES.get(name, {}))


def in_trainer(name: str, kind: str, **code: str) -> Fault:
    return Fault(name, kind, TRAINER, code, CURES.get(name, {}))


def items(code: str) -> dict[str, str]:
    return {"classes": ITEMS.replace("{item}", code), "before": "loader = DataLoader(Items(), batch_size=32)"}


CURES = {
    "slow item": items("pass"),
    "list to tensor": items("pass"),
    "slow collate": {"before": "pass"},
    "print": {"end": "pass"},
    "metric": {"end": "pass"},
    "unfused": {"before": "optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)"},
    "checkpoints": {"settings": "logger=False, enable_checkpointing=False"},
    "callback": {"settings": "logger=False, enable_checkpointing=False"},
}

FAULTS = [
    in_loop("item", "host_sync", end="running += loss.item()  # <-"),
    in_loop("float", "host_sync", end="running += float(loss)  # <-"),
    in_loop("comparison", "host_sync", end="running = 1.0 if loss > 100 else 0.0  # <-"),
    in_loop("boolean index", "host_sync", loss="loss = loss + 0 * logits[logits > 0].mean()  # <-"),
    in_loop("nonzero", "host_sync", end="found = torch.nonzero(y == 3)  # <-"),
    in_loop("masked select", "host_sync", end="found = x.masked_select(x > 0)  # <-"),
    in_loop("print", "printing", end="print(logits, x, net.body[0].weight)  # <-"),
    in_loop("list", "tensor_from_list", loss="loss = loss * torch.tensor([1.0, 1.0]).mean()  # <-"),
    in_loop("slow item", "slow_item", **items("time.sleep(0.001)  # <-")),
    in_loop(
        "list to tensor", "slow_conversion", **items("x = torch.tensor([float(i) for i in range(2000)])[:64]  # <-")
    ),
    in_loop(
        "slow collate",
        "slow_collate",
        classes=COLLATE,
        before="loader = DataLoader(data, batch_size=32, collate_fn=collate)",
    ),
    in_loop("float64", "float64", loss="loss = loss + 0 * (logits.double() ** 2).mean()  # <-"),
    in_loop("unused layer", "no_gradient", layers="self.unused = nn.Linear(8, 8)  # <-"),
    in_loop(
        "forgotten head",
        "not_in_optimizer",
        layers="self.head = nn.Linear(64, 10)",
        before="optimizer = torch.optim.AdamW(net.body.parameters(), lr=1e-3, fused=True)",
    ),
    in_loop("no zero_grad", "zero_grad_missing", zero="pass"),
    in_loop("eval", "left_in_eval", before="net.eval()  # <-"),
    in_loop("dropout", "dropout_in_validation", classes=VALIDATE, end="validate(net, x)"),
    in_loop(
        "tiny batch norm",
        "tiny_batch_norm",
        layers="self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))",
        before="loader = DataLoader(data, batch_size=2)",
    ),
    in_loop(
        "unfused",
        "unfused_optimizer",
        layers="self.body = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])",
        before="optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)  # <-",
    ),
    in_loop("kept losses", "growing_memory", end="kept.append(loss)  # <-"),
    in_loop("sum with graph", "growing_memory", end="running += loss  # <-"),
    in_loop(
        "scheduler first",
        "scheduler_first",
        before="scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)",
        begin="scheduler.step()  # <-",
    ),
    in_loop(
        "scheduler by batch",
        "scheduler_unit",
        before="scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)",
        end="scheduler.step()  # <-",
    ),
    in_loop(
        "metric",
        "metric_in_step",
        before="auroc = torchmetrics.AUROC('multiclass', num_classes=10)",
        end="auroc(logits.softmax(-1).repeat(400, 1), y.repeat(400))  # <-",
    ),
    in_loop(
        "logits",
        "logits",
        before="vocabulary = nn.Linear(10, 16384)",
        begin="x, y = (x.repeat(16, 1), y.repeat(16)) if step == 2 else (x, y)",
        loss="loss = loss + 0 * nn.functional.cross_entropy(vocabulary(logits), y)  # <-",
    ),
    in_loop(
        "attention by hand",
        "attention",
        begin="q = torch.randn(32 if step == 2 else 1, 512, 8, requires_grad=True)",
        loss="loss = loss + 0 * torch.softmax(q @ q.mT, -1).mean()  # <-",
    ),
    in_loop(
        "attention with dropout on a CPU",
        "attention",
        begin="q = torch.randn(32 if step == 2 else 1, 1, 512, 8, requires_grad=True)",
        loss="loss = loss + 0 * nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).mean()  # <-",
    ),
    in_loop("garbage collection", "garbage_collection", before="import gc", end="gc.collect()  # <-"),
    in_trainer("item in training_step", "host_sync", loss="self.value = loss.item()  # <-"),
    in_trainer("losses on the module", "growing_memory", loss="self.kept.append(loss)  # <-"),
    in_trainer(
        "logging",
        "logging_each_step",
        settings="logger=CSVLogger('logs'), enable_checkpointing=False,\n        log_every_n_steps=1,  # <-",
    ),
    in_trainer(
        "checkpoints",
        "frequent_checkpoint",
        settings="logger=False, callbacks=[ModelCheckpoint('saved', every_n_train_steps=1)],  # <-",
    ),
    in_trainer(
        "validations",
        "frequent_validation",
        methods="def validation_step(self, batch, batch_idx):\n        self.net(batch[0])",
        settings="logger=False, enable_checkpointing=False, num_sanity_val_steps=0, val_check_interval=2,  # <-",
        validation="DataLoader(data, batch_size=32)",
    ),
    in_trainer(
        "callback",
        "slow_callback",
        classes=SLOW_CALLBACK,
        settings="logger=False, enable_checkpointing=False, callbacks=[Slow()]",
    ),
    in_trainer(
        "schedule by epoch",
        "scheduler_unit",
        scheduler="return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=80)]  # <-",
    ),
]
