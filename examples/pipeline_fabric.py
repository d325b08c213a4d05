"""A GPT on real text whose blocks are divided over processes: pipeline parallelism by torch, started by Fabric.

python examples/pipeline_fabric.py                              # two processes on this machine, 1F1B
python examples/pipeline_fabric.py --schedule interleaved       # two stages on each process
torchrun --nproc-per-node=4 examples/pipeline_fabric.py --devices 4

The weights are those of one process: `--out` writes them, in the names of the complete model.
"""

import argparse

import lightning as L
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=2, help="processes, at least two")
parser.add_argument("--schedule", choices=["1f1b", "interleaved"], default="1f1b")
parser.add_argument("--micro-batches", type=int, default=4, help="of each batch; a multiple of the processes")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", help="a file of safetensors for the weights")
options = parser.parse_args()


class Stage(nn.Module):
    """Successive blocks of a GPT; the first stage has its embeddings too, and the last one its norm and head.

    Its parameters have the names that they have in the complete model.
    """

    def __init__(self, model, index, stages):
        super().__init__()
        is_first, is_last = index == 0, index == stages - 1
        count = len(model.blocks)
        mine = range(index * count // stages, (index + 1) * count // stages)
        self.tokens, self.positions = (model.tokens, model.positions) if is_first else (None, None)
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in mine})
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_tied_gradient(stages, ends):
    """Sum the gradient of the embedding, in the first stage, and of the head, in the last one, which are one weight."""
    for stage in stages:
        tied = stage.tokens if stage.tokens is not None else stage.head
        if tied is not None:
            dist.all_reduce(tied.weight.grad, group=ends)


def clip_gradients(stages, max_norm):
    """Clip by the norm over all stages, in which the tied weight counts once."""
    squares = []
    for stage in stages:
        counted = [p for name, p in stage.named_parameters() if name != "head.weight"]
        squares += [p.grad.square().sum() for p in counted]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for stage in stages:
        torch._foreach_mul_([p.grad for p in stage.parameters()], factor)


def main():
    fabric = L.Fabric(accelerator="auto", devices=options.devices, strategy="ddp")
    fabric.launch()
    rank, world = fabric.global_rank, fabric.world_size
    fabric.seed_everything(0, verbose=False)
    # Each process makes the same model, and keeps its stages.
    model = GPT(GPTConfig(vocabulary=256, context=128, layers=4, heads=4, width=64))
    each = 2 if options.schedule == "interleaved" else 1
    if world < 2 or each * world > len(model.blocks):
        raise SystemExit(f"{each} stages on each of {world} processes: expected 2 to {len(model.blocks)} stages in all")
    indices = range(rank, each * world, world)
    stages = [Stage(model, index, each * world).to(fabric.device) for index in indices]
    del model
    parts = []
    for index, stage in zip(indices, stages, strict=True):
        parts.append(PipelineStage(stage, index, each * world, fabric.device))
    if each == 1:
        schedule = Schedule1F1B(parts[0], options.micro_batches, loss_of)
    else:
        schedule = ScheduleInterleaved1F1B(parts, options.micro_batches, loss_of)
    ends = dist.new_group([0, world - 1])
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-3)

    tokens = encode_text(read_text(), tokens="bytes", vocabulary=256)
    loader = batches(tokens, context=128, batch=16, steps=options.steps)  # the same on all processes
    for inputs, targets in ft.loaders.prefetch_to_device(loader, fabric.device):
        losses = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == world - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        sum_tied_gradient(stages, ends)
        clip_gradients(stages, max_norm=1.0)
        optimizer.step()

    loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=fabric.device)
    dist.broadcast(loss, src=world - 1)
    mine = {name: value.cpu() for stage in stages for name, value in stage.state_dict().items()}
    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    if fabric.is_global_zero:
        weights = {name: value for stage in gathered for name, value in stage.items()}
        if options.out:
            save_file(weights, options.out)
        print(f"loss {loss:.5f} after {options.steps} steps of {each * world} stages on {world} processes")
    fabric.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
