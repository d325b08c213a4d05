"""What Windows lacks is needed by nothing: simulated, with Python's modules and names of POSIX taken away."""

import subprocess
import sys

SIMULATED = """
import os, signal, sys
from pathlib import Path
import lightning as L, torch, torchmetrics, multiprocessing.sharedctypes, tempfile, subprocess, asyncio
import lightning.pytorch.loggers, torch._inductor.config, torch.utils._sympy.functions, s3fs
import torch.distributed.checkpoint, torch.distributed.elastic.multiprocessing

for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for name in ("killpg", "fork", "sched_getaffinity", "sysconf", "getuid"):
    vars(os).pop(name, None)
sys.platform = "win32"
whole_open = os.open
def open_file(path, *args, **kwargs):
    if Path(path).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return whole_open(path, *args, **kwargs)
os.open = open_file

import lightning_fasttrain as ft
from lightning_fasttrain.core.package import PUBLIC, ROOMS, find_public
"""
NAMES = """
for name in PUBLIC:
    find_public(name)
for room in map(find_public, ROOMS):
    for name in dir(room):
        getattr(room, name)
assert "lightning_fasttrain.core.atomic_write" in sys.modules
"""
TRAIN = """
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(epochs, ckpt_path=None):
    torch.manual_seed(0)
    net, rows = Net(), torch.randn(8, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 4, shuffle=True)
    techniques = [ft.MicroBatching(2), ft.AtomicCheckpoints(), ft.ExactResume(), ft.Preemption()]
    saving = L.pytorch.callbacks.ModelCheckpoint(Path.cwd() / "saved", save_last=True)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[*techniques, saving]
    )
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    return net, trainer.global_step

train(1)
saved = ft.newest_checkpoint(Path.cwd() / "saved")
resumed, steps = train(2, saved)
assert steps == 4
(Path.cwd() / "saved").rename("first")
uninterrupted, _ = train(2)
for one, other in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
    assert torch.equal(one, other)
"""


def test_every_public_name_is_imported_and_a_run_is_saved_and_resumed(tmp_path):
    command = [sys.executable, "-c", SIMULATED + NAMES + TRAIN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
