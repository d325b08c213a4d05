"""A vocabulary of superwords beside one of words: bytes per token, and bytes per second of training.

    python examples/superbpe.py [--vocabulary 4096] [--share 0.75] [--mib 6] [--steps 200] [--out RESULTS.json]

SuperBPE (Liu et al. 2025, https://arxiv.org/abs/2503.13423) trains a byte-pair encoding in two stages: within words
up to a share of the vocabulary, then across spaces, so that frequent sequences of words become tokens. The library
`tokenizers` cannot continue from given merges (the paper's authors use a fork of it). But a second training whose
letters are the tokens of the first one does the same: its merges, spelled out, continue those of the first stage.
A superword has at most four tokens of the first stage. The text is the Python source of the standard library, of which
the last tenth is held out; a GPT trains on both encodings, with the same number of tokens per step.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers

import lightning_fasttrain as ft
from lightning_fasttrain.bench import batches, read_text
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

LONGEST = 4  # tokens of the first stage in a superword
LETTERS = 0xF0000  # a plane of Unicode for private use: one letter for each token of the first stage
CONTEXT, BATCH = 128, 8


def train_words(lines, vocabulary):
    """A byte-level BPE whose tokens stay within words."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    return bpe._tokenizer


def continue_across_spaces(words, lines, vocabulary):
    """The same merges, and then more, which may cross the ends of words, up to this many tokens in all."""
    spelled = {token_id: token for token, token_id in words.get_vocab().items()}
    stage_two = Tokenizer(models.BPE())
    letters = [chr(LETTERS + token_id) for token_id in sorted(spelled)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        max_token_length=LONGEST + 1,  # which a token that is merged further has to stay below
    )
    encoded = words.encode_batch(lines)
    as_letters = ("".join(chr(LETTERS + token_id) for token_id in line.ids) for line in encoded)
    stage_two.train_from_iterator(as_letters, trainer)

    def spell(token):
        return "".join(spelled[ord(letter) - LETTERS] for letter in token)

    vocab, merges = read_merges(words)
    for first, second in read_merges(stage_two)[1]:
        merges.append((spell(first), spell(second)))
        # Two ways of joining letters may spell the same token.
        vocab.setdefault(spell(first) + spell(second), len(vocab))
    superwords = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    superwords.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    superwords.decoder = decoders.ByteLevel()
    return superwords


def read_merges(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]


def encode(tokenizer, lines):
    ids = [np.asarray(line.ids, dtype=np.int32) for line in tokenizer.encode_batch(lines)]
    return np.concatenate(ids)


class Run:
    """A GPT that trains on one encoding."""

    def __init__(self, name, tokenizer, train_lines, held_lines, steps):
        torch.manual_seed(0)
        self.name, self.tokens = name, tokenizer.get_vocab_size()
        self.net = GPTModule(GPTConfig(self.tokens, CONTEXT, layers=2, heads=4, width=128))
        self.optimizer = ft.build_optimizer(self.net, "adamw", lr=1e-3)
        self.batches = batches(encode(tokenizer, train_lines), CONTEXT, BATCH, steps)
        self.held = encode(tokenizer, held_lines)
        self.bytes_per_token = sum(len(line.encode()) for line in held_lines) / len(self.held)
        self.seconds = []

    def step(self, batch):
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.net.loss(batch).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)

    @torch.no_grad()
    def summary(self):
        losses = [float(self.net.loss(batch)) for batch in batches(self.held, CONTEXT, BATCH, 20, seed=1)]
        tokens_per_s = BATCH * CONTEXT / statistics.median(self.seconds)
        return {
            "encoding": self.name,
            "tokens": self.tokens,
            "bytes_per_token": self.bytes_per_token,
            "tokens_per_s": tokens_per_s,
            "bytes_per_s": tokens_per_s * self.bytes_per_token,
            "bits_per_byte": statistics.mean(losses) / math.log(2) / self.bytes_per_token,
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.75, help="of the vocabulary that the first stage trains")
    parser.add_argument("--mib", type=float, default=6.0, help="MiB of text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    lines = read_text(max_mib=options.mib).decode("utf-8", errors="replace").splitlines(keepends=True)
    train_lines, held_lines = lines[: len(lines) * 9 // 10], lines[len(lines) * 9 // 10 :]
    words = train_words(train_lines, int(options.vocabulary * options.share))
    tokenizers = {
        "BPE": train_words(train_lines, options.vocabulary),
        "SuperBPE": continue_across_spaces(words, train_lines, options.vocabulary),
    }
    runs = []
    for name, tokenizer in tokenizers.items():
        assert all(tokenizer.decode(tokenizer.encode(line).ids) == line for line in held_lines[:1000])
        runs.append(Run(name, tokenizer, train_lines, held_lines, options.steps))
    # In turn, so that what else the machine does meets both.
    for pair in zip(*(run.batches for run in runs), strict=True):
        for run, batch in zip(runs, pair, strict=True):
            run.step(batch)
    rows = [run.summary() for run in runs]
    for row in rows:
        print(
            f"{row['encoding']:<10}{row['tokens']:>6,} tokens{row['bytes_per_token']:>7.2f} bytes/token"
            f"{row['tokens_per_s']:>8,.0f} tokens/s{row['bytes_per_s']:>9,.0f} bytes/s"
            f"{row['bits_per_byte']:>7.3f} bits/byte held out"
        )
    if options.out is not None:
        command = without_paths(shlex.join(["python", "examples/superbpe.py", *sys.argv[1:]]))
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"hardware": hardware(), "versions": versions(), "date": when, "command": command}
        write_atomic(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
