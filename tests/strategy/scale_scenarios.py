"""Run by two processes (see test_scale.py): memory of a rank, and sharded checkpoints in object storage."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import fsspec
import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import register_fsdp_forward_method

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPTConfig, GPTModule
from lightning_fasttrain.checkpoint import newest_remote_checkpoint
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import as_loader
from tests.support.s3_server import BUCKET, forget_connections

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from scale_memory import InPlaceCollectives

URL = f"s3://{BUCKET}/run"
WAYS = {  # label → (precision, settings of the strategy, micro-batches)
    "FSDP2": ("32-true", {}, 1),
    "bf16-mixed": ("bf16-mixed", {}, 1),
    "two micro-batches": ("32-true", {}, 2),
    "gathered": ("32-true", {"reshard_after_forward": False}, 1),
    "tensor parallel": ("32-true", {"tensor_parallel": 2}, 1),
}


def gpt():
    # The number of rows of its embedding is odd, so that the last rank has less.
    return GPTModule(GPTConfig(vocabulary=255, context=32, layers=2, heads=4, width=64))


def batch(rows=4):
    g = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(255, (2, rows, 32), generator=g))


def peak(precision, settings, micro_batches):
    """Return the smallest peak of six steps in a Fabric loop, after two others, in bytes.

    Gloo's threads now and then hold the gradients of a block after they are reduced, which adds to the peak of a step.
    """
    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=ft.strategy.FabricFSDP2Strategy(**settings), precision=precision
    )
    fabric.launch()
    module, data = gpt(), batch()
    model = fabric.setup_module(module)
    register_fsdp_forward_method(module, "loss")
    model.mark_forward_method("loss")
    optimizer = fabric.setup_optimizers(module.configure_optimizers())

    def loss_of(part):
        # Fabric does not enable it for marked methods of a model that it has not wrapped.
        with fabric.autocast():
            return model.loss(part)

    def step():
        if micro_batches == 1:
            loss = loss_of(data)
            optimizer.zero_grad()
            fabric.backward(loss)
        else:
            optimizer.zero_grad()
            ft.accumulate_gradients(
                loss_of,
                data,
                micro_batches,
                backward=fabric.backward,
                no_sync=lambda: fabric.no_backward_sync(model),
                count="samples",
                check=False,
                trim_padding=False,
            )
        optimizer.step()

    step()
    step()
    peaks = []
    for _ in range(6):
        gc.collect()
        with InPlaceCollectives(), PeakMemory("cpu", module, optimizer.optimizer, data) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return min(peaks)


def fit(ckpt_path=None):
    """Return the weights after four steps, of which the second and the last are saved."""
    L.seed_everything(0, verbose=False)
    net = gpt()
    saves = ModelCheckpoint(URL, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ft.FSDP2Strategy(),
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[ft.ExactResume(), ft.AtomicCheckpoints(), saves],
    )
    trainer.fit(net, as_loader([batch(2) for _ in range(4)]), ckpt_path=ckpt_path)
    return [parameter.full_tensor().detach() for parameter in net.parameters()]


def object_storage():
    """Return what a run that resumes from object storage found, and a save whose upload fails on one rank."""
    whole = fit()
    found = {"newest": newest_remote_checkpoint(URL)}
    resumed = fit(f"{URL}/step=2.ckpt")
    found["equal"] = all(map(torch.equal, resumed, whole))
    if dist.get_rank() == 1:
        os.environ["AWS_SECRET_ACCESS_KEY"] = "expired"
    forget_connections()
    try:
        ft.strategy.save_sharded(f"s3://{BUCKET}/failed", gpt().state_dict())
    except OSError as error:
        found["error"] = str(error)
    if dist.get_rank() == 0:
        found["after a failure"] = fsspec.filesystem("s3").find(f"{BUCKET}/failed")
    return found


def main(folder):
    folder = Path(folder)
    found = {label: peak(*way) for label, way in WAYS.items()}
    found["storage"] = object_storage()
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    time.sleep(0.5)
    os._exit(0)  # gloo's destructor can hang


if __name__ == "__main__":
    main(sys.argv[1])
