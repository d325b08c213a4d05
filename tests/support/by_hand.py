"""What techniques that change training do, written out as one would without them: what they are compared with."""

import bitsandbytes as bnb
import lightning as L
import peft
import torch
from torch.nn import functional as F

import lightning_fasttrain as ft


class StochasticDepth(L.Callback):
    """Without the first block, which gets gradients of zero."""

    def setup(self, trainer, pl_module, stage):
        def skip(block, inputs, output):
            return (inputs[0] + 0 * output[0], None) if block.training else output

        self.hook = pl_module.blocks[0].register_forward_hook(skip)

    def teardown(self, trainer, pl_module, stage):
        self.hook.remove()


class MixtureOfDepths(L.Callback):
    """Half of the tokens run through the first block."""

    def setup(self, trainer, pl_module, stage):
        block = self.block = pl_module.blocks[0]
        plain = type(block).forward
        if not hasattr(block, "token_router"):
            block.token_router = torch.nn.Linear(8, 1, bias=False)
            torch.nn.init.normal_(block.token_router.weight, std=0.02)

        def forward(x, mask=None, **kwargs):
            # Equal tokens must have equal scores, which matrix products do not promise.
            scores, count = (x * block.token_router.weight[0]).sum(-1, keepdim=True), -(-x.shape[1] // 2)
            best = [sorted(range(x.shape[1]), key=row.flatten().neg().tolist().__getitem__)[:count] for row in scores]
            rows, places = torch.arange(len(x))[:, None], torch.tensor([sorted(row) for row in best])
            update = plain(block, x[rows, places], **kwargs)[0] - x[rows, places]
            routed = x.clone()
            routed[rows, places] = x[rows, places] + scores[rows, places] * update
            return routed, None

        block.forward = forward

    def teardown(self, trainer, pl_module, stage):
        del self.block.forward


class Upcycling(L.Callback):
    """Two of three copies of the second block's MLP for each token, expert by expert."""

    def setup(self, trainer, pl_module, stage):
        ft.architecture.upcycle_(pl_module, 3, every=1, balance=0.0, blocks="blocks.1")
        block = self.block = pl_module.blocks[1]

        def forward(x, *, scale=1.0, mask=None):
            tokens = block.norm(x).flatten(0, 1)
            with torch.autocast("cpu", enabled=False):
                best, chosen = (tokens.float() @ block.up.router.weight.T).softmax(dim=-1).topk(2)
            outputs = None
            for expert in range(3):
                rows = chosen == expert
                mine = tokens[rows.any(dim=1)]
                hidden = F.gelu(F.linear(mine, block.up.weight[expert], block.up.bias[expert]))
                output = F.linear(hidden, block.down.weight[expert], block.down.bias[expert])
                outputs = output.new_zeros(*chosen.shape, x.shape[-1]) if outputs is None else outputs
                outputs[rows] = output
            share = (best / best.sum(dim=-1, keepdim=True))[:, 1:].to(outputs.dtype)
            combined = outputs[:, 0] + share * (outputs[:, 1] - outputs[:, 0])
            return x + scale * block.dropout(combined.view_as(x)), None

        block.forward = forward

    def teardown(self, trainer, pl_module, stage):
        del self.block.forward


class Inject(L.Callback):
    """An adapter put in with PEFT's own function, at the only moment at which a plain callback can."""

    def config(self):
        raise NotImplementedError

    def setup(self, trainer, pl_module, stage):
        pl_module.is_loaded_in_8bit = True  # PEFT asks this before it looks at a layer's class
        if not hasattr(pl_module, "peft_config"):
            peft.inject_adapter_in_model(self.config(), pl_module)


class LoRA(Inject):
    def config(self):
        return peft.LoraConfig(r=2, lora_alpha=32, target_modules=["up", "down"])


class IA3(Inject):
    def config(self):
        return peft.IA3Config(target_modules=["up"], feedforward_modules=[])


class RoAd(Inject):
    def config(self):
        return peft.RoadConfig(group_size=4, target_modules=["down"])


class QuantizedBase(L.Callback):
    """In int8, as bitsandbytes' own 4-bit layers are wrong at this width on some CPUs."""

    def setup(self, trainer, pl_module, stage):
        for block in pl_module.blocks:
            for name in ("up", "down"):
                old = getattr(block, name)
                if isinstance(old, bnb.nn.Linear8bitLt):
                    continue
                with torch.random.fork_rng():  # its first weights are drawn for nothing
                    new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, has_fp16_weights=False)
                new.load_state_dict(old.state_dict())
                new.bias.requires_grad_(False)
                setattr(block, name, new.to("cpu"))


class QLoRA(L.Callback):
    def setup(self, trainer, pl_module, stage):
        if not hasattr(pl_module, "peft_config"):
            QuantizedBase().setup(trainer, pl_module, stage)
            LoRA().setup(trainer, pl_module, stage)


class FrozenEmbedding(L.Callback):
    def setup(self, trainer, pl_module, stage):
        pl_module.embed.requires_grad_(False)


class AdaptiveClipping(L.Callback):
    """Unit by unit, with a factor of 0.01; not the embeddings."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, weight in pl_module.named_parameters():
            if weight.grad is None or name.startswith("embed"):
                continue
            units = zip(weight, weight.grad, strict=True) if weight.ndim > 1 else [(weight, weight.grad)]
            for row, gradient in units:
                largest = 0.01 * max(float(row.detach().float().norm()), 1e-3)
                norm = float(gradient.float().norm())
                if norm > largest:
                    gradient.mul_(largest / norm)


class WeightClipping(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        for weight in pl_module.parameters():
            if weight.requires_grad:
                weight.data.clamp_(-1.5, 1.5)
