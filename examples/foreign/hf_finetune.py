"""Fine-tuning of a small BERT of Hugging Face, whose batches are padded on the left."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Reviews(Dataset):
    """Token ids of different lengths, as a tokenizer would give them."""

    def __init__(self, count, vocab=4000):
        lengths = torch.randint(16, 128, (count,))
        self.rows = [torch.randint(5, vocab, (int(n),)) for n in lengths]
        self.labels = torch.randint(0, 2, (count,))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.labels[i]}


class CollateLeftPadded:
    def __init__(self, max_length=128, pad_token_id=0):
        self.max_length, self.pad_token_id = max_length, pad_token_id

    def __call__(self, examples):
        ids = torch.full((len(examples), self.max_length), self.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(examples):
            n = len(example["input_ids"])
            ids[row, -n:], mask[row, -n:] = example["input_ids"], 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([one["labels"] for one in examples])}


class SentimentClassifier(L.LightningModule):
    def __init__(self, learning_rate=2e-5, warmup_steps=50, weight_decay=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = BertForSequenceClassification(
            BertConfig(
                vocab_size=4000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512
            )
        )

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("train_loss", outputs.loss)
        return outputs.loss

    def validation_step(self, batch, batch_idx):
        outputs = self(**batch)
        accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
        self.log_dict({"val_loss": outputs.loss, "val_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self):
        no_decay = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())
        groups = [
            {
                "params": [p for n, p in named if not any(word in n for word in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in named if any(word in n for word in no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


if __name__ == "__main__":
    L.seed_everything(0)
    collate = CollateLeftPadded()
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", gradient_clip_val=1.0)
    trainer.fit(
        SentimentClassifier(),
        DataLoader(Reviews(2048), 16, shuffle=True, collate_fn=collate),
        DataLoader(Reviews(256), 32, collate_fn=collate),
    )
