"""Direct preference optimisation in one screen: the frozen model under the adapter is the reference, without a copy.

    python examples/dpo.py [--steps 40]

A small Llama has learnt Python's source, byte by byte. Now it is to prefer what really follows over the same bytes in
another order. Preferences are held against those of the model without its adapter, bit for bit the trained one.
"""

import argparse

import lightning as L
import torch
from finetune_llama import CONFIG, texts
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import lightning_fasttrain as ft
from lightning_fasttrain.bench.text import batches

PROMPT, ANSWER, PAIRS = 48, 16, 8


class DPO(L.LightningModule):
    """-log σ(β · (how much more than the reference it prefers the chosen answer, less the same of the rejected)).

    Args:
        model: a language model with an adapter, once the run has begun.
        beta: how strongly it is held to the reference.

    Source:
        Rafailov et al. 2023, https://arxiv.org/abs/2305.18290
    """

    def __init__(self, model: torch.nn.Module, beta: float = 0.1) -> None:
        super().__init__()
        self.model, self.beta = model, beta

    def log_probability(self, tokens: Tensor) -> Tensor:
        """Of each answer [B], given its prompt, from tokens [B, PROMPT + ANSWER]."""
        logits = self.model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
        return -F.cross_entropy(logits.transpose(1, 2), tokens[:, PROMPT:], reduction="none").sum(1)

    def margins(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """By how much more than the reference it prefers the chosen answer, for each pair [B]."""
        both = torch.cat([chosen, rejected])
        ours = self.log_probability(both)
        with torch.no_grad(), ft.finetune.base_model(self.model):
            reference = self.log_probability(both)
        preferred, other = (ours - reference).chunk(2)
        return preferred - other

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        margins = self.margins(*batch)
        self.log("accuracy", (margins > 0).float().mean())
        return -F.logsigmoid(self.beta * margins).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def pairs(tokens, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of (chosen, rejected): a prompt with what follows it, and with the same bytes in another order."""
    found = []
    for chosen, _ in batches(tokens, PROMPT + ANSWER, PAIRS, steps):
        answer = chosen[:, PROMPT:]
        found.append((chosen, torch.cat([chosen[:, :PROMPT], answer[:, torch.randperm(ANSWER)]], dim=1)))
    return found


def pretrain(model: torch.nn.Module, tokens, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in batches(tokens, PROMPT + ANSWER, 16, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    train, held_out = texts()["code"]
    module = DPO(LlamaForCausalLM(CONFIG))
    pretrain(module.model, train, options.steps)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ft.LoRA(rank=8)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(pairs(train, options.steps), batch_size=None))
    with torch.no_grad():
        margins = torch.cat([module.margins(*batch) for batch in pairs(held_out, 8)])
    share, mean = (margins > 0).float().mean(), margins.mean()
    print(
        f"prefers what follows, more than the reference does: {share:.0%} of {len(margins)} pairs, by {mean:.2f} nats"
    )


if __name__ == "__main__":
    main()
