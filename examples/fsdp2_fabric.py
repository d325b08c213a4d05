"""A GPT on real text in Fabric, its blocks sharded over processes, with the windows of the batch weighed by tokens.

python examples/fsdp2_fabric.py                     # two processes on this machine
torchrun --nproc-per-node=2 examples/fsdp2_fabric.py
torchrun --nproc-per-node=4 examples/fsdp2_fabric.py --tensor-parallel=2    # each batch on two processes

Killed at any moment and started again, it goes on from the newest complete checkpoint and ends with the same weights.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=2, help="processes on each node")
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--replicas", type=int, default=1, help="groups that each hold a whole model, hybrid sharding")
parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that compute each batch together")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
parser.add_argument("--folder", default="checkpoints/fsdp2_fabric", help="where checkpoints go, seen by all nodes")
options = parser.parse_args()


def main():
    fabric = L.Fabric(
        accelerator="auto",
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=ft.strategy.FabricFSDP2Strategy(replicas=options.replicas, tensor_parallel=options.tensor_parallel),
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
    loader = batches(tokens, context=128, batch=8, steps=2 * options.steps * fabric.world_size)
    loader = ft.checkpoint.resumable(fabric.setup_dataloaders(loader, move_to_device=False))

    model = GPT(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))
    ft.apply(model, [ft.ActivationCheckpointing()])
    model = fabric.setup_module(model)  # finds the blocks and shards them
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(batch):
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    state = {"model": model, "optimizer": optimizer, "step": 0, "data": loader.state_dict()}
    newest = ft.newest_checkpoint(options.folder)
    if newest is not None:
        fabric.load(newest, state)
        loader.load_state_dict(state["data"])
    window = []
    for batch in ft.loaders.prefetch_to_device(loader, fabric.device):
        window.append(batch)
        if len(window) < 2:
            continue
        loss = ft.accumulate_window(
            step, window, backward=fabric.backward, no_sync=lambda: fabric.no_backward_sync(model)
        )
        window = []
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        ft.optim.release_gradients_(model.parameters())
        state["step"] += 1
        if state["step"] % options.save_every == 0:
            state["data"] = loader.state_dict()
            fabric.save(Path(options.folder) / f"step={state['step']}.ckpt", state)

    loss = fabric.all_reduce(loss, reduce_op="sum")  # each rank has its share of the mean over all tokens
    if fabric.is_global_zero:
        newest = ft.newest_checkpoint(options.folder)
        weights = ft.strategy.consolidate(newest, Path(options.folder) / "weights.safetensors")
        print(f"loss {loss:.5f} after {state['step']} steps on {fabric.world_size} ranks; weights: {weights.path}")
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
