"""Train a small Llama, adapt it to another text with LoRA, go back to the first, merge, and let it write.

    python examples/finetune_llama.py [--seconds 60]

The first text is the source of Python's standard library, the second the prose of its language reference. The loss is
in bits per byte on text that was held out. The adapter never touches the model: without it, the model is bitwise the
old one; merged into it, it is a plain Llama again, without any trace of adapters.
"""

import argparse
from pydoc_data import topics

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from lightning_fasttrain.bench.text import batches, encode_text, read_text

CONTEXT, BATCH = 128, 16
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
)


class Writer(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.model = lr, LlamaForCausalLM(CONFIG)

    def loss(self, batch):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def texts() -> dict[str, tuple]:
    """Name → tokens to train on, and held-out ones. Tokens are bytes."""
    found = {}
    for name, data in (("code", read_text(max_mib=4)), ("prose", "\n".join(topics.topics.values()).encode())):
        tokens = encode_text(data, "bytes", 256)
        cut = len(tokens) * 9 // 10
        found[name] = tokens[:cut], tokens[cut:]
    return found


@torch.no_grad()
def bits_per_byte(module: Writer, tokens, count: int) -> float:
    losses = [module.loss(batch) for batch in batches(tokens, CONTEXT, BATCH, count)]
    return torch.stack(losses).mean().item() / torch.log(torch.tensor(2.0)).item()


@torch.no_grad()
def sample(module: Writer, prompt: str, length: int = 160) -> str:
    torch.manual_seed(0)
    ids = torch.tensor([list(prompt.encode())])
    ids = module.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True, temperature=0.6, pad_token_id=0
    )
    return bytes(ids[0].tolist()).decode(errors="replace")


def fit(module: Writer, tokens, seconds: float, techniques=()) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        max_time={"seconds": seconds},
        logger=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
        callbacks=list(techniques),
    )
    trainer.fit(module, batches(tokens, CONTEXT, BATCH, 100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for the first training; the second has half of it")
    parser.add_argument("--held-out", type=int, default=8, help="batches of each text that a loss is measured on")
    options = parser.parse_args()
    console, held_out, rows = Console(), texts(), {}
    (code, _), (prose, _) = held_out["code"], held_out["prose"]

    def measure(what: str) -> None:
        rows[what] = [bits_per_byte(module, tokens, options.held_out) for _, tokens in held_out.values()]

    torch.manual_seed(0)
    module = Writer(lr=2e-3)
    fit(module, code, options.seconds)
    measure("trained on code")

    fit(module, prose, options.seconds / 2, [ft.LoRA(rank=16)])
    measure("with the adapter for prose")
    with ft.finetune.base_model(module):
        measure("without it again")
    assert rows["without it again"] == rows["trained on code"]

    console.print(sample(module, "The statement "), style="dim", markup=False)
    with ft.finetune.base_model(module):
        console.print(sample(module, "The statement "), style="dim", markup=False)

    ft.finetune.unload_adapters_(module)
    measure("merged")
    assert list(module.state_dict()) == list(Writer(lr=0).state_dict())

    table = Table("bits per byte", "code", "prose")
    for what, (on_code, on_prose) in rows.items():
        table.add_row(what, f"{on_code:.3f}", f"{on_prose:.3f}")
    console.print(table)
    difference = max(abs(a - b) for a, b in zip(rows["merged"], rows["with the adapter for prose"], strict=True))
    console.print(f"merged and unmerged differ by {difference:.1e} bits per byte")


if __name__ == "__main__":
    main()
