"""Training from a file of settings, by LightningCLI: model, data, trainer, callbacks and strategy are all in YAML.

    python examples/cli.py fit --config examples/config.yaml [--trainer.max_steps 100]

It needs ``pip install "jsonargparse[signatures]"``.
"""

import lightning as L
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_fasttrain.bench import GPTModule, batches, encode_text, read_text


class Text(L.LightningDataModule):
    """The source of Python's standard library, byte by byte.

    Args:
        context: tokens of a sequence.
        batch: sequences of a step.
        steps: batches of an epoch.
    """

    def __init__(self, context: int = 128, batch: int = 16, steps: int = 20) -> None:
        super().__init__()
        self.context, self.batch, self.steps = context, batch, steps

    def train_dataloader(self) -> DataLoader:
        tokens = encode_text(read_text(max_mib=2), tokens="bytes", vocabulary=256)
        return batches(tokens, context=self.context, batch=self.batch, steps=self.steps)


def main(args: list[str] | None = None) -> LightningCLI:
    return LightningCLI(GPTModule, Text, args=args, save_config_callback=None)


if __name__ == "__main__":
    trainer = main().trainer
    print(f"{trainer.global_step} steps on {trainer.world_size} ranks")
