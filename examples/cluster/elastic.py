"""A GPT on real text whose workers may come and go: each step has the same 12 samples on any number of them.

torchrun --nproc-per-node=2 examples/cluster/elastic.py         # kill it, and start it again with another number
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=99 --rdzv-backend=c10d \\
    --rdzv-endpoint=node0:29400 examples/cluster/elastic.py     # on each of up to four nodes, at any time
sbatch examples/cluster/elastic.sbatch

A worker that is lost, or hangs for 5 minutes, ends the others; the next start continues from the newest complete
checkpoint, with as many workers as there are then. The losses are those of the uninterrupted run, up to rounding.
"""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPTConfig, GPTModule, encode_text, read_text

CONTEXT = 128

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=12, help="of a step, over all workers")
parser.add_argument("--most", type=int, default=4, help="samples that fit in a worker's memory at once")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
parser.add_argument("--hang-after", type=float, default=300, help="seconds without a sign of life that are a hang")
parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
parser.add_argument("--folder", default="checkpoints/elastic", help="checkpoints, seen by all nodes; s3://… too")


class Text(torch.utils.data.Dataset):
    """Token ids (CONTEXT,) and the ids that follow each of them."""

    def __init__(self, windows):
        self.tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)[: windows * CONTEXT + 1]

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index):
        window = torch.from_numpy(self.tokens[index * CONTEXT :][: CONTEXT + 1].astype("int64"))
        return window[:-1], window[1:]


class Net(GPTModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def main(arguments=None, callbacks=(), layers=4, width=64):
    options = parser.parse_args(arguments)
    L.seed_everything(0, verbose=False)
    workers, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    strategy = ft.FSDP2Strategy() if options.sharded else "auto" if workers == 1 else DDPStrategy()
    trainer = L.Trainer(
        accelerator="auto",
        devices=here,
        num_nodes=workers // here,
        strategy=strategy,
        max_steps=options.steps,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ft.loaders.GlobalBatch(options.samples),
            ft.ExactResume(),
            ft.AtomicCheckpoints(),
            ft.guards.HangWatch(timeout_s=options.hang_after, first_timeout_s=2 * options.hang_after),
            ModelCheckpoint(options.folder, filename="{step}", every_n_train_steps=options.save_every, save_top_k=-1),
            *callbacks,
        ],
    )
    model = Net(GPTConfig(vocabulary=256, context=CONTEXT, layers=layers, heads=4, width=width))
    # The last step of the first epoch is not full.
    loader = DataLoader(Text(options.samples * options.steps * 2 // 3 + 1), batch_size=options.most, shuffle=True)
    newest = ft.checkpoint.newest_remote_checkpoint if "://" in options.folder else ft.newest_checkpoint
    trainer.fit(model, loader, ckpt_path=newest(options.folder))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.5f} after {trainer.global_step} steps, the last of them on {workers} workers", flush=True)
    if workers > 1:
        trainer.strategy.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
