"""A GPT on real text, its parameters where there is room for them: the ZeRO stage is chosen by prediction.

python examples/zero_auto.py                    # two processes on this machine
python examples/zero_auto.py --memory-gib 0.011 # pretend that there is hardly any: states wait on the host
examples/cluster/torchrun.sh examples/zero_auto.py
sbatch examples/cluster/train.sbatch

Killed at any moment and started again, it goes on from the newest complete checkpoint and ends with the same weights.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPTConfig, GPTModule, batches, encode_text, read_text

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=2, help="processes on each node")
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--stage", default="auto", help="auto, 0, 1, 2, 3, 2+offload, 3+offload or 3+nvme")
parser.add_argument("--memory-gib", type=float, help="of the smallest device; default: what is free there")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
parser.add_argument("--folder", default="checkpoints/zero_auto", help="where checkpoints go, seen by all nodes")
options = parser.parse_args()


class Net(GPTModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main():
    L.seed_everything(0, verbose=False)
    tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
    world_size = options.devices * options.nodes
    loader = batches(tokens, context=128, batch=8, steps=2 * options.steps * world_size)
    stage = int(options.stage) if options.stage.isdigit() else options.stage
    trainer = L.Trainer(
        accelerator="auto",
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=ft.ZeROStrategy(stage=stage, memory_gib=options.memory_gib),
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=False,
        enable_model_summary=False,
        callbacks=[
            ft.ActivationCheckpointing(),
            ft.ExactResume(),
            ft.Preemption(options.folder),
            ft.guards.HangWatch(timeout_s=300),
            ModelCheckpoint(options.folder, filename="{step}", every_n_train_steps=options.save_every, save_top_k=-1),
        ],
    )
    model = Net(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))
    trainer.fit(model, loader, ckpt_path=ft.newest_checkpoint(options.folder))
    if trainer.is_global_zero:
        weights = ft.strategy.consolidate(
            ft.newest_checkpoint(options.folder), Path(options.folder) / "weights.safetensors"
        )
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.5f} after {trainer.global_step} steps on {world_size} ranks; weights: {weights.path}")
    trainer.strategy.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
